"""Answers in the engine's default type repeat on a plan without copies, where each expert is summed on one rank.

Without SGLang's prefix cache, which computes the end of a prompt in another shape: on longer prompts vanilla's answers
change with it, too.
"""

from repeat_tests import check_repeats
from sglang_server import SglangServer


def test_answers_repeat_without_copies_at_changing_concurrency(plans, prompts, tmp_path):
    check_repeats(SglangServer, plans["dp2 alone"], prompts[4:20], tmp_path, "--disable-radix-cache")
