"""The examples do what they say."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import synthetic

from lab.save import save_trace
from semmoe.gateway import Scorer
from semmoe.plan import save_plan
from semmoe.solver import solve
from semmoe.topology import Topology
from semmoe.traces.trace import open_trace

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


@pytest.mark.slow
def test_the_notebook_runs_and_shows_figures_and_the_verdict(monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    notebook = nbformat.read(EXAMPLES / "notebook.ipynb", as_version=4)
    NotebookClient(notebook, timeout=300).execute()
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    values = "".join(o.get("data", {}).get("text/plain", "") for o in shown)
    assert "semmoe: ReplayResult(local activation rate" in values
    assert "Plan('semmoe'" in values
    said = "".join(o.get("text", "") for o in shown)
    assert "worth it" in said
    assert "report: " in said


@pytest.mark.slow
def test_a_component_of_dynamo_names_the_rank_that_the_plan_prefers(tmp_path):
    pytest.importorskip("dynamo.runtime", reason="in an environment of its own: make test-clusters")
    trace = synthetic.planted_trace(2, 1, requests_per_group=40)[0]
    save_plan(solve(trace, Topology(ep_size=2, dp_size=2)), tmp_path / "plan")
    prompts = [trace.prompt(request).tolist() for request in range(8)]
    requests = [{"model": "m", "token_ids": prompt} for prompt in prompts]
    requests.append({"model": "m", "token_ids": prompts[0], "routing": {"dp_rank": 5, "priority": 1}})
    site, router = Path(__file__).with_name("dynamo_site.py"), EXAMPLES / "dynamo_router.py"
    environment = os.environ | {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": str(tmp_path / "found")}
    environment |= {"DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}

    def start(*words):
        return subprocess.Popen([sys.executable, *map(str, words)], env=environment)

    others = [start(site, "engine", "dynamo.backend.generate")]
    try:
        others.append(start(router, tmp_path / "plan", "dynamo.backend.generate", "dynamo.semmoe.generate"))
        client = [sys.executable, site, "client", "dynamo.semmoe.generate"]
        done = subprocess.run(
            client, input=json.dumps(requests), env=environment, capture_output=True, text=True, timeout=90
        )
    finally:
        for process in others:
            process.terminate()
            process.wait(30)
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [[a["token_ids"][0] for a in answer] for answer in answers] == [r["token_ids"] for r in requests]
    scorer = Scorer(tmp_path / "plan")
    best = [int(scorer(prompt)[0][0]) for prompt in prompts]
    assert sorted(set(best)) == [0, 1]
    assert [{a["rank"] for a in answer} for answer in answers] == [{rank} for rank in [*best, 5]]
