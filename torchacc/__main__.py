"""`python -m torchacc env`: what is installed, and what the device runs on."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from torchacc.report import environment, render


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m torchacc")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    env = commands.add_parser("env", help="report versions, devices and settings")
    env.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    report = environment()
    print(json.dumps(report, indent=2) if options.json else render(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
