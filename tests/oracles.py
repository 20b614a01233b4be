"""Slow and obvious reference implementations: plain loops, written from the definitions."""

import math
from itertools import combinations, product

import numpy as np
from scipy.optimize import linear_sum_assignment

from semmoe.core import DECODE, Placement, Plan, RoutingTrace
from semmoe.tokens import kernels, slices
from semmoe.tokens.kernels import FRACTION, RUNNING_LIMIT, RUNNING_PRIOR
from semmoe.tokens.regression import TOKEN_PRIOR
from semmoe.topology import Topology


def affinity_counts(trace: RoutingTrace):
    """Token (L, V, E), request (L, R, E) and path (L - 1, E, E) counts."""
    f = trace.fingerprint
    tokens = np.zeros((f.num_layers, f.vocab_size, f.num_experts), int)
    requests = np.zeros((f.num_layers, trace.num_requests, f.num_experts), int)
    paths = np.zeros((f.num_layers - 1, f.num_experts, f.num_experts), int)
    for r in range(trace.num_requests):
        for t in range(trace.request_offsets[r], trace.request_offsets[r + 1]):
            for l in range(f.num_layers):
                for e in trace.expert_ids[t, l]:
                    tokens[l, trace.token_ids[t], e] += 1
                    requests[l, r, e] += 1
                    for after in trace.expert_ids[t, l + 1] if l + 1 < f.num_layers else ():
                        paths[l, e, after] += 1
    return tokens, requests, paths


def ranks_of_expert(placement: Placement, layer: int, expert: int) -> list[int]:
    """The rank of every copy, in order of physical id."""
    row = placement.physical_to_logical_map[layer]
    return [p // placement.experts_per_rank for p in range(len(row)) if row[p] == expert]


def nearest_ranks(placement: Placement, topology: Topology, layer: int, source: int, expert: int) -> set[int]:
    """Where `source` may send a token for `expert`: itself, else its node, else anywhere."""
    copies = set(ranks_of_expert(placement, layer, expert))
    node_size = topology.ep_size // topology.num_nodes
    same_node = {rank for rank in copies if rank // node_size == source // node_size}
    return {source} if source in copies else same_node or copies


def copy_choice(placement: Placement, topology: Topology, layer: int, expert: int) -> list[int]:
    """The rank that serves each source: sources without an own copy take turns over those nearest to them.

    Those with copies on their node take turns inside the node, the others all together.
    """
    copies = ranks_of_expert(placement, layer, expert)
    node_size = topology.ep_size // topology.num_nodes
    turns: dict[int, int] = {}
    out = []
    for source in range(topology.ep_size):
        if source in copies:
            out.append(source)
            continue
        node = source // node_size
        same_node = [rank for rank in copies if rank // node_size == node]
        queue, near = (node, same_node) if same_node else (-1, copies)
        out.append(near[turns.get(queue, 0) % len(near)])
        turns[queue] = turns.get(queue, 0) + 1
    return out


def cover(placement: Placement, topology: Topology, layer: int, source: int, experts) -> list[int]:
    """The rank of each expert of a token by the rule `cover`."""
    near = {int(e): set(nearest_ranks(placement, topology, layer, source, int(e))) for e in experts}
    liked = {e: int(placement.static_dispatch[layer, source, e]) for e in near}
    if placement.fixed_copies is not None:
        near |= {e: {liked[e]} for e in near if placement.fixed_copies[layer, source, e]}
    away = {rank: (rank - source) % topology.ep_size for rank in range(topology.ep_size)}
    out = {e: min(ranks) for e, ranks in near.items() if len(ranks) == 1}
    reached = set(out.values())
    for e in near.keys() - out.keys():
        if near[e] & reached:
            out[e] = liked[e] if liked[e] in reached else min(near[e] & reached, key=away.get)
    while left := near.keys() - out.keys():
        votes = {r: ([r in near[e] for e in left], [r == liked[e] for e in left]) for r in away}
        rank = max(away, key=lambda r: (sum(votes[r][0]), sum(votes[r][1]), -away[r]))
        out |= {e: rank for e in left if rank in near[e]}
    return [out[int(e)] for e in experts]


def traffic(expert_ids, home, choice):
    """(local pairs, rows (G, G), load (G,)) of one batch of one layer."""
    G = len(choice)
    local, rows, load = 0, np.zeros((G, G), int), np.zeros(G, int)
    for experts, source in zip(expert_ids, home, strict=True):
        targets = [int(choice[source, e]) for e in experts]
        local += targets.count(source)
        for target in targets:
            load[target] += 1
        for target in set(targets) - {source}:
            rows[source, target] += 1
    return local, rows, load


def majority_rank(experts, rank_of_expert) -> int:
    """The rank most of the experts are on; ties to the rank named first; -1 where no expert counts."""
    ranks = [int(rank_of_expert[e]) for e in experts if rank_of_expert[e] >= 0]
    return max(ranks, key=lambda rank: (ranks.count(rank), -ranks.index(rank))) if ranks else -1


def algorithm_2(scores, prompts) -> list[int]:
    """The group of each request; ids outside the table's vocabulary read its last row."""
    vocabulary, groups = len(scores) - 1, scores.shape[1]
    out: list[int] = []
    for prompt in prompts:
        rows = [token if 0 <= token < vocabulary else vocabulary for token in prompt]
        used = out[len(out) // groups * groups :]
        free = [d for d in range(groups) if d not in used]
        out.append(max(free, key=lambda d: (sum(float(scores[row, d]) for row in rows), -d)))
    return out


def score_tokens(backend, tables, layer, first, slices, ids, earlier, history=None, *real):
    """`look_up_tokens` and `score` of a backend, one after the other."""
    tokens = backend.look_up_tokens(tables, [layer], first, slices, ids)[0]
    return backend.score(tables, layer, first, tokens, earlier, history, *real)


def look_up(tables, layer, group, token, history):
    """(first, confidence, second, confidence) for one token; history: its devices, most recent layer first, -1 as 0."""
    vocabulary = tables.token_ranks.shape[2] - 1
    row = token if 0 <= token < vocabulary else vocabulary
    by_token = int(tables.token_ranks[layer, group, row]), float(tables.token_confidence[layer, group, row])
    if history is None:
        return (*by_token, -1, 0.0)
    ranks = round(tables.path_ranks.shape[2] ** (1 / tables.lookback))
    path = sum(max(int(device), 0) * ranks**i for i, device in enumerate(history))
    by_path = int(tables.path_ranks[layer, group, path]), float(tables.path_confidence[layer, group, path])
    return (*by_token, *by_path) if by_token[1] > by_path[1] else (*by_path, *by_token)


def assign_slices(preferences, num_slices) -> list[int]:
    """Equal slices for tokens with (first, confidence, second, confidence) each."""
    tokens = len(preferences)
    room = [max(-(-tokens // num_slices), 1)] * num_slices
    out = [-1] * tokens
    for choice, confidence in ((0, 1), (2, 3)):
        for t in sorted(range(tokens), key=lambda t: (-preferences[t][confidence], t)):
            wanted = int(preferences[t][choice])
            if out[t] < 0 and wanted >= 0 and room[wanted]:
                out[t] = wanted
                room[wanted] -= 1
    for t in range(tokens):
        if out[t] < 0:
            out[t] = next(s for s in range(num_slices) if room[s])
            room[out[t]] -= 1
    return out


def replay(trace: RoutingTrace, plan: Plan, choice, batches):
    """Per layer: (local pairs, rows, load, mean over batches of load max / mean), by looking up token by token."""
    D, S, L = plan.topology.dp_size, plan.topology.attn_tp_size, trace.fingerprint.num_layers
    requests = plan.requests if plan.requests.by_tables else None
    prompts = [trace.prompt(r).tolist() for r in range(trace.num_requests)]
    by_request = (
        [r % D for r in range(len(prompts))] if requests is None else algorithm_2(requests.request_scores, prompts)
    )
    group = [by_request[r] for r in range(trace.num_requests) for _ in range(np.diff(trace.request_offsets)[r])]
    inside = np.full((D, L, trace.fingerprint.num_experts), -1)
    for d, l, e in product(range(D), range(L), range(trace.fingerprint.num_experts)):
        own = [rank - d * S for rank in ranks_of_expert(plan.placement, l, e) if rank // S == d]
        inside[d, l, e] = min(own, default=-1)
    out = []
    for l in range(L):
        local, rows, load, imbalance = 0, np.zeros((D * S, D * S), int), np.zeros(D * S, int), []
        for batch in batches:
            home = _homes(trace, plan, l, [int(t) for t in batch], group, inside)
            batch_local, batch_rows, batch_load = traffic(trace.expert_ids[batch, l], home, choice[l])
            local, rows, load = local + batch_local, rows + batch_rows, load + batch_load
            imbalance.append(batch_load.max() / batch_load.mean())
        out.append((local, rows, load, float(np.mean(imbalance))))
    return out


def _homes(trace, plan, layer, batch, group, inside):
    S, tables = plan.topology.attn_tp_size, plan.tokens if plan.tokens.by_tables else None
    home = [0] * len(batch)
    for d in range(plan.topology.dp_size):
        mine = [i for i, t in enumerate(batch) if group[t] == d]
        if tables is None:
            size = max(-(-len(mine) // S), 1)
            slices = [i // size for i in range(len(mine))]
        else:
            wishes = [_wish(trace, tables, layer, d, batch[i], inside[d]) for i in mine]
            slices = assign_slices(wishes, S)
        for i, s in zip(mine, slices, strict=True):
            home[i] = d * S + s
    return home


def _wish(trace, tables, layer, group, t, rank_of_expert):
    before = range(layer - 1, layer - 1 - tables.lookback, -1)
    history = None
    if layer >= tables.lookback:
        history = [majority_rank(trace.expert_ids[t, l], rank_of_expert[l]) for l in before]
    return look_up(tables, layer, group, int(trace.token_ids[t]), history)


def objective(activations, item_labels, expert_labels, theta) -> float:
    """Section 3.3 for one layer, per token: theta * sum |load - share| + (1 - theta) * remote activations."""
    clusters, total = max(expert_labels) + 1, activations.sum()
    load, remote = np.zeros(clusters), 0.0
    for n, e in product(*map(range, activations.shape)):
        load[item_labels[n]] += activations[n, e]
        remote += activations[n, e] * (item_labels[n] != expert_labels[e])
    return float((theta * np.abs(load - total / clusters).sum() + (1 - theta) * remote) / total)


def best_objective(activations, clusters, theta) -> float:
    """The least objective over every labelling of items and every equal division of experts."""
    items, experts = activations.shape
    return min(
        objective(activations, item_labels, expert_labels, theta)
        for expert_labels in equal_divisions(experts, clusters)
        for item_labels in product(range(clusters), repeat=items)
    )


def equal_divisions(experts, clusters):
    """Every way to label `experts` with `clusters` labels, equally often each."""
    size = experts // clusters

    def fill(labels, cluster):
        free = [e for e in range(experts) if labels[e] < 0]
        if cluster == clusters - 1:
            yield [cluster if label < 0 else label for label in labels]
            return
        for chosen in combinations(free, size):
            yield from fill([cluster if e in chosen else label for e, label in enumerate(labels)], cluster + 1)

    return list(fill([-1] * experts, 0))


def rank_load(placement: Placement, load) -> np.ndarray:
    """(L, G): the load of each rank if every copy of an expert gets an equal share."""
    out = np.zeros((len(load), placement.ep_size))
    for l in range(len(load)):
        for e in range(placement.num_experts):
            copies = ranks_of_expert(placement, l, e)
            for rank in copies:
                out[l, rank] += load[l, e] / len(copies)
    return out


def best_slices_total(scores) -> int:
    """The largest sum of scores (B, S) with at most ceil(B / S) tokens a slice, exactly: every place is a column."""
    tokens, slices = scores.shape
    places = np.repeat(scores.astype(np.int64), max(-(-tokens // slices), 1), axis=1)
    rows, columns = linear_sum_assignment(places, maximize=True)
    return int(places[rows, columns].sum())


def score(tables, layer, first_rank, num_slices, token, earlier, history) -> list[int]:
    """One token's score on each rank of a group; earlier (J, K), history (G,) or None."""
    vocabulary, experts = len(tables.token_rows) - 1, (tables.history_scores.shape[1] - 1) // 2
    row = tables.token_rows[token if 0 <= token < vocabulary else vocabulary]
    path_rows = []
    for j, chosen in enumerate(earlier):
        for place, expert in enumerate(chosen):
            blocks = sum(len(chosen) if before < tables.ordered else 1 for before in range(j))
            path_rows.append((blocks + (place if j < tables.ordered else 0)) * experts + int(expert))
    out = []
    for rank in range(first_rank, first_rank + num_slices):
        value = int(tables.token_scores[layer, row, rank]) * 2 ** int(tables.token_shift[layer])
        value += sum(int(tables.path_scores[layer, p, rank]) for p in path_rows)
        value += int((tables.history_scores[layer, -1] if history is None else history)[rank])
        out.append(value)
    return out


def trace_history(tables, layer, trace) -> list[list[int]]:
    """What the tokens before say of each routed token: the running mean and the token before; prefill knows nothing."""
    rows, experts = tables.history_scores[layer].astype(int), trace.fingerprint.num_experts
    out = []
    for r in range(trace.num_requests):
        running, previous = [0] * rows.shape[1], rows[-1].tolist()
        for seen, t in enumerate(range(trace.request_offsets[r], trace.request_offsets[r + 1])):
            decoded = trace.phase[t] == DECODE
            known = [(a >> FRACTION) + b for a, b in zip(running, previous, strict=True)]
            out.append(known if decoded else rows[-1].tolist())
            chosen = [int(e) for e in trace.expert_ids[t, layer]]
            weight = min(seen, RUNNING_LIMIT) + RUNNING_PRIOR
            now = rows[chosen].sum(axis=0).tolist()
            running = [a + ((n << FRACTION) - a) // weight for a, n in zip(running, now, strict=True)]
            previous = rows[[experts + e for e in chosen]].sum(axis=0).tolist()
    return out


def expected_activations(predictor, trace, layer, leave_one_out) -> np.ndarray:
    """(T, E) from a predictor's weights, token by token; the trace is also what its token shares are counted on."""
    f, E = trace.fingerprint, trace.fingerprint.num_experts
    intercept, of_previous, of_path, of_token, of_running = predictor.layers[layer].parts
    counts = affinity_counts(trace)[0][layer]
    mean = counts.sum(axis=0) * f.top_k / counts.sum()
    out = np.zeros((trace.num_tokens, E))
    for r in range(trace.num_requests):
        running = np.zeros(E)
        for seen, t in enumerate(range(trace.request_offsets[r], trace.request_offsets[r + 1])):
            chosen = trace.expert_ids[t, layer]
            own = counts[trace.token_ids[t]].astype(float)
            if leave_one_out:
                own[chosen] -= 1
            occurrences = own.sum() / f.top_k
            shares = (own + TOKEN_PRIOR * mean) / (occurrences + TOKEN_PRIOR) - mean
            out[t] = intercept[0] + shares @ of_token
            known = trace.phase[t] == DECODE
            out[t] += running @ of_running if known else 0
            before = trace.expert_ids[t - 1, layer] if known and seen else [E]
            out[t] += of_previous[before].sum(axis=0)
            first = 0
            planes = [trace.expert_ids[t, layer - b] for b in range(1, min(predictor.looks.lookback, layer) + 1)]
            for j, plane in enumerate(planes):
                for place, e in enumerate(plane):
                    out[t] += of_path[first + (place * E if j < predictor.looks.ordered else 0) + e]
                first += E * (f.top_k if j < predictor.looks.ordered else 1)
            one_hot = np.bincount(chosen, minlength=E)
            running = running + (one_hot - mean - running) / (min(seen, RUNNING_LIMIT) + RUNNING_PRIOR)
    return out


def serves(hosts, node_of, primary, expert, home) -> int:
    """The rank that serves `expert` to `home`: hosts, the sets of experts of the ranks; own, own node's, primary."""
    if expert in hosts[home]:
        return home
    near = [rank for rank in range(len(hosts)) if node_of[rank] == node_of[home] and expert in hosts[rank]]
    return primary[expert] if node_of[primary[expert]] == node_of[home] or not near else near[0]


def layout_cost(slots, primary, tokens, topology, costs, price=None, hosting=False):
    """(cost, value and home of each token set) of a layout; tokens: (experts, weight, attention group, kind) of each.

    costs: the RowCosts of each kind. hosting: whether homes are ranks that host one of the set's experts, if any does.
    """
    S, price = topology.attn_tp_size, np.zeros(topology.ep_size) if price is None else price
    hosts, node_of = [set(rank) for rank in slots.tolist()], topology.node_of.tolist()
    values, homes = [], []
    for experts, _, group, kind in tokens:
        ranks, worth, one = range(group * S, (group + 1) * S), {}, costs[kind]
        some = [rank for rank in ranks if hosts[rank] & set(experts)]
        for home in some if hosting and some else ranks:
            served = [serves(hosts, node_of, primary, e, home) for e in experts]
            cost = sum(one.pair[home, y] for y in served) + sum(one.rank[home, y] for y in set(served))
            worth[home] = -price[home] - cost - sum(one.node[home, m] for m in {node_of[y] for y in served})
        homes.append(max(worth, key=lambda rank: worth[rank]))
        values.append(worth[homes[-1]])
    weight = np.array([token[1] for token in tokens])
    return float(-(np.array(values) * weight).sum() / weight.sum()), values, homes


def all_layouts(experts, ranks, slots_per_rank):
    """Every (slots, primary) of one layer: the experts of each rank, and which of an expert's ranks is its primary."""
    held = list(combinations(range(experts), slots_per_rank))
    for slots in product(held, repeat=ranks):
        copies = [[rank for rank in range(ranks) if e in slots[rank]] for e in range(experts)]
        if all(copies):
            for primary in product(*copies):
                yield np.array(slots), np.array(primary)


def exchange_seconds(sent, topology: Topology, tiers, shared: bool) -> float:
    """Seconds of an all-to-all of `sent` (G, G) bytes; tiers: (latency s, GB/s) inside a node and between nodes."""
    G, size, total, travels = topology.ep_size, topology.ep_size // topology.num_nodes, 0.0, []
    for between, (latency, bandwidth) in enumerate(tiers):
        out, into = [0] * G, [0] * G
        for i in range(G):
            for j in range(G):
                if i != j and (i // size != j // size) == bool(between):
                    out[i] += sent[i][j]
                    into[j] += sent[i][j]
        if sum(out):
            total += latency * (math.log2(topology.num_nodes) if between else 1)
            travels.append((sum(out) if shared else max(out + into)) / (bandwidth * 1e9))
    return total + (sum(travels) if shared else math.sqrt(sum(t * t for t in travels)))


def observe(running, previous, seen, slots, expert_ids, rows) -> None:
    """`semmoe.tokens.kernels.observe`, in which no token's contribution is asked for."""
    nothing = np.empty((len(slots), 0), np.int32), np.zeros(len(slots), np.bool_)
    kernels.observe(running, previous, seen, slots, expert_ids, rows, *nothing)


class History:
    """What a request's previous tokens predict about its next one: one state per request slot and layer.

    running: the mean of the projected rows of the chosen experts, weighted towards recent tokens, in units of
    1 / 2**FRACTION table units. previous: the rows of the previous token. Slots of finished requests are `reset` before
    they are used again.
    """

    def __init__(self, tables: slices.PathScores, num_slots: int) -> None:
        layers, _, ranks = tables.history_scores.shape
        self._rows = tables.history_scores
        self._running = np.zeros((layers, num_slots, ranks), np.int32)
        self._previous = np.zeros((layers, num_slots, ranks), np.int32)
        self._seen = np.zeros((layers, num_slots), np.int64)
        self.reset(np.arange(num_slots))

    def begin(self, slots: np.ndarray) -> None:
        """Begin requests in `slots`: reset their state. The state grows to hold the highest slot."""
        missing = int(slots.max(initial=-1)) + 1 - self._running.shape[1]
        if missing > 0:
            for name in ("_running", "_previous", "_seen"):
                array = getattr(self, name)
                more = np.zeros((array.shape[0], max(missing, array.shape[1]), *array.shape[2:]), array.dtype)
                setattr(self, name, np.concatenate([array, more], axis=1))
        self.reset(slots)

    def reset(self, slots: np.ndarray) -> None:
        self._running[:, slots], self._seen[:, slots] = 0, 0
        self._previous[:, slots] = self._rows[:, None, -1]

    def contribution(self, layer: int, slots: np.ndarray, decoding: np.ndarray | None = None) -> np.ndarray:
        """(B, G) int32 to add to the scores of the tokens of `slots` (B,).

        decoding (B,) bool: tokens that were decoded, at most one per slot; None: all of them. Tokens of a prompt run
        together, so that the routing of the tokens before them is not yet known.
        """
        known = (self._running[layer, slots] >> FRACTION) + self._previous[layer, slots]
        return known if decoding is None else np.where(decoding[:, None], known, self._rows[layer, -1])

    def observe(self, layer: int, slots: np.ndarray, expert_ids: np.ndarray) -> None:
        """Update the state: tokens of `slots` (B,) chose `expert_ids` (B, K); tokens of one slot are in their order."""
        observe(*self.state(layer), slots, expert_ids, self._rows[layer])

    def state(self, layer: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Running means, previous rows and numbers of tokens seen, of every slot at a layer."""
        return self._running[layer], self._previous[layer], self._seen[layer]


class PlainShuffler:
    """`Shuffler` on arrays without padding, for score tables."""

    def __init__(self, plan: Plan, group: int) -> None:
        self._policy, self._top_k = plan.tokens, plan.fingerprint.top_k
        self._size, self._first = plan.topology.attn_tp_size, group * plan.topology.attn_tp_size
        self._history = History(self._policy, 0)

    def start(self, token_ids, slots, decoding, new_slots) -> None:
        self._token_ids, self._slots, self._decoding, self._earlier = token_ids, slots, decoding, []
        self._history.begin(new_slots)

    def slices(self, layer: int | None) -> np.ndarray:
        if layer is None:
            return slices.position_slices(len(self._token_ids), self._size)
        nothing = np.empty((0, len(self._slots), self._top_k), np.int64)
        planes = self._earlier[: self._policy.lookback]
        known = self._history.contribution(layer, self._slots, self._decoding)
        found = slices.look_up_tokens(self._policy, [layer], self._first, self._size, self._token_ids)[0]
        earlier = np.stack(planes) if planes else nothing
        return slices.assign(slices.score(self._policy, layer, self._first, found, earlier, known))

    def observe(self, layer: int, expert_ids: np.ndarray) -> None:
        self._history.observe(layer, self._slots, expert_ids)
        self._earlier.insert(0, expert_ids)
