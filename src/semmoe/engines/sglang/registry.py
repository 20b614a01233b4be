"""Install hooks with SGLang and verify that it did, since SGLang logs a failed plug-in and continues."""

from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from semmoe.engines.hooks import Hook, Replacement, check


def around(hook: Hook, function: Callable[..., Any]) -> None:
    """Register that the hook's target is replaced by `function(original, *args, **kwargs)`."""
    HookRegistry.register(hook.target, function, HookType.AROUND)


def install(replacements: Sequence[Replacement], registered: Sequence[Hook]) -> None:
    """Replace the targets of hooks; raise RuntimeError naming every one that is not replaced.

    registered: further hooks, of which SGLang knows already.
    """
    hooks = [*(hook for hook, _ in replacements), *registered]
    check(hooks)
    for hook, function in replacements:
        around(hook, function)
    HookRegistry.apply_hooks()
    lost = [f"{hook.target} was not replaced" for hook in hooks if hook.target not in HookRegistry._patched]
    if lost:
        raise RuntimeError("; ".join(lost))
