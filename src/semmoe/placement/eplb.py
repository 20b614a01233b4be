"""Expert-parallel load balancing: replicate hot experts and pack them so that ranks carry equal load.

The semantics are those of DeepSeek's EPLB, which SGLang and vLLM both adopted: greedy replication by load per copy,
greedy balanced packing and, if expert groups divide evenly over nodes, groups to nodes first, then inside each node.
It balances load only; it does not consider which experts are used together. Source: github.com/deepseek-ai/EPLB (MIT).
"""

import numpy as np

from semmoe.core import Placement
from semmoe.numeric.assignment import balanced_packing, replicate_experts
from semmoe.placement.problem import Problem, Solution, placement_alone
from semmoe.topology import physical_experts
from semmoe.traces.affinity import expert_load


def solve(problem: Problem) -> Solution:
    """Place experts by their load in the profile."""
    load = expert_load(problem.trace).astype(np.float64)
    redundant, topology = problem.settings.redundant_experts, problem.topology
    placement = place(load, topology.ep_size, redundant, problem.trace.fingerprint.num_groups, topology.num_nodes)
    return placement_alone(placement, topology)


def place(load: np.ndarray, ep_size: int, redundant_experts: int = 0, num_groups: int = 1, num_nodes: int = 1):
    """Placement (L, E + R) that balances `load` (L, E) over `ep_size` ranks."""
    experts = load.shape[1]
    physical = physical_experts(experts, redundant_experts, ep_size)
    maps = rebalance_experts(load, physical, num_groups, num_nodes, ep_size)
    return Placement(physical_to_logical_map=maps.astype(np.int32), num_experts=experts, ep_size=ep_size)


def rebalance_experts(weight: np.ndarray, num_replicas: int, num_groups: int, num_nodes: int, num_ranks: int):
    """(L, P): physical-to-logical map, hierarchical if groups divide evenly over nodes, else as on one node."""
    if num_nodes == 1 or num_groups % num_nodes != 0:
        num_groups = num_nodes = 1
    # pack groups onto nodes by load, replicate inside each node, then pack physical experts onto the node's ranks
    layers, experts = weight.shape
    group_size = experts // num_groups
    node, position = balanced_packing(weight.reshape(layers, num_groups, group_size).sum(-1), num_nodes)
    first_slot = (node * (num_groups // num_nodes) + position) * group_size  # first slot of each group, in node order
    slot = (first_slot[:, :, None] + np.arange(group_size)).reshape(layers, experts)
    by_slot = np.argsort(slot, axis=1)  # (L, E): the logical expert at each slot
    per_node = np.take_along_axis(weight, by_slot, axis=1).reshape(layers * num_nodes, -1)

    local, copies = replicate_experts(per_node, num_replicas // num_nodes)
    share = np.take_along_axis(per_node / copies, local, axis=1)
    rank, place_in_rank = balanced_packing(share, num_ranks // num_nodes)
    size = local.shape[1] // (num_ranks // num_nodes)
    packed = np.take_along_axis(local, np.argsort(rank * size + place_in_rank, axis=1), axis=1)

    offset = np.arange(num_nodes)[None, :, None] * (experts // num_nodes)
    slots = (packed.reshape(layers, num_nodes, -1) + offset).reshape(layers, -1)
    return np.take_along_axis(by_slot, slots, axis=1)
