"""What a rank says of itself."""

from semmoe.engines.host import tell_untried


def test_a_version_that_no_test_has_run_is_named_with_the_one_that_was(caplog):
    for rank, version in ((0, "0.32.0"), (0, "0.32.0+cpu"), (1, "0.33.0")):
        tell_untried(rank, "vllm", version, "0.32.0")
    assert caplog.messages == []
    tell_untried(0, "vllm", "0.33.0", "0.32.0")
    assert caplog.messages == ["semmoe: tried on vllm 0.32.0, this is 0.33.0: run `semmoe doctor --engine vllm`"]
