"""What the README tells people to type works, in the order in which it stands there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TRACE = ROOT.parent / "shared" / "data" / "traces" / "gpt-oss-20b_decode.npz"


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
        if TRACE.name in command and not TRACE.exists():
            continue
        arguments = command.replace(TRACE.name, str(TRACE)).split()[1:]
        result = subprocess.run([tool, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, f"{command}\n{result.stderr}"
    for code in blocks("python"):
        result = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr


def test_the_readme_links_to_files_that_exist():
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
