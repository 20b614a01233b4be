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
    RequestMap,
    RequestTable,
    Schedule,
    ScoreTables,
    ShuffleTables,
    Topology,
    require,
)
from semmoe.files import atomic_directory, check_output, load_arrays, load_json, save_arrays, save_json

SCHEMA = 1
MOST_REQUESTS = 1 << 24  # profiled, of which a plan keeps hashes
FILES = {"plan.json", "plan.safetensors"}
REQUEST_TABLES = {"request_scores", "request_source"}
MAP_NUMBERS = ("score_spread", "mean_length", "cache_weight")
REQUEST_MAP = {"request_map_scores": "token_scores", "request_map_weights": "token_weights",
               "request_map_bias": "bias", "request_map_prices": "prices"}  # fmt: skip
SHUFFLE_TABLES = {"token_ranks", "token_confidence", "token_source", "path_ranks", "path_confidence"}
SCORE_TABLES = {"token_rows", "token_scores", "token_shift", "token_source", "path_scores", "history_scores"}


class PlanHeader(BaseModel):
    """`plan.json`. No timings and no dates: the same input and seed give the same bytes."""

    model_config = ConfigDict(extra="forbid", strict=True)
    schema_version: int = SCHEMA
    method: str
    topology: Topology
    fingerprint: Fingerprint
    lookback: int | None  # of the path tables; null without them
    ordered: int | None  # layers of these with a row for each place in the order of weights; null: the paper's tables
    static_dispatch: bool
    profiled_requests: bool = False  # whether hashes of them are kept; plans of before have none
    schedules_data: bool
    request_map: dict[str, float] | None  # MAP_NUMBERS; null: the paper's table, or none
    settings: dict[str, Any]
    trace_hash: str
    expected: dict[str, Any] | None


def save_plan(plan: Plan, path: Path | str) -> None:
    """Write `plan` as a directory, whole or not at all; an older plan of that name is replaced."""
    path = Path(path)
    check_plan_output(path, force=True)
    schedule = plan.schedule
    header = PlanHeader(
        method=plan.method, topology=plan.topology, fingerprint=plan.fingerprint, settings=plan.settings,
        lookback=schedule.shuffle.lookback if schedule and schedule.shuffle else None,
        ordered=schedule.shuffle.ordered if schedule and isinstance(schedule.shuffle, ScoreTables) else None,
        static_dispatch=plan.placement.static_dispatch is not None,
        profiled_requests=plan.profiled_requests is not None,
        request_map=_map_numbers(schedule.requests) if schedule else None,
        schedules_data=schedule is not None, trace_hash=plan.trace_hash, expected=plan.expected,
    )  # fmt: skip
    arrays = {"physical_to_logical_map": plan.placement.physical_to_logical_map}
    if plan.placement.static_dispatch is not None:
        arrays["static_dispatch"] = plan.placement.static_dispatch
    if plan.profiled_requests is not None:
        arrays["profiled_requests"] = plan.profiled_requests
    if schedule is not None:
        if isinstance(schedule.requests, RequestMap):
            arrays |= {name: getattr(schedule.requests, field) for name, field in REQUEST_MAP.items()}
        elif schedule.requests is not None:
            arrays |= {name: getattr(schedule.requests, name) for name in REQUEST_TABLES}
        if schedule.shuffle is not None:
            names = SCORE_TABLES if isinstance(schedule.shuffle, ScoreTables) else SHUFFLE_TABLES
            arrays |= {name: getattr(schedule.shuffle, name) for name in names}
    with atomic_directory(path) as staged:
        save_json(staged / "plan.json", header)
        save_arrays(staged / "plan.safetensors", arrays)


def check_plan_output(path: Path, force: bool) -> None:
    """Raise before a plan is solved unless it can be written to `path`, where only another plan is ever replaced."""
    others = sorted(p.name for p in path.iterdir() if p.name not in FILES) if path.is_dir() else []
    if others:
        raise ValueError(f"{path} holds other files than a plan's ({', '.join(others[:3])}): choose another name")
    check_output(path, directory=True, force=force)


def load_plan(path: Path | str) -> Plan:
    """Read and validate a plan directory; every shape and every index is checked, since plans may come from others."""
    path = Path(path)
    require(path.exists(), f"there is no plan at {path}")
    header = load_json(path / "plan.json", PlanHeader)
    require(header.schema_version == SCHEMA, f"{path} has schema version {header.schema_version}, expected {SCHEMA}")
    topology, f = header.topology, header.fingerprint
    with_requests = header.schedules_data and topology.dp_size > 1
    # A method that schedules requests alone has no tables of tokens, and no look-back.
    requests_only = with_requests and header.request_map is not None and header.lookback is None
    with_shuffle = header.schedules_data and topology.attn_tp_size > 1 and not requests_only
    names = {"physical_to_logical_map"}
    shuffle_names = SHUFFLE_TABLES if header.ordered is None else SCORE_TABLES
    names |= {"static_dispatch"} if header.static_dispatch else set()
    names |= {"profiled_requests"} if header.profiled_requests else set()
    request_names = REQUEST_TABLES if header.request_map is None else set(REQUEST_MAP)
    names |= (request_names if with_requests else set()) | (shuffle_names if with_shuffle else set())
    arrays = load_arrays(path / "plan.safetensors", names)
    try:
        _check_arrays(arrays, header)
        placement = Placement(
            physical_to_logical_map=arrays["physical_to_logical_map"], num_experts=f.num_experts,
            ep_size=topology.ep_size, static_dispatch=arrays.get("static_dispatch"),
        )  # fmt: skip
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    schedule = None
    if header.schedules_data:
        schedule = Schedule(
            requests=_request_table({name: arrays[name] for name in request_names}, header) if with_requests else None,
            shuffle=_shuffle_tables({name: arrays[name] for name in shuffle_names}, header) if with_shuffle else None,
        )
    return Plan(
        topology=topology, placement=placement, schedule=schedule, fingerprint=f, method=header.method,
        settings=header.settings, trace_hash=header.trace_hash, expected=header.expected,
        profiled_requests=arrays.get("profiled_requests"),
    )  # fmt: skip


def _map_numbers(table: RequestTable | RequestMap | None) -> dict[str, float] | None:
    if not isinstance(table, RequestMap):
        return None
    return {name: float(getattr(table, name)) for name in MAP_NUMBERS}


def _request_table(arrays: dict[str, np.ndarray], header: PlanHeader) -> RequestTable | RequestMap:
    if header.request_map is None:
        return RequestTable(**arrays)
    fields: dict[str, Any] = {REQUEST_MAP[name]: array for name, array in arrays.items()}
    return RequestMap(**(fields | header.request_map))


def _shuffle_tables(arrays: dict[str, np.ndarray], header: PlanHeader) -> ShuffleTables | ScoreTables:
    lookback = header.lookback or 0
    if header.ordered is None:
        return ShuffleTables(**arrays, lookback=lookback)
    return ScoreTables(**arrays, lookback=lookback, ordered=header.ordered)


def _check_arrays(arrays: dict[str, np.ndarray], header: PlanHeader) -> None:
    """Every array has its shape and type, and no value that an index or a comparison could trip over."""
    f, D, S = header.fingerprint, header.topology.dp_size, header.topology.attn_tp_size
    L, V, lookback = f.num_layers, f.vocab_size, header.lookback or 0
    ordered, E, G = header.ordered or 0, f.num_experts, header.topology.ep_size
    if "path_scores" in arrays:
        require(0 <= ordered <= lookback <= L, f"lookback {header.lookback} with {ordered} ordered is out of range")
    if "path_ranks" in arrays:
        require(1 <= lookback <= 20 and S**lookback <= MAX_PATHS, f"lookback {header.lookback} is out of range")
    physical = arrays["physical_to_logical_map"].shape[-1:]
    tokens, paths, source = (L, D, V + 1), (L, D, S**lookback if 0 < lookback <= 20 else 0), (V + 1,)
    rows = arrays["token_scores"].shape[1:2] if "token_scores" in arrays else (0,)
    path_rows = (ordered * f.top_k + lookback - ordered) * E
    small, int16, finite = 127, 32767, np.finfo(np.float32).max
    requests = arrays["profiled_requests"].shape[:1] if "profiled_requests" in arrays else (0,)
    require(max(requests, default=0) <= MOST_REQUESTS, f"profiled_requests holds more than {MOST_REQUESTS:,} hashes")
    if header.request_map is not None:
        numbers = header.request_map
        require(set(numbers) == set(MAP_NUMBERS), f"request_map holds {', '.join(sorted(numbers))}")
        valid = 0 <= numbers["score_spread"] <= 1 and 0 < numbers["mean_length"] <= 1e12
        valid &= 0 <= numbers["cache_weight"] <= 1e6
        require(valid, f"request_map is out of range: {numbers}")
    expected = {  # shape, type, lowest and highest value
        "physical_to_logical_map": ((L, *physical), np.int32, 0, f.num_experts - 1),
        "request_scores": ((V + 1, D), np.float32, 0, 1), "request_source": (source, np.uint8, 0, NEIGHBOUR),
        "token_ranks": (tokens, np.int16, 0, S - 1), "token_confidence": (tokens, np.float16, 0, 1),
        "path_ranks": (paths, np.int16, 0, S - 1), "path_confidence": (paths, np.float16, 0, 1),
        "token_source": (source, np.uint8, 0, NEIGHBOUR),
        "token_rows": ((V + 1,), np.int32, 0, (*rows, 0)[0] - 1), "token_shift": ((L,), np.uint8, 0, 15),
        "token_scores": ((L, *rows, G), np.int8, -small, small),
        "path_scores": ((L, path_rows, G), np.int16, -int16, int16),
        "history_scores": ((L, 2 * E + 1, G), np.int16, -int16, int16),
        "request_map_scores": ((V + 1, D), np.float32, -finite, finite),
        "request_map_weights": ((V + 1,), np.float32, 0, finite),
        "request_map_bias": ((D,), np.float32, -finite, finite),
        "request_map_prices": ((D,), np.float32, -finite, finite),
        "static_dispatch": ((L, G, E), np.int16, 0, G - 1),
        "profiled_requests": (requests, np.uint64, 0, (1 << 64) - 1),
    }  # fmt: skip
    for name, array in arrays.items():
        shape, dtype, low, high = expected[name]
        if array.ndim == 0 or array.shape != shape:
            problem = f"{name} has shape {array.shape}, expected {shape}"
            raise ValueError(f"its tables do not match the model that plan.json names, {f.model!r}: {problem}")
        require(array.dtype == dtype, f"{name} has type {array.dtype}, expected {np.dtype(dtype)}")
        inside = array.size == 0 or bool(array.min() >= low and array.max() <= high)  # False for NaN
        require(inside, f"{name} holds a value outside {low} to {high}")
