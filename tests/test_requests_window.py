"""Requests that are held for a bounded wait, in a loop that asks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from semmoe.requests.window import Window


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
