"""Where a plan pays: traffic that was measured on one model, carried over to layers of known models on shipped links.

Two things are carried over from a run with a plan and one without: how many remote ranks per token the plan leaves of
vanilla's, and the load of the busiest rank over the mean of each. All else is the other model's: sizes, and the remote
ranks that vanilla has where experts are drawn uniformly. The routing of another model may be easier or harder to
predict than that of the model that ran, so these are examples; `semmoe solve` predicts from a profile of the model.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from semmoe.costs import timing
from semmoe.costs.links import Links, load_links
from semmoe.costs.rows import hops
from semmoe.topology import Topology


class Model(NamedTuple):
    """A known model, by what its configuration says of one MoE layer."""

    name: str
    num_experts: int
    shape: timing.LayerShape


MODELS = (
    Model("Qwen3-30B-A3B", 128, timing.LayerShape(hidden_size=2048, expert_size=768, top_k=8)),
    Model("gpt-oss-20b", 32, timing.LayerShape(hidden_size=2880, expert_size=2880, top_k=4)),
    Model("DeepSeek-V3", 256, timing.LayerShape(hidden_size=7168, expert_size=2048, top_k=8)),
)
LINKS = ("h200-nvlink", "h200-400g", "h200-100g", "pcie5")  # of those that are shipped
BATCHES = (1024, 16384)  # tokens of all ranks together: about a step of decoding, and one of prefill


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a run with a plan and one without counted, of the same requests and attention."""

    topology: Topology  # of one node
    remote_share: float  # remote ranks per token on the plan over those without
    load: float  # max / mean of the ranks' expert load on the plan
    vanilla_load: float


@dataclass(frozen=True, kw_only=True)
class Payoff:
    """The verdict for one layer, batch and kind of links."""

    attention: str
    links: str  # name of a shipped file
    model: str
    batch_tokens: int
    worth_it: bool
    gain: float  # share of the layer's time that the plan saves; negative if it loses
    against: str  # the best alternative


def measured(attention: str, vanilla: dict[str, Any], planned: dict[str, Any], ep_size: int) -> Measured:
    """From the figures of two runs (`GenerateResult.figures`); at least two ranks."""
    return Measured(
        topology=Topology.for_attention(attention, ep_size),
        remote_share=planned["remote_ranks_per_token"] / vanilla["remote_ranks_per_token"],
        load=planned["load_max_over_mean"],
        vanilla_load=vanilla["load_max_over_mean"],
    )


def payoffs(run: Measured) -> list[Payoff]:
    """One for each of LINKS, model and batch size; links between nodes join two nodes of half the ranks."""
    return [payoff(run, name, model, tokens) for name in LINKS for model in MODELS for tokens in BATCHES]


def payoff(run: Measured, links_name: str, model: Model, tokens: int) -> Payoff:
    """Whether the plan saves time over vanilla and, in attention-TP, over expert parallelism without all-to-all."""
    links = load_links(links_name)
    nodes = 2 if links.between_nodes else 1
    topology = Topology.for_attention(run.topology.attention, run.topology.ep_size, num_nodes=nodes)
    vanilla = _predict("vanilla", 1.0, run.vanilla_load, model, tokens, topology, links)
    hooks = timing.hooks(tokens, topology, copies=False, links=links)
    plan = _predict("plan", run.remote_share, run.load, model, tokens, topology, links, hooks)
    without = None
    if topology.attention == "tp":
        balanced = min(plan.busiest_pairs, vanilla.busiest_pairs)
        without = timing.all_reduce_time(tokens, balanced, model.shape, topology, links)
    found = timing.verdict(plan, [vanilla], without)
    return Payoff(
        attention=topology.attention,
        links=links_name,
        model=model.name,
        batch_tokens=tokens,
        worth_it=found.worth_it,
        gain=found.gain,
        against=found.against,
    )


def _predict(
    name: str, share: float, load: float, model: Model, tokens: int, topology: Topology, links: Links,
    hooks: float = 0.0,
) -> timing.Prediction:  # fmt: skip
    """Of a layer whose ranks all send each other as many rows: `share` of those of experts drawn uniformly."""
    G, K = topology.ep_size, model.shape.top_k
    rows = uniform_rows(links.all_to_all, model, topology) * (share * tokens / G)
    busiest = np.array([load * tokens * K / G])
    return timing.predict(name, rows[None], busiest, model.shape, topology, links, hooks)


def uniform_rows(kind: str, model: Model, topology: Topology) -> np.ndarray:
    """(G, G) rows per token of each rank that an all-to-all of a kind sends if experts are drawn uniformly."""
    from semmoe.costs.metrics import uniform_remote_ranks  # its kernels load the compiler, and results are read without

    (G, N), (E, K) = (topology.ep_size, topology.num_nodes), (model.num_experts, model.shape.top_k)
    others = 1 - np.eye(G)
    rows = others * uniform_remote_ranks(G, E, K) / (G - 1)
    node_rows = np.full((G, N), uniform_remote_ranks(N, E, K) / max(N - 1, 1))
    return hops(kind, topology, rows, node_rows, others * K / G)
