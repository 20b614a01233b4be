"""The `semmoe` command."""

import sys
from importlib import import_module

COMMANDS = "online solve replay engine_files serve running picker traces tools"

try:
    from semmoe.cli.app import app
    from semmoe.io import console

    for module in COMMANDS.split():  # each adds its commands, in the order of `semmoe --help`
        import_module(f"semmoe.cli.{module}")
except KeyboardInterrupt:  # Ctrl-C before a command could begin
    sys.exit(130)

__all__ = ["app", "main"]


def main() -> None:
    """Run the `semmoe` command."""
    console.watch_outputs()
    try:
        app()
    finally:
        sys.stdout.flush()
