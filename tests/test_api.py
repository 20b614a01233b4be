"""The public face: the verbs are functions of the package, and results show themselves."""

import subprocess
import sys

import numpy as np
import pytest
from synthetic import random_trace

import semmoe


def test_the_verbs_are_functions_whatever_is_imported_first():
    code = (
        "import semmoe.solver, semmoe.evaluation.replay, semmoe.traces.split, semmoe;"
        "import semmoe.engines.transformers.profile;"
        "verbs = 'open_trace profile split solve replay compare load_plan save_plan'.split();"
        "print([name for name in verbs if not callable(getattr(semmoe, name))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_from_a_trace_to_a_comparison_without_naming_a_module(tmp_path):
    trace = random_trace(0, requests=30)
    profile, evaluation = semmoe.split(trace)
    topology = semmoe.Topology(ep_size=2)
    plan = semmoe.solve(profile, topology, semmoe.SolveSettings(method="eplb"))
    semmoe.save_plan(plan, tmp_path / "plan")
    assert semmoe.load_plan(tmp_path / "plan").method == "eplb"
    result = semmoe.replay(evaluation, plan)
    compared = semmoe.compare(profile, evaluation, topology, ["eplb"])
    assert list(compared.results) == ["linear", "eplb"]
    assert compared.results["eplb"].total.lar == result.total.lar


def test_a_plan_and_a_result_show_themselves_in_a_line():
    trace = random_trace(0, requests=30)
    plan = semmoe.solve(trace, semmoe.Topology(ep_size=2, dp_size=2), semmoe.SolveSettings(method="paper"))
    assert repr(plan) == (
        "Plan('paper', 'toy': 3 layers of 8 experts and 0 redundant over 2 ranks, attention dp, tokens by-position, "
        "requests paper-table)"
    )
    result = semmoe.replay(trace, plan)
    lar = f"{result.total.lar:.3f}"
    assert repr(result).startswith(f"ReplayResult(local activation rate {lar}, remote ranks per token ")
    compared = semmoe.compare(trace, trace, plan.topology, ["eplb"])
    assert repr(compared).count("\n") == 1


def test_profile_records_what_the_shipped_model_routes(tmp_path):
    pytest.importorskip("torch")
    prompts = ["A list is a sequence of values.", "The cat sat on the mat and looked at the moon."]
    settings = semmoe.ProfileSettings(max_new_tokens=2)
    trace = semmoe.profile(str(tiny()), prompts, tmp_path / "trace", settings)
    assert trace.num_requests == 2
    assert (np.diff(trace.request_offsets) == [len(trace.prompt(r)) + 1 for r in range(2)]).all()
    assert semmoe.profile(str(tiny()), prompts, tmp_path / "trace", settings).digest() == trace.digest()


def tiny():
    from semmoe.cli.demo import MODEL

    return MODEL
