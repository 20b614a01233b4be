"""The shuffled pair over buffers that every rank of a group can read: SRS and SAG are one Triton kernel each.

A rank copies its rows into its own buffer, and each rank reads what it needs from all buffers. Rows are permuted while
reading, without a pass of their own; the copy is a pass over memory unless the producer wrote its rows to the buffer.

SRS adds in rank order in float32 (float64 for float64) and rounds once, bitwise equal to the plain pair over gloo.
NCCL adds in an order of its own, so that the plain pair may differ in the last bits.

This was never run between GPUs: two processes shared one, and tests emulate ranks as buffers in Triton's interpreter.
"""

import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

from semmoe.runtime.collectives import Communicator
from semmoe.runtime.shuffle import ShuffleHandle

SUMMED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # types that the SRS kernel adds
ALIGNMENT = 128  # bytes: alignment of several tensors in a buffer


class PeerBuffers(ABC):
    """This rank's buffer, own (bytes,) uint8, and the addresses (R,) int64 of all ranks' buffers, in rank order."""

    def __init__(self, own: Tensor, addresses: Tensor) -> None:
        self._own, self._addresses = own, addresses

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks have reached this point; what they wrote before can then be read."""

    @contextmanager
    def shared(self, tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Yield the addresses (R,) of each of `tensors` on all ranks, readable inside the block; shapes are equal."""
        addresses = self._write(tensors)
        self.barrier()
        yield addresses
        self.barrier()  # no rank writes again before all have read

    def _write(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        addresses, start = [], 0
        for tensor in tensors:
            end, room = start + tensor.nbytes, len(self._own)
            if end > room:
                raise ValueError(f"a pass of {len(tensor)} rows needs more than the {room} bytes of a rank's buffer")
            self._own[start:end].view(tensor.dtype).view(tensor.shape).copy_(tensor)
            addresses.append(self._addresses + start)
            start = -(-end // ALIGNMENT) * ALIGNMENT
        return addresses


def fused_reduce_scatter(comm: Communicator, buffers: PeerBuffers, partial: Tensor, handle: ShuffleHandle) -> Tensor:
    """SRS: sum `partial` (N, H) over ranks -> (n, H), this rank's tokens and zeros for padding.

    Bytes are counted as in the plain pair, including padding, which is not read here.
    """
    from semmoe.runtime.kernels import shuffle as kernels

    width = partial.shape[1]
    comm.sent["reduce_scatter"] += (comm.size - 1) * handle.slice_rows * width * partial.element_size()
    with buffers.shared([partial]) as (addresses,):
        return kernels.shuffled_reduce_scatter(addresses, handle.mine, width, partial.dtype)


def fused_all_gather(
    comm: Communicator, buffers: PeerBuffers, columns: Sequence[Tensor], handle: ShuffleHandle
) -> list[Tensor]:
    """SAG of tensors (n, ...) of the same rows -> (N, ...) in the original order; padding rows keep their values."""
    from semmoe.runtime.kernels import shuffle as kernels

    outs = []
    with buffers.shared(columns) as addresses:
        for rows, at in zip(columns, addresses, strict=True):
            comm.sent["all_gather"] += (comm.size - 1) * rows.nbytes
            width = math.prod(rows.shape[1:])
            whole = kernels.shuffled_all_gather(at, handle.inverse, handle.slice_rows, width, rows.dtype)
            outs.append(whole.view(len(whole), *rows.shape[1:]))
    return outs


class SymmetricBuffers(PeerBuffers):
    """Buffers in torch's symmetric memory. All ranks make them together, once, before any graph captures addresses."""

    def __init__(self, comm: Communicator, num_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric

        device = torch.device("cuda", torch.cuda.current_device())
        own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        self._memory = symmetric.rendezvous(own, comm.group)
        starts = self._memory.buffer_ptrs
        if not all(starts):
            raise ValueError("a rank's buffer cannot be read from another's GPU")
        inside = own.data_ptr() - starts[comm.rank]  # torch may give a part of a larger allocation
        super().__init__(own, torch.tensor([start + inside for start in starts], dtype=torch.int64, device=device))

    def barrier(self) -> None:
        self._memory.barrier()


def symmetric_buffers(
    comm: Communicator, device: str | torch.device, dtype: torch.dtype, num_bytes: int
) -> SymmetricBuffers:
    """Buffers for rows of `dtype`. Raises ValueError, with a message of one line, if this group cannot have them."""
    kind, types = torch.device(device).type, [str(t).removeprefix("torch.") for t in SUMMED]
    if kind != "cuda":
        raise ValueError(f"ranks read each other's buffers on GPUs only, not on {kind}")
    if dtype not in SUMMED:
        raise ValueError(f"rows of {dtype} cannot be summed, only of {', '.join(types)}")
    if find_spec("triton") is None:
        raise ValueError("its kernels need Triton, which is not installed")
    nodes: list[str] = [""] * comm.size
    dist.all_gather_object(nodes, socket.gethostname(), group=comm.group)
    names = sorted(set(nodes))
    if len(names) != 1:
        raise ValueError(f"an attention group must be on one node, this one is on {', '.join(names)}")
    try:
        return SymmetricBuffers(comm, num_bytes)
    except (ImportError, AssertionError, RuntimeError) as error:  # AssertionError: a build of torch without GPUs
        reason = (str(error).splitlines() or [""])[0]
        raise ValueError(f"torch's symmetric memory gives no buffers: {reason}") from None
