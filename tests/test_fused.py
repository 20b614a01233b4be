"""The fused pair over buffers of all ranks, against the specification bit for bit; its refusals.

Triton runs in its interpreter. Ranks are threads of one process of which one runs at a time, from barrier to barrier,
as the interpreter serves one kernel at a time.
"""

import os
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module

import numpy as np
import pytest
import reference
import torch
from ranks import on_ranks
from test_boundary import batch, one_layer
from test_shuffle import pair_case
from test_shuffle_kernels import as_interpreted, wide
from test_shuffler import SIZE, SLOTS, TOP_K, plan, reserved
from triton_runs import interpret

from semmoe.engines.sglang.settings import SglangSettings
from semmoe.engines.sglang.shuffle import BoundaryShuffle
from semmoe.engines.step import Pass
from semmoe.runtime import kernels
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.fused import PeerBuffers, fused_all_gather, fused_reduce_scatter, symmetric_buffers
from semmoe.runtime.shuffle import shuffle_handle
from semmoe.runtime.shuffler import Shuffler

BYTES = 4096
# Both ranks may then share one GPU, each with memory of its own that the other maps.
ON_ONE = os.environ.get("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES") == "1"


class Emulated:
    """Ranks as threads that take turns, and their buffers; order: of the addresses, by default the ranks'."""

    def __init__(self, size: int, order: list[int] | None = None) -> None:
        self.own = [torch.full((BYTES,), 99, dtype=torch.uint8) for _ in range(size)]  # what lies there is never zero
        starts = [buffer.data_ptr() for buffer in self.own]
        self.addresses = torch.tensor([starts[j] for j in order or range(size)])
        self.turn, self.all_here = threading.Lock(), threading.Barrier(size, timeout=60)

    def run(self, job) -> list:
        """What `job(comm, buffers)` gave on every rank."""

        def on_rank(rank):
            try:
                with self.turn:
                    return job(Communicator(None, rank, len(self.own)), EmulatedBuffers(self, rank))
            except BaseException:
                self.all_here.abort()  # or the others would wait for this rank
                raise

        with ThreadPoolExecutor(len(self.own)) as pool:
            return list(pool.map(on_rank, range(len(self.own))))


class EmulatedBuffers(PeerBuffers):
    def __init__(self, ranks: Emulated, rank: int) -> None:
        super().__init__(ranks.own[rank], ranks.addresses)
        self._ranks = ranks

    def barrier(self) -> None:
        self._ranks.turn.release()
        try:
            self._ranks.all_here.wait()
        finally:
            self._ranks.turn.acquire()


def pair(comm, buffers, seed, device="cpu") -> list[torch.Tensor]:
    """The sums of this rank's tokens; these and their ids in all tokens' order."""
    partials, ranks, real = (tensor.to(device) for tensor in pair_case(comm.size, seed))
    handle = shuffle_handle(ranks, real, comm.size, comm.rank)
    mine = fused_reduce_scatter(comm, buffers, partials[comm.rank], handle)
    ids = handle.mine.clamp(min=0).to(torch.uint8)[:, None].expand(-1, 3)
    return [mine, *fused_all_gather(comm, buffers, [mine, ids], handle)]


def check_pair(comm, buffers, seed, rounded, device="cpu") -> None:
    """rounded: what a float32 sum becomes in another type there."""
    partials, ranks, real = pair_case(comm.size, seed)
    sums = reference.shuffled_reduce_scatter(wide(list(partials[:, real])), ranks[real])
    sums = [rounded(rows, partials.dtype) for rows in sums]
    comm.reset_counts()
    mine, whole, ids = (tensor.cpu() for tensor in pair(comm, buffers, seed, device))
    number, row_bytes = len(sums[comm.rank]), partials.shape[2] * partials.element_size()
    assert mine.shape == (5, 7)
    assert torch.equal(mine[:number], sums[comm.rank])
    assert (mine[number:] == 0).all()
    assert torch.equal(whole[real], reference.shuffled_all_gather(sums, ranks[real]))
    assert (whole[~real] == 0).all()
    assert ids[real, 0].tolist() == np.flatnonzero(real).tolist()
    assert comm.sent["reduce_scatter"] == (comm.size - 1) * 5 * row_bytes
    assert comm.sent["all_gather"] == (comm.size - 1) * 5 * (row_bytes + 3)


def check_pairs(comm, buffers, rounded=as_interpreted, device="cpu") -> None:
    """Both types, and 0 to 3 rows of padding; one after another in the same buffers."""
    for seed in range(4):
        check_pair(comm, buffers, seed, rounded, device)


def check_that_a_wrong_order_shows() -> None:
    """Of addresses: rows come from another rank, and sums are added in another order."""
    wrong, right = (Emulated(4, order).run(partial(pair, seed=0)) for order in ([3, 1, 2, 0], [0, 1, 2, 3]))
    for found, expected in zip(wrong, right, strict=True):
        assert not torch.equal(found[0], expected[0])
        assert torch.allclose(found[0], expected[0], atol=1e-5)
        assert not torch.equal(found[2], expected[2])


def check_a_pass_too_large() -> None:
    handle = shuffle_handle(torch.tensor([0, 1]), torch.ones(2, dtype=torch.bool), 2, 0)
    with pytest.raises(ValueError, match="a pass of 2 rows needs more than the 4096 bytes of a rank's buffer"):
        fused_reduce_scatter(Communicator(None, 0, 2), EmulatedBuffers(Emulated(2), 0), torch.zeros(2, BYTES), handle)


def through_the_hooks(comm, buffers) -> list[torch.Tensor]:
    """A decode pass of SGLang's hooks on every rank, with the plan's slices: the whole rows after one layer."""
    norm, shuffler = object(), Shuffler(plan(2), 1, comm.rank, "layer", "cpu")
    shuffle = BoundaryShuffle(shuffler, comm, {id(norm): 0}, lambda: SLOTS, buffers)
    decoding, out = batch(True, [7, 8, 3, 0], [3, 4, 9, 0], [2, 1, 5, 0]), []
    for _ in range(3):
        shuffle.begin(Pass(lambda: None, decodes=True))
        hidden = torch.arange(8.0).view(4, 2) + 100 * comm.rank
        out.append(one_layer(shuffle, norm, decoding, hidden)[0])
        shuffle.end()
    return out


def check_the_hooks() -> None:
    """One of the rows is padding; the residual is 1 everywhere."""
    for passes in Emulated(SIZE).run(through_the_hooks):
        for whole in passes:
            assert torch.equal(whole[:3], 2 * torch.arange(6.0).view(3, 2) + 101)


def handles(seed: int) -> list[torch.Tensor]:
    """Of some decode passes with padding, by whatever decides them here."""
    shuffler, out = reserved(plan(seed)), []
    for turn in range(3):
        rng = np.random.default_rng((seed, turn))
        shuffler.start(
            torch.from_numpy(rng.integers(-1, 40, 8)), torch.tensor([3, 4, 5, 7, 9, 0, 0, 0]), None, torch.tensor([0])
        )
        for layer in (None, 0, 1):
            handle = shuffler.slices(layer)
            out += [handle.order, handle.inverse, handle.counts]
            if layer is not None:
                shuffler.observe(layer, torch.from_numpy(rng.integers(0, 4, (8, TOP_K))))
    return out


def check_handles() -> None:
    """Predicted, assigned and sorted by kernels as by torch; they stay in place for what comes after."""
    expected = [handles(seed) for seed in range(2)]
    kernels.of = lambda device: import_module("semmoe.runtime.kernels.on_gpu")
    for seed in range(2):
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(handles(seed), expected[seed], strict=True))


def test_triton_interpreted():
    interpret(__file__)


def interpreted() -> None:
    import semmoe.runtime.kernels.shuffle as triton_pair

    check_handles()
    triton_pair.COLUMNS = 4  # several programs a row
    for size in (2, 4):
        Emulated(size).run(check_pairs)
    check_that_a_wrong_order_shows()
    check_a_pass_too_large()
    check_the_hooks()


class NoLaunch:
    """In place of a kernel, which a device without memory cannot run."""

    def __getitem__(self, grid):
        return lambda *args, **constants: None


class OnMeta(PeerBuffers):
    def barrier(self) -> None:
        pass


def test_nothing_of_the_pair_leaves_the_device(monkeypatch):
    """On torch's device without memory; results are new, what is shared lies in the buffer made before."""
    triton_pair = pytest.importorskip("semmoe.runtime.kernels.shuffle")
    for name in ("reduce_scatter_kernel", "all_gather_kernel"):
        monkeypatch.setattr(triton_pair, name, NoLaunch())
    monkeypatch.setattr(kernels, "of", lambda device: reference)
    partials, ranks, real = (tensor.to("meta") for tensor in pair_case(2, 1))
    handle = shuffle_handle(ranks, real, 2, 1)
    buffers = OnMeta(torch.empty(BYTES, dtype=torch.uint8, device="meta"), torch.empty(2, dtype=int, device="meta"))
    comm = Communicator(None, 1, 2)
    mine = fused_reduce_scatter(comm, buffers, partials[1], handle)
    whole, ids = fused_all_gather(comm, buffers, [mine, handle.mine[:, None]], handle)
    assert [(t.shape, t.dtype, t.is_meta) for t in (mine, whole, ids)] == [
        ((5, 7), torch.bfloat16, True), ((10, 7), torch.bfloat16, True), ((10, 1), torch.int64, True)
    ]  # fmt: skip


def refusal(comm, device="cuda", dtype=torch.bfloat16) -> str:
    with pytest.raises(ValueError) as refused:
        symmetric_buffers(comm, device, dtype, BYTES)
    return str(refused.value)


def refusals(comm) -> list[str]:
    found = [refusal(comm, "cpu"), refusal(comm, dtype=torch.float8_e4m3fn), refusal(comm)]
    socket.gethostname = lambda: f"node-{comm.rank}"
    return [*found, refusal(comm)]


@pytest.mark.dist
@pytest.mark.skipif(torch.cuda.is_available(), reason="there symmetric memory may be had")
def test_what_cannot_be_is_refused_in_one_line(tmp_path):
    pytest.importorskip("triton")
    for found in on_ranks(2, refusals, tmp_path):
        for line, words in zip(
            found,
            (
                "on GPUs only, not on cpu", "float8_e4m3fn cannot be summed", "symmetric memory gives no buffers: ",
                "on one node, this one is on node-0, node-1",
            ),
            strict=True,
        ):  # fmt: skip
            assert words in line
            assert "\n" not in line


def on_gpus(comm) -> None:
    torch.cuda.set_device(comm.rank % torch.cuda.device_count())
    buffers = symmetric_buffers(comm, "cuda", torch.float32, BYTES)
    check_pairs(comm, buffers, torch.Tensor.to, "cuda")


@pytest.mark.dist
@pytest.mark.skipif(
    torch.cuda.device_count() < 2 and not (torch.cuda.is_available() and ON_ONE), reason="needs two GPUs"
)
def test_symmetric_memory(tmp_path):
    on_ranks(2, on_gpus, tmp_path)


def test_without_triton_it_is_refused(monkeypatch):
    monkeypatch.setattr("semmoe.runtime.fused.find_spec", lambda name: None)
    assert "need Triton" in refusal(Communicator(None, 0, 1))


def test_the_setting_is_never_ignored():
    assert SglangSettings(plan="p", fused="1").environment()["SEMMOE_FUSED"] == "1"
    assert SglangSettings(fused="0").fused == "0"
    with pytest.raises(ValueError, match="SEMMOE_FUSED must be 0, 1 or empty, not 'yes'"):
        SglangSettings(plan="p", fused="yes")
    for others in ({}, {"plan": "p", "shuffle": "off"}):
        with pytest.raises(ValueError, match=r"SEMMOE_FUSED=1 .* needs SEMMOE_PLAN"):
            SglangSettings(fused="1", **others)


if __name__ == "__main__":
    interpreted()
