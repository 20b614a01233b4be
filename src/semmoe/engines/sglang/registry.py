"""Hooks registered with SGLang and proven to have taken: SGLang logs a plug-in's failure and goes on without it."""

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from semmoe.engines.hooks import Hook, problem


def around(hook: Hook, function: Callable[..., Any]) -> None:
    """`function(original, *args, **kwargs)` in place of the target."""
    HookRegistry.register(hook.target, function, HookType.AROUND)


def prove(hooks: Sequence[Hook]) -> None:
    """Apply what is registered; raise RuntimeError naming every hook that does not fit or did not take."""
    problems = [line for hook in hooks if (line := problem(hook))]
    if not problems:
        HookRegistry.apply_hooks()
        problems = [f"{hook.target} was not replaced" for hook in hooks if hook.target not in HookRegistry._patched]
    if problems:
        raise RuntimeError("; ".join(problems))
