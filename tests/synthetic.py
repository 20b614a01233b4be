"""Small traces with known structure, each determined by its arguments."""

import numpy as np

from semmoe.core import DECODE, PREFILL, RoutingTrace
from semmoe.topology import Fingerprint


def make_fingerprint(**changes) -> Fingerprint:
    values = {
        "model": "toy", "architecture_hash": "a", "tokenizer_hash": "t",
        "vocab_size": 6, "num_layers": 2, "num_experts": 4, "top_k": 2,
    }  # fmt: skip
    return Fingerprint(**{**values, **changes})


def make_trace(requests, expert_ids, prompts=None, **changes) -> RoutingTrace:
    """requests: token ids of each; expert_ids (T, L, K) over all of them; prompts: the requests' own tokens if None."""
    prompts = requests if prompts is None else prompts
    experts = np.asarray(expert_ids)
    experts = experts.astype(np.uint8 if experts.max(initial=0) < 256 else np.int16)
    shape = {"num_layers": experts.shape[1], "top_k": experts.shape[2]}
    tokens = np.array([token for request in requests for token in request], np.int32)
    return RoutingTrace(
        token_ids=tokens,
        expert_ids=experts,
        request_offsets=np.cumsum([0, *map(len, requests)]),
        phase=np.full(len(tokens), DECODE, np.uint8),
        prompt_ids=np.array([token for prompt in prompts for token in prompt], np.int32),
        prompt_offsets=np.cumsum([0, *map(len, prompts)]),
        fingerprint=make_fingerprint(**{**shape, **changes}),
    )


def random_trace(seed, requests=12, layers=3, experts=8, top_k=2, vocab=20, longest=12, num_groups=1) -> RoutingTrace:
    """Every token id has its favourite experts at each layer and strays from them; some requests route nothing."""
    rng = np.random.default_rng(seed)
    routed = [rng.integers(vocab, size=rng.integers(longest + 1)).tolist() for _ in range(requests - 1)]
    routed.append(rng.integers(vocab, size=longest).tolist())
    tokens = np.array([token for request in routed for token in request], np.int32)
    taste = 2 * rng.normal(size=(vocab, layers, experts))
    scores = taste[tokens] + rng.gumbel(size=(len(tokens), layers, experts))
    prompts = [rng.integers(vocab, size=rng.integers(1, 6)).tolist() for _ in range(requests)]
    chosen = np.argsort(-scores, axis=2)[:, :, :top_k]
    return make_trace(routed, chosen, prompts, vocab_size=vocab, num_experts=experts, num_groups=num_groups)


def planted_trace(groups, ranks, layers=3, per_block=4, top_k=2, requests_per_group=6, length=24, seed=0):
    """A trace that a perfect plan serves with LAR 1, and the block (L, E) of every expert.

    Tokens and experts fall into groups * ranks blocks; a token chooses among the `per_block` experts of its own block.
    Request r draws on the blocks of group r % groups, its tokens taking turns over them. Every run of `ranks` tokens is
    balanced, and every contiguous run of groups * ranks experts holds one of each block.
    """
    rng = np.random.default_rng(seed)
    blocks = groups * ranks
    one_of_each = [[rng.permutation(blocks) for _ in range(per_block)] for _ in range(layers)]
    block_of_expert = np.array(one_of_each).reshape(layers, blocks * per_block)
    members = np.argsort(block_of_expert, axis=1, kind="stable").reshape(layers, blocks, per_block)
    types_per_block = 5
    requests, experts = [], []
    for r in range(groups * requests_per_group):
        block = (r % groups) * ranks + np.arange(length) % ranks
        kind = np.arange(length) // ranks % types_per_block
        requests.append((block + blocks * kind).tolist())
        for b in block:
            experts.append([rng.permutation(members[l, b])[:top_k] for l in range(layers)])
    size = {"vocab_size": blocks * types_per_block, "num_experts": blocks * per_block}
    prompts = [rng.permutation(request).tolist() for request in requests]  # no two alike
    return make_trace(requests, experts, prompts, **size), block_of_expert


def teams_trace(seed, requests=40, length=60, layers=3, experts=64, top_k=6, team=8, vocab=200):
    """Every token chooses experts of one team, drawn anew for each token, the same number in every layer: requests have
    nothing in common, and a plan can serve every token on one rank.
    """
    rng = np.random.default_rng(seed)
    teams = np.stack([rng.permutation(experts).reshape(-1, team) for _ in range(layers)])  # (L, teams, experts of each)
    members = teams[:, rng.integers(experts // team, size=requests * length)]
    chosen = rng.permuted(members, axis=2)[..., :top_k]
    tokens = rng.integers(vocab, size=(requests, length)).tolist()
    prompts = rng.integers(vocab, size=(requests, 12)).tolist()
    return make_trace(tokens, chosen.swapaxes(0, 1), prompts, vocab_size=vocab, num_experts=experts)


def with_prefill(trace: RoutingTrace, rows: int) -> RoutingTrace:
    """The same trace, its first `rows` tokens marked as prefill."""
    phase = trace.phase.copy()
    phase[:rows] = PREFILL
    return RoutingTrace(**{**vars(trace), "phase": phase})


def with_noise(trace: RoutingTrace, share: float, seed=0) -> RoutingTrace:
    """The same trace, a `share` of its rows at each layer routed to random experts."""
    rng, (tokens, layers, top_k) = np.random.default_rng(seed), trace.expert_ids.shape
    strays = np.argsort(rng.random((tokens, layers, trace.fingerprint.num_experts)), axis=2)[..., :top_k]
    experts = np.where(rng.random((tokens, layers, 1)) < share, strays, trace.expert_ids)
    return RoutingTrace(**{**vars(trace), "expert_ids": experts.astype(trace.expert_ids.dtype)})
