"""Register hooks with SGLang and verify that they are installed, since SGLang logs a failed plug-in and continues."""

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from semmoe.engines.hooks import Hook, problem


def around(hook: Hook, function: Callable[..., Any]) -> None:
    """Replace the hook's target by `function(original, *args, **kwargs)`."""
    HookRegistry.register(hook.target, function, HookType.AROUND)


def prove(hooks: Sequence[Hook]) -> None:
    """Apply the registered hooks; raise RuntimeError naming every hook that does not fit or was not installed."""
    problems = [line for hook in hooks if (line := problem(hook))]
    if not problems:
        HookRegistry.apply_hooks()
        problems = [f"{hook.target} was not replaced" for hook in hooks if hook.target not in HookRegistry._patched]
    if problems:
        raise RuntimeError("; ".join(problems))
