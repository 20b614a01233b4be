"""The report: figures against numbers worked by hand, files that cannot be trusted, and the page in a real browser."""

import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from synthetic import random_trace
from typer.testing import CliRunner

from lab.save import save_trace
from semmoe.cli import app
from semmoe.costs.links import PhaseLinks, load_links
from semmoe.costs.timing import LayerShape
from semmoe.evaluation.forecast import expect
from semmoe.evaluation.results import Expected, Figures, ReplayFile
from semmoe.placement.problem import Problem
from semmoe.plan import load_plan, save_plan
from semmoe.report import gather, page, sections, verdict, words
from semmoe.settings import CoclusterSettings, PaperSettings, PredictorSettings, ReplaySettings, SolveSettings
from semmoe.solver import score as score_plans
from semmoe.solver import solve, solve_methods
from semmoe.topology import Topology

HOSTILE = "</script><script>alert(1)</script>"
QUICK = SolveSettings(
    redundant_experts=4, cocluster=CoclusterSettings(starts=1, steps=10),
    predictor=PredictorSettings(lookback=2),
)  # fmt: skip
PAPER = SolveSettings(method="paper", paper=PaperSettings(steps=2, swaps_per_expert=10))
PCIE = load_links("pcie5")
MEASURE = ReplaySettings(batch_tokens=16)


def trace_of(seed=0):
    trace = random_trace(seed, requests=24, experts=16)
    return replace(trace, fingerprint=replace(trace.fingerprint, model=HOSTILE, hidden_size=64, expert_size=32))


def save(folder, trace, attention="tp", settings=PAPER, expected=True, name=None):
    topology = Topology.for_attention(attention, 4)
    shape = LayerShape(hidden_size=64, expert_size=32, top_k=2)
    plan = solve(trace, topology, settings)
    if expected:
        problem = Problem(trace=trace, topology=topology, settings=settings)
        plan = replace(plan, expected=expect(problem, MEASURE, PhaseLinks(PCIE, PCIE), shape))
    save_plan(plan, folder / (name or f"plan-{attention}"))
    return plan


def set_up(name, **changes):
    pairs = [[0 if i == j else 1_000_000 for j in range(4)] for i in range(4)]
    values = {
        "name": name, "seconds": 2.0, "forward_tokens": 100,
        "sent_bytes": {"dispatch": 6_000_000, "combine": 6_000_000},
        "all_to_all_bytes_per_rank_pair": pairs, "lar": 0.25, "remote_ranks_per_token": 2.0, "load_max_over_mean": 1.2,
        "all_to_all_bytes": 12_000_000, "total_bytes": 12_000_000, "tokens_per_second": 50.0,
        "time_to_first_token": 0.25, "identical": True, "identical_text": "yes", "plan_hash": None,
    }  # fmt: skip
    return {**values, **changes}


def demo_json(**of_the_plan):
    better = {"lar": 0.5, "remote_ranks_per_token": 1.0, "all_to_all_bytes": 9_000_000, "load_max_over_mean": 1.1}
    rows = [set_up(f"attention-{a}, {what}", **({**better, **of_the_plan} if what == "on the plan" else {}))
            for a in ("DP", "TP") for what in ("vanilla", "on the plan")]  # fmt: skip
    return {"settings": {"seed": 0}, "prompts": 4, "profile_tokens": 100, "set_ups": rows}


PAYOFF = {"attention": "dp", "links": "pcie5", "model": "DeepSeek-V3", "worth_it": True, "against": "vanilla"}
PAYOFFS = {"payoffs": [PAYOFF | {"batch_tokens": 1024, "gain": 0.125},
                       PAYOFF | {"batch_tokens": 16384, "gain": 0.01, "worth_it": False}]}  # fmt: skip


def write_json(path, value):
    path.write_text(json.dumps(value))
    return path


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A directory with everything that a report can show, and the report of it."""
    folder = tmp_path_factory.mktemp("full")
    trace = trace_of()
    save(folder, trace, "dp")
    save(folder, trace, "tp", QUICK)
    save_trace(trace, folder / "trace")
    write_json(folder / "demo.json", demo_json())
    plans, _ = solve_methods(trace, Topology(ep_size=4), ["eplb", "paper"], SolveSettings(paper=PAPER.paper))
    write_json(folder / "replay.json", {"settings": {"trace": HOSTILE, "ep_size": 4, "dp_size": 1},
                                        "methods": score_plans(trace, plans, MEASURE)})  # fmt: skip
    write_json(folder / "other.json", ["x"])
    (folder / "notes.md").write_text("not a measurement")
    write_json(folder / "broken.json", {**demo_json(), "set_ups": [set_up("x", lar=2.0)]})
    (folder / "cut.json").write_text('{"set_ups": [')
    return page.write(folder, folder / "report.html")


@pytest.fixture(scope="module")
def html(full):
    return full.path.read_text()


# --- pure functions -------------------------------------------------------------------------------------------------


def replayed_side(lar, predicted=None, **changes):
    """A plan's or vanilla's figures, of a layer for each local activation rate."""
    predicted = predicted or [None] * len(lar)
    layers = [
        {
            "layer": i,
            "lar": one,
            "predicted_lar": guess,
            "remote_ranks_per_token": 1,
            "load_max_over_mean": 1,
            **changes,
        }
        for i, (one, guess) in enumerate(zip(lar, predicted, strict=True))
    ]
    return Figures(lar=0, remote_ranks_per_token=0, load_max_over_mean=1, layers=layers)


def test_bars_have_the_values_given_and_a_line_at_chance():
    plan = replayed_side([0.5, 0.75], [0.5, 0.7], load_per_rank=[1] * 4)
    vanilla = replayed_side([0.25, 0.25])
    panel = sections.layers(verdict.Replayed(plan, vanilla, "x")).panels[0]
    assert panel.sides == {"vanilla": [0.25, 0.25], "plan": [0.5, 0.75]}
    assert (panel.points, panel.line) == ([0.5, 0.7], 0.25)
    assert panel.top == pytest.approx(0.81)
    assert panel.label == "Local activation rate of 2 layers: plan 0.500 to 0.750, vanilla 0.250 to 0.250"


def test_layers_without_any_value_have_room():
    assert sections.layers(verdict.Replayed(replayed_side([0.0]), None, "x")).panels[0].top == 0.1


def test_where_a_plan_pays_has_a_cell_for_each_link_and_batch():
    one = {"lar": 0.25, "remote_ranks_per_token": 2, "load_max_over_mean": 1}
    about = {"holdout": 0.2, "requests": 5, "batch_tokens": 64, "batches": "mixed", "seed": 0, "tokens_per_batch": 64}
    links = {"name": "fibre", "kind": "measured", "source": "us"}
    elsewhere = {"bandwidths": [0.5, 1], "batch_tokens": [64, 1024], "gains": [[-0.1, 0.0], [0.2, 0.1]]}
    expected = Expected(**one, **about, num_batches=3, others={}, links=links, elsewhere=elsewhere)
    figure = sections.pays(expected)
    assert figure.table.columns == ["tokens", "1/2 times", "these"]
    assert figure.table.rows == [["64", "-10.0", "+0.0"], ["1,024", "+20.0", "+10.0"]]
    assert figure.table.shares == [[0, 0], [1, 0.5]]
    assert figure.framed == (0, 1)  # these links, 64 tokens
    assert figure.scale == ("0 % or less", "+20 %", "gain")
    assert sections.pays(expected.model_copy(update={"elsewhere": None})) is None
    with pytest.raises(ValueError, match="batches, bandwidths"):
        Expected(**one, **about, num_batches=3, others={}, elsewhere={**elsewhere, "gains": [[0.0, 0.0]]})


@pytest.mark.parametrize(("loads", "busiest"), [([1, 3], "1"), ([3, 1], "0"), ([], "–")])
def test_the_busiest_rank_of_a_layer_is_in_the_table(loads, busiest):
    layer = {"layer": 0, "lar": 0, "remote_ranks_per_token": 0, "load_max_over_mean": 1, "load_per_rank": loads}
    side = Figures(lar=0, remote_ranks_per_token=0, load_max_over_mean=1, layers=[layer])
    table = sections.layers(verdict.Replayed(side, None, "x")).table
    assert table.rows[0][table.columns.index("busiest rank, plan")] == busiest


def test_bars_of_methods_are_as_long_as_their_share_of_the_highest_figure():
    scores = {
        "linear": Figures(lar=0.2, remote_ranks_per_token=2, load_max_over_mean=1),
        "semmoe": Figures(lar=0.4, remote_ranks_per_token=1, load_max_over_mean=1, unknown_token_share=0.5),
    }
    table = sections.methods(ReplayFile(settings={}, methods=scores)).table
    assert table.rows[1][:4] == ["semmoe", "0.400", "1.00", "–"]
    assert table.shares == [[0.5, 1, 0, 1, 0, 0], [1, 0.5, 0, 1, 1, 0]]


# --- what a directory holds -----------------------------------------------------------------------------------------


def test_every_file_is_used_or_named_with_the_reason(full):
    assert {s.path for s in full.inputs.sources} == {"demo.json", "replay.json"}
    why = {entry.path: entry.why for entry in full.inputs.left_out}
    assert set(why) == {"broken.json", "cut.json", "notes.md", "other.json", "trace"}
    assert "set_ups.0.lar" in why["broken.json"]
    assert "not valid JSON" in why["cut.json"]
    assert "not a kind of file" in why["notes.md"]
    assert "holds no measurement" in why["other.json"]
    assert "reads no traces" in why["trace"]
    text = full.path.read_text()
    assert all(name in text for name in (*why, "not a kind of file"))


def test_the_page_is_small_and_loads_nothing(full, html):
    assert full.size == full.path.stat().st_size < 200_000
    assert not re.findall(r"(?:src|href|action)\s*=\s*[\"']?(?:https?:)?//", html)
    assert not re.findall(r"url\(|@import", html)
    assert "default-src &#39;none&#39;" in html or "default-src 'none'" in html


def test_text_of_files_is_text(html):
    assert "alert(1)" in html
    assert "<script" not in html
    assert "script-src" not in html
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in html


def test_names_in_a_plan_s_settings_are_text(tmp_path):
    plan = save(tmp_path, trace_of())
    save_plan(replace(plan, settings={"<b>": {"<i>": "<u>"}, "x": "'\""}), tmp_path / "plan-tp")
    html = page.write(tmp_path, tmp_path / "r.html").path.read_text()
    assert "&lt;b&gt;.&lt;i&gt; &lt;u&gt;, x &#39;&#34;" in html


def test_where_a_plan_pays_names_its_links(full, html):
    links = full.inputs.plans[0].expected.links
    assert links.kind in words.links(links)
    assert f"predicted for {words.links(links)} (the frame" in html


def test_numbers_of_the_cards_by_hand(full):
    dp, tp = full.cards
    for card, entry in zip((dp, tp), full.inputs.plans, strict=True):
        plan, vanilla = entry.expected, entry.expected.others["linear"]
        shown = [f"{plan.lar:.3f}", f"{plan.remote_ranks_per_token:.2f}", f"{plan.load_max_over_mean:.2f}"]
        assert [card.numbers[i].plan for i in (0, 1, 3)] == shown
        assert card.numbers[0].compared == f"vanilla {vanilla.lar:.3f} (× {plan.lar / vanilla.lar:.2f})"
        assert "25.0\u00a0% fewer all-to-all bytes than vanilla; outputs are identical" in card.sentences[1]
    sentence = full.inputs.plans[1].expected.verdict.sentence
    assert sentence in tp.sentences[0]
    assert tp.state == ("yes" if sentence.startswith("worth") else "no")


def test_the_card_and_the_layers_have_one_source_and_agree_on_load(full):
    """The run of demo.json has a load of 1.1 and is of other requests: it stands in the sentence and its own table."""
    assert all(rows for _, rows in full.inputs.runs)
    for card, entry in zip(full.cards, full.inputs.plans, strict=True):
        shown = sections.layers(verdict.replayed_of(entry))
        column = shown.table.columns.index("load, plan")
        of_layers = [float(row[column]) for row in shown.table.rows]
        assert float(card.numbers[3].plan) == pytest.approx(np.mean(of_layers), abs=0.011)
        assert f"highest layer {max(of_layers):.2f}" in card.numbers[3].compared
        assert "held out while solving" in card.source


def with_load(entry, loads, limit):
    """A plan's file whose layers have these loads, solved for this limit."""
    one = [{"layer": i, "lar": 0.5, "remote_ranks_per_token": 1, "load_max_over_mean": l} for i, l in enumerate(loads)]
    settings = {**entry.plan.settings, "cocluster": {"load_limit": limit}}
    expected = entry.expected.model_copy(update={"load_max_over_mean": float(np.mean(loads)), "layers": Figures(
        lar=0.5, remote_ranks_per_token=1, load_max_over_mean=1, layers=one).layers})  # fmt: skip
    return replace(entry, plan=replace(entry.plan, settings=settings), expected=expected)


@pytest.mark.parametrize(("limit", "warned"), [(1.2, False), (1.15, True), (None, False), ("high", False)])
def test_a_load_above_the_limit_is_a_warning_and_the_limit_a_line_in_the_figure(full, limit, warned):
    entry = with_load(full.inputs.plans[0], [1.1, 1.26], limit)
    replayed = verdict.replayed_of(entry)
    said = [s for s in verdict.card(entry, None, replayed).sentences if s.startswith("Warning")]
    assert [s.split(" that")[0] for s in said] == warned * [
        "Warning: expert load 1.18, the mean over layers, is above the limit of 1.15"
    ]
    line = sections.layers(replayed).panels[2].line
    assert line == (limit if isinstance(limit, float) else None)
    named = [key.label for key in sections.layers(replayed).keys if "limit" in key.label]
    assert named == [f"load limit {limit:g}, of the mean over layers" for _ in [line] if line]


def test_requests_that_were_scheduled_by_their_answers_are_a_warning(full):
    entry = full.inputs.plans[0]
    by_answers = replace(entry, expected=entry.expected.model_copy(update={"scheduled_by_answers": 3}))
    cards = [verdict.card(e, None, verdict.replayed_of(e)) for e in (entry, by_answers)]
    assert [sum("3 requests had answers for prompts" in s for s in card.sentences) for card in cards] == [0, 1]


def test_outputs_that_differ_come_before_everything(tmp_path):
    save(tmp_path, trace_of())
    write_json(tmp_path / "demo.json", demo_json(identical=False, identical_text="no"))
    written = page.write(tmp_path, tmp_path / "r.html")
    assert written.cards[0].badge == "Outputs differ"
    assert "OUTPUTS DIFFER" in written.cards[0].sentences[1]
    assert re.search(r"<h1[^>]*>Attention TP, 4 ranks: outputs differ<", written.path.read_text())


def headings(folder):
    html = page.write(folder, folder / "r.html").path.read_text()
    return html, re.findall(r"<(h[12]) id=.[^>]*>([^<]*)<", html)


def test_a_demo_leads_with_where_it_pays_then_the_counts_then_the_verdict(tmp_path):
    save(tmp_path, trace_of())
    write_json(tmp_path / "demo.json", demo_json() | PAYOFFS)
    html, found = headings(tmp_path)
    assert found[:3] == [
        ("h1", "Where plans with this traffic pay on real models and links"),
        ("h2", "Measurements"),
        ("h2", f"The verdict on the plans for {HOSTILE} itself".replace("<", "&lt;").replace(">", "&gt;")),
    ]
    assert [name for name, _ in found].count("h1") == html.count("Measurements</h2>") == 1
    assert re.search(r"DP, pcie5</th>\s*<td>12%</td>\s*<td>no</td>", html)
    assert re.findall(r'<li><a href="#([a-z]+)', html)[:3] == ["payoffs", "measured", "verdict"]


def test_a_demo_whose_outputs_differ_leads_with_that(tmp_path):
    save(tmp_path, trace_of())
    write_json(tmp_path / "demo.json", demo_json(identical=False, identical_text="no") | PAYOFFS)
    html, found = headings(tmp_path)
    assert found[0] == ("h1", "Attention TP, 4 ranks: outputs differ")
    assert "DeepSeek-V3" not in html  # no forecast from counts of wrong outputs


def test_a_run_on_another_plan_is_not_this_plan_s(tmp_path):
    save(tmp_path, trace_of())
    write_json(tmp_path / "demo.json", demo_json(plan_hash="0" * 64))
    inputs = gather.gather(tmp_path)
    assert verdict.measured_pair(inputs, inputs.plans[0]) is None
    write_json(tmp_path / "demo.json", demo_json(plan_hash=inputs.plans[0].digest))
    inputs = gather.gather(tmp_path)
    assert verdict.measured_pair(inputs, inputs.plans[0]).saved == 0.25


def test_runs_on_other_tokens_are_not_compared(tmp_path):
    save(tmp_path, trace_of())
    for name, tokens in (("vanilla", 100), ("on the plan", 200)):
        write_json(tmp_path / f"{name}.json", set_up(f"attention-TP, {name}", forward_tokens=tokens))
    inputs = gather.gather(tmp_path)
    assert len(inputs.runs) == 2
    assert verdict.measured_pair(inputs, inputs.plans[0]) is None


def test_a_plan_alone_is_enough(tmp_path):
    plan = save(tmp_path, trace_of(), name="plan")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "plan")])
    assert result.exit_code == 0, result.output
    out = tmp_path / "plan-report.html"
    assert result.stdout.splitlines()[-1] == f"report: {out}"
    assert load_plan(tmp_path / "plan").expected == plan.expected
    html = out.read_text()
    assert f"{plan.expected['lar']:.3f}" in html
    for command in ("semmoe replay TRACE", "semmoe generate MODEL"):
        assert command in html
    save_plan(plan, tmp_path / "plan")  # the page is not in its way


def test_a_plan_that_expects_nothing_says_so(tmp_path):
    save(tmp_path, trace_of(), expected=False)
    result = CliRunner().invoke(app, ["report", str(tmp_path), "--json"])
    found = json.loads(result.stdout)
    assert found["verdicts"][0]["verdict"] == "open"
    assert "Nothing was predicted" in found["verdicts"][0]["sentences"][0]
    assert found["page"] == str(tmp_path / "report.html")
    assert found["bytes"] == (tmp_path / "report.html").stat().st_size


def test_expected_figures_that_are_damaged_are_named_and_the_plan_is_shown(tmp_path):
    save(tmp_path, trace_of())
    header = json.loads((tmp_path / "plan-tp" / "plan.json").read_text())
    header["expected"]["lar"] = "high"
    write_json(tmp_path / "plan-tp" / "plan.json", header)
    inputs = gather.gather(tmp_path)
    assert inputs.plans[0].expected is None
    assert "lar: " in inputs.left_out[0].why


def test_a_plan_of_any_name_that_cannot_be_read_is_named(tmp_path):
    save(tmp_path, trace_of())
    (tmp_path / "plan-tp").rename(tmp_path / "mine")
    header = json.loads((tmp_path / "mine" / "plan.json").read_text())
    write_json(tmp_path / "mine" / "plan.json", header | {"schema_version": 1})
    with pytest.raises(ValueError, match=r"holds no plan: .*; left out: mine \(.*make it again with `semmoe solve`\)"):
        gather.gather(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: d / "none", "is not a directory"),
        (lambda d: d, "holds no plan"),
        (lambda d: (save(d, trace_of()), (d / "plan-tp" / "plan.safetensors").write_bytes(b"x"), d)[-1], "damaged"),
        (lambda d: (save(d, trace_of()), (d / "plan-tp" / "plan.safetensors").unlink(), d)[-1], "missing"),
    ],
)
def test_mistakes_are_one_line_and_leave_no_file(tmp_path, make, message):
    result = CliRunner().invoke(app, ["report", str(make(tmp_path)), "--out", str(tmp_path / "o" / "r.html")])
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not list(tmp_path.glob("o/*"))


def test_what_is_too_large_is_left_out(tmp_path, monkeypatch):
    save(tmp_path, trace_of())
    write_json(tmp_path / "demo.json", demo_json())
    monkeypatch.setattr(page, "MAX_PAGE_BYTES", 1000)
    with pytest.raises(ValueError, match="more than 1,000"):
        page.write(tmp_path, tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()
    monkeypatch.setattr(gather, "MAX_JSON_BYTES", 100)
    (left_out,) = gather.gather(tmp_path).left_out
    assert (left_out.path, "more than 100 bytes" in left_out.why) == ("demo.json", True)


@pytest.mark.parametrize("profiled", [True, False])
def test_a_replay_of_profiled_requests_says_that_it_flatters(tmp_path, profiled):
    trace = trace_of()
    plan = save(tmp_path, trace)
    found = score_plans(trace, solve_methods(trace, plan.topology, ["paper"], PAPER)[0], MEASURE)
    write_json(tmp_path / "r.json", {"settings": {**asdict(plan.topology), "profiled": profiled}, "methods": found})
    html = page.write(tmp_path, tmp_path / "out.html").path.read_text()
    assert ("made from some of these requests, which flatters it" in html) is profiled


@pytest.mark.parametrize("number", [0, 2])
def test_a_replay_scheduled_by_answers_says_that_it_flatters(tmp_path, number):
    trace = trace_of()
    save(tmp_path, trace)
    scores = score_plans(trace, solve_methods(trace, Topology(ep_size=4), ["eplb"], SolveSettings())[0], MEASURE)
    write_json(tmp_path / "r.json", {"settings": {"scheduled_by_answers": number}, "methods": scores})
    html = page.write(tmp_path, tmp_path / "out.html").path.read_text()
    assert ("which no server knows and which flatters schedulers" in html) is bool(number)


# --- in a browser ---------------------------------------------------------------------------------------------------


class Opened:
    """The report in a tab; what it asked the network for and complained of."""

    def __init__(self, browser, path, **options):
        self.tab = browser.new_page(**options)
        self.troubles, self.requests = [], []
        self.tab.on("console", lambda m: self.troubles.append(m.text) if m.type in ("error", "warning") else None)
        self.tab.on("pageerror", lambda error: self.troubles.append(str(error)))
        self.tab.on("request", lambda r: self.requests.append(r.url))
        self.tab.goto(path.as_uri())

    def colour(self, name):
        return self.tab.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")

    def bar(self):
        """The colour in which the first bar of the plan is drawn."""
        return self.tab.evaluate("getComputedStyle(document.querySelector('.plot rect.plan')).fill")


@pytest.fixture(scope="module")
def opened(browser, full):
    return Opened(browser, full.path, viewport={"width": 1280, "height": 800}, color_scheme="light")


def test_every_figure_is_drawn_without_network_or_errors(opened, full):
    shapes = "[...document.querySelectorAll('.plot')].map(p => p.querySelectorAll('rect').length)"
    plots = opened.tab.evaluate(shapes)
    assert len(plots) == 2 * 3  # of the layers of two plans
    assert all(plots)
    high = "Math.max(...[...document.querySelectorAll('.plot rect')].map(r => r.getBoundingClientRect().height))"
    assert opened.tab.evaluate(high) > 100
    drawn = "[...document.querySelectorAll('%s td')].filter(t => getComputedStyle(t).background.includes('%s')).length"
    assert opened.tab.evaluate(drawn % (".heat", "oklab")) > 0
    assert opened.tab.evaluate(drawn % (".bars", "gradient")) > 0
    assert opened.tab.evaluate("document.querySelectorAll('.heat td.framed').length") == 2
    assert opened.requests == [full.path.as_uri()]
    assert opened.troubles == []
    assert not [text for text in ("NaN", "undefined", "Infinity") if text in full.path.read_text()]


def test_every_figure_has_a_name_a_heading_and_its_data(opened):
    problems = opened.tab.evaluate("""() => {
      const out = [];
      for (const f of document.querySelectorAll('figure')) {
        const heading = document.getElementById(f.getAttribute('aria-labelledby'));
        if (!heading || !heading.textContent.trim()) out.push('no heading');
        if (!f.querySelector('table tbody tr')) out.push('no data: ' + heading?.textContent);
        for (const p of f.querySelectorAll('.plot'))
          if (p.getAttribute('role') !== 'img' || p.getAttribute('aria-label').length < 10) out.push(p.id);
      }
      for (const t of document.querySelectorAll('th')) if (!t.scope) out.push('no scope');
      for (const t of document.querySelectorAll('table')) if (!t.caption) out.push('no caption');
      const ids = [...document.querySelectorAll('[id]')].map(e => e.id);
      if (new Set(ids).size !== ids.length) out.push('ids');
      for (const a of document.querySelectorAll('nav a'))
        if (!document.querySelector(a.getAttribute('href'))) out.push(a.getAttribute('href'));
      for (const l of ['header', 'nav', 'main', 'h1']) if (document.querySelectorAll(l).length !== 1) out.push(l);
      return out;
    }""")
    assert problems == []


def test_the_keyboard_reaches_everything_and_opens_a_table(opened):
    tab = opened.tab
    tab.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
    tab.keyboard.press("Tab")
    assert tab.evaluate("document.activeElement.className") == "skip"
    assert tab.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    seen = []
    for _ in range(40):
        tab.keyboard.press("Tab")
        seen.append(tab.evaluate("document.activeElement.id || document.activeElement.tagName"))
        if seen[-1] == "SUMMARY":
            break
    assert seen[-1] == "SUMMARY"
    assert tab.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    table = "document.activeElement.parentElement.querySelector('table').checkVisibility()"
    assert not tab.evaluate(table)
    tab.keyboard.press("Enter")
    assert tab.evaluate(table)
    tab.keyboard.press("Enter")


def test_colours_follow_the_system_in_figures_too(opened):
    light, light_bar = opened.colour("page"), opened.bar()
    opened.tab.emulate_media(color_scheme="dark")
    assert opened.colour("page") != light
    assert opened.bar() != light_bar
    opened.tab.emulate_media(color_scheme="light")
    assert (opened.colour("page"), opened.bar()) == (light, light_bar)


def test_it_prints_in_light_and_nothing_is_cut_off(opened):
    tab = opened.tab
    tab.emulate_media(media="print", color_scheme="dark")
    assert opened.colour("ink") == "#1d2329"
    assert tab.evaluate("getComputedStyle(document.querySelector('header')).display") == "none"
    wide = tab.evaluate("""() => {
      const edge = document.querySelector('main').getBoundingClientRect().right + 1;
      return [...document.querySelectorAll('main *')].filter(e => e.checkVisibility() && !e.closest('defs') &&
        e.getBoundingClientRect().right > edge).map(e => e.tagName + '.' + e.className.baseVal + e.className);
    }""")
    assert wide == []
    assert len(tab.pdf(format="A4")) > 20_000
    tab.emulate_media(media="screen", color_scheme="light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(browser, full, scheme):
    page = Opened(browser, full.path, viewport={"width": 390, "height": 800}, color_scheme=scheme, has_touch=True)
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    page.tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert page.tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    edges = page.tab.evaluate("[...document.querySelectorAll('.plot svg')].map(s => s.getBoundingClientRect().right)")
    assert max(edges) <= 390
    assert page.troubles == []
    page.tab.close()


def test_text_has_contrast_in_both_themes(opened):
    """WCAG's 4.5 for text and 3 for the bars, against the page and the cards."""

    def luminance(colour):
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one, other):
        low, high = sorted(luminance(opened.colour(name)) for name in (one, other))
        return (high + 0.05) / (low + 0.05)

    for scheme in ("dark", "light"):
        opened.tab.emulate_media(color_scheme=scheme)
        for text in ("ink", "muted", "link", "yes", "no", "open", "wrong"):
            assert min(contrast(text, "page"), contrast(text, "card")) >= 4.5, (scheme, text)
        assert contrast("plan", "card") >= 3
        assert contrast("vanilla", "card") >= 2.4
