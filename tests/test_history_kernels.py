"""The kernels of histories against plain torch, bit for bit; Triton runs in its interpreter here."""

import sys

import numpy as np
import oracles
import pytest
import reference
import torch
from triton_runs import NO_TRITON, TARGETS, compiles, interpret

from semmoe.runtime.kernels import on_cpu
from semmoe.runtime.tables import Rows, ScoreTables, States, Turns
from semmoe.tokens.slices import PathScores

SHAPES = ((1, 1, 1, 4), (5, 3, 2, 6), (60, 12, 3, 8), (512, 8, 8, 128))  # rows, ranks, experts of a token, experts


def tables_of(layers: int, ranks: int, experts: int, spread: int = 9000) -> ScoreTables:
    """Random projected rows of experts, and nothing else."""
    rng, nothing = np.random.default_rng(layers), np.zeros((layers, 1, ranks), np.int16)
    rows = rng.integers(-spread, spread, (layers, 2 * experts + 1, ranks)).astype(np.int16)
    policy = PathScores(
        token_rows=np.zeros(1, np.int32), token_source=np.zeros(1, np.uint8), token_shift=np.zeros(layers, np.uint8),
        token_scores=nothing.astype(np.int8), path_scores=nothing, history_scores=rows, lookback=0, ordered=0,
    )  # fmt: skip
    return ScoreTables.of(policy)


def states_of(rng, layers: int, number: int, ranks: int) -> States:
    """Slots that have seen nothing and much."""
    running, previous = (rng.integers(-(2**20), 2**20, (layers, number, ranks)).astype(np.int32) for _ in range(2))
    seen = rng.choice([0, 3, 23, 24, 25, 5000], (layers, number))
    return States(*(torch.from_numpy(state) for state in (running, previous, seen)))


def check_restore(kernels, shape, width: int = 37, turns: int = 3) -> None:
    """Several tokens of each slot; padding may leave anything in its slot, and gets ids of 0."""
    rows, ranks, top_k, experts = shape
    rng, tables = np.random.default_rng(rows), tables_of(2, ranks, experts)
    slots = torch.from_numpy(rng.permutation(np.arange(1, rows + 100))[:rows])
    slots[rows - rows // 4 :] = 0
    batch = Rows(slots, slots, slots != 0, slots != 0, None)
    ours = states_of(rng, 2, rows + 100, ranks)
    theirs = States(*(state.clone() for state in ours))
    for turn in range(turns):
        hidden = torch.from_numpy(rng.standard_normal((rows, width))).to((torch.bfloat16, torch.float32)[turn % 2])
        ids = torch.from_numpy(rng.integers(0, experts, (rows, top_k)).astype(np.uint8))
        given = hidden, ids, torch.from_numpy(rng.permutation(rows)), 1
        mine, expected = (torch.zeros((2, rows, top_k), dtype=torch.uint8) for _ in range(2))
        found = kernels.restore(*given, mine, batch, tables, ours)
        assert torch.equal(found, reference.restore(*given, expected, batch, tables, theirs))
        assert torch.equal(mine, expected)
        for own, other in zip(ours, theirs, strict=True):
            assert torch.equal(own[:, 1:], other[:, 1:])


def check_in_turn(kernels, slots: np.ndarray, ranks: int, top_k: int, experts: int, layers: int = 3) -> None:
    """Slots with several tokens in one pass, in which nothing is observed before the last layer."""
    rng, tables = np.random.default_rng(len(slots)), tables_of(layers, ranks, experts, 32768)
    states = states_of(rng, layers, int(slots.max()) + 3, ranks)
    expected = [state.clone().numpy() for state in states]
    ids = rng.integers(0, experts, (layers, len(slots), top_k)).astype(np.uint8)
    turns, every = Turns.of(slots, torch.device("cpu")), torch.arange(len(slots))
    batch = Rows(torch.from_numpy(slots), torch.from_numpy(slots), torch.from_numpy(slots) != 0, every < 0, turns)
    routed = torch.zeros(ids.shape, dtype=torch.uint8)
    for layer in range(layers):
        kernels.restore(every[:, None], torch.from_numpy(ids[layer]), every, layer, routed, batch, tables, states)
        oracles.observe(*(state[layer] for state in expected), slots, ids[layer], tables.policy.history_scores[layer])
    assert torch.equal(routed, torch.from_numpy(ids * (slots != 0)[:, None]))
    kernels.observe_in_turn(tables, states, turns, routed)
    for ours, theirs in zip(states, expected, strict=True):
        np.testing.assert_array_equal(ours.numpy()[:, 1:], theirs[:, 1:])


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
        ids[rows // 2] = -1
        physical = *given[:2], torch.int32, torch.from_numpy(rng.permutation(250))
        assert torch.equal(kernels.by_weight(*physical), reference.by_weight(*physical))


def check_all(history) -> None:
    for shape in SHAPES:
        check_restore(history, shape)
    for slots, (_, *shape) in zip(TURNS, (*SHAPES, SHAPES[1]), strict=True):
        check_in_turn(history, slots, *shape)
    for rows, top_k in ((1, 1), (5, 3), (300, 8)):
        check_by_weight(history, rows, top_k)


def test_all_on_a_cpu():
    check_all(on_cpu)


def test_triton_interpreted():
    interpret(__file__)


LONG = {
    "restored": lambda history, rows: check_restore(history, (rows, *SHAPES[-1][1:]), turns=2),
    "prompts": lambda history, rows: check_in_turn(history, np.arange(rows) // 200 + 1, *SHAPES[-1][1:], layers=1),
}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [64, 512, 8192])
@pytest.mark.parametrize("kind", LONG)
def test_triton_interpreted_on_long_batches(kind, rows):
    interpret(__file__, kind, str(rows))


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_triton_compiles(target):
    pytest.importorskip("triton", reason=NO_TRITON)
    from semmoe.runtime.kernels import history

    block = {"BLOCK": 64, "WIDTH": 8}
    kinds = {"out": "*bf16", "rows": "*bf16", "inverse": "*i64", "routed": "*u8", "expert_ids": "*u8", "real": "*i1"}
    kinds |= {"slots": "*i64", "table": "*i16", "running": "*i32", "previous": "*i32", "seen": "*i64"}
    numbers = ("layer", "number", "width", "ranks", "experts", "top_k")
    for observes in (True, False):
        sizes = {"OBSERVES": observes, "BLOCK": 1024, "EXPERTS": 8, "WIDTH": 8}
        compiles(target, history.restore_kernel, kinds, numbers, sizes)
    kinds = {"sums": "*i32", "rows": "*i16", "order": "*i64", "expert_ids": "*u8"}
    numbers = ("tokens", "batch", "ranks", "table")
    compiles(target, history.sums_kernel, kinds, numbers, {"TOP_K": 4, **block})
    kinds |= {"running": "*i32", "previous": "*i32", "seen": "*i64", "slots": "*i64", "first": "*i64"}
    compiles(target, history.in_turn_kernel, kinds, (*numbers, "num_slots"), {"TOP_K": 4, "WIDTH": 8})
    kinds = {"out": "*u8", "expert_ids": "*i32", "weights": "*fp32", "logical": "*i64"}
    for maps in (True, False):
        compiles(target, history.by_weight_kernel, kinds, ("number",), {"TOP_K": 8, "MAPS": maps, **block})


if __name__ == "__main__":
    from semmoe.runtime.kernels import history

    if sys.argv[1:]:
        LONG[sys.argv[1]](history, int(sys.argv[2]))
    else:
        check_all(history)
