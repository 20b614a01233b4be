"""What engines capture of our decode passes in CUDA graphs, traced on a device that is not there."""

from types import SimpleNamespace

import pytest
import torch
from captured import GPU, SIZES, CrossingError, fake_ranks, on_gpu, replays
from test_shuffler_device import EXPERTS, LAYERS, SLOTS, TOP_K, plan
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from semmoe.engines.recording import PassRecorder
from semmoe.engines.sglang.static import StaticBoundaryShuffle
from semmoe.runtime.copies import RankCopies
from semmoe.runtime.shuffler_device import DeviceShuffler
from semmoe.runtime.traffic import TrafficCounter

RANKS, WIDTH = 2, 64
DECODES = SimpleNamespace(is_decode=lambda: True)


def table(shape, dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=GPU)


class Captured:
    """One rank's layers as SGLang calls our hooks in a decode pass of so many rows; `tables` is the plan's kind."""

    def __init__(self, comm, rows, granularity="layer", lookahead=0) -> None:
        self.norms = [object() for _ in range(LAYERS)]
        shuffler = DeviceShuffler(plan(2, lookahead=lookahead), 0, comm.rank, granularity, GPU)
        layers = {id(norm): i for i, norm in enumerate(self.norms)}
        ahead = lambda layer, held: torch.zeros((len(held), lookahead * TOP_K), dtype=torch.int64, device=GPU)  # noqa: E731
        self.shuffle = StaticBoundaryShuffle(shuffler, comm, layers, lambda: SLOTS, None, ahead)
        if granularity == "layer":  # a recorder, whose hooks run whether it records or not
            buffer = table((rows + comm.size, LAYERS, TOP_K), torch.int32)
            self.shuffle.listen(PassRecorder(SimpleNamespace(), LAYERS, buffer).put)
        copies = [((EXPERTS, 2), torch.int16), ((EXPERTS, 2), torch.int32), ((EXPERTS,), torch.int16)]
        self.copies = RankCopies(*(table(*shape) for shape in copies), comm.rank, comm.size)
        self.traffic = TrafficCounter(comm.size, comm.rank, GPU)
        ids = {name: table((rows,), torch.int64) for name in ("input_ids", "req_pool_indices", "positions")}
        self.batch = SimpleNamespace(forward_mode=DECODES, **ids)
        padded = -(-rows // comm.size) * comm.size
        self.hidden, self.residual = (table((padded, WIDTH), torch.bfloat16) for _ in range(2))
        self.chosen = table((padded // comm.size, TOP_K), torch.int32)
        self.weights = table((padded // comm.size, TOP_K), torch.float32)

    def __call__(self) -> torch.Tensor:
        for norm in self.norms:
            rows, residual = self.shuffle.before_experts(
                None, self.hidden, self.residual, self.batch, norm, update=None, read=Read
            )
            self.shuffle.bound(table((1,), torch.int32))
            self.routed()
            if norm is not self.norms[-1]:
                self.shuffle._in_order(rows + residual)  # before_attention, without SGLang's own types
        return self.shuffle.after_last(None, rows, residual, self.batch, SimpleNamespace(update=torch.add))[0]

    def routed(self) -> None:
        """What hooks do at a router."""
        physical = self.copies.to_physical(self.chosen)
        self.traffic.count(torch.where(physical >= 0, physical // (EXPERTS // 2), -1))
        self.shuffle.observe(self.chosen, self.weights)


class Read:
    @staticmethod
    def update_and_read(update, rows, residual, norm):
        return rows, residual


@pytest.fixture
def comm():
    with fake_ranks(0, RANKS) as found:
        yield found


@pytest.mark.parametrize(
    ("rank", "rows", "granularity"),
    [(rows % RANKS, rows, "layer") for rows in SIZES] + [(1, rows, "batch") for rows in SIZES[::5]],
)
def test_a_decode_pass_stays_on_the_device(rank, rows, granularity):
    with fake_ranks(rank, RANKS) as comm, on_gpu():
        captured = Captured(comm, rows, granularity)
        operations, launched = replays(captured)
    assert operations > 20 * LAYERS
    assert {"assign_kernel", "scatter_kernel", "gather_kernel"} <= set(launched)
    assert (granularity == "layer") == ("score_kernel" in launched)


def test_what_routers_name_ahead_stays_there_too(comm):
    with on_gpu():
        assert "score_kernel" in replays(Captured(comm, 8, lookahead=1))[1]


def test_without_triton_it_stays_there_too(comm, monkeypatch):
    from semmoe.runtime import shuffler_device, static

    for module in (static, shuffler_device):
        monkeypatch.setattr(module, "triton_kernels", lambda name, tensor: None)
    with on_gpu():
        assert replays(Captured(comm, 8))[1] == []


def test_the_kernel_that_chooses_copies_is_launched_with_static_shapes():
    from semmoe.runtime.kernels.copies import cover_copies

    with on_gpu():
        ids = table((8, TOP_K), torch.int64)
        tables = table((EXPERTS, 2), torch.int16), table((EXPERTS, 2), torch.int32), table((EXPERTS,), torch.int16)
        assert replays(lambda: cover_copies(ids, *tables, 0, RANKS))[1] == ["cover_kernel"]


def test_negative_controls(comm):
    """What a graph cannot hold is seen: a value that is read, rows by a mask, a copy to the host, memory that grows."""
    kept = []
    wrong = {
        DataDependentOutputException: lambda rows: rows.sum().item(),
        DynamicOutputShapeException: lambda rows: rows[rows > 0],
        CrossingError: lambda rows: rows.cpu(),
        AssertionError: lambda rows: kept.append(rows + 1),
    }
    with on_gpu():
        rows = table((4, 2), torch.float32)
        for error, operation in wrong.items():
            with pytest.raises(error):
                replays(lambda operation=operation: operation(rows))


def test_a_pass_over_prompts_is_no_pass_to_capture(comm):
    """Requests with several tokens are read on the host, which is why engines may capture decode passes alone."""
    with on_gpu():
        captured = Captured(comm, 8)
        shuffler = captured.shuffle._shuffler
        shuffler.reserve(SLOTS)
        slots, decoding = captured.batch.req_pool_indices, table((8,), torch.bool)
        with pytest.raises(RuntimeError, match="numpy"):
            replays(lambda: shuffler.start(captured.batch.input_ids, slots, decoding, slots[:1]))
