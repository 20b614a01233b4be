"""The `semmoe` command."""

from semmoe.cli import apply, calibrate, doctor, offline, online, record, replay, report, router, serve, watch
from semmoe.cli.app import app

__all__ = [
    "app",
    "apply",
    "calibrate",
    "doctor",
    "main",
    "offline",
    "online",
    "record",
    "replay",
    "report",
    "router",
    "serve",
    "watch",
]
GROUPS = (
    "profile affinity solve replay apply",
    "serve watch router",
    "generate demo calibrate report doctor reproduce",
)
ORDER = " ".join(GROUPS).split()
app.registered_commands.sort(key=lambda command: ORDER.index(getattr(command.callback, "__name__", "")))  # as in --help


def main() -> None:
    """Run the `semmoe` command."""
    app()
