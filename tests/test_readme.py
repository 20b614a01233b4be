"""What the README tells people to type works, in the order in which it stands there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from newcomer import run_code, run_line

import semmoe

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.M | re.S)


def commands():
    lines = "\n".join(blocks("bash")).splitlines()
    return [line.split(" #")[0].strip() for line in lines if line.strip() and not line.startswith("#")]


def test_every_command_of_the_readme_is_of_a_kind_that_is_run_here():
    kinds = ("make ", "semmoe ", "pip install ", "git ", "python examples/", "cd ")
    assert all(command.startswith(kinds) for command in commands())
    assert any(command.startswith("semmoe ") for command in commands())


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith("make ")])
def test_make_targets_exist(command):
    subprocess.run([*command.split(), "-n"], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_the_commands_and_the_library_example_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in [c for c in commands() if c.startswith("semmoe ") and c != "semmoe demo"]:  # test_demo.py runs it
        run_line(command)
    for code in blocks("python"):
        run_code(code)


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
    assert len(numbers(README)) <= 40


def test_the_table_at_the_top_is_what_the_linked_files_hold():
    counts, times = (measured(kind) for kind in ("counts", "end_to_end"))
    rows = README[README.index("| vanilla |") :].split("\n\n")[0].splitlines()
    names = ["TP, vanilla", "TP, plan", "TP, plan, 8 redundant", "TP, all-reduce"]
    for name, row in zip(names, rows, strict=True):
        _, lar, remote, exchanged, sent, speed, identical = (cell.strip() for cell in row.strip("|").split("|"))
        count, (middle, least, most) = counts["loopback", name], times["200mbit", name]["over_vanilla"]
        assert identical == count["identical"] == times["200mbit", name]["identical"] == "yes"
        assert [count[f"{kind}_bytes"] for kind in ("all_to_all", "total")] == [
            times["200mbit", name][f"{kind}_bytes"] for kind in ("all_to_all", "total")
        ]
        assert float(exchanged) == round(count["all_to_all_bytes"] / 1e6, 1)
        assert sent == f"{count['total_bytes'] / 1e6:.1f}"
        figures = [count["lar"], count["remote_ranks_per_token"]]
        assert [lar, remote] == (["-", "-"] if None in figures else [f"{figures[0]:.3f}"[1:], f"{figures[1]:.2f}"])
        spread = f"{middle:.2f} [{least:.2f}, {most:.2f}]".replace("[0.", "[.")
        assert speed == ("1" if name == "TP, vanilla" else spread)


def measured(kind):
    """{(network, name): figures} of the results file of `kind` that the README links to."""
    link = re.search(rf"\((benchmarks/results/{kind}_[^)]*)\)", README)[1]
    line = next(line for line in (ROOT / link).read_text().splitlines() if line.startswith('{"'))
    return {(row["network"], row["name"]): row for row in json.loads(line)["results"]}


def test_the_table_of_the_paper_is_what_make_reproduce_wrote():
    page = (ROOT / "docs" / "verdict.md").read_text()
    link = re.search(r"\(\.\./(benchmarks/results/reproduced_[^)]*\.md)\)", page)[1]
    written = (ROOT / link).read_text().splitlines()
    table = page[page.index("| item | what | published | measured |") :].split("\n\n")[0].splitlines()
    assert len(table) > 10
    assert [row for row in table[2:] if not any(line.startswith(row) for line in written)] == []
