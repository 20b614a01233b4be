"""The `semmoe` command."""

from semmoe.cli import apply, offline, online
from semmoe.cli.app import app

__all__ = ["app", "apply", "main", "offline", "online"]


def main() -> None:
    app()
