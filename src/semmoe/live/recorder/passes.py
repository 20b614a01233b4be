"""Pass the routing of a rank's forward passes to the live recorder."""

from collections.abc import Sequence

import numpy as np
import torch

from semmoe.engines.step import Pass, Step
from semmoe.live.recorder.memory import Rows
from semmoe.live.recorder.recorder import LiveRecorder
from semmoe.runtime import kernels

UNSEEN = -1  # in place of expert ids that no hook has written


class PassRecorder:
    """Collects the routing of a forward pass layer by layer, on one rank of each attention group.

    buffer (rows, L, K) on the device, if given: hooks write to it in every pass, recorded or not. So a captured graph
    also writes the routing of the passes that replay it without hooks. A pass with more rows is not recorded.
    """

    def __init__(self, recorder: LiveRecorder, num_layers: int, buffer: torch.Tensor | None = None) -> None:
        self._recorder, self._buffer = recorder, buffer
        self._num_layers = num_layers
        self._step: Step | None = None
        self.waiting: Step | None = None  # the pass that has ended and is not yet passed on by `tell`
        self._routed: dict[int, np.ndarray] = {}  # by MoE layer, (N, K)

    @property
    def recording(self) -> bool:
        """Whether the current pass is recorded."""
        return self._step is not None

    @property
    def hooked(self) -> bool:
        """Whether hooks must tell the routing of the current pass."""
        return self._buffer is not None or self.recording

    def begin(self, this: Pass) -> None:
        step = this.step if self._recorder.recording else None
        self._step = step if step is not None and step.num_tokens and not step.guesses else None
        if self._buffer is not None and self._step is not None:
            self._buffer.fill_(UNSEEN)  # so that a pass that writes no routing does not leave the previous pass's
        self._routed, self.waiting = {}, None

    def observe(
        self, layer: int, expert_ids: torch.Tensor, weights: torch.Tensor, logical: torch.Tensor | None = None
    ) -> None:
        """Record a MoE layer from ids (n, K) and weights (n, K) of rows in the tokens' order, padding last.

        logical (P,): the expert of each physical one, if ids are physical.
        """
        if self.hooked:
            self.put(layer, kernels.of(expert_ids.device).by_weight(expert_ids, weights, torch.int32, logical))

    def put(self, layer: int, expert_ids: torch.Tensor) -> None:
        """Record a MoE layer from logical ids (N, K) by falling weight."""
        if self._buffer is not None:
            rows = expert_ids[: len(self._buffer)]
            self._buffer[: len(rows), layer] = rows
        elif self._step is not None:
            self._routed[layer] = expert_ids[: self._step.num_tokens].cpu().numpy()

    def end(self) -> None:
        """End the pass; its rows wait for `tell`."""
        step, self._step = self._step, None
        if self._buffer is not None and step is not None and step.num_tokens <= len(self._buffer):
            routed = self._buffer[: step.num_tokens].cpu().numpy()
            self._routed = dict(enumerate(routed.swapaxes(0, 1)))
        complete = len(self._routed) == self._num_layers
        unseen = any(ids.min(initial=0) == UNSEEN for ids in self._routed.values())
        self.waiting = step if complete and not unseen else None

    def tell(self, kept: np.ndarray | slice) -> None:
        """Pass on the rows of the ended pass that are `kept`, a mask (N,), which excludes rejected draft tokens."""
        step, self.waiting = self.waiting, None
        if step is not None:
            routed = np.stack([self._routed[layer] for layer in range(self._num_layers)], axis=1)
            rows = Rows(step.rows, step.positions, step.token_ids, routed)
            self._recorder.observe(step.requests, rows.where(kept))

    def finish(self, request: str, prompt_ids: Sequence[int], length: int) -> None:
        """Report that a request ended after `length` of its tokens were fed to the model."""
        self._recorder.finish(request, prompt_ids, length)
