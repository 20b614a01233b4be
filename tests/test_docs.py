"""The pages of docs/: they build, what they link to is there, and what they tell people to type works."""

import ast
import importlib.util
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np
import pytest
import typer
from newcomer import run_code, run_line

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
RUN = "index.md"  # whose bash and python blocks run, in this order, in one folder
FENCE = re.compile(r"^```([a-z]*)[^\n]*\n(.*?)^```", re.M | re.S)
MESSAGE = re.compile(r"^\| `([^`]+)` \|", re.M)  # in the first column of MESSAGES' tables
MESSAGES = "troubleshooting.md"
READ_BY_PEOPLE = [*PAGES, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def app():
    from semmoe.cli import app

    return typer.main.get_command(app)


def commands_of(app):
    """{"solve": command, "record start": command, ...}"""
    found = {}
    for name, command in app.commands.items():
        if command.hidden:
            continue
        inner = getattr(command, "commands", None)
        found |= {f"{name} {sub}": c for sub, c in inner.items()} if inner else {name: command}
    return found


def blocks(path):
    return FENCE.findall(path.read_text(encoding="utf-8"))


def module(name):
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


# The site.


class Page(HTMLParser):
    """What a built page refers to, what it fetches, and the anchors that it has."""

    def __init__(self, text):
        super().__init__()
        self.links, self.fetched, self.images, self.anchors = [], [], [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.anchors |= {given[name] for name in ("id", "name") if given.get(name)}
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        stylesheet = tag == "link" and given.get("rel") not in ("canonical", "next", "prev")
        for name in ("src", "href") if stylesheet or tag in ("script", "img", "iframe") else ():
            self.fetched += [given[name]] if given.get(name) else []
        self.images += [given] if tag == "img" else []


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(out)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=quiet, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr + built.stdout
    return {path: Page(path.read_text(encoding="utf-8")) for path in out.rglob("*.html")}


def test_every_page_is_built(site):
    assert {f"{page.stem}.html" for page in PAGES} <= {path.name for path in site}


def broken(site):
    """Links and files of built pages that lead nowhere inside the site."""
    for path, page in site.items():
        for target in {*page.links, *page.fetched}:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc or path.name == "404.html":
                continue
            file = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            file = file / "index.html" if file.is_dir() else file
            there = site[file].anchors if file in site else {parts.fragment} if file.is_file() else set()
            if unquote(parts.fragment).removeprefix("__") not in {a.removeprefix("__") for a in there}:
                yield f"{path.name}: {target}"


def test_links_anchors_and_images_of_the_site_resolve(site):
    assert list(broken(site)) == []


def test_a_broken_link_is_found(site, tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<p id="here"><a href="#here">a</a><a href="#gone">b</a><a href="gone.html">c</a>')
    assert sorted(broken({page: Page(page.read_text())})) == ["page.html: #gone", "page.html: gone.html"]


def test_the_site_fetches_nothing_from_elsewhere(site):
    fetched = {target for page in site.values() for target in page.fetched}
    assert fetched
    assert [target for target in fetched if urlsplit(target).netloc or target.startswith("//")] == []


def test_the_search_answers_on_pages_opened_from_the_disk(site, browser):
    tab, requests = browser.new_page(), []
    tab.on("request", lambda r: requests.append(r.url))
    tab.goto(next(path for path in site if path.name == "index.html").as_uri())
    tab.click("input[name=query]")
    tab.wait_for_selector(".md-search-result__meta:has-text('Type to start')")  # the index is read
    tab.locator("input[name=query]").press_sequentially("redundant experts")  # the page listens to keys
    tab.wait_for_selector(".md-search-result__item mark")
    assert "redundant" in tab.inner_text(".md-search-result__list").lower()
    assert [url for url in requests if urlsplit(url).scheme not in ("file", "about", "data")] == []
    tab.close()


def test_pictures_say_what_they_show(site):
    images = [image for page in site.values() for image in page.images]
    assert all(image.get("alt") for image in images)
    ours = {Path(i["src"]).name for i in images if Path(i["src"]).parent.name == "img"}
    assert {f"{name}.svg" for name in module("pictures").PICTURES} == ours


@pytest.mark.parametrize("page", READ_BY_PEOPLE, ids=lambda page: page.name)
def test_files_that_are_linked_exist(page):
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [target for target in targets if not (page.parent / target).exists()] == []


# The pictures.


def test_committed_pictures_are_those_that_the_script_draws():
    for name, draw in module("pictures").PICTURES.items():
        assert (DOCS / "img" / f"{name}.svg").read_text(encoding="utf-8") == draw().svg(), (
            f"python docs/pictures.py: {name}"
        )


def test_the_worked_example_is_the_one_that_is_reproduced():
    pytest.importorskip("matplotlib")
    from lab import plans

    pictures = module("pictures")
    assert np.array_equal(pictures.KINDS, plans.KIND_OF_TOKEN)
    assert np.array_equal(pictures.CHOICES, plans.CHOICES)
    counted = [pictures.remote_tokens(home, held) for _, home, held in pictures.WAYS]
    assert counted == [(16, 0.5), (16, 0.5), (8, 0.5), (0, 1.0)]


# What pages say of the code.

SPAN = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.-]+(/[\w.-]+)+|[a-z_]+\.py")
NAME = re.compile(r"semmoe(\.\w+)+")
READING_PATH = ("core", "traces/trace", "costs/metrics", "solver", "evaluation/replay", "evaluation/online")


def spans(page):
    return set(SPAN.findall(FENCE.sub("", (DOCS / page).read_text(encoding="utf-8"))))


@pytest.mark.parametrize(("page", "least"), [("developers.md", 20), ("reference.md", 1)])
def test_files_that_pages_on_the_code_name_exist(page, least):
    paths = {span for span in spans(page) if PATH.fullmatch(span) and not span.startswith("RUN/")}  # of a recording
    assert len(paths) >= least
    there = [ROOT, ROOT / "src/semmoe"]
    assert [path for path in paths if not any((folder / path).exists() for folder in there)] == []


def test_names_that_the_page_on_the_code_gives_can_be_imported():
    names = [span for span in spans("developers.md") if NAME.fullmatch(span)]
    assert len(names) >= 3
    for name in names:
        assert pkgutil.resolve_name(name) is not None, name


def test_names_of_hooks_in_the_walk_through_an_engine_are_those_of_its_targets():
    from semmoe.engines.vllm import targets

    given = {span.removeprefix("targets.") for span in spans("developers.md") if span.startswith("targets.")}
    assert given
    assert all(hasattr(targets, name) for name in given)
    assert any(hook.target.endswith("._apply_eplb_mapping") for hook in targets.HOOKS)


def test_the_method_of_the_walk_solves_is_saved_and_replayed(tmp_path, monkeypatch):
    from synthetic import random_trace

    from semmoe.evaluation.replay import replay
    from semmoe.placement import methods
    from semmoe.plan import load_plan, save_plan
    from semmoe.settings import SolveSettings
    from semmoe.solver import solve
    from semmoe.topology import Topology

    (code,) = [code for language, code in blocks(DOCS / "developers.md") if language == "python"]
    (tmp_path / "striped.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(methods.METHODS, "striped", methods.Method("striped"))
    trace = random_trace(0)
    plan = solve(trace, Topology.for_attention("tp", 2), SolveSettings(method="striped"))
    heaviest = np.bincount(trace.expert_ids[:, 0].ravel()).argmax()
    assert plan.placement.hosts[0, 0, heaviest]
    save_plan(plan, tmp_path / "plan")
    assert replay(trace, load_plan(tmp_path / "plan")).total.pairs > 0


def test_kinds_of_policies_and_their_arrays_and_numbers_are_on_the_page_of_formats():
    from semmoe.io.bounds import array_names, number_types
    from semmoe.plan import REQUESTS, SCHEMA, TOKENS

    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    text = text[text.index("## Plan directory") : text.index("### The forecast of a plan")]
    assert f"| `schema_version` | {SCHEMA}." in text
    for kind in (*TOKENS.values(), *REQUESTS.values()):
        own = text[text.index(f"\n`{kind.kind}`: ") + 1 :]
        own = re.split(r"\n`[a-z-]+`: |\n### ", own)[0]
        assert {*array_names(kind), *number_types(kind)} <= set(SPAN.findall(own)), kind


def test_engine_files_are_on_the_page_of_formats_as_their_table_has_them():
    from semmoe.checkpoint.engine_files import BECOMES, FORMATS, WRITTEN

    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    rows = dict(
        re.findall(r"^\| `([a-z-]+)` \| (.+ \| .+) \|$", text[text.index("## Files that `semmoe import`") :], re.M)
    )
    assert set(rows) == {one.name for one in FORMATS}
    for one in FORMATS:
        file, _, becomes = rows[one.name].split(" | ")
        assert all(word in file for word in (*one.suffixes, one.key)), one.name
        assert becomes.startswith(BECOMES[one.kind]), one.name
    assert all(f"### `--to {name}`" in text for name in ("checkpoint", *WRITTEN))


def test_the_reading_path_is_as_long_as_the_page_says():
    files = [ROOT / "src/semmoe" / f"{name}.py" for name in READING_PATH]
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    said = re.search(r"some ([\d,]+) lines", (DOCS / "developers.md").read_text(encoding="utf-8"))
    assert abs(int(said[1].replace(",", "")) - lines) < 0.1 * lines


# What people are told to type.


def typed():
    """(page, words) of every semmoe command in a fence or between backquotes; continued lines joined."""
    for page in READ_BY_PEOPLE:
        text = page.read_text(encoding="utf-8")
        fenced = "\n".join(code for _, code in FENCE.findall(text)).replace("\\\n", " ")
        prose = FENCE.sub("", text)
        prose = MESSAGE.sub("", prose) if page.name == MESSAGES else prose
        spans = re.findall(r"`([^`]+)`", prose)
        for line in [*fenced.splitlines(), *(" ".join(span.split()) for span in spans)]:
            found = re.match(r"(?:[A-Z_]+=\S+ )*semmoe ([a-z].*)", line.split(" #")[0].strip())
            if found:
                yield page.name, shlex.split(found[1].split(" | ")[0])


def wrong(words, commands, groups):
    """What of a command line does not exist, or None."""
    if words[0] in groups:
        if len(words) == 1:
            return None
        words = [" ".join(words[:2]), *words[2:]]
    command = commands.get(words[0])
    if command is None:
        return f"there is no command {words[0]}"
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    own = words[: words.index("--")] if "--" in words else words
    unknown = [word for word in own[1:] if word.startswith("--") and word.split("=")[0] not in known | {"--help"}]
    return f"{words[0]} has no {unknown[0]}" if unknown else None


def test_commands_and_options_in_the_documentation_exist():
    main = app()
    commands, groups = commands_of(main), {n for n, c in main.commands.items() if hasattr(c, "commands")}
    lines = list(typed())
    assert len(lines) > 100
    assert [f"{page}: {p}" for page, words in lines if (p := wrong(words, commands, groups))] == []
    assert wrong(["solve", "trace", "--no-such-option"], commands, groups) == "solve has no --no-such-option"


def test_options_that_are_named_alone_exist():
    every = [*commands_of(app()).values(), app()]
    known = {o for c in every for p in c.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    names = ("reference.md", "index.md", "how-it-works.md")
    pages = {name: (DOCS / name).read_text(encoding="utf-8") for name in names}
    pages["reference.md"] = pages["reference.md"].partition("### Environment variables")[0]
    for name, page in pages.items():
        text = FENCE.sub("", page)
        given = set(re.findall(r"`(--[a-z-]+)", text))
        assert given <= known, name


def test_the_table_of_commands_is_that_of_their_help():
    code = "import commands; assert commands.PAGE.read_text(encoding='utf-8') == commands.page(), 'python commands.py'"
    subprocess.run([sys.executable, "-c", code], cwd=DOCS, check=True)
    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `([a-z ]+)` \|.*\| `semmoe ([^`]+)` \|$", text, re.M))
    assert set(rows) == set(commands_of(app()))
    assert all(example.startswith(name) for name, example in rows.items())


def messages():
    """Every text of our source, f-strings by their parts."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src/semmoe").rglob("*.py")]
    return "\n".join(
        n.value for t in trees for n in ast.walk(t) if isinstance(n, ast.Constant) and isinstance(n.value, str)
    )


def test_messages_that_are_explained_are_those_of_the_source():
    quoted, known = MESSAGE.findall((DOCS / MESSAGES).read_text(encoding="utf-8")), messages()
    assert len(quoted) > 50
    parts = [part.strip(" …") for message in quoted for part in message.split("…")]
    assert [part for part in parts if len(part) > 2 and part not in known] == []


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_the_first_page_runs_as_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = set()
    for language, code in blocks(DOCS / RUN):
        steps = {line: run_line for line in code.splitlines()} if language == "bash" else {}
        steps |= {code: run_code} if language == "python" else {}
        for step in [step for step in steps if step not in done]:
            steps[step](step)
            done.add(step)
    assert len(done) >= 8


def test_schemas_are_those_of_the_types_that_check():
    code = (
        "import schemas\n"
        "assert {p.stem for p in schemas.FOLDER.iterdir()} == set(schemas.FILES)\n"
        "stale = [n for n in schemas.FILES if (schemas.FOLDER / f'{n}.json').read_text() != schemas.schema(n)]\n"
        "assert not stale, f'{stale}: run python docs/schemas.py'"
    )
    subprocess.run([sys.executable, "-c", code], cwd=DOCS, check=True)
