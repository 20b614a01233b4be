"""The Triton kernel that gathers rows by index, against the specification, bit for bit."""

import sys

import pytest
import torch
from triton_runs import NO_TRITON, TARGETS, compiles, interpret

DTYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float64: "*fp64"}


@pytest.mark.parametrize("rows", [1, 9, 64, 512, pytest.param(8192, marks=pytest.mark.slow)])
def test_triton_interpreted(rows):
    interpret(__file__, str(rows))


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES.values())
def test_triton_compiles(target, dtype):
    pytest.importorskip("triton", reason=NO_TRITON)
    from semmoe.runtime.kernels.shuffle import gather_kernel

    kinds = {"rows": dtype, "others": "*bf16", "index": "*i64", "out": dtype, "mine": "*bf16"}
    compiles(target, gather_kernel, kinds, ("number", "first", "width"), {"BLOCK": 1024})


def check_rows_by_index(kernels, dtype: torch.dtype, tokens: int = 9, width: int = 37) -> None:
    rows = torch.randn(tokens, width, dtype=torch.float64).to(dtype)
    index = torch.randint(-1, tokens, (tokens + 3,), generator=torch.Generator().manual_seed(tokens))
    index[:2] = torch.tensor([-1, tokens - 1])
    packed = kernels.gather_rows(rows, index)
    assert torch.equal(packed[index >= 0], rows[index[index >= 0]])
    assert (packed[index < 0] == 0).all()
    others = torch.randn(tokens, width)  # of another type
    both = kernels.gather_both(rows, others, index, 1, tokens // 2)
    assert torch.equal(both[0], packed)
    assert torch.equal(both[1], kernels.gather_rows(others, index[1 : 1 + tokens // 2]))


def interpreted(rows: int) -> None:
    """All types and widths for few rows. Many rows take minutes, and test only the numbers of rows."""
    import semmoe.runtime.kernels.shuffle as kernels

    few = rows <= 64
    kernels.COLUMNS = 16 if few else 64  # several programs a row
    for dtype in DTYPES if few else (torch.bfloat16,):
        for width in (1, 37) if few else (37,):
            check_rows_by_index(kernels, dtype, rows, width)


if __name__ == "__main__":
    interpreted(int(sys.argv[1]))
