"""`make reproduce`: items from the shipped model's routing and runs, their files, and what they are set beside."""

import csv
import gzip
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from synthetic import make_trace
from typer.testing import CliRunner

from lab import maps, plans, routing, run, runtime, serving
from lab.__main__ import app
from lab.inputs import Inputs
from lab.item import LackingError
from lab.methods import moetuner
from lab.readings import readings
from lab.results import serving_sweep
from lab.save import save_trace
from lab.subjects import FIELDS, field_of
from semmoe.placement.linear import vanilla_plan
from semmoe.settings import CoclusterSettings, SolveSettings
from semmoe.topology import Topology

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
FROM_FILES = [item.name for item in serving.ITEMS]
pytestmark = [pytest.mark.dist, pytest.mark.slow]


QUICK = SolveSettings(cocluster=CoclusterSettings(starts=1, steps=10))


@pytest.fixture(scope="module")
def inputs():
    return Inputs(per_domain=10, results=RESULTS, effort=QUICK)


@pytest.fixture(scope="module")
def made(inputs, tmp_path_factory):
    """An item's record and the folder of its files, each item made once."""
    out = tmp_path_factory.mktemp("reproduced")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "ALL", ("linear", "lab.methods.eldr", "paper", "semmoe"))
        patch.setattr(moetuner, "TIME_LIMIT", 0.5)
        for name, value in (("ROUNDS", 1), ("PROMPTS", 8), ("PAIR_ROUNDS", 2)):
            patch.setattr(runtime, name, value)
        yield lambda name: (inputs.once(f"test of {name}", lambda: run.make(run.ITEMS[name], inputs, out)), out)


def items():
    """All but table4; figure1 runs every set-up of the embedded engine, as others do in part."""
    return [pytest.param(n, marks=[pytest.mark.costly] * (n == "figure1")) for n in run.ITEMS if n != "table4"]


@pytest.mark.parametrize("name", items())
def test_every_item_leaves_data_a_picture_and_a_comparison(name, made):
    record, tmp_path = made(name)
    assert json.loads((tmp_path / f"{name}.json").read_text()) == json.loads(json.dumps(record))
    with (tmp_path / f"{name}.csv").open() as file:
        columns, *rows = csv.reader(file)
    assert columns == record["columns"]
    assert len(rows) == len(record["rows"]) > 0
    assert all(len(row) == len(columns) for row in rows)
    assert ElementTree.parse(tmp_path / f"{name}.svg").getroot().tag.endswith("svg")
    assert {"hardware", "seed"} < set(record["stated"])
    assert all(all(c.values()) for c in record["comparisons"])
    assert record["comparisons"]


def test_figure3_alone_profiles_nothing():
    class Untouched(Inputs):
        def _recorded(self, prompts):
            raise AssertionError("the model is not needed")

    rows = {row[0]: row[1:] for row in plans.figure3(Untouched()).rows}
    assert rows == {
        "as they come": [16, 0.5],
        "tokens moved": [16, 0.5],
        "experts moved": [8, 0.5],
        "both moved": [0, 1.0],
    }


def test_a_plan_beats_vanilla_in_what_is_reported(made):
    lar = {(row[1], row[2]): row[3] for row in made("figure5b")[0]["rows"]}
    assert lar["TP", "semmoe"] > lar["TP", "paper"] > lar["TP", "vanilla"] > 0.1
    assert lar["DP", "semmoe"] > lar["DP", "vanilla"]


def test_more_is_local_with_more_copies_and_all_with_every_expert_everywhere(made):
    lar = {row[0]: row[1] for row in made("figure5a")[0]["rows"]}
    assert 0.2 < lar["vanilla"] < lar["semmoe"] < lar["semmoe, 8 copies"] < lar["semmoe, 32 copies"]
    assert lar["every expert everywhere"] == 1.0


def test_the_all_to_all_share_is_of_the_experts_part():
    assert runtime.all_to_all_share({"attention": 9.0, "dispatch": 2.0, "combine": 1.0, "experts": 3.0}) == 0.5


def test_an_output_that_differs_stops_an_item(inputs, monkeypatch):
    from semmoe.engines.transformers import verify
    from semmoe.engines.transformers.generate import Configuration

    vanilla = vanilla_plan(inputs.shipped.trace.fingerprint, Topology(ep_size=2))
    monkeypatch.setattr(runtime, "_set_ups", lambda inputs: [Configuration(name="TP, vanilla", plan=vanilla)])
    monkeypatch.setattr(verify, "plain_generate", lambda model, prompts, settings: [[0] * 16 for _ in prompts])
    with pytest.raises(RuntimeError, match="outputs differ"):
        runtime.measured_layers(Inputs())


def test_correlation_is_that_of_numpy(inputs):
    source = inputs.shipped
    found = routing.layer_correlation(source, 1)
    E, ids = source.trace.fingerprint.num_experts, source.trace.expert_ids
    chosen = [(ids[:, l, :, None] == np.arange(E)).any(axis=1).astype(float) for l in (1, 2)]
    assert found[3, 5] == pytest.approx(np.corrcoef(chosen[0][:, 3], chosen[1][:, 5])[0, 1], abs=1e-6)


def test_shares_of_a_request_are_those_counted_by_hand(inputs):
    trace = inputs.shipped.trace
    shares = maps.request_shares(trace, 2)
    rows = slice(trace.request_offsets[3], trace.request_offsets[4])
    counted = np.bincount(trace.expert_ids[rows, 2].ravel(), minlength=trace.fingerprint.num_experts)
    assert np.allclose(shares[3], counted / counted.sum())


def test_neighbours_of_two_kinds_apart_are_all_of_their_kind():
    shares = np.repeat([[1.0, 0.0], [0.0, 1.0]], 10, axis=0)
    kinds = np.repeat(["a", "b"], 10)
    alike, chance = maps.like_neighbours(shares, kinds)
    assert (alike, chance) == (1.0, pytest.approx(9 / 19))
    mixed, _ = maps.like_neighbours(shares, np.tile(["a", "b"], 10))
    assert mixed == pytest.approx(0.4, abs=0.11)


def test_reordering_keeps_every_row_and_puts_clusters_together(monkeypatch):
    monkeypatch.setattr(maps, "CLUSTERS", 2)
    counts = np.zeros((8, 4))
    counts[::2, ::2] = counts[1::2, 1::2] = 2
    found = maps.reordered(counts, seed=0)
    assert found.sum() == pytest.approx(8)
    halves = found[:4, :2].sum() + found[4:, 2:].sum(), found[:4, 2:].sum() + found[4:, :2].sum()
    assert sorted(halves) == [pytest.approx(0), pytest.approx(8)]


def test_subjects_fall_into_fields_and_a_trace_with_them_makes_table4(inputs, tmp_path):
    assert field_of("high_school_statistics") == "mathematics"
    assert field_of("Organic Chemistry") == "science"
    assert field_of("professional_law") == "humanities"
    assert field_of("miscellaneous") == "other"
    subjects = [words[0] for words in FIELDS.values()]
    trace = inputs.shipped.trace
    np.savez(
        tmp_path / "t.npz", token_ids=trace.token_ids, expert_ids=trace.expert_ids, phase=trace.phase,
        request_offsets=trace.request_offsets, prompt_ids=trace.prompt_ids, prompt_offsets=trace.prompt_offsets,
    )  # fmt: skip
    examples = [{"category": subjects[r // 20 % 2]} for r in range(trace.num_requests)]
    meta = gzip.compress(json.dumps({"examples": examples, "vocab": []}).encode())
    (tmp_path / "t.meta.json.gz").write_bytes(meta)
    record = run.make(run.ITEMS["table4"], Inputs(traces=[tmp_path / "t.npz"]), tmp_path)
    assert {row[1] for row in record["rows"]} == {*list(FIELDS)[:2], plans.NOTHING}
    (tmp_path / "t.meta.json.gz").write_bytes(gzip.compress(b'{"examples": [1], "vocab": []}'))
    with pytest.raises(ValueError, match="category"):
        Inputs(traces=[tmp_path / "t.npz"]).others  # noqa: B018


def test_data_sets_are_the_kinds_of_table3(tmp_path):
    for name in ("poems", "sums"):
        lines = [json.dumps({"prompt": f"{name} {i} " * 20}) for i in range(24)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    found = Inputs(datasets=[tmp_path / "poems.jsonl", tmp_path / "sums.jsonl"], per_domain=20)
    rows = plans.table3(found).rows
    assert [row[1:3] for row in rows[:2]] == [["poems", "poems"], ["poems", "sums"]]


def test_items_of_engines_say_what_they_lack_and_write_nothing(tmp_path):
    for name in ("table4", *FROM_FILES):
        record = run.make(run.ITEMS[name], Inputs(), tmp_path / "out")
        assert "--trace" in record["lacks"] or "make bench" in record["lacks"]
    assert not (tmp_path / "out").exists()
    with pytest.raises(LackingError):
        serving.figure4(Inputs(results=tmp_path))


def sweep():
    visits = [("DP, vanilla", 10.0, 1000.0), ("DP, plan", 14.0, 900.0)]
    runs = {"light": (1.0, 100.0), "5 requests/s": (0.8, 400.0), "all at once": (1.5, 2000.0)}
    return {
        "settings": {"rounds": 1}, "sweeps": {"dp": {"objectives": {"median_ttft_ms": 500.0, "median_e2e_ms": 950.0},
                                                    "rates": [5.0]}},
        "visits": [{
            "round": 0, "name": name, "attention": "dp", "goodput": 5.0, "activity": {},
            "runs": {run: {"output_throughput": tokens * share, "request_throughput": 1.0, "median_ttft_ms": ttft,
                           "median_e2e_ms": e2e if run == "5 requests/s" else 90.0}
                     for run, (share, ttft) in runs.items()},
        } for name, tokens, e2e in visits],
    }  # fmt: skip


def test_throughput_counts_where_the_objectives_held(tmp_path):
    (tmp_path / "x.txt").write_text(f"$ bench\nEngine 1, torch\n{json.dumps(sweep())}\n")
    [part] = Inputs(results=tmp_path).parts
    found = serving_sweep(part)
    both = ("median_ttft_ms", "median_e2e_ms")
    assert serving.best_throughput(found, "dp", "DP, vanilla", both) == 10.0  # at the light load
    assert serving.best_throughput(found, "dp", "DP, plan", both) == 14.0
    assert serving.best_throughput(found, "dp", "DP, vanilla", ("median_e2e_ms",)) == 15.0  # all at once
    assert "Engine 1" in serving.figure4(Inputs(results=tmp_path)).rows[0]
    broken = {**sweep(), "visits": [{"name": 1}]}
    (tmp_path / "x.txt").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match=r"x\.txt"):
        serving.figure4(Inputs(results=tmp_path))


def test_latency_by_length_is_of_vanillas_in_the_same_run(tmp_path):
    times = {"TP, vanilla": (100.0, 400.0), "TP, MoETuner": (110.0, 400.0), "TP, plan, shuffle batch": (80.0, 300.0)}
    visits = [{"round": 0, "name": name, "attention": "tp", "goodput": 5.0, "activity": {},
               "runs": {"256 tokens": {"p99_ttft_ms": ttft, "median_e2e_ms": e2e}}}
              for name, (ttft, e2e) in times.items()]  # fmt: skip
    visits.insert(0, {**visits[0], "name": "DP, vanilla", "attention": "dp", "runs": {}})  # one sweep may be of both
    found = {"settings": {"rounds": 1, "length_requests": 30}, "visits": visits,
             "sweeps": {"tp": {"objectives": {}, "rates": []}}}  # fmt: skip
    (tmp_path / "x.txt").write_text(f"$ bench\nEngine 1, torch\n{json.dumps(found)}\n")
    result = serving.table2(Inputs(results=tmp_path))
    assert [row[1:4] for row in result.rows[:2]] == [["TP, vanilla", "256 tokens", 100.0],
                                                     ["TP, MoETuner", "256 tokens", 110.0]]  # fmt: skip
    said = {c.what.split("; ")[1]: c.measured for c in result.comparisons}
    assert said == {"MoETuner": "1.10 and 1.00", "plan, shuffle batch": "0.80 and 0.75"}
    (tmp_path / "y.txt").write_text((tmp_path / "x.txt").read_text())  # the same engine again stands by itself
    assert len(serving.table2(Inputs(results=tmp_path)).comparisons) == 4
    (tmp_path / "y.txt").unlink()
    (tmp_path / "x.txt").write_text(f"Engine 1, torch\n{json.dumps({**found, 'visits': visits[:1]})}\n")
    with pytest.raises(LackingError):
        serving.table2(Inputs(results=tmp_path))


def test_a_gain_is_what_paired_rounds_allow_to_claim(tmp_path):
    found, claim = sweep(), {"name": "DP, plan", "run": "light", "column": "request_throughput", "ratio": 1.3,
                             "low": 0.9, "high": 1.6, "placebo": [0.8, 1.2], "rounds": 7,
                             "says": "no difference seen"}  # fmt: skip
    (tmp_path / "x.txt").write_text(f"Engine 1, torch\n{json.dumps({**found, 'claims': [claim]})}\n")
    [comparison] = serving.figure4(Inputs(results=tmp_path)).comparisons
    assert comparison.measured == (
        "plan: 1.30 (13 tokens/s; requests served at that rate, of vanilla's: no difference seen)"
    )
    assert "59 %" in comparison.why


def test_tables_take_what_their_arrays_take(inputs, made):
    vanilla = vanilla_plan(inputs.shipped.trace.fingerprint, Topology(ep_size=4))
    assert runtime.table_bytes(vanilla) == 0
    assert {row[1] for row in made("tables-memory")[0]["rows"]} == {"paper, T alone", "paper", "semmoe"}


def test_the_summary_has_a_row_for_each_comparison_and_for_what_was_not_made(tmp_path):
    lacking = {"item": "table4", "title": "T", "lacks": "a trace", "comparisons": []}
    made = {"item": "x", "comparisons": [{"what": "a|b", "published": "1", "measured": "2", "why": "c"}]}
    lines = run.write_summary([made, lacking], tmp_path).read_text().splitlines()
    assert lines[2:] == ["| x | a\\|b | 1 | 2 | c |", "| table4 | T |  | not made | needs a trace |"]


def test_items_that_are_added_to_a_folder_leave_the_others_in_its_summary(inputs, tmp_path):
    run.make(run.choose(["figure3"])[0], inputs, tmp_path)
    made = {"item": "x", "comparisons": [{"what": "a", "published": "1", "measured": "2", "why": "c"}]}
    rows = run.write_summary([made], tmp_path).read_text().splitlines()[2:]
    assert rows[0] == "| x | a | 1 | 2 | c |"
    assert {row.split(" | ")[0] for row in rows[1:]} == {"| figure3"}


def test_the_command_prints_the_table_and_writes_it(inputs, tmp_path):
    save_trace(inputs.shipped.trace, tmp_path / "trace")
    out = tmp_path / "out"
    words = ["reproduce", "figure3", "table4", "table5", "--out", str(out), "--trace", str(tmp_path / "trace")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert all(word in result.output for word in ("published", "measured", "why they differ", "not made"))
    assert {p.name for p in out.iterdir()} == {
        "summary.md", *(f"{name}.{kind}" for name in ("figure3", "table5") for kind in ("csv", "json", "svg")),
    }  # fmt: skip


def test_items_are_listed_and_mistakes_named(tmp_path):
    listed = CliRunner().invoke(app, ["reproduce", "--list"])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in run.ITEMS)
    as_json = CliRunner().invoke(app, ["reproduce", "figure3", "--list", "--json"])
    assert json.loads(as_json.stdout)[0]["needs"] == "nothing"
    wrong = CliRunner().invoke(app, ["reproduce", "table9"])
    assert (wrong.exit_code, "there is no item table9" in wrong.output) == (2, True)
    missing = CliRunner().invoke(app, ["reproduce", "table1", "--trace", str(tmp_path / "x")])
    assert (missing.exit_code, "there is no such file" in missing.output) == (2, True)


def test_readings_of_precision_by_hand():
    """Two of four experts. Type 0 is profiled twice with experts 0 and 1, once of these with 2 in place of 1; then it
    chooses 0 and 1, and 0 and 3. Type 1 is not profiled."""
    profile = make_trace([[0, 0]], [[[0, 1]], [[0, 2]]])
    rest = make_trace([[0, 0, 1]], [[[0, 1]], [[0, 3]], [[2, 3]]])
    found = readings(profile, rest)
    assert found["tokens"] == pytest.approx((3 / 4, 3 / 6, 0.6))  # 0 and 1 predicted twice, expert 1 wrongly once
    assert found["thresholded"] == pytest.approx((1, 2 / 6, 0.5))  # expert 0 alone has more than half of the tokens
    assert found["types"] == pytest.approx((1, 2 / 3, 0.8))  # 0, 1 and 3 are activated
