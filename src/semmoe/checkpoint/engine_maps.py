"""Read the maps and counts of experts that engines write without semmoe, and make plans from these files.

A map becomes a plan. So do counts, by EPLB: counts tell how often an expert is used, but not by which tokens or with
which other experts, so such a plan has no tables. The formats are

- maps `physical_to_logical_map`, (L, P) or one row for all layers: JSON and `.pt` of SGLang,
  `.npy` of what DeepSeek's EPLB returns; `expert_map.json` of vLLM-Ascend; the
  `initial_global_assignments` of TensorRT-LLM's `moe_load_balancer` (`.yaml`);
- counts `logical_count`: `.pt` of SGLang's expert distribution, and the output of `semmoe record start --counts-only`;
- routing of tokens, which `engine_routes` reads: SGLang's records of passes (`.pt`), and answers (`.jsonl`).

Files are untrusted: sizes are bounded, values are checked before they are cast, nothing is unpickled but tensors.
"""

import json
import pickle
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from semmoe.checkpoint.layout import decoder_layers
from semmoe.core import Placement, Plan
from semmoe.files import MOST_JSON_BYTES, load_arrays, load_json, read_limited
from semmoe.methods import eplb
from semmoe.placement.problem import placement_alone
from semmoe.topology import Fingerprint, Topology
from semmoe.trace import TraceHeader

MOST_TENSOR_BYTES = 1 << 33
MAX_WHOLE = 1 << 53  # a float64 holds every whole number up to it
MAP, COUNTS, PASSES, ANSWERS = "map", "counts", "passes", "answers"
MAP_KEY, COUNTS_KEY = "physical_to_logical_map", "logical_count"
SUFFIXES = ".json, .jsonl, .npy, .pt, .yaml"
_decoder_layers = lru_cache(maxsize=1)(decoder_layers)  # asked for with every record and answer of one file


@dataclass(frozen=True, kw_only=True)
class Found:
    """The content of a file: a map or counts (layers, experts) of float64 or integers, or the records of passes."""

    kind: str
    array: np.ndarray = field(default_factory=lambda: np.zeros((0, 0), np.int64))
    content: Any = None  # of records
    fingerprint: Fingerprint | None = None  # of the model, where the file says
    num_devices: int | None = None  # of a map, where the file says
    note: str = ""  # for the user


def read_engine_file(path: Path) -> Found:
    """Read a file by its suffix and its content. Raises ValueError that names it if its format is unknown."""
    if path.is_dir():
        header = load_json(path / "counts.json", TraceHeader)
        counts = load_arrays(path / "counts.safetensors", {"activations", "transitions", "tokens"})
        return Found(kind=COUNTS, array=numbers(counts["activations"]), fingerprint=header.fingerprint)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if ".jsonl" in path.suffixes:
        return Found(kind=ANSWERS)
    readers = {".json": _read_json, ".npy": _read_npy, ".pt": _read_pt, ".yaml": _read_yaml, ".yml": _read_yaml}
    if path.suffix not in readers:
        raise ValueError(f"{path} must be {SUFFIXES} or the output of `semmoe record start --counts-only`")
    try:
        return _found(readers[path.suffix](path))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(read_limited(path, MOST_JSON_BYTES))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not valid JSON ({error})") from None


def _read_yaml(path: Path) -> Any:
    import yaml

    try:
        return yaml.safe_load(bytes(read_limited(path, MOST_JSON_BYTES)))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ValueError(f"not valid YAML ({' '.join(str(error).split())})") from None


def _read_npy(path: Path) -> Any:
    _check_size(path)
    try:
        return np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"it holds no array ({error})") from None


def _read_pt(path: Path) -> Any:
    import torch

    _check_size(path)
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"it holds something else than tensors ({(str(error).splitlines() or [''])[0]})") from None


def _check_size(path: Path) -> None:
    if path.stat().st_size > MOST_TENSOR_BYTES:
        raise ValueError(f"it has more than {MOST_TENSOR_BYTES:,} bytes")


def _found(content: Any) -> Found:
    """The meaning of a file's content."""
    if not isinstance(content, dict | list):  # an array or a tensor
        return Found(kind=MAP, array=np.atleast_2d(numbers(content)))
    if isinstance(content, list):
        raise ValueError(f"a list without a name: give an object with {MAP_KEY}")
    if isinstance(content.get("records"), list):
        return Found(kind=PASSES, content=content)
    if MAP_KEY in content:
        both = f"it holds {MAP_KEY} and {COUNTS_KEY}: the map is taken, as by SGLang" if COUNTS_KEY in content else ""
        return Found(kind=MAP, array=np.atleast_2d(numbers(content[MAP_KEY])), note=both)
    if COUNTS_KEY in content:
        counts = numbers(content[COUNTS_KEY])
        _check_counts(counts.reshape(-1, counts.shape[-1]))  # before steps are added up
        return Found(kind=COUNTS, array=counts.reshape(-1, *counts.shape[-2:]).sum(axis=0, dtype=np.float64))
    if "layer_list" in content:
        return _ascend_map(content)
    if "initial_global_assignments" in content:
        return _tensorrt_map(content)
    raise ValueError(f"it has neither {MAP_KEY}, {COUNTS_KEY}, layer_list, initial_global_assignments nor records")


def _ascend_map(content: dict[str, Any]) -> Found:
    """vLLM-Ascend's `expert_map.json`: for each layer its devices, and for each device its logical experts."""
    try:
        layers = sorted(content["layer_list"], key=lambda layer: layer["layer_id"])
        devices = [sorted(layer["device_list"], key=lambda device: device["device_id"]) for layer in layers]
        rows = [[device["device_expert"] for device in one] for one in devices]
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an expert map of vLLM-Ascend: {error} is missing or broken") from None
    array = numbers(rows)
    if array.ndim != 3:
        raise ValueError("expert map of vLLM-Ascend: each device of each layer must list equally many experts")
    return Found(kind=MAP, array=array.reshape(len(array), -1), num_devices=array.shape[1])


def _tensorrt_map(content: dict[str, Any]) -> Found:
    """TensorRT-LLM's `moe_load_balancer`: for each layer its number and the logical expert of each slot."""
    slots = content["initial_global_assignments"]
    flat = isinstance(slots, dict) and all(
        type(layer) is int and isinstance(row, list) and all(type(expert) is int for expert in row)
        for layer, row in slots.items()
    )
    if not flat:  # a small file of YAML can name itself in nested lists, which would fill the memory
        raise ValueError("initial_global_assignments of TensorRT-LLM must map layer numbers to lists of experts")
    array = numbers([slots[layer] for layer in sorted(slots)])
    if content.get("num_slots", array.shape[1]) != array.shape[1]:
        raise ValueError(f"num_slots is {content['num_slots']}, but a layer lists {array.shape[1]} experts")
    return Found(kind=MAP, array=array)


def numbers(values: Any) -> np.ndarray:
    """An array of 1 to 3 axes from nested lists, an array or a tensor, of integers or float64; nothing is rounded."""
    if hasattr(values, "is_floating_point"):  # NumPy has no bfloat16
        values = values.double() if values.is_floating_point() else values
        values = values.detach().numpy()
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError, RecursionError):
        array = np.zeros(0, object)  # rows of different lengths
    if array.ndim not in (1, 2, 3) or array.dtype.kind not in "iuf" or not array.size:
        raise ValueError("expected a row of numbers for each layer, all equally long")
    return array if array.dtype.kind in "iu" else array.astype(np.float64)


def whole(name: str, array: np.ndarray) -> np.ndarray:
    """An array (N, M) as int64. Raises ValueError that names the first value that is not a whole number."""
    bad = ~np.isfinite(array) | (np.trunc(array) != array) | (np.abs(array.astype(np.float64)) > MAX_WHOLE)
    if bad.any():
        row, column = np.argwhere(bad)[0].tolist()
        raise ValueError(f"{name} {column} of row {row} is {array[row, column]}, not a whole number")
    return array.astype(np.int64)


def _check_counts(counts: np.ndarray) -> None:
    """Raise ValueError unless `counts` (N, E) are whole numbers from 0 on, and one of the counts is above 0."""
    checked = whole("the count of expert", counts)
    if (checked < 0).any():
        row, expert = np.argwhere(checked < 0)[0].tolist()
        raise ValueError(
            f"the count of expert {expert} of row {row} is {checked[row, expert]}: counts are not negative"
        )
    if not checked.any():
        raise ValueError("all counts are 0: nothing was recorded")


def moe_rows(array: np.ndarray, model: Path, fingerprint: Fingerprint) -> np.ndarray:
    """The rows of MoE layers, where an engine writes one for each decoder layer; one row stands for all layers."""
    layers = fingerprint.num_layers
    if len(array) == 1:
        return np.repeat(array, layers, axis=0)
    if len(array) == layers:
        return array
    indices, depth = _decoder_layers(model)
    if len(array) != depth:
        draft = " (is the last one that of a draft layer? remove it)" if len(array) in (layers + 1, depth + 1) else ""
        raise ValueError(f"{len(array)} layers, but the model has {depth}, of which {layers} have experts{draft}")
    return array[indices]


def moe_depth(model: Path) -> int:
    """The number of decoder layers, with experts or without."""
    return _decoder_layers(model)[1]


def plan_of(found: Found, model: Path, fingerprint: Fingerprint, topology: Topology, redundant: int) -> Plan:
    """The plan that a map is, or that EPLB makes of counts with `redundant` experts; it schedules nothing."""
    if found.array.ndim != 2:
        raise ValueError(f"expected a row for each layer, not an array of shape {found.array.shape}")
    array = moe_rows(found.array, model, fingerprint)
    if found.kind == MAP:
        placement, method = _placement(found, array, fingerprint.num_experts, topology), MAP
    else:
        _check_columns(array, fingerprint.num_experts)
        groups = fingerprint.num_groups, topology.num_nodes
        placement, method = eplb.place(array.astype(np.float64), topology.ep_size, redundant, *groups), "eplb"
    made = placement_alone(placement, topology)
    return Plan(
        topology=topology,
        placement=placement,
        tokens=made.tokens,
        requests=made.requests,
        fingerprint=fingerprint,
        method=method,
        settings={"method": method, "redundant_experts": placement.redundant_experts},
    )


def _placement(found: Found, array: np.ndarray, num_experts: int, topology: Topology) -> Placement:
    """The placement of a map (L, P), whose values are checked before they are cast."""
    if found.num_devices not in (None, topology.ep_size):
        raise ValueError(f"the map is of {found.num_devices} devices: give --ep-size {found.num_devices}")
    maps = whole("the expert of slot", array)
    outside = (maps < 0) | (maps >= num_experts)
    if outside.any():
        layer, slot = np.argwhere(outside)[0].tolist()
        shared = ": is it a fused shared expert? A plan has none" if maps[layer, slot] == num_experts else ""
        raise ValueError(
            f"slot {slot} of layer {layer} has expert {maps[layer, slot]}, but the model has {num_experts}{shared}"
        )
    return Placement(physical_to_logical_map=maps.astype(np.int32), num_experts=num_experts, ep_size=topology.ep_size)


def _check_columns(counts: np.ndarray, num_experts: int) -> None:
    """Raise ValueError unless `counts` (L, columns) have a column for each expert, and a count in each layer."""
    if counts.shape[1] != num_experts:
        shared = " (is the last one a fused shared expert? remove it)" if counts.shape[1] == num_experts + 1 else ""
        raise ValueError(f"counts of {counts.shape[1]} experts, but the model has {num_experts}{shared}")
    _check_counts(counts)
    if (counts.sum(axis=1) == 0).any():
        empty = int(np.flatnonzero(counts.sum(axis=1) == 0)[0])
        raise ValueError(f"MoE layer {empty} has no count: were only some of the layers recorded?")
