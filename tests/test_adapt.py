"""The decisions of `semmoe adapt`, and its loop around a server that is a table of numbers."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from synthetic import planted_trace

from lab.save import save_trace
from semmoe.core import RoutingTrace
from semmoe.evaluation.online import schedule_live
from semmoe.evaluation.replay import replay
from semmoe.live import adapt, client, watch
from semmoe.live.adapt import (
    LOOKS_PER_WINDOW,
    PARTS,
    Adapter,
    Found,
    by_age,
    confirm,
    find,
    judge,
    score,
    solve_aside,
    wants,
)
from semmoe.placement.linear import vanilla_plan
from semmoe.plan import load_plan, save_plan
from semmoe.settings import AdaptSettings, CoclusterSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Fingerprint, Topology
from semmoe.traces.trace import open_trace

MODEL = Fingerprint(
    model="m", architecture_hash="a", tokenizer_hash="t", num_layers=2, num_experts=4, top_k=2, vocab_size=16
)
TOPOLOGY = Topology(ep_size=2)
S = AdaptSettings()  # a window of 60 s, so that solves on drift are 120 s apart


def seen(lar, pairs=20_000):
    """A reading of 60 s of a server with this local activation rate."""
    labels = [frozenset({("local", name), ("ep_rank", "0")}) for name in ("true", "false")]
    counted = {("pairs", labels[0]): lar * pairs, ("pairs", labels[1]): (1 - lar) * pairs}
    counted |= {("routed_tokens", frozenset()): pairs / 2, ("active", frozenset({("engine", "x")})): 1}
    return watch.view(watch.Look(0.0, {}), watch.Look(60.0, counted))


@pytest.mark.parametrize(
    ("lar", "quiet", "action"),
    [(0.60, 1000, "watch"), (0.581, 1000, "watch"), (0.57, 1000, "record"), (0.57, 50, "watch")],
)
def test_requests_are_recorded_when_they_drifted_and_the_last_solve_is_some_time_ago(lar, quiet, action):
    assert wants(seen(lar), 0.60, quiet, S).action == action


def test_nothing_is_judged_from_few_tokens_or_without_an_expectation():
    assert wants(seen(0.1, pairs=5000), 0.60, 1000, S).why == "too few tokens to judge"
    assert wants(seen(0.1), None, 1000, S).action == "watch"


@pytest.mark.parametrize(("pairs", "known"), [(watch.ENOUGH_PAIRS, 0.5), (watch.ENOUGH_PAIRS - 2, None)])
def test_enough_pairs_are_enough_to_be_judged_by(pairs, known):
    assert seen(0.5, pairs=pairs).known_lar == known


@pytest.mark.parametrize(("lar", "below"), [(0.58, False), (0.5799, True), (0.62, False)])
def test_drift_is_more_than_the_margin_below_what_is_expected(lar, below):
    assert seen(lar, pairs=100_000).below(0.60, 0.02 + 1e-9) == below


def test_a_schedule_solves_without_drift():
    assert wants(seen(0.6), 0.6, 1000, replace(S, schedule=900)).action == "record"
    assert wants(seen(0.6), 0.6, 800, replace(S, schedule=900)).action == "watch"


def found_of(old, new, ranks=4):
    """What a solver found: rates of parts of the requests on the old plan and on the new one, after their means."""
    parts = [np.broadcast_to(np.asarray(rates, float), PARTS) for rates in (old, new)]
    old, new = (np.array([rates.mean(), *rates]) for rates in parts)
    return Found(path="new", old=old, new=new, even=1 / ranks)


@pytest.mark.parametrize(("gain", "action"), [(0.05, "swap"), (0.009, "keep"), (-0.1, "keep")])
def test_a_plan_is_swapped_in_where_it_gains(gain, action):
    assert judge(found_of(0.5, 0.5 + gain), S.min_gain).action == action


@pytest.mark.parametrize(("ranks", "gain", "action"), [(2, 0.011, "swap"), (2, 0.009, "keep"), (8, 0.020, "keep")])
def test_a_plan_that_loses_less_than_a_twentieth_of_what_another_gains_stays(ranks, gain, action):
    """Of .70: without a plan two ranks keep half of the pairs local, so that .01 is a twentieth; eight an eighth."""
    assert judge(found_of(0.70 - gain, 0.70, ranks), S.min_gain).action == action


@pytest.mark.parametrize(("spread", "action"), [(0.0, "swap"), (0.02, "swap"), (0.04, "keep")])
def test_a_gain_counts_that_is_above_twice_its_error(spread, action):
    """A gain of .03 whose eight parts lie on both sides of it; its error is the spread times sqrt(8 / 7) / sqrt(8)."""
    decision = judge(found_of(0.5, [0.53 + spread * sign for sign in (1, -1) * 4]), S.min_gain)
    assert decision.action == action
    assert ("with an error of 0.015" in decision.why) == (spread == 0.04)


@pytest.mark.parametrize(("after", "action"), [(0.56, "stay"), (0.53, "stay"), (0.51, "back"), (0.40, "back")])
def test_a_swap_is_confirmed_by_what_was_measured(after, action):
    """Before it .50 of pairs were local, and .06 more were predicted; at least .018 must be there."""
    assert confirm(0.50, seen(after), 0.06).action == action


@pytest.mark.parametrize("few", ["before", "after"])
def test_a_swap_is_not_judged_by_few_tokens(few):
    before, after = (None, seen(0.4)) if few == "before" else (0.50, seen(0.4, pairs=5000))
    assert confirm(before, after, 0.06).why == "too few tokens to judge the swap"


def requests_numbered(first, count):
    """Requests of one token each; its id says which it is, over 16."""
    ids, ends = (np.arange(first, first + count) % 16).astype(np.int32), np.arange(count + 1)
    return RoutingTrace(
        token_ids=ids, expert_ids=np.tile(np.arange(2, dtype=np.uint8), (count, 2, 1)), request_offsets=ends,
        phase=np.zeros(count, np.uint8), prompt_ids=ids, prompt_offsets=ends, fingerprint=MODEL,
    )  # fmt: skip


class Taped:
    """A server's recorder that records two requests a second; the test's clock is its own."""

    def __init__(self, monkeypatch, interrupted_at=None):
        self.now, self.begun, self.ended, self.interrupted_at = 0.0, None, [], interrupted_at
        monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(client, "recorder", self)

    def sleep(self, seconds):
        self.now += seconds
        if self.interrupted_at is not None and self.now >= self.interrupted_at:
            raise KeyboardInterrupt

    def begin(self, folder, settings):
        assert self.begun is None, "it records already"
        self.begun = self.now
        return SimpleNamespace(run="run-1"), 2

    def of_run(self, folder, run):
        assert run == "run-1"
        return [SimpleNamespace(requests=int(self.now - self.begun)) for _ in range(2)]  # of two ranks

    def end(self, folder, target, timeout):
        self.ended.append(target)
        if self.now == self.begun:
            raise ValueError("no request that has ended")
        self.begun = None


@pytest.mark.parametrize(("requests", "seconds"), [(20, 10.0), (10_000, 30.0)])
def test_requests_are_recorded_until_they_are_enough_or_it_is_late(requests, seconds, tmp_path, monkeypatch):
    tape = Taped(monkeypatch)
    client.Served("url", tmp_path).record(tmp_path / "trace", requests, 30.0)
    assert (tape.now, tape.begun, tape.ended) == (seconds, None, [tmp_path / "trace"])


@pytest.mark.parametrize("at", [0.0, 5.0])
def test_a_loop_that_is_ended_leaves_no_recording_on(at, tmp_path, monkeypatch):
    """Also where no request was recorded, which ends in an error of its own."""
    tape = Taped(monkeypatch, interrupted_at=at)
    monkeypatch.setattr(client, "COUNT_POLL", 0.0 if at == 0 else 0.5)
    with pytest.raises(KeyboardInterrupt):
        client.Served("url", tmp_path).record(tmp_path / "trace", 20, 30.0)
    assert tape.ended == [tmp_path / "trace"]


def test_a_recording_of_nothing_fails(tmp_path, monkeypatch):
    tape = Taped(monkeypatch)
    with pytest.raises(ValueError, match="no request that has ended"):
        client.Served("url", tmp_path).record(tmp_path / "trace", 20, 0.0)
    assert tape.ended == [tmp_path / "trace"]


@dataclass
class Numbers:
    """A server by the numbers that it would show: what each plan's local activation rate is, and what was asked."""

    rates: dict[str, float]
    folder: Path
    serves: str = "old"
    now: float = 0.0
    local: float = 0.0
    pairs: float = 0.0
    pace: int = 1000  # pairs a second
    refuses: str = ""
    asked: list[str] = field(default_factory=list)

    def sleep(self, seconds):
        self.now += seconds
        self.pairs += self.pace * seconds
        self.local += self.pace * seconds * self.rates[self.serves]

    def look(self):
        labels = {name: frozenset({("local", name), ("ep_rank", "0")}) for name in ("true", "false")}
        counted = {("pairs", labels["true"]): self.local, ("pairs", labels["false"]): self.pairs - self.local}
        counted |= {("routed_tokens", frozenset()): self.pairs / 2, ("active", frozenset({("engine", "x")})): 1}
        return watch.Look(self.now, counted)

    def record(self, target, requests, timeout):
        self.asked.append(f"record {requests}")
        save_trace(requests_numbered(0, requests), target)

    def swap(self, plan, settings):
        if self.refuses:
            return SimpleNamespace(state="refused", reason=self.refuses)
        self.serves = plan.method
        self.asked.append(f"swap to {plan.method}")
        return SimpleNamespace(state="done")


@pytest.fixture
def adapter(tmp_path):
    """An adapter of a server whose plan expects .60 and that shows .50; what is solved is the plan `new`."""
    old = replace(vanilla_plan(MODEL, TOPOLOGY), method="old", expected={"lar": 0.60})
    rows = np.tile(np.array([2, 1, 0, 3], np.int32), (2, 1))
    new = replace(old, method="new", placement=replace(old.placement, physical_to_logical_map=rows))

    def solve(trace, served, folder, seconds):
        assert open_trace(trace).num_requests == S.requests
        assert load_plan(served).method == server.serves
        assert seconds == S.window / 2
        save_plan(new, tmp_path / "found")
        return replace(found_of(0.50, 0.58), path=tmp_path / "found")

    server = Numbers(rates={"old": 0.50, "new": 0.58}, folder=tmp_path)
    told = []
    found = Adapter(server, old, S, solve, told.append, clock=lambda: server.now, sleep=server.sleep)
    return found, server, told


def turns(adapter, count=30):
    for _ in range(count):
        adapter.turn()


def test_the_loop_records_solves_swaps_and_stays(adapter):
    found, server, told = adapter
    turns(found)
    assert [decision.action for decision in told] == ["watch", "watch", "record", "solve", "swap", "stay", "watch"]
    assert told[1].why.startswith("the last solve was")
    assert server.asked == ["record 500", "swap to new"]
    assert (found.plan.method, round(found.expected, 6)) == ("new", 0.58)
    assert list(server.folder.glob("adapt-*")) == [], "what was recorded is removed"


def test_what_to_expect_of_a_plan_that_does_not_say_it_is_learnt_from_the_first_window(adapter):
    found, server, told = adapter
    found.expected = None
    turns(found, LOOKS_PER_WINDOW - 2)
    assert found.expected is None
    turns(found, 20)
    assert found.expected == pytest.approx(0.50)
    server.rates["old"] = 0.47
    turns(found, 20)
    assert [decision.action for decision in told].count("swap") == 1


def test_solves_on_drift_are_two_windows_apart_and_on_a_schedule_as_asked(adapter):
    found, _, told = adapter
    found.dry_run = True
    turns(found, 60)
    assert [d.action for d in told].count("solve") == 2  # in 300 s, the first after two windows
    found.expected, found.settings = 0.5, replace(S, schedule=30.0)
    turns(found, 60)
    assert [d.action for d in told].count("solve") == 2 + 10


def test_the_old_plan_comes_back_where_the_gain_is_not_there(adapter):
    found, server, told = adapter
    server.rates["new"] = 0.50
    turns(found)
    assert [decision.action for decision in told][:6] == ["watch", "watch", "record", "solve", "swap", "back"]
    assert server.asked[:3] == ["record 500", "swap to new", "swap to old"]
    assert found.plan.method == server.serves == "old"


def test_where_the_old_plan_cannot_come_back_the_new_one_is_known_to_serve(adapter):
    found, server, told = adapter
    server.rates["new"], swap = 0.50, server.swap

    def only_once(plan, settings):
        status = swap(plan, settings)
        server.refuses = "rank 1 has no memory"
        return status

    server.swap = only_once
    turns(found)
    assert [decision.action for decision in told][5:7] == ["back", "fail"]
    assert told[6].why == "the swap was refused: rank 1 has no memory"
    assert found.plan.method == server.serves == "new"


def test_a_dry_run_decides_and_swaps_nothing(adapter):
    found, server, told = adapter
    found.dry_run = True
    turns(found)
    assert "swap" in [decision.action for decision in told]
    assert server.serves == "old"


def test_what_fails_is_told_and_the_server_is_left_alone(adapter):
    found, server, told = adapter
    server.refuses = "another swap is not over"
    turns(found)
    assert ("fail", "the swap was refused: another swap is not over") in [
        (decision.action, decision.why) for decision in told
    ]
    assert found.plan.method == "old"


def test_a_plan_that_does_not_pay_is_kept_out_and_not_tried_again_and_again(adapter):
    found, server, told = adapter
    found.settings = replace(found.settings, min_gain=0.5)
    turns(found, 60)
    assert [decision.action for decision in told].count("solve") == 1  # it then expects what the old plan can give
    assert server.serves == "old"


def test_the_newest_requests_are_for_scoring():
    seen, newest = by_age(requests_numbered(0, 100))
    assert (seen.num_requests, newest.num_requests) == (70, 30)
    assert newest.token_ids.tolist() == [i % 16 for i in range(70, 100)]
    with pytest.raises(ValueError, match="50 requests were recorded, too few"):
        by_age(requests_numbered(0, 50))


def test_plans_are_solved_on_the_oldest_requests_and_scored_on_the_newest(tmp_path, monkeypatch):
    whole = planted_trace(2, 1, requests_per_group=50)[0]
    plan, solved, scored = vanilla_plan(whole.fingerprint, TOPOLOGY), [], []
    save_trace(whole, tmp_path / "trace")
    save_plan(plan, tmp_path / "first")
    monkeypatch.setattr(adapt, "solve", lambda seen, *rest, **more: solved.append((seen, more["previous"])) or plan)
    monkeypatch.setattr(adapt, "score", lambda newest, *rest: scored.append(newest) or np.full(1 + PARTS, 0.5))
    find(tmp_path / "trace", tmp_path / "first", tmp_path, 5)
    assert {trace.digest() for trace, _ in solved} == {whole.select(np.arange(70)).digest()}
    assert {trace.digest() for trace in scored} == {whole.select(np.arange(70, 100)).digest()}
    assert [previous is None for _, previous in solved] == [False, True], "from the served plan, and afresh"
    assert len(scored) == 3, "beside the served plan"


def two_kinds(folder):
    """Two kinds of requests whose experts are renumbered; the plan of one serves, and requests are of the other."""
    first = planted_trace(2, 1, requests_per_group=40)[0]
    rows = np.random.default_rng(0).permutation(8)
    other = replace(first, expert_ids=rows[first.expert_ids].astype(np.uint8))
    quick = CoclusterSettings(starts=1, steps=10)
    for name, trace in {"first": first, "other": other}.items():
        save_plan(solve(trace, Topology(ep_size=2), SolveSettings(cocluster=quick)), folder / name)
    save_trace(other, folder / "trace")


def test_a_better_plan_is_found_for_other_requests(tmp_path):
    two_kinds(tmp_path)
    found = find(tmp_path / "trace", tmp_path / "first", tmp_path, 5)
    assert found.new[0] > found.old[0] + 0.2
    assert found.even == 0.5
    assert load_plan(found.path).topology == Topology(ep_size=2)


def test_the_process_that_solves_fails_or_ends_in_time(tmp_path, monkeypatch):
    two_kinds(tmp_path)
    job = tmp_path / "trace", tmp_path / "first", tmp_path
    found = solve_aside(*job, 0.1)
    assert found.new[0] > found.old[0]
    with pytest.raises(ValueError, match="no trace"):
        solve_aside(tmp_path / "missing", *job[1:], 0.1)
    monkeypatch.setattr(adapt, "GRACE_SECONDS", 0.0)
    with pytest.raises(RuntimeError, match=r"no plan was found within 0\.03 s"):
        solve_aside(*job, 0.01)


def test_a_score_does_not_hang_on_the_order_in_which_ranks_were_joined(tmp_path):
    """Requests of two kinds, of which each suits one rank; in turns, as the plan that served would have them."""
    trace = planted_trace(2, 1, requests_per_group=40)[0]
    plan = solve(trace, Topology(ep_size=2, dp_size=2), SolveSettings(cocluster=CoclusterSettings(starts=1, steps=10)))
    group = schedule_live(trace, plan, 1000)
    first, second = np.flatnonzero(group == 0), np.flatnonzero(group == 1)
    number = min(len(first), len(second))
    turns = np.stack([first[:number], second[:number]], axis=1).ravel()
    one_by_one = np.concatenate([first[:number], second[:number]])
    found = [score(trace.select(order), plan)[0] for order in (turns, one_by_one)]
    live = [replay(trace.select(order), plan, groups=schedule_live(trace.select(order), plan, 8)).total.lar
            for order in (turns, one_by_one)]  # fmt: skip
    assert live[0] - live[1] > 0.25, "the order of arrival does matter"
    assert abs(found[0] - found[1]) < 0.1
