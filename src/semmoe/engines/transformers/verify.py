"""Exactness: compare outputs with those of the plain model, token for token."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from semmoe.engines.transformers.config import num_experts, top_k
from semmoe.engines.transformers.model import moe_layers, text_config
from semmoe.settings import GenerateSettings


def plain_generate(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    settings: GenerateSettings,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[int]]:
    """The reference: transformers' own greedy `generate`, one process, one request at a time, no padding."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=settings.max_new_tokens,
            pad_token_id=0,
        )
        outputs.append(out[0, len(prompt) :].tolist())
        progress(1)
    return outputs


@dataclass(frozen=True)
class Agreement:
    """How two sets of outputs compare, token for token."""

    requests: int
    identical: int
    near_ties: int  # outputs that first differ where the reference's margin is too small (docs/how-it-works.md)
    mismatches: list[int]  # requests that differ otherwise

    @property
    def holds(self) -> bool:
        return not self.mismatches

    def __str__(self) -> str:
        ties = f" ({self.near_ties} near-ties)" if self.near_ties else ""
        return f"yes{ties}" if self.holds else f"NO: {len(self.mismatches)} of {self.requests}"


def compare_outputs(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    reference: list[list[int]],
    outputs: list[list[int]],
    margin: float = 1e-4,
) -> Agreement:
    """Compare `outputs` with `reference`, those of the plain `model`. A difference is accepted only at a near-tie."""
    differing = [i for i, (a, b) in enumerate(zip(reference, outputs, strict=True)) if a != b]
    ties = [i for i in differing if _smallest_margin(model, prompts[i], reference[i], outputs[i]) < margin]
    wrong = sorted(set(differing) - set(ties))
    return Agreement(len(reference), len(reference) - len(differing), len(ties), wrong)


@torch.no_grad()
def _smallest_margin(model, prompt, reference: list[int], output: list[int]) -> float:
    """The reference's smallest margin, of the arg-max or of a router, at the position where `output` first differs.

    Routers at earlier positions are not considered: over a long prompt some router is nearly always close to a tie, so
    that every fault would be accepted.
    """
    common = next((i for i, (a, b) in enumerate(zip(reference, output, strict=False)) if a != b), 0)
    logits_of: list[torch.Tensor] = []
    experts = num_experts(text_config(model))

    def keep(module, args, out):
        logits_of.append((out[0] if isinstance(out, tuple) else out).reshape(-1, experts)[-1:])

    routers = [next(m for n, m in block.named_children() if n in ("gate", "router")) for block in moe_layers(model)]
    scored = [router for router in routers if not hasattr(router, "tid2eid")]  # a table of token ids knows no ties
    ids = torch.tensor([[*prompt, *reference[:common]]], device=model.device)
    with ExitStack() as hooks:
        for router in scored:
            hooks.enter_context(router.register_forward_hook(keep))
        logits = model(input_ids=ids, use_cache=False).logits[0, -1]
    chosen = top_k(text_config(model))
    gaps = [_gap(scores.float().softmax(-1), chosen) for scores in logits_of]
    return min(_gap(logits.float()[None], 1), *gaps)


def _gap(scores: torch.Tensor, k: int) -> float:
    """Smallest distance between the k-th and the next score over all rows (n, width)."""
    top = scores.topk(k + 1, dim=-1).values
    return float((top[:, k - 1] - top[:, k]).min())
