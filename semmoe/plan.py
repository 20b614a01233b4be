"""The Plan directory: `plan.json` for people and checks, `plan.safetensors` for the maps and tables."""

from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from semmoe.core import (
    MAX_PATHS,
    NEIGHBOUR,
    Fingerprint,
    Placement,
    Plan,
    RequestTable,
    Schedule,
    ShuffleTables,
    Topology,
    require,
)
from semmoe.files import atomic_directory, load_arrays, load_json, save_arrays, save_json

SCHEMA = 1
FILES = {"plan.json", "plan.safetensors"}
REQUEST_TABLES = {"request_scores", "request_source"}
SHUFFLE_TABLES = {"token_ranks", "token_confidence", "token_source", "path_ranks", "path_confidence"}


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
    others = sorted(p.name for p in path.iterdir() if p.name not in FILES) if path.is_dir() else []
    require(not path.exists() or path.is_dir(), f"{path} is a file, not a plan")
    require(not others, f"{path} holds other files than a plan's ({', '.join(others[:3])}): it is not replaced")
    schedule = plan.schedule
    header = PlanHeader(
        method=plan.method, topology=plan.topology, fingerprint=plan.fingerprint, settings=plan.settings,
        lookback=schedule.shuffle.lookback if schedule and schedule.shuffle else None,
        schedules_data=schedule is not None, trace_hash=plan.trace_hash, expected=plan.expected,
    )  # fmt: skip
    arrays = {"physical_to_logical_map": plan.placement.physical_to_logical_map}
    if schedule is not None:
        if schedule.requests is not None:
            arrays |= {name: getattr(schedule.requests, name) for name in REQUEST_TABLES}
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
    names = {"physical_to_logical_map"}
    names |= (REQUEST_TABLES if with_requests else set()) | (SHUFFLE_TABLES if with_shuffle else set())
    arrays = load_arrays(path / "plan.safetensors", names)
    try:
        _check_arrays(arrays, header)
        placement = Placement(
            physical_to_logical_map=arrays["physical_to_logical_map"], num_experts=f.num_experts,
            ep_size=topology.ep_size,
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    schedule = None
    if header.schedules_data:
        shuffle = {name: arrays[name] for name in SHUFFLE_TABLES} if with_shuffle else None
        schedule = Schedule(
            requests=RequestTable(**{name: arrays[name] for name in REQUEST_TABLES}) if with_requests else None,
            shuffle=ShuffleTables(**shuffle, lookback=header.lookback or 0) if shuffle else None,
        )
    return Plan(
        topology=topology, placement=placement, schedule=schedule, fingerprint=f, method=header.method,
        settings=header.settings, trace_hash=header.trace_hash, expected=header.expected,
    )  # fmt: skip


def _check_arrays(arrays: dict[str, np.ndarray], header: PlanHeader) -> None:
    """Every array has its shape and type, and no value that an index or a comparison could trip over."""
    f, D, S = header.fingerprint, header.topology.dp_size, header.topology.attn_tp_size
    L, V, lookback = f.num_layers, f.vocab_size, header.lookback or 0
    if "path_ranks" in arrays:
        require(1 <= lookback <= 20 and S**lookback <= MAX_PATHS, f"lookback {header.lookback} is out of range")
    physical = arrays["physical_to_logical_map"].shape[-1:]
    tokens, paths, source = (L, D, V + 1), (L, D, S**lookback if 0 < lookback <= 20 else 0), (V + 1,)
    expected = {  # shape, type, lowest and highest value
        "physical_to_logical_map": ((L, *physical), np.int32, 0, f.num_experts - 1),
        "request_scores": ((V + 1, D), np.float32, 0, 1), "request_source": (source, np.uint8, 0, NEIGHBOUR),
        "token_ranks": (tokens, np.int16, 0, S - 1), "token_confidence": (tokens, np.float16, 0, 1),
        "path_ranks": (paths, np.int16, 0, S - 1), "path_confidence": (paths, np.float16, 0, 1),
        "token_source": (source, np.uint8, 0, NEIGHBOUR),
    }  # fmt: skip
    for name, array in arrays.items():
        shape, dtype, low, high = expected[name]
        require(array.ndim > 0 and array.shape == shape, f"{name} has shape {array.shape}, expected {shape}")
        require(array.dtype == dtype, f"{name} has type {array.dtype}, expected {np.dtype(dtype)}")
        inside = array.size == 0 or bool(array.min() >= low and array.max() <= high)  # False for NaN
        require(inside, f"{name} holds a value outside {low} to {high}")
