"""The controller's hook: a request is served whatever happens to its scheduling, and is counted for what it was."""

from types import SimpleNamespace

import pytest

from semmoe.engines.counters import Counters
from semmoe.engines.sglang.requests import RequestHook
from semmoe.live.status import plan_number
from semmoe.plan import load_plan


class Controller:
    """What the hook sees of SGLang's controller."""

    def __init__(self, loads=(), active=(0, 1)):
        self._active_workers, self.status = list(active), [True, True]
        self.load_snapshot_reader = SimpleNamespace(read_all=lambda: list(loads))


def request(ids, **fields):
    sampling = SimpleNamespace(max_new_tokens=4)
    return SimpleNamespace(rid="r", input_ids=ids, routed_dp_rank=None, sampling_params=sampling, **fields)


@pytest.fixture
def hook(plans):
    return RequestHook(load_plan(plans["dp2"]), None, Counters("test"))


def send(hook, controller, req):
    """The rank that SGLang's own dispatch sees."""
    sent = []
    hook.dispatch(lambda controller, req: sent.append(req.routed_dp_rank), controller, req)
    (rank,) = sent  # at once, and once
    return rank


def counted(hook):
    found = {}
    for name, labels, value in hook._counters.readings():
        if name == "request_plan_number":
            continue  # a plan's number, not a count
        key = f"{name} {labels.get('by', '')}".strip()
        found[key] = found.get(key, 0) + value
    return found


def test_scheduled_and_counted(hook):
    assert send(hook, Controller(), request([5, 6, 7])) in (0, 1)
    assert counted(hook) == {"unknown_tokens": 0, "scheduled_requests plan": 1}


def test_a_plan_that_was_prepared_assigns_the_next_request_beside_those_that_run(hook, swap_plans):
    for _ in range(3):
        send(hook, Controller(), request([5, 6, 7]))
    work, other = hook._balancer.scheduler.work, load_plan(swap_plans["dp2"][0])
    hook.prepare(other)
    assert send(hook, Controller(), request([5, 6, 7])) in (0, 1)
    assert hook._balancer.scheduler.work.sum() > work.sum() > 0
    numbers = [value for name, _, value in hook._counters.readings() if name == "request_plan_number"]
    assert numbers == [plan_number(other)]
    assert counted(hook)["scheduled_requests plan"] == 4


def test_named_ranks_are_kept(hook):
    named = request([5, 6, 7])
    named.routed_dp_rank = 1
    assert send(hook, Controller(), named) == 1
    assert counted(hook) == {"scheduled_requests named": 1}


def test_unknown_ids_are_counted(hook):
    assert send(hook, Controller(), request([5, 4096, -1, 10**12])) in (0, 1)
    assert counted(hook)["unknown_tokens"] == 3


@pytest.mark.parametrize("ids", [None, []])
def test_prompts_without_ids_are_the_engines(hook, ids):
    assert send(hook, Controller(), request(ids)) is None
    assert counted(hook) == {"scheduled_requests engine": 1}


def test_ranks_that_are_gone_are_not_named(hook):
    assert send(hook, Controller(active=()), request([5, 6, 7])) is None
    assert counted(hook)["scheduled_requests engine"] == 1


def test_a_failure_leaves_the_request_to_the_engine(hook):
    broken = Controller()
    broken.load_snapshot_reader = None
    assert send(hook, broken, request([5, 6, 7])) is None
    assert counted(hook) == {"schedule_failures": 1, "scheduled_requests engine": 1}


def test_reported_loads_make_room(hook):
    """Requests that all prefer one rank go there again once that rank says that it has none left."""
    req = [5, 6, 7] * 40
    first = [send(hook, Controller(), request(req)) for _ in range(12)]
    assert set(first) == {0, 1}
    hook._looked = 0.0
    idle = {"timestamp": 1e12, "num_running_reqs": 0, "num_waiting_reqs": 0, "max_running_requests": 0}
    empty = [SimpleNamespace(dp_rank=r, **idle) for r in (0, 1)]
    assert send(hook, Controller(empty), request(req)) == first[0]
