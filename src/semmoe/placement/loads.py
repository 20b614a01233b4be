"""The load that other requests would put on ranks, by batches drawn from the profile, and the cost of rows."""

from typing import NamedTuple

import numpy as np

from semmoe.costs.metrics import layer_traffic
from semmoe.costs.rows import RowCosts
from semmoe.placement.homes import njit
from semmoe.placement.problem import Tokens

MIXES = 64


class Loads(NamedTuple):
    """The loads of ranks, and what the highest of them can become."""

    now: np.ndarray  # (G, J) load of each rank in each mix
    top: np.ndarray  # (3, J) the three highest of each mix; -inf where there are fewer ranks
    rank: np.ndarray  # (2, J) the ranks of the first two
    # (E, G) by how much at least the highest load, mean over mixes, rises if an expert's whole load comes to a rank
    slope: np.ndarray


class Prices(NamedTuple):
    """The costs of a layout other than its rows; kernels take it, so it is a named tuple."""

    move_cost: np.ndarray  # (E, G) what an expert on a rank costs, per token
    mixes: np.ndarray  # (E, J) load of each expert in each mix: see `draw_mixes`
    loads: Loads  # of the ranks
    load_price: float  # of the highest load


def make_prices(move_cost: np.ndarray, mixes: np.ndarray, load_price: float) -> Prices:
    """Return prices with room for the loads, which the search fills."""
    (E, G), J = move_cost.shape, mixes.shape[1]
    loads = Loads(np.zeros((G, J)), np.zeros((3, J)), np.zeros((2, J), np.int64), np.zeros((E, G)))
    return Prices(move_cost, mixes, loads, load_price)


def draw_mixes(tokens: Tokens, num_experts: int, ep_size: int, batch_tokens: int, rng) -> np.ndarray:
    """(E, MIXES) float64: load of each expert in batches of other requests, in mean loads of a rank.

    Requests are resampled twice, by a Poisson bootstrap, since both the profile and the traffic are random draws, and a
    batch's tokens add noise of their own (`expected_load`).
    """
    share = resampled_shares(tokens.expert_ids, tokens.request, num_experts, MIXES, rng)
    share += rng.normal(size=share.shape) * np.sqrt(share / (batch_tokens * tokens.expert_ids.shape[1]))
    return np.ascontiguousarray(share.T * ep_size)


def resampled_shares(ids: np.ndarray, request: np.ndarray, number: int, mixes: int, rng) -> np.ndarray:
    """(mixes, number) float64: share of each of `number` ids in ids (T, K), with the requests (T,) resampled twice."""
    draws = rng.poisson(rng.poisson(1, (mixes, int(request.max()) + 1))).astype(np.float64)
    share = _sum_rows(np.ascontiguousarray(draws.T), np.broadcast_to(request[:, None], ids.shape), ids, number).T + 1e-9
    return share / share.sum(axis=1, keepdims=True)


@njit
def _sum_rows(rows, row_of, ids, number):
    """(number, J) the sum, for each of `number` ids in ids (T, K), of the rows (N, J) that row_of (T, K) names."""
    out = np.zeros((number, rows.shape[1]))
    for t in range(ids.shape[0]):
        for k in range(ids.shape[1]):
            i, row = ids[t, k], row_of[t, k]
            for j in range(rows.shape[1]):
                out[i, j] += rows[row, j]
    return out


def expected_load(
    tokens: Tokens, home: np.ndarray, targets: np.ndarray, num_experts: int, num_ranks: int, batch_tokens: int
) -> float:
    """Expected load max/mean of G ranks in a batch of other requests.

    home (T,) of profiled tokens, targets (T, K): the ranks that compute their pairs. Requests are resampled as in
    `draw_mixes`. Homes have equally many tokens in any batch, so the pairs of each expert are drawn, and of each home
    only as far as homes stay equal (one step of iterative proportional fitting, Deming and Stephan, 1940). Ranks share
    an expert's pairs of a home as in the profile.
    """
    G, E, rng = num_ranks, num_experts, np.random.default_rng(0)
    expert_ids, request = tokens.expert_ids, tokens.request
    one = np.zeros(E, targets.dtype)
    one[expert_ids] = targets
    homes = 1 if (one[expert_ids] == targets).all() else G  # 1: every expert has one rank, whatever the home is
    pair = (home[:, None] if homes > 1 else 0) * E + expert_ids
    drawn = resampled_shares(pair, request, homes * E, MIXES, rng).reshape(MIXES, homes, E)
    share = drawn / drawn.sum(axis=2, keepdims=True)
    share *= drawn.sum(axis=1, keepdims=True) / share.sum(axis=1, keepdims=True)
    # each token brings an equal part of its pair's share to the rank that computes it
    part = share.reshape(MIXES, -1).T / np.maximum(np.bincount(pair.ravel(), minlength=homes * E), 1)[:, None]
    load = _sum_rows(part, pair, targets, G).T
    load += rng.normal(size=load.shape) * np.sqrt(
        np.clip(load * (1 - load), 0, 1) / (batch_tokens * expert_ids.shape[1])
    )
    return float((load.max(axis=1) * G).mean())


@njit
def highest(prices):
    """Mean over mixes of the highest of the loads `now`; fills the other fields of the loads."""
    (load, top, rank, slope), mixes = prices.loads, prices.mixes
    (G, J), total = load.shape, 0.0
    for j in range(J):
        first = second = third = -np.inf  # the three highest loads of the mix
        one = two = -1
        for g in range(G):
            value = load[g, j]
            if value > first:
                first, second, third, one, two = value, first, second, g, one
            elif value > second:
                second, third, two = value, second, g
            elif value > third:
                third = value
        total += first
        top[0, j], top[1, j], top[2, j], rank[0, j], rank[1, j] = first, second, third, one, two
    slope[:] = 0.0
    for e in range(slope.shape[0]):
        for j in range(J):
            slope[e, rank[0, j]] += mixes[e, j]
    slope /= J
    return total / J


@njit
def load_gain(prices, top, x, y, sent, returned):
    """Return what the highest load, `top` now, costs less after load went from rank x to rank y and other load back.

    sent: (expert, share of its load). returned: (expert, share that x gets, share that y loses).
    """
    if prices.load_price == 0:
        return 0.0
    (a, share), (b, came, gone) = sent, returned
    mix, other_mix = prices.mixes[a], prices.mixes[b]
    from_x, from_y, after = prices.loads.now[x], prices.loads.now[y], 0.0
    for j in range(mix.shape[0]):
        one, two = prices.loads.rank[0, j], prices.loads.rank[1, j]
        if one != x and one != y:
            others = prices.loads.top[0, j]
        else:
            others = prices.loads.top[1 if two != x and two != y else 2, j]
        out, back = share * mix[j], other_mix[j]
        left = from_x[j] - (out - came * back)
        right = from_y[j] + (out - gone * back)
        most = left if left > others else others
        after += right if right > most else most
    return prices.load_price * (top - after / mix.shape[0])


def total_cost(costs: RowCosts, targets: np.ndarray, home: np.ndarray, node_of: np.ndarray) -> float:
    """Return the cost of all tokens on ranks home (T,), whose pairs the ranks targets (T, K) compute."""
    sent = layer_traffic(targets, home, len(node_of), costs.node.shape[1])
    parts = sent.rows * costs.rank, sent.node_rows * costs.node, sent.pair_rows * costs.pair
    return float(sum(part.sum() for part in parts))
