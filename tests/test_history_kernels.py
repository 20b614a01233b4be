"""The kernels of histories against plain torch, bit for bit; Triton runs in its interpreter here."""

import numpy as np
import oracles
import pytest
import reference
import torch
from triton_runs import NO_TRITON, TARGETS, compiles, interpret

from semmoe.runtime.kernels import on_cpu
from semmoe.runtime.tables import Turns

SHAPES = ((1, 1, 1, 4), (5, 3, 2, 6), (60, 12, 3, 8), (512, 8, 8, 128))  # rows, ranks, experts of a token, experts


def history_case(rows: int, ranks: int, top_k: int, experts: int):
    """One layer's rows, states that have seen few tokens and many, slots with padding among them, and what is told."""
    rng, number = np.random.default_rng(rows), rows + 100
    table = rng.integers(-9000, 9000, (2 * experts + 1, ranks)).astype(np.int16)
    running = rng.integers(-(2**20), 2**20, (number, ranks)).astype(np.int32)
    previous = rng.integers(-9000, 9000, (number, ranks)).astype(np.int32)
    seen = rng.integers(0, 5000, number)
    slots = rng.permutation(np.arange(1, number))[:rows]
    slots[rows - rows // 4 :] = 0
    ids = rng.integers(0, experts, (rows, top_k)).astype(np.uint8)
    return [torch.from_numpy(array) for array in (table, running, previous, seen, slots, ids)]


def check_history(kernels, shape) -> None:
    """After three tokens; padding may leave anything in its slot, and gets ids of 0."""
    table, running, previous, seen, slots, ids = history_case(*shape)
    ours = theirs = (running, previous, seen)
    for turn in range(3):
        given = slots, ids.roll(turn, 0)
        ours, theirs = ([state.clone() for state in states] for states in (ours, theirs))
        mine, expected = (f(table, *s, *given) for f, s in ((kernels.observe, ours), (reference.observe, theirs)))
        assert torch.equal(mine, expected)
        for own, other in zip(ours, theirs, strict=True):
            assert torch.equal(own[1:], other[1:])
    decoding = slots % 3 > 0
    known = (f(table, *theirs[:2], slots, decoding) for f in (kernels.contribution, reference.contribution))
    assert torch.equal(*known)


def check_in_turn(
    kernels, slots: np.ndarray, ranks: int, top_k: int, experts: int, layers: int = 3, on=torch.Tensor.cpu
):
    """Slots that have seen nothing and much, in one pass; what they chose at every layer."""
    rng, number = np.random.default_rng(len(slots)), int(slots.max()) + 3
    table = rng.integers(-32768, 32768, (layers, 2 * experts + 1, ranks)).astype(np.int16)
    running, previous = (rng.integers(-(2**20), 2**20, (layers, number, ranks)).astype(np.int32) for _ in range(2))
    seen = rng.choice([0, 3, 23, 24, 25, 5000], (layers, number))
    ids = rng.integers(0, experts, (layers, len(slots), top_k)).astype(np.uint8)
    given = [on(torch.from_numpy(array)) for array in (table, running, previous, seen)]
    turns = Turns.of(slots, given[0].device)
    kernels.observe_in_turn(*given, turns, on(torch.from_numpy(ids)))
    for layer in range(layers):
        oracles.observe(running[layer], previous[layer], seen[layer], slots, ids[layer], table[layer])
    for ours, theirs in zip(given[1:], (running, previous, seen), strict=True):
        np.testing.assert_array_equal(ours.cpu().numpy()[:, 1:], theirs[:, 1:])


TURNS = (
    np.array([3]), np.array([0, 0]), np.array([2, 5, 2, 2, 0, 5, 1]), np.repeat([4, 1, 0], [40, 1, 3]),
    np.random.default_rng(0).integers(0, 9, 200),
)  # fmt: skip


@pytest.mark.parametrize("slots", TURNS, ids=len)
def test_several_tokens_of_a_slot_in_plain_torch(slots):
    check_in_turn(reference, slots, 3, 2, 6)


def check_by_weight(kernels, rows: int, top_k: int) -> None:
    """With equal weights, and with some that are no numbers."""
    rng = np.random.default_rng(rows)
    ids = torch.from_numpy(rng.integers(0, 250, (rows, top_k)).astype(np.int32))
    for weights in (rng.random((rows, top_k)), rng.integers(0, 3, (rows, top_k)) / 2):
        weights[:: max(rows // 3, 1), top_k // 2] = np.nan
        given = ids, torch.from_numpy(weights.astype(np.float32)), torch.uint8
        assert torch.equal(kernels.by_weight(*given), reference.by_weight(*given))


def check_all(history) -> None:
    for shape in SHAPES:
        check_history(history, shape)
    for slots, (_, *shape) in zip(TURNS, (*SHAPES, SHAPES[1]), strict=True):
        check_in_turn(history, slots, *shape)
    for rows, top_k in ((1, 1), (5, 3), (300, 8)):
        check_by_weight(history, rows, top_k)


def test_all_on_a_cpu():
    check_all(on_cpu)


def test_triton_interpreted():
    interpret(__file__)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_triton_compiles(target):
    pytest.importorskip("triton", reason=NO_TRITON)
    from semmoe.runtime.kernels import history

    block = {"BLOCK": 64, "WIDTH": 8}
    states = {"running": "*i32", "previous": "*i32", "slots": "*i64", "out": "*u8"}
    kinds = {**states, "out": "*i32", "mean": "*i16", "decoding": "*i1"}
    compiles(target, history.contribution_kernel, kinds, ("number", "ranks"), block)
    kinds = {**states, "rows": "*i16", "seen": "*i64", "expert_ids": "*u8"}
    compiles(target, history.observe_kernel, kinds, ("number", "ranks", "experts"), {**block, "TOP_K": 4})
    kinds = {"sums": "*i32", "rows": "*i16", "order": "*i64", "expert_ids": "*u8"}
    numbers = ("tokens", "batch", "ranks", "table")
    compiles(target, history.sums_kernel, kinds, numbers, {"TOP_K": 4, **block})
    kinds |= {"running": "*i32", "previous": "*i32", "seen": "*i64", "slots": "*i64", "first": "*i64"}
    compiles(target, history.in_turn_kernel, kinds, (*numbers, "num_slots"), {"TOP_K": 4, "WIDTH": 8})
    kinds = {"out": "*u8", "expert_ids": "*i32", "weights": "*fp32"}
    compiles(target, history.by_weight_kernel, kinds, ("number",), {"TOP_K": 8, **block})


if __name__ == "__main__":
    from semmoe.runtime.kernels import history

    check_all(history)
