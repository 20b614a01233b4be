"""A shuffler is told once of every slot in which a request begins, by the shared parts of every engine."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from semmoe.engines.layer import TokenRows
from semmoe.engines.sglang.shuffle import BoundaryShuffle
from semmoe.engines.step import Pass, Step
from semmoe.engines.transformers.planned import PlannedModel
from semmoe.runtime.shuffler import PADDING_SLOT

SLOTS = 9
# Slots, positions of their first tokens, numbers of tokens; and the slots in which a request begins.
PASSES = [
    ([5, 2], [0, 0], [3, 2], [2, 5]),
    ([5, 2], [3, 2], [1, 1], []),
    ([5, 2, 7], [4, 0, 0], [1, 1, 1], [2, 7]),  # another request in slot 2
    ([2, 7, 5], [1, 1, 5], [1, 1, 1], []),
]


class Told:
    """A shuffler that keeps what it is told."""

    def __init__(self):
        self.new, self.slots, self.reserved = [], [], 0

    def shuffles(self, num_rows):
        return True

    def start(self, token_ids, slots, decoding, new_slots):
        self.new.append(sorted(slot for slot in np.asarray(new_slots).tolist() if slot != PADDING_SLOT))
        self.slots.append(np.asarray(slots).tolist())

    def reserve(self, num_slots):
        self.reserved += num_slots


class Embedded(PlannedModel):
    """The embedded engine's bookkeeping of requests, in groups of two ranks."""

    traffic, serve_others = None, None

    def __init__(self, shuffler):
        self.model = SimpleNamespace(device=torch.device("cpu"))
        self.rows = TokenRows(shuffler, SimpleNamespace(size=2), lambda: 1 + len(self._lengths))
        self._lengths = np.zeros(0, np.int64)


def step(slots, positions, lengths, guesses=False) -> Step:
    rows = np.repeat(np.arange(len(slots)), lengths)
    where = np.concatenate([np.arange(p, p + n) for p, n in zip(positions, lengths, strict=True)])
    return Step(rows, where, rows, np.array(slots), [str(s) for s in slots], np.array(lengths)[rows] == 1, guesses)


def by_device(told):
    rows = TokenRows(told, None, lambda: SLOTS)

    def run(this):
        if len(this.rows) > len(this.slots):
            rows.start_prompts(this.num_tokens + 3, this, torch.device("cpu"))
        else:
            rows.start_decoding(
                this.num_tokens + 3, *map(torch.from_numpy, (this.token_ids, this.slots, this.positions))
            )

    return rows, run


def by_sglang(told):
    rows = BoundaryShuffle(told, None, {}, lambda: SLOTS)

    def run(this):
        mode = SimpleNamespace(is_decode=lambda: len(this.rows) == len(this.slots))
        arrays = map(torch.from_numpy, (this.token_ids, this.slots, this.positions))
        names = "input_ids", "req_pool_indices", "positions"
        batch = SimpleNamespace(forward_mode=mode, **dict(zip(names, arrays, strict=True)))
        rows.begin(Pass(lambda: this, mode.is_decode()))
        rows._start(this.num_tokens + 3, batch)
        assert rows.shuffled
        rows.end()

    return rows, run


ENGINES = {"shared": by_device, "sglang": by_sglang}


@pytest.mark.parametrize("engine", ENGINES)
def test_every_request_that_begins_is_told_once(engine):
    told = Told()
    _, run = ENGINES[engine](told)
    for *this, _ in PASSES:
        run(step(*this))
    assert told.new == [new for *_, new in PASSES]
    for given, (slots, _, lengths, _) in zip(told.slots, PASSES, strict=True):
        real = np.repeat(slots, lengths).tolist()
        assert given == real + [PADDING_SLOT] * (len(given) - len(real))


@pytest.mark.parametrize("engine", ENGINES)
def test_another_plan_s_shuffler_reserves_slots_anew(engine):
    """So it has no history of the requests that run; later passes tell of what begins alone."""
    before, after = Told(), Told()
    rows, run = ENGINES[engine](before)
    for *this, _ in PASSES[:2]:
        run(step(*this))
    rows.make = lambda plan: after
    rows.prepare("another plan")
    rows.switch()
    for *this, _ in PASSES[2:]:
        run(step(*this))
    assert len(before.new) == 2
    assert after.reserved == SLOTS + 1
    assert after.new == [[2, 7], []]


def test_drafts_begin_no_request_on_a_device():
    """Their tokens are nobody's: they have a slot of their own, behind those of requests."""
    told = Told()
    rows, run = by_device(told)
    run(step([5, 2], [0, 0], [3, 2]))
    rows.start_prompts(4, step([0], [0], [4], guesses=True), torch.device("cpu"))
    run(step([5, 2], [3, 2], [1, 1]))
    assert told.slots[1] == [SLOTS] * 4
    assert (told.new[0], told.new[2]) == ([2, 5], [])
    assert told.reserved == SLOTS + 1


def test_on_transformers_requests_begin_with_the_prefill_alone():
    told = Told()
    model = Embedded(told)
    ids = torch.arange(12).view(3, 4)
    real = torch.tensor([[False, True, True, True], [True] * 4, [False, False, False, True]])
    PlannedModel.begin(model, ids, real, prefill=True)
    PlannedModel.begin(model, ids[:, :1], torch.tensor([[True], [False], [True]]), prefill=False)
    PlannedModel.begin(model, ids[:2], real[:2], prefill=True)
    assert told.new == [[1, 2, 3], [], [1, 2]]
    assert told.slots == [[1, 1, 1, 2, 2, 2, 2, 3], [1, 3], [1, 1, 1, 2, 2, 2, 2, PADDING_SLOT]]
    assert model.rows.passes == {"shuffled": 3}
