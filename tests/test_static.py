"""Handles of equal slices, the pair on real ranks, and SGLang's hooks on padded rows."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ranks import on_ranks
from test_shuffler_device import SLOTS, plan
from test_tokens_slices import TOP_K

from semmoe.core import Plan
from semmoe.engines.sglang.settings import SglangSettings
from semmoe.engines.sglang.static import StaticBoundaryShuffle
from semmoe.engines.static import DeviceSlotWatch
from semmoe.engines.step import SlotWatch, Step
from semmoe.runtime import reference
from semmoe.runtime.shuffler_device import PADDING_SLOT, DeviceShuffler
from semmoe.runtime.static import static_all_gather, static_handle, static_reduce_scatter
from semmoe.topology import Topology


def test_a_handle_by_hand():
    handle = static_handle(torch.tensor([1, 0, 1, 1, 0, 0]), torch.arange(6) < 4, 2, 1)
    assert handle.order.tolist() == [1, -1, -1, 0, 2, 3]
    assert handle.inverse.tolist() == [3, 0, 4, 5, 1, 2]
    assert handle.counts.tolist() == [1, 3]
    assert handle.mine.tolist() == [0, 2, 3]


def test_rows_that_are_no_equal_slices_are_refused():
    with pytest.raises(ValueError, match="5 rows are no equal slices for 2 ranks"):
        static_handle(torch.tensor([1, 0, 1, 1, 0]), torch.ones(5, dtype=torch.bool), 2, 0)


def pair_case(size, seed):
    """Partial sums of every rank (size, N, H), and a handle of every rank; the last rows are padding."""
    generator = torch.Generator().manual_seed(seed)
    rows, padding = 5 * size, seed % 4
    ranks = torch.arange(size).repeat_interleave(5)[torch.randperm(rows, generator=generator)]
    partials = torch.randn(size, rows, 7, generator=generator).to((torch.float32, torch.bfloat16)[seed % 2])
    return partials, ranks, torch.arange(rows) < rows - padding


def scatter_then_gather(comm):
    out = []
    for seed in range(8):
        partials, ranks, real = pair_case(comm.size, seed)
        handle = static_handle(ranks, real, comm.size, comm.rank)
        mine = static_reduce_scatter(comm, partials[comm.rank], handle)
        ids = handle.mine.clamp(min=0).to(torch.uint8)[:, None].expand(-1, 3)
        out.append((mine.float().numpy(), *(t.float().numpy() for t in static_all_gather(comm, [mine, ids], handle))))
    return out


@pytest.mark.dist
@pytest.mark.parametrize("size", [2, 4])
def test_the_pair_is_the_reference_and_pads_with_zeros(size, tmp_path):
    for rank, out in enumerate(on_ranks(size, scatter_then_gather, tmp_path)):
        for seed, (mine, whole, ids) in enumerate(out):
            partials, ranks, real = pair_case(size, seed)
            expected = reference.shuffled_reduce_scatter(list(partials[:, real]), ranks[real])
            number = len(expected[rank])
            assert np.array_equal(mine[:number], expected[rank].float().numpy())
            assert not mine[number:].any()
            assert len(mine) == 5
            total = reference.shuffled_all_gather(expected, ranks[real]).float().numpy()
            assert np.array_equal(whole[real], total)
            assert np.array_equal(ids[real, 0], np.flatnonzero(real))


def step(slots, positions, lengths) -> Step:
    rows = np.repeat(np.arange(len(slots)), lengths)
    where = np.concatenate([np.arange(p, p + n) for p, n in zip(positions, lengths, strict=True)])
    return Step(rows, where, rows, np.array(slots), [str(s) for s in slots], np.array(lengths)[rows] == 1)


def test_slots_that_begin_are_those_of_the_host():
    ours, theirs = DeviceSlotWatch(9, torch.device("cpu")), SlotWatch()
    for slots, positions, lengths in (
        ([5, 2], [0, 0], [3, 2]), ([5, 2], [3, 2], [1, 1]), ([5, 2], [0, 3], [2, 1]), ([7, 2], [4, 5], [1, 2]),
    ):  # fmt: skip
        this = step(slots, positions, lengths)
        begun = ours.begun(*map(torch.from_numpy, (this.slots, *this.ends)))
        assert begun[begun != PADDING_SLOT].tolist() == theirs.begun(this).tolist()


def boundary(shuffler):
    """The shuffle as SGLang's hooks call it, on one rank whose collectives change nothing."""
    comm = SimpleNamespace(reduce_scatter=lambda rows: rows, all_gather=lambda rows: rows)
    norm = object()
    return StaticBoundaryShuffle(shuffler, comm, {id(norm): 0}, lambda: SLOTS), norm


def one_rank_plan() -> Plan:
    many = plan(2)
    return replace(many, topology=Topology(ep_size=1))


def batch(decodes, ids, slots, positions):
    mode = SimpleNamespace(is_decode=lambda: decodes)
    return SimpleNamespace(
        forward_mode=mode, input_ids=torch.tensor(ids), req_pool_indices=torch.tensor(slots),
        positions=torch.tensor(positions),
    )  # fmt: skip


def one_layer(shuffle, norm, forward_batch, hidden):
    """Scatter and last gather; what a hook that does nothing calls gives None."""
    nothing = lambda *args, **kwargs: None  # noqa: E731
    call = {
        "update": SimpleNamespace(update=lambda rows, residual: rows + residual),
        "read": SimpleNamespace(update_and_read=lambda update, rows, residual, norm: (rows, residual)),
    }
    scattered = shuffle.before_experts(nothing, hidden, torch.ones_like(hidden), forward_batch, norm, **call)
    if scattered is None:
        return None, None
    bound = shuffle.bound(torch.zeros(1, dtype=torch.int32))
    shuffle.observe(torch.zeros((len(hidden), TOP_K), dtype=torch.int64), torch.rand(len(hidden), TOP_K))
    return shuffle.after_last(nothing, *scattered, forward_batch, update=call["update"])[0], bound


def test_the_hooks_take_padded_rows_and_say_how_many_are_real():
    shuffle, norm = boundary(DeviceShuffler(one_rank_plan(), 0, 0, "layer", "cpu"))
    hidden = torch.arange(5.0)[:, None].expand(-1, 2)
    prompts = step([3, 4], [0, 0], [2, 1])
    shuffle.begin_pass(batch(False, [0, 0, 1, 0, 0], [3, 4], [0, 1, 0]), lambda: prompts)
    whole, bound = one_layer(shuffle, norm, batch(False, [0, 0, 1, 0, 0], [3, 4], [0, 1, 0]), hidden)
    assert bound.tolist() == [3]
    assert torch.equal(whole[:3], hidden[:3] + 1)
    shuffle.end()
    decoding = batch(True, [7, 8, 0], [3, 4, 0], [2, 1, 0])
    for begins in (True, False):  # while a graph is captured no pass begins
        if begins:
            shuffle.begin_pass(decoding, None)
        whole, bound = one_layer(shuffle, norm, decoding, hidden[:3])
        assert bound.tolist() == [2]
        assert torch.equal(whole[:2], hidden[:2] + 1)
        shuffle.end()
    assert one_layer(shuffle, norm, batch(False, [7], [3], [2]), hidden[:1]) == (None, None)


def test_the_setting_is_checked():
    assert SglangSettings(static="1").environment()["SEMMOE_STATIC"] == "1"
    with pytest.raises(ValueError, match="SEMMOE_STATIC"):
        SglangSettings(static="yes")
