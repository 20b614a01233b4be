"""Renumber the experts of a checkpoint, so that contiguous placement (every engine's default) is the plan's placement.

Position p of a MoE layer holds the old expert order[p] = physical_to_logical_map[layer, p]. With four experts on two
ranks and order 2 0 3 1, new expert 0 is old expert 2, so rank 0 (experts 0 and 1) computes old experts 2 and 0:

    old name or row   0  1  2  3
    new name or row   1  3  0  2        experts.2.up_proj.weight -> experts.0.up_proj.weight; gate row 2 -> row 0

Where each expert has its own tensors, their bytes stay in place and their names change in the header and the index.
Packed tensors and router rows are copied in the new order; a hash-routed layer's table gets the new numbers. All else
is copied. Router and experts get the same numbers, so the model computes the same up to ties between router scores.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from semmoe.checkpoint.directory import (
    EXPERT_FIELDS,
    INDEX,
    TOP_K_FIELDS,
    Checkpoint,
    config_count,
    open_checkpoint,
    other_files,
)
from semmoe.checkpoint.layout import MoeLayer, find_moe_layers
from semmoe.checkpoint.shards import Progress, Stage, Tensor, write_shard
from semmoe.checkpoint.verify import verify
from semmoe.core import Plan
from semmoe.io.bounds import check_range
from semmoe.io.files import atomic_directory, check_output, read_object, save_json

RECORD = "semmoe_relabelling.json"
ONE_EXPERT = re.compile(
    r"layers\W*\.(?P<layer>\d+)\W*\.(?P<block>\w+)\W*\.experts\W*\.(?P<expert>\d+)\b(?P<part>[\w.]*)"
)


class LayerRecord(BaseModel):
    """How one MoE layer was renumbered."""

    model_config = ConfigDict(extra="forbid", strict=True)
    layer: int  # index of the decoder layer
    experts: list[int]  # (E,) the old expert at each new number


class Record(BaseModel):
    """`semmoe_relabelling.json`: the renumbering, so that tools can show it and undo it."""

    model_config = ConfigDict(extra="forbid", strict=True)
    schema_version: int = 1
    model: str
    method: str
    ep_size: int
    plan_hash: str  # SHA-256 of plan.json followed by plan.safetensors
    trace_hash: str
    layers: list[LayerRecord]


@dataclass(frozen=True, kw_only=True)
class Relabelled:
    """The result of `relabel`."""

    layers: int
    tensors_renamed: int
    tensors_permuted: int
    bytes: int
    left_out: list[str]  # weight files of other formats, not copied
    verification: dict[str, list[int]]  # "layers": the decoder layers whose experts were compared


def relabel(
    plan: Plan, model: Path, out: Path, *, plan_hash: str = "", stage: Stage = lambda what, total: lambda done: None
) -> Relabelled:
    """Copy the model directory `model` to `out` with its experts renumbered by `plan`, and verify the copy.

    `out` appears only when it is complete. Raises ValueError if plan, model and layout do not match or `out` is in
    use, RuntimeError if the verification fails.
    """
    model, out = Path(model), Path(out)
    check_output(out, directory=True, inputs=(model,))
    orders = orders_of(plan)
    source = _open_source(model)
    check_config(plan, source.config, model)
    layers = _renumberable(source, plan.fingerprint.num_experts)
    check_num_layers(plan, len(layers), model)
    check_output(out, directory=True, room=source.nbytes)
    with atomic_directory(out) as staged:
        left_out = write_relabelled(source, layers, orders, staged, stage("writing", source.nbytes))
        save_json(staged / RECORD, _record(plan, layers, plan_hash))
        compared = verify(source, open_checkpoint(staged), orders, stage)
    return Relabelled(
        layers=len(layers),
        tensors_renamed=len(_renames(layers, orders)),
        tensors_permuted=sum(len(layer.by_row + layer.tables) for layer, _ in _moved(layers, orders)),
        bytes=source.nbytes,
        left_out=left_out,
        verification={"layers": compared},
    )


def _record(plan: Plan, layers: list[MoeLayer], plan_hash: str) -> Record:
    orders = plan.placement.physical_to_logical_map.tolist()
    return Record(
        model=plan.fingerprint.model,
        method=plan.method,
        ep_size=plan.topology.ep_size,
        plan_hash=plan_hash,
        trace_hash=plan.trace_hash,
        layers=[LayerRecord(layer=m.index, experts=order) for m, order in zip(layers, orders, strict=True)],
    )


def _open_source(model: Path) -> Checkpoint:
    source = open_checkpoint(model)
    other_files(source)  # refuses what cannot be copied, before anything else is read
    if (model / RECORD).exists():
        raise ValueError(f"{model} is relabelled already: apply the plan to the original model")
    return source


def _renumberable(source: Checkpoint, num_experts: int) -> list[MoeLayer]:
    """The MoE layers of a checkpoint. Raises ValueError if a configuration file has a rule for a single expert."""
    layers = find_moe_layers(source, num_experts)
    indices = {layer.index for layer in layers}
    for path in sorted([source.path / "config.json", *source.path.glob("*quant*.json")]):
        named: dict[tuple[str, str, str], set[int]] = {}
        for match in ONE_EXPERT.finditer(json.dumps(read_object(path))):
            if int(match["layer"]) in indices:
                named.setdefault((match["layer"], match["block"], match["part"]), set()).add(int(match["expert"]))
        for (layer, block, part), experts in named.items():
            if len(experts) != num_experts:
                example = f"layers.{layer}.{block}.experts.{min(experts)}{part}"
                raise ValueError(f"{path} has a rule for single experts ({example}): not supported")
    return layers


def check_relabels(model: Path, num_experts: int) -> None:
    """Raise ValueError for a model that no plan can relabel; only headers of its shards are read."""
    _renumberable(_open_source(model), num_experts)


def orders_of(plan: Plan) -> np.ndarray:
    """Return the old expert at each position (L, E) int64; raise ValueError if a checkpoint cannot follow the plan."""
    f, physical_map = plan.fingerprint, plan.placement.physical_to_logical_map.astype(np.int64)
    redundant = plan.placement.redundant_experts
    if redundant != 0:
        reason = "a checkpoint has one copy of every expert; use --to sglang, or solve without redundant experts"
        raise ValueError(f"this plan has {redundant} redundant experts: {reason}")
    groups = (physical_map // (f.num_experts // f.num_groups)).reshape(len(physical_map), f.num_groups, -1)
    split = (groups != groups[:, :, :1]).any(axis=(1, 2))
    if split.any():
        reason = "the router limits tokens to groups of consecutive experts, so a group must stay together"
        raise ValueError(f"MoE layer {int(split.argmax())} of this plan splits a gate group over ranks: {reason}")
    return physical_map


def check_config(plan: Plan, config: dict[str, Any], model: Path) -> None:
    """Raise ValueError if config.json shows that the plan is for another model; hashes are the full check."""
    f = plan.fingerprint
    expected = {EXPERT_FIELDS: f.num_experts, TOP_K_FIELDS: f.top_k, ("vocab_size",): f.vocab_size}
    for names, number in expected.items():
        found = config_count(config, *names)
        if found not in (0, number):
            difference = f"{names[0]} is {number} for {f.model!r} and {found} for {str(model)!r}"
            raise ValueError(f"this plan was made for another model: {difference}")
    if config_count(config, "num_hidden_layers") == 0:
        raise ValueError(f"{model}/config.json does not say num_hidden_layers")


def check_num_layers(plan: Plan, found: int, model: Path) -> None:
    expected = plan.fingerprint.num_layers
    if found != expected:
        raise ValueError(f"{model} has {found} MoE layers, the plan has {expected}")


def write_relabelled(
    source: Checkpoint, layers: list[MoeLayer], orders: np.ndarray, target: Path, progress: Progress
) -> list[str]:
    """Write every file of the checkpoint into the directory `target`; returns the weight files that were left out.

    orders: (L, E) the old expert at each new number.
    """
    names = _renames(layers, orders)
    contents: dict[str, Iterable[bytes]] = {}  # of the tensors whose rows or whose numbers of experts change
    for layer, order in _moved(layers, orders):
        contents |= {name: source.tensors[name].reordered(order) for name in layer.by_row}
        contents |= {name: [_renumbered(name, source.tensors[name], order)] for name in layer.tables}
    for shard in source.shards:
        write_shard(shard, target / shard.path.name, names, contents, progress)
    if source.index is not None:
        files = {names.get(name, name): file for name, file in source.index["weight_map"].items()}
        index = json.dumps(source.index | {"weight_map": files}, indent=2, sort_keys=True)
        (target / INDEX).write_text(index + "\n", encoding="utf-8")
    copied, left_out = other_files(source)
    for name, file in copied.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, target / name)
    return left_out


def _renames(layers: list[MoeLayer], orders: np.ndarray) -> dict[str, str]:
    """New name by old name, of the tensors whose name changes."""
    names: dict[str, str] = {}
    for layer, order in _moved(layers, orders):
        for new, old in enumerate(order.tolist()):
            if new != old:
                parts = layer.parts.get(old, ())
                names |= {layer.expert_tensor(old, p): layer.expert_tensor(new, p) for p in parts}
    return names


def _renumbered(name: str, table: Tensor, order: np.ndarray) -> bytes:
    """Return the bytes of table (V, K) with new expert numbers; order (E,): the old expert at each new number."""
    values = table.values()
    check_range(f"{name}: expert id", values, len(order), "experts")
    return np.argsort(order).astype(values.dtype)[values].tobytes()


def _moved(layers: list[MoeLayer], orders: np.ndarray) -> list[tuple[MoeLayer, np.ndarray]]:
    """The layers in which an expert gets another number, and the old expert (E,) at each new number."""
    return [(m, o) for m, o in zip(layers, orders, strict=True) if (o != np.arange(len(o))).any()]


def plan_digest(path: Path) -> str:
    """SHA-256 of a plan directory: over plan.json followed by plan.safetensors."""
    files = (Path(path) / "plan.json", Path(path) / "plan.safetensors")
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
