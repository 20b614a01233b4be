"""Read a directory for a report. Files are recognized by their contents, and nothing in them is trusted."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from semmoe.checkpoint.relabel import plan_digest
from semmoe.core import Plan
from semmoe.evaluation.results import DemoFile, Expected, GenerateFile, ReplayFile
from semmoe.io.files import parse_json, read_limited
from semmoe.plan import load_plan

MAX_ENTRIES = 500  # files and directories that are read of a directory
MAX_PLANS = 8
MAX_JSON_BYTES = 32 << 20
PLAN_FILES = ("plan.json", "plan.safetensors")


@dataclass(frozen=True)
class Source:
    """A file that was read."""

    path: str  # relative to the directory
    what: str
    facts: dict[str, Any]


@dataclass(frozen=True)
class LeftOut:
    """A file or directory that was not used, and the reason."""

    path: str
    why: str


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A plan and the figures that it expects."""

    path: str
    plan: Plan
    digest: str  # the plan hash that `semmoe apply` and relabelled checkpoints record
    expected: Expected | None  # validated; None if the plan holds none


@dataclass(kw_only=True)
class Inputs:
    """Everything in a directory that a report can use, in the order of file names."""

    folder: Path
    plans: list[PlanFile] = field(default_factory=list)
    runs: list[tuple[str, list[GenerateFile]]] = field(default_factory=list)  # configurations that ran together
    demos: list[tuple[str, DemoFile]] = field(default_factory=list)  # those that say where a plan pays
    replays: list[tuple[str, ReplayFile]] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def is_plan(path: Path) -> bool:
    """Whether a directory holds both files of a plan."""
    return all((path / name).is_file() for name in PLAN_FILES)


def gather(folder: Path, page: Path | None = None) -> Inputs:
    """Read `folder`: a plan directory, or one that holds plans and measurements. `page`, the report, is not read.

    Raises ValueError if no plan can be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a directory")
    inputs = Inputs(folder=folder)
    for path in _entries(folder, inputs):
        if page is None or path.resolve() != page.resolve():
            _read(path, inputs)
    if not inputs.plans:
        raise ValueError(_no_plan(inputs))
    return inputs


def _no_plan(inputs: Inputs) -> str:
    unread = [entry for entry in inputs.left_out if "plan" in entry.path or is_plan(inputs.folder / entry.path)]
    reasons = ", ".join(f"{entry.path} ({entry.why})" for entry in unread[:3])
    also = f"; left out: {reasons}" if reasons else ""
    return f"{inputs.folder} holds no plan: make one with `semmoe solve TRACE --out {inputs.folder}/plan`{also}"


def _entries(folder: Path, inputs: Inputs) -> list[Path]:
    if is_plan(folder):
        return [folder, *sorted(path for path in folder.iterdir() if path.name not in PLAN_FILES)]
    entries = sorted(folder.iterdir())
    if len(entries) > MAX_ENTRIES:
        inputs.left_out.append(LeftOut(f"{len(entries) - MAX_ENTRIES} more", f"only {MAX_ENTRIES} entries are read"))
    return entries[:MAX_ENTRIES]


def _read(path: Path, inputs: Inputs) -> None:
    """Add one entry; an error becomes the reason why the entry is left out."""
    shown = path.resolve().name
    try:
        if any((path / name).exists() for name in PLAN_FILES):
            _add_plan(path, shown, inputs)
        elif path.suffix == ".json":
            _add_measurement(path, shown, inputs)
        elif path.suffix == ".npz" or (path / "trace.json").exists():
            raise ValueError("a trace: a report reads no traces")
        else:
            raise ValueError("not a kind of file that a report reads")
    except (ValueError, OSError, RecursionError) as error:
        why = str(error) or type(error).__name__
        inputs.left_out.append(LeftOut(shown, why.replace(f"{inputs.folder}/", "")[:300]))


def _add_plan(path: Path, shown: str, inputs: Inputs) -> None:
    if len(inputs.plans) >= MAX_PLANS:
        raise ValueError(f"only {MAX_PLANS} plans are shown")
    plan = load_plan(path)
    expected = None
    try:
        expected = _expected(plan, path / "plan.json")
    except ValueError as error:
        why = f"its expected figures cannot be read: {error}"
        inputs.left_out.append(LeftOut(f"{shown}/plan.json", why))
    inputs.plans.append(PlanFile(path=shown, plan=plan, digest=plan_digest(path), expected=expected))


def _expected(plan: Plan, path: Path) -> Expected | None:
    """The figures that a plan expects. Raises ValueError if they are damaged or of another number of ranks."""
    if plan.expected is None:
        return None
    expected = parse_json(path, json.dumps(plan.expected).encode(), Expected)
    loads = [layer.load_per_rank for side in (expected, *expected.others.values()) for layer in side.layers]
    if not {len(load) for load in loads} <= {0, plan.topology.ep_size}:
        raise ValueError("its figures are for another number of ranks")
    return expected


def _add_measurement(path: Path, shown: str, inputs: Inputs) -> None:
    """Add the JSON of a command."""
    content = bytes(read_limited(path, MAX_JSON_BYTES))
    keys = _keys(content)
    if "set_ups" in keys:
        demo = parse_json(path, content, DemoFile)
        inputs.runs.append((shown, demo.set_ups))
        inputs.demos += [(shown, demo)] if demo.payoffs else []
        sizes = {"prompts": demo.prompts, "profiled tokens": demo.profile_tokens, "machine": demo.machine}
        facts = {**demo.settings, **sizes, **demo.versions}
        stated = {key: value for key, value in facts.items() if value != ""}
        inputs.sources.append(Source(shown, "semmoe demo --json", stated))
    elif {"name", "sent_bytes"} <= keys:
        run = parse_json(path, content, GenerateFile)
        inputs.runs.append((shown, [run]))
        inputs.sources.append(Source(shown, "semmoe generate --json", {"configuration": run.name}))
    elif {"settings", "methods"} <= keys:
        replay = parse_json(path, content, ReplayFile)
        inputs.replays.append((shown, replay))
        inputs.sources.append(Source(shown, "semmoe replay --json", replay.settings))
    else:
        raise ValueError("holds no measurement that a report shows")


def _keys(content: bytes) -> set[str]:
    """The names in an object of JSON; none of other JSON."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise ValueError(f"not valid JSON: {error}") from None
    return set(value) if isinstance(value, dict) else set()
