"""Estimate how much of a prompt each attention group has in its prefix cache, without asking the engine.

Engines cache whole blocks of a prompt's leading tokens and evict the least recently used ones, the end of a prefix
before its beginning, since a block is useless without those before it. `PrefixIndex` simulates this from the prompts
that were sent to each group. It stores no text but one 64-bit hash per block, which covers the block and all blocks
before it. Two different prefixes have the same hash with a probability of about 2 ** -64; a wrong estimate costs a
cache miss.

Worked example, blocks of 2, prompts 7 7 5 sent to group 0 and 7 7 5 5 3 to group 1: group 0 has the block 7 7 (the
rest is not a whole block), group 1 has the blocks 7 7 and 5 5; of prompt 7 7 5 5 group 0 has 2 tokens, group 1 has 4.
"""

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from semmoe.jit import njit

BLOCK = 16  # tokens, as in vLLM


class PrefixIndex:
    """Leading blocks of the prompts of each group, with least-recently-used eviction. Not thread-safe."""

    def __init__(self, num_groups: int, capacity: int, block: int = BLOCK) -> None:
        """capacity: tokens that the KV cache of one group holds; block: tokens that are cached together."""
        if num_groups < 1 or block < 1:
            raise ValueError(f"sizes must be positive: {num_groups=}, {block=}")
        if capacity < 0:
            raise ValueError(f"capacity must not be negative: {capacity}")
        self._block, self._blocks = block, capacity // block
        # Oldest first. A block is always touched just before the block that precedes it in the prompt, so that it is
        # evicted first: the known blocks of a prompt are always its leading ones.
        self._known: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_groups)]

    def cached_tokens(self, prompt_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """(D,) int64: leading tokens of the prompt that each group has cached."""
        keys = self._keys(prompt_ids)
        return np.array([_leading(keys, known) for known in self._known], np.int64) * self._block

    def insert(self, prompt_ids: Sequence[int] | np.ndarray, group: int) -> None:
        """Note that the prompt was sent to `group`, which has all its whole blocks from now on."""
        known = self._known[group]
        for key in reversed(self._keys(prompt_ids)[: self._blocks]):
            known[key] = None
            known.move_to_end(key)
        while len(known) > self._blocks:
            known.popitem(last=False)

    def _keys(self, prompt_ids: Sequence[int] | np.ndarray) -> list[int]:
        return block_keys(np.ascontiguousarray(prompt_ids, np.int64), self._block).tolist()


def _leading(keys: list[int], known: OrderedDict[int, None]) -> int:
    """How many of `keys` are known; these are the leading ones."""
    return bisect_left(keys, True, key=lambda key: key not in known)


@njit()
def block_keys(token_ids, block):
    """(n // block,) uint64: a hash for each whole block of token_ids (n,), which covers all tokens up to its end."""
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
