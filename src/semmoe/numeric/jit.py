"""Compile kernels with numba, and keep the compiled code on the disk where a folder for it can be written."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba

from semmoe.io import console

NOTED = "SEMMOE_MISSING_CACHE_NOTED"  # in the environment, which processes inherit


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return the decorator `numba.njit` with a cache on the disk, or without one where numba finds no folder for it."""
    options["no_cfunc_wrapper"] = True  # nothing calls kernels from C, and a tenth of compiling goes into wrappers
    cached, uncached = numba.njit(cache=True, **options), numba.njit(**options)

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return cached(function)
        except RuntimeError as error:
            if "no locator available" not in str(error):
                raise
            _note_missing_cache()
            return uncached(function)

    return decorate


def _note_missing_cache() -> None:
    """Print that compiled code is not kept, once for this process and all that it starts."""
    if NOTED not in os.environ:
        os.environ[NOTED] = "1"
        words = f"neither {Path(__file__).parents[1]} nor a cache folder in the home folder can be written"
        remedy = "set NUMBA_CACHE_DIR to a folder that can be written"
        console.err.print(f"note: every command compiles its kernels again: {words}; {remedy}", soft_wrap=True)
