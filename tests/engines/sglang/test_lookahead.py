"""Asking routers ahead of time in SGLang, on the host and with static shapes: outputs stay, more pairs are local."""

import pytest
from lookahead_tests import blind_plan, local_share
from offline import completed

from semmoe.demo import MODEL
from semmoe.topology import Topology


def run(prompts, plan, folder, **settings) -> tuple[list[list[int]], float]:
    """Tokens of every prompt, and the share of local pairs."""
    tokens = completed([prompts], str(MODEL), Topology(ep_size=2), folder, plan, **settings)
    return tokens, local_share(folder)


@pytest.mark.families  # three engines; that tokens stay is also held by the servers' tests, the gain by vLLM's
def test_names_keep_more_pairs_local(plans, prompts, reference, tmp_path):
    looking, share = run(prompts, plans["tp2"], tmp_path / "looking")
    static, on_device = run(prompts, plans["tp2"], tmp_path / "static", static="1")
    blind, without = run(prompts, blind_plan(plans, tmp_path), tmp_path / "without")
    assert looking == static == blind == reference
    assert min(share, on_device) > without + 0.005
