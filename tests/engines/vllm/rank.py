"""One of two ranks of vLLM offline, attention-TP: rank.py MODEL PROMPTS.json OUT.json and torchrun's variables."""

import json
import sys
from pathlib import Path

from vllm import LLM, SamplingParams


def main() -> None:
    model, prompts, out = sys.argv[1:]
    engine = LLM(
        model=model, tensor_parallel_size=2, enable_expert_parallel=True, enforce_eager=True, dtype="float32",
        distributed_executor_backend="external_launcher", max_model_len=2048, max_num_seqs=16,
        max_num_batched_tokens=128, gpu_memory_utilization=0.1,
    )  # fmt: skip
    given = [{"prompt_token_ids": prompt} for prompt in json.loads(Path(prompts).read_text())]
    answers = engine.generate(given, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    Path(out).write_text(json.dumps([list(answer.outputs[0].token_ids) for answer in answers]))


if __name__ == "__main__":
    main()
