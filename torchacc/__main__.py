"""`python -m torchacc env`: what is installed; `cache`: the kernels kept on disk; `run`: a script.

And `consolidate_and_reshard_fsdp_ckpts`, which is a command of its own as well.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from torchacc.dist import consolidate
from torchacc.environment import environment, render, size_text
from torchacc.run import ScriptError, run
from torchacc_device import _C


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m torchacc")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    env = commands.add_parser("env", help="report versions, devices and settings")
    env.add_argument("--json", action="store_true", help="as JSON")
    cache = commands.add_parser("cache", help="report or remove the kernels kept on disk")
    cache.add_argument("action", choices=("info", "clear"))
    consolidate.add_arguments(commands.add_parser(consolidate.NAME, help=consolidate.HELP))
    native = commands.add_parser("run", help="run a script written for CUDA on the lazy device")
    native.add_argument("script", help="a file, run as `python script` does")
    native.add_argument("arguments", nargs=argparse.REMAINDER, help="those of the script")
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(given)
    if options.command == consolidate.NAME:
        return consolidate.run(options)
    if options.command == "run":
        try:
            # Not `options.arguments`: argparse takes a `--` away that is the script's.
            run(options.script, given[given.index(options.script, 1) + 1 :])
        except ScriptError as error:
            parser.error(str(error))
        return 0
    if options.command == "cache":
        return _cache(options.action)
    report = environment()
    print(json.dumps(report, indent=2) if options.json else render(report))
    return 0


def _cache(action: str) -> int:
    """Status 1 when the directory is one that is not used, or when kernels stayed in it."""
    info = _C.cache_info()
    if action == "info":
        section = {
            "directory": info["directory"] or None,
            "libraries": info["files"],
            "size": size_text(info["bytes"]),
            "limit": size_text(info["max_bytes"]),
            "problem": info["problem"] or None,
        }
        print(render({"cache": section}))
        return 1 if info["problem"] else 0
    if info["problem"]:
        print(info["problem"], file=sys.stderr)
        return 1
    _C.clear_cache()
    left = _C.cache_info()
    freed = size_text(info["bytes"] - left["bytes"])
    print(f"{info['directory']}: {info['files'] - left['files']} libraries, {freed} freed")
    return 1 if left["files"] else 0


if __name__ == "__main__":
    sys.exit(main())
