"""Install hooks in vLLM, which lacks a registry of hooks, by replacing functions where they are defined."""

import functools
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from typing import Any

from semmoe.engines.hooks import Hook, Replacement, check


def around(hook: Hook, function: Callable[..., Any]) -> None:
    """Replace a function, method, static method or property by `function(original, *args, **kwargs)`."""
    path, name = hook.target.rsplit(".", 1)
    parent = pkgutil.resolve_name(path)
    target = inspect.getattr_static(parent, name)
    if getattr(target, "hooked_by", None) is function:
        return  # already hooked: engines may be started one after another in a process
    if isinstance(target, property):
        setattr(parent, name, property(_wrapped(target.fget, function)))
    elif isinstance(target, staticmethod):
        setattr(parent, name, staticmethod(_wrapped(target.__func__, function)))
    else:
        setattr(parent, name, _wrapped(target, function))


def add(hook: Hook, name: str, function: Callable[..., Any]) -> None:
    """Give the hook's target, a class, one more method."""
    setattr(pkgutil.resolve_name(hook.target), name, function)


def _wrapped(original: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    call.hooked_by = function  # type: ignore[attr-defined]
    return call


def install(replacements: Sequence[Replacement], relied_on: Sequence[Hook]) -> None:
    """Replace the targets of hooks; raise RuntimeError naming every one that does not fit this vLLM.

    relied_on: further places that must be as semmoe knows them.
    """
    check([*(hook for hook, _ in replacements), *relied_on])
    for hook, function in replacements:
        around(hook, function)
