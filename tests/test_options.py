"""Every number that a user can give has bounds: outside them a command ends in one line that names the option."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import typer
from typer.models import OptionInfo
from typer.testing import CliRunner

from lab.__main__ import app as lab
from semmoe.cli import app
from semmoe.cli.form import takes
from semmoe.io.bounds import choice, number

VALUES = ("0", "-1", "1000000000", "nan")
# What makes each command run, or end soon for another reason than the option; demo and reproduce run for minutes.
WORDS: dict[str, list[str]] = {
    "calibrate": ["tiny", "--out", "{tmp}/links.json"],
    "solve": ["{trace}", "--ep-size", "2", "--out", "{tmp}/plan"],
    "import": ["{tmp}/absent", "--model", "tiny", "--out", "{tmp}/imported"],
    "replay": ["{trace}", "--ep-size", "2", "--method", "semmoe", "--batch-tokens", "50"],
    "profile": ["tiny", "--dataset", "{prompts}", "--out", "{tmp}/profile"],
    "generate": ["tiny", "--dataset", "{prompts}", "--ep-size", "1", "--max-new-tokens", "1"],
    "demo": [],
    "reproduce": ["--list"],
    "picker": ["127.0.0.1:9", "--plan", "{tmp}/absent", "--tokenizer", "tiny"],
    "serve": ["tiny", "--dry-run", "--control", "{tmp}/control"],
    "watch": ["http://127.0.0.1:9"],
    "swap": ["http://127.0.0.1:9", "--plan", "{tmp}/absent"],
    "adapt": ["http://127.0.0.1:9", "--control", "{tmp}/absent"],
    "record start": ["{tmp}/absent"],
    "record stop": ["{tmp}/absent"],
}
OF_LAB = {"calibrate", "reproduce"}
MINUTES = {"demo"}  # whose accepted values are not run here


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    for one in group.registered_commands:
        yield path + (one.name or one.callback.__name__), one.callback
    for sub in group.registered_groups:
        yield from commands(sub.typer_instance, f"{path}{sub.name} ")


def numbers() -> Iterator[tuple[str, str, OptionInfo]]:
    """Command, option and its declaration, of every option that is a number."""
    for command, callback in (*commands(app), *commands(lab)):
        for name, hint in get_type_hints(callback, include_extras=True).items():
            if get_origin(hint) is Annotated:
                kind, *metadata = get_args(hint)
                info = next((one for one in metadata if isinstance(one, OptionInfo)), None)
                if info is not None and {int, float} & {kind, *get_args(kind)}:
                    yield command, f"--{name.replace('_', '-')}", info


NUMBERS = list(numbers())
INSIDE = [
    (command, option, value)
    for command, option, info in NUMBERS
    for value in VALUES[:3]
    if info.min is not None and info.max is not None and info.min <= int(value) <= info.max
]
OUTSIDE = [
    (command, option, value)
    for command, option, _ in NUMBERS
    for value in VALUES
    if (command, option, value) not in INSIDE
]


@pytest.fixture
def places(tmp_path):
    rng = np.random.default_rng(0)
    trace, prompts = tmp_path / "trace.npz", tmp_path / "prompts.jsonl"
    np.savez(
        trace,
        token_ids=rng.integers(0, 50, 240),
        expert_ids=np.argsort(rng.random((240, 2, 8)), axis=2)[:, :, :2].astype(np.uint8),
        request_offsets=np.arange(0, 241, 12),
    )
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("def f(x):", "import os")))
    return {"tmp": str(tmp_path), "trace": str(trace), "prompts": str(prompts)}


def run(command: str, option: str, value: str, places: dict[str, str]) -> Any:
    words = [word.format(**places) for word in WORDS[command]]
    if option in words:
        del words[words.index(option) : words.index(option) + 2]
    return CliRunner().invoke(lab if command in OF_LAB else app, [*command.split(), *words, option, value])


@dataclass(frozen=True, kw_only=True)
class Limits:
    most: float | None = number(2.0, 1, 9, zero_is_none=True, help="The limit.")


@dataclass(frozen=True, kw_only=True)
class Work:
    out: Annotated[str, typer.Option()]
    limits: Limits = field(default_factory=Limits)
    kind: str = choice("a", ("a", "b"), help="The kind.")
    steps: int = number(3, 1, 9)


@pytest.mark.parametrize(
    ("words", "made"),
    [
        (["--out", "x"], Work(out="x")),
        (["--out", "x", "--kind", "b", "--most", "4"], Work(out="x", kind="b", limits=Limits(most=4.0))),
        (["--out", "x", "--most", "0"], Work(out="x", limits=Limits(most=None))),
    ],
)
def test_a_command_gets_a_dataclass_made_from_its_options(words, made):
    """Of the fields, `steps` has no help text and is not an option."""
    seen = []

    @takes
    def run(*, work: Work, twice: Annotated[bool, typer.Option("--twice")] = False):
        seen.append((work, twice))

    group = typer.Typer()
    group.command()(run)
    assert CliRunner().invoke(group, [*words, "--twice"]).exit_code == 0
    assert seen == [(made, True)]
    assert CliRunner().invoke(group, ["--out", "x", "--steps", "4"]).exit_code == 2
    assert CliRunner().invoke(group, []).exit_code == 2, "a field without a default must be given"


def test_the_walk_sees_every_command_with_numbers():
    assert {command for command, _, _ in NUMBERS} == set(WORDS)
    assert len(NUMBERS) > 50
    assert len(OUTSIDE) > 100


@pytest.mark.parametrize(("command", "option", "info"), NUMBERS)
def test_every_number_declares_its_bounds(command, option, info):
    assert info.min is not None
    assert info.max is not None


@pytest.mark.parametrize(("command", "option", "value"), OUTSIDE)
def test_a_number_out_of_bounds_is_refused_by_name(command, option, value, places):
    result = run(command, option, value, places)
    lines = result.stderr.strip().splitlines()
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert f"'{option}'" in lines[0]


@pytest.mark.dist
@pytest.mark.parametrize(("command", "option", "value"), [case for case in INSIDE if case[0] not in MINUTES])
def test_a_number_within_bounds_runs_or_is_refused_for_what_it_means(command, option, value, places):
    result = run(command, option, value, places)
    errors = [line for line in result.stderr.splitlines() if "error:" in line]
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    assert len(errors) == (result.exit_code != 0), result.output
    assert "Invalid value" not in result.stderr
