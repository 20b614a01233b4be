"""Profile a model that AutoEP has converted: record which experts each token chose from its routers."""

from typing import Any

import torch
from transformers import PreTrainedModel

from semmoe.engines.deepspeed.model import autoep_layers
from semmoe.engines.transformers.recorder import RoutingRecorder


class AutoEPRecorder(RoutingRecorder):
    """A recorder for `record_prompts(engine.module, prompts, writer, recorder_of=AutoEPRecorder)`, without a plan.

    All ranks run the same prompts, since all must take part in every all-to-all; each then has the whole trace, and the
    caller decides which one writes it.
    """

    def attach(self, model: PreTrainedModel) -> list[Any]:
        layers = autoep_layers(model)
        if hasattr(layers[0], "_semmoe"):
            raise ValueError("routing is recorded before a plan is applied")
        return [layer.router.register_forward_hook(self._routed) for layer in layers]

    def _routed(self, module: torch.nn.Module, args: tuple, out: tuple) -> None:
        weights, expert_ids, _ = out
        self.keep(expert_ids, weights)
