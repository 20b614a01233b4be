"""SGLang's offline engine: prompts in, tokens and their routing out."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Completion:
    token_ids: list[int]
    expert_ids: np.ndarray | None  # (T, L', K) of every token fed, all decoder layers, by falling weight; None: not asked
    rank: int | None  # the data-parallel rank that served it
    cached_tokens: int


def run(
    model: str, prompts: Sequence[Sequence[int]], max_new_tokens: int, arguments: dict[str, Any],
    environment: dict[str, str], top_k: int = 0, progress: Callable[[int], None] = lambda done: None,
) -> list[Completion]:  # fmt: skip
    """Greedy completions of the prompts, all at hand at once; top_k: of the routing to return, 0 for none."""
    os.environ.update(environment)
    from sglang import Engine

    routed = {"enable_return_routed_experts": True} if top_k else {}
    engine = Engine(model_path=model, random_seed=0, **{"log_level": "warning", **arguments, **routed})
    try:
        sampling = {"temperature": 0, "max_new_tokens": max(max_new_tokens, 1)}
        given: dict[str, Any] = {"return_routed_experts": True} if top_k else {}
        answers = engine.generate(input_ids=[list(p) for p in prompts], sampling_params=sampling, **given)
        progress(len(prompts))
        return [_completion(answer, top_k) for answer in answers]
    finally:
        engine.shutdown()


def _completion(answer: dict[str, Any], top_k: int) -> Completion:
    meta, experts = answer["meta_info"], None
    if top_k:
        from sglang.srt.state_capturer.routed_experts import extract_routed_experts_from_meta_info

        flat = extract_routed_experts_from_meta_info(answer)
        fed = meta["prompt_tokens"] + len(answer["output_ids"]) - 1
        experts = flat.reshape(fed, -1, top_k)
    return Completion(answer["output_ids"], experts, meta.get("dp_rank"), meta.get("cached_tokens", 0))
