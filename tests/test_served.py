"""What may be said of served figures, and how they are kept; no server is started."""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from serving import claims, guard, links
from serving.claims import Estimate, estimate, paired_ratios
from serving.configurations import AGAIN, AS_IT_COMES, COPIES, MOETUNER, VANILLA
from serving.engine import Command, Engine, ServerError, SetUp
from serving.loads import draw
from serving.pieces import KNEE, MOST_SERVERS, Settings, published
from serving.records import Links, Records, RecordsError, Run
from serving.report import report
from serving.server import serving
from serving.tables import tables

from lab.results import parts, serving_sweep

NOISE = 0.02  # of a configuration in a round, beside what a round does to all


def drawn(rng, gain, rounds=claims.ROUNDS):
    """Paired ratios of a configuration that is `gain` times as fast, in rounds that differ by a fifth."""
    round_ = rng.lognormal(0, 0.2, rounds)
    own, base = (round_ * rng.lognormal(0, NOISE, rounds) * factor for factor in (gain, 1.0))
    return estimate(paired_ratios(dict(enumerate(own)), dict(enumerate(base))))


def test_ratios_are_within_rounds_that_both_have():
    assert paired_ratios({0: 2.0, 1: 3.0, 5: 1.0}, {1: 2.0, 0: 4.0, 7: 1.0}).tolist() == [0.5, 1.5]


def test_an_interval_holds_its_median_and_is_the_same_each_time():
    ratios = np.array([1.0, 1.1, 0.9, 1.2, 1.05, 0.95, 1.3])
    found = estimate(ratios)
    assert found == estimate(ratios)
    assert (found.ratio, found.rounds) == (1.05, 7)
    assert 0.9 <= found.low <= 1.05 <= found.high <= 1.3
    assert estimate(np.array([1.2])) == Estimate(1.2, 1.2, 1.2, 1)


def test_nothing_is_claimed_of_data_drawn_alike():
    rng = np.random.default_rng(0)
    said = [claims.claim(drawn(rng, 1.0), [drawn(rng, 1.0), drawn(rng, 1.0)]) for _ in range(300)]
    assert said.count(claims.NO_DIFFERENCE) >= 0.97 * len(said)


def test_a_true_tenth_is_claimed():
    rng = np.random.default_rng(1)
    for gain in (1.1, 1 / 1.1):
        said = [claims.claim(drawn(rng, gain), [drawn(rng, 1.0), drawn(rng, 1.0)]) for _ in range(300)]
        assert said.count(claims.NO_DIFFERENCE) <= 0.1 * len(said)


def test_a_claim_needs_rounds_and_a_placebo():
    found, placebo = Estimate(1.5, 1.4, 1.6, 7), Estimate(1.0, 0.98, 1.02, 7)
    assert claims.claim(found, [placebo]) == "1.50 [1.40, 1.60]"
    assert claims.claim(found, []) == claims.TOO_FEW
    assert claims.claim(replace(found, rounds=6), [placebo]) == claims.TOO_FEW
    assert claims.claim(found, [placebo, replace(placebo, high=1.45)]) == claims.NO_DIFFERENCE
    assert claims.claim(Estimate(1.03, 1.01, 1.04, 7), [replace(placebo, low=1.05, high=1.06)]) == claims.NO_DIFFERENCE


def test_times_hold_below_the_limit_or_within_the_placebos():
    placebo = Estimate(1.0, 0.9, 1.2, 7)
    assert claims.holds(Estimate(0.8, 0.7, 1.04, 7), 1.05, [])
    assert claims.holds(Estimate(1.1, 1.0, 1.15, 7), 1.05, [placebo])
    assert not claims.holds(Estimate(1.1, 1.0, 1.25, 7), 1.05, [placebo])
    assert not claims.holds(Estimate(1.1, 1.0, 1.15, 7), 1.05, [])
    assert claims.holds(Estimate(0.8, 0.5, 1.15, 7), 1.05, [placebo])  # faster than the placebo is no fault


def test_a_percentile_needs_a_thousand_requests():
    times = list(map(float, range(1, 1001)))
    assert claims.tail(times)[0] == "p99"
    assert claims.tail(times)[1] == pytest.approx(990, abs=1)
    assert claims.tail(times[:-1]) == ("slowest of 999", 999.0)


def test_the_bound_by_hand():
    assert claims.bound(0.5, 0.5) == pytest.approx(1 / 0.75)
    assert claims.bound(0.59, 1.0) == 1.0
    assert claims.bound(0.59, 0.0) == pytest.approx(1 / 0.41)


@pytest.mark.parametrize("count", [2, 3])
def test_places_in_a_round_are_balanced(count):
    names = ["a", "b", "c"][:count]
    orders = [claims.order(names, i) for i in range(2 * count)]
    assert len({tuple(order) for order in orders}) == (6 if count == 3 else 2)
    for place in range(count):
        assert sorted(order[place] for order in orders) == sorted(2 * names)


# --- others on the cores --------------------------------------------------------------------------------------------


def test_a_line_of_proc_with_a_name_that_looks_like_fields():
    line = "17 (a) b (c) S 4 17 17 0 -1 4194560 1 0 0 0 30 12 0 0 20 0 1 0 100 0 0"
    assert guard.parse(line) == guard.Process("a) b (c", 4, 42)


def test_only_strangers_count():
    ticks = guard.TICKS

    def seen(seconds, **spent):
        parents = {"init": 0, "kthreadd": 0, "kworker": 2, "bench": 1, "rank": 10, "stranger": 1}
        pids = {"init": 1, "kthreadd": 2, "kworker": 3, "bench": 10, "rank": 11, "stranger": 12}
        found = {pids[n]: guard.Process(n, parents[n], spent.get(n, 0)) for n in pids}
        return guard.Snapshot(seconds, found, 0)

    after = seen(10.0, kworker=5 * ticks, bench=ticks, rank=9 * ticks, stranger=ticks)
    found = guard.others(seen(0.0), after, 10)
    assert found == {"stranger (12)": pytest.approx(0.1)}
    assert guard.told(found) == ["stranger (12): 10% of a core"]
    assert guard.told({"a": 0.03, "b": 0.01}) == []
    assert guard.told({"a": 0.03, "b": 0.03, "c": 0.001}) == ["a: 3% of a core", "b: 3% of a core"]


def test_the_guard_finds_a_process_that_spins():
    """From the point of view of a process that it does not descend from."""
    before = guard.snapshot()
    spin = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.5)
        found = guard.others(before, guard.snapshot(), -1)
        own = guard.others(before, guard.snapshot(), os.getpid())
    finally:
        spin.kill()
        spin.wait()
    assert any(f"({spin.pid})" in name for name in found)
    assert not any(f"({spin.pid})" in name for name in own)


# --- links, loads, pieces -------------------------------------------------------------------------------------------


def test_the_search_finds_links_by_share():
    tried = []

    def share_at(rate):
        tried.append(rate)
        return 1 / (1 + rate / 400)

    seen = links.search(share_at, [0.3, 0.45, 0.59], 7)
    assert len(tried) == len(set(tried)) <= 2 + 3 * 7
    for target in (0.3, 0.45, 0.59):
        assert seen[links.nearest(seen, target)] == pytest.approx(target, abs=0.015)


def test_a_share_that_no_link_reaches_gets_the_nearest():
    seen = links.search(lambda rate: 0.4 + 0.1 * (rate < 100), [0.3], 5)
    assert links.nearest(seen, 0.3) == links.FASTEST
    assert links.as_tc(187.5) == "187500kbit"


def test_a_load_is_the_same_for_every_configuration_of_a_round():
    prompts = [[i, i + 1, i + 2] for i in range(50)]
    assert draw(prompts, 5.0, 4.0, 3, False) == draw(prompts, 5.0, 4.0, 3, False) != draw(prompts, 5.0, 4.0, 4, False)
    load = draw(prompts, 5.0, 4.0, 3, False)
    assert len(load.prompts) == len(load.arrivals) == 20
    assert load.arrivals == sorted(load.arrivals)
    assert set(draw(prompts, 5.0, 4.0, 3, True).arrivals) == {0.0}
    assert {len(p) for p in draw(prompts, 5.0, 4.0, 3, False, 17).prompts} == {17}


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_the_published_set_fits(engine):
    s = Settings()
    pieces = published(engine, s)
    assert len({p.name for p in pieces}) == len(pieces)
    assert all(p.minutes(s) < 30 and len(p.names) <= MOST_SERVERS and p.names[0] == VANILLA for p in pieces)
    assert sum(p.minutes(s) for p in pieces) < 240  # two engines in eight hours
    assert s.rounds >= claims.ROUNDS


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_every_table_has_a_placebo_and_what_must_hold_has_its_rivals(engine):
    by_load = {}
    for piece in published(engine, Settings()):
        for w in piece.workloads:
            by_load.setdefault((piece.attention, w, piece.ranks), set()).update(piece.names)
    assert all(AGAIN in names for (_, _, ranks), names in by_load.items() if ranks == 2)
    rates = [names for (_, w, _), names in by_load.items() if w.arrivals in dict(Settings().fractions)]
    assert len(rates) == 4
    assert all(COPIES in names for names in rates)
    assert any(AS_IT_COMES in names for names in rates)


# --- the file -------------------------------------------------------------------------------------------------------

HEADER = {"engine": "vLLM 1", "torch": "2", "model": "embedded", "machine": "2 cores", "busy": False}
COUNTS = {"pass_seconds": 10.0, "pass_seconds.part=all_to_all": 5.9,
          "routed_tokens": 100.0, "pairs": 400.0, "pairs.local=true": 200.0, "remote_rows": 80.0}  # fmt: skip


def run(piece, workload, number, name, gain=1.0, **given):
    requests = [[100 / gain + i, 400 / gain + i] for i in range(20)]
    kept = {COPIES: 60.0, MOETUNER: 100.5}.get(name, 100.0)
    return Run(piece=piece, workload=workload, round=number, name=name, place=0, seconds=2 / gain, requests=requests,
               counters=COUNTS | {"all_to_all_bytes": kept}, link_bytes=1000, **given)  # fmt: skip


def filled(path, s, rounds, gains):
    """A file with all pieces measured."""
    records = Records(path)
    records.begin(HEADER | {"settings": asdict(s)})
    rates = {name: 10 * part for name, part in s.fractions}
    for attention in ("dp", "tp"):
        records.add_links(Links(attention=attention, links={"30": 900.0, "45": 600.0, "59": 300.0}, probes=[],
                                shares={"30": 0.3, "45": 0.45, "59": 0.59}, at_once=10.0, rates=rates))  # fmt: skip
    for piece in published("vllm", s):
        for i in range(piece.num_rounds(replace(s, rounds=rounds))):
            for w in piece.workloads:
                records.add([run(piece.name, str(w), i, name, gains.get(name, 1.0)) for name in piece.names])
    return records


def test_what_a_crash_cut_off_is_one_round(tmp_path):
    path = tmp_path / "file.jsonl"
    records = Records(path)
    records.begin(HEADER)
    names = (VANILLA, AGAIN)
    for i in range(2):
        records.add([run("p", "w", i, name) for name in names])
    whole = path.read_text()
    path.write_text(whole[:-30])
    again = Records(path)
    assert list(again.rounds("p", "w", names)) == [0]
    again.add([run("p", "w", 1, name) for name in names])
    assert list(Records(path).rounds("p", "w", names)) == [0, 1]
    again.add([run("p", "w", 2, name, disturbed=["make"]) for name in names])
    assert list(Records(path).rounds("p", "w", names)) == [0, 1]
    assert list(Records(path).rounds("p", "w", names, busy=True)) == [0, 1, 2]


def test_other_settings_are_refused(tmp_path):
    records = Records(tmp_path / "file.jsonl")
    records.begin(HEADER | {"settings": asdict(Settings())})
    Records(records.path).begin(HEADER | {"settings": asdict(Settings())})
    with pytest.raises(RecordsError, match="engine: vLLM 1 there, vLLM 2 here"):
        Records(records.path).begin(HEADER | {"engine": "vLLM 2", "settings": asdict(Settings())})
    with pytest.raises(RecordsError, match="settings"):
        Records(records.path).begin(HEADER | {"settings": asdict(Settings().quick())})


def test_a_report_claims_what_is_there_and_no_more(tmp_path):
    records = filled(tmp_path / "file.jsonl", Settings(), 7, {COPIES: 1.25})
    text = report(Records(records.path))
    assert "| plan, 8 redundant | 7 | 12.5 | 1.25 [1.25, 1.25] | 1.25 [1.25, 1.25] |" in text
    assert "| plan | 7 | 10.0 | 1.00 [1.00, 1.00] | no difference seen |" in text
    assert "vanilla again (1.000 of the bytes), MoETuner (1.005 of the bytes)" in text
    assert "| DP | 0.590 | 0.600 | 1.309 | 1.25 [1.25, 1.25] | 0.955 | vanilla | 1 | [1.00, 1.00] | yes |" in text
    assert "TP, at once, links of 59 %, first token, slowest of 140: 99 ms on the plan, 119 ms vanilla" in text
    assert "cores shared" in text
    assert "--busy" not in text
    assert f"| DP | {KNEE} | first token |" in text
    (tmp_path / "printed.txt").write_text(text)
    [part] = parts(tmp_path / "printed.txt")
    sweep = serving_sweep(part)
    assert sweep.sweeps["dp"].objectives["median_ttft_ms"] == pytest.approx(5 * 109.5)
    assert sweep.claim("TP, plan, 8 redundant", "all at once", "request_throughput").ratio == pytest.approx(1.25)
    assert set(sweep.runs("DP, vanilla")) == {"light", "7.5 requests/s", "11 requests/s", "all at once"}
    lengths = {f"{length} tokens" for length in (256, 512, 1024)}
    assert set(sweep.runs("TP, vanilla")) == {"7.5 requests/s", "all at once"} | lengths


def test_a_quick_file_claims_nothing_and_says_that_others_were_there(tmp_path):
    s, path = Settings().quick(), tmp_path / "file.jsonl"
    filled(path, s, 2, {COPIES: 1.25})
    text = path.read_text().replace('"busy":false', '"busy":true')
    path.write_text(text)
    found = report(Records(path))
    assert "Measured with --busy" in found
    assert claims.TOO_FEW in found
    assert "| yes |" not in found
    assert json.loads(found.splitlines()[-1])["sweeps"] == {}  # no objectives from few requests
    loads = {(piece.attention, w, piece.ranks) for piece in published("vllm", s) for w in piece.workloads}
    assert len(tables(Records(path))) == len(loads)


class Web(Engine):
    """A web server of one process in an engine's place, of which the first `failing` starts end at once."""

    NAME, TITLE, GRACE = "numpy", "web", 5.0

    def __init__(self, failing):
        self.failing, self.starts = failing, 0

    def serve(self, up, folder, port, options):
        (folder / "health").touch()
        self.starts += 1
        words = ["-m", "http.server", "--bind", "127.0.0.1", "--directory", str(folder), str(port)]
        return Command([sys.executable, *(["-c", "raise SystemExit(3)"] if self.starts <= self.failing else words)], {})

    def on_node(self, up, network, node, port):
        raise NotImplementedError

    async def busy(self, session):
        raise NotImplementedError


def test_a_server_that_does_not_start_is_started_once_more_and_held_to_a_core(tmp_path, capsys):
    web = Web(failing=1)
    with serving(web, SetUp(name="", attention="dp"), tmp_path / "server") as server:
        [process] = server.processes
        server.seat(server.ranks(sys.executable))
        assert os.sched_getaffinity(process.pid) == {min(os.sched_getaffinity(0))}
        with pytest.raises(ServerError, match="0 processes are called nobody, of 1 ranks"):
            server.ranks("nobody")
    assert web.starts == 2
    assert process.poll() is not None
    assert "started once more: node 0 ended with 3" in capsys.readouterr().err


def test_a_server_that_never_starts_is_told_after_its_second_try(tmp_path):
    web = Web(failing=9)
    with (
        pytest.raises(ServerError, match="node 0 ended with 3"),
        serving(web, SetUp(name="", attention="dp"), tmp_path / "server"),
    ):
        pass
    assert web.starts == 2
