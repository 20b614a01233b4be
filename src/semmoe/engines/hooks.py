"""Declarations of the places where an adaptor hooks into an engine, so that changes in a release are detected.

Each adaptor lists its `Hook`s in `semmoe.engines.<engine>.targets`, a module that imports no engine.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Hook:
    """A place in an engine that an adaptor wraps, replaces or calls."""

    target: str  # dotted path: package.module.Class.method
    purpose: str  # why it is hooked
    parameters: tuple[str, ...] = ()  # parameters that the target must have


# The function is called with the original before its arguments.
Replacement: TypeAlias = tuple[Hook, Callable[..., Any]]


def problem(hook: Hook) -> str | None:
    """Return None if `hook` resolves on the installed engine, else one line naming the missing part. Imports it."""
    try:
        target = pkgutil.resolve_name(hook.target)
        missing = _missing(target, hook.parameters)
    except Exception as error:  # an engine's import can raise anything
        return _line(f"{hook.target} ({hook.purpose}) does not resolve: {_cause(hook.target, error)}")
    if missing:
        return _line(f"{hook.target} ({hook.purpose}) has no parameter {', '.join(missing)}")
    return None


def check(hooks: Sequence[Hook]) -> None:
    """Raise RuntimeError naming every hook that does not fit the installed version."""
    problems = [line for hook in hooks if (line := problem(hook))]
    if problems:
        raise RuntimeError("; ".join(problems))


def cpu_patches(engine: str) -> Any:
    """The module that patches an engine's CPU back-end. Raises ValueError where it is not installed."""
    package = f"semmoe_{engine}_cpu"
    try:
        return importlib.import_module(f"{package}.patches")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(package):
            raise
        raise ValueError(
            f"on a CPU {engine} lacks what expert parallelism needs, and the patches for tests are not installed: "
            f"in a checkout of semmoe run `pip install ./engines/{engine}-cpu`"
        ) from None


def is_tried(version: str, tried: str) -> bool:
    """Whether `version` is the version `tried` that the tests run, ignoring its build."""
    return version.split("+")[0] == tried


def _missing(target: Any, names: tuple[str, ...]) -> list[str]:
    """The parameters among `names` that `target` lacks; *args and **kwargs do not provide any."""
    if not names:
        return []
    parameters = inspect.signature(target).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    present = {parameter.name for parameter in parameters if parameter.kind not in variadic}
    return [name for name in names if name not in present]


def _cause(target: str, error: Exception) -> str:
    """Why `target` does not resolve: `resolve_name` reports a module that fails to import as a missing attribute."""
    parts = target.replace(":", ".").split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if missing.name in (name, ".".join(parts[: end - 1])):
                break  # from here on it is attributes
            return f"{name}: {missing}{_origin(missing)}"
        except Exception as broken:
            return f"{name}: {type(broken).__name__}: {broken}{_origin(broken)}"
    return f"{type(error).__name__}: {error}"


def _origin(error: BaseException) -> str:
    """The first cause of a chained error, which lazy imports hide behind their own; "" if there is none."""
    first = error
    while first.__cause__ is not None:
        first = first.__cause__
    return "" if first is error else f" (from {type(first).__name__}: {first})"


def _line(text: str) -> str:
    return " ".join(text.split())
