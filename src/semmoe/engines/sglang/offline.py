"""SGLang's offline engine: complete prompts, and return the tokens with their routing."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Completion:
    token_ids: list[int]
    expert_ids: (
        np.ndarray | None
    )  # (T, L', K) of every token fed, all decoder layers, by falling weight; None: not requested
    rank: int | None  # the data-parallel rank that served it
    cached_tokens: int


class Offline:
    """A running engine; top_k: experts per token of the routing to return, 0 for none."""

    def __init__(self, engine: Any, top_k: int) -> None:
        self._engine, self._top_k = engine, top_k

    def complete(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[Completion]:
        """Greedy completions of all prompts."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
        given: dict[str, Any] = {"return_routed_experts": True} if self._top_k else {}
        answers = self._engine.generate(input_ids=[list(p) for p in prompts], sampling_params=sampling, **given)
        return [_completion(answer, self._top_k) for answer in answers]


@contextmanager
def running(model: str, options: Sequence[str], environment: dict[str, str], top_k: int = 0) -> Iterator[Offline]:
    """Run SGLang's engine with its own command-line options; on exit it ends and the environment is restored."""
    before = dict(os.environ)
    os.environ.update(environment)
    from sglang import Engine
    from sglang.srt.server_args import prepare_server_args

    routed = ["--enable-return-routed-experts"] if top_k else []
    words = ["--model-path", model, "--random-seed", "0", "--log-level", "warning", *options, *routed]
    engine = None
    try:
        engine = Engine(server_args=prepare_server_args(words))
        yield Offline(engine, top_k)
    finally:
        if engine is not None:
            engine.shutdown()
        os.environ.clear()
        os.environ.update(before)


def _completion(answer: dict[str, Any], top_k: int) -> Completion:
    meta, experts = answer["meta_info"], None
    if top_k:
        from sglang.srt.state_capturer.routed_experts import extract_routed_experts_from_meta_info

        fed = meta["prompt_tokens"] + len(answer["output_ids"]) - 1
        experts = extract_routed_experts_from_meta_info(answer).reshape(fed, -1, top_k)
    return Completion(answer["output_ids"], experts, meta.get("dp_rank"), meta.get("cached_tokens", 0))
