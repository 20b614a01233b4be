"""What engines capture of our decode passes in CUDA graphs, traced on a device that is not there."""

import operator
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from alone import Alone
from captured import GPU, SIZES, Captured, CrossingError, StaysOnDevice, fake_ranks, launches_of_triton, on_gpu, replays
from test_shuffler import EXPERTS, LAYERS, SLOTS, TOP_K, plan
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from semmoe.engines.vllm.routing import RealRows, RoutedLayer

RANKS, WIDTH = 2, 64


def table(shape, dtype) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype, device=GPU)


def captured(comm, rows, shuffle_from=1) -> Captured:
    """A decode pass with a recorder, whose hooks run whether it records or not."""
    planned = replace(plan(2), shuffle_from=shuffle_from)
    found = Captured(comm, planned, rows, SLOTS, WIDTH, GPU)
    found.record()
    return found


@pytest.fixture
def comm():
    with fake_ranks(0, RANKS) as found:
        yield found


@pytest.mark.parametrize("rows", SIZES)
def test_a_decode_pass_stays_on_the_device(rows):
    with fake_ranks(rows % RANKS, RANKS) as comm, on_gpu():
        launched = replays(captured(comm, rows))
    assert {"slices_kernel", "gather_kernel", "restore_kernel"} <= set(launched)


def launches_of_a_layer(comm, rows, recorded=False) -> Counter[str]:
    """Kernels that a layer adds to a decode pass in which the look-back is full, without the engine's own sum."""

    def of(layers: int) -> Counter[str]:
        case = Captured(comm, plan(2), rows, SLOTS, WIDTH, GPU)
        if recorded:
            case.record()
        case.norms = case.norms[:layers]
        return Counter(replays(case))

    return of(LAYERS) - of(LAYERS - 1) - Counter(["aten::add"])


@pytest.mark.parametrize(("rows", "launches"), [(8, 6), (512, 6), (2048, 7)])
def test_how_many_kernels_a_shuffled_layer_launches(comm, rows, launches):
    with on_gpu():
        found = launches_of_a_layer(comm, rows)
        assert found.total() == launches, found
        assert launches_of_a_layer(comm, rows, recorded=True) - found == Counter({"aten::copy_": 1})


def test_how_many_kernels_a_layer_of_attention_dp_launches(comm):
    with on_gpu():
        case = captured(comm, 8)
        assert replays(lambda: case.traffic.count(case.chosen, case.per_rank)) == ["place_kernel"]
        real, unseen = RealRows(table((), torch.int64)), lambda *routing: None
        vllm = RoutedLayer(0, case.copies, case.per_rank, real, case.traffic, False, unseen)
        assert replays(lambda: vllm.to_physical(case.chosen)) == ["semmoe::place_experts"]
        assert replays(case.routed) == ["semmoe::place_experts", "place_kernel"]


@pytest.mark.parametrize("rows", [7, 8, 9])
def test_a_graph_is_shuffled_or_not_by_its_size(comm, rows):
    """From 9 rows on, padding to whole slices included; a graph of fewer launches no kernel of the shuffle."""
    with on_gpu():
        launched = replays(captured(comm, rows, shuffle_from=9))
    assert ("slices_kernel" in launched) == (rows == 9)


@pytest.mark.parametrize("copies", [1, 2])
def test_copies_are_chosen_and_counted_by_one_kernel(copies):
    from semmoe.runtime.kernels.copies import place

    with on_gpu():
        tables = [table((EXPERTS, copies), torch.int16), table((EXPERTS, copies), torch.int32)]
        tables.append(table((EXPERTS,), torch.int16))
        given = table((8, TOP_K), torch.int64), tables, 0, table((2 * RANKS + 2,), torch.int64), RANKS, 4, RANKS
        assert replays(lambda: place(*given, table((1,), torch.int32))) == ["aten::zeros", "place_kernel"]


def test_negative_controls(comm):
    """What a graph cannot hold is seen: a value that is read, rows by a mask, a copy to the host, memory that grows."""
    kept = []
    wrong = [
        (DataDependentOutputException, lambda rows: rows.sum().item()),
        (DynamicOutputShapeException, lambda rows: rows[rows > 0]),
        (CrossingError, lambda rows: rows.cpu()),
        (CrossingError, lambda rows: operator.setitem(rows, table((1,), torch.int64), 0)),
        (AssertionError, lambda rows: kept.append(rows + 1)),
    ]
    with on_gpu():
        rows = table((4, 2), torch.float32)
        for error, operation in wrong:
            with pytest.raises(error):
                replays(lambda operation=operation: operation(rows))


def test_a_pass_over_prompts_is_no_pass_to_capture(comm):
    """Requests with several tokens are read on the host, which is why engines may capture decode passes alone."""
    with on_gpu():
        decode = captured(comm, 8)
        shuffler = decode.shuffle._shuffler
        shuffler.reserve(SLOTS)
        slots, decoding = decode.batch.req_pool_indices, table((8,), torch.bool)
        with pytest.raises(RuntimeError, match="numpy"):
            replays(lambda: shuffler.start(decode.batch.input_ids, slots, decoding, slots[:1]))


def test_a_pass_over_prompts_stays_on_the_device_once_it_is_begun(comm):
    prompts = np.array([3, 3, 3, 1, 1, 0, 0, 0])
    with on_gpu():
        case = captured(comm, 8)
        shuffler = case.shuffle._shuffler
        shuffler.reserve(SLOTS)
        ids = table((8, TOP_K), torch.uint8)
        with launches_of_triton() as kernels:
            shuffler.start(case.batch.input_ids, prompts, table((8,), torch.bool), table((2,), torch.int64))
            with StaysOnDevice(kernels):
                begun = len(kernels)
                for layer in range(LAYERS):
                    shuffler.gather(Alone, case.hidden, ids, shuffler.slices(layer), layer)
    assert kernels.count("sums_kernel") == kernels.count("in_turn_kernel") == 1
    assert len(kernels) - begun == 2 * LAYERS + 2
