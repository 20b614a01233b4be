"""What the README tells people to type works, in the order in which it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.dist
@pytest.mark.timeout(900)
def test_the_commands_and_the_library_example_run_in_order(tmp_path):
    tool = Path(sys.executable).with_name("semmoe")
    for command in [c for c in commands() if c.startswith("semmoe ")]:
        if command == "semmoe demo":
            continue  # test_demo.py runs it
        result = subprocess.run([tool, *command.split()[1:]], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}\n{result.stderr}"
    for code in blocks("python"):
        result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


def test_the_readme_links_to_files_that_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_table_of_the_paper_is_what_make_reproduce_wrote():
    link = re.search(r"\((benchmarks/results/reproduced_[^)]*/summary\.md)\)", README)[1]
    written = (ROOT / link).read_text().splitlines()
    table = README[README.index("| item | what | published | measured |") :].split("\n\n")[0].splitlines()
    assert len(table) > 10
    assert [row for row in table[2:] if not any(line.startswith(row) for line in written)] == []
