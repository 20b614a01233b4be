"""Build the paper's tables T, T_p, A and A_p from affinity and placement (Algorithm 1, lines 54 and 55, B.1)."""

import numpy as np

from semmoe.core import RequestPolicy, RoutingTrace, TokenPolicy
from semmoe.paper import coclustering
from semmoe.paper.coclustering import CoClustering
from semmoe.paper.policies import MAX_PATHS, PaperTable, PaperTables, path_key, token_devices
from semmoe.placement.problem import Problem, Solution
from semmoe.requests.policy import RoundRobin
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Topology
from semmoe.traces.affinity import count, resolve_tokens

# Pseudo-occurrences of the overall shares that are mixed into a row. A confidence that is compared with another must
# not trust a token seen once; a row that is only added to a sum need only be defined where nothing was seen.
CONFIDENCE_PRIOR, SUM_PRIOR = 1.0, 1e-3


def solve(problem: Problem) -> Solution:
    """Plan by the paper's co-clustering and its tables."""
    trace, topology = problem.trace, problem.topology
    settings = problem.settings
    clusters = coclustering.cluster(trace, topology, settings.paper, settings.seed)
    tokens, requests = build_policies(trace, clusters, topology, settings.paper.lookback, problem.embeddings)
    return Solution(placement=clusters.placement, tokens=tokens, requests=requests)


def build_policies(
    trace: RoutingTrace,
    clusters: CoClustering,
    topology: Topology,
    lookback: int = 2,
    embeddings: np.ndarray | None = None,
) -> tuple[TokenPolicy, RequestPolicy]:
    """The paper's policies from the profile and its co-clustering.

    embeddings: (V, H), by which an unprofiled token uses its nearest profiled neighbour's rows; None: the prior's.
    """
    groups = np.zeros(trace.num_requests, np.int16) if clusters.request_groups is None else clusters.request_groups
    requests: RequestPolicy = RoundRobin(num_groups=topology.dp_size)
    tokens: TokenPolicy = ByPosition()
    if topology.dp_size > 1:
        source, serving_row = resolve_tokens(trace.prompt_ids, trace.fingerprint.vocab_size, embeddings)
        scores = _request_scores(trace, groups, topology.dp_size)[serving_row]
        requests = PaperTable(request_scores=scores, request_source=source)
    if topology.attn_tp_size > 1:
        source, serving_row = resolve_tokens(trace.token_ids, trace.fingerprint.vocab_size, embeddings)
        tables = _shuffle_tables(trace, clusters, groups, topology, lookback)
        tokens = PaperTables(
            token_ranks=tables["token_ranks"][:, :, serving_row],
            token_source=source,
            lookback=lookback,
            token_confidence=tables["token_confidence"][:, :, serving_row],
            path_ranks=tables["path_ranks"],
            path_confidence=tables["path_confidence"],
        )
    return tokens, requests


def _request_scores(trace: RoutingTrace, groups: np.ndarray, num_groups: int) -> np.ndarray:
    """(V + 1, D) float32: of a token's occurrences in prompts, the share in each group's; row V is the prior.

    Only prompts are counted: the online look-up sees no more, and generated tokens do harm (docs/method.md).
    """
    requests = np.repeat(np.arange(trace.num_requests), np.diff(trace.prompt_offsets))
    counts = count(trace.prompt_ids, groups[requests, None], trace.fingerprint.vocab_size + 1, num_groups).toarray()
    return _shares(counts, SUM_PRIOR).astype(np.float32)


def _shuffle_tables(
    trace: RoutingTrace, clusters: CoClustering, groups: np.ndarray, topology: Topology, lookback: int
) -> dict[str, np.ndarray]:
    """T, T_p (L, D, V + 1) and A, A_p (L, D, S ** lookback), with rows of unprofiled tokens left to the prior."""
    D, S = topology.dp_size, topology.attn_tp_size
    L, V = trace.fingerprint.num_layers, trace.fingerprint.vocab_size
    if lookback < 1:
        raise ValueError(f"lookback must be at least 1, not {lookback}")
    if not S**lookback <= MAX_PATHS:
        raise ValueError(f"lookback {lookback} over {S} ranks needs {S**lookback} rows; choose a smaller")
    assert clusters.token_ranks is not None
    out = {
        "token_ranks": np.zeros((L, D, V + 1), np.int16),
        "token_confidence": np.zeros((L, D, V + 1), np.float16),
        "path_ranks": np.zeros((L, D, S**lookback), np.int16),
        "path_confidence": np.zeros((L, D, S**lookback), np.float16),
    }
    group_of_token = groups[trace.request_of_token()]
    for d in range(D):
        rows = np.flatnonzero(group_of_token == d)
        devices = token_devices(trace.expert_ids[rows], clusters.placement, topology, d)  # (rows, L)
        for l in range(L):
            here = devices[:, l] >= 0  # tokens with an expert in their own group
            device = devices[here, l]
            counts = count(trace.token_ids[rows[here]], device[:, None], V + 1, S).toarray()
            out["token_ranks"][l, d], out["token_confidence"][l, d] = _token_table(clusters.token_ranks[l, d], counts)
            if l >= lookback:
                path = path_key(devices[here, l - lookback : l][:, ::-1], S)
                counts = count(path, device[:, None], S**lookback, S).toarray()
                shares = _shares(counts, CONFIDENCE_PRIOR)
                out["path_ranks"][l, d], out["path_confidence"][l, d] = shares.argmax(1), shares.max(1)
    return out


def _token_table(labels: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """T (V + 1,) and T_p (V + 1,) of a layer: the co-clustering's labels and how often each is the token's device.

    labels: (V,), -1 for tokens that were not clustered; these and row V get the prior's device.
    """
    shares = _shares(counts, CONFIDENCE_PRIOR)
    ranks = np.append(labels, -1).astype(np.int64)
    ranks = np.where(ranks < 0, shares[-1].argmax(), ranks)
    return ranks, np.take_along_axis(shares, ranks[:, None], axis=1)[:, 0]


def _shares(counts: np.ndarray, prior_weight: float) -> np.ndarray:
    """Rows divided by their sums, each first mixed with `prior_weight` pseudo-occurrences of the overall shares."""
    prior = counts.sum(axis=0) / max(counts.sum(), 1)
    mixed = counts + prior_weight * prior
    return mixed / np.maximum(mixed.sum(axis=1, keepdims=True), 1e-12)
