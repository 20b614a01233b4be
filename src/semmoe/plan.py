"""Save and load plans: a directory with `plan.json`, for people and checks, and `plan.safetensors`, for all arrays."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from semmoe.core import Placement, Plan
from semmoe.io.bounds import Declared, array_names, check_shape, number_types
from semmoe.io.files import atomic_directory, check_output, load_arrays, load_json, read_object, save_arrays, save_json
from semmoe.paper.policies import PaperTable, PaperTables
from semmoe.requests.policy import PromptScores, RoundRobin
from semmoe.tokens.slices import ByPosition, PathScores
from semmoe.topology import Fingerprint, Topology

SCHEMA = 3
MOST_REQUESTS = 1 << 24  # profiled requests whose hashes a plan may hold
FILES = {"plan.json", "plan.safetensors"}
TOKENS = {kind.kind: kind for kind in (ByPosition, PathScores, PaperTables)}
REQUESTS = {kind.kind: kind for kind in (RoundRobin, PromptScores, PaperTable)}
KINDS: dict[str, dict[str, Any]] = {"tokens": TOKENS, "requests": REQUESTS}


class PlanHeader(BaseModel):
    """`plan.json`. No timings and no dates: the same input and seed give the same bytes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    schema_version: int = SCHEMA
    method: str
    topology: Topology
    fingerprint: Fingerprint
    tokens: dict[str, Any]  # the token policy's kind and its numbers
    requests: dict[str, Any]  # the request policy's kind and its numbers
    static_dispatch: bool
    fixed_copies: bool = False
    copy_choice: str
    shuffle_from: int
    profiled_requests: bool
    settings: dict[str, Any]
    trace_hash: str
    expected: dict[str, Any] | None


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write `plan` as a directory, atomically; an older plan at `path` is replaced."""
    path = Path(path)
    check_plan_output(path, force=True)
    arrays = {"physical_to_logical_map": plan.placement.physical_to_logical_map}
    optional = {name: getattr(plan.placement, name) for name in ("static_dispatch", "fixed_copies")}
    optional["profiled_requests"] = plan.profiled_requests
    arrays |= {name: array for name, array in optional.items() if array is not None}
    stated: dict[str, Any] = {name: array is not None for name, array in optional.items()}
    for what in KINDS:
        policy = getattr(plan, what)
        arrays |= {f"{what}.{name}": getattr(policy, name) for name in array_names(type(policy))}
        stated[what] = {name: getattr(policy, name) for name in ("kind", *number_types(type(policy)))}
    header = PlanHeader(
        method=plan.method,
        topology=plan.topology,
        fingerprint=plan.fingerprint,
        settings=plan.settings,
        **stated,
        copy_choice=plan.placement.copy_choice,
        shuffle_from=plan.shuffle_from,
        trace_hash=plan.trace_hash,
        expected=plan.expected,
    )
    with atomic_directory(path) as staged:
        save_json(staged / "plan.json", header)
        save_arrays(staged / "plan.safetensors", arrays)


def check_plan_output(path: Path, force: bool, inputs: Iterable[Path | str | None] = ()) -> None:
    """Raise an error, before the work of solving, unless a plan can be written to `path`; only a plan is replaced."""
    others = sorted(p.name for p in path.iterdir() if p.name not in FILES) if path.is_dir() else []
    if others:
        raise ValueError(f"{path} holds other files than a plan's ({', '.join(others[:3])}): choose another name")
    check_output(path, directory=True, force=force, inputs=inputs)


def load_plan(path: Path | str) -> Plan:
    """Read and validate a plan directory. Every shape and index is checked, since plans may come from elsewhere."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"no plan at {path}")
    _check_version(path)
    header = load_json(path / "plan.json", PlanHeader)
    try:
        kinds = {what: _kind(what, getattr(header, what)) for what in KINDS}
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    names = {f"{what}.{name}" for what, kind in kinds.items() for name in array_names(kind)}
    names |= {"physical_to_logical_map"}
    names |= {name for name in ("static_dispatch", "fixed_copies", "profiled_requests") if getattr(header, name)}
    arrays = load_arrays(path / "plan.safetensors", names)
    try:
        return _plan(header, kinds, arrays)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _check_version(path: Path) -> None:
    """Raise ValueError for a plan of another schema version; the message says how to make it again."""
    try:
        version = read_object(path / "plan.json")["schema_version"]
    except (OSError, ValueError, KeyError):
        return  # load_json names the fault
    if version != SCHEMA:
        raise ValueError(
            f"{path} has schema version {version}, and this semmoe reads {SCHEMA}: make it again with `semmoe solve`"
        )


def _plan(header: PlanHeader, kinds: dict[str, Any], arrays: dict[str, np.ndarray]) -> Plan:
    topology, f = header.topology, header.fingerprint
    policies: dict[str, Any] = {}
    declared: dict[str, Declared] = {}
    for what, kind in kinds.items():
        stated = getattr(header, what)
        fields: dict[str, Any] = {name: arrays[f"{what}.{name}"] for name in array_names(kind)}
        fields |= {name: stated[name] for name in number_types(kind)}
        policies[what] = kind(**fields)
        declared |= {f"{what}.{name}": one for name, one in policies[what].declared(topology, f).items()}
    _check_arrays(arrays, declared, header)
    placement = Placement(
        physical_to_logical_map=arrays["physical_to_logical_map"],
        num_experts=f.num_experts,
        ep_size=topology.ep_size,
        static_dispatch=arrays.get("static_dispatch"),
        fixed_copies=arrays.get("fixed_copies"),
        copy_choice=header.copy_choice,
    )
    return Plan(
        topology=topology,
        placement=placement,
        **policies,
        fingerprint=f,
        method=header.method,
        settings=header.settings,
        trace_hash=header.trace_hash,
        expected=header.expected,
        profiled_requests=arrays.get("profiled_requests"),
        shuffle_from=header.shuffle_from,
    )


def _kind(what: str, stated: dict[str, Any]) -> Any:
    """The class of a policy from its entry in plan.json. Raises ValueError for missing, unknown or mistyped numbers."""
    kinds, kind = KINDS[what], stated.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        raise ValueError(f"{what} are of kind {kind!r}, and this semmoe knows {', '.join(kinds)}")
    expected = number_types(kinds[kind])
    differ = sorted(expected.keys() ^ (stated.keys() - {"kind"}))
    if differ:
        raise ValueError(f"{what} of kind {kind} have missing or unknown numbers: {', '.join(differ)}")
    for name, type_ in expected.items():
        if isinstance(stated[name], bool) or not isinstance(stated[name], (int, type_)):
            raise ValueError(f"{name} of {what} must be {type_.__name__}, not {stated[name]!r}")
    return kinds[kind]


def _check_arrays(arrays: dict[str, np.ndarray], declared: dict[str, Declared], header: PlanHeader) -> None:
    """Raise ValueError unless every array has its declared shape, type and range."""
    f, topology = header.fingerprint, header.topology
    physical = arrays["physical_to_logical_map"].shape[-1:]
    profiled = arrays["profiled_requests"].size if header.profiled_requests else 0
    if profiled > MOST_REQUESTS:
        raise ValueError(f"profiled_requests holds more than {MOST_REQUESTS:,} hashes")
    dispatch = (f.num_layers, topology.ep_size, f.num_experts)
    declared = declared | {
        "physical_to_logical_map": Declared((f.num_layers, *physical), np.int32, 0, f.num_experts - 1),
        "static_dispatch": Declared(dispatch, np.int16, 0, topology.ep_size - 1),
        "fixed_copies": Declared(dispatch, np.bool_, 0, 1),
        "profiled_requests": Declared((profiled,), np.uint64, 0, (1 << 64) - 1),
    }
    for name, array in arrays.items():
        try:
            check_shape(name, array, declared[name].shape)
        except ValueError as error:
            raise ValueError(f"its tables do not match the model that plan.json names, {f.model!r}: {error}") from None
        declared[name].check(name, array)
