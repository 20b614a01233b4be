"""vLLM's offline engine on two ranks, with a plan and without: what it generates, and what semmoe counts."""

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rank import run
from safetensors.torch import load_file
from serving import free_port

from semmoe.core import RoutingTrace
from semmoe.engines.transformers import recorder
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.engines.transformers.model import load_model
from semmoe.engines.vllm.launch import CPU_VARIABLES
from semmoe.plan import save_plan
from semmoe.settings import CoclusterSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology
from semmoe.traces.dataset import digest
from semmoe.traces.trace import TraceHeader, TraceWriter, open_trace

FORKED = multiprocessing.get_context("forkserver")
# vLLM is imported once; `rank` cannot be, whose folder the process that ranks are forked from does not know.
FORKED.set_forkserver_preload(["vllm.entrypoints.llm", "vllm.v1.engine.llm_engine", "vllm.v1.worker.cpu_worker"])
EASY = CoclusterSettings(starts=1, steps=10)
# Widths that vLLM's attention on a CPU takes, and its latent attention.
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
LATENT_HEADS = {
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
UNSEEN = ("llama4_text",)  # types whose routing transformers does not show
TOPOLOGIES = {"tp2": Topology(ep_size=2), "dp2": Topology(ep_size=2, dp_size=2)}


def make_plan(model: str, texts: list[list[int]], folder: Path, attention: str, copies: int) -> str:
    """A plan of a small model, from a few of `texts`."""
    unseen = json.loads(Path(model, "config.json").read_text())["model_type"] in UNSEEN
    make_trace = random_trace if unseen else recorded_trace
    trace = make_trace(model, texts[32:64], folder / f"trace-{attention}-{copies}")
    plan = solve(trace, TOPOLOGIES[attention], SolveSettings(redundant_experts=copies, cocluster=EASY))
    path = folder / f"plan-{attention}-{copies}"
    save_plan(plan, path)
    return str(path)


def recorded_trace(model: str, texts: list[list[int]], folder: Path) -> RoutingTrace:
    """The model's own routing, by transformers."""
    return recorder.record(load_model(model), model, texts, folder)


def random_trace(model: str, texts: list[list[int]], folder: Path) -> RoutingTrace:
    """Random experts for each token id and layer: such a plan moves experts too, and changes no token."""
    fingerprint = fingerprint_of(model)
    shape = (fingerprint.vocab_size, fingerprint.num_layers, fingerprint.num_experts)
    experts = np.random.default_rng(0).random(shape).argsort(axis=2)[..., : fingerprint.top_k]
    header = TraceHeader(fingerprint=fingerprint, dataset_hash=digest(texts), settings={})
    with TraceWriter(folder, header) as writer:
        for text in texts:
            writer.append_run(text, np.array(text), experts[text])
    return open_trace(folder)


def local_share(folder: Path) -> float:
    """The share of local pairs that the ranks whose counters are in `folder` have counted."""
    samples = [s for path in folder.glob("activity-rank-*.json") for s in json.loads(path.read_text())["samples"]]
    pairs = [sample for sample in samples if sample["name"] == "pairs"]
    return sum(s["value"] for s in pairs if s["labels"]["local"] == "true") / sum(s["value"] for s in pairs)


def on_two_ranks(
    model: str, prompts: list[list[int]], folder: Path, attention: str = "tp2", variables: dict[str, str] | None = None,
    together: bool = True, fault: str = "", **options,
) -> list[list[int]]:  # fmt: skip
    """Tokens of every prompt; fault: what `rank` spoils.

    attention: tp2, where both ranks must answer alike, or dp2, where each has every other prompt. Counters go to
    `folder`.
    """
    job = {"model": model, "together": together, "fault": fault}
    options = {"dtype": "float32"} | options
    shared = {"SEMMOE_CONTROL": str(folder)} | (variables or {})
    jobs = [job | {"prompts": prompts if attention == "tp2" else prompts[rank::2]} for rank in (0, 1)]
    folders = _run(jobs, folder, attention, shared, options)
    outs = [json.loads((path / "out.json").read_text()) for path in folders]
    assert attention == "dp2" or outs[0] == outs[1]
    return [outs[i % 2][i // 2 if attention == "dp2" else i] for i in range(len(prompts))]


def loaded_experts(
    model: str, folder: Path, attention: str = "tp2", variables: dict[str, str] | None = None, **options
) -> dict[str, torch.Tensor]:
    """Every tensor of the experts as both ranks have loaded it, (P, ...): the slots of rank 0, then those of rank 1."""
    folders = _run([{"model": model, "loads_only": True}] * 2, folder, attention, variables or {}, options)
    first, second = (load_file(path / "experts.safetensors") for path in folders)
    return {name: torch.cat([first[name], second[name]]) for name in first}


def _run(
    jobs: list[dict[str, Any]], folder: Path, attention: str, variables: dict[str, str], options: dict[str, Any]
) -> list[Path]:
    """A job on each of two ranks, to the end; returns the folder of each."""
    port, ranks, folders = str(free_port()), [], [folder / f"rank{rank}" for rank in (0, 1)]
    for rank, job in enumerate(jobs):
        folders[rank].mkdir(parents=True)
        own, given = _of_rank(attention, rank, port)
        told = job | {"options": options | given}
        all_variables = CPU_VARIABLES | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | variables | own
        ranks.append(FORKED.Process(target=run, args=(told, all_variables, str(folders[rank]))))
        ranks[-1].start()
    _wait(ranks, folders)
    return folders


def _wait(ranks: list[Any], folders: list[Path]) -> None:
    """Both must end well; one that fails ends the other."""
    until = time.monotonic() + 500
    while any(rank.is_alive() for rank in ranks) and time.monotonic() < until:
        if any(rank.exitcode for rank in ranks):
            break
        ranks[0].join(0.5)
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        rank.kill()
    for left in Path("/dev/shm").glob("-tp:0-*cpushm_*"):  # by a rank that was stopped; the next one takes the name
        left.unlink()
    logs = [path / "log.txt" for path in folders]
    assert codes == [0, 0], "\n".join(log.read_text()[-4000:] for log in logs if log.exists())


def _of_rank(attention: str, rank: int, port: str) -> tuple[dict[str, str], dict[str, object]]:
    """Variables and options."""
    if attention == "tp2":
        variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_RANK": str(rank),
                     "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}  # fmt: skip
        return variables, {"tensor_parallel_size": 2, "distributed_executor_backend": "external_launcher"}
    names = {"RANK": rank, "RANK_LOCAL": rank, "SIZE": 2, "MASTER_IP": "127.0.0.1", "MASTER_PORT": port}
    return {f"VLLM_DP_{name}": str(value) for name, value in names.items()}, {"distributed_executor_backend": "uni"}


def counted(folder: Path, name: str, rank: int = 0, **labels: str) -> float:
    """A counter of one rank, summed over its other labels."""
    samples = json.loads((folder / f"activity-rank-{rank:05d}.json").read_text())["samples"]
    found = [sample for sample in samples if sample["name"] == name and labels.items() <= sample["labels"].items()]
    return sum(sample["value"] for sample in found)
