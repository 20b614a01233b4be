"""Read maps and counts of experts, which engines use without semmoe, as plans; write a plan's map for an engine.

A map, `physical_to_logical_map`, says which expert each slot holds, and is a plan. Counts become a plan by EPLB: they
tell how often an expert is used, but not by which tokens or with which other experts, so such a plan has no tables.
Both have a row for each layer with experts or each decoder layer, or one row for all. `engine_files` has the formats.

Layers are numbered by MoE layer in vLLM-Ascend's files and EPLB's arrays, by decoder layer in SGLang's and
TensorRT-LLM's. A file of vLLM-Ascend counts by position: the engine reads entry n of each list and skips its number.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from semmoe.checkpoint.directory import read_config
from semmoe.checkpoint.layout import decoder_layers
from semmoe.checkpoint.relabel import check_config, check_num_layers
from semmoe.core import Placement, Plan
from semmoe.io.files import atomic_file, save_text
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

    def moe_rows(self, array: np.ndarray, numbers: Sequence[int] = ()) -> np.ndarray:
        """The rows of MoE layers, where an engine writes one for each decoder layer; one row stands for all layers.

        numbers: the decoder layer of each row, where the file says.
        """
        layers = self.fingerprint.num_layers
        if numbers:
            absent = sorted(set(self.decoder_layers[0]) - set(numbers))
            if absent:
                raise ValueError(f"it has no row for layer {absent[0]}: the model's decoder layers are numbered from 0")
            return array[[numbers.index(layer) for layer in self.decoder_layers[0]]]
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
    layers: list[int] = field(default_factory=list)  # the decoder layer of each row, where the file says
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
        layers = _in_order(content["layer_list"], "layer_id")
        devices = [_in_order(layer["device_list"], "device_id") for layer in layers]
        array = numbers([[device["device_expert"] for device in row] for row in devices])
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not an expert map of vLLM-Ascend: {error} is missing or broken") from None
    if array.ndim != 3:
        raise ValueError("expert map of vLLM-Ascend: each device of each layer must list equally many experts")
    return Experts(rows=array.reshape(len(array), -1), num_devices=array.shape[1])


def _in_order(entries: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The entries of a list. Raises ValueError for a number that is not the entry's position, by which it is read."""
    for position, entry in enumerate(entries):
        if entry.get(key, position) != position:
            raise ValueError(f"{key} {entry[key]} is entry {position} of its list, which vLLM-Ascend reads by position")
    return entries


def read_tensorrt_map(content: dict[str, Any]) -> Experts:
    """TensorRT-LLM's `moe_load_balancer`: for each layer its number and the logical expert of each slot."""
    slots = content["initial_global_assignments"]
    flat = isinstance(slots, dict) and all(
        type(layer) is int and isinstance(row, list) and all(type(expert) is int for expert in row)
        for layer, row in slots.items()
    )
    if not flat:  # a small file of YAML can name itself in nested lists, which would fill the memory
        raise ValueError("initial_global_assignments of TensorRT-LLM must map layer numbers to lists of experts")
    array = numbers(list(slots.values()))
    if content.get("num_slots", array.shape[1]) != array.shape[1]:
        raise ValueError(f"num_slots is {content['num_slots']}, but a layer lists {array.shape[1]} experts")
    return Experts(rows=array, layers=list(slots))


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
        rows = model.moe_rows(rows, experts.layers)
        placement, method = _mapped(rows, experts.num_devices, f.num_experts, topology.ep_size), "map"
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


def _matched(plan: Plan, model: Path) -> tuple[list[int], int]:
    """The model's decoder layers with experts and its depth. Raises ValueError if plan and model differ."""
    check_config(plan, read_config(model), model)
    indices, depth = decoder_layers(model)
    check_num_layers(plan, len(indices), model)
    return indices, depth


def write_sglang(plan: Plan, model: Path, out: Path) -> list[str]:
    """Write the file for SGLang's `--init-expert-location`; returns the flags to start SGLang with.

    Experts keep their numbers and SGLang reads where each expert is, so no weight changes. The file has a row for every
    decoder layer of the model: the plan's where there are experts, elsewhere SGLang's default, which nothing reads.
    """
    indices, depth = _matched(plan, model)
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


def write_ascend(plan: Plan, model: Path, out: Path) -> list[str]:
    """Write the file of `eplb_config.expert_map_path`; returns the flags to start vLLM with vLLM-Ascend with."""
    _matched(plan, model)
    placed, ranks = plan.placement.physical_to_logical_map, plan.topology.ep_size
    by_rank = placed.reshape(len(placed), ranks, -1)
    twice = np.argwhere((np.diff(np.sort(by_rank)) == 0).any(axis=2))
    if twice.size:
        layer, rank = twice[0].tolist()
        raise ValueError(f"rank {rank} has an expert of MoE layer {layer} twice, for which vLLM-Ascend has no entry")
    layers = [[{"device_id": g, "device_expert": own} for g, own in enumerate(row)] for row in by_rank.tolist()]
    listed = [{"layer_id": i, "device_count": ranks, "device_list": row} for i, row in enumerate(layers)]
    save_text(out, json.dumps({"moe_layer_count": len(placed), "layer_list": listed}))
    eplb: dict[str, Any] = {"expert_map_path": str(out)}
    if plan.placement.redundant_experts:
        eplb["num_redundant_experts"] = plan.placement.redundant_experts
    sizes = [
        "--data-parallel-size",
        str(plan.topology.dp_size),
        "--tensor-parallel-size",
        str(plan.topology.attn_tp_size),
    ]
    return [*sizes, "--enable-expert-parallel", "--additional-config", json.dumps({"eplb_config": eplb})]


def write_tensorrt(plan: Plan, model: Path, out: Path) -> list[str]:
    """Write the file of `moe_config.load_balancer`; returns lines for the file that `trtllm-serve --config` takes."""
    indices, _ = _matched(plan, model)
    placed = plan.placement.physical_to_logical_map
    rows = "".join(f"  {layer}: {row}\n" for layer, row in zip(indices, placed.tolist(), strict=True))
    head = f"num_slots: {placed.shape[1]}\nlayer_updates_per_iter: 0\n"  # 0: the balancer moves no expert
    save_text(out, f"{head}initial_global_assignments:\n{rows}")
    ranks = plan.topology.ep_size
    sizes = [f"tensor_parallel_size: {ranks}", f"moe_expert_parallel_size: {ranks}"]
    return [*sizes, "enable_attention_dp: true", "moe_config: " + json.dumps({"load_balancer": str(out)})]


def write_array(plan: Plan, model: Path, out: Path) -> list[str]:
    """Write the first array that EPLB's `rebalance_experts` returns; returns the sizes that it was called with."""
    _matched(plan, model)
    placed = plan.placement.physical_to_logical_map
    with atomic_file(out) as staged, staged.open("wb") as file:
        np.save(file, placed)
    return [
        f"num_replicas={placed.shape[1]}",
        f"num_nodes={plan.topology.num_nodes}",
        f"num_gpus={plan.topology.ep_size}",
    ]
