"""The shuffler: the slices of plain loops bit for bit, padding last, and nothing that waits for a device.

It runs with the kernels of a CPU, in plain torch, and once with Triton's in the interpreter.
"""

from dataclasses import replace
from importlib import import_module

import numpy as np
import oracles
import pytest
import reference
import torch
from alone import tell
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_fingerprint
from test_tokens_slices import EXPERTS, LAYERS, TOP_K, VOCABULARY, random_tables
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton_runs import interpret

from semmoe.core import Placement, Plan
from semmoe.paper import policies
from semmoe.paper.policies import PaperTables
from semmoe.requests.policy import RoundRobin
from semmoe.runtime import kernels
from semmoe.runtime.shuffle import shuffle_handle, take_rows
from semmoe.runtime.shuffler import PADDING_SLOT, Shuffler
from semmoe.runtime.tables import Rows, ScoreTables, Turns
from semmoe.tokens import slices as host_scores
from semmoe.tokens.slices import ByPosition, assign
from semmoe.topology import Topology

SIZE, GROUP, SLOTS = 2, 1, 40
NONE_NEW = torch.tensor([PADDING_SLOT])


def plan(seed=0, tables="scores") -> Plan:
    """Two groups of two ranks."""
    topology = Topology(ep_size=4, dp_size=2)
    placed = np.tile(np.arange(EXPERTS, dtype=np.int32), (LAYERS, 1))
    found = (
        random_tables(seed, *((2, 1), (1, 1), (3, 2), (0, 0))[seed % 4]) if tables == "scores" else paper_tables(seed)
    )
    return Plan(
        topology=topology,
        placement=Placement(physical_to_logical_map=placed, num_experts=EXPERTS, ep_size=4),
        tokens=ByPosition() if tables is None else found,
        requests=RoundRobin(num_groups=2),
        fingerprint=make_fingerprint(vocab_size=VOCABULARY, num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K),
        method="test",
    )


def paper_tables(seed) -> PaperTables:
    rng, tokens, paths = np.random.default_rng(seed), (LAYERS, 2, VOCABULARY + 1), (LAYERS, 2, SIZE)
    return PaperTables(
        token_ranks=rng.integers(0, SIZE, tokens).astype(np.int16),
        token_confidence=rng.random(tokens).astype(np.float16),
        path_ranks=rng.integers(0, SIZE, paths).astype(np.int16),
        path_confidence=rng.random(paths).astype(np.float16),
        token_source=np.zeros(VOCABULARY + 1, np.uint8),
        lookback=1,
    )


def reserved(plan, device="cpu") -> Shuffler:
    shuffler = Shuffler(plan, GROUP, 0, device)
    shuffler.reserve(SLOTS)
    return shuffler


@pytest.fixture
def in_plain_torch(monkeypatch):
    """Kernels that run on fake tensors and on devices that are not there."""
    monkeypatch.setattr(kernels, "of", lambda device: reference)


@pytest.fixture(params=["on a CPU", "in plain torch"])
def backend(request, monkeypatch):
    if request.param == "in plain torch":
        monkeypatch.setattr(kernels, "of", lambda device: reference)


def handle_of(slices: np.ndarray):
    """The handle of slices (N,) of rows that are all real."""
    return shuffle_handle(torch.from_numpy(slices).long(), torch.ones(len(slices), dtype=torch.bool), SIZE, 0)


def fresh_or_padding(new_slots: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.append(new_slots, PADDING_SLOT))


def random_passes(seed, passes=8):
    """Token ids, slots, decoding, slots that begin, and whether any has several tokens; an even number of tokens."""
    rng, running = np.random.default_rng(seed), []
    for i in range(passes):
        running = [
            slot for slot in running if i % 3 or rng.random() < 0.7
        ]  # others end, and their slots are used again
        fresh = rng.permutation(np.setdiff1d(np.arange(1, 12), running))[: rng.integers(0, 4)] if i % 3 == 0 else []
        lengths = [1] * len(running) + rng.integers(1, 6, len(fresh)).tolist()
        slots = np.repeat([*running, *fresh], lengths).astype(np.int64)
        decoding = np.repeat([True] * len(running) + [False] * len(fresh), lengths).astype(bool)
        running = [*running, *fresh]
        cut = len(slots) // 2 * 2  # what is cut was not there: its request goes on in the next pass
        yield rng.integers(-1, VOCABULARY + 2, cut), slots[:cut], decoding[:cut], np.array(fresh, np.int64), i % 3 == 0


def routed(seed, layer, tokens) -> torch.Tensor:
    rng = np.random.default_rng((seed, layer, tokens))
    return torch.from_numpy(rng.permuted(np.tile(np.arange(EXPERTS), (tokens, 1)), axis=1)[:, :TOP_K].copy())


def fitted(values: np.ndarray, padding: int) -> torch.Tensor:
    return torch.from_numpy(np.append(values, np.zeros(padding, values.dtype)))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("seed", range(12))
def test_slices_are_those_of_plain_loops(seed):
    check_slices(seed)


def check_slices(seed) -> None:
    planned = plan(seed)
    ours, theirs = reserved(planned), oracles.PlainShuffler(planned, GROUP)
    waiting = np.zeros(0, np.int64)
    for number, (ids, slots, decoding, fresh, several) in enumerate(random_passes(seed)):
        waiting = np.union1d(waiting, fresh)
        if len(ids) == 0:  # nothing is begun without rows
            continue
        fresh, waiting = waiting, waiting[:0]
        told = torch.from_numpy(decoding) if several else None
        ours.start(*map(torch.from_numpy, (ids, slots)), told, fresh_or_padding(fresh))
        theirs.start(ids, slots, decoding, fresh)
        for layer in (None, *range(LAYERS)):
            mine, other = ours.slices(layer), handle_of(theirs.slices(layer))
            assert torch.equal(mine.order, other.order)
            assert torch.equal(mine.inverse, other.inverse)
            assert torch.equal(mine.counts, other.counts)
            if layer is not None:
                chosen = routed(seed * 100 + number, layer, len(ids))
                tell(ours, layer, chosen)
                theirs.observe(layer, chosen.numpy())


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("seed", range(4))
def test_later_tokens_of_a_prompt_do_not_know_the_earlier_ones(seed):
    """A prompt in two parts, the second beside a decoded token of another request, which alone has a history."""
    planned = plan(seed)
    tables, history = planned.tokens, oracles.History(planned.tokens, 3)
    first, second, decoding = np.array([1, 1, 2, 2, 2, 2]), np.array([1, 1, 1, 2, 1, 1]), np.arange(6) == 3
    device = reserved(planned)
    for number, (slots, new) in enumerate([(first, np.array([1, 2])), (second, np.array([], np.int64))]):
        decodes = decoding & (number == 1)
        ids = np.random.default_rng(seed).integers(VOCABULARY, size=6)
        device.start(*map(torch.from_numpy, (ids, slots, decodes)), fresh_or_padding(new))
        earlier = []
        for layer in range(LAYERS):
            known = np.where(decodes[:, None], history.contribution(layer, slots), tables.history_scores[layer, -1])
            before = np.array(earlier[: tables.lookback]).reshape(-1, 6, TOP_K).astype(np.int64)
            scores = oracles.score_tokens(
                host_scores, tables, layer, GROUP * SIZE, SIZE, ids, before, known.astype(np.int32)
            )
            assert torch.equal(device.slices(layer).order, handle_of(assign(scores)).order)
            chosen = routed(seed * 10 + number, layer, 6)
            tell(device, layer, chosen)
            history.observe(layer, slots, chosen.numpy())
            earlier.insert(0, chosen.numpy())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("padding", [0, 3])
def test_the_papers_tables(seed, padding):
    """Real rows are assigned as in the replay, by devices at the layer before; padding fills the slices."""
    planned = plan(seed, "paper")
    ours, tokens = reserved(planned), 13 if padding else 12
    device_of = policies.device_of_expert(planned.placement, planned.topology)[:, GROUP]
    ids = np.random.default_rng(seed).integers(-1, VOCABULARY + 2, tokens)
    ours.start(fitted(ids, padding), fitted(np.arange(1, tokens + 1), padding), None, NONE_NEW)
    devices = None
    for layer in range(LAYERS):
        preference = policies.look_up(planned.tokens, layer, GROUP, ids, devices)
        expected, handle = policies.assign_slices(preference, SIZE), ours.slices(layer)
        place = handle.inverse[:tokens].numpy() // handle.slice_rows
        np.testing.assert_array_equal(place, expected)
        assert handle.counts.tolist() == np.bincount(expected, minlength=SIZE).tolist()
        chosen = routed(seed, layer, tokens)
        tell(ours, layer, torch.cat([chosen, torch.full((padding, TOP_K), 255)]))
        devices = policies.majority_rank(chosen.numpy(), device_of[layer], SIZE)[:, None]


def test_the_papers_tables_are_refused_on_a_gpu():
    with pytest.raises(ValueError, match="assigned on the host: solve one by method semmoe"):
        reserved(plan(0, "paper"), device="meta")


def test_a_gpu_without_triton_is_refused(monkeypatch):
    def absent(name):
        raise ImportError(name)

    monkeypatch.setattr("semmoe.runtime.kernels.import_module", absent)
    with pytest.raises(ValueError, match="on cuda semmoe needs Triton, which is not installed"):
        kernels.of(torch.device("cuda"))


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("seed", range(6))
def test_histories_are_those_of_plain_loops(seed):
    """Passes of one token a slot, whose sums are often negative, and of several."""
    rng, tables = np.random.default_rng(seed), random_tables(seed)
    here, ours, theirs = kernels.of(torch.device("cpu")), ScoreTables.of(tables), oracles.History(tables, SLOTS)
    states = ours.states(SLOTS)
    for turn in range(40):
        several = turn % 5 == 0
        slots = rng.integers(1, 6, 9) if several else rng.permutation(np.arange(1, 8))[:5]
        ids = rng.integers(0, EXPERTS, (len(slots), TOP_K))
        theirs.observe(1, slots, ids)
        if several:
            turns = Turns.of(slots, torch.device("cpu"))
            here.observe_in_turn(ours, states, turns, torch.from_numpy(ids).expand(LAYERS, *ids.shape))
        else:
            padded, chosen = fitted(slots, 3), torch.from_numpy(np.append(ids, np.full((3, TOP_K), 99), axis=0))
            order, real = torch.randperm(8), padded > 0
            batch = Rows(padded, padded, real, real, None)
            routed = torch.zeros((LAYERS, 8, TOP_K), dtype=torch.uint8)
            # Rows of the slices, which come in `order`, are put back.
            rows = here.restore(order[:, None], chosen[order], order.argsort(), 1, routed, batch, ours, states)
            assert rows[:, 0].tolist() == list(range(8))
            assert torch.equal(routed[1].long(), chosen * real[:, None])
        if turn == 20:
            theirs.reset(np.array([2, 3]))
            ours.reset(states, torch.tensor([2, 3, PADDING_SLOT, PADDING_SLOT]))
        for mine, other in zip(states, theirs.state(1), strict=True):
            np.testing.assert_array_equal(mine[1, 1:8].numpy(), other[1:8])


def test_the_tokens_that_stand_in_padding_change_nothing():
    """Whatever ids an engine pads with, their scores do not count."""
    slots, orders = fitted(np.array([7, 1, 2]), 3), []
    for padding in range(VOCABULARY):
        shuffler = reserved(plan(5))
        shuffler.start(torch.tensor([3, 4, 5, *[padding] * 3]), slots, None, NONE_NEW)
        orders.append(shuffler.slices(0).order.tolist())
    assert all(order == orders[0] for order in orders)


def test_padding_makes_room_for_tokens():
    """Of three tokens that want slice 0 the one that loses least moves; then the padding is where there is room."""
    padding = [0, 0]  # as it scores
    rows = torch.tensor([[9, 1], [5, 4], [7, 0], padding], dtype=torch.int32)
    assert reference.assign(rows).tolist() == [0, 1, 0, 1]
    assert assign(rows.numpy()).tolist() == [0, 1, 0, 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 12), st.integers(0, 9))
def test_with_padding_every_token_comes_once_and_first(seed, tokens, padding):
    padding += (tokens + padding) % SIZE
    rng, shuffler = np.random.default_rng(seed), reserved(plan(seed))
    shuffler.start(
        fitted(rng.integers(0, VOCABULARY, tokens), padding), fitted(np.arange(1, tokens + 1), padding), None, NONE_NEW
    )
    for layer in (None, *range(LAYERS)) if tokens + padding else ():
        handle = shuffler.slices(layer)
        slices = handle.order.view(SIZE, handle.slice_rows)
        assert sorted(handle.order[handle.order >= 0].tolist()) == list(range(tokens))
        assert torch.equal((slices >= 0).sum(1).int(), handle.counts)
        assert torch.equal(slices >= 0, torch.arange(handle.slice_rows) < handle.counts[:, None])
        assert sorted(handle.inverse.tolist()) == list(range(tokens + padding))
        if layer is not None:
            nonsense = torch.full((padding, TOP_K), -1)
            tell(shuffler, layer, torch.cat([routed(seed, layer, tokens), nonsense]))


def test_padding_leaves_histories_alone():
    """A token's history is the same whatever was beside it, so that captured batches of any size tell the same."""
    found = []
    for padding in (1, 5):
        shuffler = reserved(plan(5))
        for turn in range(3):
            shuffler.start(fitted(np.array([3, 4, 5]), padding), fitted(np.array([7, 1, 2]), padding), None, NONE_NEW)
            chosen = torch.cat([routed(turn, 0, 3), torch.full((padding, TOP_K), 255)])
            tell(shuffler, 0, chosen)
        found.append([state[0, [7, 1, 2]].tolist() for state in shuffler._slicer._states])
    assert found[0] == found[1]


def decode(shuffler):
    """A decode pass as a function of its tensors, as a graph sees it."""

    def run(ids, slots, new, routed):
        shuffler.start(ids, slots, None, new)
        out = []
        for layer in range(LAYERS):
            handle = shuffler.slices(layer)
            out += [handle.order, handle.inverse, handle.counts, take_rows(routed[layer].float(), handle.order)]
            if shuffler.uses_history:
                tell(shuffler, layer, routed[layer])
        return out

    return run


def decode_inputs(seed, tokens, padding):
    slots = np.random.default_rng(seed).permutation(np.arange(1, SLOTS))[:tokens]
    chosen = [fitted(routed(seed, layer, tokens).numpy().ravel(), padding * TOP_K) for layer in range(LAYERS)]
    return (
        fitted(np.random.default_rng(seed).integers(0, VOCABULARY, tokens), padding), fitted(slots, padding),
        fitted(slots[:2], tokens + padding - 2), torch.stack(chosen).view(LAYERS, -1, TOP_K),
    )  # fmt: skip


def graph_of(shuffler, tokens):
    """A decode pass traced over fake tensors, which have no values: what asks for one raises, as in a CUDA graph.

    As there, it is traced on padding alone and keeps the tables and histories themselves.
    """
    padding = decode_inputs(0, 0, tokens)
    with FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False) as mode:
        padding = [mode.from_tensor(t) for t in padding]
        return make_fx(decode(shuffler), tracing_mode="fake", _allow_non_fake_inputs=True)(*padding)


@pytest.mark.usefixtures("in_plain_torch")
@pytest.mark.parametrize("tokens", [8, 12])
def test_a_captured_decode_pass_serves_every_batch_that_fits(tokens):
    replayed, eager = (reserved(plan(2)) for _ in range(2))
    graph = graph_of(replayed, tokens)
    for seed in range(6):
        inputs = decode_inputs(seed, tokens - seed, seed)
        for ours, theirs in zip(graph(*inputs), decode(eager)(*inputs), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("in_plain_torch")
def test_nothing_of_a_decode_pass_leaves_the_device():
    """Torch's device without memory stands for one; the kernels, which have tests of their own, are left out."""
    shuffler = reserved(plan(2), device="meta")
    out = decode(shuffler)(*(t.to("meta") for t in decode_inputs(0, 6, 2)))
    assert [t.shape for t in out] == [t.shape for t in decode(reserved(plan(2)))(*decode_inputs(1, 8, 0))]
    assert all(t.is_meta for t in out)
    with pytest.raises(NotImplementedError):
        out[0].cpu()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_cuda_graph():
    captured, eager = reserved(plan(2), "cuda"), reserved(plan(2))
    buffers = [torch.zeros_like(t).cuda() for t in decode_inputs(0, 12, 0)]
    decode(captured)(*buffers)  # kernels are compiled outside the graph
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(captured)(*buffers)
    for seed in range(6):
        inputs = decode_inputs(seed, 12 - seed, seed)
        for buffer, value in zip(buffers, inputs, strict=True):
            buffer.copy_(value)
        graph.replay()
        for ours, theirs in zip(out, decode(eager)(*inputs), strict=True):
            assert torch.equal(ours.cpu(), theirs)


@pytest.mark.usefixtures("in_plain_torch")
@pytest.mark.parametrize("wait", [Tensor.item, Tensor.tolist, Tensor.nonzero, Tensor.numpy])
def test_what_waits_for_the_device_is_not_traced(wait):
    """Or the test above would say nothing."""
    shuffler = reserved(plan(2))
    gather = shuffler.gather
    shuffler.gather = lambda comm, rows, ids, *others: (wait(ids.flatten()[0]), gather(comm, rows, ids, *others))[1]
    with pytest.raises((RuntimeError, DataDependentOutputException, DynamicOutputShapeException)):
        graph_of(shuffler, 8)


def test_triton_interpreted():
    interpret(__file__)


def interpreted() -> None:
    """The same passes through the kernels, which stand in for torch's part wherever tensors are on a GPU."""
    kernels.of = lambda device: import_module("semmoe.runtime.kernels.on_gpu")
    for seed in range(2):
        check_slices(seed)
    found, sent = take_rows(torch.arange(6.0).view(3, 2), torch.tensor([2, -1])), [[4.0, 5.0], [0.0, 0.0]]
    assert found.tolist() == sent


if __name__ == "__main__":
    interpreted()


def test_a_pass_with_few_rows_is_not_shuffled():
    """From 4 rows on; the slices of other passes are contiguous."""
    shuffler = reserved(replace(plan(0), shuffle_from=4))
    for rows in (0, 1, 3, 4, 100):
        assert shuffler.shuffles(rows) == (rows >= 4)
    shuffler.start_unshuffled(torch.arange(4) < 3)
    for layer in (None, 0):
        assert shuffler.slices(layer).order.tolist() == [0, 1, 2, -1]  # the last place is padding
