"""The examples do what they say."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import synthetic

from semmoe.trace import open_trace, save_trace

EXAMPLES = Path(__file__).parents[1] / "examples"


def example_file(tokens, first, seed):
    """One file of the public data's layout: 24 layers of top-4 for the generated tokens but the last."""
    rng = np.random.default_rng(seed)
    routed = [
        {f"token_{p}": {f"layer_{i}": {"selected_experts": rng.permutation(32)[:4].tolist()} for i in range(24)}}
        for p in range(first, len(tokens) - 1)
    ]
    return {"row_index": seed, "dataset": "d", "category": "c", "full_text": tokens, "router_data": routed}


def test_the_public_routing_data_converts_to_a_trace(tmp_path):
    folder = tmp_path / "checkout" / "data" / "d"
    folder.mkdir(parents=True)
    files = {"b": example_file(["x", "y", "z", "y"], 1, 1), "a": example_file(["p", "x", "q", "r", "s"], 2, 2)}
    for name, content in files.items():
        (folder / f"{name}_examples.json").write_text(json.dumps(content))
    (folder / "other.json").write_text("[]")
    convert = runpy.run_path(str(EXAMPLES / "convert_fingerprinting.py"))["convert"]
    assert convert(tmp_path / "checkout", tmp_path / "t.npz") == 2
    trace = open_trace(tmp_path / "t.npz")
    assert trace.fingerprint.vocab_size == 7  # p x q r s, then y z
    assert trace.prompt(0).tolist() == [0, 1]  # file a comes first
    assert trace.token_ids.tolist() == [2, 3, 5, 6]
    expected = files["a"]["router_data"][0]["token_2"]["layer_5"]["selected_experts"]
    assert trace.expert_ids[0, 5].tolist() == expected


def test_the_library_example_runs(tmp_path):
    save_trace(synthetic.random_trace(0, experts=8, requests=20), tmp_path / "trace")
    command = [sys.executable, EXAMPLES / "library.py", tmp_path / "trace"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "semmoe: ReplayResult(local activation rate" in result.stdout
