"""A plan's placement in the words of an engine: SGLang's expert location, vLLM's expert maps.

The router keeps its numbers and the engine is told where each expert lies, so no weight is touched. Both files count
the model's decoder layers, of which a plan knows only those with experts.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from semmoe.checkpoint.directory import config_count, read_config, tensor_names
from semmoe.checkpoint.layout import moe_layer_indices
from semmoe.checkpoint.relabel import check_config, check_num_layers
from semmoe.core import Plan, require
from semmoe.files import atomic_file

MOST_LAYERS = 10_000  # of a file that has a row for each, as many as a configuration claims


def write_sglang(plan: Plan, model: Path, out: Path) -> list[str]:
    """Write the file for SGLang's `--init-expert-location`; returns the flags to start SGLang with."""
    check_out_file(out)
    indices, depth = _layers(plan, model)
    _write(out, {"physical_to_logical_map": sglang_map(plan, indices, depth).tolist()})
    return sglang_flags(plan, out)


def sglang_flags(plan: Plan, location: Path) -> list[str]:
    """What gives SGLang this plan's topology and the placement in the file `location`."""
    topology, redundant = plan.topology, plan.placement.redundant_experts
    flags = ["--tp-size", str(topology.ep_size), "--ep-size", str(topology.ep_size)]
    if topology.dp_size > 1:
        flags += ["--dp-size", str(topology.dp_size), "--enable-dp-attention"]
    flags += ["--init-expert-location", str(location)]
    return flags + (["--ep-num-redundant-experts", str(redundant)] if redundant else [])


def write_vllm(plan: Plan, model: Path, out: Path) -> list[str]:
    """Write one expert map per MoE layer and rank; returns the flags that give vLLM this plan's topology."""
    check_out_file(out)
    flags = vllm_flags(plan)
    indices, _ = _layers(plan, model)
    topology, maps = plan.topology, expert_maps(plan)
    layers = {str(index): layer.tolist() for index, layer in zip(indices, maps, strict=True)}
    _write(out, {"schema_version": 1, "ep_size": topology.ep_size, "num_experts": maps.shape[2], "layers": layers})
    return flags


def vllm_flags(plan: Plan) -> list[str]:
    """What gives vLLM this plan's topology; raises ValueError if no expert map can hold the plan."""
    topology, redundant = plan.topology, plan.placement.redundant_experts
    reason = "a vLLM expert map gives each expert one place; use --to sglang, or solve without redundant experts"
    require(redundant == 0, f"this plan has {redundant} redundant experts: {reason}")
    flags = ["--enable-expert-parallel", "--tensor-parallel-size", str(topology.attn_tp_size)]
    return flags + (["--data-parallel-size", str(topology.dp_size)] if topology.dp_size > 1 else [])


def sglang_map(plan: Plan, indices: list[int], num_hidden_layers: int) -> np.ndarray:
    """(decoder layers, P) int32: the plan's rows at `indices`; elsewhere SGLang's own default, which nothing reads."""
    placed = plan.placement.physical_to_logical_map
    rows = np.tile(np.arange(placed.shape[1], dtype=np.int32) % plan.fingerprint.num_experts, (num_hidden_layers, 1))
    rows[indices] = placed
    return rows


def expert_maps(plan: Plan) -> np.ndarray:
    """(L, G, E) int32: the local id of expert e on rank g, -1 where it is elsewhere. One copy of each expert.

    With experts 2 0 | 3 1 on two ranks: rank 0 has [1, -1, 0, -1], rank 1 [-1, 1, -1, 0].
    """
    placed, G = plan.placement.physical_to_logical_map.astype(np.int64), plan.topology.ep_size
    layers, physical = placed.shape
    maps = np.full((layers, G, plan.fingerprint.num_experts), -1, np.int32)
    slots = np.arange(physical)
    width = physical // G
    maps[np.arange(layers)[:, None], slots // width, placed] = slots % width
    return maps


def _layers(plan: Plan, model: Path) -> tuple[list[int], int]:
    """The decoder layers that the plan's layers are, and how many decoder layers there are."""
    config = read_config(model)
    check_config(plan, config, model)
    depth = config_count(config, "num_hidden_layers")
    require(depth <= MOST_LAYERS, f"{model}/config.json says that there are {depth} layers")
    indices = moe_layer_indices(tensor_names(model), depth)
    check_num_layers(plan, len(indices), model)
    return indices, depth


def check_out_file(out: Path) -> None:
    require(out.suffix == ".json", f"{out} must end in .json: an engine knows the format by it")
    require(not out.exists(), f"{out} exists: remove it or choose another name")


def _write(out: Path, value: dict[str, Any]) -> None:
    with atomic_file(out) as staged:
        staged.write_text(json.dumps(value) + "\n", encoding="utf-8")
