"""The load that requests other than the profile's would put on ranks: batches drawn from the profile's requests."""

from collections import namedtuple

import numpy as np

from semmoe.affinity import count
from semmoe.placement.homes import njit

MIXES = 64

Loads = namedtuple(
    "Loads",
    [
        "now",  # (G, J) load of each rank in each mix
        "others",  # (G, G, J) the highest load of all ranks but x and y, for x < y
        "least",  # (G, G) its mean over mixes, at least 1: no move between x and y brings the highest load below it
    ],
)


def make_loads(ep_size: int, mixes: int) -> Loads:
    G, J = ep_size, mixes
    return Loads(np.zeros((G, J)), np.zeros((G, G, J)), np.ones((G, G)))


def draw_mixes(expert_ids: np.ndarray, request: np.ndarray, num_experts: int, ep_size: int, batch_tokens: int, rng):
    """(E, MIXES) float64: load of each expert in batches of other requests, in mean loads of a rank.

    expert_ids (T, K), request (T,). Requests are resampled twice, by a Poisson bootstrap, since both the profile and
    the traffic are random draws, and a batch's tokens add noise of their own (`cocluster.expected_load`).
    """
    share = resampled_shares(expert_ids, request, num_experts, MIXES, rng)
    share += rng.normal(size=share.shape) * np.sqrt(share / (batch_tokens * expert_ids.shape[1]))
    return np.ascontiguousarray(share.T * ep_size)


def resampled_shares(ids: np.ndarray, request: np.ndarray, number: int, mixes: int, rng) -> np.ndarray:
    """(mixes, number) float64: share of each of `number` ids in ids (T, K), with the requests (T,) resampled twice."""
    by_request = count(request, ids, int(request.max()) + 1, number)
    share = rng.poisson(rng.poisson(1, (mixes, by_request.shape[0]))).astype(np.float64) @ by_request + 1e-9
    return share / share.sum(axis=1, keepdims=True)


def expected_load(
    expert_ids: np.ndarray, home: np.ndarray, choice: np.ndarray, request: np.ndarray, batch_tokens: int
) -> float:
    """Expected load max/mean of G ranks in a batch of other requests.

    expert_ids (T, K), home (T,) and request (T,) of profiled tokens, choice (G, E): the rank whose copy each rank uses.
    Requests are resampled as in `draw_mixes`. Homes have equally many tokens in any batch: what is drawn is how many
    pairs each expert has, and of which homes only as far as homes stay equal (one step of iterative proportional
    fitting, Deming and Stephan, 1940).
    """
    (G, E), rng = choice.shape, np.random.default_rng(0)
    if (choice == choice[0]).all():  # homes do not matter
        home, choice = np.zeros_like(home), choice[:1]
    drawn = resampled_shares(home[:, None] * E + expert_ids, request, choice.size, MIXES, rng)
    drawn = drawn.reshape(MIXES, len(choice), E)
    share = drawn / drawn.sum(axis=2, keepdims=True)
    share *= drawn.sum(axis=1, keepdims=True) / share.sum(axis=1, keepdims=True)
    load = share.reshape(MIXES, -1) @ np.eye(G)[choice.ravel()]
    load += rng.normal(size=load.shape) * np.sqrt(load * (1 - load) / (batch_tokens * expert_ids.shape[1]))
    return float((load.max(axis=1) * G).mean())


@njit
def highest(loads):
    """Mean over mixes of the highest of the loads `now`; fills `others` and `least`."""
    load, others, least = loads.now, loads.others, loads.least
    (G, J), total = load.shape, 0.0
    for x in range(G):
        for y in range(x + 1, G):
            least[x, y] = 0.0
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
        for x in range(G):
            for y in range(x + 1, G):
                if one != x and one != y:
                    most = first
                else:
                    most = second if two != x and two != y else third
                others[x, y, j] = most
                least[x, y] += most / J
    for x in range(G):
        for y in range(x + 1, G):
            least[x, y] = max(least[x, y], 1.0)  # no layout has a load below the mean
    return total / J


@njit
def highest_after(mix, share, other_mix, back, from_x, from_y, others):
    """Mean over mixes (J,) of the highest load after `share` of an expert went from x to y and `back` of another back.

    others (J,): highest load of all ranks but x and y.
    """
    after = 0.0
    for j in range(mix.shape[0]):
        shift = share * mix[j] - back * other_mix[j]
        left, right, top = from_x[j] - shift, from_y[j] + shift, others[j]
        top = left if left > top else top
        after += right if right > top else top
    return after / mix.shape[0]
