"""What all commands share: errors in one line with an exit code, and options that have no effect.

Every command is a thin layer over a library function. A user's mistake ends in one line on stderr and exit code 2, a
failure while running or a full disk in exit code 1, Ctrl-C in 130, a closed pipe in 141 without a line.
"""

import json
import shlex
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, distribution
from typing import Annotated, Any
from urllib.parse import unquote, urlparse

import typer
from typer.core import TyperGroup

from semmoe import __version__
from semmoe.cli.form import takes
from semmoe.io import console
from semmoe.io.files import NO_ROOM
from semmoe.traces.routing import RoutingWarning

# Panels of `semmoe --help`.
OFFLINE = "Offline"
SERVING = "Serving"
TOOLS = "Tools"
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": False}  # options after `--`
EXTRAS = {  # the extra that installs a module
    **dict.fromkeys(("grpc", "grpc_health", "envoy"), "gateway"),
    **dict.fromkeys(("torch", "transformers", "tokenizers"), "transformers"),
    "jinja2": "report",
    **dict.fromkeys(("matplotlib", "sklearn"), "dev"),
    "prometheus_client": "serve",
}
_UsageError: Any = typer.BadParameter.__base__  # typer contains a renamed copy of click


class _Group(TyperGroup):
    """Turns errors into one clear line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with _shown_warnings():
                return super().invoke(ctx)
        except (typer.Exit, typer.Abort):
            raise
        except _UsageError as error:
            if type(error).__name__ == "NoArgsIsHelpError":
                raise
            command = error.ctx.command_path if error.ctx else "semmoe"
            _fail(f"{error.format_message()} (see {command} --help)", 2)
        except ModuleNotFoundError as error:
            extra = _extra(error.name, ctx.invoked_subcommand)
            if extra is None:
                raise
            _fail(f"this command needs {error.name}: {install_hint(extra)}", 2)
        except ValueError as error:
            _fail(str(error), 2)
        except OSError as error:
            words = f"{error.filename}: {error.strerror}" if error.filename else str(error)
            _fail(words, 1 if error.errno in NO_ROOM else 2)
        except RuntimeError as error:
            _fail(str(error), 1)
        except KeyboardInterrupt:
            resumes = ctx.invoked_subcommand == "profile"
            kept = "the same command resumes after the recorded prompts" if resumes else "nothing was left half-written"
            _fail(f"stopped; {kept}", 130)


@contextmanager
def _shown_warnings() -> Iterator[None]:
    """Print the library's warnings of a trace in one line on stderr; other warnings stay Python's."""
    shown = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, RoutingWarning):
            console.warn(str(message))
        else:
            shown(message, category, *place, **more)

    with warnings.catch_warnings():
        warnings.simplefilter("always", RoutingWarning)
        warnings.showwarning = show
        yield


def _extra(module: str | None, command: str | None) -> str | None:
    """The extra of semmoe that installs a missing module; None if there is none."""
    if command == "picker" and module in ("jinja2", "torch", "transformers", "tokenizers"):
        return "gateway"
    return EXTRAS.get(module or "")


def install_hint(extra: str) -> str:
    """The pip command that adds an extra to this installation: from an index, a checkout or a wheel on the disk."""
    try:
        source = json.loads(distribution("semmoe").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        source = {}
    url, editable = urlparse(source.get("url", "")), source.get("dir_info", {}).get("editable", False)
    what = unquote(url.path) if url.scheme == "file" else "semmoe"
    return f"pip install {'-e ' * editable}{shlex.quote(f'{what}[{extra}]')}"


def refuse_given(ctx: typer.Context, names: list[str], reason: str) -> None:
    """Raise ValueError if the user gave one of the options `names`: no setting is silently ignored.

    A name with a point is a setting of --set, or the prefix of several settings, such as "paper.".
    """
    given = next((flag for name in names if (flag := as_given(ctx, name))), None)
    if given is not None:
        raise ValueError(f"{given} has no effect here: {reason}")


def as_given(ctx: typer.Context, name: str) -> str | None:
    """The option as the user gave it; None: not given."""
    if "." in name:
        changed = (change.split("=")[0] for change in ctx.params.get("changes") or ())
        return next((f"--set {setting}" for setting in changed if setting.startswith(name)), None)
    source = ctx.get_parameter_source(name)
    given = source is not None and source.name == "COMMANDLINE"
    return next((one.opts[0] for one in ctx.command.params if given and one.name == name), None)


def _fail(message: str, code: int) -> None:
    line = console.plain(" ".join(message.split()))  # files and servers may have put anything into it
    console.err.print(f"[bold red]error:[/] {line}", soft_wrap=True)
    raise typer.Exit(code)


def new_app(purpose: str) -> typer.Typer:
    """A group of commands whose errors are one line with an exit code."""
    return typer.Typer(
        cls=_Group,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
        help=purpose,
    )


def add_group(name: str, panel: str, purpose: str) -> typer.Typer:
    """A group of commands below `semmoe NAME`."""
    group = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", help=purpose)
    app.add_typer(group, name=name, rich_help_panel=panel)
    return group


app = new_app("Semantic parallelism for Mixture-of-Experts inference: place experts and schedule tokens together.")


def command(panel: str, **more: Any) -> Callable[[Callable[..., Any]], Any]:
    """Declare a command in a panel of `semmoe --help`, whose parameters may be dataclasses of options (`takes`)."""

    def declare(function: Callable[..., Any]) -> Any:
        return app.command(rich_help_panel=panel, **more)(takes(function))

    return declare


@app.callback(invoke_without_command=True)
def _main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit
