"""One of two ranks of vLLM offline, in a process forked from one that has imported vLLM."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from vllm import LLM, SamplingParams


def run(job: dict[str, Any], variables: dict[str, str], folder: str) -> None:
    """Answers to out.json, whatever is printed to log.txt, both in `folder`."""
    os.environ.update(variables)
    log = os.open(f"{folder}/log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    if job.get("loads_only"):
        _stop_once_loaded(Path(folder, "experts.safetensors"))
    spoil = {"weights": _weights_elsewhere, "router": _unseen_router}.get(job.get("fault", ""))
    if spoil:
        spoil()
    engine = LLM(
        model=job["model"], enable_expert_parallel=True, enforce_eager=True, max_model_len=2048, max_num_seqs=16,
        max_num_batched_tokens=128, gpu_memory_utilization=0.1, block_size=32, **_attention(job["model"]),
        **job["options"],
    )  # fmt: skip
    answers = generate(engine, job["prompts"], job["together"])
    Path(folder, "out.json").write_text(json.dumps(answers))
    _counters_are_published(int(variables.get("RANK", variables.get("VLLM_DP_RANK", 0))))
    os._exit(0)  # gloo's threads need not be waited for


def _attention(model: str) -> dict[str, str]:
    """Latent attention as on every CPU: vLLM's own for AMX, which it would choose where there is AMX, is for bf16."""
    config = Path(model, "config.json")
    latent = config.exists() and json.loads(config.read_text()).get("kv_lora_rank")
    return {"attention_backend": "CPU_MLA"} if latent else {}


def _counters_are_published(rank: int) -> None:
    """Wait until this rank, which publishes every second, has published twice: the second tells of all that ran."""
    path = Path(os.environ["SEMMOE_CONTROL"], f"activity-rank-{rank:05d}.json")
    for _ in range(2):
        before, until = path.stat().st_mtime_ns if path.exists() else 0, time.monotonic() + 60
        while (not path.exists() or path.stat().st_mtime_ns == before) and time.monotonic() < until:
            time.sleep(0.1)


def _stop_once_loaded(path: Path) -> None:
    """Save the experts' tensors as vLLM has loaded them, before a kernel lays them out anew, and end.

    No kernel of a GPU is chosen either: layouts are loaded here that no CPU computes.
    """
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, fp8, mxfp4
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_wna16 as packed,
    )
    from vllm.model_executor.model_loader import base_loader

    kernels = {fp8: (Fp8MoeBackend.TRITON, None), mxfp4: (mxfp4.Mxfp4MoeBackend.TRITON, None)}
    kernels |= {module: (module.WNA16MoEBackend.MARLIN, None) for module in (auto_awq, auto_gptq, packed)}
    for module, chosen in kernels.items():
        for name in [name for name in vars(module) if name.startswith("select_") and name.endswith("_moe_backend")]:
            setattr(module, name, lambda *args, _chosen=chosen, **named: _chosen)

    def save(model: Any, *args: Any) -> None:
        found = {name: tensor for name, tensor in model.named_parameters() if ".experts." in name}
        save_file({name: tensor.data.contiguous() for name, tensor in found.items()}, path)
        os._exit(0)

    base_loader.process_weights_after_loading = save


def _weights_elsewhere() -> None:
    """By the plan, a tensor of expert 0 goes to the slots of expert 1, whose own is lost."""
    from semmoe.engines.vllm.placement import PlacedExperts

    load = PlacedExperts.load

    def spoilt(self, original, experts, **call):
        if self.by_engine or call["shard_id"] != "w2" or call["expert_id"] > 1:
            return load(self, original, experts, **call)
        return load(self, original, experts, **call | {"expert_id": 1}) if call["expert_id"] == 0 else True

    PlacedExperts.load = spoilt


def _unseen_router() -> None:
    """The first layer's router is not hooked, which nothing reports."""
    from semmoe.engines.vllm import rank

    hook = rank.hook_routers
    rank.hook_routers = lambda blocks, routed: hook(blocks[1:], routed[1:])


def generate(engine: LLM, prompts: list[list[int]], together: bool) -> list[list[int]]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    sampling = SamplingParams(temperature=0, max_tokens=8)
    answers = []
    for batch in [given] if together else [[one] for one in given]:
        answers += engine.generate(batch, sampling, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]
