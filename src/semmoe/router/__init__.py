"""An HTTP proxy that names the data-parallel rank of every request, for engines without the plug-in."""

from typing import Any


def __getattr__(name: str) -> Any:
    if name != "Scorer":
        raise AttributeError(f"module 'semmoe.router' has no attribute {name!r}")
    from semmoe.router.scorer import Scorer

    return Scorer
