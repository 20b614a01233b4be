"""The time of forward passes by where it went; the parts add up to the whole."""

import pytest

from semmoe.engines.passes import PassClock
from semmoe.runtime import collectives
from semmoe.runtime.collectives import Communicator, timed


@pytest.fixture
def spend(monkeypatch):
    """Lets seconds pass by the clock that times are taken by."""
    now = [100.0]
    monkeypatch.setattr(collectives.time, "perf_counter", lambda: now[0])

    def spend(seconds, comm=None, kind=""):
        with timed({kind: 0.0} if comm is None else comm.seconds, kind):
            now[0] += seconds

    return spend


def test_parts_add_up_to_the_pass_and_what_lies_outside_is_left_out(spend):
    clock, dispatch, shuffle = PassClock(), Communicator(None, 0, 2), Communicator(None, 0, 2)
    spend(0.05, dispatch, "dispatch")  # as in a pass of other ranks' tokens alone
    with clock.passing([dispatch], [shuffle]):
        spend(0.03, dispatch, "dispatch")
        spend(0.01, dispatch, "combine")
        spend(0.01, shuffle, "all_gather")
        spend(0.02)
    found = {labels["part"]: seconds for name, labels, seconds in clock.readings(3) if labels["ep_rank"] == "3"}
    assert found == pytest.approx({"all_to_all": 0.04, "shuffle": 0.01, "rest": 0.02})


def test_nothing_is_counted_without_an_all_to_all_or_without_tokens(spend):
    clock, comm = PassClock(), Communicator(None, 0, 2)
    for dispatch, counted in (([], True), ([comm], False)):
        with clock.passing(dispatch, [comm], counted):
            spend(0.001, comm, "dispatch")
    assert list(clock.readings(0)) == []
