"""The table of the files by which engines tell where experts are, how often they are used, and by which tokens.

`semmoe import` reads them, and `semmoe apply --to` writes those that have a writer. To add one, add a row to FORMATS,
its reader and its writer, a row in docs/reference.md, and a test. Files are untrusted: sizes are bounded, values are
checked before they are cast, nothing is unpickled but tensors.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from semmoe.checkpoint import engine_maps as maps
from semmoe.checkpoint import engine_routes as routes
from semmoe.core import Plan
from semmoe.io.files import MOST_JSON_BYTES, read_limited

MAX_FILE_BYTES = 1 << 33
LINES = ".jsonl"
BECOMES = {"map": "a plan, method `map`", "counts": "a plan, method `eplb`", "answers": "a trace"}


@dataclass(frozen=True)
class Format:
    """One kind of file, recognized by its suffix and by the entry `key` of its object; no key: it holds no object."""

    name: str
    kind: str  # one of BECOMES
    suffixes: tuple[str, ...]
    key: str
    read: Callable[..., Any]  # content -> Experts; for a trace: content, Source -> Iterator[Request]
    write: Callable[[Plan, Path, Path], list[str]] | None = None  # plan, model, file -> flags or lines to start with
    start: str = ""  # what to do with them

    def holds(self, content: Any) -> bool:
        """Whether a file's content is of this format."""
        return self.key in content if isinstance(content, dict) else not self.key


FORMATS = (  # the first that fits is taken
    Format(
        "sglang", "map", (".json", ".pt"), maps.MAP_KEY, maps.read_sglang_map, maps.write_sglang, "start SGLang with"
    ),
    Format("sglang-counts", "counts", (".json", ".pt"), maps.COUNTS_KEY, maps.read_sglang_counts),
    Format(
        "ascend", "map", (".json",), "layer_list", maps.read_ascend_map, maps.write_ascend, "start vLLM-Ascend with"
    ),
    Format(
        "trtllm", "map", (".yaml", ".yml"), "initial_global_assignments", maps.read_tensorrt_map, maps.write_tensorrt,
        "add these lines to the file of trtllm-serve's --config",
    ),
    Format(
        "eplb", "map", (".npy", ".pt", ".json"), "", maps.read_array, maps.write_array,
        "the first array that EPLB's rebalance_experts returns, for",
    ),
    Format("answers", "answers", (LINES,), "", routes.read_answers),
)  # fmt: skip
WRITTEN = {one.name: one for one in FORMATS if one.write is not None}
NO_FILE = {
    "vllm": "vLLM reads no map of experts from a file: serve the plan with `semmoe serve --engine vllm`, or give vLLM "
    "a checkpoint of `semmoe apply --to checkpoint`"
}


def load(path: Path) -> tuple[Format, Any]:
    """The format of a file and its content, for the format's reader. Raises ValueError that names the file."""
    if path.is_dir():
        raise ValueError(f"{path} is a directory: name a file")
    if not path.is_file():
        raise ValueError(f"{path} does not exist, or is not a file")
    suffix = LINES if LINES in path.suffixes else path.suffix
    if suffix not in LOADERS:
        raise ValueError(f"{path} must be {', '.join(LOADERS)}: see docs/reference.md")
    if path.stat().st_size > MAX_FILE_BYTES and suffix != LINES:
        raise ValueError(f"{path} has more than {MAX_FILE_BYTES:,} bytes")
    read, fault = LOADERS[suffix]
    try:
        content = read(path)
    except (OSError, ImportError):
        raise
    except Exception as error:  # a damaged file can make yaml, NumPy and torch raise almost anything
        raise ValueError(f"{path} {fault} ({' '.join(str(error).split())[:300]})") from None
    possible = [one for one in FORMATS if suffix in one.suffixes]
    for one in possible:
        if one.holds(content):
            return one, content
    raise ValueError(f"{path}: give an object with {' or '.join(one.key for one in possible if one.key)}")


def _load_yaml(path: Path) -> Any:
    import yaml

    return yaml.safe_load(bytes(read_limited(path, MOST_JSON_BYTES)))


def _load_pt(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=True, map_location="cpu")


LOADERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    ".json": (lambda path: json.loads(read_limited(path, MOST_JSON_BYTES)), "is not valid JSON"),
    ".npy": (lambda path: np.load(path, allow_pickle=False), "holds no array"),
    ".pt": (_load_pt, "holds something else than tensors"),
    ".yaml": (_load_yaml, "is not valid YAML"),
    ".yml": (_load_yaml, "is not valid YAML"),
    LINES: (lambda path: path, ""),  # its reader reads a line at a time
}
