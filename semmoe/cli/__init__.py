"""The `semmoe` command."""

from semmoe.cli import offline, online
from semmoe.cli.app import app

__all__ = ["app", "main", "offline", "online"]


def main() -> None:
    app()
