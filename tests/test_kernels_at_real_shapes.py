"""Triton's kernels in its interpreter at the shapes of DeepSeek-V3: hidden 7168, top-8 of 256 experts, 8 ranks.

As a script, with the interpreter on: `python tests/test_kernels_at_real_shapes.py TOKENS ...`, as `make kernels` does
for up to 8,192 tokens; the tests here take few. On a GPU, where there is one, they take as many.
"""

import sys
import time
from dataclasses import fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from test_argsort import check as check_argsort
from test_copychoice import check_count, check_place
from test_history_kernels import check_by_weight, check_in_turn, check_restore
from test_shuffle_kernels import check_rows_by_index
from test_tokens_backends import check_assign, check_slices
from torch.utils._pytree import tree_leaves, tree_map
from triton_runs import interpret

HIDDEN, TOP_K, EXPERTS, RANKS = 7168, 8, 256, 8
COPIES = 2  # of an expert, that one source rank may choose among


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [1, pytest.param(200, marks=pytest.mark.costly)])
def test_kernels_agree_with_their_references(tokens):
    interpret(__file__, str(tokens))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tokens", [1, 64, 512, 8192])
def test_kernels_on_a_gpu_agree_with_their_references(tokens):
    check_all(tokens, Moved)


class Moved:
    """A module of kernels whose arguments are moved to a device, and its results back."""

    def __init__(self, module, device: str = "cuda") -> None:
        self._module, self._device = module, device

    def __getattr__(self, name: str):
        def call(*args):
            there = moved(args, self._device)
            out = moved(getattr(self._module, name)(*there), "cpu")
            for own, changed in zip(tree_leaves(args), tree_leaves(there), strict=True):
                if isinstance(own, torch.Tensor):
                    own.copy_(changed)  # what was changed in place
            return out

        return call


def moved(values, device: str):
    """Tensors to the device, those in tuples and records too."""

    def one(value):
        if is_dataclass(value):
            return replace(value, **{field.name: one(getattr(value, field.name)) for field in fields(value)})
        return value.to(device) if isinstance(value, torch.Tensor) else value

    return tree_map(one, values)


def check_copies(kernels, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    ids = torch.from_numpy(np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOP_K].copy())
    ids[rng.random(ids.shape) < 0.05] = -1
    ranks = np.argsort(rng.random((EXPERTS, RANKS)), axis=1)[:, :COPIES].astype(np.int16)
    ranks[::2, 1] = -1  # half of the experts have one copy
    slots = rng.permutation(2 * EXPERTS // RANKS).astype(np.int32)  # of which each rank has as many
    physical = np.where(ranks >= 0, ranks * len(slots) + rng.choice(slots, ranks.shape), -1).astype(np.int32)
    tables = [torch.from_numpy(t) for t in (ranks, physical, ranks[:, 0].copy())]
    for source in (0, RANKS - 1):
        check_place(kernels, ids, tables, source, RANKS)
        check_place(kernels, ids, [t[:, :1].contiguous() for t in tables[:2]] + tables[2:], source, RANKS)


def check_scores(kernels, tokens: int) -> None:
    for seed in range(4):
        check_slices(kernels, seed, tokens=tokens, ranks=64, experts=EXPERTS, top_k=TOP_K)


def check_all(tokens: int, on) -> None:
    """Raises AssertionError where a kernel and its reference differ in a bit. on: what a module is called through."""
    from semmoe.runtime.kernels import on_gpu

    kernels, ranks = on(on_gpu), np.random.default_rng(tokens).integers(RANKS, size=tokens)
    checks = {
        "rows by index": lambda: check_rows_by_index(kernels, torch.bfloat16, tokens, HIDDEN),
        "argsort": lambda: check_argsort(kernels.order_of_real, ranks, RANKS),
        "copies, counted": lambda: check_copies(kernels, tokens),
        "scores and slices": lambda: check_scores(kernels, tokens),
        "rows and histories": lambda: check_restore(kernels, (tokens, RANKS, TOP_K, EXPERTS), HIDDEN),
        "histories of prompts": lambda: check_in_turn(
            kernels, np.arange(tokens) // 200 + 1, RANKS, TOP_K, EXPERTS, layers=2
        ),
        "experts by weight": lambda: check_by_weight(kernels, tokens, TOP_K),
        "traffic": lambda: check_count(kernels, tokens, RANKS, 2, tokens * 3 // 4),
        "assignment": lambda: check_assign(kernels, "random", tokens, RANKS),
        "assignment to 2, 16 and 64": lambda: [check_assign(kernels, "random", tokens, s) for s in (2, 16, 64)],
    }
    for name, check in checks.items():
        begin = time.perf_counter()
        check()
        print(f"  {tokens:6} tokens  {name:42}bit for bit  {time.perf_counter() - begin:6.1f} s", flush=True)


if __name__ == "__main__":
    for word in sys.argv[1:]:
        check_all(int(word), lambda module: module)
