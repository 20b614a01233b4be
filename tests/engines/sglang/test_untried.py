"""Families that no test has run, served with `--untried`: they prove themselves, or end with the reason."""

from contextlib import nullcontext

import pytest
from architectures import of_sglang
from models import build
from test_families import answers, planned

from semmoe.engines.support import ARCHITECTURES, FAMILIES
from semmoe.topology import Topology

pytestmark = pytest.mark.timeout(900)
TWO = Topology(ep_size=2, dp_size=2)


def test_a_family_that_proves_itself_answers_as_without_a_plan(texts, prompts, tmp_path):
    assert "qwen2_moe" not in FAMILIES["sglang"]
    model, plan = build("qwen2_moe", tmp_path), planned("qwen2_moe", TWO, tmp_path, texts, 2)
    vanilla, _ = answers(model, TWO, tmp_path / "vanilla", prompts[:16])
    tokens, counted = answers(model, TWO, tmp_path / "planned", prompts[:16], plan, untried="1")
    assert tokens == vanilla
    assert sum(s["value"] for s in counted if s["name"] == "remote_rows") > 0


def weights_elsewhere():
    """The load without a plan places experts by the plan, too."""
    from semmoe.engines.sglang import planned as rank

    rank.without_plan = nullcontext


def unseen_layer():
    """The first layer is not among those that hooks observe."""
    from semmoe.engines.sglang.rank import RankPlugin

    know = RankPlugin._know

    def spoilt(self, blocks):
        know(self, blocks)
        self._blocks.remove(id(blocks[min(blocks)]))

    RankPlugin._know = spoilt


@pytest.mark.families
@pytest.mark.parametrize(
    ("family", "spoil", "reason"),
    [
        ("qwen2_moe", weights_elsewhere, "differ from the engine's without a plan"),
        ("qwen2_moe", unseen_layer, "does not prove itself: in the first pass hooks ran: experts 2 of 3 times"),
        ("granitemoe", None, "has no boundaries around its experts for attention-DP"),
    ],
)
def test_what_is_not_proven_is_refused_with_the_reason(family, spoil, reason, texts, prompts, tmp_path):
    model, plan = build(family, tmp_path), planned(family, TWO, tmp_path, texts, 2)
    with pytest.raises(AssertionError):
        answers(model, TWO, tmp_path / "planned", prompts[:4], plan, spoil=spoil, untried="1")
    assert reason in (tmp_path / "planned" / "fatal.txt").read_text()


def test_every_architecture_that_can_hold_experts_has_a_row():
    assert set(ARCHITECTURES["sglang"]) == of_sglang()
