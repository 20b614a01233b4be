"""What tokens of a trace send between ranks and nodes under a plan, and the least that true routing would leave."""

from dataclasses import dataclass

import numba
import numpy as np

from semmoe.core import Placement, Plan, RoutingTrace
from semmoe.costs.metrics import layer_traffic, max_over_mean, sum_traffic
from semmoe.evaluation.replay import cut_batches, token_groups, token_homes
from semmoe.numeric.assignment import improve_assignment
from semmoe.placement.joint import cocluster_requests
from semmoe.settings import ReplaySettings
from semmoe.tokens.copychoice import copy_choice
from semmoe.topology import Topology


@dataclass(frozen=True)
class NodeTraffic:
    """Per token and layer: other nodes that it is sent to, ranks inside its node and beyond, and its pairs by place."""

    nodes: float  # rows between nodes of a dispatcher that sends one to each node
    ranks_inside: float  # rows to other ranks of the node
    ranks_between: float  # rows between nodes of a dispatcher that sends one to each rank
    pairs_local: float
    pairs_inside: float
    pairs_between: float  # rows between nodes of a dispatcher that sends one for each pair
    lar: float
    load: float  # pairs that ranks compute, max / mean in a batch, mean of batches and layers
    node_load: float  # the same over nodes
    tokens: float  # tokens of attention groups in the whole trace, max / mean


def measure(trace: RoutingTrace, plan: Plan, settings: ReplaySettings, group: np.ndarray | None = None) -> NodeTraffic:
    """Replay a plan in batches. group: (T,) the attention group of each token; None: as the plan schedules requests."""
    topology = plan.topology
    group = token_groups(trace, plan, settings) if group is None else group
    batches, choice = cut_batches(trace.num_tokens, settings), copy_choice(plan.placement, topology)
    found, loads, node_loads = [], [], []
    for l, (_, homes) in enumerate(token_homes(trace, plan, settings, group)):
        for rows, home in zip(batches, homes, strict=True):
            targets = choice[l].ranks(trace.expert_ids[rows, l], home)
            found.append(layer_traffic(targets, home, topology.ep_size, topology.num_nodes))
            loads.append(max_over_mean(found[-1].load))
            node_loads.append(max_over_mean(np.bincount(topology.node_of, found[-1].load)))
    total, spread = sum_traffic(found), max_over_mean(np.bincount(group, minlength=topology.dp_size))
    own = topology.node_of[:, None] == topology.node_of
    counts = {
        "nodes": total.node_rows.sum(),
        "ranks_inside": total.rows[own].sum(),
        "ranks_between": total.rows[~own].sum(),
        "pairs_local": total.local_pairs,
        "pairs_inside": total.pair_rows[own].sum(),
        "pairs_between": total.pair_rows[~own].sum(),
    }
    figures = {name: float(count) / total.tokens for name, count in counts.items()}
    return NodeTraffic(**figures, lar=total.lar, load=_mean(loads), node_load=_mean(node_loads), tokens=spread)


def _mean(values: list[float]) -> float:
    return float(np.mean(values))


def known_groups(trace: RoutingTrace, placement: Placement, topology: Topology, limit: float = 1.1) -> np.ndarray:
    """(T,) attention groups if the routing of every request were known: those whose node its tokens use most.

    Tokens of a group are at most `limit` times the mean, as far as whole requests allow. Groups of a node take turns.
    """
    lengths, D = np.diff(trace.request_offsets), topology.dp_size
    hits = node_hits(trace, placement, topology)  # (R, N)
    work = np.repeat(lengths[:, None].astype(np.float64), topology.num_nodes, axis=1)
    capacity = np.full(topology.num_nodes, limit * lengths.sum() / topology.num_nodes)
    start = np.arange(len(lengths)) % topology.num_nodes
    nodes = improve_assignment(hits, work, capacity, start, 50)
    inside, groups = D // topology.num_nodes, np.empty(len(lengths), np.int64)
    for n in range(topology.num_nodes):
        own = np.flatnonzero(nodes == n)
        own = own[np.argsort(-lengths[own], kind="stable")]
        groups[own] = n * inside + np.arange(len(own)) % inside
    return groups[trace.request_of_token()]


def node_hits(trace: RoutingTrace, placement: Placement, topology: Topology) -> np.ndarray:
    """(R, N) float64: tokens, summed over layers, of each request that a node hosts an expert of."""
    L, N = len(placement.hosts), topology.num_nodes
    hosts = np.asarray(placement.hosts.reshape(L, N, -1, placement.num_experts).any(axis=2))
    hit = np.zeros((trace.num_tokens, topology.num_nodes))
    for l in range(len(hosts)):
        hit += hosts[l][:, trace.expert_ids[:, l]].any(axis=2).T
    return np.add.reduceat(hit, trace.request_offsets[:-1])


def bound_of_groups(
    trace: RoutingTrace, nodes: int, copies: tuple[int, ...] = (), seed: int = 0
) -> tuple[float, list[float]]:
    """(expert groups per token, rows between nodes without and with `copies` on each node), if routing were known.

    As many whole groups as nodes: each node has one group of each layer, and requests are spread over the nodes, for
    fewest rows. Copies are of other groups' experts, chosen greedily for the requests of the node: those that most
    often are among the last that a token needs of a group. All on the trace itself: what a planner that knew the future
    would be offered, up to how well it is searched.
    """
    f, lengths = trace.fingerprint, np.diff(trace.request_offsets)
    size = f.num_experts // f.num_groups
    used = np.stack(
        [(trace.expert_ids // size == g).any(axis=2) for g in range(f.num_groups)], axis=2
    )  # (T, L, groups)
    rates = np.add.reduceat(used.astype(np.float32), trace.request_offsets[:-1]) / lengths[:, None, None]
    labels, of_request = cocluster_requests(rates, lengths, nodes, starts=20, seed=seed)
    own = labels[None] == of_request[:, None, None]
    reached = float(used.sum(axis=2).mean())
    local = float((rates * own * lengths[:, None, None]).sum() / (lengths.sum() * f.num_layers))
    node, total = of_request[trace.request_of_token()], np.zeros(len(copies))
    for l in range(f.num_layers):
        for n in range(nodes):
            experts = trace.expert_ids[node == n, l].astype(np.int64)
            group = int(np.flatnonzero(labels[l] == n)[0])
            total += _removed_rows(experts, size, group, f.num_experts, np.array(copies, np.int64))
    return reached, [reached - local, *(reached - local - total / (trace.num_tokens * f.num_layers)).tolist()]


@numba.njit(cache=True)
def _removed_rows(experts, size, own_group, num_experts, copies):
    """Rows that so many copies (C,), ascending, save a node with one group and tokens with experts (B, K)."""
    (B, K), groups = experts.shape, num_experts // size
    missing, removed, saved = np.zeros((B, groups), np.int64), 0, np.zeros(len(copies))
    held = np.zeros(num_experts, np.bool_)
    held[own_group * size : (own_group + 1) * size] = True
    for t in range(B):
        for k in range(K):
            missing[t, experts[t, k] // size] += not held[experts[t, k]]
    for number in range(1, copies[-1] + 1 if len(copies) else 0):
        value = np.zeros(num_experts)
        for t in range(B):
            for k in range(K):
                if not held[experts[t, k]]:
                    value[experts[t, k]] += 1 / missing[t, experts[t, k] // size] ** 2
        best = value.argmax()
        held[best] = True
        for t in range(B):
            for k in range(K):
                if experts[t, k] == best:
                    missing[t, best // size] -= 1
                    removed += missing[t, best // size] == 0
        saved[copies == number] = removed
    return saved


def of_phase(trace: RoutingTrace, phases: tuple[int, ...]) -> RoutingTrace:
    """The same requests with their tokens of `phases` alone."""
    keep = np.isin(trace.phase, phases)
    kept = np.concatenate([[0], np.cumsum(keep)])
    values = {"token_ids": trace.token_ids[keep], "expert_ids": trace.expert_ids[keep], "phase": trace.phase[keep]}
    return RoutingTrace(**{**vars(trace), **values, "request_offsets": kept[trace.request_offsets]})


def local_pairs(trace: RoutingTrace, plan: Plan) -> np.ndarray:
    """(R, D) pairs per layer and choice that each group hosts of each request's."""
    f, hosts = trace.fingerprint, plan.placement.hosts.astype(np.float32)
    local = sum(hosts[l][:, trace.expert_ids[:, l]].sum(axis=2).T for l in range(f.num_layers))
    return np.add.reduceat(local, trace.request_offsets[:-1]) / (f.num_layers * f.top_k)
