"""Measures the benchmark cases: every mode in its own process, alternating, on the same cores.

    python benchmarks/run.py --suite host
    python benchmarks/run.py --suite host --case mlp gpt --modes eager,acc --threads 1
    python benchmarks/run.py --suite host --threads 1,2 --startup
    python benchmarks/run.py --suite gpu --json benchmarks/results/DATE-gpu.jsonl

The table is printed at the end; --json writes the lines that benchmarks/results/README.md
describes, of each mode one as soon as it runs. SIGTERM ends the measuring: the table and the file
then have what there was, not judged, and name what is missing. Exit status: 0 all is well; 1 wrong
results or a mode that does not run; 2 the run was refused; 3 too many windows with foreign load;
4 a requirement does not hold; 143 stopped by SIGTERM.
"""

import argparse
import importlib.machinery
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

if __package__ in (None, ""):
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from benchmarks import load, measure, report, startup
from benchmarks.cases import CASES, names_of
from benchmarks.driver import Worker, clean_up_when_terminated
from benchmarks.measure import CaseResult, Settings

EXIT_OK, EXIT_FAILED, EXIT_REFUSED, EXIT_INVALID, EXIT_MISSED = range(5)
EXIT_STOPPED = 128 + signal.SIGTERM
START = "the first steps"


class Refused(RuntimeError):
    """The run cannot start; the message says why and what to do."""


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parses the command line."""
    description, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        "benchmarks/run.py",
        description=description,
        epilog=rest,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--suite", choices=("host", "gpu"), required=True)
    parser.add_argument(
        "--case",
        nargs="+",
        choices=tuple(CASES),
        metavar="NAME",
        help=f"of {', '.join(CASES)}; default: all, on the host all but those for GPUs only",
    )
    parser.add_argument(
        "--modes",
        default="eager,compile,acc,capture",
        help=f"comma-separated, of {', '.join(measure.MODES)}",
    )
    parser.add_argument(
        "--threads",
        type=lambda text: [int(number) for number in text.split(",")],
        default=[None],
        help="cores to pin to, comma-separated for one run after another; default: all usable ones",
    )
    parser.add_argument(
        "--compile-forms",
        type=lambda text: tuple(text.split(",")),
        default=(),
        help="forms of torch.compile to try, comma-separated; default: all that suit a case",
    )
    parser.add_argument(
        "--startup",
        action="store_true",
        help=f"also the first {measure.COLD_STEPS} steps of {startup.CASE}, caches cold and warm",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write JSON lines to FILE")
    parser.add_argument(
        "--append", action="store_true", help="keep what FILE has, and write behind it"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write a bar chart to FILE")
    parser.add_argument("--alternations", type=int, default=Settings.alternations)
    parser.add_argument("--window-s", type=float, default=Settings.window_s)
    parser.add_argument(
        "--compile-timeout-s",
        type=float,
        default=Settings.compile_timeout_s,
        help="for the first steps of a form of torch.compile; default: what the case says",
    )
    parser.add_argument(
        "--limit-s",
        type=float,
        default=Settings.limit_s,
        help="seconds of a case, of which torch.compile gets what all else leaves; default: none",
    )
    parser.add_argument(
        "--no-warm-start",
        dest="warm_start",
        action="store_false",
        help="on a GPU: do not start acc once more, in a process that finds its caches filled",
    )
    options = parser.parse_args(arguments)
    options.case = options.case or names_of(options.suite)
    return options


def parse_modes(text: str) -> tuple[str, ...]:
    """The modes of a comma-separated list, in their fixed order. Raises Refused."""
    wanted = [mode.strip() for mode in text.split(",") if mode.strip()]
    unknown = [mode for mode in wanted if mode not in measure.MODES]
    if unknown or not wanted:
        raise Refused(
            f"[benchmarks.run] --modes {text}: unknown mode {', '.join(unknown) or '(none)'}. "
            f"Modes: {', '.join(measure.MODES)}"
        )
    return tuple(mode for mode in measure.MODES if mode in wanted)


def require_plugin() -> None:
    """Raises Refused unless torchacc_device is built, in this tree or as an installed package."""
    spec = importlib.util.find_spec("torchacc_device")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    if not any(
        (Path(folder) / f"_C{suffix}").exists() for folder in folders for suffix in suffixes
    ):
        raise Refused(
            "[benchmarks.run] modes acc and capture need torchacc_device, which is not built for "
            "this interpreter. Run `make develop PYTHON=<this python>`, or leave them out of "
            "--modes."
        )


def require_gpu() -> None:
    """Raises Refused unless torch sees a usable CUDA GPU, asked in another process."""
    code = "import torch; print('usable' if torch.cuda.is_available() else torch.version.cuda)"
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    answer = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    said = answer.stdout.strip()
    if said == "usable":
        return
    if answer.returncode != 0:
        why = f"torch cannot be imported: {answer.stderr.strip().splitlines()[-1]}"
    elif said == "None":
        why = "this torch was built without CUDA"
    else:
        why = f"this torch (CUDA {said}) finds no usable GPU"
    raise Refused(
        f"[benchmarks.run] --suite gpu needs an NVIDIA GPU, and {why}. Nothing was measured. Run "
        "it on a machine with a GPU and a torch built with CUDA, or use --suite host."
    )


def prepare(
    options: argparse.Namespace, threads: int | None, spawn: Callable[..., Worker]
) -> Settings:
    """Checks that the run can be done and settles how. Raises Refused."""
    modes = parse_modes(options.modes)
    if options.alternations < 1 or options.window_s <= 0.0:
        raise Refused("[benchmarks.run] --alternations and --window-s must be positive")
    if options.limit_s <= 0.0:
        raise Refused(
            f"[benchmarks.run] --limit-s {options.limit_s:g}: a case needs time. Give the seconds "
            "that it has, or leave the option out."
        )
    if options.suite != "gpu" and "graph" in modes:
        raise Refused("[benchmarks.run] mode graph is a CUDA graph: it is of --suite gpu only")
    if options.suite == "gpu":
        require_gpu()
    if any(mode in measure.OURS for mode in modes):
        require_plugin()
    usable = os.sched_getaffinity(0)
    try:
        cores = load.choose_cores(len(usable) if threads is None else threads)
        load.check_usable(cores)
    except load.LoadError as error:
        raise Refused(str(error)) from error
    return Settings(
        options.suite,
        modes,
        tuple(cores),
        options.alternations,
        options.window_s,
        spawn,
        options.compile_forms,
        options.compile_timeout_s,
        options.limit_s,
        warm_start=options.warm_start,
    )


def write_lines(file: TextIO | None, lines: Sequence[Mapping[str, Any]]) -> None:
    """Appends JSON lines and flushes, so that an interrupted run leaves what it measured."""
    if file is not None:
        for line in lines:
            file.write(json.dumps(line) + "\n")
        file.flush()


def verdict(results: Sequence[CaseResult], claimable: bool) -> tuple[int, list[str]]:
    """The exit status of a run and the sentences that explain it."""
    messages = [f"note: {text}" for result in results for text in result.notes]
    failures = [text for result in results for text in result.failures]
    invalid = [text for result in results for text in result.invalid]
    missed = [text for result in results for text in result.missed]
    messages += [f"FAILED: {text}" for text in failures]
    messages += [f"INVALID: {text}" for text in invalid]
    messages += [f"MISSED: {text}" for text in missed]
    if not claimable:
        messages.append("note: fewer or shorter windows than a claim needs (9 of at least 0.5 s)")
    if failures:
        return EXIT_FAILED, messages
    if invalid:
        return EXIT_INVALID, messages
    return (EXIT_MISSED if missed else EXIT_OK), messages


def measured_of(options: argparse.Namespace) -> list[str]:
    """What a round measures, in order: cases and, where it was asked for, how programs start."""
    return [*options.case, *([START] if options.startup else [])]


def run(options: argparse.Namespace, spawn: Callable[..., Worker] = Worker) -> int:
    """Measures what `options` ask for, prints the table and returns the exit status."""
    rounds = [prepare(options, threads, spawn) for threads in options.threads]
    settings = rounds[0]
    counts = [len(each.cores) for each in rounds]
    described = {
        "suite": settings.suite,
        "cases": options.case,
        "modes": settings.modes,
        "threads": counts[0] if len(counts) == 1 else counts,
        "alternations": settings.alternations,
        "window_s": settings.window_s,
        "claimable": settings.claimable,
    }
    results: list[CaseResult] = []
    file: TextIO | None = None

    def tell(line: Mapping[str, Any]) -> None:
        write_lines(file, [line])
        print(report.started(line), file=sys.stderr, flush=True)

    left = [(each, name) for each in rounds for name in measured_of(options)]
    stopped = False
    try:
        if options.json is not None:
            options.json.parent.mkdir(parents=True, exist_ok=True)
            file = options.json.open("a" if options.append else "w")
        head = report.header(described, os.environ)
        write_lines(file, [head])
        while left and not stopped:
            each, name = left.pop(0)
            if name == START:
                print(f"{START} of {startup.CASE}", file=sys.stderr, flush=True)
                results.append(startup.measure_startup(each))
            else:
                print(f"{name}: {CASES[name].title}", file=sys.stderr, flush=True)
                results.append(measure.measure_case(CASES[name], each, tell))
            write_lines(file, results[-1].lines)
            stopped = results[-1].stopped
    finally:
        if file is not None:
            file.close()
    if stopped and left:
        names = ", ".join(dict.fromkeys(name for _, name in left))
        results[-1].notes.append(f"{measure.STOPPED}: {names}")
    lines = [head, *(line for result in results for line in result.lines)]
    print(report.table(lines), report.summary(lines), sep="\n\n")
    if options.svg is not None:
        options.svg.parent.mkdir(parents=True, exist_ok=True)
        options.svg.write_text(report.svg(lines))
    status, messages = verdict(results, settings.claimable)
    print("\n".join(messages))
    return EXIT_STOPPED if stopped else status


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    try:
        return run(parse(arguments))
    except Refused as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED


if __name__ == "__main__":
    clean_up_when_terminated()
    sys.exit(main())
