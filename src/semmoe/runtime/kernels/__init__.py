"""The kernels of the runtime by device: `on_cpu` (numba) and `on_gpu` (Triton), which have the same functions.

Both are tested against plain torch, bit for bit.
"""

from importlib import import_module
from typing import Any

import torch


def of(device: torch.device) -> Any:
    """Return the module whose functions run on `device`. Raises ValueError on a GPU without Triton."""
    if device.type == "cpu":
        return import_module("semmoe.runtime.kernels.on_cpu")
    try:
        return import_module("semmoe.runtime.kernels.on_gpu")
    except ImportError:
        raise ValueError(f"on {device.type} semmoe needs Triton, which is not installed: pip install triton") from None
