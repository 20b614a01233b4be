"""Contiguous placement, which every engine uses without a plan."""

import numpy as np

from semmoe.core import Placement, Plan
from semmoe.placement.problem import Problem, Solution, placement_alone
from semmoe.topology import Fingerprint, Topology, physical_experts


def solve(problem: Problem) -> Solution:
    """Contiguous experts; tokens by position and requests round-robin."""
    f, ranks = problem.trace.fingerprint, problem.topology.ep_size
    placement = place(f.num_layers, f.num_experts, ranks, problem.settings.redundant_experts)
    return placement_alone(placement, problem.topology)


def place(num_layers: int, num_experts: int, ep_size: int, redundant_experts: int = 0) -> Placement:
    """Rank g holds experts g * E / G to (g + 1) * E / G; redundant slots repeat the first experts, as engines do."""
    physical = physical_experts(num_experts, redundant_experts, ep_size)
    row = np.arange(physical, dtype=np.int32) % num_experts
    return Placement(physical_to_logical_map=np.tile(row, (num_layers, 1)), num_experts=num_experts, ep_size=ep_size)


def vanilla_plan(fingerprint: Fingerprint, topology: Topology) -> Plan:
    """A plan that equals an engine without one: contiguous experts, tokens by position, requests round-robin."""
    placement = place(fingerprint.num_layers, fingerprint.num_experts, topology.ep_size)
    return placement_alone(placement, topology).plan(topology, fingerprint, "linear")
