"""Count the bytes of DeepSpeed's own collectives, where it calls torch.distributed."""

import functools
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist

from semmoe.runtime.collectives import timed


class CollectiveCounter:
    """Bytes that this process sent since its counts were reset, by kind as in `Communicator`.

    The kind `all_to_all` counts rows of tokens, and `counts` counts integers.
    """

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.sent_to: Counter[int] = Counter()  # rows of tokens, by rank in their group
        self.seconds: Counter[str] = Counter()

    def reset_counts(self) -> None:
        for counter in (self.sent, self.sent_to, self.seconds):
            counter.clear()

    def install(self, backend: Any) -> None:
        """Count the collectives of `backend`, which is DeepSpeed's, from now on."""
        for name, count in (
            ("all_to_all_single", self._all_to_all),
            ("all_reduce", self._all_reduce),
            ("inference_all_reduce", self._all_reduce),
            ("all_gather", self._all_gather),
            ("all_gather_into_tensor", self._all_gather_into),
        ):
            setattr(backend, name, self._counted(getattr(backend, name), count))

    def _counted(self, original: Any, count: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            kind = count(*args, **kwargs)
            with timed(self.seconds, kind):
                return original(*args, **kwargs)

        return run

    def _all_to_all(
        self,
        output: Any,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> str:
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        rows = input_split_sizes or [len(input) // size] * size
        row_bytes = input[:1].numel() * input.element_size() if len(input) else 0
        kind = "all_to_all" if input.is_floating_point() else "counts"
        self.sent[kind] += (sum(rows) - rows[rank]) * row_bytes
        if kind == "all_to_all":
            self.sent_to.update({j: rows[j] * row_bytes for j in range(size) if j != rank})
        return kind

    def _all_reduce(self, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> str:
        size = dist.get_world_size(group)
        self.sent["all_reduce"] += 2 * (size - 1) * tensor.numel() * tensor.element_size() // size
        return "all_reduce"

    def _all_gather(self, tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False) -> str:
        self.sent["all_gather"] += (dist.get_world_size(group) - 1) * tensor.numel() * tensor.element_size()
        return "all_gather"

    def _all_gather_into(
        self, output_tensor: Any, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> str:
        return self._all_gather(None, input_tensor, group)


@functools.cache
def collectives() -> CollectiveCounter:
    """The counter of this process; the first call starts counting."""
    from deepspeed.comm import comm

    counter = CollectiveCounter()
    counter.install(comm.cdb)
    return counter
