"""Find the strengths with which `lab.synthetic_routing` draws traces that have the statistics of a real one."""

from dataclasses import fields, replace

import numpy as np

from lab.routing_statistics import Statistics, fit
from lab.synthetic_routing import Shape, Strengths, draw

TOPICS = 32  # the most clusters that are measured
LEAST = 1e-3  # of a statistic, so that ratios exist
NOISE = np.pi**2 / 6  # variance of the model's Gumbel noise
LEAST_CONTEXT, LEAST_NOISE = 0.01, 0.03  # shares of the variance of logits
DAMPING, STEP = 0.7, 1.6  # of the logarithm of a ratio, and the largest ratio of one round


def calibrate(real: Statistics, rounds: int = 10, seed: int = 0) -> tuple[Strengths, Statistics]:
    """The strengths after so many rounds, and the statistics of the trace that they draw.

    Each round draws a trace of the real one's shape and corrects every strength by the statistic that names it.
    """
    strengths, shape = first_guess(real), shape_of(real)
    for number in range(rounds):
        drawn = fit(draw(strengths, shape, seed + number))
        strengths = corrected(strengths, real, drawn)
    return strengths, fit(draw(strengths, shape, seed + rounds))


def shape_of(real: Statistics) -> Shape:
    """The shape of the trace itself: no groups, and only answers are routed."""
    return Shape(
        layers=len(real.token),
        experts=real.num_experts,
        top_k=real.top_k,
        groups=1,
        kept_groups=1,
        requests=real.requests,
        vocabulary=real.vocabulary,
        hidden_size=0,
        expert_size=0,
        prefill=False,
        model=f"drawn like {real.model}",
    )


def first_guess(real: Statistics) -> Strengths:
    ones = np.ones(len(real.token))
    return Strengths(
        shares=real.shares,
        id=4.0 * ones,
        request=2.0 * ones,
        context=1.0 * ones,
        keep=0.85,
        id_directions=real.token_directions / 2,
        request_directions=real.request_directions / 1.5,
        context_directions=real.token_directions / 2,
        topics=TOPICS,
        topic_share=0.5,
        lexicon=0.3,
        prompt_lexicon=1.0,
        repeat=0.5,
        zipf=real.zipf,
        answer_lengths=real.answer_lengths,
        prompt_lengths=real.prompt_lengths,
    )


def corrected(now: Strengths, real: Statistics, drawn: Statistics) -> Strengths:
    """Strengths of the next round."""
    ratio = {f.name: _ratio(getattr(real, f.name), getattr(drawn, f.name)) for f in fields(Statistics)
             if isinstance(getattr(real, f.name), (float, np.ndarray))}  # fmt: skip
    by_id, by_request, by_context = _variances(now, ratio)
    directions = float(np.clip(now.id_directions * ratio["token_directions"], 2, 200))
    return replace(
        now,
        id=by_id,
        request=by_request,
        context=by_context,
        keep=float(np.clip(1 - (1 - now.keep) / ratio["path_decay"][0] ** 8, 0.5, 0.99)),
        id_directions=directions,
        context_directions=directions,
        request_directions=float(np.clip(now.request_directions * ratio["request_directions"], 2, 200)),
        topic_share=float(np.clip(now.topic_share * ratio["clusters"][-1], 0.02, 0.98)),
        lexicon=float(np.clip(now.lexicon * ratio["recurrence"], 0.02, 3)),
        prompt_lexicon=float(np.clip(now.prompt_lexicon * ratio["from_prompt"], 0.02, 3)),
        repeat=float(np.clip(1 - (1 - now.repeat) * ratio["distinct"], 0, 0.95)),
    )


def _variances(now: Strengths, ratio: dict[str, np.ndarray]) -> np.ndarray:
    """(3, L) new strengths of id, request and context, by which share of the variance of logits each should have.

    Noise keeps its variance, so that the shares of the others decide their strengths. If they ask for more than there
    is, context gets less.
    """
    path = ratio["path"].copy()
    path[:-1] = (path[:-1] * path[1:]) ** 0.5  # a layer's context makes its experts depend on both neighbours
    path[0] = ratio["path"][1] if len(path) > 1 else 1.0
    variance = np.stack([now.id, now.request, now.context]) ** 2
    share = variance / (variance.sum(axis=0) + NOISE)
    share *= np.stack([ratio["token"], ratio["request"], path])
    share[:2] *= np.minimum(1, (1 - LEAST_CONTEXT - LEAST_NOISE) / share[:2].sum(axis=0))
    share[2] = np.clip(share[2], LEAST_CONTEXT, 1 - LEAST_NOISE - share[:2].sum(axis=0))
    return np.sqrt(NOISE * share / (1 - share.sum(axis=0)))


def _ratio(wanted: float | np.ndarray, found: float | np.ndarray) -> np.ndarray:
    """By what a strength is to be multiplied, if the statistic were in proportion to it."""
    raw = np.maximum(wanted, LEAST) / np.maximum(found, LEAST)
    return np.clip(raw**DAMPING, 1 / STEP, STEP)
