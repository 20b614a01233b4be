"""The tokens of a forward pass of vLLM's model runner, as the plug-in's parts need them."""

from typing import Any

import numpy as np

from semmoe.engines.step import Step


class Slots:
    """A small number for each request, free again when it ends; every rank of a group counts alike."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}
        self._free: list[int] = []

    def take(self, requests: list[str]) -> np.ndarray:
        """(R,) int64."""
        for request in requests:
            if request not in self._of:
                self._of[request] = self._free.pop() if self._free else len(self._of)
        return np.array([self._of[request] for request in requests], np.int64)

    def release(self, request: str) -> None:
        slot = self._of.pop(request, None)
        if slot is not None:
            self._free.append(slot)


def read_step(runner: Any, slots: Slots, num_tokens: int) -> Step:
    """Within `_model_forward`, when the runner's buffers hold the pass; ids may have come from the device's sampler."""
    batch = runner.input_batch
    ends = runner.query_start_loc.np[: batch.num_reqs + 1].astype(np.int64)
    rows = np.repeat(np.arange(batch.num_reqs), np.diff(ends))
    positions = _host(runner.positions, num_tokens)
    return Step(
        token_ids=_host(runner.input_ids, num_tokens), positions=positions, rows=rows,
        slots=slots.take(list(batch.req_ids)), requests=list(batch.req_ids),
        decoding=positions >= batch.num_prompt_tokens[rows],
    )  # fmt: skip


def _host(buffer: Any, length: int) -> np.ndarray:
    """(length,) int64 of a tensor, or of a pair of host and device buffers."""
    tensor = getattr(buffer, "gpu", buffer)
    return tensor[:length].cpu().numpy().astype(np.int64)
