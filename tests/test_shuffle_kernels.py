"""Triton kernels of the shuffled pair, ranks emulated as buffers, against the specification, bit for bit."""

import numpy as np
import pytest
import torch
from triton_runs import NO_TRITON, TARGETS, compiles, interpret

from semmoe.assignment import slice_size
from semmoe.runtime import reference

DTYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64"}
SHAPES = ((1, 1, 1), (2, 9, 17), (3, 4, 40), (8, 33, 64), (5, 2, 3))  # ranks, tokens, width


def test_triton_interpreted():
    interpret(__file__)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_triton_compiles(target, dtype):
    pytest.importorskip("triton", reason=NO_TRITON)
    import semmoe.runtime.kernels.shuffle as kernels

    peers, block = {"peers": "*i64"}, {"BLOCK": 1024}
    compiles(target, kernels.gather_kernel, {"rows": dtype, "index": "*i64", "out": dtype}, ("width",), block)
    compiles(
        target, kernels.reduce_scatter_kernel, {**peers, "slots": "*i64", "out": dtype}, ("size", "width"),
        {"WIDE": dtype == "*fp64", **block},
    )  # fmt: skip
    compiles(
        target, kernels.all_gather_kernel, {**peers, "inverse": "*i64", "out": dtype}, ("slice_rows", "width"), block
    )


def pointers(buffers) -> torch.Tensor:
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64)


def wide(partials: list[torch.Tensor]) -> list[torch.Tensor]:
    return [partial.to(torch.promote_types(partial.dtype, torch.float32)) for partial in partials]


def as_interpreted(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The interpreter cuts float32 to bfloat16 off, where a GPU rounds to nearest."""
    if dtype != torch.bfloat16:
        return total.to(dtype)
    return (total.view(torch.int32) & -65536).view(torch.float32).to(dtype)


def check_pair(kernels, size: int, tokens: int, width: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size * 100 + tokens)
    rows = slice_size(tokens, size)
    slots = torch.arange(size).repeat_interleave(rows)
    ranks = slots[torch.randperm(len(slots), generator=generator)[:tokens]]
    partials = [torch.randn(tokens, width, generator=generator).to(dtype) for _ in range(size)]
    order = reference.argsort_ranks(ranks, size, rows)
    expected = [as_interpreted(rows, dtype) for rows in reference.shuffled_reduce_scatter(wide(partials), ranks)]
    slices = []
    for rank in range(size):
        mine = order.order[rank * rows : (rank + 1) * rows]
        slices.append(kernels.shuffled_reduce_scatter(pointers(partials), mine, width, dtype))
        n = int(order.counts[rank])
        assert torch.equal(slices[rank][:n], expected[rank])
        assert (slices[rank][n:] == 0).all()
    whole = kernels.shuffled_all_gather(pointers(slices), order.inverse, rows, width, dtype)
    assert torch.equal(whole, reference.shuffled_all_gather(expected, ranks))


def check_path(kernels) -> None:
    """Predict, assign, sort and gather, against the same steps by numba and torch."""
    from oracles import score_tokens
    from test_scores_backends import score_case, tensors

    from semmoe import scores
    from semmoe.runtime.kernels.scores import look_up_tokens
    from semmoe.runtime.scores import DeviceTables

    tables, arguments = score_case(5)
    on_device = DeviceTables.of(tables)
    layer, first, num_slices, ids, earlier, history = tensors(arguments)
    tokens = look_up_tokens(on_device, [layer], first, num_slices, ids)[0]
    order = kernels.place_tokens(on_device, layer, first, tokens, earlier, history)
    ranks = torch.from_numpy(scores.assign(score_tokens(scores, tables, *arguments)))
    expected = reference.argsort_ranks(ranks, num_slices, slice_size(len(ranks), num_slices))
    assert all(torch.equal(a, b) for a, b in zip(order, expected, strict=True))
    rows = torch.from_numpy(np.random.default_rng(0).normal(size=(len(ranks), 37)))
    packed = kernels.gather_rows(rows, order.order)
    assert torch.equal(packed[order.inverse], rows)
    assert (packed[order.order < 0] == 0).all()


def interpreted() -> None:
    import semmoe.runtime.kernels.shuffle as kernels

    kernels.COLUMNS = 16  # several programs a row
    for dtype in DTYPES:
        for shape in SHAPES:
            check_pair(kernels, *shape, dtype)
    check_path(kernels)


if __name__ == "__main__":
    interpreted()
