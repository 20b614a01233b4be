"""The Plan directory: `plan.json` for people and checks, `plan.safetensors` for the maps and tables."""

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from semmoe.core import Fingerprint, Placement, Plan, Schedule, ShuffleTables, Topology, require
from semmoe.files import atomic_directory, load_arrays, load_json, save_arrays, save_json

SCHEMA = 1
REQUEST_TABLES = {"request_scores"}
SHUFFLE_TABLES = {"token_ranks", "token_confidence", "path_ranks", "path_confidence"}


class PlanHeader(BaseModel):
    """`plan.json`. No timings and no dates: the same input and seed give the same bytes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    schema_version: int = SCHEMA
    method: str
    topology: Topology
    fingerprint: Fingerprint
    lookback: int | None  # of the path tables; null without them
    schedules_data: bool
    settings: dict[str, Any]
    trace_hash: str
    expected: dict[str, Any] | None


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write `plan` as a directory, whole or not at all; an older plan of that name is replaced."""
    path = Path(path)
    replaceable = not path.exists() or (path / "plan.json").exists() or (path.is_dir() and not any(path.iterdir()))
    require(replaceable, f"{path} exists and is not a plan")
    schedule = plan.schedule
    header = PlanHeader(
        method=plan.method, topology=plan.topology, fingerprint=plan.fingerprint, settings=plan.settings,
        lookback=schedule.shuffle.lookback if schedule and schedule.shuffle else None,
        schedules_data=schedule is not None, trace_hash=plan.trace_hash, expected=plan.expected,
    )  # fmt: skip
    arrays = {"physical_to_logical_map": plan.placement.physical_to_logical_map}
    if schedule is not None:
        arrays["token_source"] = schedule.token_source
        if schedule.request_scores is not None:
            arrays["request_scores"] = schedule.request_scores
        if schedule.shuffle is not None:
            arrays |= {name: getattr(schedule.shuffle, name) for name in SHUFFLE_TABLES}
    with atomic_directory(path) as staged:
        save_json(staged / "plan.json", header)
        save_arrays(staged / "plan.safetensors", arrays)


def load_plan(path: Path | str) -> Plan:
    """Read and validate a plan directory; every shape and every index is checked, since plans may come from others."""
    path = Path(path)
    require(path.exists(), f"there is no plan at {path}")
    header = load_json(path / "plan.json", PlanHeader)
    require(header.schema_version == SCHEMA, f"{path} has schema version {header.schema_version}, expected {SCHEMA}")
    topology, f = header.topology, header.fingerprint
    with_requests = header.schedules_data and topology.dp_size > 1
    with_shuffle = header.schedules_data and topology.attn_tp_size > 1
    names = {"physical_to_logical_map"} | ({"token_source"} if header.schedules_data else set())
    names |= (REQUEST_TABLES if with_requests else set()) | (SHUFFLE_TABLES if with_shuffle else set())
    arrays = load_arrays(path / "plan.safetensors", names)
    try:
        _check_shapes(arrays, header)
        placement = Placement(
            physical_to_logical_map=arrays["physical_to_logical_map"], num_experts=f.num_experts,
            ep_size=topology.ep_size,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    shuffle = None
    if with_shuffle:
        shuffle = ShuffleTables(**{name: arrays[name] for name in SHUFFLE_TABLES}, lookback=header.lookback or 0)
    schedule = None
    if header.schedules_data:
        schedule = Schedule(
            request_scores=arrays.get("request_scores"), shuffle=shuffle, token_source=arrays["token_source"]
        )
    return Plan(
        topology=topology, placement=placement, schedule=schedule, fingerprint=f, method=header.method,
        settings=header.settings, trace_hash=header.trace_hash, expected=header.expected,
    )  # fmt: skip


def _check_shapes(arrays: dict[str, np.ndarray], header: PlanHeader) -> None:
    f, D, S = header.fingerprint, header.topology.dp_size, header.topology.attn_tp_size
    L, V = f.num_layers, f.vocab_size
    physical = arrays["physical_to_logical_map"].shape[-1]
    paths = S**header.lookback if header.lookback else 0
    shapes = {
        "physical_to_logical_map": (L, physical), "token_source": (V + 1,), "request_scores": (V + 1, D),
        "token_ranks": (L, D, V + 1), "token_confidence": (L, D, V + 1),
        "path_ranks": (L, D, paths), "path_confidence": (L, D, paths),
    }  # fmt: skip
    for name, array in arrays.items():
        require(array.shape == shapes[name], f"{name} has shape {array.shape}, expected {shapes[name]}")
    for name in ("token_ranks", "path_ranks"):
        if name in arrays and arrays[name].size:
            valid = arrays[name].min() >= 0 and arrays[name].max() < S
            require(bool(valid), f"{name} names a rank outside 0..{S - 1}")
