"""The `semmoe` command."""

from semmoe.cli import apply, calibrate, offline, online, serve
from semmoe.cli.app import app

__all__ = ["app", "apply", "calibrate", "main", "offline", "online", "serve"]


def main() -> None:
    app()
