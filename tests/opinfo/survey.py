"""Runs the operator database and prints the failures, grouped so that one cause is one line.

    python tests/opinfo/survey.py                      all float32 samples, every variant
    python tests/opinfo/survey.py --grad               gradients only
    python tests/opinfo/survey.py --fused              with generated kernels (close.py)
    python tests/opinfo/survey.py --half               the same in half types
    python tests/opinfo/survey.py --op add --op mm     these operators (with their variants)
    python tests/opinfo/survey.py --op add --sample 3 --variant forward --here
                                                       one sample in this process, for a debugger
    python tests/opinfo/survey.py --by cause           one line per distinct error, largest first
    python tests/opinfo/survey.py --json > out.json    everything, one JSON document
    python tests/opinfo/survey.py --half --results F   beside that, F for benchmarks/results

`ACC_MODE` chooses the mode of the device; `ACC_TEST_DEVICE=cpu` compares the CPU with itself.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from benchmarks import report
from tests import helpers

helpers.load_device()

from tests.opinfo import check, exceptions, runner  # noqa: E402


def pattern(text: str) -> str:
    """The text of a failure with numbers and addresses taken out: the key of a cause."""
    text = re.sub(r"0x[0-9a-f]+", "ADDRESS", text)
    text = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "N", text)
    text = re.sub(r"[\[(](N|nan|inf|-inf)?(, ?(N|nan|inf|-inf))*,?[\])]", "SIZES", text)
    return text[:160]


def excepted(result: runner.Result, category: str) -> exceptions.Excepted | None:
    """The line of the list of exceptions that covers a failure, if any."""
    for line in exceptions.EXCEPTED:
        if (line.op, line.variant, line.category) == (result.op, result.variant, category) and (
            not line.dtypes or result.dtype in line.dtypes
        ):
            return line
    return None


def totals(results: list[runner.Result]) -> dict[str, tuple[int, int, int]]:
    """Per variant: samples run, samples that failed, samples of those that are excepted."""
    found: dict[str, list[int]] = collections.defaultdict(lambda: [0, 0, 0])
    for result in results:
        row = found[result.variant]
        row[0] += result.samples
        failed = result.failed_samples()
        row[1] += len(failed)
        open_ = {i for i, category, _ in result.failures if not excepted(result, category)}
        row[2] += len(failed - open_)
    return {variant: (row[0], row[1], row[2]) for variant, row in found.items()}


def by_op(results: list[runner.Result], everything: bool) -> list[str]:
    """One line per operator, variant, dtype, category and cause: samples, first sample, text."""
    lines = []
    for result in results:
        groups: dict[tuple[str, str], list[tuple[int, str]]] = collections.defaultdict(list)
        for index, category, text in result.failures:
            if everything or not excepted(result, category):
                groups[(category, pattern(text))].append((index, text))
        for (category, _), hits in groups.items():
            where = f"{result.op} {result.variant}"
            if result.dtype != "float32":
                where += f" {result.dtype}"
            lines.append(
                f"{where:<52} {category:<12} {len(hits):>4}/{result.samples:<4} "
                f"#{hits[0][0]}: {hits[0][1]}"
            )
        if result.gave_up:
            lines.append(f"{result.op} {result.variant}: given up after repeated crashes")
    return lines


def by_cause(results: list[runner.Result], everything: bool) -> list[str]:
    """One line per category and cause, with the number of samples and the operators."""
    groups: dict[tuple[str, str], collections.Counter[str]] = collections.defaultdict(
        collections.Counter
    )
    for result in results:
        for _, category, text in result.failures:
            if everything or not excepted(result, category):
                groups[(category, pattern(text))][f"{result.op}/{result.variant}"] += 1
    lines = []
    for (category, text), ops in sorted(groups.items(), key=lambda g: -sum(g[1].values())):
        names = ", ".join(name for name, _ in ops.most_common(6))
        more = f", ... ({len(ops)})" if len(ops) > 6 else ""
        lines.append(f"{sum(ops.values()):>6}  {category:<12} {text}\n        {names}{more}")
    return lines


def summary(results: list[runner.Result]) -> list[str]:
    """The table of totals and the categories."""
    lines = [f"{'variant':<14}{'samples':>9}{'failed':>8}{'excepted':>10}{'passed':>10}"]
    for variant, (samples, failed, forgiven) in totals(results).items():
        share = 100.0 * (samples - failed) / samples if samples else 100.0
        lines.append(f"{variant:<14}{samples:>9}{failed:>8}{forgiven:>10}{share:>9.2f}%")
    kinds = collections.Counter(
        category for r in results for category in {(i, c) for i, c, _ in r.failures}
    )
    counted: collections.Counter[str] = collections.Counter()
    for (_, category), n in kinds.items():
        counted[category] += n
    if counted:
        lines.append("categories: " + ", ".join(f"{c} {n}" for c, n in counted.most_common()))
    unmade = [r for r in results if r.unmade]
    for r in unmade:
        lines.append(f"no samples: {r.op} {r.variant} {r.dtype}: {r.unmade.splitlines()[0]}")
    return lines


def lines_of(results: list[runner.Result]) -> Iterator[dict[str, object]]:
    """For a file of results: totals per variant and type, and what failed, with the reasons."""
    kinds = dict.fromkeys((result.variant, result.dtype) for result in results)
    for variant, dtype in kinds:
        found = [r for r in results if (r.variant, r.dtype) == (variant, dtype) and r.samples]
        samples, failed, forgiven = totals(found)[variant]
        yield {
            "kind": "opinfo",
            "variant": variant,
            "dtype": dtype,
            "operators": len(found),
            "samples": samples,
            "failed": failed,
            "excepted": forgiven,
            "with_kernels": sum(r.fused[0] > 0 for r in found),
        }
    for result in results:
        for category in dict.fromkeys(category for _, category, _ in result.failures):
            line = excepted(result, category)
            yield {
                "kind": "failure",
                "op": result.op,
                "variant": result.variant,
                "dtype": result.dtype,
                "category": category,
                "failed": len({i for i, kind, _ in result.failures if kind == category}),
                "samples": result.samples,
                "reason": line.reason if line else None,
            }


def _here(wanted: list[dict[str, object]], sample: int | None) -> None:
    """Runs the requests in this process and prints what differs."""
    from tests.opinfo import worker

    class Quiet:
        def write(self, request: int, index: int) -> None:
            """Nobody watches."""

    ops = worker.load_ops(runner.SOURCE)
    torch.set_num_threads(1)
    for request in wanted:
        if sample is not None:
            request["only"] = sample
        print(f"{request['op']} {request['variant']} {request['dtype']}")
        answer = worker.run(
            *(ops[request["op"]], request, 0, Quiet()),
            tell=lambda failure: print(f"  #{failure[0]} {failure[1]}: {failure[2]}"),
        )
        print(f"  {answer['samples']} samples run")


def main() -> int:
    """The command line. Exit status 1 when a failure is not on the list of exceptions."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--op", action="append", default=[], help="an operator; repeatable")
    parser.add_argument("--variant", action="append", choices=check.ALL_VARIANTS, default=[])
    parser.add_argument("--grad", action="store_true", help="short for --variant gradient")
    parser.add_argument("--fused", action="store_true", help="generated kernels, within tolerances")
    parser.add_argument("--half", action="store_true", help="the same in half types")
    parser.add_argument("--dtype", action="append", default=[], help="default float32")
    parser.add_argument("--full", action="store_true", help="every dtype, second gradients too")
    parser.add_argument("--sample", type=int, help="this sample only")
    parser.add_argument("--here", action="store_true", help="in this process: for a debugger")
    parser.add_argument("--by", choices=("op", "cause"), default="op")
    parser.add_argument("--all", action="store_true", help="excepted failures too")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--results", type=Path, help="a file for totals and failures, JSON lines")
    args = parser.parse_args()

    variants = args.variant or ([check.GRADIENT] if args.grad else None)
    if variants is None:
        variants = list(check.ALL_VARIANTS if args.full else check.VARIANTS)
    dtypes: list[torch.dtype] | None = [getattr(torch, d) for d in args.dtype or ["float32"]]
    if args.full and not args.dtype:
        dtypes = None
    env = None
    if args.half:
        variants, dtypes = [check.HALF], list(check.HALVES)
    elif args.fused:
        variants, dtypes = [check.FUSED], [torch.float32]
    if args.half or args.fused:
        env = helpers.child_env(ACC_DETERMINISTIC="1")  # no result before its kernels are there
    wanted = runner.requests(runner.SOURCE, variants, dtypes, args.op)
    if not wanted:
        parser.error("no operator of that name, variant and dtype")
    if args.here:
        _here(wanted, args.sample)
        return 0
    if args.sample is not None:
        for request in wanted:
            request["only"] = args.sample
    began = time.monotonic()
    settings = {"suite": "opinfo", "mode": helpers.extension().mode(), "torch": torch.__version__}
    head = report.header(settings, env or os.environ) if args.results else {}

    def show(done: int, of: int) -> None:
        if sys.stderr.isatty():
            print(f"\r{done}/{of} {time.monotonic() - began:.0f} s ", end="", file=sys.stderr)

    results = runner.run(wanted, jobs=args.jobs, env=env, progress=show)
    if args.results:
        lines = [head, *lines_of(results)]
        args.results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if args.json:
        json.dump([dataclasses.asdict(r) for r in results], sys.stdout, indent=1)
        print()
    else:
        print("\n".join((by_cause if args.by == "cause" else by_op)(results, args.all)))
        print("\n".join(summary(results)))
        print(f"{time.monotonic() - began:.0f} s on {helpers.DEVICE}")
    return int(any(not excepted(r, c) for r in results for _, c, _ in r.failures))


if __name__ == "__main__":
    sys.exit(main())
