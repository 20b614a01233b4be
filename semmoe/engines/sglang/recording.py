"""What a rank's forward passes routed, handed to the live recorder row by row."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from semmoe.engines.recorder import LiveRecorder
from semmoe.engines.sglang.step import Step


class PassRecorder:
    """Gathers a forward pass layer by layer; on one rank of each attention group.

    layers: the place of each decoder layer among the MoE layers.
    """

    def __init__(self, recorder: LiveRecorder, layers: dict[int, int]) -> None:
        self._recorder, self._layers = recorder, layers
        self._step: Step | None = None
        self._routed: dict[int, np.ndarray] = {}  # by MoE layer, (N, K)

    @property
    def recording(self) -> bool:
        """Whether this pass is."""
        return self._step is not None

    def begin(self, forward_batch: Any, read: Callable[[], Step]) -> None:
        step = read() if self._recorder.poll() else None
        self._step = step if step is not None and step.num_tokens else None
        self._routed = {}

    def observe(self, layer_id: int, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Logical ids (n, K) and weights of rows in the tokens' order, padding last."""
        if self._step is not None:
            order = weights.argsort(dim=1, descending=True, stable=True)
            self.put(self._layers[layer_id], torch.gather(expert_ids, 1, order))

    def put(self, layer: int, expert_ids: torch.Tensor) -> None:
        """Of a MoE layer, (N, K) by falling weight."""
        if self._step is not None:
            self._routed[layer] = expert_ids[: self._step.num_tokens].cpu().numpy()

    def end(self) -> None:
        step, self._step = self._step, None
        if step is not None and len(self._routed) == len(self._layers):
            routed = np.stack([self._routed[layer] for layer in range(len(self._layers))], axis=1)
            self._recorder.observe(step.requests, step.rows, step.positions, step.token_ids, routed)

    def release(self, original: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Around SGLang's release of a request's cache, at its end and where it is preempted."""
        if self._recorder.recording and req.finished():
            length = len(req.origin_input_ids) + len(req.output_ids) - 1
            self._recorder.finish(req.rid, req.origin_input_ids, length)
        return original(req, *args, **kwargs)
