"""The copy choice: which copy of an expert each source rank uses, so that load is level and few rows are sent.

A rank uses its own copy, else one on its node. Among equally near copies the choice is free; it decides which ranks a
token reaches and how the load of experts with copies is shared. The search (`placement.search`) uses the primary copy
for all ranks, at the homes that tokens would have if routing were known. Here homes are the predicted ones, and single
(source rank, expert) pairs change to another copy while that lowers

    what the all-to-all charges per token (`costs.rows`) + LOAD_PRICE * load above the mean

which is summed over ranks and averaged over several mixes of the profile's requests. On gpt-oss with 8 redundant
experts this lowers the expert load (max/mean) of held-out batches by .04 and adds .005 remote ranks per token.
"""

import numpy as np

from semmoe.core import Placement
from semmoe.numeric.jit import njit
from semmoe.placement.problem import Tokens

MIXES, SWEEPS = 16, 8
LOAD_PRICE = 20.0  # the copy choice changes few rows, so load has priority


def nearest_copies(slots: np.ndarray, num_experts: int, node_of: np.ndarray) -> np.ndarray:
    """(G, E, G) bool: the ranks whose copy of an expert a source rank may use: its own, else its node's, else any.

    slots (G, P / G) experts, node_of (G,).
    """
    hosted = np.zeros((num_experts, len(slots)), bool)
    hosted[slots, np.arange(len(slots))[:, None]] = True
    same_node = node_of[:, None] == node_of
    near = hosted[None] & same_node[:, None]
    out = np.where(near.any(axis=2, keepdims=True), near, hosted[None])
    own = np.eye(len(slots), dtype=bool)[:, None] & hosted[None]
    return np.where(own.any(axis=2, keepdims=True), own, out)


def hosting_ranks(slots: np.ndarray, num_experts: int) -> np.ndarray:
    """(E, X) int16: the ranks with copies of each expert, ascending, padded with -1; slots (G, P / G) experts."""
    placement = Placement(physical_to_logical_map=slots.reshape(1, -1), num_experts=num_experts, ep_size=len(slots))
    return placement.ranks_with_copies[0].astype(np.int16)


def primary_copy_choice(copies: np.ndarray, primary: np.ndarray) -> np.ndarray:
    """(G, E) int64: the primary copy (E,) if it is among the nearest ones (G, E, G), else the lowest of these."""
    G, E, _ = copies.shape
    is_near = copies[np.arange(G)[:, None], np.arange(E), primary]
    return np.where(is_near, primary, copies.argmax(axis=2))


def level(
    tokens: Tokens, home: np.ndarray, choice: np.ndarray, copies: np.ndarray, node_of: np.ndarray, costs, load_price
) -> np.ndarray:
    """Improve the copy choice (G, E) for a profile's tokens with homes (T,): fewer rows, and a more level load.

    copies (G, E, G) bool: copies that each source rank may choose. costs: RowCosts. load_price: of load above the mean.
    """
    expert_ids, request = tokens.expert_ids.astype(np.int64), tokens.request
    mixes = np.random.default_rng(0).exponential(size=(request.max() + 1, MIXES))
    mixes *= len(choice) / (np.bincount(request) @ mixes * expert_ids.shape[1])
    out, charged = choice.astype(np.int64), (costs.rank, costs.node, costs.pair, node_of)
    _level(expert_ids, request, home[:, None] * choice.shape[1] + expert_ids, mixes, copies, charged, load_price, out)
    return out


@njit(nogil=True)
def _by_pair(pairs, number):
    """(T * K,) the tokens of each of `number` pairs in pairs (T, K), and (number + 1,) where those of each begin."""
    T, K = pairs.shape
    offsets, tokens = np.zeros(number + 1, np.int64), np.zeros(T * K, np.int64)
    for t in range(T):
        for k in range(K):
            offsets[pairs[t, k] + 1] += 1
    for i in range(number):
        offsets[i + 1] += offsets[i]
    place = offsets.copy()
    for t in range(T):
        for k in range(K):
            tokens[place[pairs[t, k]]] = t
            place[pairs[t, k]] += 1
    return tokens, offsets


@njit(nogil=True)
def _level(expert_ids, request, pairs, mixes, copies, costs, load_price, choice):
    """Move (source rank, expert) pairs to other copies, updating `choice` (G, E) in place.

    request (T,), pairs (T, K) of source rank and expert. mixes (R, J): load of a pair of each request.
    """
    (G, E), J = choice.shape, mixes.shape[1]
    share, load = np.zeros((G * E, J)), np.zeros((G, J))
    tokens, offsets = _by_pair(pairs, G * E)
    # the load of every pair, and of the ranks by today's choice
    for pair in range(G * E):
        rank = choice[pair // E, pair % E]
        for t in tokens[offsets[pair] : offsets[pair + 1]]:
            r = request[t]
            for j in range(J):  # a loop: a sum of arrays takes seconds to compile
                share[pair, j] += mixes[r, j]
        for j in range(J):
            load[rank, j] += share[pair, j]
    for _ in range(SWEEPS):
        moved = False
        for pair in range(G * E):
            h, e = pair // E, pair % E
            now = choice[h, e]
            best, chosen = -1e-9, now
            # the copy that lowers load and rows most, of those that are as near
            for other in range(G):
                if other == now or not copies[h, e, other] or offsets[pair] == offsets[pair + 1]:
                    continue
                change = load_price * _excess_change(load, share[pair], now, other)
                for t in tokens[offsets[pair] : offsets[pair + 1]]:
                    change += _row_change(expert_ids[t], e, h, now, other, choice, costs) / len(expert_ids)
                if change < best:
                    best, chosen = change, other
            if chosen != now:
                for j in range(J):
                    load[now, j] -= share[pair, j]
                    load[chosen, j] += share[pair, j]
                choice[h, e], moved = chosen, True
        if not moved:
            break


@njit(nogil=True)
def _excess_change(load, share, now, other):
    """Change of the load above the mean, 1, when `share` (J,) moves from rank `now` to `other`; mean over J mixes."""
    total = 0.0
    for j in range(len(share)):
        total += max(load[now, j] - share[j] - 1, 0.0) - max(load[now, j] - 1, 0.0)
        total += max(load[other, j] + share[j] - 1, 0.0) - max(load[other, j] - 1, 0.0)
    return total / len(share)


@njit(nogil=True)
def _row_change(experts, moving, home, now, other, choice, costs):
    """Change of what a token is charged when rank `other` instead of `now` computes `moving`, one of its experts."""
    per_rank, per_node, per_pair, node_of = costs
    keeps_rank = has_rank = keeps_node = has_node = False  # whether the token's other experts are computed there
    for e in experts:
        if e != moving:
            rank = choice[home, e]
            keeps_rank |= rank == now
            has_rank |= rank == other
            keeps_node |= node_of[rank] == node_of[now]
            has_node |= node_of[rank] == node_of[other]
    change = per_pair[home, other] - per_pair[home, now]
    change += (0.0 if has_rank else per_rank[home, other]) - (0.0 if keeps_rank else per_rank[home, now])
    if node_of[other] != node_of[now]:
        change += 0.0 if has_node else per_node[home, node_of[other]]
        change -= 0.0 if keeps_node else per_node[home, node_of[now]]
    return change
