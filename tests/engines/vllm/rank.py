"""One of two ranks of vLLM offline, in a process forked from one that has imported vLLM."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.v1.engine.llm_engine import LLMEngine  # noqa: F401 (imported once for all ranks, as what follows)
from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: F401


def run(job: dict[str, Any], variables: dict[str, str], folder: str) -> None:
    """Answers to out.json, whatever is printed to log.txt, both in `folder`."""
    os.environ.update(variables)
    log = os.open(f"{folder}/log.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    engine = LLM(
        model=job["model"], enable_expert_parallel=True, enforce_eager=True, max_model_len=2048, max_num_seqs=16,
        max_num_batched_tokens=128, gpu_memory_utilization=0.1, block_size=32, **job["options"],
    )  # fmt: skip
    answers = generate(engine, job["prompts"], job["together"])
    Path(folder, "out.json").write_text(json.dumps(answers))
    os._exit(0)  # gloo's threads need not be waited for


def generate(engine: LLM, prompts: list[list[int]], together: bool) -> list[list[int]]:
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    sampling = SamplingParams(temperature=0, max_tokens=8)
    answers = []
    for batch in [given] if together else [[one] for one in given]:
        answers += engine.generate(batch, sampling, use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]
