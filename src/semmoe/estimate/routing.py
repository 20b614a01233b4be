"""What methods send and compute: rows per token by tier and the expert load, from a plan or from assumptions."""

from dataclasses import dataclass, replace

import numpy as np

from semmoe.core import Plan
from semmoe.estimate.model import ModelSizes
from semmoe.estimate.settings import EstimateSettings
from semmoe.payoff import Model, uniform_rows
from semmoe.results import Expected, Figures
from semmoe.rowcosts import KINDS
from semmoe.topology import Topology

VANILLA, EPLB, PLAN, ALL_REDUCED = "vanilla", "eplb", "plan", "all-reduce"
Tiers = tuple[float, float]  # rows per token inside nodes and between them


@dataclass(frozen=True, kw_only=True)
class Routing:
    """What one method sends and computes."""

    rows: dict[str, Tiers]  # by kind of all-to-all
    load: float  # pairs of the busiest rank over the mean of ranks
    redundant_experts: int
    label: str
    hooked: bool = False  # by semmoe, whose kernels take time
    all_reduce: bool = False  # no all-to-all: every rank computes its experts for all rows, and the results are summed

    def matrix(self, kind: str, topology: Topology) -> np.ndarray:
        """(G, G) rows per token of each rank, spread evenly over the pairs of ranks of a tier."""
        G, node = topology.ep_size, topology.node_of
        same, per_node = node[:, None] == node, G // topology.num_nodes
        inside, between = self.rows[kind]
        spread = np.where(same, inside / max(per_node - 1, 1), between / max(G - per_node, 1))
        return spread * (1 - np.eye(G))


def uniform_tiers(kind: str, model: ModelSizes, topology: Topology) -> Tiers:
    """Rows per token of each tier if experts are drawn uniformly."""
    if topology.ep_size == 1:
        return 0.0, 0.0
    rows = uniform_rows(kind, Model(model.name, model.num_experts, model.layer_shape), topology)
    same = topology.node_of[:, None] == topology.node_of
    return tuple(float((rows * tier).sum()) / topology.ep_size for tier in (same, ~same))  # type: ignore[return-value]


def assumed(model: ModelSizes, topology: Topology, kinds: set[str], settings: EstimateSettings) -> dict[str, Routing]:
    """Vanilla and EPLB with experts drawn uniformly, and a plan that saves a given share of the rows, if given."""
    drawn = {kind: uniform_tiers(kind, model, topology) for kind in kinds}
    copies, load, saving = settings.redundant_experts, settings.load, settings.saving
    found = {
        VANILLA: Routing(rows=drawn, load=load, redundant_experts=0, label="assumed"),
        EPLB: Routing(rows=drawn, load=1.0, redundant_experts=copies, label="assumed"),
    }
    if saving is not None:
        left = {kind: (inside * (1 - saving), between * (1 - saving)) for kind, (inside, between) in drawn.items()}
        load = settings.plan_load or load
        found[PLAN] = Routing(rows=left, load=load, redundant_experts=copies, label="assumed", hooked=True)
    return found


def with_all_reduce(found: dict[str, Routing], topology: Topology) -> dict[str, Routing]:
    """With attention TP, expert parallelism without all-to-all is one more rival, at the best balanced load."""
    if topology.attention != "tp" or topology.ep_size == 1:
        return found
    best = min(found.values(), key=lambda one: one.load)
    return {**found, ALL_REDUCED: replace(best, rows={}, redundant_experts=0, hooked=False, all_reduce=True)}


def planned(plan: Plan, model: ModelSizes, kinds: set[str]) -> dict[str, Routing]:
    """What a plan expects of itself, of vanilla and of EPLB, on held-out requests; all hold as many copies.

    Raises ValueError if it expects nothing, or was made for another model.
    """
    check_sizes(plan, model)
    said, copies = _said(plan), plan.placement.redundant_experts
    names = {VANILLA: "linear", EPLB: "eplb", PLAN: plan.method}
    found = {name: _measured(said[method], kinds, copies) for name, method in names.items()}
    return found | {PLAN: replace(found[PLAN], hooked=True)}


def check_sizes(plan: Plan, model: ModelSizes) -> None:
    """Raise ValueError naming the first size in which a plan's model differs."""
    mine = plan.fingerprint
    pairs = {
        "num_experts": (mine.num_experts, model.num_experts),
        "top_k": (mine.top_k, model.top_k),
        "MoE layers": (mine.num_layers, model.moe_layers),
        "hidden_size": (mine.hidden_size or model.hidden_size, model.hidden_size),
        "expert_size": (mine.expert_size or model.expert_size, model.expert_size),
    }
    for name, (there, here) in pairs.items():
        if there != here:
            raise ValueError(f"the plan is for a model whose {name} is {there}, not {here} as {model.name}'s")


def _said(plan: Plan) -> dict[str, Figures]:
    """What the plan expects on held-out requests, of its own method and of others."""
    if plan.expected is None:
        raise ValueError("the plan does not say what it expects: solve it from more requests")
    expected = Expected.model_validate(plan.expected)
    found: dict[str, Figures] = {**expected.others, plan.method: expected}
    for name in ("linear", "eplb", plan.method):
        if name not in found or not set(KINDS) <= found[name].rows_by_kind.keys():
            raise ValueError(f"the plan does not say what {name} sends by kind of all-to-all: solve it again")
    return found


def _measured(figures: Figures, kinds: set[str], copies: int) -> Routing:
    rows = {
        kind: (figures.rows_by_kind[kind]["inside_node"], figures.rows_by_kind[kind]["between_nodes"]) for kind in kinds
    }
    return Routing(rows=rows, load=figures.load_max_over_mean, redundant_experts=copies, label="measured")
