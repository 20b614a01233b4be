"""Triton kernels of the shuffled pair, ranks emulated as buffers, against the specification, bit for bit."""

import pytest
import reference
import torch
from triton_runs import NO_TRITON, TARGETS, compiles, interpret

from semmoe.tokens.slices import slice_size

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
    return torch.tensor([buffer.data_ptr() for buffer in buffers], dtype=torch.int64, device=buffers[0].device)


def wide(partials: list[torch.Tensor]) -> list[torch.Tensor]:
    return [partial.to(torch.promote_types(partial.dtype, torch.float32)) for partial in partials]


def as_interpreted(total: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The interpreter cuts float32 to bfloat16 off, where a GPU rounds to nearest."""
    if dtype != torch.bfloat16:
        return total.to(dtype)
    return (total.view(torch.int32) & -65536).view(torch.float32).to(dtype)


def check_pair(
    kernels, size: int, tokens: int, width: int, dtype: torch.dtype, rounded=as_interpreted, device: str = "cpu"
) -> None:
    """rounded: what a float32 sum becomes in another type there."""
    generator = torch.Generator().manual_seed(size * 100 + tokens)
    rows = slice_size(tokens, size)
    slots = torch.arange(size).repeat_interleave(rows)
    ranks, real = slots[torch.randperm(len(slots), generator=generator)], torch.arange(len(slots)) < tokens
    partials = [torch.randn(len(slots), width, generator=generator).to(dtype) for _ in range(size)]
    order, inverse, counts = reference.order_of_real(ranks, real, size)
    sums = reference.shuffled_reduce_scatter(wide([partial[real] for partial in partials]), ranks[real])
    expected = [rounded(rows, dtype) for rows in sums]
    slices, there = [], [partial.to(device) for partial in partials]
    for rank in range(size):
        mine = order[rank * rows : (rank + 1) * rows].to(device)
        slices.append(kernels.shuffled_reduce_scatter(pointers(there), mine, width, dtype))
        n, found = int(counts[rank]), slices[rank].cpu()
        assert torch.equal(found[:n], expected[rank])
        assert (found[n:] == 0).all()
    whole = kernels.shuffled_all_gather(pointers(slices), inverse.to(device), rows, width, dtype)
    assert torch.equal(whole.cpu()[real], reference.shuffled_all_gather(expected, ranks[real]))


def check_rows_by_index(kernels) -> None:
    rows, index = torch.randn(9, 37, dtype=torch.float64), torch.tensor([8, -1, 0, 3, 3, -1])
    packed = kernels.gather_rows(rows, index)
    assert torch.equal(packed[index >= 0], rows[index[index >= 0]])
    assert (packed[index < 0] == 0).all()


def interpreted() -> None:
    import semmoe.runtime.kernels.shuffle as kernels

    kernels.COLUMNS = 16  # several programs a row
    for dtype in DTYPES:
        for shape in SHAPES:
            check_pair(kernels, *shape, dtype)
    check_rows_by_index(kernels)


if __name__ == "__main__":
    interpreted()
