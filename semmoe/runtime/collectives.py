"""Collectives over `torch.distributed` that count what they send, and the shuffled pair SRS / SAG.

Groups are arguments; nothing here asks which rank it is on. Bytes are what this rank must send to others in the
bandwidth-optimal form of each collective, n ranks and a payload of m bytes: all-to-all what leaves the rank,
reduce-scatter (n - 1) / n * m of its input, all-gather (n - 1) * m of its slice, all-reduce 2 (n - 1) / n * m.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from semmoe.assignment import slice_size

# torch 2.13 renamed both; earlier versions have the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass
class Communicator:
    """A process group, this rank's place in it, and the bytes it has sent, by kind and (all-to-all) by receiver."""

    group: dist.ProcessGroup | None
    rank: int
    size: int
    sent: Counter[str] = field(default_factory=Counter)
    sent_to: Counter[int] = field(default_factory=Counter)

    def all_to_all(self, rows: torch.Tensor, send: Sequence[int], receive: Sequence[int], kind: str) -> torch.Tensor:
        """Send `send[j]` consecutive rows of (M, W) to each rank j; returns what arrived, (sum(receive), W)."""
        out = rows.new_empty((sum(receive), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), list(receive), list(send), group=self.group)
        row_bytes = rows[:1].numel() * rows.element_size() if len(rows) else 0
        for j, count in enumerate(send):
            if j != self.rank:
                self.sent[kind] += count * row_bytes
                self.sent_to[j] += count * row_bytes
        return out

    def exchange_counts(self, counts: torch.Tensor) -> torch.Tensor:
        """(size,) int64 counts for each rank -> (size,) counts from each rank."""
        out = torch.empty_like(counts)
        dist.all_to_all_single(out, counts, group=self.group)
        self.sent["counts"] += (self.size - 1) * counts.element_size()
        return out

    def reduce_scatter(self, slices: torch.Tensor) -> torch.Tensor:
        """(size * S, H) partial sums -> (S, H), the sum of slice `rank` over all ranks, added in rank order.

        gloo's own reduce-scatter is an all-reduce of everything; an all-to-all and a local sum sends half as much.
        """
        rows = slices.shape[0] // self.size
        self.sent["reduce_scatter"] += (self.size - 1) * rows * slices[:1].numel() * slices.element_size()
        if dist.get_backend(self.group) != "gloo":
            out = slices.new_empty((rows, *slices.shape[1:]))
            _reduce_scatter(out, slices, group=self.group)
            return out
        parts = torch.empty_like(slices)
        dist.all_to_all_single(parts, slices.contiguous(), group=self.group)
        return parts.view(self.size, rows, *slices.shape[1:]).sum(dim=0)

    def all_gather(self, slice_: torch.Tensor) -> torch.Tensor:
        """(S, ...) of this rank -> (size * S, ...) of all, in rank order."""
        out = slice_.new_empty((self.size * slice_.shape[0], *slice_.shape[1:]))
        _all_gather(out, slice_.contiguous(), group=self.group)
        self.sent["all_gather"] += (self.size - 1) * slice_.numel() * slice_.element_size()
        return out

    def all_reduce(self, tensor: torch.Tensor, kind: str = "all_reduce") -> torch.Tensor:
        """The sum over all ranks, on every rank."""
        out = tensor.clone()
        dist.all_reduce(out, group=self.group)
        self.sent[kind] += 2 * (self.size - 1) * tensor.numel() * tensor.element_size() // self.size
        return out


@contextlib.contextmanager
def world(rank: int, size: int, folder: Path) -> Iterator[tuple[Communicator, str]]:
    """Join `size` local processes, which meet in `folder`: their communicator and device, gloo on CPU or NCCL.

    A rank that leaves waits for the others first.
    """
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // size))
    device = "cuda" if torch.cuda.device_count() >= size else "cpu"
    if device == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(folder / "store"), size)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    yield Communicator(dist.group.WORLD, rank, size), device
    dist.barrier()
    dist.destroy_process_group()


@dataclass(frozen=True)
class ShuffleHandle:
    """What a shuffled reduce-scatter did, for its inverse, the shuffled all-gather. Equal on all ranks but `mine`.

    Worked example, tokens 0..4 assigned to ranks [1, 0, 1, 1, 0] of two: slices of three rows, rank 0 gets tokens
    1, 4 and one row of padding, rank 1 gets 0, 2, 3: order = [1, 4, -1, 0, 2, 3], inverse = [3, 0, 4, 5, 1].
    """

    order: torch.Tensor  # (size * S,) int64: the token in each slot, -1 for padding
    inverse: torch.Tensor  # (N,) int64: the slot of each token
    mine: torch.Tensor  # (n,) int64: this rank's tokens, in slot order, n <= S
    slice_rows: int  # S


def shuffle_handle(ranks: torch.Tensor, size: int, rank: int) -> ShuffleHandle:
    """From the rank (N,) of each token in a group of `size`; no rank may have more than an equal slice."""
    tokens = len(ranks)
    rows = slice_size(tokens, size)
    sorted_tokens = torch.argsort(ranks, stable=True)
    counts = torch.bincount(ranks, minlength=size)
    assert int(counts.max()) <= rows, f"a slice of {int(counts.max())} rows exceeds its size of {rows}"
    first = torch.cumsum(counts, 0) - counts
    within = torch.arange(tokens, device=ranks.device) - first[ranks[sorted_tokens]]
    slots = ranks[sorted_tokens] * rows + within
    order = torch.full((size * rows,), -1, dtype=torch.int64, device=ranks.device)
    order[slots] = sorted_tokens
    inverse = torch.empty_like(sorted_tokens)
    inverse[sorted_tokens] = slots
    start = int(first[rank])
    return ShuffleHandle(order, inverse, sorted_tokens[start : start + int(counts[rank])], rows)


def shuffled_reduce_scatter(comm: Communicator, partial: torch.Tensor, handle: ShuffleHandle) -> torch.Tensor:
    """SRS (paper, section 3.4): sum `partial` (N, H) over ranks, each token's row to the rank that `handle` names.

    Returns (n, H), the rows of `handle.mine`. The permutation happens while packing.
    """
    slices = partial[handle.order.clamp(min=0)]
    slices[handle.order < 0] = 0
    return comm.reduce_scatter(slices)[: len(handle.mine)]


def shuffled_all_gather(comm: Communicator, rows: torch.Tensor, handle: ShuffleHandle) -> torch.Tensor:
    """SAG: the rows (n, ...) of every rank's `mine` -> (N, ...) in the original token order, on every rank."""
    padded = rows.new_zeros((handle.slice_rows, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return comm.all_gather(padded)[handle.inverse]
