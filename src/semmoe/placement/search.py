"""Local search over layouts of a layer's experts: its objective, prices and limits; `moves` makes the moves.

A layout is `slots` (G, P / G), the expert in every slot of every rank, and `primary` (E,), the rank whose copy is
used by ranks whose node has none. Tokens come as sets: the distinct rows of routed experts (U, K) with their weights
(U,), since real routing repeats itself (39,000 tokens of a gpt-oss layer are under 5,000 sets).

Every set takes its best home among the ranks of its request's attention group, under prices that keep homes equally
full (the dual variables of attention-TP's equal slices). The cost of a layout is

    mean over tokens of  min over h of  (price h + what the all-to-all charges a token on h, as `costs.rows` writes it)

with one `RowCosts` for each kind of tokens, plus `load_price` times the expected highest load of a rank (`loads`).
Moves are: swap the contents of two slots; replace an expert that has another copy; make another copy the primary one.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from semmoe.placement.homes import best_homes, inlined, njit

InTime = Callable[[], bool]  # whether further work may begin
PRICE_UNITS = 2**20  # prices are multiples of 1 / PRICE_UNITS, so that sums are exact and ties are recognised


class Effort(NamedTuple):
    """The limits of a search, and its seed; kernels take it, so it is a named tuple."""

    price_steps: int  # of `settle`
    rounds: int
    steps: int  # most moves of a round
    patience: int  # moves without a better layout before a round ends
    tenure: int  # steps for which a moved expert stays at least
    seed: int


class Turn(NamedTuple):
    """What the choice of a move takes into account beside the layout."""

    top: float  # the highest load now (`loads.highest`)
    free: np.ndarray  # (E,) the step from which each expert may move again
    step: int  # now
    needed: float  # a move that gains more than this may be made at once


def settle(state, steps):
    """Update prices by `steps` of subgradient ascent to equal numbers of tokens per home, then values and homes."""
    for step in range(steps + 1):
        best_homes(state)
        if step == steps or state.group_size == 1:
            break
        tokens = np.bincount(state.home, state.weight, len(state.price)).reshape(-1, state.group_size)
        # the price of homes above their group's mean rises, by less in each step
        excess = tokens / np.maximum(tokens.mean(axis=1, keepdims=True), 1e-9) - 1
        price = state.price.reshape(tokens.shape) + 0.3 / (1 + step) * np.minimum(excess, 1.0)
        # only differences count, so the group's mean price stays zero
        price -= price.mean(axis=1, keepdims=True)
        state.price[:] = np.rint(price * PRICE_UNITS).ravel() / PRICE_UNITS


@njit
def collect(state, scratch, a, b, mark):
    """Collect the sets that contain expert a or b, each once, and return their number."""
    count = 0
    for e in (a, b):
        for u in state.rows[state.offsets[e] : state.offsets[e + 1]]:
            if scratch.stamp[u] != mark:
                scratch.stamp[u] = mark
                scratch.touched[count] = u
                count += 1
    return count


@njit
def start(scratch, seed):
    """Begin a search: its random numbers, and no set marked as touched."""
    np.random.seed(seed)
    scratch.stamp[:] = -1


@njit
def free_again(step, tenure):
    """Return the step at which an expert that is moved at `step` may move again."""
    return step + 1 + tenure + np.random.randint(tenure)


@njit
def may_move(turn, gain, a, b):
    """Return whether experts a and b are free, or their move gains enough to be made at once."""
    return (turn.free[a] <= turn.step and turn.free[b] <= turn.step) or gain > turn.needed


@inlined
def copy_ints(source, target):
    """Copy an array into another; a loop, since an assignment to a slice takes a second to compile."""
    for i in range(source.size):
        target.flat[i] = source.flat[i]
