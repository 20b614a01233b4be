"""Write a plan's placement as SGLang's own file, its expert location.

Experts keep their numbers and the engine reads where each expert is, so no weight changes. The file has a row for
every decoder layer of the model; a plan knows only those with experts.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from semmoe.checkpoint.directory import read_config
from semmoe.checkpoint.layout import decoder_layers
from semmoe.checkpoint.relabel import check_config, check_num_layers
from semmoe.core import Plan
from semmoe.files import atomic_file, check_output


def write_sglang(plan: Plan, model: Path, out: Path) -> list[str]:
    """Write the file for SGLang's `--init-expert-location`; returns the flags to start SGLang with."""
    check_out_file(out)
    indices, depth = _layers(plan, model)
    with atomic_file(out) as staged:
        location = {"physical_to_logical_map": sglang_map(plan, indices, depth).tolist()}
        staged.write_text(json.dumps(location) + "\n", encoding="utf-8")
    return sglang_flags(plan, out)


def sglang_flags(plan: Plan, location: Path) -> list[str]:
    """Flags that give SGLang this plan's topology and the placement in the file `location`."""
    topology, redundant = plan.topology, plan.placement.redundant_experts
    flags = ["--tp-size", str(topology.ep_size), "--ep-size", str(topology.ep_size)]
    if topology.dp_size > 1:
        flags += ["--dp-size", str(topology.dp_size), "--enable-dp-attention"]
    flags += ["--init-expert-location", str(location)]
    return flags + (["--ep-num-redundant-experts", str(redundant)] if redundant else [])


def sglang_map(plan: Plan, indices: list[int], num_hidden_layers: int) -> np.ndarray:
    """(decoder layers, P) int32: the plan's rows at `indices`; in other rows SGLang's default, which nothing reads."""
    placed = plan.placement.physical_to_logical_map
    rows = np.tile(np.arange(placed.shape[1], dtype=np.int32) % plan.fingerprint.num_experts, (num_hidden_layers, 1))
    rows[indices] = placed
    return rows


def _layers(plan: Plan, model: Path) -> tuple[list[int], int]:
    """`decoder_layers` of a model that the plan fits."""
    check_config(plan, read_config(model), model)
    indices, depth = decoder_layers(model)
    check_num_layers(plan, len(indices), model)
    return indices, depth


def check_out_file(out: Path, inputs: Iterable[Path | str] = ()) -> None:
    if out.suffix != ".json":
        raise ValueError(f"{out} must end in .json: an engine recognises the format by it")
    check_output(out, inputs=inputs)
