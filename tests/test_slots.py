"""A shuffler is told once of every slot in which a request begins, by the shared parts of every engine."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from semmoe.engines.layer import TokenRows
from semmoe.engines.sglang.shuffle import BoundaryShuffle
from semmoe.engines.sglang.static import StaticBoundaryShuffle
from semmoe.engines.static import DeviceRows
from semmoe.engines.step import Step
from semmoe.engines.transformers.planned import PlannedModel
from semmoe.runtime.shuffler_device import PADDING_SLOT

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

    def follow(self, other):
        pass


def step(slots, positions, lengths, guesses=False) -> Step:
    rows = np.repeat(np.arange(len(slots)), lengths)
    where = np.concatenate([np.arange(p, p + n) for p, n in zip(positions, lengths, strict=True)])
    return Step(rows, where, rows, np.array(slots), [str(s) for s in slots], np.array(lengths)[rows] == 1, guesses)


def by_host(told, kind=TokenRows):
    rows = kind(told, None) if kind is TokenRows else kind(told, None, {})
    begin = rows.begin_step if kind is TokenRows else lambda read: rows.begin_pass(SimpleNamespace(), read)

    def run(this):
        begin(lambda: this)
        rows.end()

    return rows, run


def by_device(told):
    rows = DeviceRows(told, lambda: SLOTS)

    def run(this):
        if len(this.rows) > len(this.slots):
            rows.start_prompts(this.num_tokens + 3, this, torch.device("cpu"))
        else:
            rows.start_decoding(
                this.num_tokens + 3, *map(torch.from_numpy, (this.token_ids, this.slots, this.positions))
            )

    return rows, run


def by_sglang_on_a_device(told):
    rows = StaticBoundaryShuffle(told, None, {}, lambda: SLOTS)

    def run(this):
        mode = SimpleNamespace(is_decode=lambda: len(this.rows) == len(this.slots))
        arrays = map(torch.from_numpy, (this.token_ids, this.slots, this.positions))
        names = "input_ids", "req_pool_indices", "positions"
        batch = SimpleNamespace(forward_mode=mode, **dict(zip(names, arrays, strict=True)))
        rows.begin_pass(batch, lambda: this)
        rows._padded = this.num_tokens + 3
        for _ in range(2):  # every layer asks
            assert rows._started(batch)
        rows.end()

    return rows, run


ENGINES = {
    "shared": by_host,
    "sglang": lambda told: by_host(told, BoundaryShuffle),
    "device": by_device,
    "sglang on a device": by_sglang_on_a_device,
}


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


@pytest.mark.parametrize("engine", ["shared", "sglang"])
def test_another_plan_s_shuffler_is_told_once_of_every_slot_that_was_used(engine):
    """It has no history of the requests that run; later passes tell of what begins alone."""
    before, after = Told(), Told()
    rows, run = ENGINES[engine](before)
    for *this, _ in PASSES[:2]:
        run(step(*this))
    rows.use(after)
    for *this, _ in PASSES[2:]:
        run(step(*this))
    assert len(before.new) == 2
    assert after.new == [[1, 2, 3, 4, 5, 7], []]  # and slot 0, which is padding on devices alone


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
    model = SimpleNamespace(model=SimpleNamespace(device="cpu"), rows=TokenRows(told, None))
    ids = torch.arange(12).view(3, 4)
    real = torch.tensor([[False, True, True, True], [True] * 4, [False, False, False, True]])
    PlannedModel.begin(model, ids, real, prefill=True)
    PlannedModel.begin(model, ids[:, :1], torch.tensor([[True], [False], [True]]), prefill=False)
    assert told.new == [[1, 2], []]  # and slot 0, which is padding on devices alone
    assert told.slots == [[0, 0, 0, 1, 1, 1, 1, 2], [0, 2]]
