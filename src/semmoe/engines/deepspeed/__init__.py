"""Speculative MoE on DeepSpeed's AutoEP, after `deepspeed.initialize` has converted a model.

    engine, *_ = deepspeed.initialize(model=model, config=config_for(plan, model.config))
    planned = apply_plan(engine, plan)

Importing this imports neither DeepSpeed nor torch.
"""

import importlib
from typing import Any

_FOUND_IN = {"apply_plan": "model", "config_for": "config"}
__all__ = ["apply_plan", "config_for"]


def __getattr__(name: str) -> Any:
    if name not in _FOUND_IN:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FOUND_IN[name]}"), name)
