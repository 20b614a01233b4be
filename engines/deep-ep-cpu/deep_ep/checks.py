"""What DeepEP's kernels refuse; its C++ asserts it, so that here an AssertionError is raised, too.

With DEEP_EP_CPU_ANY=1 rows may be float32 and of any width: beyond the contract, to compare tokens exactly and on
small models.
"""

import os

import torch
from torch import Tensor

ANY = "DEEP_EP_CPU_ANY"
VECTOR = 16  # bytes that a thread copies
BLOCK = 128  # values that share a scale
LOW_LATENCY_HIDDEN = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
MOST_LOW_LATENCY_TOPK = 11  # the dispatch kernel's 32 warps hold so many choices


def any_rows() -> bool:
    return os.environ.get(ANY) == "1"


def check_rows(x: Tensor) -> None:
    assert x.dim() == 2 and x.is_contiguous(), f"rows must be (n, H) and contiguous, not {tuple(x.shape)}"
    if not any_rows():
        assert x.dtype == torch.bfloat16, f"rows must be bfloat16, not {x.dtype}"
        assert x.shape[1] * x.itemsize % VECTOR == 0, f"a row must be a multiple of {VECTOR} bytes"


def check_scaled(x: Tensor, scales: Tensor) -> None:
    assert x.dtype == torch.float8_e4m3fn and x.is_contiguous(), f"scaled rows must be float8_e4m3fn, not {x.dtype}"
    assert scales.dtype in (torch.float32, torch.int32) and len(scales) == len(x), "one row of scales for each row"


def check_choices(ids: Tensor, weights: Tensor | None, n: int) -> None:
    assert ids.dtype == torch.int64 and ids.dim() == 2 and len(ids) == n, (
        f"expert ids must be (n, K) int64: {ids.dtype}"
    )
    if weights is not None:
        assert weights.dtype == torch.float32 and weights.shape == ids.shape, "weights must be (n, K) float32"


def check_low_latency(x: Tensor, ids: Tensor, most: int) -> None:
    check_rows(x)
    check_choices(ids, None, len(x))
    assert len(x) <= most, f"{len(x)} tokens, at most {most} can be sent"
    assert ids.shape[1] <= MOST_LOW_LATENCY_TOPK, f"{ids.shape[1]} choices"
    if not any_rows():
        assert x.shape[1] in LOW_LATENCY_HIDDEN, f"no low-latency kernel for a hidden size of {x.shape[1]}"
