"""What pages tell a newcomer to type, run in this process: each start of a command would import torch again."""

import shlex
from pathlib import Path

from typer.testing import CliRunner

from semmoe.cli import app


def run_line(line: str) -> None:
    """Run a command of a page, `semmoe ... [> FILE]`, in the current folder; it must end well."""
    tool, *words = shlex.split(line, comments=True)
    assert tool == "semmoe", line
    file = words.pop() if ">" in words else None
    done = CliRunner().invoke(app, [word for word in words if word != ">"])
    assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"
    if file is not None:
        Path(file).write_text(done.stdout)


def run_code(code: str) -> None:
    """Run a Python block of a page as a separate script."""
    exec(compile(code, "a page", "exec"), {"__name__": "__main__"})
