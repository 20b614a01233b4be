"""The time of forward passes by where it went; the parts add up to the whole."""

import time

import pytest

from semmoe.engines.passes import PassClock
from semmoe.runtime.collectives import Communicator, timed


def wait(comm, kind, seconds):
    with timed(comm.seconds, kind):
        time.sleep(seconds)


def test_parts_add_up_to_the_pass_and_what_lies_outside_is_left_out():
    clock, dispatch, shuffle = PassClock(), Communicator(None, 0, 2), Communicator(None, 0, 2)
    wait(dispatch, "dispatch", 0.05)  # as in a pass of other ranks' tokens alone
    started = time.perf_counter()
    with clock.passing([dispatch], [shuffle]):
        wait(dispatch, "dispatch", 0.03)
        wait(dispatch, "combine", 0.01)
        wait(shuffle, "all_gather", 0.01)
        time.sleep(0.02)
    whole = time.perf_counter() - started
    found = {labels["part"]: seconds for name, labels, seconds in clock.readings(3) if labels["ep_rank"] == "3"}
    assert sum(found.values()) == pytest.approx(whole, rel=0.05)
    expected = {"all_to_all": 0.04, "shuffle": 0.01, "rest": 0.02}
    assert found == {part: pytest.approx(seconds, abs=0.01) for part, seconds in expected.items()}


def test_nothing_is_counted_without_an_all_to_all_or_without_tokens():
    clock, comm = PassClock(), Communicator(None, 0, 2)
    for dispatch, counted in (([], True), ([comm], False)):
        with clock.passing(dispatch, [comm], counted):
            wait(comm, "dispatch", 0.001)
    assert list(clock.readings(0)) == []
