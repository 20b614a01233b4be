"""How much of the way from prediction to true routing other look-ahead features would go: what was tried, and a bound.

    OMP_NUM_THREADS=1 python benchmarks/bench_lookahead_trials.py [--ep-size 4]

The shipped model on the demo's text, prefill: ridge regressions on the profiled half of the documents; on one
placement, tokens of the other half are assigned to equal slices in mixed batches. `K ids` is the next layer's router on
the stream before attention, asked for K experts, `2K` for twice as many, and so on. `logits` are all of its logits,
`near` two sigmoids of how far each is from the K-th, `previous` the ids of the prompt's token before, `stream` the
normalised stream itself, a matrix as wide as the model per layer: more than a plan should hold. Prints a table and one
JSON line.
"""

import argparse
import json
from functools import partial
from typing import Any

import numpy as np
import torch

from semmoe.core import RoutingTrace
from semmoe.demo import MODEL, demo_prompts
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.engines.transformers.model import decoder_layers, load_model
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.replayer import cut_batches
from semmoe.settings import DemoSettings, ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.tokens.kernels import SCALE
from semmoe.tokens.regression import count_tokens, token_shares
from semmoe.tokens.slices import assign
from semmoe.topology import Topology

RIDGE = 10.0
TRIALS = {
    "none": (),
    "K ids, unordered": ("any1",),
    "K ids": ("ids1",),
    "2K ids": ("ids2",),
    "3K ids": ("ids3",),
    "logits": ("logits",),
    "near": ("near",),
    "2K ids, near": ("ids2", "near"),
    "2K ids, previous": ("ids2", "previous"),
    "stream": ("stream",),
    "2K ids, stream": ("ids2", "stream"),
    "all of these": ("ids2", "near", "previous", "stream"),
}


class Seen:
    """Prompts, their routing, and at every layer the normalised stream before attention and its logits."""

    def __init__(self, model: Any, prompts: list[list[int]]) -> None:
        identity, self.streams, self.logits = fingerprint_of(str(MODEL)), [], []
        experts: list[np.ndarray] = []
        kept: dict[str, list[torch.Tensor]] = {"stream": [], "logits": [], "experts": []}
        hooks = [h for layer in decoder_layers(model) for h in self._hooks(layer, kept)]
        for prompt in prompts:
            for values in kept.values():
                values.clear()
            with torch.no_grad():
                model(torch.tensor([prompt]))
            self.streams.append(torch.stack(kept["stream"], dim=1).numpy())
            self.logits.append(torch.stack(kept["logits"], dim=1).numpy())
            experts.append(torch.stack(kept["experts"], dim=1).numpy())
        for hook in hooks:
            hook.remove()
        self.stream, self.logit = np.concatenate(self.streams), np.concatenate(self.logits)
        tokens, offsets = np.concatenate(prompts).astype(np.int32), np.cumsum([0, *map(len, prompts)])
        self.trace = RoutingTrace(
            token_ids=tokens, expert_ids=np.concatenate(experts).astype(np.uint8), request_offsets=offsets,
            phase=np.zeros(len(tokens), np.uint8), prompt_ids=tokens, prompt_offsets=offsets, fingerprint=identity,
        )  # fmt: skip

    def _hooks(self, layer: Any, kept: dict[str, list[torch.Tensor]]) -> list[Any]:
        def before(module: Any, args: tuple, kwargs: dict) -> None:
            stream = args[0] if args else kwargs["hidden_states"]
            kept["stream"].append(module.post_attention_layernorm(stream[0]))
            kept["logits"].append(module.mlp.gate(kept["stream"][-1])[0])

        def routed(module: Any, args: tuple, kwargs: dict) -> None:
            _, ids, weights = [*args, *kwargs.values()][:3]
            kept["experts"].append(ids.gather(1, weights.argsort(dim=1, descending=True, stable=True)))

        return [
            layer.register_forward_pre_hook(before, with_kwargs=True),
            layer.mlp.experts.register_forward_pre_hook(routed, with_kwargs=True),
        ]


def one_hot(ids: np.ndarray, size: int) -> np.ndarray:
    """(N,) -> (N, size); a negative id is no id."""
    out = np.zeros((len(ids), size), np.float32)
    out[np.flatnonzero(ids >= 0), ids[ids >= 0]] = 1
    return out


def columns(seen: Seen, layer: int, counts: Any, loo: bool, names: tuple[str, ...]) -> np.ndarray:
    """(T, C) float64: token shares, the experts of three layers back, and the features of a trial."""
    trace, f = seen.trace, seen.trace.fingerprint
    E, K, truth = f.num_experts, f.top_k, activations(seen.trace, layer)
    own = counts.rows.astype(np.float32)[counts.row_of[trace.token_ids]] - (truth if loo else 0)
    mean = counts.rows.sum(axis=0) * K / counts.rows.sum()
    found = [np.ones((trace.num_tokens, 1)), token_shares(own, mean, K)]
    for back in range(1, min(3, layer) + 1):
        each = [one_hot(ids, E) for ids in trace.expert_ids[:, layer - back].astype(np.int64).T]
        found += each if back <= 2 else [sum(each)]
    logits = seen.logit[:, layer]
    order = np.argsort(-logits, axis=1, kind="stable")
    for name in names if layer else ():
        if name.startswith("ids"):
            found += [one_hot(ids, E) for ids in order[:, : int(name[-1]) * K].T]
        elif name == "any1":
            found.append(sum(one_hot(ids, E) for ids in order[:, :K].T))
        elif name == "logits":
            found.append(logits - logits.mean(axis=1, keepdims=True))
        elif name == "near":
            ranked = -np.sort(-logits, axis=1)
            gap = logits - (ranked[:, K - 1 : K] + ranked[:, K : K + 1]) / 2
            found += [1 / (1 + np.exp(-gap / width)) for width in (0.3, 1.0)]
        elif name == "previous":
            before = np.full_like(order[:, :K], -1)
            before[1:] = order[:-1, :K]
            before[trace.request_offsets[:-1]] = -1
            found.append(sum(one_hot(ids, E) for ids in before.T))
        elif name == "stream":
            found.append(seen.stream[:, layer])
    return np.concatenate(found, axis=1).astype(np.float64)


def activations(trace: RoutingTrace, layer: int) -> np.ndarray:
    """(T, E) float32: which experts each token chose."""
    out = np.zeros((trace.num_tokens, trace.fingerprint.num_experts), np.float32)
    np.put_along_axis(out, trace.expert_ids[:, layer].astype(np.int64), 1, axis=1)
    return out


def predicted(profile: Seen, held_out: Seen, layer: int, names: tuple[str, ...]) -> np.ndarray:
    """(T, E): expected activations of the tokens held out."""
    counts = count_tokens(profile.trace, layer)
    x = columns(profile, layer, counts, True, names)
    penalty = np.full(x.shape[1], RIDGE)
    penalty[0] = 1e-3
    weights = np.linalg.solve(x.T @ x + np.diag(penalty), x.T @ activations(profile.trace, layer))
    return columns(held_out, layer, counts, False, names) @ weights


def lar(trace: RoutingTrace, layer: int, expected: np.ndarray, hosts: np.ndarray) -> float:
    """The share of local pairs if tokens go to equal slices by `expected` (T, E) experts; hosts (G, E)."""
    scores, local, pairs = np.rint(expected @ hosts.T * SCALE).astype(np.int32), 0, 0
    for rows in cut_batches(trace.num_tokens, ReplaySettings()):
        ids, home = trace.expert_ids[rows, layer].astype(np.int64), assign(np.ascontiguousarray(scores[rows]))
        local, pairs = local + hosts[home[:, None], ids].sum(), pairs + ids.size
    return local / pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep-size", type=int, default=4)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(str(MODEL))
    profile, held_out = map(partial(Seen, model), demo_prompts(DemoSettings(), load_tokenizer(str(MODEL))))
    plan = solve(profile.trace, Topology(ep_size=arguments.ep_size), SolveSettings())
    hosts, layers = plan.placement.hosts.astype(float), range(profile.trace.fingerprint.num_layers)
    trace = held_out.trace
    true = np.mean([lar(trace, l, activations(trace, l), hosts[l]) for l in layers])
    found = {}
    print(f"EP{arguments.ep_size}, {profile.trace.num_tokens:,} tokens profiled, {trace.num_tokens:,} held out")
    for name, names in TRIALS.items():
        by_layer = [lar(trace, l, predicted(profile, held_out, l, names), hosts[l]) for l in layers]
        found[name] = {"lar": float(np.mean(by_layer))}
        found[name]["share"] = (found[name]["lar"] - found["none"]["lar"]) / (true - found["none"]["lar"])
        each = " ".join(f"{one:.3f}" for one in by_layer)
        print(f"{name:18} LAR {found[name]['lar']:.4f}  share {found[name]['share']:.2f}  by layer {each}", flush=True)
    print(f"{'true routing':18} LAR {true:.4f}")
    print("\n" + json.dumps({"trials": found, "true": float(true)}))


if __name__ == "__main__":
    main()
