"""Sizes that a file declares are looked at before anything is allocated by them: a small file never fills memory."""

import json
import shutil
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from models import build
from safetensors.numpy import save_file
from synthetic import random_trace
from test_plan import saved

from lab.save import save_trace
from semmoe.checkpoint.directory import read_config
from semmoe.core import Placement
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.io.bounds import MOST_EXPERTS
from semmoe.plan import load_plan
from semmoe.traces.trace import open_trace

SIZES = ("vocab_size", "num_layers", "num_experts", "top_k", "num_groups", "hidden_size", "expert_size")
HUGE = (200_000_000, 10**9, 2**62)


def with_value(path, section, name, value):
    """Change one number of a JSON file."""
    content = json.loads(path.read_text())
    content[section][name] = value
    path.write_text(json.dumps(content))


@pytest.fixture
def no_memory():
    """At most 32 MB are allocated at any time of the test."""
    tracemalloc.start()
    yield
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 32e6


@pytest.fixture(scope="module")
def plan_folder(tmp_path_factory):
    return saved("linear", tmp_path_factory.mktemp("plans"))


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize(("section", "name"), [
    *(("fingerprint", name) for name in SIZES),
    *(("topology", name) for name in ("ep_size", "dp_size", "attn_tp_size", "num_nodes")),
])  # fmt: skip
def test_a_plan_that_declares_a_huge_size_is_refused(plan_folder, section, name, value, no_memory):
    header = plan_folder / "plan.json"
    before = header.read_text()
    try:
        with_value(header, section, name, value)
        with pytest.raises(ValueError, match=name):
            load_plan(plan_folder)
    finally:
        header.write_text(before)


def test_few_physical_experts_for_many_experts_are_refused_in_a_small_plan(plan_folder, tmp_path, no_memory):
    """Every size is within its bounds, but an array by layer, physical expert and expert would have 10**12 entries."""
    content = json.loads((plan_folder / "plan.json").read_text())
    content["fingerprint"] |= {"num_experts": MOST_EXPERTS, "num_layers": 16, "vocab_size": 20}
    content["profiled_requests"] = False
    (tmp_path / "plan.json").write_text(json.dumps(content))
    save_file({"physical_to_logical_map": np.zeros((16, 8), np.int32)}, tmp_path / "plan.safetensors")
    with pytest.raises(ValueError, match="8 physical experts cannot hold 4096 experts"):
        load_plan(tmp_path)


@pytest.mark.parametrize(("sizes", "message"), [
    ({"num_layers": 1024, "num_experts": 4096}, "num_layers x num_experts x num_experts"),
    ({"num_layers": 1024, "vocab_size": 1 << 22}, "num_layers x vocab_size"),
])  # fmt: skip
def test_sizes_are_bounded_together_too(plan_folder, tmp_path, sizes, message, no_memory):
    content = json.loads((plan_folder / "plan.json").read_text())
    content["fingerprint"] |= sizes
    (tmp_path / "plan.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message):
        load_plan(tmp_path)


def test_one_expert_with_all_copies_is_no_table_of_copies(no_memory):
    layout = np.zeros((64, 1 << 15), np.int32)
    layout[:, :256] = np.arange(256)
    placement = Placement(physical_to_logical_map=layout, num_experts=256, ep_size=2)
    with pytest.raises(ValueError, match="x most copies"):
        placement.logical_to_physical_map  # noqa: B018


@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("name", SIZES)
def test_a_trace_that_declares_a_huge_size_is_refused(tmp_path, name, value, no_memory):
    save_trace(random_trace(0), tmp_path / "trace")
    with_value(tmp_path / "trace" / "trace.json", "fingerprint", name, value)
    with pytest.raises(ValueError, match=name):
        open_trace(tmp_path / "trace")


def test_a_header_of_gigabytes_is_not_read(tmp_path):
    """A sparse file takes no room on the disk."""
    for name, read in (("plan.json", load_plan), ("trace.json", open_trace), ("config.json", read_config)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 40)
        with pytest.raises(ValueError, match=f"{name} holds more than 134,217,728 bytes"):
            read(tmp_path)


def test_arrays_of_a_terabyte_are_not_read(plan_folder, tmp_path):
    shutil.copy(plan_folder / "plan.json", tmp_path)
    with (tmp_path / "plan.safetensors").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match=r"plan\.safetensors has 1,099,511,627,776 bytes, more than"):
        load_plan(tmp_path)


@pytest.mark.parametrize(
    ("field", "size", "said"),
    [("num_hidden_layers", 1025, "claims 1025 layers, more than 1024"),
     ("num_hidden_layers", 10**9, "claims 1000000000 layers, more than 1024"),
     ("num_experts", 10**9, "num_experts must lie between 1 and 4,096, not 1000000000"),
     ("vocab_size", 10**9, "vocab_size must lie between 1 and 4,194,304, not 1000000000")],
)  # fmt: skip
def test_a_model_that_declares_a_huge_size_is_refused(tmp_path, field, size, said):
    config = Path(build("qwen3_moe", tmp_path)) / "config.json"
    sizes = json.loads(config.read_text())
    field = "num_local_experts" if field not in sizes else field
    config.write_text(json.dumps(sizes | {field: size}))
    with pytest.raises(ValueError, match=said):
        fingerprint_of(str(config.parent))
