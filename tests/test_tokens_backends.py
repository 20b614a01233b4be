"""numba, torch and Triton come to the same scores and slices, bit for bit. Triton runs in its interpreter here."""

import numpy as np
import pytest
import reference
import torch
from oracles import score_tokens
from triton_runs import NO_TRITON, TARGETS, compiles, interpret

from semmoe.runtime.kernels import on_cpu
from semmoe.runtime.tables import Rows, ScoreTables, States
from semmoe.tokens import kernels
from semmoe.tokens import slices as by_numba
from semmoe.tokens.slices import PathScores

SHAPES = ((1, 1), (7, 1), (3, 8), (16, 8), (50, 3), (129, 8), (300, 16), (1100, 9), (1100, 17), (1026, 2))  # (B, S)
KINDS = ("random", "ties", "equal", "one slice")
NUMBERS = ("tokens", "first", "ranks", "slices")


def batch(kind: str, tokens: int, slices: int) -> np.ndarray:
    rng = np.random.default_rng(tokens * 31 + slices)
    scores = rng.integers(-3000, 3000, (tokens, slices))
    if kind == "ties":
        scores //= 2000
    elif kind == "equal":
        scores[:] = -5
    elif kind == "one slice":
        scores[:, slices // 2] += 100_000
    return scores.astype(np.int32)


LAYER = 3  # of four, in `score_case`


def score_case(seed: int, tokens: int = 45, ranks: int = 12, experts: int = 6, top_k: int = 3):
    """Tables, and the arguments of `score` after them; the number of tokens is rounded up to equal slices."""
    rng = np.random.default_rng(seed)
    lookback, ordered = ((0, 0), (1, 1), (3, 1), (2, 2))[seed % 4]
    rows, path, layers = 9, max((ordered * top_k + lookback - ordered) * experts, 1), LAYER + 1
    tables = PathScores(
        token_rows=rng.integers(0, rows, 21).astype(np.int32), token_source=np.zeros(21, np.uint8),
        token_scores=rng.integers(-127, 128, (layers, rows, ranks)).astype(np.int8),
        token_shift=np.array([0, 1, 7, 5], np.uint8),
        path_scores=rng.integers(-9000, 9000, (layers, path, ranks)).astype(np.int16),
        history_scores=rng.integers(-9000, 9000, (layers, 2 * experts + 1, ranks)).astype(np.int16),
        lookback=lookback, ordered=ordered,
    )  # fmt: skip
    first, slices = ((0, 12), (4, 8), (3, 5))[seed % 3] if ranks > 1 else (0, 1)
    tokens = -(-tokens // slices) * slices
    ids = rng.integers(-2, 24, tokens)
    earlier = rng.integers(0, experts, (lookback, tokens, top_k)).astype(np.uint8)
    history = rng.integers(-5000, 5000, (tokens, ranks)).astype(np.int32) if seed % 2 else None
    return tables, (LAYER, first, slices, ids, earlier, history)


def pass_of(tokens: int, tables: PathScores, experts: int, top_k: int) -> tuple[torch.Tensor, Rows, States]:
    """Experts at every layer, rows of which the last are padding and some are decoded, and states of their slots."""
    rng, (layers, _, ranks) = np.random.default_rng(tokens), tables.history_scores.shape
    slots = rng.permutation(np.arange(1, tokens + 3))[:tokens]
    slots[tokens - tokens // 4 :] = 0
    routed = rng.integers(0, experts, (layers, tokens, top_k)).astype(np.uint8)
    running, previous = (rng.integers(-(2**20), 2**20, (layers, tokens + 3, ranks)).astype(np.int32) for _ in range(2))
    seen = rng.integers(0, 5000, (layers, tokens + 3))
    slots, routed, *states = tensors([slots, routed, running, previous, seen])
    return routed, Rows(slots, slots, slots != 0, slots % 3 > 0, None), States(*states)


def tensors(arguments):
    return [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in arguments]


def check_slices(kernels, seed: int, **sizes: int) -> None:
    """Look tokens up, score them and assign them, at the first layer and at one with a whole look-back."""
    tables, (_, first, slices, ids, earlier, _) = score_case(seed, **sizes)
    here, every = ScoreTables.of(tables), range(LAYER + 1)
    given = here, every, first, slices, torch.from_numpy(ids)
    looked_up = kernels.look_up_tokens(*given)
    assert torch.equal(looked_up, reference.look_up_tokens(*given))
    routed, rows, states = pass_of(len(ids), tables, here.num_experts, earlier.shape[2])
    for layer in (0, LAYER):
        for backend in (reference, on_cpu):
            given = here, layer, first, looked_up, routed, rows, states
            for ours, other in zip(kernels.slices(*given), backend.slices(*given), strict=True):
                assert ours.dtype == other.dtype
                assert torch.equal(ours, other)


def check_assign(kernels, kind: str, tokens: int, slices: int) -> None:
    """The slices of rows whose scores are looked up, and nothing else; the number of rows is rounded up."""
    scores = batch(kind, -(-tokens // slices) * slices, slices)
    nothing = np.zeros((1, 3, slices), np.int16)
    tables = PathScores(
        token_rows=np.zeros(1, np.int32), token_source=np.zeros(1, np.uint8), token_shift=np.zeros(1, np.uint8),
        token_scores=nothing[:, :1].astype(np.int8), path_scores=nothing[:, :1], history_scores=nothing,
        lookback=0, ordered=0,
    )  # fmt: skip
    number, here = len(scores), ScoreTables.of(tables)
    routed, rows, _ = pass_of(number, tables, 1, 1)
    real = torch.ones(number, dtype=torch.bool)
    rows = Rows(rows.slots, rows.slots, real, ~real, None)
    given = here, 0, 0, torch.from_numpy(scores)[None], routed, rows, here.states(number + 3)
    order, inverse, counts = kernels.slices(*given)
    np.testing.assert_array_equal(inverse.numpy() // max(number // slices, 1), by_numba.assign(scores))
    assert torch.equal(order[inverse], torch.arange(number))
    assert counts.tolist() == [number // slices] * slices


def plain_score(tables, layer, first, slices, ids, earlier, history):
    known = [v if 0 <= v < len(tables.token_rows) - 1 else -1 for v in ids]
    out = tables.token_scores[layer, tables.token_rows[known]].astype(np.int32) << tables.token_shift[layer]
    out = out + (tables.history_scores[layer, -1] if history is None else history)
    experts, base = tables.history_scores.shape[1] // 2, 0
    for j, chosen in enumerate(earlier.astype(int)):
        for k in range(chosen.shape[1]):
            place = k * experts if j < tables.ordered else 0
            out += tables.path_scores[layer, base + place + chosen[:, k]]
        base += experts * (chosen.shape[1] if j < tables.ordered else 1)
    return out[:, first : first + slices]


@pytest.mark.parametrize("seed", range(12))
def test_score_sums_the_rows(seed):
    tables, arguments = score_case(seed)
    np.testing.assert_array_equal(score_tokens(by_numba, tables, *arguments), plain_score(tables, *arguments))
    check_slices(on_cpu, seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "slices"), SHAPES)
def test_slices_fit_and_torch_agrees(kind, tokens, slices):
    counts = np.bincount(by_numba.assign(batch(kind, tokens, slices)), minlength=slices)
    assert counts.max() <= -(-tokens // slices)
    assert len(counts) == slices
    scores = batch(kind, tokens, slices)
    np.testing.assert_array_equal(reference.assign(torch.from_numpy(scores)).numpy(), by_numba.assign(scores))


@pytest.mark.parametrize(("tokens", "slices"), [(510, 3), (513, 8), (1100, 17), (2000, 3), (5001, 16), (8192, 8)])
def test_chunks_hold_every_token_once_and_their_slices_fit(tokens, slices):
    parts = kernels.chunks(tokens, slices)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(tokens))
    assert sum(-(-len(part) // slices) for part in parts) == -(-tokens // slices)
    assert max(map(len, parts)) <= kernels.CHUNK
    assert (len(parts) == 1) == (tokens <= 510)
    prompt = np.arange(tokens // 2)  # which takes half of every chunk
    for part in parts:
        assert abs(np.isin(part, prompt).mean() - 0.5) < 0.5 * slices / len(part) + 0.01


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_come_near_the_whole(kind):
    scores = batch(kind, 4096, 8)
    ours, whole = by_numba.assign(scores), kernels.assign(scores)
    assert np.bincount(ours, minlength=8).max() == 512
    total, best, least = (scores[np.arange(4096), a].sum() for a in (ours, whole, np.arange(4096) // 512))
    assert total - least >= 0.99 * (best - least)


def test_no_tokens():
    assert by_numba.assign(np.zeros((0, 4), np.int32)).shape == (0,)
    assert reference.assign(torch.zeros((0, 4), dtype=torch.int32)).shape == (0,)


def test_worked_example():
    np.testing.assert_array_equal(by_numba.assign(np.array([[9, 1], [5, 4], [7, 0], [0, 6]], np.int32)), [0, 1, 0, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_nearly_the_optimum(kind):
    from scipy.optimize import linear_sum_assignment

    scores = batch(kind, 240, 8) + 10_000
    rows, columns = linear_sum_assignment(np.repeat(scores, 30, axis=1), maximize=True)
    ours = scores[np.arange(240), by_numba.assign(scores)].sum()
    assert ours >= 0.98 * scores[rows, columns // 30].sum()


@pytest.mark.slow
def test_triton_interpreted():
    interpret(__file__)


def interpreted() -> None:
    from semmoe.runtime.kernels import on_gpu

    for seed in range(6):
        check_slices(on_gpu, seed)
    for one in ({"tokens": 1}, {"ranks": 1}, {"top_k": 1}, {"tokens": 1, "ranks": 1, "top_k": 1, "experts": 1}):
        check_slices(on_gpu, 2, **one)
    for kind in KINDS:
        for tokens, slices in ((1, 1), (7, 1), (3, 8), (50, 3), (129, 8), (140, 12), (520, 8), (1100, 17)):
            check_assign(on_gpu, kind, tokens, slices)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_triton_compiles(target):
    pytest.importorskip("triton", reason=NO_TRITON)
    from semmoe.runtime.kernels import assign
    from semmoe.runtime.kernels import scores as by_triton

    block = {"BLOCK": 32, "WIDTH": 8}
    pointers = {"out": "*i32", "token_ids": "*i64", "token_rows": "*i32", "token_scores": "*i8", "shifts": "*i32"}
    compiles(target, by_triton.look_up_kernel, pointers, (*NUMBERS, "last", "rows"), block)
    pointers = {"order": "*i64", "inverse": "*i64", "counts": "*i32", "pick": "*i16", "looked_up": "*i32"}
    pointers |= {"path_scores": "*i16", "routed": "*u8", "mean": "*i16", "running": "*i32", "previous": "*i32"}
    pointers |= {"slots": "*i64", "decoding": "*i1", "real": "*i1"}
    constants = {"LAYERS": 2, "ORDERED": 1, "EXPERTS": 32, "BLOCK": 128, "WIDTH": 8}
    for whole in (True, False):
        compiles(target, assign.slices_kernel, pointers, (*NUMBERS, "layer", "top_k"), {**constants, "WHOLE": whole})


if __name__ == "__main__":
    interpreted()
