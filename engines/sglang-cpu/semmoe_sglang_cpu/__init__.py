"""Mends what keeps SGLang 0.5.23 from being imported on a CPU without AMX; its `.pth` file calls `install`.

Only what must be there before `import sglang` is here. What can be mended afterwards is a plug-in's work.
"""

import importlib.util
import logging
import multiprocessing
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

logger = logging.getLogger("semmoe-sglang-cpu")
KERNELS = Path(__file__).with_name("sgl_kernel.py")
KEPT: list[object] = []  # a torch library takes its declarations with it when it is collected


class Mender:
    """An import hook: nothing happens before one of the two modules is asked for, so other programs pay nothing."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == "sgl_kernel" and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
            return stand_in()
        if name == "torchvision._meta_registrations":
            declare_operators()
        return None


def install() -> None:
    if Mender not in sys.meta_path:
        sys.meta_path.insert(0, Mender)


def stand_in() -> ModuleSpec | None:
    """Real kernels, where somebody has built them, are better than none."""
    if PathFinder.find_spec("sgl_kernel") is not None:
        return None
    tell("standing in for sgl_kernel (CPU without AMX)")
    return importlib.util.spec_from_file_location("sgl_kernel", KERNELS)


def declare_operators() -> None:
    """torchvision's wheel on PyPI is linked against CUDA: beside a CPU torch its library does not load, and the next
    module that torchvision imports describes two operators that the library would have declared. transformers imports
    torchvision for its models, whether SGLang runs or not."""
    import torch

    if torch.version.cuda is not None:
        return
    missing = [name for name in ("nms", "qnms") if not hasattr(torch.ops.torchvision, name)]
    if missing:
        library = torch.library.Library("torchvision", "FRAGMENT")
        KEPT.append(library)
        for name in missing:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        tell(f"declaring torchvision's operators {' and '.join(missing)} (its own library did not load)")


def tell(what: str) -> None:
    """Once: the processes that SGLang spawns, which are named before they import anything, would only repeat it."""
    first = multiprocessing.current_process().name == "MainProcess" and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"
    level = logging.WARNING if first else logging.DEBUG
    logger.log(level, "semmoe-sglang-cpu: %s", what)
