"""Rows as float8 with a scale for each 128 values, as DeepEP's low-latency kernel casts them."""

import torch
from torch import Tensor

from deep_ep.checks import BLOCK

LARGEST, SMALLEST = 448.0, 1e-4  # of float8_e4m3fn; below which a block counts as zero


def cast(x: Tensor, power_of_two: bool) -> tuple[Tensor, Tensor]:
    """Rows (n, H) as (n, H) float8_e4m3fn and (n, H / 128) float32 scales, by which values are to be multiplied."""
    blocks = x.float().view(len(x), x.shape[1] // BLOCK, BLOCK)
    scale = blocks.abs().amax(dim=2).clamp(min=SMALLEST) / LARGEST
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    return (blocks / scale[:, :, None]).to(torch.float8_e4m3fn).view(x.shape), scale


def as_exponents(scale: Tensor) -> Tensor:
    """Scales (n, S) that are powers of two as their exponents, four to an int32 (n, S / 4)."""
    bits = (scale.contiguous().view(torch.int32) >> 23).to(torch.uint8)
    return bits.contiguous().view(torch.int32)


def column_major(x: Tensor) -> Tensor:
    """The same values (..., M, S), stored with M innermost."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)
