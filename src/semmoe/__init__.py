"""Semantic parallelism for Mixture-of-Experts inference: place experts and schedule tokens together.

    prompts -> engine -> RoutingTrace -> predictors -> placement -> policies = Plan -> engine
               profile   split           solve                     replay, compare

Public names are loaded on first use, so that `import semmoe` stays light; neither torch nor an engine is imported
here or by any name below; `profile` imports them when it is called.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Fingerprint": "topology",
    "Placement": "core",
    "Plan": "core",
    "ProfileSettings": "settings",
    "ReplaySettings": "settings",
    "RoutingTrace": "core",
    "SolveSettings": "settings",
    "Topology": "topology",
    "compare": "solver",
    "load_plan": "plan",
    "open_trace": "traces.trace",
    "profile": "engines.transformers.profile",
    "replay": "evaluation.replay",
    "save_plan": "plan",
    "solve": "solver",
    "split": "traces.split",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'semmoe' has no attribute {name!r}")
    return getattr(import_module(f"semmoe.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
