"""Score a plan on a trace without running a model: the offline experiment.

Protocol (docs/measurements.md): a batch is all ranks together. `mixed` draws tokens from many requests at random, as in
decode; `prefill` takes consecutive tokens of concatenated requests. Attention-DP: requests are scheduled by their
prompt in arrival order and scored on their routed tokens. Attention-TP: each batch is divided into equal
slices by the plan's token policy.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from semmoe.core import DECODE, Plan, RoutingTrace
from semmoe.costs.metrics import Traffic, layer_traffic, max_over_mean, max_over_median, sum_traffic
from semmoe.costs.rows import KINDS, hops
from semmoe.evaluation.online import schedule_live, schedule_requests
from semmoe.evaluation.results import Figures, Layer
from semmoe.settings import ReplaySettings
from semmoe.tokens.copychoice import copy_choice
from semmoe.tokens.slices import home_ranks
from semmoe.topology import Topology


@dataclass(frozen=True, kw_only=True, repr=False)
class ReplayResult:
    topology: Topology
    layers: list[Traffic]  # summed over batches
    load_max_over_mean: np.ndarray  # (L,) mean over batches
    load_max_over_median: np.ndarray  # (L,)
    token_max_over_mean: float  # routed tokens per attention group, whole replay
    num_batches: int
    unknown_share: float  # share of the looked-up tokens for which only the prior was known
    predicted_lar: np.ndarray | None  # (L,) the LAR that the plan's scores predict; equals LAR if they are calibrated
    unknown_lar: float | None  # LAR of tokens that were not profiled; None unless tokens are shuffled by tables

    @property
    def total(self) -> Traffic:
        return sum_traffic(self.layers)

    @property
    def tokens_per_batch(self) -> float:
        return self.total.tokens / (len(self.layers) * self.num_batches)

    def rows_per_batch(self, kind: str = "per-rank") -> np.ndarray:
        """Return the rows (L, G, G) from rank i to rank j in a dispatch of `kind` (`rows.KINDS`), mean over batches."""
        return np.array([self._hops(kind, traffic) for traffic in self.layers]) / self.num_batches

    def _hops(self, kind: str, traffic: Traffic) -> np.ndarray:
        return hops(kind, self.topology, traffic.rows, traffic.node_rows, traffic.pair_rows)

    @property
    def busiest_pairs(self) -> np.ndarray:
        """Return the pairs (L,) that the most loaded rank of a batch computes, mean over batches of equal size."""
        return self.load_max_over_mean * [traffic.load.mean() / self.num_batches for traffic in self.layers]

    def _tiers(self, kind: str) -> dict[str, float]:
        """Return the rows per token inside and between nodes for a kind of all-to-all."""
        total, node = self.total, self.topology.node_of
        rows, same = self._hops(kind, total), node[:, None] == node
        tokens = max(total.tokens, 1)
        return {"inside_node": float(rows[same].sum()) / tokens, "between_nodes": float(rows[~same].sum()) / tokens}

    def __repr__(self) -> str:
        total, batches = self.total, f"batches {self.num_batches} of {self.tokens_per_batch:.0f} tokens"
        figures = {
            "local activation rate": total.lar,
            "remote ranks per token": total.remote_ranks_per_token,
            "remote nodes per token": total.remote_nodes_per_token,
            "expert load max/mean": self.load_max_over_mean.mean(),
            "tokens max/mean": self.token_max_over_mean,
        }
        return f"ReplayResult({', '.join(f'{name} {value:.3f}' for name, value in figures.items())}, {batches})"

    def figures(self) -> Figures:
        """The metrics over all layers and layer by layer."""
        predicted = [None] * len(self.layers) if self.predicted_lar is None else self.predicted_lar.tolist()
        layers = [
            Layer(
                layer=i,
                lar=traffic.lar,
                remote_ranks_per_token=traffic.remote_ranks_per_token,
                remote_nodes_per_token=traffic.remote_nodes_per_token,
                load_max_over_mean=self.load_max_over_mean[i],
                load_max_over_median=self.load_max_over_median[i],
                predicted_lar=predicted[i],
                load_per_rank=traffic.load.tolist(),
            )
            for i, traffic in enumerate(self.layers)
        ]
        total = self.total
        return Figures(
            lar=total.lar,
            remote_ranks_per_token=total.remote_ranks_per_token,
            remote_nodes_per_token=total.remote_nodes_per_token,
            load_max_over_mean=self.load_max_over_mean.mean(),
            load_max_over_median=self.load_max_over_median.mean(),
            load_max_layer=self.load_max_over_mean.max(),
            token_max_over_mean=self.token_max_over_mean,
            num_batches=self.num_batches,
            tokens_per_batch=self.tokens_per_batch,
            unknown_token_share=self.unknown_share,
            unknown_token_lar=self.unknown_lar,
            predicted_lar=None if self.predicted_lar is None else self.predicted_lar.mean(),
            rows_per_rank_pair=total.rows.tolist(),
            rows_by_kind={kind: self._tiers(kind) for kind in KINDS},
            layers=layers,
        )

    def as_dict(self) -> dict[str, Any]:
        """The metrics by their JSON names."""
        return self.figures().model_dump(exclude_unset=True)


def replay(
    trace: RoutingTrace, plan: Plan, settings: ReplaySettings | None = None, groups: np.ndarray | None = None
) -> ReplayResult:
    """Score `plan` on the routed tokens of `trace`, in full batches.

    groups (R,): the attention groups of requests; None: as the plan schedules them, in the order of the trace.
    """
    settings = settings or ReplaySettings()
    plan.check(trace.fingerprint)
    if trace.num_tokens <= 0:
        raise ValueError("the trace to replay holds no routed token")
    batches = cut_batches(trace.num_tokens, settings)
    group = token_groups(trace, plan, settings) if groups is None else groups[trace.request_of_token()]
    choice = copy_choice(plan.placement, plan.topology)
    unknown = plan.tokens.unknown(trace.token_ids)
    size = plan.topology.attn_tp_size
    layers, predicted = [], []
    mean, median = [], []
    of_unknown = np.zeros(2, np.int64)  # local pairs, pairs
    for l, (evidence, homes) in enumerate(token_homes(trace, plan, settings, group)):
        targets = [choice[l].ranks(trace.expert_ids[rows, l], home) for rows, home in zip(batches, homes, strict=True)]
        sizes = plan.topology.ep_size, plan.topology.num_nodes
        traffic = [layer_traffic(to, home, *sizes) for to, home in zip(targets, homes, strict=True)]
        expected = sum(evidence.expected_local(rows, home % size) for rows, home in zip(batches, homes, strict=True))
        predicted.append(expected / sum_traffic(traffic).pairs)
        for rows, home, to in zip(batches, homes, targets, strict=True):
            local = (to == home[:, None])[unknown[rows]]
            of_unknown += local.sum(), local.size
        layers.append(sum_traffic(traffic))
        mean.append(np.mean([max_over_mean(t.load) for t in traffic]))
        median.append(np.mean([max_over_median(t.load) for t in traffic]))
    tokens = np.bincount(group, minlength=plan.topology.dp_size)
    return ReplayResult(
        topology=plan.topology,
        layers=layers,
        load_max_over_mean=np.array(mean),
        load_max_over_median=np.array(median),
        token_max_over_mean=max_over_mean(tokens),
        num_batches=len(batches),
        unknown_share=_unknown_share(trace, plan),
        predicted_lar=np.array(predicted) if any(predicted) else None,
        unknown_lar=float(of_unknown[0] / of_unknown[1]) if of_unknown[1] else None,
    )


def profiled_requests(trace: RoutingTrace, plan: Plan) -> int | None:
    """How many requests of `trace` the plan was solved on; None for an older plan, which does not state them."""
    if plan.profiled_requests is None:
        return trace.num_requests if plan.trace_hash == trace.digest() else None
    known = np.isin(trace.request_hashes(), plan.profiled_requests)
    return int(known[np.diff(trace.request_offsets) > 0].sum())


def scheduled_by_answers(trace: RoutingTrace, topology: Topology) -> int:
    """Number of requests that a replay sends to groups by their answers, because the trace has no prompts for them.

    In an imported trace without prompts the routed tokens stand in for the prompt (`trace.open_trace`). Decoded tokens
    among them are not known to a server when a request arrives.
    """
    if topology.dp_size == 1:
        return 0
    decoded = [r for r in range(trace.num_requests) if (trace.phase[trace.rows(r)] == DECODE).any()]
    return sum(np.array_equal(trace.prompt(r), trace.token_ids[trace.rows(r)]) for r in decoded)


def token_groups(trace: RoutingTrace, plan: Plan, settings: ReplaySettings) -> np.ndarray:
    """(T,) the attention group of each token: requests are scheduled by their prompts in the order of the trace, or for
    a stated number at a time in random order, since a recorded order is that in which a plan let them end.
    """
    lengths = np.diff(trace.request_offsets)
    if settings.running:
        at, groups = np.random.default_rng(settings.seed).permutation(trace.num_requests), np.zeros_like(lengths)
        groups[at] = schedule_live(trace.select(at), plan, settings.running * plan.topology.dp_size)
    else:
        prompts = [trace.prompt(r) for r in range(trace.num_requests)]
        groups = schedule_requests(prompts, plan, lengths, settings.unfinished)
    return groups[trace.request_of_token()]


def token_homes(trace: RoutingTrace, plan: Plan, settings: ReplaySettings, group: np.ndarray):
    """Yield for each layer the plan's evidence on all tokens and, for each batch of `cut_batches`, the ranks (B,) of
    its tokens.

    group: (T,) from `token_groups`. In mixed batches, as in decode, the routing of a request's earlier tokens is known.
    """
    batches = cut_batches(trace.num_tokens, settings)
    for evidence in plan.tokens.evidence(trace, plan, group, decoding=settings.batches == "mixed"):
        yield evidence, [home_ranks(evidence, group, rows, plan.topology) for rows in batches]


def cut_batches(num_tokens: int, settings: ReplaySettings) -> list[np.ndarray]:
    """Row indices of each batch of `batch_tokens` tokens; a shorter last batch is dropped unless it is the only one."""
    order = np.arange(num_tokens)
    if settings.batches == "mixed":
        order = np.random.default_rng(settings.seed).permutation(num_tokens)
    full = num_tokens // settings.batch_tokens
    if full == 0:
        return [order]
    return list(order[: full * settings.batch_tokens].reshape(full, -1))


def _unknown_share(trace: RoutingTrace, plan: Plan) -> float:
    """Share of unknown tokens: among routed tokens if tokens are shuffled, otherwise among prompt tokens."""
    shuffled = plan.tokens.by_tables
    unknown = plan.tokens.unknown(trace.token_ids) if shuffled else plan.requests.unknown(trace.prompt_ids)
    return float(unknown.sum() / max(len(unknown), 1))
