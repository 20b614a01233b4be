"""The `semmoe` command."""

import sys

try:
    from semmoe import console
    from semmoe.cli import (
        adapt,
        apply,
        calibrate,
        convert,
        doctor,
        offline,
        online,
        picker,
        record,
        replay,
        report,
        serve,
        swap,
        trace,
        watch,
    )
    from semmoe.cli.app import app
except KeyboardInterrupt:  # Ctrl-C before a command could begin
    sys.exit(130)

__all__ = [
    "adapt",
    "app",
    "apply",
    "calibrate",
    "convert",
    "doctor",
    "main",
    "offline",
    "online",
    "picker",
    "record",
    "replay",
    "report",
    "serve",
    "swap",
    "trace",
    "watch",
]
GROUPS = (
    "profile affinity solve replay apply import_",
    "serve watch swap adapt picker",
    "generate demo calibrate report doctor reproduce",
)
ORDER = " ".join(GROUPS).split()
app.registered_commands.sort(key=lambda command: ORDER.index(getattr(command.callback, "__name__", "")))  # as in --help


def main() -> None:
    """Run the `semmoe` command."""
    with console.watched_output():
        app()
