"""Trace what an engine would capture in a CUDA graph on a machine without a GPU: the same calls, with fake tensors.

A graph holds kernels, their shapes and addresses. So no result may come to the host and no input from it, no shape may
depend on values, and a replay must find the memory that the capture saw.
"""

import contextlib
import gc
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from semmoe.core import Plan
from semmoe.engines.sglang.shuffle import BoundaryShuffle
from semmoe.live.recorder.passes import PassRecorder
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.copies import RankCopies
from semmoe.runtime.shuffler import Shuffler
from semmoe.runtime.traffic import TrafficCounter

GPU = "absent"  # a device that every build of torch can have; fake tensors of CUDA need a build for it
# Sizes of decode passes that SGLang or vLLM captures, and some that they pad.
SIZES = (1, 2, 3, 4, 7, 8, 16, 24, 64, 160, 200, 256, 384, 512)
DECODES = SimpleNamespace(is_decode=lambda: True)


class CrossingError(RuntimeError):
    """An operation that no CUDA graph may hold."""


# Operations that only allocate, or that are views where the schema does not say so.
NO_LAUNCH = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::_unsafe_view"}


class StaysOnDevice(TorchDispatchMode):
    """Raises CrossingError on operations between a device and the host; FakeTensorMode refuses reads of values.

    launches: a list to which the names of torch's and our operators are added that launch a kernel: views, memory and
    collectives do not.
    """

    def __init__(self, launches: list[str] | None = None) -> None:
        super().__init__()
        self._launches = [] if launches is None else launches

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        seen = {leaf.device.type for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)}
        if len(seen) > 1:
            raise CrossingError(f"{func} is between {' and '.join(sorted(seen))}")
        if func is torch.ops.aten.index_put_.default and args[2].dim() == 0:
            raise CrossingError(f"{func} of a number, which torch copies from the host where the device is a GPU")
        name = func._schema.name
        if name.startswith(("aten::", "semmoe::")) and not func.is_view and name not in NO_LAUNCH:
            self._launches.append(name)
        return out


class NcclCommunicator(Communicator):
    """On torch's fake process group, the calls that NCCL would get."""

    backend = "nccl"


@contextlib.contextmanager
def fake_ranks(rank: int, size: int) -> Iterator[NcclCommunicator]:
    """A process group of so many ranks, whose collectives do nothing, as this rank sees it."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield NcclCommunicator(dist.group.WORLD, rank, size)
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def launches_of_triton() -> Iterator[list[str]]:
    """Names of the kernels launched in the block, which do not run; nothing where Triton is not installed."""
    names: list[str] = []
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:
        yield names
        return

    def run(kernel, *args, **kwargs):
        tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
        assert tensors
        assert {tensor.device.type for tensor in tensors} == {GPU}
        names.append(kernel.fn.__name__)

    original, JITFunction.run = JITFunction.run, run
    try:
        yield names
    finally:
        JITFunction.run = original


def replays(forward: Callable[[], object]) -> list[str]:
    """Run a pass as engines do around a capture, and return the kernels that it launches, torch's and Triton's.

    It is called within a FakeTensorMode: once to warm up, then as it is captured, and again to see that it keeps no
    memory. Raises what FakeTensorMode and StaysOnDevice raise, and AssertionError if the passes differ.
    """
    seen = []
    with launches_of_triton() as kernels:
        forward()
        with _only_new_objects_tracked():
            for _ in range(3):  # of which the first may fill caches of torch's own
                kernels.clear()
                with StaysOnDevice(kernels):
                    forward()
                seen.append((list(kernels), _alive()))
    *_, (launched, before), (again, after) = seen
    assert launched == again, "the pass is not the same when it is run again"
    assert after <= before, f"a pass keeps {after - before} bytes"
    return launched


@contextlib.contextmanager
def _only_new_objects_tracked() -> Iterator[None]:
    """Let the garbage collector look at new objects alone: torch's own modules hold a million."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _alive() -> int:
    """Bytes of fake tensors that something still holds."""
    gc.collect()
    alive = [found for found in gc.get_objects() if type(found) is FakeTensor]
    return sum({found.untyped_storage()._cdata: found.untyped_storage().nbytes() for found in alive}.values())


def on_gpu() -> FakeTensorMode:
    """A mode in which tensors of the device `GPU` have shapes and no memory; tables of the host may be copied to it."""
    if torch._C._get_privateuse1_backend_name() != GPU:
        _setup_privateuseone_for_python_backend(GPU)
    return FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


class Captured:
    """One rank's layers as SGLang calls our hooks in a decode pass of so many rows.

    It is called to run them. slots: of the engine's requests. Experts have two copies. The engine's own part of a layer
    is one sum.
    """

    def __init__(self, comm: Communicator, plan: Plan, rows: int, slots: int, width: int, device: str) -> None:
        f, padded = plan.fingerprint, -(-rows // comm.size) * comm.size

        def table(kind: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.norms = [object() for _ in range(f.num_layers)]
        shuffler = Shuffler(plan, 0, comm.rank, device)
        layers = {id(norm): i for i, norm in enumerate(self.norms)}
        self.shuffle = BoundaryShuffle(shuffler, comm, layers, lambda: slots)
        self.buffer = table(torch.int32, rows + comm.size, f.num_layers, f.top_k)
        copies = table(torch.int16, f.num_experts, 2), table(torch.int32, f.num_experts, 2)
        self.copies = RankCopies(*copies, table(torch.int16, f.num_experts), comm.rank, comm.size)
        self.traffic = TrafficCounter(comm.size, comm.rank, device)
        self.per_rank = f.num_experts // comm.size
        ids = {name: table(torch.int64, rows) for name in ("input_ids", "req_pool_indices", "positions")}
        self.batch = SimpleNamespace(forward_mode=DECODES, **ids)
        self.hidden, self.residual = (table(torch.bfloat16, padded, width) for _ in range(2))
        self.chosen = table(torch.int32, padded // comm.size, f.top_k)
        self.weights = table(torch.float32, padded // comm.size, f.top_k)
        self.logical = table(torch.int64, 2 * f.num_experts)
        self.limit = table(torch.int32, 1)

    def record(self) -> None:
        self.shuffle.listen(PassRecorder(SimpleNamespace(), self.buffer.shape[1], self.buffer).put)

    def __call__(self) -> torch.Tensor:
        for norm in self.norms:
            rows, residual = self.shuffle.before_experts(
                unshuffled, self.hidden, self.residual, self.batch, norm, update=None, read=Read
            )
            self.shuffle.bound(self.limit)
            self.routed()
            self.shuffle.observe(self.chosen, self.weights, self.logical)
            if norm is not self.norms[-1] and self.shuffle.active:
                self.shuffle.restore(rows + residual)  # before_attention, without SGLang's own types
        return self.shuffle.after_last(unshuffled, rows, residual, self.batch, SimpleNamespace(update=torch.add))[0]

    def routed(self) -> None:
        """What hooks do at every router: copies are chosen, and counted once SGLang has masked the rows of padding."""
        self.traffic.count(self.copies.to_physical(self.chosen), self.per_rank)


def unshuffled(rows: torch.Tensor, residual: torch.Tensor, *others, **call) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's own part of a pass that is not shuffled."""
    return rows, residual


class Read:
    @staticmethod
    def update_and_read(update, rows, residual, norm):
        return rows, residual
