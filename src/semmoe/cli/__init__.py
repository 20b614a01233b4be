"""The `semmoe` command."""

from semmoe.cli import apply, calibrate, doctor, offline, online, record, report, router, serve, watch
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
    "report",
    "router",
    "serve",
    "watch",
]


def main() -> None:
    app()
