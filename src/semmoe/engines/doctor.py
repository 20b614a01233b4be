"""Facts for `semmoe doctor`: installed versions, whether adaptors fit them, and the plans they serve for a model."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
from dataclasses import dataclass, field
from pathlib import Path

from semmoe.checkpoint.directory import EXPERT_FIELDS, config_count, read_config
from semmoe.engines import support
from semmoe.engines.hooks import is_tried, problem

ENGINES = ("sglang", "vllm", "deepspeed", "transformers")
PACKAGES = ("semmoe", "torch", "transformers", "triton", "sglang", "vllm", "deepspeed")


@dataclass(frozen=True, kw_only=True)
class HookState:
    target: str
    purpose: str
    problem: str | None


@dataclass(frozen=True, kw_only=True)
class EngineState:
    """An engine: its version, its adaptor's hooks, and what keeps it from being used (`problems`)."""

    engine: str
    version: str | None
    hooks: list[HookState] = field(default_factory=list)
    note: str = ""
    tried: str = ""  # the version that the adaptor was tested with, if it is not the installed one
    problems: list[str] = field(default_factory=list)


def versions() -> dict[str, str | None]:
    """Installed versions from packages' metadata; nothing is imported. None: not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def examine(engine: str, version: str | None, needed: bool) -> EngineState:
    """Resolve an adaptor's hooks on the installed engine. `needed`: the user asked for this engine."""
    if version is None:
        problems = [f"{engine} is not installed"] * needed
        return EngineState(engine=engine, version=None, note="not installed", problems=problems)
    _stand_in_for_missing_device(engine)
    # Output that an engine prints while it is imported must not mix with ours.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            targets = importlib.import_module(f"semmoe.engines.{engine}.targets")
            hooks = [HookState(target=h.target, purpose=h.purpose, problem=problem(h)) for h in targets.HOOKS]
        except Exception as error:
            text = " ".join(f"the adaptor of {engine} is broken: {error!r}".split())
            return EngineState(engine=engine, version=version, note=text, problems=[text])
    failures = [hook.problem for hook in hooks if hook.problem]
    stated = getattr(targets, "TRIED", "")
    tried = "" if is_tried(version, stated) else stated
    return EngineState(engine=engine, version=version, hooks=hooks, problems=failures, tried=tried)


def _stand_in_for_missing_device(engine: str) -> None:
    """Set SGLang to run on the CPU, before it is imported, if this machine has no device that it could use."""
    if engine == "sglang" and importlib.util.find_spec("torch") is not None:
        import torch

        if not torch.accelerator.is_available():
            os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


def supported(model: Path, engines: tuple[str, ...]) -> list[dict[str, str]]:
    """The rows of the table of supported features that a model directory's configuration is about; no weights."""
    config = read_config(model)
    return [
        {"engine": engine, "use": use, "state": state, "note": _remedied(note, model)}
        for engine in engines
        if engine in support.FAMILIES
        for use, state, note in support.uses(engine, config)
    ]


def _remedied(note: str, model: Path) -> str:
    """The note, which recommends `semmoe apply` only if it can relabel the model: its headers are read only then."""
    return note.replace(support.INSTEAD, _instead(model)) if support.INSTEAD in note else note


def _instead(model: Path) -> str:
    """What to do where an engine serves no plan: `semmoe apply` if it can relabel this model, else why it cannot."""
    from semmoe.checkpoint.relabel import check_relabels

    try:
        if importlib.util.find_spec("transformers") is not None:
            from semmoe.engines.transformers.config import fingerprint_of

            experts = fingerprint_of(str(model)).num_experts
        else:
            experts = config_count(read_config(model), *EXPERT_FIELDS)
        check_relabels(model, experts)
    except (ValueError, OSError) as error:
        return f"`semmoe apply` cannot relabel it either: {error}"
    return support.INSTEAD
