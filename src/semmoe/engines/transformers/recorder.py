"""Profiling: record which experts each token chose, by hooks on the model.

Recent transformers call every MoE block's experts with (hidden, expert ids, weights); a hook there sees the routing
of all supported architectures, whatever their router computes. Another at the end of a decoder layer asks the next
layer's router ahead of time, if that is to be recorded.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from semmoe.checkpoint.hashed import read_hashed
from semmoe.core import DECODE, PREFILL, RoutingTrace
from semmoe.dataset import check_token_ids, digest
from semmoe.engines.lookahead import Lookahead
from semmoe.engines.transformers.batch import Batch, cut, step
from semmoe.engines.transformers.config import fingerprint_of, lookahead_planes
from semmoe.engines.transformers.model import layers_of, moe_layers, router_lookahead
from semmoe.runtime.shuffler import by_weight
from semmoe.trace import TraceHeader, TraceWriter, open_trace


class RoutingRecorder:
    """Collects the routing of one forward pass at a time; a context manager that detaches its hooks at the end.

    planes: look-ahead ids to record of each token, per expert that it chooses; 0: none.
    """

    def __init__(self, model: PreTrainedModel, planes: int = 0) -> None:
        self._model, self._planes = model, planes
        self._blocks = self.find_blocks(model)
        self._layers: list[np.ndarray] = []
        self._ahead: list[np.ndarray] = []
        self._real = np.zeros(0, bool)

    def lookahead(self, model: PreTrainedModel, planes: int) -> Lookahead:
        return router_lookahead(model, planes)

    def find_blocks(self, model: PreTrainedModel) -> list[torch.nn.Module]:
        return moe_layers(model)

    def listen(self, block: Any) -> Any:
        """A hook on one MoE layer."""
        return block.experts.register_forward_pre_hook(self._record, with_kwargs=True)

    def __enter__(self) -> "RoutingRecorder":
        self._hooks = [self.listen(block) for block in self._blocks]
        if self._planes:
            ask = self.lookahead(self._model, self._planes)
            for place, layer in enumerate(layers_of(self._model, self._blocks)[:-1]):
                self._hooks.append(layer.register_forward_hook(partial(self._look, ask, place)))
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def begin(self, ids: torch.Tensor, real: torch.Tensor, prefill: bool) -> None:
        self._layers, self._ahead = [], []
        self._real = real.reshape(-1).cpu().numpy()

    def _look(self, ask: Lookahead, place: int, module: torch.nn.Module, args: tuple, out: Any) -> None:
        stream = out[0] if isinstance(out, tuple) else out
        self._ahead.append(ask(place, stream.reshape(-1, stream.shape[-1])).cpu().numpy()[self._real])

    def _record(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        _, expert_ids, weights = [*args, *kwargs.values()][:3]
        self.keep(expert_ids, weights)

    def keep(self, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Record the next layer's routing (T, K) of all rows of the batch."""
        ordered = by_weight(expert_ids, weights, expert_ids.dtype)
        self._layers.append(ordered.cpu().numpy()[self._real])

    def take(self) -> np.ndarray:
        """(n, L, K) expert ids of the real tokens of the last forward, row by row of the batch."""
        assert len(self._layers) == len(self._blocks), "a MoE layer was skipped or ran twice"
        return np.stack(self._layers, axis=1)

    def take_ahead(self) -> np.ndarray:
        """(n, L - 1, W) look-ahead ids of the same tokens; (n, 0, 0) if none are recorded."""
        return np.stack(self._ahead, axis=1) if self._ahead else np.empty((int(self._real.sum()), 0, 0), np.int64)


def record_prompts(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    writer: TraceWriter,
    *,
    max_new_tokens: int = 0,
    batch_size: int = 16,
    progress: Callable[[int], None] = lambda done: None,
    recorder_of: Callable[..., RoutingRecorder] = RoutingRecorder,
) -> None:
    """Run the prompts that `writer` does not hold yet and append each one's routing: prefill, then greedy decode.

    The last generated token is never fed back and so has no routing, as in any engine.
    """
    check_token_ids(prompts, model.config.vocab_size)
    remaining = prompts[writer.num_requests :]
    with recorder_of(model, writer.header.lookahead) as recorder:
        for batch in cut(remaining, batch_size, max_new_tokens, model):
            for request in _profile_batch(model, batch, recorder):
                writer.append(**request)
            progress(len(batch.prompts))


def record(
    model: PreTrainedModel,
    model_path: str,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    progress: Callable[[int], None] = lambda done: None,
    lookahead: bool = False,
    max_new_tokens: int = 0,
) -> RoutingTrace:
    """Record prompts and their answers by a model loaded from `model_path`; returns the trace, which is in `folder`."""
    identity = fingerprint_of(model_path)
    planes = lookahead_planes(model_path, identity) if lookahead else 0
    header = TraceHeader(fingerprint=identity, dataset_hash=digest(prompts), settings={}, lookahead=planes)
    with TraceWriter(folder, header, hashed=read_hashed(model_path, identity)) as writer:
        progress(writer.num_requests)
        record_prompts(model, prompts, writer, progress=progress, max_new_tokens=max_new_tokens)
    return open_trace(folder)


def _profile_batch(model: PreTrainedModel, batch: Batch, recorder: RoutingRecorder) -> list[dict[str, np.ndarray]]:
    tokens: list[list[np.ndarray]] = [[] for _ in batch.prompts]
    experts: list[list[np.ndarray]] = [[] for _ in batch.prompts]
    ahead: list[list[np.ndarray]] = [[] for _ in batch.prompts]
    while not batch.done:
        ids, real = batch.inputs()
        step(model, batch, recorder.begin)
        routed, named, start = recorder.take(), recorder.take_ahead(), 0
        for i, count in enumerate(real.sum(dim=1).tolist()):
            tokens[i].append(ids[i][real[i]].numpy())
            experts[i].append(routed[start : start + count])
            ahead[i].append(named[start : start + count])
            start += count
    return [_request(*one) for one in zip(batch.prompts, tokens, experts, ahead, strict=True)]


def _request(
    prompt: Sequence[int], tokens: list[np.ndarray], experts: list[np.ndarray], ahead: list[np.ndarray]
) -> dict[str, np.ndarray]:
    token_ids, named = np.concatenate(tokens), np.concatenate(ahead)
    phase = np.where(np.arange(len(token_ids)) < len(prompt), PREFILL, DECODE)
    return {
        "prompt_ids": np.array(prompt),
        "token_ids": token_ids,
        "expert_ids": np.concatenate(experts),
        "phase": phase,
        **({"lookahead_ids": named} if named.shape[2] else {}),
    }
