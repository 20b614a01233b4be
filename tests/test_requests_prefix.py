"""The prefix index: block numbers, leading blocks, what is dropped first."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semmoe.requests.prefix import BLOCK, PrefixIndex, block_keys


class NaiveIndex:
    """The same by whole prefixes as tuples, in one list a group, oldest first."""

    def __init__(self, groups, capacity, block):
        self.block, self.blocks, self.known = block, capacity // block, [[] for _ in range(groups)]

    def prefixes(self, prompt):
        return [tuple(prompt[: end + self.block]) for end in range(0, len(prompt) - self.block + 1, self.block)]

    def cached_tokens(self, prompt):
        out = []
        for known in self.known:
            leading = 0
            for prefix in self.prefixes(prompt):
                if prefix not in known:
                    break
                leading = len(prefix)
            out.append(leading)
        return out

    def insert(self, prompt, group):
        kept = self.prefixes(prompt)[: self.blocks]
        rest = [prefix for prefix in self.known[group] if prefix not in kept]
        self.known[group] = (rest + kept[::-1])[-self.blocks :] if self.blocks else []


def test_the_worked_example():
    index = PrefixIndex(2, 100, block=2)
    index.insert([7, 7, 5], 0)
    index.insert([7, 7, 5, 5, 3], 1)
    assert index.cached_tokens([7, 7, 5, 5]).tolist() == [2, 4]
    assert index.cached_tokens([5, 5]).tolist() == [0, 0]  # the block 5 5 counts after 7 7 only
    assert index.cached_tokens([7]).tolist() == [0, 0]
    assert index.cached_tokens([]).tolist() == [0, 0]


def test_the_end_of_the_oldest_prefix_is_dropped_first():
    index = PrefixIndex(1, 8, block=2)
    index.insert([1, 1, 2, 2, 3, 3], 0)
    index.insert([9, 9, 8, 8], 0)
    assert index.cached_tokens([1, 1, 2, 2, 3, 3]).tolist() == [4]
    index.insert([1, 1], 0)  # used again, now newer than 9 9
    index.insert([4, 4, 5, 5], 0)  # drops 2 2, which nothing used again, and then 8 8
    assert index.cached_tokens([1, 1, 2, 2, 3, 3]).tolist() == [2]
    assert index.cached_tokens([9, 9, 8, 8]).tolist() == [2]
    assert index.cached_tokens([4, 4, 5, 5]).tolist() == [4]


def test_a_prompt_beyond_the_capacity_keeps_its_beginning():
    index = PrefixIndex(1, 5, block=2)
    index.insert([1, 2, 3, 4, 5, 6, 7, 8], 0)
    assert index.cached_tokens([1, 2, 3, 4, 5, 6]).tolist() == [4]
    nothing = PrefixIndex(2, 1, block=2)
    nothing.insert([1, 2], 0)
    assert nothing.cached_tokens([1, 2]).tolist() == [0, 0]


@given(st.integers(0, 99999), st.integers(1, 4), st.integers(1, 3), st.integers(0, 14))
def test_it_agrees_with_whole_prefixes(seed, groups, block, capacity):
    rng = np.random.default_rng(seed)
    index, naive = PrefixIndex(groups, capacity, block), NaiveIndex(groups, capacity, block)
    for _ in range(25):
        prompt = rng.integers(2, size=rng.integers(9)).tolist()
        assert index.cached_tokens(prompt).tolist() == naive.cached_tokens(prompt)
        group = int(rng.integers(groups))
        index.insert(np.array(prompt, np.int32), group)
        naive.insert(prompt, group)


def test_a_number_covers_its_block_and_all_before_it():
    prompts = np.random.default_rng(0).integers(-5, 200_000, (2000, 3 * BLOCK))
    keys = np.array([block_keys(prompt, BLOCK) for prompt in prompts])
    assert keys.shape == (2000, 3)
    assert len(np.unique(keys)) == 6000
    changed = prompts.copy()
    changed[:, 0] += 1
    assert not (np.array([block_keys(prompt, BLOCK) for prompt in changed]) == keys).any()
    longer = np.append(prompts[0], [1, 2])
    np.testing.assert_array_equal(block_keys(longer, BLOCK), keys[0])


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="block=0"):
        PrefixIndex(2, 10, block=0)
    with pytest.raises(ValueError, match="capacity must not be negative: -1"):
        PrefixIndex(2, -1)
