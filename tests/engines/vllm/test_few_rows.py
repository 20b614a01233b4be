"""Passes of vLLM with too few rows to be shuffled keep contiguous slices: the tokens are the plain model's."""

import pytest
from two_ranks import counted, make_plan, on_two_ranks

from semmoe.cli.demo import MODEL
from semmoe.core import NEVER


@pytest.fixture(scope="module")
def with_copies(texts, tmp_path_factory):
    return make_plan(str(MODEL), texts, tmp_path_factory.mktemp("plan"), "tp2", copies=4)


def test_where_no_pass_is_shuffled_no_token_changes(with_copies, prompts, reference, tmp_path):
    given = {"SEMMOE_PLAN": with_copies, "SEMMOE_SHUFFLE_FROM": str(NEVER)}
    assert on_two_ranks(str(MODEL), prompts, tmp_path, variables=given) == reference
    assert counted(tmp_path, "passes", slices="contiguous") == counted(tmp_path, "passes") > 0
    assert counted(tmp_path, "all_to_all_bytes") > 0
    for kind in ("reduce_scatter", "all_gather"):
        assert counted(tmp_path, "sent_bytes", kind=kind) == 0
    assert counted(tmp_path, "degraded") == 0


def test_passes_are_shuffled_from_a_number_of_rows_on(with_copies, prompts, reference, tmp_path):
    """Passes over prompts have more than 33 rows here, decode passes fewer."""
    given = {"SEMMOE_PLAN": with_copies, "SEMMOE_SHUFFLE_FROM": "33"}
    assert on_two_ranks(str(MODEL), prompts, tmp_path, variables=given) == reference
    assert counted(tmp_path, "degraded") == 0
    assert counted(tmp_path, "passes", slices="shuffled") > 0
    assert counted(tmp_path, "passes", slices="contiguous") > 0
