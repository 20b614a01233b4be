"""Count the bytes of DeepSpeed's own collectives, where it calls torch.distributed."""

import functools
from typing import Any

import torch
import torch.distributed as dist

from semmoe.runtime.collectives import Communicator, timed


@functools.cache
def collectives() -> Communicator:
    """Return what this process's collectives sent, by kind; the first call starts counting.

    Of the communicator only the counts are used. The kind `all_to_all` counts rows of tokens, and `counts` counts
    integers.
    """
    from deepspeed.comm import comm

    counts = Communicator(None, 0, 1)
    for name, count in (
        ("all_to_all_single", _all_to_all),
        ("all_reduce", _all_reduce),
        ("inference_all_reduce", _all_reduce),
        ("all_gather", _all_gather),
        ("all_gather_into_tensor", _all_gather_into),
    ):
        setattr(comm.cdb, name, _counted(counts, getattr(comm.cdb, name), count))
    return counts


def _counted(counts: Communicator, original: Any, count: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        kind = count(counts, *args, **kwargs)
        with timed(counts.seconds, kind):
            return original(*args, **kwargs)

    return run


def _all_to_all(
    counts: Communicator,
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
    counts.sent[kind] += (sum(rows) - rows[rank]) * row_bytes
    if kind == "all_to_all":
        counts.sent_to.update({j: rows[j] * row_bytes for j in range(size) if j != rank})
    return kind


def _all_reduce(
    counts: Communicator, tensor: torch.Tensor, op: Any = None, group: Any = None, async_op: bool = False
) -> str:
    size = dist.get_world_size(group)
    counts.sent["all_reduce"] += 2 * (size - 1) * tensor.numel() * tensor.element_size() // size
    return "all_reduce"


def _all_gather(
    counts: Communicator, tensor_list: Any, tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> str:
    counts.sent["all_gather"] += (dist.get_world_size(group) - 1) * tensor.numel() * tensor.element_size()
    return "all_gather"


def _all_gather_into(
    counts: Communicator, output_tensor: Any, input_tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> str:
    return _all_gather(counts, None, input_tensor, group)
