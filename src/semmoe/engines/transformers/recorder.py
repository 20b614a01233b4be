"""Profiling: record which experts each token chose, by hooks on the model.

Recent transformers call every MoE block's experts with (hidden, expert ids, weights); a hook there sees the routing
of all supported architectures, whatever their router computes.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from semmoe.core import RoutingTrace
from semmoe.engines.transformers.batch import Batch, cut, step
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.engines.transformers.model import moe_layers, text_config
from semmoe.runtime import kernels
from semmoe.traces.dataset import check_token_ids, digest
from semmoe.traces.trace import TraceHeader, TraceWriter, open_trace


class RoutingRecorder(ExitStack):
    """Collects routing, one forward pass at a time; a context manager that detaches its hooks at the end."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self._blocks = moe_layers(model)
        for block in self._blocks:
            self.enter_context(block.experts.register_forward_pre_hook(self._record, with_kwargs=True))
        self._layers: list[np.ndarray] = []
        self._real = np.zeros(0, bool)

    def begin(self, ids: torch.Tensor, real: torch.Tensor, prefill: bool) -> None:
        self._layers = []
        self._real = real.reshape(-1).cpu().numpy()

    def _record(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        """Record the next layer's routing (T, K) of all rows of the batch."""
        _, expert_ids, weights = [*args, *kwargs.values()][:3]
        ordered = kernels.of(expert_ids.device).by_weight(expert_ids, weights, expert_ids.dtype)
        self._layers.append(ordered.cpu().numpy()[self._real])

    def take(self) -> np.ndarray:
        """(n, L, K) expert ids of the real tokens of the last forward, row by row of the batch."""
        assert len(self._layers) == len(self._blocks), "a MoE layer was skipped or ran twice"
        return np.stack(self._layers, axis=1)


def record_prompts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    writer: TraceWriter,
    *,
    max_new_tokens: int = 0,
    batch_size: int = 16,
    progress: Callable[[int], None] = lambda done: None,
) -> None:
    """Run the prompts that `writer` does not hold yet and append each one's routing: prefill, then greedy decode.

    The last generated token is never fed back and so has no routing, as in any engine.
    """
    check_token_ids(prompts, text_config(model).vocab_size)
    remaining = prompts[writer.num_requests :]
    with RoutingRecorder(model) as recorder:
        for batch in cut(remaining, batch_size, max_new_tokens, model):
            for prompt, token_ids, expert_ids in _profile_batch(model, batch, recorder):
                writer.append_run(prompt, token_ids, expert_ids)
            progress(len(batch.prompts))


def record(
    model: PreTrainedModel,
    model_path: str,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    progress: Callable[[int], None] = lambda done: None,
    max_new_tokens: int = 0,
    batch_size: int = 16,
    stated: Mapping[str, Any] | None = None,
) -> RoutingTrace:
    """Record prompts and their answers by a model loaded from `model_path`; returns the trace, which is in `folder`.

    stated: settings to state in the trace's header.
    """
    identity = fingerprint_of(model_path)
    header = TraceHeader(fingerprint=identity, dataset_hash=digest(prompts), settings=dict(stated or {}))
    with TraceWriter(folder, header) as writer:
        progress(writer.num_requests)
        record_prompts(model, prompts, writer, progress=progress, max_new_tokens=max_new_tokens, batch_size=batch_size)
    return open_trace(folder)


def _profile_batch(
    model: PreTrainedModel, batch: Batch, recorder: RoutingRecorder
) -> Iterator[tuple[Sequence[int], np.ndarray, np.ndarray]]:
    """Decode a batch, and yield each request as arguments of `TraceWriter.append_run`."""
    routed: list[list[np.ndarray]] = [[] for _ in batch.prompts]
    while not batch.done:
        _, real = batch.inputs()
        step(model, batch, recorder.begin)
        ends = real.sum(dim=1).cumsum(dim=0)[:-1].tolist()
        for parts, part in zip(routed, np.split(recorder.take(), ends), strict=True):
            parts.append(part)
    for prompt, new, parts in zip(batch.prompts, batch.generated, routed, strict=True):
        experts = np.concatenate(parts)
        yield prompt, np.array([*prompt, *new])[: len(experts)], experts
