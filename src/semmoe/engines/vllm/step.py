"""Read a forward pass of vLLM's model runner into a `Step`."""

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from semmoe.engines.step import Step


class Slots:
    """Assigns a small number to each request, reused after it ends; all ranks of a group assign the same numbers.

    most: maximum number of requests in a pass; beyond it, requests outside the pass (preempted ones) lose theirs.
    """

    def __init__(self, most: int = sys.maxsize) -> None:
        self.most = most
        self._of: dict[str, int] = {}
        self._free: list[int] = []

    def take(self, requests: list[str]) -> np.ndarray:
        """(R,) int64: the slot of each request; new requests get a free slot."""
        for request in requests:
            if request not in self._of:
                self._of[request] = self._another(requests)
        return np.array([self._of[request] for request in requests], np.int64)

    def _another(self, requests: list[str]) -> int:
        if self._free:
            return self._free.pop()
        if len(self._of) < self.most:
            return len(self._of)
        return self._of.pop(next(other for other in self._of if other not in requests))

    def release(self, request: str) -> None:
        slot = self._of.pop(request, None)
        if slot is not None:
            self._free.append(slot)


def read_step(runner: Any, slots: Slots, num_tokens: int) -> Step:
    """Read the step of a pass in `_model_forward`, when the runner's buffers hold it, ids sampled on the device too."""
    batch = runner.input_batch
    ends = runner.query_start_loc.np[: batch.num_reqs + 1].astype(np.int64)
    rows = np.repeat(np.arange(batch.num_reqs), np.diff(ends))
    positions = _host(runner.positions, num_tokens)
    return Step(
        token_ids=_host(runner.input_ids, num_tokens),
        positions=positions,
        rows=rows,
        slots=slots.take(list(batch.req_ids)),
        requests=list(batch.req_ids),
        decoding=positions >= batch.num_prompt_tokens[rows],
    )


def decodes(runner: Any) -> bool:
    """Whether each request of a pass feeds one token, which may be the last of a prompt, as in vLLM's own graphs."""
    return bool((np.diff(runner.query_start_loc.np[: runner.input_batch.num_reqs + 1]) == 1).all())


def accepted(step: Step, drafts: Sequence[int], sampled: np.ndarray) -> np.ndarray:
    """(N,) bool: all tokens of a pass except rejected drafts, which are the last tokens of their requests.

    drafts (R,): number of draft tokens of each request; sampled (R, 1 + most drafts): its new tokens, padded with -1.
    """
    rejected = np.maximum(np.asarray(drafts) + 1 - (sampled >= 0).sum(axis=1), 0) * (np.asarray(drafts) > 0)  # (R,)
    _, last = step.ends
    return step.positions <= (last - rejected)[step.rows]


def fed_tokens(state: Any) -> int:
    """Number of tokens of an ended request that were fed: not its last token, and none sampled after its end."""
    outputs, sampling = state.output_token_ids, state.sampling_params
    stops = {sampling.eos_token_id, *(sampling.stop_token_ids or ())} if sampling is not None else set()
    end = next((i + 1 for i, token in enumerate(outputs) if token in stops), len(outputs))
    if sampling is not None and sampling.max_tokens is not None:
        end = min(end, sampling.max_tokens)
    return len(state.prompt_token_ids or ()) + end - 1


def _host(buffer: Any, length: int) -> np.ndarray:
    """(length,) int64 of a tensor, or of a pair of host and device buffers."""
    return on_device(buffer, length).cpu().numpy().astype(np.int64)


def on_device(buffer: Any, length: int) -> Any:
    """(length,) of a tensor, or of the device's of a pair of buffers, at an address that does not change."""
    return getattr(buffer, "gpu", buffer)[:length]
