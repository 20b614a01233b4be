"""Requests to the ranks of a live engine: the plan's choice under the load that runs now."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from semmoe.core import Plan
from semmoe.engines.balancer import Ages, RequestBalancer
from semmoe.engines.counters import Counters
from semmoe.engines.requests import RequestNamer
from semmoe.engines.sglang import requests as sglang_requests
from semmoe.paper.policies import PaperTable
from semmoe.placement.linear import place, vanilla_plan
from semmoe.requests.policy import PromptScores
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Fingerprint, Topology

V, MEAN = 8, 10.0
IDENTITY = Fingerprint(
    model="m", architecture_hash="", tokenizer_hash="", vocab_size=V, num_layers=1, num_experts=4, top_k=2
)


def plan(requests, groups=2):
    topology = Topology(ep_size=groups, dp_size=groups)
    return Plan(
        topology=topology, placement=place(1, 4, groups), tokens=ByPosition(), requests=requests,
        fingerprint=IDENTITY, method="test",
    )  # fmt: skip


def request_map(preferred=0):
    """Every id prefers one group, a prompt of two by a fifth of its pairs; the last row, for unknown ids, none."""
    scores = np.zeros((V + 1, 2), np.float32)
    scores[:V, preferred] = 0.2 / np.sqrt(2)
    zeros = np.zeros(2, np.float32)
    return PromptScores(token_scores=scores, token_weights=np.ones(V + 1, np.float32), bias=zeros, prices=zeros,
                      score_spread=0.0, mean_length=MEAN)  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Front:
    """An engine's front end that knows how many requests its ranks run: a balancer, ages, and their clock."""

    def __init__(self, requests):
        self.balancer, self.clock = RequestBalancer(plan(requests)), Clock()
        self.ages = Ages(self.clock)

    def choose(self, prompt, most=None):
        assigned = self.balancer.admit(prompt, most)
        self.ages.add(assigned)
        return assigned.group

    def reconcile(self, rank, unfinished, as_of):
        for assigned in self.ages.ended(rank, unfinished, as_of):
            self.balancer.finish(assigned)


def after_three():
    """A front end after three requests of 12 tokens of work, which have ended."""
    front = Front(request_map())
    for _ in range(3):
        front.choose([1, 2])
    front.clock.now += 1
    for rank in range(2):
        front.reconcile(rank, 0, as_of=front.clock.now)
    return front


def test_preferred_until_a_lead_costs_more():
    """A lead of one request costs .25 with one in each rank or fewer (1 and 0), .204 with 1.5 (2 and 1), .158 with 2.5
    (3 and 2); preferred is rank 0 by .2."""
    balancer = Front(request_map())
    assert [balancer.choose([1, 2]) for _ in range(6)] == [0, 1, 0, 1, 0, 0]


def test_whatever_is_preferred_no_rank_leads_by_more_than_two_requests():
    """Requests of 12 tokens of work: with 4 on the preferred rank the mean is 2, with 5 and 1 it is 3."""
    table = request_map()
    balancer = Front(replace(table, token_scores=100 * table.token_scores))
    assert [balancer.choose([1, 2]) for _ in range(8)] == [0, 0, 0, 0, 1, 0, 1, 0]


def test_among_idle_ranks_the_preferred_one_is_free_for_a_request_of_any_size():
    balancer = Front(request_map())
    assert balancer.choose([2] * 500) == balancer.choose([1, 2]) - 1 == 0


def test_what_has_ended_makes_room():
    balancer = Front(request_map())
    clock = balancer.clock
    assert [balancer.choose([1, 2]) for _ in range(4)] == [0, 1, 0, 1]
    clock.now += 1
    balancer.reconcile(0, 0, as_of=clock.now)  # rank 0 has nothing left
    assert [balancer.choose([1, 2]) for _ in range(3)] == [0, 0, 0]


def test_of_a_rank_s_requests_the_oldest_has_ended():
    """Work of 3 and then of 12: with 12 left a lead costs more than rank 0 is preferred by; with 3 it would not."""
    balancer = after_three()
    clock = balancer.clock
    assert [balancer.choose([1, 2], most=1), balancer.choose([1, 2])] == [0, 0]
    clock.now += 1
    balancer.reconcile(0, 1, as_of=clock.now)
    assert [balancer.choose([1, 2]) for _ in range(2)] == [1, 0]


def test_a_load_older_than_a_request_does_not_end_it():
    balancer = Front(request_map())
    clock = balancer.clock
    for _ in range(3):
        balancer.choose([1, 2])
    balancer.reconcile(0, 0, as_of=clock.now)  # said before they could have arrived
    assert balancer.choose([1, 2]) == 1


def test_a_balancer_of_another_plan_ends_requests_that_the_one_before_assigned():
    front, other = Front(request_map()), RequestBalancer(plan(request_map()))
    assert [front.choose([1, 2]) for _ in range(4)] == [0, 1, 0, 1]
    other.follow(front.balancer)
    front.balancer = other
    front.clock.now += 1
    front.reconcile(0, 0, as_of=front.clock.now)
    assert [front.choose([1, 2]) for _ in range(3)] == [0, 0, 0]


def test_short_answers_count_as_such():
    """Of 12 tokens of work as those before, a rank has one at a time; of 3, three: a lead of 6 costs little."""
    balancer = after_three()
    assert [balancer.choose([1, 2]) for _ in range(3)] == [0, 1, 0]
    balancer = after_three()
    assert [balancer.choose([1, 2], most=1) for _ in range(3)] == [0, 0, 0]


def test_unknown_ids_are_counted():
    balancer = Front(request_map())
    balancer.choose([1, V, V + 5, -3])
    assert balancer.balancer.scheduler.unknown_tokens == 3


def test_the_papers_table():
    table = PaperTable(
        request_scores=np.tile(np.array([[0.2, 0.8]], np.float32), (V + 1, 1)),
        request_source=np.array([1] * V + [0], np.uint8),
    )
    balancer = Front(table)
    assert [balancer.choose([1, 2, 99]) for _ in range(4)] == [1, 0, 1, 0]  # each rank once a round
    assert balancer.balancer.scheduler.unknown_tokens == 4
    balancer.reconcile(0, 0, as_of=0.0)


def test_a_plan_without_requests_is_refused():
    with pytest.raises(ValueError, match="schedules no requests"):
        RequestBalancer(vanilla_plan(IDENTITY, Topology(ep_size=2)))


def counted(counters, name):
    return sum(value for found, _, value in counters.readings() if found == name)


def test_a_namer_counts_unknown_ids_once_and_keeps_running_requests_when_the_plan_changes():
    counters = Counters("front")
    namer = RequestNamer(plan(request_map()), counters)

    def choose(ids):
        found = namer.admit(ids, None)
        return found.group

    assert [namer.name(None, lambda: choose([1, 99])) for _ in range(3)] == [0, 1, 0]
    assert counted(counters, "unknown_tokens") == 3
    other = plan(request_map(preferred=1))
    namer.prepare(other)
    assert namer.name(None, lambda: choose([1, 99])) == 1
    assert namer._balancer.scheduler.work.sum() == pytest.approx(4 * (MEAN + 2))
    assert counted(counters, "unknown_tokens") == 4
    assert namer.name(1, lambda: pytest.fail("its rank is named")) is None
    assert counted(counters, "scheduled_requests") == 5


def test_sglang_s_loads_are_read_at_most_once_in_a_while_and_count_once(monkeypatch):
    clock, read = Clock(), []
    monkeypatch.setattr(sglang_requests.time, "monotonic", clock)
    hook = sglang_requests.RequestHook(plan(request_map()), None, Counters("front"))
    monkeypatch.setattr(hook._ages, "ended", lambda *report: read.append(report) or [])
    load = SimpleNamespace(dp_rank=1, timestamp=5.0, num_running_reqs=2, num_waiting_reqs=3, max_running_requests=7)
    controller = SimpleNamespace(load_snapshot_reader=SimpleNamespace(read_all=lambda: [load]))
    hook._refresh(controller)
    load.timestamp = 6.0
    hook._refresh(controller)  # too soon
    assert read == [(1, 5, 5.0)]
    clock.now += 2 * sglang_requests.REFRESH
    hook._refresh(controller)
    clock.now += 2 * sglang_requests.REFRESH
    hook._refresh(controller)  # the same report
    assert read == [(1, 5, 5.0), (1, 5, 6.0)]
    assert hook._balancer.scheduler.most_at_once == 7
