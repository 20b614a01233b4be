"""Answers in the engine's default type repeat on a plan without copies, where each expert is summed on one rank.

Without SGLang's prefix cache, which computes the end of a prompt in another shape: on longer prompts vanilla's answers
change with it, too. On a busy machine an answer changed in 4 of 10 runs (in none of 6 on an idle one; at commit 96b8a0c
in none of 9): prompts then meet in other batches. So CI leaves this test out.
"""

import pytest
from repeat_tests import check_repeats
from sglang_server import SglangServer


@pytest.mark.costly
def test_answers_repeat_without_copies_at_changing_concurrency(plans, prompts, tmp_path):
    check_repeats(SglangServer, plans["dp2 alone"], prompts[4:20], tmp_path, "--disable-radix-cache")
