"""What a rank says of itself."""

from semmoe.engines.rank import untried


def test_a_version_that_no_test_has_run_is_named_with_the_one_that_was():
    assert untried("vllm", "0.32.0", "0.32.0") == ""
    assert untried("vllm", "0.32.0+cpu", "0.32.0") == ""
    said = untried("vllm", "0.33.0", "0.32.0")
    assert said == "tried on vllm 0.32.0, this is 0.33.0: run `semmoe doctor --engine vllm`"
