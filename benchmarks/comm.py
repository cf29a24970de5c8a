"""Measures several processes: training steps, and exchanges between two simulated hosts.

    python benchmarks/comm.py --part steps --json benchmarks/results/DATE-comm-MACHINE-steps.jsonl
    python benchmarks/comm.py --part hosts --json benchmarks/results/DATE-comm-MACHINE-hosts.jsonl

steps: DistributedDataParallel on acc against eager over Gloo, a process and thread per core. hosts:
all-reduces of a bucket of gradients by the ways of torchacc.dist.comm, two ranks on each of two
network namespaces that a slow link joins (needs root and iproute2). Exit status as of run.py.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import comm_hosts, comm_steps, load, report, run, stats
from benchmarks.driver import clean_up_when_terminated


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    description, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "benchmarks/comm.py",
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--part", choices=("steps", "hosts"), help="what is measured")
    parser.add_argument(
        "--markdown", type=Path, metavar="FILE", help="print the tables of a result file instead"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines to FILE")
    parser.add_argument("--alternations", type=int, default=9)
    parser.add_argument("--window-s", type=float, default=1.0)
    parser.add_argument("--case", nargs="+", choices=comm_steps.CASES, default=comm_steps.CASES)
    parser.add_argument(
        "--variant", nargs="+", choices=comm_steps.VARIANTS, default=comm_steps.VARIANTS
    )
    parser.add_argument("--gigabits", type=float, default=1.0, help="of the link, in Gbit/s")
    options = parser.parse_args(arguments)
    if (options.part is None) == (options.markdown is None):
        parser.error("one of --part and --markdown")
    return options


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """The lines of a run for people."""
    shown = {"steps": comm_steps.row, "ratio": comm_steps.ratio_row, "exchange": comm_hosts.row}
    return "\n".join(shown[line["kind"]](line) for line in lines if line["kind"] in shown)


def status(lines: Sequence[Mapping[str, Any]]) -> int:
    """The exit status that the lines of a run come to."""
    if any(line.get("valid") is False for line in lines):
        return run.EXIT_INVALID
    missed = any(line.get(name) is False for line in lines for name in ("holds", "overlap_holds"))
    return run.EXIT_MISSED if missed else run.EXIT_OK


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    options = parse(arguments)
    if options.markdown is not None:
        read = report.read([options.markdown])
        part = comm_hosts if read[0]["suite"].endswith("hosts") else comm_steps
        print(part.markdown(read))
        return run.EXIT_OK
    run.require_plugin()
    cores = load.choose_cores(2)
    load.check_usable(cores)
    settings = {
        "suite": f"comm {options.part}",
        "threads": 1,
        "alternations": options.alternations,
        "claimable": options.alternations >= stats.MIN_ALTERNATIONS,
    }
    if options.part == "steps":
        settings |= {"cases": list(options.case), "window_s": options.window_s}
        settings |= {"variants": list(options.variant)}
    else:
        settings |= {"gigabits": options.gigabits}
    head = report.header(settings, os.environ)
    lines: list[dict[str, Any]] = []
    file = None
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        file = options.json.open("w")
    try:
        run.write_lines(file, [head])
        if options.part == "steps":
            found = comm_steps.measure(
                options.case, options.variant, cores, options.alternations, options.window_s
            )
        else:
            found = comm_hosts.measure(options.gigabits, cores, options.alternations)
        for line in found:
            lines.append(line)
            run.write_lines(file, [line])
            print(table([line]), flush=True)
    finally:
        if file is not None:
            file.close()
    return status(lines)


if __name__ == "__main__":
    clean_up_when_terminated()
    try:
        sys.exit(main())
    except (run.Refused, load.LoadError) as error:
        print(error, file=sys.stderr)
        sys.exit(run.EXIT_REFUSED)
