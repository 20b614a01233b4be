"""The README: commands that exist, links that lead somewhere, few numbers, and figures that files hold."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer

import semmoe
from semmoe.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def commands():
    lines = "\n".join(blocks("bash")).splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def test_every_command_of_the_readme_is_of_a_kind_that_is_checked_here():
    assert all(command.startswith("make ") for command in commands())
    lines = "".join(blocks("shell")).splitlines()
    assert len(lines) == 5
    assert [line.split()[0] for line in lines] == ["semmoe"] * 5


def test_the_five_commands_for_a_server_name_options_that_exist():
    known = typer.main.get_command(app).commands
    for line in "".join(blocks("shell")).splitlines():
        _, name, *words = line.split(" #")[0].split(" -- ")[0].split()
        named = {option for parameter in known[name].params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= named, line


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_make_targets_exist(command):
    subprocess.run([*command.split(), "-n"], cwd=ROOT, check=True, capture_output=True)


def test_the_command_is_installed():
    tool = Path(sys.executable).with_name("semmoe")
    assert subprocess.run([tool, "--version"], capture_output=True, text=True).stdout.strip() == semmoe.__version__


def test_the_readme_links_to_files_that_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def numbers(text):
    """Numbers that a reader meets: outside of code and of links' targets, no versions (0.5.23) and no names (V2)."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|\b\d+\.\d+\.\d+\b", " ", text)
    return re.findall(r"(?<![\w.-])(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?!\w)", text)


def test_numbers_are_counted_outside_of_code_links_versions_and_names():
    text = "8 GPUs, .25 and 1,024; [x](a-7.txt) `--n 3` vLLM 0.32.0, V2, EP4 [1.05, 1.07]\n```\n99\n```\n"
    assert numbers(text) == ["8", ".25", "1,024", "1.05", "1.07"]


def test_the_readme_is_one_screen_with_few_numbers():
    assert len(README.splitlines()) <= 110
    assert len(numbers(re.sub(r"^\|.*$", "", README, flags=re.M))) <= 20  # in sentences
    assert len(numbers(README)) <= 70


def linked(kind):
    """The text of the results file of a kind that the README links to."""
    return (ROOT / re.search(rf"\((benchmarks/results/{kind}_[^)]*)\)", README)[1]).read_text()


def table(head):
    """{first cell: other cells} of the table whose header begins with `head`, without emphasis."""
    lines = README[README.index(f"| {head} |") :].split("\n\n")[0].replace("**", "").splitlines()
    rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:])
    return {row[0]: row[1:] for row in rows}


def figure(value):
    return f"{value:.2f}".removeprefix("0")


def test_the_saved_rows_are_those_of_the_linked_files():
    plans = {row["name"]: row for row in json.loads(linked("plans_tp").splitlines()[-1])["results"]}
    nodes = re.findall(r"^  16:4:(\d+) +\d (\w+) +plan  nodes (\S+) .* load (\S+) ", linked("nodes"), re.M)
    names = {"EPLB": "eplb", "the paper's method": "paper", "semmoe": "semmoe"}
    rows = table("method")
    assert list(rows) == list(names)
    for shown, name in names.items():
        expected = []
        for copies in (0, 32):
            known = (f"{name}, {copies} redundant, plan, mixed", f"{name}, plan, mixed" if copies == 0 else "")
            row = next((plans[key] for key in known if key in plans), None)
            expected.append(row and (row["remote_ranks_per_token"], row["load_max_over_mean"]))
        for copies in ("0", "16"):
            splits = np.array([(rows, load) for n, who, rows, load in nodes if (n, who) == (copies, name)], float)
            expected.append(splits.mean(axis=0) if len(splits) == 3 else None)
        assert rows[shown] == ["-" if one is None else f"{figure(one[0])} at {figure(one[1])}" for one in expected]


def served(text, attention, name):
    """The ratio of requests a second to vanilla's, all sent at once over the slowest links, of a configuration."""
    section = text[text.index(f"## {attention}, at once, links of 59 %, EP2") :].split("\n## ")[0]
    row = next((line for line in section.splitlines() if line.startswith(f"| {name} |")), None)
    return "-" if row is None else row.split("|")[4].strip().replace("0.", ".")


def test_the_served_gains_are_those_of_the_linked_files():
    names = ["plan, 16 redundant", "EPLB, 16 redundant", "as it comes"]
    columns = [(linked(f"{engine}_served"), attention) for engine in ("sglang", "vllm") for attention in ("DP", "TP")]
    expected = [[served(text, attention, name) for text, attention in columns] for name in names]
    assert list(table("configuration").values()) == expected


def test_the_forecast_is_the_demo_s():
    shown = blocks("")[0].splitlines()
    written = [line for line in linked("demo").splitlines() if line]
    assert len(shown) == 13
    assert shown == written[1:14]


def test_the_table_of_the_paper_is_what_make_reproduce_wrote():
    page = (ROOT / "docs" / "verdict.md").read_text()
    link = re.search(r"\(\.\./(benchmarks/results/reproduced_[^)]*\.md)\)", page)[1]
    written = (ROOT / link).read_text().splitlines()
    table = page[page.index("| item | what | published | measured |") :].split("\n\n")[0].splitlines()
    assert len(table) > 10
    assert [row for row in table[2:] if not any(line.startswith(row) for line in written)] == []
