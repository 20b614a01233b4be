"""Semantic parallelism for Mixture-of-Experts inference: place experts and schedule tokens together.

    prompts -> engine -> RoutingTrace -> Affinity -> Placement + Schedule = Plan -> engine

Public names are loaded on first use, so that `import semmoe` stays light; neither torch nor an engine is imported
here or by any name below. The two verbs share their names with their modules: `from semmoe.solve import solve`,
`from semmoe.replay import replay`.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    "Affinity": "core",
    "CoClustering": "core",
    "Fingerprint": "core",
    "Placement": "core",
    "Plan": "core",
    "RoutingTrace": "core",
    "RequestTable": "core",
    "Schedule": "core",
    "ShuffleTables": "core",
    "Topology": "core",
    "build_affinity": "affinity",
    "build_schedule": "schedule",
    "load_plan": "plan",
    "open_trace": "trace",
    "save_plan": "plan",
}
__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'semmoe' has no attribute {name!r}")
    return getattr(import_module(f"semmoe.{_PUBLIC[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
