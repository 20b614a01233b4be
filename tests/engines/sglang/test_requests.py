"""The controller's hook: a request is served whatever happens to its scheduling, and is counted for what it was."""

import time
from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

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
    return RequestHook(load_plan(plans["dp2"]), Counters("test"))


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
    work, other = hook._balancer._scheduler.work, load_plan(swap_plans["dp2"][0])
    hook.prepare(other)
    assert send(hook, Controller(), request([5, 6, 7])) in (0, 1)
    assert hook._balancer._scheduler.work.sum() > work.sum() > 0
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
    empty = [SimpleNamespace(dp_rank=r, timestamp=1e12, num_running_reqs=0, num_waiting_reqs=0) for r in (0, 1)]
    assert send(hook, Controller(empty), request(req)) == first[0]


class Loop(Controller):
    """A controller for SGLang's own loop and dispatcher over (turn, message) pairs; what left it, with the time."""

    def __init__(self, messages, turns):
        super().__init__()
        self.messages, self.left, self.came, self.fed = messages, [], {}, 0
        self.turns_left = []  # the loop's turn in which each of `left` left
        self.recv_from_tokenizer = SimpleNamespace(poll=lambda ms: None)  # an engine on a CPU may have patched the loop
        self.soft_watchdog = SimpleNamespace(feed=self._feed)
        self._turns = turns

    def _feed(self):
        self.fed += 1
        if self.fed > self._turns:
            raise StopIteration
        time.sleep(0.001)

    def send(self, req, **unused):
        self.left.append((req, time.monotonic()))
        self.turns_left.append(self.fed)


def run_loop(hook, messages, turns):
    """Run SGLang's own `event_loop` on (turn, message) pairs; requests pass the hook as in the plug-in."""
    from sglang.srt.managers import data_parallel_controller as sglang
    from sglang.utils import TypeBasedDispatcher

    loop = Loop(messages, turns)
    loop._request_dispatcher = TypeBasedDispatcher(
        [(TokenizedGenerateReqInput, lambda req: hook.dispatch(Loop.send, loop, req))]
    )
    loop._request_dispatcher.add_fallback_fn(loop.send)

    def receive(socket, flags):
        if not loop.messages or loop.messages[0][0] > loop.fed:
            raise sglang.zmq.ZMQError
        _, message = loop.messages.pop(0)
        loop.came[getattr(message, "rid", message)] = time.monotonic()
        return message

    original = sglang.sock_recv
    sglang.sock_recv = receive
    try:
        with pytest.raises(StopIteration):
            hook.run(sglang.DataParallelController.event_loop, loop)
    finally:
        sglang.sock_recv = original
    return loop


def tokenized(number):
    unused = dict.fromkeys(("input_text", "input_embeds", "mm_inputs", "token_type_ids", "token_ids_logprob"))
    rest = {"return_logprob": False, "logprob_start_len": -1, "top_logprobs_num": 0, "stream": False}
    ids, sampling = array("q", [5 + number, 6, 7]), SamplingParams(max_new_tokens=4)
    return TokenizedGenerateReqInput(rid=f"r{number}", input_ids=ids, sampling_params=sampling, **unused, **rest)


def test_requests_are_held_for_a_bounded_wait_and_leave_in_order(plans):
    """Some turns apart (each 1 ms), within a window of 50 ms; the loop turns on meanwhile and nobody is left behind."""
    hook = RequestHook(load_plan(plans["dp2"]), Counters("test"), window_seconds=0.05)
    reqs = [tokenized(number) for number in range(4)]
    loop = run_loop(hook, [(2, reqs[0]), (2, reqs[1]), (6, reqs[2]), (400, reqs[3])], turns=800)
    assert [req.rid for req, _ in loop.left] == ["r0", "r1", "r2", "r3"]
    assert all(req.routed_dp_rank in (0, 1) for req, _ in loop.left)
    waited = [when - loop.came[req.rid] for req, when in loop.left]
    assert waited[0] >= 0.05
    assert max(waited) < 0.05 + 2.0  # the machine may be loaded
    assert len(set(loop.turns_left[:3])) == 1  # together, though one came later
    assert counted(hook)["scheduled_requests plan"] == 4


def test_other_messages_find_the_requests_that_came_before_them(plans):
    hook = RequestHook(load_plan(plans["dp2"]), Counters("test"), window_seconds=9.0)
    loop = run_loop(hook, [(2, tokenized(0)), (2, "abort r0"), (2, tokenized(1))], turns=20)
    assert [getattr(one, "rid", one) for one, _ in loop.left] == ["r0", "abort r0"]
    assert [one.req.rid for one in hook._window.take()] == ["r1"]  # its window is still open


def test_a_window_that_cannot_be_scheduled_is_the_engines(plans):
    hook = RequestHook(load_plan(plans["dp2"]), Counters("test"), window_seconds=9.0)
    sent, broken = [], Controller()
    broken.load_snapshot_reader = None
    for number in range(64):
        hook.dispatch(lambda controller, req: sent.append(req), broken, tokenized(number))
        assert len(sent) == (64 if number == 63 else 0)  # a window holds 64
    assert {req.routed_dp_rank for req in sent} == {None}
    assert counted(hook)["scheduled_requests engine"] == 64
