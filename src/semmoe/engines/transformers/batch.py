"""Batches of prompts, padded on the left, and greedy decoding step by step."""

import functools
import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import DynamicCache, PreTrainedModel

from semmoe.engines.transformers.config import takes_padding
from semmoe.engines.transformers.model import text_config


@dataclass
class Batch:
    """Requests that are decoded together; after prefill each step feeds one token of every request."""

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    eos_ids: frozenset[int]
    generated: list[list[int]] = field(init=False)  # each request's new tokens, with its end-of-text token
    cache: DynamicCache | None = None
    first_token_seconds: float = 0.0  # duration of the prefill

    def __post_init__(self) -> None:
        self.generated = [[] for _ in self.prompts]
        self._padded = left_pad(self.prompts)

    @property
    def done(self) -> bool:
        return self.cache is not None and all(map(self.finished, range(len(self.prompts))))

    def finished(self, i: int) -> bool:
        new = self.generated[i]
        return len(new) >= self.max_new_tokens or (bool(new) and new[-1] in self.eos_ids)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next forward's token ids (B, S) and mask of real tokens (B, S): not padding, not finished."""
        if self.cache is None:
            return self._padded
        ids = torch.tensor([new[-1:] for new in self.generated])
        return ids, torch.tensor([[not self.finished(i)] for i in range(len(self.prompts))])

    def attention_mask(self) -> torch.Tensor:
        """(B, tokens so far): True for positions that may be attended to."""
        mask = self._padded[1]
        steps = max(map(len, self.generated), default=0)
        return torch.cat([mask, mask.new_ones(len(mask), steps)], dim=1).long()


def left_pad(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """(B, S): token ids, padded with zeros on the left; (B, S): mask of real tokens."""
    rows = [torch.tensor(prompt) for prompt in prompts]
    ids = pad_sequence(rows, batch_first=True, padding_value=-1, padding_side="left")
    return ids.clamp(min=0), ids >= 0


@torch.no_grad()
def step(model: PreTrainedModel, batch: Batch, before: Callable[[torch.Tensor, torch.Tensor, bool], None]) -> None:
    """Run one forward of the batch: the prefill, or one decoded token per request.

    `before` is called with (ids, real), both (B, S), and whether this is the prefill.
    """
    device, prefill = model.device, batch.cache is None
    started = time.perf_counter()
    ids, real = batch.inputs()
    before(ids, real, prefill)
    mask = batch.attention_mask()
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    batch.cache = batch.cache if batch.cache is not None else DynamicCache(config=model.config)
    out = model(
        input_ids=ids.to(device),
        attention_mask=mask.to(device),
        position_ids=positions.to(device),
        use_cache=True,
        logits_to_keep=1,
        **{cache_name(type(model)): batch.cache},  # type: ignore[arg-type]  # a class is hashable
    )
    chosen = out.logits[:, -1].argmax(dim=-1).tolist()
    if prefill:
        batch.first_token_seconds = time.perf_counter() - started
    for i, token in enumerate(chosen):
        if not batch.finished(i):
            batch.generated[i].append(token)


@functools.cache
def cache_name(kind: type[PreTrainedModel]) -> str:
    """The argument of a forward that takes the cache, which newer versions of transformers call `cache`."""
    return "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"


def cut(prompts: Sequence[Sequence[int]], size: int, max_new_tokens: int, model: PreTrainedModel) -> Iterator[Batch]:
    """Yield batches of at most `size` requests in order; of equal lengths where padding would change the results."""
    eos = model.generation_config.eos_token_id
    ends = frozenset(eos if isinstance(eos, list) else [eos] if eos is not None else [])
    runs = [prompts] if takes_padding(text_config(model)) else [list(run) for _, run in groupby(prompts, len)]
    for run in runs:
        for start in range(0, len(run), size):
            yield Batch(run[start : start + size], max_new_tokens, ends)
