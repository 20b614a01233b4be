"""Requests to the ranks of a live engine: the plan's choice under the load that runs now."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from semmoe.core import Plan
from semmoe.engines.balancer import RequestBalancer
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


def after_three():
    """A balancer after three requests of 12 tokens of work, which have ended, and its clock."""
    clock = Clock()
    balancer = RequestBalancer(plan(request_map()), clock)
    for _ in range(3):
        balancer.choose([1, 2])
    clock.now += 1
    for rank in range(2):
        balancer.reconcile(rank, 0, as_of=clock.now)
    return balancer, clock


def test_preferred_until_a_lead_costs_more():
    """A lead of one request costs .25 with one in each rank or fewer (1 and 0), .204 with 1.5 (2 and 1), .158 with 2.5
    (3 and 2); preferred is rank 0 by .2."""
    balancer = RequestBalancer(plan(request_map()), Clock())
    assert [balancer.choose([1, 2]) for _ in range(6)] == [0, 1, 0, 1, 0, 0]


def test_whatever_is_preferred_no_rank_leads_by_more_than_two_requests():
    """Requests of 12 tokens of work: with 4 on the preferred rank the mean is 2, with 5 and 1 it is 3."""
    table = request_map()
    balancer = RequestBalancer(plan(replace(table, token_scores=100 * table.token_scores)), Clock())
    assert [balancer.choose([1, 2]) for _ in range(8)] == [0, 0, 0, 0, 1, 0, 1, 0]


def test_among_idle_ranks_the_preferred_one_is_free_for_a_request_of_any_size():
    balancer = RequestBalancer(plan(request_map()), Clock())
    assert balancer.choose([2] * 500) == balancer.choose([1, 2]) - 1 == 0


def test_what_has_ended_makes_room():
    clock = Clock()
    balancer = RequestBalancer(plan(request_map()), clock)
    assert [balancer.choose([1, 2]) for _ in range(4)] == [0, 1, 0, 1]
    clock.now += 1
    balancer.reconcile(0, 0, as_of=clock.now)  # rank 0 has nothing left
    assert [balancer.choose([1, 2]) for _ in range(3)] == [0, 0, 0]


def test_of_a_rank_s_requests_the_oldest_has_ended():
    """Work of 3 and then of 12: with 12 left a lead costs more than rank 0 is preferred by; with 3 it would not."""
    balancer, clock = after_three()
    assert [balancer.choose([1, 2], max_new_tokens=1), balancer.choose([1, 2])] == [0, 0]
    clock.now += 1
    balancer.reconcile(0, 1, as_of=clock.now)
    assert [balancer.choose([1, 2]) for _ in range(2)] == [1, 0]


def test_a_load_older_than_a_request_does_not_end_it():
    clock = Clock()
    balancer = RequestBalancer(plan(request_map()), clock)
    for _ in range(3):
        balancer.choose([1, 2])
    balancer.reconcile(0, 0, as_of=clock.now)  # said before they could have arrived
    assert balancer.choose([1, 2]) == 1


def test_a_balancer_of_another_plan_ends_requests_that_the_one_before_assigned():
    clock = Clock()
    before, after = (RequestBalancer(plan(request_map()), clock) for _ in range(2))
    assert [before.choose([1, 2]) for _ in range(4)] == [0, 1, 0, 1]
    after.follow(before)
    clock.now += 1
    after.reconcile(0, 0, as_of=clock.now)
    assert [after.choose([1, 2]) for _ in range(3)] == [0, 0, 0]


def test_short_answers_count_as_such():
    """Of 12 tokens of work as those before, a rank has one at a time; of 3, three: a lead of 6 costs little."""
    balancer, _ = after_three()
    assert [balancer.choose([1, 2]) for _ in range(3)] == [0, 1, 0]
    balancer, _ = after_three()
    assert [balancer.choose([1, 2], max_new_tokens=1) for _ in range(3)] == [0, 0, 0]


def test_unknown_ids_are_counted():
    balancer = RequestBalancer(plan(request_map()), Clock())
    balancer.choose([1, V, V + 5, -3])
    assert balancer.unknown_tokens == 3


def test_the_papers_table():
    table = PaperTable(
        request_scores=np.tile(np.array([[0.2, 0.8]], np.float32), (V + 1, 1)),
        request_source=np.array([1] * V + [0], np.uint8),
    )
    balancer = RequestBalancer(plan(table), Clock())
    assert [balancer.choose([1, 2, 99]) for _ in range(4)] == [1, 0, 1, 0]  # each rank once a round
    assert balancer.unknown_tokens == 4
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
        found = namer._balancer.choose(ids)
        namer.count_unknown()
        return found

    assert [namer.name(None, lambda: choose([1, 99])) for _ in range(3)] == [0, 1, 0]
    assert counted(counters, "unknown_tokens") == 3
    other = plan(request_map(preferred=1))
    namer.prepare(other)
    assert namer.name(None, lambda: choose([1, 99])) == 1
    assert namer._balancer._scheduler.work.sum() == pytest.approx(4 * (MEAN + 2))
    assert counted(counters, "unknown_tokens") == 4
    assert namer.name(1, lambda: pytest.fail("its rank is named")) is None
    assert counted(counters, "scheduled_requests") == 5


def test_sglang_s_loads_are_read_at_most_once_in_a_while_and_count_once(monkeypatch):
    clock, read = Clock(), []
    monkeypatch.setattr(sglang_requests.time, "monotonic", clock)
    hook = sglang_requests.RequestHook(plan(request_map()), Counters("front"))
    monkeypatch.setattr(hook._balancer, "reconcile", lambda rank, running, when: read.append((rank, running, when)))
    load = SimpleNamespace(dp_rank=1, timestamp=5.0, num_running_reqs=2, num_waiting_reqs=3)
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
