"""What engines capture of our decode passes in CUDA graphs, traced on a device that is not there."""

import operator
from dataclasses import replace

import numpy as np
import pytest
import torch
from captured import GPU, SIZES, Captured, CrossingError, StaysOnDevice, fake_ranks, launches_of_triton, on_gpu, replays
from test_shuffler import EXPERTS, LAYERS, SLOTS, TOP_K, plan
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

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
        operations, launched = replays(captured(comm, rows))
    assert operations > 20 * LAYERS
    assert {"score_kernel", "assign_kernel", "scatter_kernel", "gather_kernel"} <= set(launched)


@pytest.mark.parametrize("rows", [7, 8, 9])
def test_a_graph_is_shuffled_or_not_by_its_size(comm, rows):
    """From 9 rows on, padding to whole slices included; a graph of fewer launches no kernel of the shuffle."""
    with on_gpu():
        launched = replays(captured(comm, rows, shuffle_from=9))[1]
    assert ("assign_kernel" in launched) == (rows == 9)


def test_the_kernel_that_chooses_copies_is_launched_with_static_shapes():
    from semmoe.runtime.kernels.copies import cover_copies

    with on_gpu():
        ids = table((8, TOP_K), torch.int64)
        tables = table((EXPERTS, 2), torch.int16), table((EXPERTS, 2), torch.int32), table((EXPERTS,), torch.int16)
        assert replays(lambda: cover_copies(ids, *tables, 0, RANKS))[1] == ["cover_kernel"]


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
        with launches_of_triton() as kernels:
            shuffler.start(case.batch.input_ids, prompts, table((8,), torch.bool), table((2,), torch.int64))
            with StaysOnDevice():
                for layer in range(LAYERS):
                    shuffler.slices(layer)
                    shuffler.observe(layer, table((8, TOP_K), torch.uint8))
    assert kernels.count("sums_kernel") == kernels.count("in_turn_kernel") == 1
