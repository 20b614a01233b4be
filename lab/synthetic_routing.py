"""Synthetic routing with the statistics of real traces, in the shape of a model that is too large to trace here.

The model, which `lab.fit_routing` fits and `bench_nodes` uses: a router's logit for expert e at layer l, for a token
with id v in request r, is

    popularity(l, e) + id(l) A(l, e) . u(v) + request(l) B(l, e) . q(r) + context(l) C(l, e) . c(t, l) + Gumbel noise

with random unit vectors A, B, C of each expert and Gaussian vectors of tokens and requests, in few directions each.
u(v) belongs to the token id. q(r) belongs to the request: in part its topic's, in part its own. c(t, l) is the token's
context, which drifts from layer to layer: that is how experts depend on those of the layers before. Popularity is
set on a pilot so that experts are chosen as often as the statistics say. Without groups, a token's experts are those
of the highest logits. With groups, as in DeepSeek-V3, a group scores the sum of its two highest logits, the groups with
the highest scores are kept, and the experts are the highest inside them.

Ids follow a Zipf-Mandelbrot curve, tilted by q(r) in prompt and answer alike, so that prompts tell of requests. A share
of them repeats an earlier id of the request, at distances whose logarithms are uniform. Lengths follow the quantiles of
the real ones. Prompts are routed by the same model.
"""

from dataclasses import dataclass, field

import numba
import numpy as np
from threadpoolctl import threadpool_limits

from semmoe.core import DECODE, PREFILL, RoutingTrace
from semmoe.topology import Fingerprint

PILOT, PILOT_STEPS = 6000, 12  # tokens and steps by which popularity is set
CHUNK = 1 << 14  # tokens whose logits are drawn at once


@dataclass(frozen=True, kw_only=True)
class Strengths:
    """The numbers of the model. Strengths by layer are standard deviations of logits; Gumbel noise has 1.28."""

    shares: np.ndarray  # (L, E) falling; a shape with more layers or experts interpolates
    id: np.ndarray  # (L,)
    request: np.ndarray  # (L,)
    context: np.ndarray  # (L,)
    keep: float  # correlation of a token's context at a layer and the next
    id_directions: float
    request_directions: float
    context_directions: float
    topics: int
    topic_share: float  # of the variance of requests, the rest is each request's own
    lexicon: float  # standard deviation by which a request tilts the log frequency of an id in answers
    prompt_lexicon: float  # the same in prompts
    repeat: float  # share of ids that repeat an earlier one of the request
    zipf: tuple[float, float]  # exponent and shift
    answer_lengths: np.ndarray  # quantiles, evenly spaced
    prompt_lengths: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of what is drawn. The defaults are DeepSeek-V3's, with `layers` of its 58."""

    layers: int = 6
    experts: int = 256
    top_k: int = 8
    groups: int = 8
    kept_groups: int = 4
    requests: int = 1000
    vocabulary: int = 129_280
    hidden_size: int = 7168
    expert_size: int = 2048
    prefill: bool = True  # whether the tokens of prompts are routed too
    # factor on the number of directions of ids, requests and contexts; None: experts / experts of the statistics
    widen: float | None = None
    # share of an expert's vectors that is its group's; traces of models without groups do not tell it
    coherence: float = 0.0
    model: str = field(default="synthetic")


DEEPSEEK_V3 = Shape(model="synthetic DeepSeek-V3")


def draw(strengths: Strengths, shape: Shape = DEEPSEEK_V3, seed: int = 0) -> RoutingTrace:
    """A trace of the model; the same strengths, shape and seed give the same bytes.

    The layers drawn stand at even depths of the model, and follow each other as neighbours do.
    """
    rng = np.random.default_rng(seed)
    with threadpool_limits(1):
        requests = _request_vectors(strengths, shape, rng)
        text = _Text.draw(strengths, shape, requests, rng)
        experts = _route(strengths, shape, text, requests, rng)
    rows = np.flatnonzero(text.answer | shape.prefill)
    return RoutingTrace(
        token_ids=text.ids[rows],
        expert_ids=experts,
        request_offsets=_offsets(np.bincount(text.request[rows], minlength=shape.requests)),
        phase=np.where(text.answer[rows], DECODE, PREFILL).astype(np.uint8),
        prompt_ids=text.ids[~text.answer],
        prompt_offsets=_offsets(np.bincount(text.request[~text.answer], minlength=shape.requests)),
        fingerprint=_fingerprint(shape),
    )


def _fingerprint(shape: Shape) -> Fingerprint:
    return Fingerprint(
        model=shape.model,
        architecture_hash="synthetic",
        tokenizer_hash="synthetic",
        vocab_size=shape.vocabulary,
        num_layers=shape.layers,
        num_experts=shape.experts,
        top_k=shape.top_k,
        num_groups=shape.groups,
        hidden_size=shape.hidden_size,
        expert_size=shape.expert_size,
    )


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _vectors(
    rng: np.random.Generator, number: int, directions: float, strengths: Strengths, shape: Shape
) -> np.ndarray:
    """(number, d) Gaussian vectors in so many directions, widened to the shape; the last direction counts in part."""
    widen = shape.experts / strengths.shares.shape[1] if shape.widen is None else shape.widen
    width = max(float(directions * widen), 1.0)
    out = _normal(rng, number, int(np.ceil(width)))
    out[:, -1] *= np.float32((width - np.ceil(width) + 1) ** 0.5)
    return out


def _request_vectors(strengths: Strengths, shape: Shape, rng: np.random.Generator) -> np.ndarray:
    """(R, d) q(r): in part those of a topic drawn at random, in part each request's own."""
    topics, own = (_vectors(rng, number, strengths.request_directions, strengths, shape)
                   for number in (strengths.topics, shape.requests))  # fmt: skip
    share, topic = strengths.topic_share, rng.integers(strengths.topics, size=shape.requests)
    return np.float32(share**0.5) * topics[topic] + np.float32((1 - share) ** 0.5) * own


@dataclass(frozen=True)
class _Text:
    """Prompts and answers, request after request."""

    ids: np.ndarray  # (T,) int32
    request: np.ndarray  # (T,)
    answer: np.ndarray  # (T,) bool

    @classmethod
    def draw(cls, strengths: Strengths, shape: Shape, requests: np.ndarray, rng: np.random.Generator) -> "_Text":
        lengths = [_lengths(quantiles, shape.requests, rng)
                   for quantiles in (strengths.prompt_lengths, strengths.answer_lengths)]  # fmt: skip
        request = np.repeat(np.arange(shape.requests), lengths[0] + lengths[1])
        place = np.arange(len(request)) - _offsets(lengths[0] + lengths[1])[request]
        answer = place >= lengths[0][request]
        ids = _words(strengths, shape.vocabulary, requests, lengths, rng)
        distance = np.ceil(np.maximum(place, 1) ** rng.random(len(ids))).astype(np.int64)
        earlier = np.arange(len(ids)) - np.minimum(distance, place)
        repeats = (rng.random(len(ids)) < strengths.repeat) & (place > 0)
        _repeat(ids, earlier, repeats)
        return cls(ids, request, answer)


def _lengths(quantiles: np.ndarray, number: int, rng: np.random.Generator) -> np.ndarray:
    """(R,) lengths with these quantiles; at least 1."""
    at = rng.random(number) * (len(quantiles) - 1)
    return np.maximum(np.rint(np.interp(at, np.arange(len(quantiles)), quantiles)), 1).astype(np.int64)


def _words(
    strengths: Strengths, vocabulary: int, requests: np.ndarray, lengths: list[np.ndarray], rng: np.random.Generator
) -> np.ndarray:
    """(T,) int32 ids of requests (R, d), each with so many ids of prompt and answer: lengths two of (R,).

    The log frequency of an id is tilted by the product of a vector of its own and the request's.
    """
    exponent, shift = strengths.zipf
    frequency = (-exponent * np.log(np.arange(1, vocabulary + 1) + shift)).astype(np.float32)
    taste, out = _unit(_normal(rng, requests.shape[1], vocabulary)), []
    for vector, *numbers in zip(requests, *lengths, strict=True):
        tilt = vector @ taste
        for number, strength in zip(numbers, (strengths.prompt_lexicon, strengths.lexicon), strict=True):
            cumulative = np.cumsum(np.exp(frequency + np.float32(strength) * tilt), dtype=np.float64)
            out.append(np.searchsorted(cumulative, rng.random(number) * cumulative[-1]).clip(max=vocabulary - 1))
    return np.concatenate(out).astype(np.int32)


@numba.njit(cache=True)
def _repeat(ids, earlier, repeats):
    """Replace ids (T,) that repeat by the id at row `earlier` (T,), in order, in place."""
    for t in range(len(ids)):
        if repeats[t]:
            ids[t] = ids[earlier[t]]


def _route(
    strengths: Strengths, shape: Shape, text: _Text, requests: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """(T, L, K) experts of the rows that are routed."""
    rows = np.flatnonzero(text.answer | shape.prefill)
    sources = _Sources.draw(strengths, shape, text, requests, rng)
    out = np.empty((len(rows), shape.layers, shape.top_k), np.uint8 if shape.experts <= 256 else np.int16)
    context, keep = sources.contexts(rng, len(rows)), np.float32(strengths.keep)
    for l in range(shape.layers):
        if l > 0:
            context = keep * context + np.sqrt(1 - keep**2) * sources.contexts(rng, len(rows))
        parts = sources.layer(l, rng)
        bias = _popularity(parts, sources.shares[l], rows, context, shape, rng)
        for first in range(0, len(rows), CHUNK):
            part = slice(first, first + CHUNK)
            logits = parts.logits(rows[part], context[part]) + bias + _gumbel(rng, len(rows[part]), shape.experts)
            out[part, l] = choose(logits, shape)
    return out


def _normal(rng: np.random.Generator, *size: int) -> np.ndarray:
    return rng.standard_normal(size, np.float32)


def _gumbel(rng: np.random.Generator, *size: int) -> np.ndarray:
    return -np.log(np.maximum(rng.standard_exponential(size, np.float32), np.float32(1e-30)))


@dataclass(frozen=True)
class _Sources:
    """What the logits of all layers come from; by layer the strengths of id, request and context."""

    ids: np.ndarray  # (V, d)
    requests: np.ndarray  # (R, d')
    text: _Text
    by_layer: np.ndarray  # (L, 3)
    shares: np.ndarray  # (L, E)
    strengths: Strengths
    shape: Shape

    @classmethod
    def draw(
        cls, strengths: Strengths, shape: Shape, text: _Text, requests: np.ndarray, rng: np.random.Generator
    ) -> "_Sources":
        by_layer = np.stack([strengths.id, strengths.request, strengths.context], axis=1)
        return cls(
            _vectors(rng, shape.vocabulary, strengths.id_directions, strengths, shape),
            requests,
            text,
            at_even_depths(by_layer, shape.layers),
            resampled(at_even_depths(strengths.shares, shape.layers), shape.experts),
            strengths,
            shape,
        )

    def contexts(self, rng: np.random.Generator, number: int) -> np.ndarray:
        """(number, d) contexts of tokens."""
        return _vectors(rng, number, self.strengths.context_directions, self.strengths, self.shape)

    def layer(self, layer: int, rng: np.random.Generator) -> "_Layer":
        """The vectors of the experts of one layer, scaled by its strengths."""
        widths = (self.ids.shape[1], self.requests.shape[1], self.contexts(rng, 1).shape[1])
        experts = [_experts(rng, width, self.shape) for width in widths]
        scaled = [np.float32(s) * one for s, one in zip(self.by_layer[layer], experts, strict=True)]
        return _Layer(self, scaled[0], self.requests @ scaled[1], scaled[2])


def _experts(rng: np.random.Generator, width: int, shape: Shape) -> np.ndarray:
    """(width, E) unit vectors, those of a group as alike as the shape says."""
    own = _unit(_normal(rng, width, shape.experts))
    if shape.coherence == 0:
        return own
    group = np.repeat(_unit(_normal(rng, width, shape.groups)), shape.experts // shape.groups, axis=1)
    return _unit(np.float32(shape.coherence**0.5) * group + np.float32((1 - shape.coherence) ** 0.5) * own)


def _unit(vectors: np.ndarray) -> np.ndarray:
    """Columns of length 1."""
    return vectors / np.linalg.norm(vectors, axis=0)


@dataclass(frozen=True)
class _Layer:
    sources: _Sources
    of_ids: np.ndarray  # (d, E)
    of_request: np.ndarray  # (R, E)
    of_context: np.ndarray  # (d, E)

    def logits(self, rows: np.ndarray, context: np.ndarray) -> np.ndarray:
        """(n, E) without popularity and noise, for rows (n,) of the text with contexts (n, d)."""
        text = self.sources.text
        by_id = self.sources.ids[text.ids[rows]] @ self.of_ids
        return by_id + self.of_request[text.request[rows]] + context @ self.of_context


def _popularity(
    parts: _Layer, shares: np.ndarray, rows: np.ndarray, context: np.ndarray, shape: Shape, rng: np.random.Generator
) -> np.ndarray:
    """(E,) float32 logits that give experts these shares, in random order, on tokens drawn at random."""
    pilot = np.sort(rng.choice(len(rows), min(PILOT, len(rows)), replace=False))
    logits = parts.logits(rows[pilot], context[pilot]) + _gumbel(rng, len(pilot), shape.experts)
    wanted = rng.permutation(np.maximum(shares, 0.02)) / shape.experts
    bias = np.log(wanted)
    for _ in range(PILOT_STEPS):
        chosen = choose(logits + bias.astype(np.float32), shape)
        found = (np.bincount(chosen.ravel(), minlength=shape.experts) + 0.5) / chosen.size
        bias += np.log(wanted / found)
    return bias.astype(np.float32)


def choose(logits: np.ndarray, shape: Shape) -> np.ndarray:
    """(n, K) experts of tokens with logits (n, E), by falling logit, from few groups if there are any."""
    if shape.kept_groups < shape.groups:
        grouped = logits.reshape(len(logits), shape.groups, -1)
        score = np.partition(grouped, -2, axis=2)[:, :, -2:].sum(axis=2)
        kept = np.argpartition(-score, shape.kept_groups - 1, axis=1)[:, : shape.kept_groups]
        open_groups = np.zeros(score.shape, bool)
        np.put_along_axis(open_groups, kept, True, axis=1)
        logits = np.where(open_groups[:, :, None], grouped, np.float32(-np.inf)).reshape(logits.shape)
    best = np.argpartition(-logits, shape.top_k - 1, axis=1)[:, : shape.top_k]
    order = np.argsort(-np.take_along_axis(logits, best, axis=1), axis=1, kind="stable")
    return np.take_along_axis(best, order, axis=1)


def at_even_depths(by_layer: np.ndarray, layers: int) -> np.ndarray:
    """(layers, ...) values at even depths from values (L, ...) of all layers, between neighbours in proportion."""
    depth = np.linspace(0, len(by_layer) - 1, layers)
    low = np.minimum(depth.astype(np.int64), max(len(by_layer) - 2, 0))
    high, part = np.minimum(low + 1, len(by_layer) - 1), (depth - low).reshape(-1, *[1] * (by_layer.ndim - 1))
    return by_layer[low] * (1 - part) + by_layer[high] * part


def resampled(shares: np.ndarray, experts: int) -> np.ndarray:
    """(L, experts) falling shares with mean 1 of the same curve as shares (L, E)."""
    known = (np.arange(shares.shape[1]) + 0.5) / shares.shape[1]
    curve = np.stack([np.interp((np.arange(experts) + 0.5) / experts, known, one) for one in shares])
    return curve / curve.mean(axis=1, keepdims=True)
