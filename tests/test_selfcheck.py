"""The check of hooks in the first pass."""

from semmoe.engines.selfcheck import SelfCheck


def checked(**ran):
    check = SelfCheck()
    check.expect("routed", 3)
    check.expect("restore", 2)
    for name, times in ran.items():
        for _ in range(times):
            check.ran(name)
    return check


def test_hooks_that_ran_as_often_as_there_are_layers_are_trusted():
    check = checked(routed=3, restore=2)
    assert (check.pending, check.verdict(), check.pending) == (True, "", False)
    assert list(check.readings()) == []


def test_hooks_that_did_not_run_or_ran_twice_are_named_once():
    check = checked(routed=6)
    said = check.degrade(check.verdict())
    assert said == "in the first pass hooks ran: routed 6 of 3 times, restore 0 of 2 times"
    assert check.verdict() == ""
    assert list(check.readings()) == [("degraded", {"reason": said}, 1.0)]


def test_hooks_that_ran_before_the_first_real_pass_are_not_counted():
    check = checked(routed=3, restore=2)
    check.begin()
    for name in ("routed", "routed", "routed", "restore", "restore"):
        check.ran(name)
    assert check.verdict() == ""


def test_other_reasons_are_said_once_each():
    check = checked(routed=3, restore=2)
    assert check.degrade("counters\nstand still") == "counters stand still"
    assert check.degrade("counters stand still") == ""
    assert check.reasons == ["counters stand still"]
