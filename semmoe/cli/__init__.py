"""The `semmoe` command."""

from semmoe.cli import apply, calibrate, doctor, offline, online, record, serve
from semmoe.cli.app import app

__all__ = ["app", "apply", "calibrate", "doctor", "main", "offline", "online", "record", "serve"]


def main() -> None:
    app()
