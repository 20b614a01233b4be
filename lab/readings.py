"""How a precision of 96.3 % and an F1 of 78.8 % (A.2) may have been counted, which the paper does not say.

Their recall is 2/3, so fewer experts are predicted than are chosen. A token type's most routed top-k experts in 25 % of
the requests are compared with its activations in the rest by three readings:

    tokens      each token's k experts; tokens that were not profiled count as misses of recall
    thresholded the same, but an expert is predicted only if it has a share of the type's tokens, the least share that
                gives the published precision, if any does
    types       each type's k experts beside all experts that any of its tokens activates; mean over profiled types
"""

import numpy as np

from semmoe.core import RoutingTrace
from semmoe.traces.affinity import count

PRECISION = 0.963
STEPS = 20  # least shares of a type's tokens that are tried: 1 / STEPS to 1

Reading = tuple[float, float, float]  # precision, recall, F1


def readings(profile: RoutingTrace, rest: RoutingTrace) -> dict[str, Reading]:
    """Precision, recall and F1 by each reading, mean over layers."""
    layers = [_of_layer(profile, rest, layer) for layer in range(rest.fingerprint.num_layers)]
    by_share = np.mean([shares for shares, _ in layers], axis=0)  # (STEPS + 1, 3)
    enough = np.flatnonzero(by_share[:, 0] >= PRECISION)
    chosen = enough[0] if len(enough) else by_share[:, 0].argmax()
    types = np.mean([of_types for _, of_types in layers], axis=0)
    found = {"tokens": by_share[0], "thresholded": by_share[chosen], "types": types}
    return {name: (float(one[0]), float(one[1]), float(one[2])) for name, one in found.items()}


def _of_layer(profile: RoutingTrace, rest: RoutingTrace, layer: int) -> tuple[np.ndarray, np.ndarray]:
    """Figures of the readings by tokens, for every least share, with 0 first (STEPS + 1, 3), and by types (3,)."""
    f = rest.fingerprint
    tokens = np.bincount(rest.token_ids, minlength=f.vocab_size)
    known = np.flatnonzero((tokens > 0) & (np.bincount(profile.token_ids, minlength=f.vocab_size) > 0))
    before, now = (
        count(trace.token_ids, trace.expert_ids[:, layer], f.vocab_size, f.num_experts)[known].toarray()
        for trace in (profile, rest)
    )  # (U, E)
    seen = before.sum(axis=1, keepdims=True) // f.top_k  # (U, 1) tokens of the type in the profile
    predicted = np.argsort(-before, axis=1, kind="stable")[:, : f.top_k]
    hits = np.take_along_axis(now, predicted, axis=1)  # (U, K)
    share = np.take_along_axis(before, predicted, axis=1) * STEPS // seen
    right, made = (
        np.bincount(share.ravel(), weights=one.ravel(), minlength=STEPS + 1)[::-1].cumsum()[::-1]
        for one in (hits, np.broadcast_to(tokens[known, None], hits.shape))
    )
    of_tokens = _figures(right / np.maximum(made, 1), right / (rest.num_tokens * f.top_k))
    activated = (hits > 0).sum(axis=1)
    of_types = _figures(activated / f.top_k, activated / (now > 0).sum(axis=1))
    return of_tokens, of_types.mean(axis=0)


def _figures(precision: np.ndarray, recall: np.ndarray) -> np.ndarray:
    """(N, 3): precision, recall and F1."""
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    return np.stack([precision, recall, f1], axis=1)
