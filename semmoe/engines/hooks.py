"""Hooks into an engine, and whether they still fit it."""

import inspect
import pkgutil
from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """A function of an engine that an adaptor wraps."""

    target: str  # dotted path
    purpose: str
    parameters: tuple[str, ...] = ()  # that the target must have


def problem(hook: Hook) -> str | None:
    """None if the hook fits, or one line that names what moved."""
    try:
        found = pkgutil.resolve_name(hook.target)
        missing = [name for name in hook.parameters if name not in inspect.signature(found).parameters]
    except Exception as error:  # whatever an engine's import may raise
        return f"{hook.target} ({hook.purpose}): {type(error).__name__}: {error}"
    return f"{hook.target} ({hook.purpose}) has no parameter {', '.join(missing)}" if missing else None
