"""The `semmoe` command."""

from semmoe.cli import apply, calibrate, offline, online
from semmoe.cli.app import app

__all__ = ["app", "apply", "calibrate", "main", "offline", "online"]


def main() -> None:
    app()
