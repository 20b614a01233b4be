"""Collectives over `torch.distributed` that count the bytes sent.

Groups are arguments; nothing here asks for the global rank. Bytes are what this rank must send to others in the
bandwidth-optimal form of each collective, for n ranks and a payload of m bytes: for all-to-all the bytes that leave the
rank, for reduce-scatter (n - 1) / n * m of its input, for all-gather (n - 1) * m of its slice, for all-reduce
2 (n - 1) / n * m.
"""

import contextlib
import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from semmoe.runtime.rows import pack_rows, sum_in_order, unpack_rows

# torch 2.13 renamed both; earlier versions have the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

HEAD = 8  # bytes of a number of rows
MAX_ROWS = 1 << 16  # for a rank at once, over gloo


@contextlib.contextmanager
def timed(seconds: Counter[str], kind: str) -> Iterator[None]:
    """Add the time of the block, by the host's clock, to `seconds`."""
    started = time.perf_counter()
    yield
    seconds[kind] += time.perf_counter() - started  # type: ignore[assignment]  # a Counter also adds floats


@dataclass
class Communicator:
    """A process group, this rank's place in it, and the bytes it has sent, by kind and (all-to-all) by receiver.

    `messages` counts messages sent to others, and `rounds` waits for others: the cost of a layer where latency counts,
    not bytes. `seconds` is the time that this rank waited, including for slower ranks, by the host's clock: correct on
    a CPU and meaningless with NCCL. Not thread-safe, since `staging` reuses its memory.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    sent: Counter[str] = field(default_factory=Counter)
    sent_to: Counter[int] = field(default_factory=Counter)
    messages: Counter[str] = field(default_factory=Counter)
    rounds: Counter[str] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)
    _memory: dict[str, torch.Tensor] = field(default_factory=dict, repr=False)

    @property
    def backend(self) -> str:
        return dist.get_backend(self.group)

    def staging(self, use: str, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """A buffer for data in transit, of `like`'s type and device; valid until the next call for the same `use`.

        Allocating several MB takes as long as filling them, since the system maps new memory page by page.
        """
        needed = math.prod(shape) * like.element_size()
        memory = self._memory.get(use)
        if memory is None or len(memory) < needed or memory.device != like.device:
            memory = torch.empty(max(needed, 1), dtype=torch.uint8, device=like.device)
            self._memory[use] = memory
        return memory[:needed].view(like.dtype).view(*shape)

    def count(self, kind: str, rows_to: Sequence[int], row_bytes: int) -> None:
        """Count the bytes of rows sent to each rank in an all-to-all; rows_to (size,)."""
        for j, rows in enumerate(rows_to):
            if j != self.rank:
                self.sent[kind] += rows * row_bytes
                self.sent_to[j] += rows * row_bytes

    def reset_counts(self) -> None:
        for counter in (self.sent, self.sent_to, self.messages, self.rounds, self.seconds):
            counter.clear()

    def count_round(self, kind: str, messages: int) -> None:
        """Count a collective of torch, in which this rank sends `messages` messages."""
        self.messages[kind] += messages
        self.rounds[kind] += self.size > 1

    def wait(self, kind: str, works: Sequence[Any]) -> None:
        """Wait for the transfers that `exchange` started: one round."""
        with timed(self.seconds, kind):
            for work in works:
                work.wait()
        self.rounds[kind] += bool(works)

    def exchange_rows(self, kind: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Rows (m, bytes) uint8 for each rank -> rows from each rank, this one's own included.

        The numbers of rows are not known to the receivers. Over gloo a number heads its message, since a receive may be
        posted for more bytes than arrive: a round less than an exchange of numbers before, as other backends need.
        """
        self.count(kind, [len(part) for part in parts], parts[0].shape[1])
        self.sent["counts"] += HEAD * (self.size - 1)
        others = self._headed(kind, parts) if self.backend == "gloo" else self._counted(kind, parts)
        return [parts[j] if j == self.rank else rows for j, rows in enumerate(others)]

    def _headed(self, kind: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        most, row_bytes = max(map(len, parts)), parts[0].shape[1]
        if most > MAX_ROWS:
            raise ValueError(f"{most:,} rows for a rank at once, of at most {MAX_ROWS:,}: make batches smaller")
        heads = torch.tensor([len(part) for part in parts]).view(torch.uint8).split(HEAD)
        messages = [torch.cat([head, part.view(-1)]) for head, part in zip(heads, parts, strict=True)]
        # The system maps only the pages that are written, so that room for the largest message costs nothing.
        arrived = self.staging("headed rows", (self.size, HEAD + MAX_ROWS * row_bytes), parts[0])
        self.wait(kind, self.exchange(kind, list(arrived), messages))
        counts = arrived[:, :HEAD].clone().view(torch.int64)[:, 0].tolist()
        counts[self.rank] = 0
        return [rows[HEAD : HEAD + n * row_bytes].view(n, row_bytes) for rows, n in zip(arrived, counts, strict=True)]

    def _counted(self, kind: str, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        own = torch.tensor([len(part) for part in parts], device=parts[0].device)
        own[self.rank] = 0
        counts = torch.zeros_like(own)
        self.wait("counts", self.exchange("counts", counts.split(1), own.split(1)))
        arrived = [part.new_empty((n, part.shape[1])) for part, n in zip(parts, counts.tolist(), strict=True)]
        self.wait(kind, self.exchange(kind, arrived, parts))
        return arrived

    def reduce_scatter(self, slices: torch.Tensor) -> torch.Tensor:
        """(size * S, H) partial sums -> (S, H), the sum of slice `rank` over all ranks, added in rank order.

        gloo's own reduce-scatter is an all-reduce of everything; an all-to-all and a local sum sends half as much.
        """
        rows, shape = slices.shape[0] // self.size, slices.shape[1:]
        if rows == 0:  # the same on every rank
            return slices.new_empty((0, *shape))
        self.sent["reduce_scatter"] += (self.size - 1) * rows * slices[:1].numel() * slices.element_size()
        if self.backend == "nccl":
            out = slices.new_empty((rows, *shape))
            _reduce_scatter(out, slices, group=self.group)
            self.count_round("reduce_scatter", self.size - 1)
            return out
        slices = slices.contiguous()
        arrived = self.staging("arrived", (self.size - 1, rows, *shape), slices)
        places = [*arrived[: self.rank], None, *arrived[self.rank :]]
        self.wait("reduce_scatter", self.exchange("reduce_scatter", places, slices.split(rows)))
        places[self.rank] = slices.split(rows)[self.rank]
        return sum_in_order(places)

    def all_gather(self, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Tensors (S, H) of this rank -> (size * S, H) of all, in rank order; over gloo in one message."""
        if self.backend == "nccl":
            return [self._gather_on_gpu(rows) for rows in columns]
        packed = pack_rows(columns)
        out = packed.new_empty((self.size * len(packed), packed.shape[1]))
        if len(packed):  # the same number on every rank
            parts = out.split(len(packed))
            parts[self.rank].copy_(packed)
            self._count_gather(packed)
            self.wait("all_gather", self.exchange("all_gather", parts, [packed] * self.size))
        return unpack_rows(out, columns)

    def _gather_on_gpu(self, rows: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty((self.size * len(rows), *rows.shape[1:]))
        if len(rows):
            self._count_gather(rows)
            _all_gather(out, rows.contiguous(), group=self.group)
            self.count_round("all_gather", self.size - 1)
        return out

    def _count_gather(self, rows: torch.Tensor) -> None:
        self.sent["all_gather"] += (self.size - 1) * rows.numel() * rows.element_size()

    def exchange(
        self, kind: str, receive: Sequence[torch.Tensor | None], send: Sequence[torch.Tensor | None]
    ) -> list[Any]:
        """Start to send send[j] to each other rank j and to receive receive[j]; returns the works to pass to `wait`.

        All tensors are contiguous; this rank's own entries are ignored. Messages are counted here, bytes are not.
        Over gloo every receive is posted before the first send. gloo's own all-to-all does the opposite, so that a
        rank's notice that it can receive queues behind its data and a link carries one direction at a time (half of
        its capacity between two ranks, two thirds between four).
        """
        others = [(self.rank + i) % self.size for i in range(1, self.size)]
        self.messages[kind] += sum((t := send[j]) is not None and t.numel() > 0 for j in others)
        if self.backend != "gloo":
            empty = next(t for t in (*receive, *send) if t is not None).new_empty(0)
            ours = [empty if j == self.rank or t is None else t for j, t in enumerate(send)]
            theirs = [empty if j == self.rank or t is None else t for j, t in enumerate(receive)]
            return [dist.all_to_all(theirs, ours, group=self.group, async_op=True)] if others else []
        works = [
            dist.irecv(t, group=self.group, group_src=j)
            for j in reversed(others)
            if (t := receive[j]) is not None and t.numel()
        ]
        return works + [
            dist.isend(t, group=self.group, group_dst=j) for j in others if (t := send[j]) is not None and t.numel()
        ]

    def all_reduce(self, tensor: torch.Tensor, kind: str = "all_reduce") -> torch.Tensor:
        """The sum over all ranks, on every rank."""
        out = tensor.clone()
        with timed(self.seconds, kind):
            dist.all_reduce(out, group=self.group)
        self.sent[kind] += 2 * (self.size - 1) * tensor.numel() * tensor.element_size() // self.size
        self.count_round(kind, 2 * (self.size - 1))
        return out


@contextlib.contextmanager
def world(rank: int, size: int, folder: Path) -> Iterator[tuple[Communicator, str]]:
    """Join `size` local processes, which meet in `folder`; yields communicator and device (gloo on a CPU, else NCCL).

    On exit every rank waits for the others.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(folder / "store"), size)
    with _joined(rank, size, store=store, rank=rank, world_size=size) as joined:
        yield joined


@contextlib.contextmanager
def launched_world() -> Iterator[tuple[Communicator, str]]:
    """As `world`, for processes that torchrun started, also on several nodes: places come from its environment."""
    with _joined(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])) as joined:
        yield joined


@contextlib.contextmanager
def _joined(local_rank: int, local_size: int, **meeting: Any) -> Iterator[tuple[Communicator, str]]:
    """Join the world from one of the processes of this machine; meeting: where, if not by the environment."""
    device = "cuda" if torch.cuda.device_count() >= local_size else "cpu"
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    if device == "cuda":
        torch.cuda.set_device(local_rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", timeout=timedelta(minutes=10), **meeting)
    yield Communicator(dist.group.WORLD, dist.get_rank(), dist.get_world_size()), device
    dist.barrier()
    dist.destroy_process_group()
