"""Output to the terminal: tables, progress bars, one-line errors. Results go to stdout, all else to stderr."""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

out = Console(highlight=False, soft_wrap=True)
err = Console(stderr=True, highlight=False)


class Output:
    """Standard output or error that ends the command when it cannot be written: a closed pipe without a message."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> None:
        self._try(self._stream.write, text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[..., Any], *arguments: Any) -> None:
        try:
            action(*arguments)
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())  # else Python reports it again at the end
            if isinstance(error, BrokenPipeError):
                raise SystemExit(128 + signal.SIGPIPE) from None
            err.print(f"[bold red]error:[/] {self._name} cannot be written: {error.strerror}", soft_wrap=True)
            raise SystemExit(1) from None


def watch_outputs() -> None:
    """From now on, end the program with exit code 1 where an output cannot be written, 141 for a closed pipe."""
    if sys.stdout is None:
        err.print("[bold red]error:[/] standard output is closed", soft_wrap=True)
        raise SystemExit(1)
    sys.stdout = Output(sys.stdout, "standard output")
    if sys.stderr is not None:
        sys.stderr = Output(sys.stderr, "standard error")


class Bars(Progress):
    """Progress bars, one per stage."""

    def task(self, description: str, total: int | None) -> Callable[[float], None]:
        """Start a bar, of an unknown total if it is None; the returned function advances it."""
        return partial(self.advance, self.add_task(description, total=total))


def bars() -> Bars:
    """Progress bars on stderr for the time of a block."""
    description, left = TextColumn("{task.description}"), TimeRemainingColumn(elapsed_when_finished=True)
    return Bars(SpinnerColumn(), description, BarColumn(), MofNCompleteColumn(), left, console=err)


def plain(text: str) -> str:
    """Untrusted text, such as from a file or an engine, without control characters and markup."""
    return escape("".join(c if c.isprintable() else "?" for c in text))


def say(text: str, style: str | None = None) -> None:
    """Print a line of plain text."""
    out.print(text, style=style, markup=False)


def note(text: str) -> None:
    """Print a line of plain text on stderr."""
    err.print(text, markup=False, soft_wrap=True)


def warn(text: str, label: str = "warning") -> None:
    """Print a warning in one line on stderr."""
    err.print(f"[yellow]{label}:[/] {plain(text)}", soft_wrap=True)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1))


def tell(as_json: bool, value: Any, otherwise: str | Callable[[], None]) -> None:
    """Print the result of a command as JSON, or else as a line of plain text or by a function."""
    if as_json:
        print_json(value)
    elif isinstance(otherwise, str):
        say(otherwise)
    else:
        otherwise()


def print_table(title: str, columns: list[str], rows: list[list[str]]) -> None:
    """A table whose first column is text and whose other columns are figures; it fits into 80 columns."""
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.pad_edge, table.collapse_padding = False, True
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right", vertical="bottom", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # A table that is piped into a file keeps its full width instead of being cut.
    console = out if out.is_terminal else Console(highlight=False, width=160)
    console.print(table)


def figure(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def megabytes(value: int) -> str:
    return f"{value / 1e6:.1f}"
