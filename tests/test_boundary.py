"""SGLang's hooks on padded rows."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from test_shuffler import SLOTS, plan
from test_tokens_slices import TOP_K

from semmoe.core import Plan
from semmoe.engines.sglang.shuffle import BoundaryShuffle
from semmoe.engines.step import Pass, SlotWatch, Step
from semmoe.runtime.shuffler import PADDING_SLOT, Shuffler
from semmoe.topology import Topology


def step(slots, positions, lengths) -> Step:
    rows = np.repeat(np.arange(len(slots)), lengths)
    where = np.concatenate([np.arange(p, p + n) for p, n in zip(positions, lengths, strict=True)])
    return Step(rows, where, rows, np.array(slots), [str(s) for s in slots], np.array(lengths)[rows] == 1)


def begins(watch, this: Step) -> list[int]:
    """The slots in which a request begins in this pass."""
    found = watch.begun(*map(torch.from_numpy, (this.slots, *this.ends)))
    return found[found != PADDING_SLOT].tolist()


def begun(watch, slots, positions, lengths) -> list[int]:
    return begins(watch, step(slots, positions, lengths))


def test_a_request_begins_where_its_first_token_does_not_follow():
    watch = SlotWatch(9, torch.device("cpu"))
    assert begun(watch, [5, 2], [0, 0], [3, 2]) == [5, 2]
    assert begun(watch, [5, 2], [3, 2], [1, 1]) == []
    assert begun(watch, [5, 2], [0, 3], [2, 1]) == [5]
    assert begun(watch, [7, 2], [4, 5], [1, 2]) == [7, 2]  # a token of slot 2 was not seen


def test_rejected_drafts_run_again_and_begin_no_request():
    watch = SlotWatch(9, torch.device("cpu"), drafts=2)
    assert begun(watch, [5], [0], [3]) == [5]
    assert begun(watch, [5], [3], [3]) == []  # a token and two drafts
    assert begun(watch, [5], [4], [3]) == []  # both rejected
    assert begun(watch, [5], [4], [1]) == [5]  # three tokens back are another request
    assert begun(watch, [5], [0], [1]) == [5]  # its first token is never a rejected draft


def boundary(shuffler):
    """The shuffle as SGLang's hooks call it, on one rank whose collectives change nothing."""
    comm = SimpleNamespace(reduce_scatter=lambda rows: rows, all_gather=lambda rows: rows)
    norm = object()
    return BoundaryShuffle(shuffler, comm, {id(norm): 0}, lambda: SLOTS), norm


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
    shuffle, norm = boundary(Shuffler(one_rank_plan(), 0, 0, "cpu"))
    hidden = torch.arange(5.0)[:, None].expand(-1, 2)
    prompts = step([3, 4], [0, 0], [2, 1])
    shuffle.begin(Pass(lambda: prompts, decodes=False))
    whole, bound = one_layer(shuffle, norm, batch(False, [0, 0, 1, 0, 0], [3, 4], [0, 1, 0]), hidden)
    assert bound.tolist() == [3]
    assert torch.equal(whole[:3], hidden[:3] + 1)
    shuffle.end()
    decoding = batch(True, [7, 8, 0], [3, 4, 0], [2, 1, 0])
    for begins in (True, False):  # while a graph is captured no pass begins
        if begins:
            shuffle.begin(Pass(lambda: None, decodes=True))
        whole, bound = one_layer(shuffle, norm, decoding, hidden[:3])
        assert bound.tolist() == [2]
        assert torch.equal(whole[:2], hidden[:2] + 1)
        shuffle.end()
    assert one_layer(shuffle, norm, batch(False, [7], [3], [2]), hidden[:1]) == (None, None)


def test_a_pass_after_a_captured_one_is_not_shuffled_by_it():
    """Graphs are captured without a hook around the pass, and so are passes over prompts that warm SGLang up."""
    shuffle, norm = boundary(Shuffler(one_rank_plan(), 0, 0, "cpu"))
    hidden = torch.arange(3.0)[:, None].expand(-1, 2)
    assert one_layer(shuffle, norm, batch(True, [7, 8, 0], [3, 4, 0], [2, 1, 0]), hidden)[0] is not None
    assert one_layer(shuffle, norm, batch(False, [7, 8, 0], [3, 4, 0], [2, 1, 0]), hidden) == (None, None)
