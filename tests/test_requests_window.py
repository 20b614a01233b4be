"""Requests that are held for a bounded wait: in a loop that asks, and in an event loop with a real clock."""

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from semmoe.requests.window import AsyncWindow, Window

SLACK = 2.0  # seconds that a busy machine may add to a wait


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_window_by_hand():
    """It opens at 0 with the first item and ends at 5, whatever came in between; the next one opens at 7."""
    clock = Clock()
    window = Window(5.0, most=3, clock=clock)
    assert not window.due
    window.add("a")
    clock.now = 4.9
    window.add("b")
    assert not window.due
    clock.now = 5.0
    assert window.due
    assert window.take() == ["a", "b"]
    assert not window.due
    clock.now = 7.0
    window.add("c")
    clock.now = 11.9
    assert not window.due
    window.add("d")
    window.add("e")  # as many as it may hold
    assert window.due
    assert window.take() == ["c", "d", "e"]
    assert window.take() == []


def test_in_a_loop_a_window_that_filled_leaves_the_next_one_its_whole_time():
    clock = Clock()
    window = Window(5.0, most=2, clock=clock)
    window.add("a")
    clock.now = 4.0
    window.add("b")
    assert window.take() == ["a", "b"]
    window.add("c")
    clock.now = 8.9
    assert not window.due
    clock.now = 9.0
    assert window.due


def test_a_window_of_no_seconds_is_due_at_once():
    window = Window(0.0)
    window.add(1)
    assert window.due


@settings(max_examples=60)
@given(st.lists(st.floats(0, 4), max_size=40), st.floats(0, 3), st.integers(1, 6), st.floats(0.01, 0.5))
def test_in_a_loop_none_waits_longer_than_its_window_and_a_turn(gaps, seconds, most, turn):
    """A loop that asks every `turn`: all leave, in order of arrival, at most `most` together and none too late."""
    clock, arrivals, left = Clock(), [], []
    window = Window(seconds, most, clock)

    def look():
        if window.due:
            taken = window.take()
            assert len(taken) <= most
            left.extend((item, clock.now) for item in taken)

    for gap in gaps:
        for _ in range(int(gap / turn)):
            clock.now += turn
            look()
        window.add(len(arrivals))
        arrivals.append(clock.now)
        look()
    for _ in range(int(seconds / turn) + 2):
        clock.now += turn
        look()
    assert [item for item, _ in left] == list(range(len(arrivals)))
    assert all(when - arrivals[item] <= seconds + turn + 1e-9 for item, when in left)


def recording():
    """A `decide` that notes the windows it was given, and a list of what was undone."""
    windows, undone = [], []

    def decide(items):
        windows.append(list(items))
        return [10 * item for item in items]

    return windows, undone, decide


@settings(max_examples=12, deadline=None)
@given(st.lists(st.floats(0, 0.02), min_size=1, max_size=30), st.sampled_from([0.0, 0.005, 0.03]), st.integers(1, 8))
def test_with_a_real_clock_every_request_is_assigned_in_order_and_in_time(gaps, seconds, most):
    windows, undone, decide = recording()
    done, waited = [], []

    async def request(window, number):
        begun = time.monotonic()
        assert await window.join(number) == 10 * number
        waited.append(time.monotonic() - begun)
        done.append(number)

    async def run():
        window, tasks = AsyncWindow(seconds, decide, undone.append, most), []
        for number, gap in enumerate(gaps):
            await asyncio.sleep(gap)
            tasks.append(asyncio.create_task(request(window, number)))
        await asyncio.wait_for(asyncio.gather(*tasks), 10)

    asyncio.run(run())
    assert done == list(range(len(gaps)))
    assert [number for window in windows for number in window] == done
    assert max(map(len, windows)) <= most
    assert max(waited) <= seconds + SLACK
    assert undone == []


def test_requests_that_arrive_together_are_decided_together_and_the_loop_goes_on_meanwhile():
    windows, _, decide = recording()
    turns = []

    async def others():
        while True:
            await asyncio.sleep(0.001)
            turns.append(time.monotonic())

    async def run():
        window, busy = AsyncWindow(0.1, decide, lambda result: None), asyncio.create_task(others())
        await asyncio.gather(*map(window.join, range(5)))
        busy.cancel()

    asyncio.run(run())
    assert windows == [[0, 1, 2, 3, 4]]
    assert len(turns) > 10


def test_who_hangs_up_while_waiting_is_left_out_and_delays_nobody():
    windows, undone, decide = recording()

    async def run():
        window = AsyncWindow(0.05, decide, undone.append)
        tasks = [asyncio.create_task(window.join(number)) for number in range(3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        begun = time.monotonic()
        assert await asyncio.gather(*tasks[1:]) == [10, 20]
        assert time.monotonic() - begun <= 0.05 + SLACK
        alone = asyncio.create_task(window.join(3))
        await asyncio.sleep(0)
        alone.cancel()
        await asyncio.sleep(0.06)  # a window in which nobody waits any more
        assert await window.join(4) == 40

    asyncio.run(run())
    assert windows == [[1, 2], [4]]
    assert undone == []


def test_what_was_decided_for_who_hangs_up_at_that_moment_is_undone():
    windows, undone, decide = recording()

    async def run():
        window = AsyncWindow(60.0, decide, undone.append, most=2)
        first, second = asyncio.create_task(window.join(1)), asyncio.create_task(window.join(2))
        while not windows:  # decided, and `first`, which waits behind this coroutine, cannot have gone on
            await asyncio.sleep(0)
        first.cancel()
        assert await second == 20
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(run())
    assert windows == [[1, 2]]
    assert undone == [10]


def test_a_window_that_filled_leaves_the_next_one_its_whole_time():
    """Two requests fill the first window half-way through its time; the third then waits for a whole window."""
    windows, _, decide = recording()

    async def run():
        loop = asyncio.get_running_loop()
        window = AsyncWindow(0.4, decide, lambda result: None, most=2)
        first = asyncio.create_task(window.join(1))
        await asyncio.sleep(0.25)
        assert await asyncio.gather(window.join(2), first) == [20, 10]
        begun = loop.time()
        assert await window.join(3) == 30
        return loop.time() - begun

    assert asyncio.run(run()) >= 0.39
    assert windows == [[1, 2], [3]]


def test_an_error_reaches_all_that_waited_and_the_next_window_works():
    def decide(items):
        if 1 in items:
            raise ValueError("no rank")
        return items

    async def run():
        window = AsyncWindow(0.01, decide, lambda result: None)
        found = await asyncio.gather(window.join(1), window.join(2), return_exceptions=True)
        assert [str(error) for error in found] == ["no rank"] * 2
        assert await window.join(3) == 3

    asyncio.run(run())
