"""The decisions of `semmoe adapt`, and its loop around a server that is a table of numbers."""

import contextlib
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from synthetic import planted_trace

from semmoe import watch
from semmoe.adapt import solving
from semmoe.adapt.decide import Score, confirm, drifted_since, judge, wants
from semmoe.adapt.loop import SWITCH, Adapter
from semmoe.adapt.recording import MORE, PARTS, Recording
from semmoe.adapt.solving import Found, Job, Solver, by_age, find, score
from semmoe.calibration import load_links
from semmoe.core import RoutingTrace
from semmoe.moving import weigh
from semmoe.online import schedule_live
from semmoe.placement.linear import vanilla_plan
from semmoe.plan import load_plan, save_plan
from semmoe.replayer import replay
from semmoe.settings import AdaptSettings, CoclusterSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Fingerprint, Topology
from semmoe.trace import open_trace, save_trace

MODEL = Fingerprint(
    model="m", architecture_hash="a", tokenizer_hash="t", num_layers=2, num_experts=4, top_k=2, vocab_size=16
)
TOPOLOGY = Topology(ep_size=2)
S = AdaptSettings(rest=100)
PAYS, COSTS = weigh(1e-6, 1e5, 1.0, S.horizon), weigh(1e-9, 1e5, 1.0, S.horizon)


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
    assert wants(seen(lar), 0.60, quiet, 0, 2000, S).action == action


def test_nothing_is_judged_from_few_tokens_or_without_an_expectation():
    assert wants(seen(0.1, pairs=5000), 0.60, 1000, 0, 2000, S).why == "too few tokens to judge"
    assert wants(seen(0.1), None, 1000, 0, 2000, S).action == "watch"


@pytest.mark.parametrize(("pairs", "known"), [(watch.ENOUGH_PAIRS, 0.5), (watch.ENOUGH_PAIRS - 2, None)])
def test_enough_pairs_are_enough_to_be_judged_by(pairs, known):
    assert seen(0.5, pairs=pairs).known_lar == known


@pytest.mark.parametrize(("lar", "below"), [(0.58, False), (0.5799, True), (0.62, False)])
def test_drift_is_more_than_the_margin_below_what_is_expected(lar, below):
    assert seen(lar, pairs=100_000).below(0.60, 0.02 + 1e-9) == below


def test_a_schedule_solves_without_drift():
    assert wants(seen(0.6), 0.6, 1000, 0, 2000, replace(S, schedule=900)).action == "record"
    assert wants(seen(0.6), 0.6, 800, 0, 2000, replace(S, schedule=900)).action == "watch"


@pytest.mark.parametrize(
    ("more", "lar", "quiet", "why"),
    [(1999, 0.6, 1000, "requests are as expected"), (2000, 0.6, 50, "requests are as expected"),
     (2000, 0.6, 1000, "2,000 requests were recorded since"), (2000, 0.5, 1000, "local activation rate 0.500")],
)  # fmt: skip
def test_where_requests_are_always_recorded_a_plan_is_solved_for_so_many_new_ones(more, lar, quiet, why):
    assert wants(seen(lar), 0.6, quiet, more, 2000, S).why.startswith(why)


@pytest.mark.parametrize(
    ("gain", "weighed", "action"),
    [(0.05, PAYS, "swap"), (0.009, PAYS, "keep"), (-0.1, PAYS, "keep"), (0.05, COSTS, "keep")],
)  # fmt: skip
def test_a_plan_is_swapped_in_where_it_gains_and_pays(gain, weighed, action):
    old, new = (Score(lar=lar, even=0.25, parts=(lar, lar), seconds_per_token=0.0) for lar in (0.5, 0.5 + gain))
    assert judge(old, new, weighed, S).action == action


@pytest.mark.parametrize(("ranks", "gain", "action"), [(2, 0.011, "swap"), (2, 0.009, "keep"), (8, 0.020, "keep")])
def test_a_plan_that_loses_less_than_a_twentieth_of_what_another_gains_stays(ranks, gain, action):
    """Of .70: without a plan two ranks keep half of the pairs local, so that .01 is a twentieth; eight an eighth."""
    old, new = (Score(lar=lar, even=1 / ranks, parts=(lar, lar), seconds_per_token=0.0) for lar in (0.70 - gain, 0.70))
    assert judge(old, new, PAYS, S).action == action


@pytest.mark.parametrize(("spread", "action"), [(0.0, "swap"), (0.02, "swap"), (0.04, "keep")])
def test_a_gain_counts_that_is_above_twice_its_error(spread, action):
    """A gain of .03 whose eight parts lie on both sides of it; its error is the spread times sqrt(8 / 7) / sqrt(8)."""
    parts = tuple(0.53 + spread * sign for sign in (1, -1) * 4)
    old, new = (
        Score(lar=0.5, even=0.25, parts=(0.5,) * 8, seconds_per_token=0.0),
        Score(lar=0.53, even=0.25, parts=parts, seconds_per_token=0.0),
    )
    found = judge(old, new, PAYS, S)
    assert found.action == action
    assert ("with an error of 0.015" in found.why) == (spread == 0.04)


@pytest.mark.parametrize(("after", "action"), [(0.56, "stay"), (0.53, "stay"), (0.51, "back"), (0.40, "back")])
def test_a_swap_is_confirmed_by_what_was_measured(after, action):
    """Before it .50 of pairs were local, and .06 more were predicted; at least .018 must be there."""
    assert confirm(0.50, seen(after), 0.06, False, S).action == action


@pytest.mark.parametrize(("after", "action"), [(0.51, "stay"), (0.485, "stay"), (0.47, "back")])
def test_where_the_plan_before_is_tried_again_only_a_fall_by_more_than_the_margin_takes_a_swap_back(after, action):
    assert confirm(0.50, seen(after), 0.06, True, S).action == action


def looks(*rates, pairs=20_000):
    """Looks every 10 s, between which these local activation rates were counted."""
    local = np.cumsum([0.0, *(rate * pairs for rate in rates)])
    labels = {name: frozenset({("local", name), ("ep_rank", "0")}) for name in ("true", "false")}
    return [
        watch.Look(10.0 * i, {("pairs", labels["true"]): n, ("pairs", labels["false"]): i * pairs - n})
        for i, n in enumerate(local)
    ]


@pytest.mark.parametrize(
    ("rates", "since"),
    [((0.6, 0.6, 0.5, 0.5), 20), ((0.5, 0.6, 0.5), 20), ((0.6, 0.6), 20), ((0.5, 0.5), 0), ((0.6, 0.581), 20)],
)
def test_drift_began_after_the_last_reading_as_expected(rates, since):
    assert drifted_since(looks(*rates), 0.6, S) == since


def test_readings_of_few_tokens_do_not_say_when_drift_began():
    assert drifted_since(looks(0.5, 0.5, pairs=5000), 0.6, S) == 20


def looks_of(*readings):
    """Looks every 10 s, between which (local activation rate, pairs) were counted."""
    out, local, pairs = [], 0.0, 0
    for i, (rate, count) in enumerate([(0.0, 0), *readings]):
        local, pairs = local + rate * count, pairs + count
        names = {"true": local, "false": pairs - local}
        counted = {("pairs", frozenset({("local", name), ("ep_rank", "0")})): n for name, n in names.items()}
        out.append(watch.Look(10.0 * i, counted))
    return out


@pytest.mark.parametrize("few", [0.5, 0.6])
def test_drift_goes_on_through_a_reading_of_too_few_tokens(few):
    """Whatever that one shows: drift began at 10 s, after the only reading as expected."""
    readings = [(0.6, 20_000), (0.5, 20_000), (few, 5000), (0.5, 20_000)]
    assert drifted_since(looks_of(*readings), 0.6, S) == 10
    assert drifted_since(looks_of((0.5, 20_000), (0.6, 20_000), (few, 5000), (0.5, 20_000)), 0.6, S) == 30
    assert drifted_since(looks_of((0.5, 20_000), (0.5, 20_000), (few, 5000)), 0.6, S) == 0


def requests_numbered(first, count):
    """Requests of one token each; its id says which it is, over 16."""
    ids, ends = (np.arange(first, first + count) % 16).astype(np.int32), np.arange(count + 1)
    return RoutingTrace(
        token_ids=ids, expert_ids=np.tile(np.arange(2, dtype=np.uint8), (count, 2, 1)), request_offsets=ends,
        phase=np.zeros(count, np.uint8), prompt_ids=ids, prompt_offsets=ends, fingerprint=MODEL,
    )  # fmt: skip


@dataclass
class Taped:
    """A recorder that records two requests a second, whose time the test sets."""

    now: float = 0.0
    begun: float | None = None
    most: int = 0  # requests of the longest recording

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds

    def recorded(self):
        return int(2 * self.now) - int(2 * self.begun)

    def begin_recording(self):
        assert self.begun is None, "it records already"
        self.begun = self.now

    def end_recording(self, target):
        count, first, self.begun = self.recorded(), int(2 * self.begun), None
        self.most = max(self.most, count)
        if not count:
            raise ValueError("no request that has ended")
        save_trace(requests_numbered(first, count), target)
        return count


def recording(tape, folder, **settings):
    given = replace(S, requests=40, window=30, **settings)
    return Recording(tape, given, folder, tape.clock, tape.sleep)


def taken(found, tape, folder, begun, now=None):
    """The first request that counts and the one after the last, over 16, and how many count."""
    tape.now = tape.now if now is None else now
    target = folder / f"trace-{tape.now}"
    older = found.take(begun, target)
    trace = open_trace(target)
    numbers = trace.token_ids[older:]
    assert np.all(np.diff(numbers) % 16 == 1), "requests are in order of their ends"
    return int(numbers[0]), int(numbers[-1] + 1) % 16, len(numbers)


def test_without_being_asked_nothing_is_recorded_before_drift_or_kept_after_it(tmp_path):
    tape = Taped()
    found = recording(tape, tmp_path)
    found.note()
    assert tape.begun is None
    assert taken(found, tape, tmp_path, 5.0) == (0, 40 % 16, 40)
    assert tape.begun is None
    assert list((tmp_path / PARTS).iterdir()) == []
    assert taken(found, tape, tmp_path, 5.0, 100.0) == (200 % 16, 240 % 16, 40)


@pytest.mark.parametrize(("begun", "first", "end"), [(20.0, 40, 80), (34.0, 60, 100), (0.0, 0, 70)])
def test_what_is_always_recorded_is_cut_where_drift_began(begun, first, end, tmp_path):
    """Looks every 10 s: a request counts if it ended after the last look before that time."""
    tape = Taped()
    found = recording(tape, tmp_path, keep_recording=True)
    for now in (0.0, 10.0, 20.0, 30.0):
        tape.now = now
        found.note()
    assert taken(found, tape, tmp_path, begun, 35.0) == (first % 16, end % 16, end - first)


def test_the_newest_requests_count_four_times_as_many_as_are_needed(tmp_path):
    tape = Taped()
    found = recording(tape, tmp_path, keep_recording=True)
    found.note()
    assert taken(found, tape, tmp_path, 0.0, 100.0) == (40 % 16, 200 % 16, 160)


def test_requests_count_that_were_recorded_before_a_solve_and_while_it_ran(tmp_path):
    tape = Taped()
    found = recording(tape, tmp_path, keep_recording=True)
    found.note()
    assert taken(found, tape, tmp_path, 0.0, 25.0) == (0, 50 % 16, 50)
    assert taken(found, tape, tmp_path, 0.0, 45.0) == (0, 90 % 16, 90)
    assert found.since(0.0) == 90
    found.note()
    tape.now = 55.0
    assert found.since(45.0) == 20
    assert taken(found, tape, tmp_path, 45.0) == (90 % 16, 130 % 16, 40), (
        "what was recorded before a change is left out"
    )
    assert taken(found, tape, tmp_path, 0.0, 500.0) == (840 % 16, 1000 % 16, 160)
    assert len(list((tmp_path / PARTS).iterdir())) == 1, "older parts go where newer ones have enough"


def test_what_was_recorded_counts_where_nothing_was_since_the_last_part(tmp_path):
    tape = Taped()
    found = recording(tape, tmp_path, keep_recording=True)
    found.note()
    tape.now = 100.0
    found.note()
    assert tape.recorded() == 0
    assert taken(found, tape, tmp_path, 0.0) == (40 % 16, 200 % 16, 160)
    assert tape.begun == 100.0


def test_what_is_always_recorded_stays_bounded_and_is_removed_at_the_end(tmp_path):
    tape = Taped()
    (tmp_path / PARTS).mkdir()
    (tmp_path / PARTS / "left").write_text("by a loop that was killed")
    found = recording(tape, tmp_path, keep_recording=True)
    for now in range(0, 1000, 10):
        tape.now = float(now)
        found.note()
        held = [open_trace(path).num_requests for path in (tmp_path / PARTS).glob("*")]
        assert sum(held) < 3 * MORE * 40
        assert found.since(now - 20.0) == min(2 * now, 40), "two requests a second, however many were dropped"
        assert len(found._counts) <= 3 * MORE * 40 / 20 + 2
    assert 4 * 40 < tape.most <= 4 * 40 + 20
    found.close()
    assert tape.begun is None
    found.close()
    assert list((tmp_path / PARTS).glob("*")) == []


def test_a_recording_of_nothing_ends_as_well(tmp_path):
    tape = Taped()
    found = recording(tape, tmp_path, keep_recording=True)
    found.note()
    found.close()
    assert tape.begun is None


@dataclass
class Numbers:
    """A server by the numbers that it would show: what each plan's local activation rate is, and what was asked."""

    rates: dict[str, float]
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

    def recorded(self):
        return 500

    def begin_recording(self):
        self.asked.append("record")

    def end_recording(self, target):
        self.asked.append("end")
        save_trace(requests_numbered(0, self.recorded()), target)
        return self.recorded()

    def expert_bytes(self):
        return 1000

    def swap(self, plan):
        if self.refuses:
            return self.refuses
        self.serves = plan.method
        self.asked.append(f"swap to {plan.method}")
        return ""


@pytest.fixture
def adapter(tmp_path):
    """An adapter of a server whose plan expects .60 and that shows .50; what is solved is the plan `new`."""
    old = replace(vanilla_plan(MODEL, TOPOLOGY), method="old", expected={"lar": 0.60})
    rows = np.tile(np.array([2, 1, 0, 3], np.int32), (2, 1))
    new = replace(old, method="new", placement=replace(old.placement, physical_to_logical_map=rows))
    save_plan(old, tmp_path / "old")
    scores = (Score(lar=0.50, even=0.25, parts=(0.5, 0.5), seconds_per_token=2e-6),
              Score(lar=0.58, even=0.25, parts=(0.58, 0.58), seconds_per_token=1e-6))  # fmt: skip

    def solve(job, seconds):
        save_plan(new, tmp_path / "found")
        return Found(path=tmp_path / "found", old=scores[0], new=scores[1])

    server = Numbers(rates={"old": 0.50, "new": 0.58})
    told = []
    found = Adapter(
        server, old, tmp_path / "old", load_links("h200-nvlink", TOPOLOGY), "h200-nvlink", replace(S, rest=0), tmp_path,
        solve, told.append, clock=lambda: server.now, sleep=server.sleep,
    )  # fmt: skip
    return found, server, told


def turns(adapter, count=30):
    for _ in range(count):
        adapter.turn()


def test_the_loop_records_solves_swaps_and_stays(adapter):
    found, server, told = adapter
    turns(found)
    assert [decision.action for decision in told] == ["watch", "record", "solve", "swap", "stay", "watch"]
    assert server.asked == ["record", "end", "swap to new"]
    assert (found.plan.method, round(found.expected, 6)) == ("new", 0.58)
    assert load_plan(found.path).method == "new"


@pytest.mark.parametrize("core", [0.12, 0.98])
def test_a_solver_without_a_core_is_told(adapter, core):
    found, _, told = adapter
    solve = found.solve
    found.solve = lambda job, seconds: replace(solve(job, seconds), core=core)
    turns(found)
    (swapped,) = [decision for decision in told if decision.action == "swap"]
    assert swapped.figures["solver_core"] == core
    assert ("the solver had 0.12 of a core" in swapped.why) == (core < 0.5)


@pytest.mark.parametrize(("later", "solved"), [(0.60, False), (0.55, True)])
def test_what_to_expect_is_learnt_from_some_windows(adapter, later, solved):
    """The plan says nothing of it. A first window that is higher by chance, by .025, is no reason to solve again."""
    found, server, told = adapter
    found.settings = replace(found.settings, margin=0.02, least_gain=0.5)
    found.expected, found._first, server.pace = None, found._looks[0], 4000
    window = int(found.settings.window / found.settings.every)
    server.rates["old"] = 0.625
    turns(found, window)
    assert found.expected == pytest.approx(0.625)
    server.rates["old"] = later
    turns(found, 2 * window)
    assert any(decision.action == "solve" for decision in told) == solved
    if not solved:
        assert found.expected == pytest.approx(0.60 + 0.025 / 3, abs=0.002)
        turns(found, 20 * window)
        learnt = found.expected
        assert learnt == pytest.approx(0.60 + 0.025 / 4, abs=0.002)
        server.rates["old"] = 0.59
        turns(found, 2 * window)
        assert found.expected == learnt


def test_with_a_recording_that_stays_on_a_plan_is_solved_again_for_twice_as_many_requests(adapter):
    """The rate stays as expected; the plan that is found then is no better."""
    found, server, told = adapter
    found.settings = replace(found.settings, keep_recording=True, requests=40)
    found._recording = Recording(server, found.settings, found.folder, found.clock, found.sleep)
    server.rates["new"], begun = 0.58, {}
    begin = server.begin_recording

    def begin_at():
        begun["at"] = server.now
        begin()

    server.begin_recording = begin_at
    server.recorded = lambda: int(server.now - begun["at"])
    turns(found, 120)
    reasons = [decision.why for decision in told if decision.action == "record"]
    assert reasons[0].startswith("local activation rate")
    again = [int(why.split()[0]) for why in reasons if "requests were recorded since the last solve" in why]
    assert len(again) == len(reasons) - 1 >= 2
    assert 40 <= again[0] < MORE * 40
    assert all(count < MORE * 40 + 2 * found.settings.every for count in again)
    assert again == sorted(again)
    assert MORE * 40 <= again[-1] < MORE * 40 + 2 * found.settings.every
    found.close()
    assert server.asked.count("record") == server.asked.count("end")


@pytest.mark.parametrize(("before", "last", "cut"), [(0.6, 0.6, False), (0.6, 0.5, False), (0.57, 0.57, True)])
def test_requests_are_left_out_where_the_rate_of_a_window_fell(adapter, monkeypatch, before, last, cut):
    """The plan expects .6, and is solved on a schedule; the last reading alone, of five seconds, says nothing."""
    found, server, _ = adapter
    found.settings = replace(found.settings, schedule=300.0, rest=1000)
    server.rates["old"], server.pace, begun = 0.6, 4000, []
    turns(found, 40)
    monkeypatch.setattr(found._recording, "take", lambda since, target: begun.append(since) or 0)
    found._solved, server.rates["old"] = found.clock(), before
    turns(found, 59)
    server.rates["old"] = last
    turns(found, 1)
    assert len(begun) == 1
    assert (begun[0] > 150) == cut


def test_plans_that_served_are_kept_to_be_tried_again(adapter, tmp_path):
    """The plan that the user gave is tried too, and is never removed; older ones than the newest two are."""
    found = adapter[0]
    found.settings = replace(found.settings, kept_plans=2)
    given, paths = found.path, []
    for i in range(4):
        rows = np.tile(np.roll(np.arange(4, dtype=np.int32), i), (2, 1))
        paths.append(
            found._keep(replace(found.plan, placement=replace(found.plan.placement, physical_to_logical_map=rows)))
        )
        found.path = paths[-1]
        assert load_plan(found.path)
        assert given.exists()
    assert found._kept == paths[1:3]
    assert sorted((tmp_path / "adapted").iterdir()) == sorted(paths[1:])
    found.path = found._keep(load_plan(paths[1]))  # one that served before serves again
    assert found.path == paths[1]
    assert found._kept == [paths[2], paths[3]]


def test_the_old_plan_comes_back_where_the_gain_is_not_there(adapter):
    found, server, told = adapter
    server.rates["new"] = 0.50
    turns(found, 20)
    assert [decision.action for decision in told][:5] == ["watch", "record", "solve", "swap", "back"]
    assert server.asked[:4] == ["record", "end", "swap to new", "swap to old"]
    assert found.plan.method == load_plan(found.path).method == "old"


def test_a_plan_that_went_back_does_not_replace_the_one_that_was_kept(adapter, tmp_path):
    found, server, _ = adapter
    found.path = found._keep(found.plan)
    server.rates["new"] = 0.50
    turns(found, 20)
    assert server.serves == load_plan(found.path).method == "old"


def test_where_the_old_plan_cannot_come_back_the_new_one_is_known_to_serve(adapter):
    found, server, told = adapter
    server.rates["new"], swap = 0.50, server.swap

    def only_once(plan):
        problem = swap(plan)
        server.refuses = "rank 1 has no memory"
        return problem

    server.swap = only_once
    turns(found, 20)
    failed = [decision.why for decision in told if decision.action == "fail"]
    assert failed[0] == "the new plan serves on: rank 1 has no memory"
    assert found.plan.method == load_plan(found.path).method == server.serves == "new"


def test_a_dry_run_decides_and_swaps_nothing(adapter):
    found, server, told = adapter
    found.dry_run = True
    turns(found, 20)
    assert "swap" in [decision.action for decision in told]
    assert server.serves == "old"


def test_what_fails_is_told_and_the_server_is_left_alone(adapter):
    found, server, told = adapter
    server.refuses = "another swap is not over"
    turns(found, 20)
    assert ("fail", "another swap is not over") in [(decision.action, decision.why) for decision in told]
    assert found.plan.method == "old"


def test_a_plan_that_does_not_pay_is_kept_out_and_not_tried_again_and_again(adapter):
    found, server, told = adapter
    found.settings = replace(found.settings, least_gain=0.5)
    turns(found, 60)
    assert [decision.action for decision in told].count("solve") == 1  # it then expects what the old plan can give
    assert server.serves == "old"


def test_the_switch_stops_all_decisions(adapter, tmp_path):
    found, server, told = adapter
    (tmp_path / SWITCH).touch()
    turns(found, 20)
    assert [decision.action for decision in told] == ["off"]
    (tmp_path / SWITCH).unlink()
    turns(found, 20)
    assert server.serves == "new"


def test_the_newest_requests_are_for_scoring():
    trace = requests_numbered(0, 50)
    seen, newest = by_age(trace, 0.4)
    assert (seen.num_requests, newest.num_requests) == (30, 20)
    assert newest.token_ids.tolist() == [i % 16 for i in range(30, 50)]
    with pytest.raises(ValueError, match="50 requests were recorded, too few"):
        by_age(trace, 0.1)


def job(folder, **changes):
    """Solve on the trace in a folder, of which the plan `first` serves."""
    given = {"trace": folder / "trace", "plan": folder / "first", "folder": folder, "seconds": 5, "judged": 0.3,
             "links": "", "older": 0, "kept": [], "least_gain": 0.01}  # fmt: skip
    return Job(**{**given, **changes})


@pytest.mark.parametrize("comes_back", [True, False])
def test_a_plan_that_served_before_is_taken_where_its_traffic_comes_back(tmp_path, comes_back):
    two_kinds(tmp_path)
    kept = [tmp_path / "other"] if comes_back else []
    found = find(job(tmp_path, kept=kept))
    assert found.path == tmp_path / ("other" if comes_back else "plan")
    assert (tmp_path / "plan").exists() != comes_back
    assert found.new.lar > found.old.lar + 0.2
    assert load_plan(found.path).topology == Topology(ep_size=2)


def test_requests_from_before_a_change_are_neither_solved_on_nor_scored_on(tmp_path, monkeypatch):
    """The first 30 of 90 are of the other kind, and do not count."""
    whole = planted_trace(2, 1, requests_per_group=45)[0]
    plan, solved, scored = vanilla_plan(whole.fingerprint, TOPOLOGY), [], []
    save_trace(whole, tmp_path / "trace")
    save_plan(plan, tmp_path / "first")
    same = Score(lar=0.5, even=0.5, parts=(0.5, 0.5), seconds_per_token=0.0)
    monkeypatch.setattr(solving, "solve", lambda seen, *rest, **more: solved.append(seen) or plan)
    monkeypatch.setattr(solving, "score", lambda newest, *rest: scored.append(newest) or same)
    find(job(tmp_path, older=30, judged=0.5))
    R, cut = whole.num_requests, 30
    assert {trace.digest() for trace in solved} == {whole.select(np.arange(30, 30 + cut)).digest()}
    assert {trace.digest() for trace in scored} == {whole.select(np.arange(30 + cut, R)).digest()}


def two_kinds(folder):
    """Two kinds of requests whose experts are renumbered; the plan of one serves, and requests are of the other."""
    first = planted_trace(2, 1, requests_per_group=40)[0]
    rows = np.random.default_rng(0).permutation(8)
    other = replace(first, expert_ids=rows[first.expert_ids].astype(np.uint8))
    quick = CoclusterSettings(starts=1, steps=10)
    for name, trace in {"first": first, "other": other}.items():
        save_plan(solve(trace, Topology(ep_size=2), SolveSettings(cocluster=quick)), folder / name)
    save_trace(other, folder / "trace")


def test_a_plan_that_served_before_and_takes_longer_does_not_keep_a_new_one_from_being_solved(tmp_path, monkeypatch):
    """More local, but slower on the links: it is not worth a swap, and it would be found again the next time."""
    two_kinds(tmp_path)
    seconds = iter([1.0, 2.0, 1.0, 1.0])  # of the plan that serves, the kept one, and two that are solved
    monkeypatch.setattr(solving, "score", lambda *of: replace(score(*of), seconds_per_token=next(seconds)))
    found = find(job(tmp_path, kept=[tmp_path / "other"]))
    assert found.path in (tmp_path / "plan", tmp_path / "afresh")
    assert found.new.seconds_per_token == 1.0
    assert found.new.lar > found.old.lar + 0.2


def test_the_process_that_solves_stays_and_outlives_a_job_that_fails_or_takes_too_long(tmp_path):
    trace, quick = planted_trace(2, 1, requests_per_group=40)[0], CoclusterSettings(starts=1, steps=10)
    save_plan(solve(trace, Topology(ep_size=2), SolveSettings(cocluster=quick)), tmp_path / "first")
    save_trace(trace, tmp_path / "trace")
    with contextlib.closing(Solver(nice=1)) as solver:
        found = solver(job(tmp_path), 60)
        assert found.new.lar >= found.old.lar
        assert 0 < found.core < 3
        with pytest.raises(RuntimeError, match="no trace"):
            solver(job(tmp_path, trace=tmp_path / "missing"), 60)
        with pytest.raises(RuntimeError, match=r"no plan was found within 0\.01 s"):
            solver(job(tmp_path), 0.01)
        assert solver(job(tmp_path, seconds=0.1), 60).old == found.old


def test_a_score_does_not_hang_on_the_order_in_which_ranks_were_joined(tmp_path):
    """Requests of two kinds, of which each suits one rank; in turns, as the plan that served would have them."""
    trace = planted_trace(2, 1, requests_per_group=40)[0]
    plan = solve(trace, Topology(ep_size=2, dp_size=2), SolveSettings(cocluster=CoclusterSettings(starts=1, steps=10)))
    group = schedule_live(trace, plan, 1000)
    first, second = np.flatnonzero(group == 0), np.flatnonzero(group == 1)
    number = min(len(first), len(second))
    turns = np.stack([first[:number], second[:number]], axis=1).ravel()
    one_by_one = np.concatenate([first[:number], second[:number]])
    links = load_links("h200-nvlink", plan.topology)
    found = [score(trace.select(order), plan, links).lar for order in (turns, one_by_one)]
    live = [replay(trace.select(order), plan, groups=schedule_live(trace.select(order), plan, 8)).total.lar
            for order in (turns, one_by_one)]  # fmt: skip
    assert live[0] - live[1] > 0.25, "the order of arrival does matter"
    assert abs(found[0] - found[1]) < 0.1
