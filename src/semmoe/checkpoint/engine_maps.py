"""Maps and counts of experts that engines use without semmoe: read as plans, and written for SGLang.

A map, `physical_to_logical_map`, says which expert each slot holds, and is a plan. Counts become a plan by EPLB: they
tell how often an expert is used, but not by which tokens or with which other experts, so such a plan has no tables.
Both have a row for each layer with experts or each decoder layer, or one row for all. `engine_files` has the formats.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from semmoe.checkpoint.directory import read_config
from semmoe.checkpoint.layout import decoder_layers
from semmoe.checkpoint.relabel import check_config, check_num_layers
from semmoe.core import Placement, Plan
from semmoe.io.files import check_output, save_text
from semmoe.topology import Fingerprint, Topology

MAX_WHOLE = 1 << 53  # a float64 holds every whole number up to it
MAP_KEY = "physical_to_logical_map"
COUNTS_KEY = "logical_count"


@dataclass(frozen=True)
class Model:
    """The model that a file is of: its directory and fingerprint."""

    path: Path
    fingerprint: Fingerprint

    @cached_property
    def decoder_layers(self) -> tuple[list[int], int]:
        """Indices of the decoder layers with experts, and the number of decoder layers."""
        return decoder_layers(self.path)

    def moe_rows(self, array: np.ndarray) -> np.ndarray:
        """The rows of MoE layers, where an engine writes one for each decoder layer; one row stands for all layers."""
        layers = self.fingerprint.num_layers
        if len(array) == 1:
            return np.repeat(array, layers, axis=0)
        if len(array) == layers:
            return array
        indices, depth = self.decoder_layers
        if len(array) == depth:
            return array[indices]
        draft = " (is the last one that of a draft layer? remove it)" if len(array) in (layers + 1, depth + 1) else ""
        raise ValueError(f"{len(array)} layers, but the model has {depth}, of which {layers} have experts{draft}")


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The map or the counts of a file, (rows, slots or experts), of integers or float64."""

    rows: np.ndarray
    num_devices: int | None = None  # of a map, where the file says
    note: str = ""  # for the user


def read_array(content: Any) -> Experts:
    """A map without a name, such as the first array that DeepSeek's EPLB returns."""
    return Experts(rows=np.atleast_2d(numbers(content)))


def read_sglang_map(content: dict[str, Any]) -> Experts:
    both = f"it holds {MAP_KEY} and {COUNTS_KEY}: the map is taken, as by SGLang" if COUNTS_KEY in content else ""
    return Experts(rows=np.atleast_2d(numbers(content[MAP_KEY])), note=both)


def read_ascend_map(content: dict[str, Any]) -> Experts:
    """vLLM-Ascend's `expert_map.json`: for each layer its devices, and for each device its logical experts."""
    try:
        layers = sorted(content["layer_list"], key=lambda layer: layer["layer_id"])
        devices = [sorted(layer["device_list"], key=lambda device: device["device_id"]) for layer in layers]
        array = numbers([[device["device_expert"] for device in row] for row in devices])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not an expert map of vLLM-Ascend: {error} is missing or broken") from None
    if array.ndim != 3:
        raise ValueError("expert map of vLLM-Ascend: each device of each layer must list equally many experts")
    return Experts(rows=array.reshape(len(array), -1), num_devices=array.shape[1])


def read_tensorrt_map(content: dict[str, Any]) -> Experts:
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
    return Experts(rows=array)


def read_sglang_counts(content: dict[str, Any]) -> Experts:
    """SGLang's counts (steps, layers, E), added up; counts (layers, E) have a single step."""
    counts = numbers(content[COUNTS_KEY])
    if not whole("the count of expert", counts.reshape(-1, counts.shape[-1])).any():
        raise ValueError("all counts are 0: nothing was recorded")
    return Experts(rows=counts.reshape(-1, *counts.shape[-2:]).sum(axis=0, dtype=np.float64))


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


def whole(name: str, array: np.ndarray, most: int = MAX_WHOLE, hint: str = "") -> np.ndarray:
    """An array (N, M) as int64. Raises ValueError that names the first value unless all are whole numbers to `most`."""
    good = (array >= 0) & (array <= most) & (np.trunc(array) == array)  # NaN is not
    if not good.all():
        row, column = np.argwhere(~good)[0].tolist()
        value = array[row, column]
        raise ValueError(f"{name} {column} of row {row} is {value}, not a whole number from 0 to {most}{hint}")
    return array.astype(np.int64)


def plan_of(kind: str, experts: Experts, model: Model, topology: Topology, redundant: int) -> Plan:
    """The plan that a map is, or that EPLB makes of counts with `redundant` experts; it schedules nothing."""
    from semmoe.placement import eplb
    from semmoe.placement.problem import placement_alone

    f, rows = model.fingerprint, experts.rows
    if rows.ndim != 2:
        raise ValueError(f"expected a row for each layer, not an array of shape {rows.shape}")
    if kind == "map":
        placement, method = _mapped(model.moe_rows(rows), experts.num_devices, f.num_experts, topology.ep_size), "map"
    else:
        load = _load(model.moe_rows(rows), f.num_experts)
        placement, method = eplb.place(load, topology.ep_size, redundant, f.num_groups, topology.num_nodes), "eplb"
    settings = {"method": method, "redundant_experts": placement.redundant_experts}
    return placement_alone(placement, topology).plan(topology, f, method, settings=settings)


def _mapped(rows: np.ndarray, num_devices: int | None, num_experts: int, ep_size: int) -> Placement:
    """The placement of a map (L, P), whose values are checked before they are cast."""
    if num_devices not in (None, ep_size):
        raise ValueError(f"the map is of {num_devices} devices: give --ep-size {num_devices}")
    shared = ": is it a fused shared expert? A plan has none" if rows.max() == num_experts else ""
    maps = whole("the expert of slot", rows, num_experts - 1, shared).astype(np.int32)
    return Placement(physical_to_logical_map=maps, num_experts=num_experts, ep_size=ep_size)


def _load(counts: np.ndarray, num_experts: int) -> np.ndarray:
    """(L, E) float64 counts, of which each layer has one. Raises ValueError for columns that are not the experts."""
    if counts.shape[1] != num_experts:
        shared = " (is the last one a fused shared expert? remove it)" if counts.shape[1] == num_experts + 1 else ""
        raise ValueError(f"counts of {counts.shape[1]} experts, but the model has {num_experts}{shared}")
    empty = np.flatnonzero(counts.sum(axis=1) == 0)
    if empty.size:
        raise ValueError(f"MoE layer {empty[0]} has no count: were only some of the layers recorded?")
    return counts.astype(np.float64)


def write_sglang(plan: Plan, model: Path, out: Path) -> list[str]:
    """Write the file for SGLang's `--init-expert-location`; returns the flags to start SGLang with.

    Experts keep their numbers and SGLang reads where each expert is, so no weight changes. The file has a row for every
    decoder layer of the model: the plan's where there are experts, elsewhere SGLang's default, which nothing reads.
    """
    check_output(out)
    check_config(plan, read_config(model), model)
    indices, depth = decoder_layers(model)
    check_num_layers(plan, len(indices), model)
    placed = plan.placement.physical_to_logical_map
    rows = np.tile(np.arange(placed.shape[1], dtype=np.int32) % plan.fingerprint.num_experts, (depth, 1))
    rows[indices] = placed
    save_text(out, json.dumps({MAP_KEY: rows.tolist()}))
    ranks, redundant = str(plan.topology.ep_size), plan.placement.redundant_experts
    flags = ["--tp-size", ranks, "--ep-size", ranks]
    if plan.topology.dp_size > 1:
        flags += ["--dp-size", str(plan.topology.dp_size), "--enable-dp-attention"]
    flags += ["--init-expert-location", str(out)]
    return flags + (["--ep-num-redundant-experts", str(redundant)] if redundant else [])
