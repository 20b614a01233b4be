"""Read a directory for a report. Files are recognised by what they hold, and nothing in them is trusted."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from semmoe.checkpoint.relabel import plan_digest
from semmoe.core import Plan, RoutingTrace
from semmoe.plan import load_plan
from semmoe.results import (
    AffinityFile,
    DemoFile,
    Expected,
    GenerateFile,
    Labels,
    Part,
    ReplayFile,
    ServingSweep,
    parts,
    serving_sweep,
)
from semmoe.trace import open_trace, shard_paths

MOST_ENTRIES = 500  # files and directories in the directory
MOST_PLANS = 8
MOST_JSON = 32 << 20  # bytes of a JSON or text file
MOST_TRACE = 1 << 30  # bytes of a trace


@dataclass(frozen=True)
class Source:
    """A file or directory that was read."""

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
    path: str
    plan: Plan
    digest: str  # the plan hash that `semmoe apply` and relabelled checkpoints record
    expected: Expected | None  # validated; None if the plan holds none


@dataclass(frozen=True)
class Measured:
    """Configurations that ran together. facts: workload and machine, where the file names them."""

    path: str
    rows: list[GenerateFile]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    path: str
    part: Part
    sweep: ServingSweep


@dataclass(frozen=True)
class TraceFile:
    path: str
    trace: RoutingTrace
    digest: str


@dataclass(kw_only=True)
class Inputs:
    """Everything that was found, in the order of file names."""

    folder: Path
    plans: list[PlanFile] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    replays: list[tuple[str, ReplayFile]] = field(default_factory=list)
    affinities: list[tuple[str, AffinityFile]] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    traces: list[TraceFile] = field(default_factory=list)
    domains: list[str] | None = None
    sources: list[Source] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)


def is_plan(path: Path) -> bool:
    return (path / "plan.json").is_file() and (path / "plan.safetensors").is_file()


def gather(folder: Path, page: Path | None = None) -> Inputs:
    """Read `folder`: a plan directory, or one that holds plans and measurements. `page`, the report, is not read.

    Raises ValueError if no plan can be read.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: there is no such directory")
    inputs = Inputs(folder=folder)
    for path in _entries(folder, inputs):
        if page is None or path.resolve() != page.resolve():
            _read(path, inputs)
    if not inputs.plans:
        unread = [entry for entry in inputs.left_out if "plan" in entry.path or is_plan(folder / entry.path)]
        reasons = [f"{entry.path} ({entry.why})" for entry in unread]
        also = f"; left out: {', '.join(reasons[:3])}" if reasons else ""
        raise ValueError(f"{folder} holds no plan: make one with `semmoe solve TRACE --out {folder}/plan`{also}")
    return inputs


def _entries(folder: Path, inputs: Inputs) -> list[Path]:
    if is_plan(folder):
        return [folder, *sorted(p for p in folder.iterdir() if p.name not in ("plan.json", "plan.safetensors"))]
    found = sorted(folder.iterdir())
    if len(found) > MOST_ENTRIES:
        inputs.left_out.append(LeftOut(f"{len(found) - MOST_ENTRIES} more", f"only {MOST_ENTRIES} entries are read"))
    return found[:MOST_ENTRIES]


def _read(path: Path, inputs: Inputs) -> None:
    """Add one entry; an error becomes the reason why the entry is left out."""
    shown = path.resolve().name
    try:
        if path.is_dir():
            _read_directory(path, shown, inputs)
        elif path.suffix == ".npz":
            _add_trace(path, shown, path.stat().st_size, inputs)
        elif path.suffix in (".json", ".txt"):
            _read_text(path, shown, inputs)
        else:
            raise ValueError("not a kind of file that a report reads")
    except (ValueError, OSError, RecursionError) as error:
        why = str(error) or type(error).__name__
        inputs.left_out.append(LeftOut(shown, why.replace(f"{inputs.folder}/", "")[:300]))


def _read_directory(path: Path, shown: str, inputs: Inputs) -> None:
    if (path / "plan.json").exists() or (path / "plan.safetensors").exists():
        if len(inputs.plans) >= MOST_PLANS:
            raise ValueError(f"only {MOST_PLANS} plans are shown")
        _add_plan(path, shown, inputs)
    elif (path / "trace.json").exists():
        _add_trace(path, shown, sum(shard.stat().st_size for shard in shard_paths(path)), inputs)
    else:
        raise ValueError("neither a plan nor a trace directory")


def _add_plan(path: Path, shown: str, inputs: Inputs) -> None:
    if (path / "plan.json").exists():
        _bounded(path / "plan.json")
    plan = load_plan(path)
    expected = None
    if plan.expected is not None:
        try:
            expected = Expected.model_validate(plan.expected)
            ranks = {len(figures.bytes_per_rank_pair) for figures in (expected, *expected.others.values())}
            if not ranks <= {0, plan.topology.ep_size}:
                raise ValueError("its figures are for another number of ranks")
        except ValueError as error:  # a ValidationError is one
            why = f"its expected figures cannot be read: {_first(error)}"
            inputs.left_out.append(LeftOut(f"{shown}/plan.json", why))
            expected = None
    inputs.plans.append(PlanFile(path=shown, plan=plan, digest=plan_digest(path), expected=expected))


def _add_trace(path: Path, shown: str, size: int, inputs: Inputs) -> None:
    if size > MOST_TRACE:
        raise ValueError(f"a trace of {size:,} bytes: at most {MOST_TRACE:,} are read for a report")
    trace = open_trace(path)
    if trace.num_tokens <= 0:
        raise ValueError("a trace without a routed token")
    inputs.traces.append(TraceFile(shown, trace, trace.digest()))
    facts = {"requests": trace.num_requests, "routed tokens": trace.num_tokens, "hash": inputs.traces[-1].digest}
    inputs.sources.append(Source(shown, "trace", facts))


def _bounded(path: Path) -> None:
    size = path.stat().st_size
    if size > MOST_JSON:
        raise ValueError(f"{path.name} has {size:,} bytes: at most {MOST_JSON:,} are read")


def _read_text(path: Path, shown: str, inputs: Inputs) -> None:
    _bounded(path)
    data = _whole_json(path) if path.suffix == ".json" else None
    if path.name == "domains.json":
        inputs.domains = _checked(Labels, data)
        inputs.sources.append(Source(shown, "kinds of requests", {"requests": len(inputs.domains)}))
    elif isinstance(data, dict) and _add_record(shown, data, inputs):
        pass
    elif not _add_parts(path, shown, inputs):
        raise ValueError("holds no measurement that a report can show")


def _whole_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except UnicodeDecodeError:
        raise ValueError("not text") from None
    except ValueError as error:
        if path.read_bytes().lstrip()[:2] in (b"$ ", b""):
            return None  # the printed output of a benchmark
        raise ValueError(f"not valid JSON: {error}") from None


def _add_record(shown: str, data: dict[str, Any], inputs: Inputs) -> bool:
    """Add a file that a command's --json wrote; False if it is no such file."""
    if "set_ups" in data:
        demo = _checked(DemoFile, data)
        sizes = {"prompts": demo.prompts, "profiled tokens": demo.profile_tokens, "machine": demo.machine}
        facts = {**demo.settings, **sizes, **demo.versions}
        inputs.measured.append(Measured(shown, demo.set_ups, {k: v for k, v in facts.items() if v != ""}))
        inputs.sources.append(Source(shown, "semmoe demo --json", inputs.measured[-1].facts))
    elif {"name", "sent_bytes"} <= data.keys():
        inputs.measured.append(Measured(shown, [_checked(GenerateFile, data)], {}))
        inputs.sources.append(Source(shown, "semmoe generate --json", {"configuration": data["name"]}))
    elif {"settings", "methods"} <= data.keys():
        inputs.replays.append((shown, _checked(ReplayFile, data)))
        inputs.sources.append(Source(shown, "semmoe replay --json", inputs.replays[-1][1].settings))
    elif {"trace", "concentration"} <= data.keys():
        inputs.affinities.append((shown, _checked(AffinityFile, data)))
        inputs.sources.append(Source(shown, "semmoe affinity --json", inputs.affinities[-1][1].trace))
    else:
        return _add_sweep(shown, Part(Path(shown), "", "", data), inputs)
    return True


def _add_parts(path: Path, shown: str, inputs: Inputs) -> bool:
    try:
        found = list(parts(path))
    except UnicodeDecodeError:
        raise ValueError("not text") from None
    known = [_add_sweep(shown, part, inputs) for part in found]
    if any(known) and not all(known):
        others = len(known) - sum(known)
        inputs.left_out.append(LeftOut(shown, f"{others} of its {len(known)} parts are benchmarks without a sweep"))
    return any(known)


def _add_sweep(shown: str, part: Part, inputs: Inputs) -> bool:
    sweep = serving_sweep(part)
    if sweep is None:
        return False
    if len(sweep.visits) > 1000 or not sweep.sweeps:
        raise ValueError(f"a sweep of {len(sweep.visits)} visits, not of 1 to 1,000")
    inputs.sweeps.append(Sweep(shown, part, sweep))
    facts = {"command": part.command, "measured on": part.described}
    inputs.sources.append(Source(shown, "serving sweep", {k: v for k, v in facts.items() if v}))
    return True


def _checked(kind: Any, data: Any) -> Any:
    try:
        return TypeAdapter(kind).validate_python(data)
    except ValidationError as error:
        raise ValueError(f"damaged: {_first(error)}") from None


def _first(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc'])) or 'file'}: {first['msg']}"
