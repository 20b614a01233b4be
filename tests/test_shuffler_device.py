"""The device path: the host's slices bit for bit, padding last, and nothing that waits for a device.

Triton's part of it is tested with its kernels; here the same code runs in plain torch, and once in the interpreter.
"""

from dataclasses import replace
from importlib import import_module

import numpy as np
import oracles
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_fingerprint
from test_tokens_slices import EXPERTS, LAYERS, TOP_K, VOCABULARY, random_tables
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from triton_runs import interpret

from semmoe.core import Placement, Plan
from semmoe.methods.paper_policies import PaperTables
from semmoe.requests.policy import RoundRobin
from semmoe.runtime import scores, shuffler_device, static
from semmoe.runtime.collectives import shuffle_handle
from semmoe.runtime.scores import DeviceTables, Turns
from semmoe.runtime.shuffler import TokenShuffler
from semmoe.runtime.shuffler_device import PADDING_SLOT, DeviceHistory, DeviceShuffler
from semmoe.runtime.static import take_rows
from semmoe.tokens import slices as host_scores
from semmoe.tokens.slices import ByPosition, History, assign
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


def device_shuffler(plan, granularity="layer", device="cpu") -> DeviceShuffler:
    shuffler = DeviceShuffler(plan, GROUP, 0, granularity, device)
    shuffler.reserve(SLOTS)
    return shuffler


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


@pytest.mark.parametrize("seed", range(12))
def test_slices_are_those_of_the_host(seed):
    planned = plan(seed)
    ours, theirs = device_shuffler(planned), TokenShuffler(planned, GROUP, 0)
    waiting = np.zeros(0, np.int64)
    for number, (ids, slots, decoding, fresh, several) in enumerate(random_passes(seed)):
        waiting = np.union1d(waiting, fresh)
        if len(ids) == 0:  # nothing is begun without rows
            continue
        fresh, waiting = waiting, waiting[:0]
        told = torch.from_numpy(decoding) if several else None
        ours.start(*map(torch.from_numpy, (ids, slots)), told, torch.from_numpy(fresh))
        theirs.start(ids, slots, decoding, fresh)
        for layer in (None, *range(LAYERS)):
            mine, other = ours.slices(layer), theirs.slices(layer)
            assert torch.equal(mine.order, other.order)
            assert torch.equal(mine.inverse, other.inverse)
            assert mine.counts.tolist() == list(other.counts)
            if layer is not None:
                chosen = routed(seed * 100 + number, layer, len(ids))
                ours.observe(layer, chosen)
                theirs.observe(layer, chosen)


@pytest.mark.parametrize("seed", range(4))
def test_later_tokens_of_a_prompt_do_not_know_the_earlier_ones(seed):
    """A prompt in two parts, the second beside a decoded token of another request, which alone has a history."""
    planned, shuffler = plan(seed), TokenShuffler(plan(seed), GROUP, 0)
    tables, history = planned.tokens, History(planned.tokens, 3)
    first, second, decoding = np.array([1, 1, 2, 2, 2, 2]), np.array([1, 1, 1, 2, 1, 1]), np.arange(6) == 3
    device = device_shuffler(planned)
    for number, (slots, new) in enumerate([(first, np.array([1, 2])), (second, np.array([], np.int64))]):
        decodes = decoding & (number == 1)
        ids = np.random.default_rng(seed).integers(VOCABULARY, size=6)
        shuffler.start(ids, slots, decodes, new)
        device.start(*map(torch.from_numpy, (ids, slots, decodes, new)))
        earlier = []
        for layer in range(LAYERS):
            known = np.where(decodes[:, None], history.contribution(layer, slots), tables.history_scores[layer, -1])
            before = np.array(earlier[: tables.lookback]).reshape(-1, 6, TOP_K).astype(np.int64)
            scores = oracles.score_tokens(
                host_scores, tables, layer, GROUP * SIZE, SIZE, ids, before, known.astype(np.int32)
            )
            expected = shuffle_handle(assign(scores), SIZE, 0).order
            assert torch.equal(shuffler.slices(layer).order, expected)
            assert torch.equal(device.slices(layer).order, expected)
            chosen = routed(seed * 10 + number, layer, 6)
            for one in (shuffler, device):
                one.observe(layer, chosen)
            history.observe(layer, slots, chosen.numpy())
            earlier.insert(0, chosen.numpy())


@pytest.mark.parametrize("seed", range(4))
def test_by_another_plan_s_tables_the_requests_that_run_have_no_history(seed):
    """From the pass on that follows it, slices are those of a shuffler that has seen nothing."""
    ours, other = device_shuffler(plan(seed)), device_shuffler(plan(seed + 4))
    slots, rng = torch.arange(1, 9), np.random.default_rng(seed)
    for number in range(6):
        if number == 3:
            ours.follow(device_shuffler(plan(seed + 4)))
        ids = torch.from_numpy(rng.integers(VOCABULARY, size=8))
        for one in (ours, other)[: 1 + (number >= 3)]:
            one.start(ids, slots, None, slots if number == 0 else NONE_NEW)
        for layer in range(LAYERS):
            if number >= 3:
                assert torch.equal(ours.slices(layer).order, other.slices(layer).order)
            chosen = routed(seed * 10 + number, layer, 8)
            for one in (ours, other)[: 1 + (number >= 3)]:
                one.observe(layer, chosen)


@pytest.mark.parametrize("tables", ["scores", "paper", None])
def test_once_a_batch(tables):
    ours, theirs = device_shuffler(plan(3, tables), "batch"), TokenShuffler(plan(3, tables), GROUP, 0, "batch")
    assert not ours.uses_history
    rng = np.random.default_rng(0)
    for size in (18, 18, 10):  # each batch is decided anew
        ids = rng.integers(-1, VOCABULARY + 2, size)
        ours.start(torch.from_numpy(ids), torch.arange(1, size + 1), None, NONE_NEW)
        theirs.start(ids, np.arange(1, size + 1), np.ones(size, bool), np.arange(1, size + 1))
        alone = TokenShuffler(plan(3, tables), GROUP, 0, "batch")
        alone.start(ids, np.arange(1, size + 1), np.ones(size, bool), np.arange(1, size + 1))
        for layer in (0, 1):
            assert torch.equal(ours.slices(layer).order, theirs.slices(layer).order)
            assert torch.equal(ours.slices(layer).order, alone.slices(layer).order)


def test_the_papers_tables_once_a_layer_are_refused():
    with pytest.raises(ValueError, match="once per batch"):
        device_shuffler(plan(0, "paper"))


def test_the_mean_over_layers_is_one_table():
    tables = random_tables(1)
    ids = np.array([0, VOCABULARY - 1, VOCABULARY, -1])
    found = tables.scores_of_tokens(SIZE, SIZE, ids)
    rows = tables.token_rows[[0, VOCABULARY - 1, VOCABULARY, VOCABULARY]]
    by_hand = sum(
        tables.token_scores[l, rows, 2:].astype(int) << tables.token_shift[l].astype(int) for l in range(LAYERS)
    )
    np.testing.assert_array_equal(found, by_hand // LAYERS)


@pytest.mark.parametrize("seed", range(6))
def test_histories_are_those_of_the_host(seed):
    """Passes of one token a slot, whose sums are often negative, and of several."""
    rng, tables = np.random.default_rng(seed), random_tables(seed)
    ours, theirs = DeviceHistory(DeviceTables.of(tables), SLOTS), History(tables, SLOTS)
    for turn in range(40):
        several = turn % 5 == 0
        slots = rng.integers(1, 6, 9) if several else rng.permutation(np.arange(1, 8))[:5]
        ids = rng.integers(0, EXPERTS, (len(slots), TOP_K))
        theirs.observe(1, slots, ids)
        if several:
            turns = Turns.of(slots, torch.device("cpu"))
            ours.observe_in_turn(turns, torch.from_numpy(ids).expand(LAYERS, *ids.shape))
        else:
            padded = fitted(slots, 3), torch.from_numpy(np.append(ids, np.zeros((3, TOP_K), int), axis=0))
            ours.observe(1, *padded)
        if turn == 20:
            theirs.reset(np.array([2, 3]))
            ours.reset(torch.tensor([2, 3, PADDING_SLOT, PADDING_SLOT]))
        used = np.arange(1, 8)
        decoding = rng.random(7) < 0.7
        known = ours.contribution(1, torch.from_numpy(used), torch.from_numpy(decoding)).numpy()
        np.testing.assert_array_equal(known, theirs.contribution(1, used, decoding))


@pytest.mark.parametrize("granularity", ["layer", "batch"])
def test_the_tokens_that_stand_in_padding_change_nothing(granularity):
    """Whatever ids an engine pads with, their scores do not count."""
    slots, orders = fitted(np.array([7, 1, 2]), 3), []
    for padding in range(VOCABULARY):
        shuffler = device_shuffler(plan(5), granularity)
        shuffler.start(torch.tensor([3, 4, 5, *[padding] * 3]), slots, None, NONE_NEW)
        orders.append(shuffler.slices(0).order.tolist())
    assert all(order == orders[0] for order in orders)


def test_padding_makes_room_for_tokens():
    """Of three tokens that want slice 0 the one that loses least moves; then the padding is where there is room."""
    padding = [0, 0]  # as it scores
    assert scores.assign(torch.tensor([[9, 1], [5, 4], [7, 0], padding], dtype=torch.int32)).tolist() == [0, 1, 0, 1]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1000), st.integers(0, 12), st.integers(0, 9))
def test_with_padding_every_token_comes_once_and_first(seed, tokens, padding):
    padding += (tokens + padding) % SIZE
    rng, shuffler = np.random.default_rng(seed), device_shuffler(plan(seed))
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
            shuffler.observe(layer, torch.cat([routed(seed, layer, tokens), nonsense]))


def test_padding_leaves_histories_alone():
    """A token's history is the same whatever was beside it, so that captured batches of any size tell the same."""
    found = []
    for padding in (1, 5):
        shuffler = device_shuffler(plan(5))
        for turn in range(3):
            shuffler.start(fitted(np.array([3, 4, 5]), padding), fitted(np.array([7, 1, 2]), padding), None, NONE_NEW)
            chosen = torch.cat([routed(turn, 0, 3), torch.full((padding, TOP_K), 255)])
            shuffler.observe(0, chosen)
        found.append(shuffler._history.contribution(0, torch.tensor([7, 1, 2]), torch.ones(3, dtype=torch.bool)))
    assert torch.equal(*found)


def decode(shuffler):
    """A decode pass as a function of its tensors, as a graph sees it."""

    def run(ids, slots, new, routed):
        shuffler.start(ids, slots, None, new)
        out = []
        for layer in range(LAYERS):
            handle = shuffler.slices(layer)
            out += [handle.order, handle.inverse, handle.counts, take_rows(routed[layer].float(), handle.order)]
            if shuffler.uses_history:
                shuffler.observe(layer, routed[layer])
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


@pytest.mark.parametrize("granularity", ["layer", "batch"])
@pytest.mark.parametrize("tokens", [8, 12])
def test_a_captured_decode_pass_serves_every_batch_that_fits(granularity, tokens):
    replayed, eager = (device_shuffler(plan(2), granularity) for _ in range(2))
    graph = graph_of(replayed, tokens)
    for seed in range(6):
        inputs = decode_inputs(seed, tokens - seed, seed)
        for ours, theirs in zip(graph(*inputs), decode(eager)(*inputs), strict=True):
            assert torch.equal(ours, theirs)


def test_nothing_of_a_decode_pass_leaves_the_device(monkeypatch):
    """Torch's device without memory stands for one; the kernels, which have tests of their own, are left out."""
    for module in (static, shuffler_device):
        monkeypatch.setattr(module, "triton_kernels", lambda name, tensor: None)
    shuffler = device_shuffler(plan(2), device="meta")
    out = decode(shuffler)(*(t.to("meta") for t in decode_inputs(0, 6, 2)))
    assert [t.shape for t in out] == [t.shape for t in decode(device_shuffler(plan(2)))(*decode_inputs(1, 8, 0))]
    assert all(t.is_meta for t in out)
    with pytest.raises(NotImplementedError):
        out[0].cpu()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("granularity", ["layer", "batch"])
def test_a_cuda_graph(granularity):
    captured, eager = device_shuffler(plan(2), granularity, "cuda"), device_shuffler(plan(2), granularity)
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


@pytest.mark.parametrize("wait", [Tensor.item, Tensor.tolist, Tensor.nonzero, Tensor.numpy])
def test_what_waits_for_the_device_is_not_traced(wait):
    """Or the test above would say nothing."""
    shuffler = device_shuffler(plan(2))
    observe = shuffler.observe
    shuffler.observe = lambda layer, ids: (wait(ids.flatten()[0]), observe(layer, ids))
    with pytest.raises((RuntimeError, DataDependentOutputException, DynamicOutputShapeException)):
        graph_of(shuffler, 8)


def test_triton_interpreted():
    interpret(__file__)


def interpreted() -> None:
    """The same passes through the kernels, which stand in for torch's part wherever tensors are on a GPU."""
    for module in (static, shuffler_device):
        module.triton_kernels = lambda name, tensor: import_module(f"semmoe.runtime.kernels.{name}")
    for seed in range(2):
        test_slices_are_those_of_the_host(seed)
    found, sent = take_rows(torch.arange(6.0).view(3, 2), torch.tensor([2, -1])), [[4.0, 5.0], [0.0, 0.0]]
    assert found.tolist() == sent


if __name__ == "__main__":
    interpreted()


def test_a_pass_with_few_rows_is_not_shuffled_on_either_side():
    """From 4 rows on; a request's history is begun by the first pass that is shuffled."""
    planned = replace(plan(0), shuffle_from=4)
    host, device = TokenShuffler(planned, GROUP, 0), device_shuffler(planned)
    for rows in (0, 1, 3, 4, 100):
        assert host.shuffles(rows) == device.shuffles(rows) == (rows >= 4)
    host.start(np.arange(3), np.arange(3), np.ones(3, bool), np.arange(3))
    assert host.slices(0).order.tolist() == [0, 1, 2, -1]  # the last place is padding
    device.follow(device_shuffler(plan(4)))
    assert device.shuffles(1)
