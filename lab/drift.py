"""Traffic that drifts: which kinds of text requests are of, over time, from a seed.

    stable        all kinds mixed alike, from the first request to the last
    alternating   blocks of the first kinds and of the others in turn
    block         the first kinds, and from one third on the others
    gradual       from the first kinds to the others, with a share that rises from 0 to 1

Kinds are the domains of held-out text (`semmoe.traces.texts`). The first kinds are those that a plan is profiled on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from semmoe.cli.demo import MODEL
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.recorder import record
from semmoe.plan import save_plan
from semmoe.settings import SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology
from semmoe.traces.dataset import Prompt, encode
from semmoe.traces.texts import held_out_prompts

SHAPES = ("stable", "alternating", "block", "gradual")
CHARS = 250  # of a prompt, at least
# A server's traffic changes within hours; here within minutes, so the loop looks, records and solves as fast.
ADAPT = ["--window", "8", "--requests", "80"]
RANKS = 2
FIRST, OTHERS = ("network", "system", "text", "numbers"), ("codecs",)


@dataclass(frozen=True)
class Texts:
    """Token ids of prompts: of the first kinds and the others, each those to profile and those to serve."""

    profile: dict[str, list[list[int]]]
    serve: dict[str, list[list[int]]]


def texts(tokenizer, first: Sequence[str] = FIRST, others: Sequence[str] = OTHERS, tokens: int = 96) -> Texts:
    """Prompts by side, "first" and "others"; documents that are profiled are never served."""
    sides = {"first": set(first), "others": set(others)}
    triples = held_out_prompts(per_domain=1500, chars=CHARS)
    documents = sorted({(domain, name) for domain, name, _ in triples})
    profiled = set(documents[::2])
    out: dict[bool, dict[str, list[list[int]]]] = {True: {}, False: {}}
    for known in (True, False):
        for side, domains in sides.items():
            chosen = [Prompt(text=t) for d, name, t in triples if d in domains and ((d, name) in profiled) == known]
            out[known][side] = encode(chosen, tokenizer, tokens)
    return Texts(out[True], out[False])


def share_of_others(shape: str, requests: int, blocks: int = 4) -> np.ndarray:
    """(R,) the chance of each request, in order, to be of the other kinds."""
    when = np.arange(requests) / requests
    if shape == "stable":
        return np.full(requests, 0.5)
    if shape == "alternating":
        return (np.floor(when * blocks) % 2).astype(float)
    if shape == "block":
        return (when >= 1 / 3).astype(float)
    if shape == "gradual":
        return when
    raise ValueError(f"shape must be one of {', '.join(SHAPES)}, not {shape!r}")


def draw(found: Texts, shape: str, requests: int, seed: int = 0, blocks: int = 4) -> tuple[list[list[int]], np.ndarray]:
    """Prompts (R) in order of arrival, and (R,) bool, which of them are of the other kinds."""
    rng = np.random.default_rng(seed)
    other = rng.random(requests) < share_of_others(shape, requests, blocks)
    pools = found.serve["first"], found.serve["others"]
    return [pools[int(o)][rng.integers(len(pools[int(o)]))] for o in other], other


def make_plans(
    found: Texts, attention: str, copies: int, folder: Path, prompts: int = 200, answers: int = 0
) -> dict[str, Path]:
    """Plans by what they are profiled on: the first kinds, the others, all; so many prompts, and tokens an answer."""
    model, topology = load_model(str(MODEL)), Topology.for_attention(attention, RANKS)
    sides = {"first": found.profile["first"], "others": found.profile["others"]}
    sides["all"] = [p for pair in zip(*sides.values(), strict=False) for p in pair]
    out = {}
    for name, own in sides.items():
        trace = record(model, str(MODEL), own[:prompts], folder / f"trace-{name}", max_new_tokens=answers)
        out[name] = folder / name
        save_plan(solve(trace, topology, SolveSettings(redundant_experts=copies)), out[name])
    return out


def changes(shape: str, requests: int, blocks: int = 4) -> list[tuple[int, str]]:
    """At which request the plan that knows the future is swapped to which plan."""
    if shape == "stable":
        return []
    if shape == "gradual":
        return [(requests // 3, "all"), (2 * requests // 3, "others")]
    share = share_of_others(shape, requests, blocks)
    turns = np.flatnonzero(np.diff(share)) + 1
    return [(int(i), "others" if share[i] else "first") for i in turns]
