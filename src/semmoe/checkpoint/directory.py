"""A model directory in Hugging Face format: its configuration, its safetensors shards, and its other files."""

import json
import os
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from semmoe.checkpoint.shards import Shard, Tensor, read_shard
from semmoe.io.files import read_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
OTHER_WEIGHTS = {".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".safetensors"}
BOOKKEEPING = {".git", ".cache"}  # kept by git and by download tools
# Names of a configuration for the number of experts of a layer, and of a token's.
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TOP_K_FIELDS = ("num_experts_per_tok", "moe_topk", "moe_k")
NAMES_EXPERTS = re.compile(r"expert|gate|router|up_proj|down_proj|\bw[123]\b|all-linear")


@dataclass(frozen=True)
class Checkpoint:
    """A model directory of which only headers have been read; tensors are read when they are needed."""

    path: Path
    config: dict[str, Any]
    shards: list[Shard]
    index: dict[str, Any] | None  # None if the model is the single file model.safetensors

    @cached_property
    def tensors(self) -> dict[str, Tensor]:
        return {name: tensor for shard in self.shards for name, tensor in shard.tensors.items()}

    @property
    def nbytes(self) -> int:
        return sum(shard.nbytes for shard in self.shards)


def open_checkpoint(path: Path) -> Checkpoint:
    """Read and check configuration, index and the header of every shard; raises ValueError that names the fault."""
    config, index = read_config(path), _read_index(path)
    stated = index["weight_map"] if index else {}
    shards = [read_shard(path / file) for file in sorted(set(stated.values())) or [SINGLE]]
    owners: dict[str, str] = {}
    for name, file in ((name, shard.path.name) for shard in shards for name in shard.tensors):
        if owners.setdefault(name, file) != file:
            raise ValueError(f"{path}: {name} is in both {owners[name]} and {file}")
    for name, file in stated.items():
        if owners.get(name) != file:
            raise ValueError(f"{path / INDEX} says that {name} is in {file}, which has no such tensor")
    return Checkpoint(path, config, shards, index)


def read_config(path: Path) -> dict[str, Any]:
    """config.json as an object; in a multimodal model the fields of the language model take precedence.

    The type and the classes stay the model's own, since engines have other classes for it than for its language model.
    """
    config = read_object(config_file(path))
    text = config.get("text_config")
    own = {name: config[name] for name in ("model_type", "architectures") if name in config}
    return config | text | own if isinstance(text, dict) else config


def config_file(path: Path) -> Path:
    """Return the path of a model's config.json; raise ValueError if the file is missing."""
    if not (path / "config.json").is_file():
        raise ValueError(f"no model at {path}: config.json is missing")
    return path / "config.json"


def uniform(value: Any) -> Any:
    """The value itself, or the one that a list by layer repeats, as Hunyuan's configurations do."""
    return value[0] if isinstance(value, list) and value and all(one == value[0] for one in value) else value


def config_count(config: dict[str, Any], *names: str) -> int:
    """Return the first field of `names` that is set, or 0. Raises ValueError if its value is not a count."""
    value = uniform(next((config[name] for name in names if config.get(name) is not None), 0))
    if type(value) is not int or value < 0:
        raise ValueError(f"config.json: {names[0]} is {value!r}, not a count")
    return value


def tensor_names(path: Path) -> list[str]:
    """Names of all tensors; if there is an index, no shard is opened."""
    index = _read_index(path)
    return list(read_shard(path / SINGLE).tensors) if index is None else list(index["weight_map"])


def _read_index(path: Path) -> dict[str, Any] | None:
    """The index, checked; None if the model is one file."""
    if (path / INDEX).is_file():
        index = read_object(path / INDEX)
        files = index.get("weight_map")
        if not isinstance(files, dict) or not files or not all(map(_is_shard, files.values())):
            raise ValueError(f"{path / INDEX}: weight_map must name safetensors files of this directory")
        return index
    if (path / SINGLE).is_file():
        return None
    others = sorted(p.name for p in path.iterdir() if p.suffix in OTHER_WEIGHTS)
    convert = f"; it holds {others[0]}: convert the model to safetensors first" if others else ""
    raise ValueError(f"{path} has neither {SINGLE} nor an index of shards{convert}")


def _is_shard(file: Any) -> bool:
    """Whether `file` is a plain file name: an index must not refer to files outside its directory."""
    return isinstance(file, str) and Path(file).name == file and file.endswith(".safetensors") and "\0" not in file


def _refuse_adapter(path: Path) -> None:
    """Raise ValueError if the directory has a LoRA adapter that changes experts or gates.

    Such an adapter uses the old expert numbers, in tensor names or in the order of rows, so that after relabelling it
    would be applied to the wrong experts.
    """
    if not (path / ADAPTER).is_file():
        return
    adapter = read_object(path / ADAPTER)
    targets = json.dumps([adapter.get(name) for name in ("target_modules", "target_parameters", "modules_to_save")])
    if NAMES_EXPERTS.search(targets):
        reason = "merge it into the model first, since it would change the wrong experts after relabelling"
        raise ValueError(f"{path / ADAPTER} is a LoRA adapter on experts or gates ({targets[:200]}): {reason}")


def other_files(source: Checkpoint) -> tuple[dict[str, Path], list[str]]:
    """The files to copy without change, by name relative to the directory: configuration, tokenizer, code, license.

    Weights in other files (another format, another folder) are left out, because they use the old expert numbers and
    an engine could load them: their names come second. Raises ValueError for a LoRA adapter on experts, for an entry
    that is neither a file nor a folder, and for a link out of the directory, which could copy any file of this machine.
    """
    copied: dict[str, Path] = {}
    left_out = []
    relabelled = {shard.path.name for shard in source.shards} | {INDEX}
    for path in sorted(source.path.rglob("*")):  # it does not follow a link to a directory
        inside = path.relative_to(source.path)
        name = str(inside)
        if inside.parts[0] in BOOKKEEPING or name in relabelled or (path.is_dir() and not path.is_symlink()):
            continue
        if path.suffix in OTHER_WEIGHTS and not path.name.startswith("adapter_model."):
            left_out.append(name)
        else:
            copied[name] = _own_file(path, source.path)
    _refuse_adapter(source.path)
    return copied, left_out


def _own_file(path: Path, root: Path) -> Path:
    """The file behind `path`, which must be in the directory or, for a snapshot of the hub, among the cache's blobs."""
    file, whole = Path(os.path.realpath(path)), root.resolve()  # realpath accepts a link to itself
    homes = [whole, whole.parents[1] / "blobs"] if whole.parent.name == "snapshots" else [whole]
    if not any(home in file.parents for home in homes):
        remedy = "put the file itself there, or remove the link"
        raise ValueError(f"{path} is a link out of the model's directory: {remedy}")
    if not file.is_file():
        raise ValueError(f"{path} is neither a file nor a directory: remove it")
    return file
