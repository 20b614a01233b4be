"""The table of what runs: every part of it decides, and what it does not know is refused."""

import subprocess
import sys
from dataclasses import replace

import pytest

from semmoe.engines import support
from semmoe.engines.support import FAMILIES, FEATURES, QUANTISATION, State, Use, cautions, check, problems
from semmoe.topology import Topology

QWEN = {"model_type": "qwen3_moe"}
PLAIN = Use(
    engine="sglang", config=QWEN, topology=Topology(ep_size=2), redundant=0, shuffles=True, schedules=True, options=[]
)


@pytest.mark.parametrize("engine", FAMILIES)
def test_the_shipped_models_family_works_with_everything(engine):
    assert check(replace(PLAIN, engine=engine, redundant=8)) == []


@pytest.mark.parametrize("engine", FAMILIES)
@pytest.mark.parametrize("config", [{"model_type": "llama"}, {}, {"model_type": None}])
def test_an_unknown_family_is_refused_by_name(engine, config):
    said = problems(replace(PLAIN, engine=engine, config=config))
    assert len(said) == 1
    assert repr(str(config.get("model_type"))) in said[0]
    assert "Qwen3-MoE" in said[0]
    assert "semmoe apply" in said[0]


@pytest.mark.parametrize("engine", FAMILIES)
def test_a_family_that_no_plan_was_run_on_may_prove_itself_in_attention_dp(engine):
    config = {"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"]}
    use = replace(PLAIN, engine=engine, config=config, topology=Topology(ep_size=2, dp_size=2), shuffles=False)
    (refusal,) = problems(use)
    assert "--untried" in refusal
    (caution,) = check(replace(use, untried=True))
    assert "the server ends unless it proves" in caution
    for other in ({"topology": Topology(ep_size=2)}, {"topology": Topology(ep_size=4, dp_size=2)}, {"shuffles": True}):
        (refusal,) = problems(replace(use, untried=True, **other))
        assert "solve a plan for attention dp" in refusal


def test_an_architecture_that_an_engine_cannot_serve_is_refused_even_untried():
    config = {"model_type": "cohere2_moe", "architectures": ["Cohere2MoeForCausalLM"]}
    use = replace(PLAIN, config=config, topology=Topology(ep_size=2, dp_size=2), shuffles=False, untried=True)
    assert "has no boundaries" in problems(use)[0]
    assert problems(replace(use, engine="vllm")) == []


def test_architectures_are_named_once_and_refusals_have_a_remedy():
    for engine in FAMILIES:
        named = [name for row in support._SUPPORT.architectures for name in row.names(engine)]
        assert sorted(named) == sorted(support.ARCHITECTURES[engine])
    assert all(": give" in row.note for row in support._SUPPORT.architectures if row.state == "refused")


def test_a_headless_node_of_vllm_is_no_other_load_balancer():
    use = replace(PLAIN, engine="vllm", options=["--headless", "--data-parallel-start-rank", "2"])
    assert check(use) == []
    for word in ("--data-parallel-external-lb", "-dph", "--data-parallel-rank=1", "-dpn", "--data-parallel-start-rank"):
        assert "semmoe picker" in problems(replace(use, options=["--seed", "1", word]))[0]
        assert problems(replace(use, options=[word], schedules=False)) == []


@pytest.mark.parametrize(
    ("kind", "dp_size", "why"),
    [
        ("gpt_oss", 1, "GPT-OSS has no expert all-to-all, and its loader places no experts"),
        ("gpt_oss", 2, "GPT-OSS has no expert all-to-all"),
        ("mixtral", 2, "Mixtral splits attention over all ranks"),
        ("olmoe", 1, "OLMoE runs on one rank alone"),
        ("olmoe", 2, "OLMoE runs on one rank alone"),
    ],
)
def test_models_that_sglang_cannot_serve_on_a_plan_are_refused_in_one_line(kind, dp_size, why):
    topology = Topology(ep_size=2, dp_size=dp_size)
    (said,) = problems(replace(PLAIN, config={"model_type": kind}, topology=topology, shuffles=False))
    assert why in said
    assert "\n" not in said


def asks(feature, engine):
    """Words by which an option asks for a feature, and words by which it does not."""
    for option in feature.options[engine]:
        for value in option.on or ("7",):
            yield [option.name, value], [option.name, *option.off[:1]] if option.off else None


@pytest.mark.parametrize("engine", FAMILIES)
def test_every_feature_is_seen_among_the_options_and_decides(engine):
    seen = 0
    for feature in (one for one in FEATURES if engine in one.options):
        cell = feature.cells[engine]
        for asking, silent in asks(feature, engine):
            for words in (asking, ["--other", *asking, "--more", "1"], ["=".join(asking)]):
                use = replace(PLAIN, engine=engine, redundant=8, options=words)
                assert (cell.note in problems(use)) == (cell.state is State.refused), words
                assert (cell.note in cautions(use)) == (cell.state is State.reading), words
            if silent:
                assert check(replace(PLAIN, engine=engine, redundant=8, options=silent)) == []
            seen += 1
    assert seen > 8


@pytest.mark.parametrize(("options", "change"), [
    (["--enable-two-batch-overlap"], {"shuffles": False}), (["--attn-cp-size", "2"], {"shuffles": False}),
    (["--load-balance-method", "follow_bootstrap_room"], {"schedules": False}),
    (["--ep-dispatch-algorithm", "dynamic"], {"redundant": 0}),
])  # fmt: skip
def test_a_feature_is_refused_only_beside_what_it_breaks(options, change):
    use = replace(PLAIN, redundant=8, options=options)
    assert len(problems(use)) == 1
    assert problems(replace(use, **change)) == []


def test_weights_that_are_quantised():
    def use(**how):
        return replace(PLAIN, config=QWEN | {"quantization_config": how})

    for method in QUANTISATION:
        assert problems(use(quant_method=method)) == []
        assert len(cautions(use(quant_method=method))) == 1
    assert "'bitsandbytes'" in problems(use(quant_method="bitsandbytes"))[0]
    assert "'unknown'" in problems(use())[0]


def test_refusals_are_one_line_with_a_remedy_and_tests_that_are_named_exist(pytestconfig):
    for engine in FAMILIES:
        for what, state, note in support.table(engine):
            assert "\n" not in note
            if state == State.refused:
                assert any(word in note for word in (": omit", ": give", ": choose", ": solve")), (what, note)
            if state == State.works:
                assert (pytestconfig.rootpath / note.split("::")[0]).is_file(), note


def test_the_page_of_the_documentation_is_this_table(pytestconfig):
    code = "import supported; assert supported.PAGE.read_text(encoding='utf-8') == supported.page()"
    subprocess.run([sys.executable, "-c", code], cwd=pytestconfig.rootpath / "docs", check=True)


def test_what_nobody_has_run_is_on_the_checklist(pytestconfig):
    """Every feature or kind of weights that works by reading alone, in a row that names its engine."""
    page = (pytestconfig.rootpath / "docs" / "operate.md").read_text(encoding="utf-8")
    rows = [line.lower() for line in page.splitlines() if line.startswith("| ")]
    cells = [(f.name, engine, cell) for f in FEATURES for engine, cell in f.cells.items()]
    cells += [(name, engine, cell) for name, by in QUANTISATION.items() for engine, cell in by.items()]
    unread = [(name, engine) for name, engine, cell in cells if cell.state == State.reading]
    assert len(unread) > 5
    for name, engine in unread:
        assert any(name.lower() in row and (engine in row or "both" in row) for row in rows), (name, engine)
