"""Which attention group has how much of a prompt in its prefix cache, as a router can know it without asking.

Engines cache whole blocks of a prompt's leading tokens and drop the least recently used ones, the end of a prefix
before its beginning, as a block is worth nothing without those before it. `PrefixIndex` keeps the same books from the
prompts that the router sent to each group: no text, one 64-bit number a block, which covers the block and all before
it. Two different prefixes share a number with a chance of about 2 ** -64 a pair; a wrong guess costs a cache miss.

Worked example, blocks of 2, prompts 7 7 5 sent to group 0 and 7 7 5 5 3 to group 1: group 0 knows the block 7 7 (the
rest is no whole block), group 1 the blocks 7 7 and 5 5; of prompt 7 7 5 5 group 0 has 2 tokens, group 1 has 4.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

import numba
import numpy as np

BLOCK = 16  # tokens, as in vLLM


class PrefixIndex:
    """Leading blocks of prompts by group, least recently used first out. Not thread-safe."""

    def __init__(self, num_groups: int, capacity: int, block: int = BLOCK) -> None:
        """capacity: tokens that the KV cache of one group holds; block: tokens that are cached together."""
        if num_groups < 1 or block < 1:
            raise ValueError(f"sizes must be positive: {num_groups=}, {block=}")
        if capacity < 0:
            raise ValueError(f"capacity must not be negative: {capacity}")
        self._block, self._blocks = block, capacity // block
        # Oldest first. A block is always touched just before the one it follows, so that wherever a block is, all
        # before it are too: the known ones of a prompt are its leading ones.
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_groups)]

    def cached_tokens(self, prompt_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """(D,) int64: leading tokens of the prompt that each group has cached."""
        keys = self._keys(prompt_ids)
        return np.array([_leading(keys, known) for known in self._known], np.int64) * self._block

    def insert(self, prompt_ids: Sequence[int] | np.ndarray, group: int) -> None:
        """Note that the prompt went to `group`, which has all its whole blocks from now on."""
        known = self._known[group]
        for key in reversed(self._keys(prompt_ids)[: self._blocks]):
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._blocks:
            known.popitem(last=False)

    def clear(self, group: int) -> None:
        """`group` has nothing cached any more."""
        self._known[group].clear()

    def _keys(self, prompt_ids: Sequence[int] | np.ndarray) -> list[int]:
        return block_keys(np.ascontiguousarray(prompt_ids, np.int64), self._block).tolist()


def _leading(keys: list[int], known: OrderedDict[int, None]) -> int:
    """How many of `keys` are known; these are the leading ones."""
    return bisect_left(keys, True, key=lambda key: key not in known)


@numba.njit(cache=True)
def block_keys(token_ids, block):
    """(n // block,) uint64: a number for each whole block of token_ids (n,), which covers all tokens up to its end."""
    out = np.empty(len(token_ids) // block, np.uint64)
    state = np.uint64(0x9E3779B97F4A7C15)
    for i in range(len(out) * block):
        state ^= np.uint64(token_ids[i]) + np.uint64(0x9E3779B97F4A7C15)
        state ^= state >> np.uint64(30)
        state *= np.uint64(0xBF58476D1CE4E5B9)
        state ^= state >> np.uint64(27)
        state *= np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
        if (i + 1) % block == 0:
            out[i // block] = state
    return out
