"""What only a machine with a GPU can tell, in parts that survive each other's failures.

    python benchmarks/gpu_check.py --out DIR [--only PART] [--dry-run]

Nothing but torch is assumed; what else is missing costs the parts that need it, whose rows then
say why. All parts without --only, and each part with it, take at most nine minutes; what a part
does not need of its time is for those behind it. DIR gets table.txt (a line per finding, printed at
the end, too), log.txt (all that was printed) and the JSON lines of benchmarks.
--dry-run does the same on the host executor, with as little work as shows that all parts work.
Exit status: 0 all is well, 1 a row is not.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)

from benchmarks.cases import CASES  # noqa: E402  (needs the path, and no torch)

PROBE, RANKS = "benchmarks/gpu_probe.py", "benchmarks/gpu_ranks.py"
LIMIT_S = 540.0
LEAST_S = 5.0  # no command is worth beginning with less
# Tests that only a GPU can pass, wherever they stand, are marked so.
MARKED = "gpu"
# Tests of what differs between executors: memory, streams, captured plans, kernels, numbers.
TESTS = (
    "test_captured_plans",
    "test_captured_loops",
    "test_report",
    "test_drawing_kernels",
    "test_reductions_in_parts",
    "test_epilogues",
    "test_fusion",
    "test_reductions",
    "test_rows",
    "test_copies",
    "test_device",
    "test_event",
    "test_stream",
    "test_generator",
    "test_random",
    "test_memory_api",
    "test_custom_ops",
    "test_fork",
)
# A few operators of each kind: the part opinfo takes all.
OPERATORS = (
    "add",
    "mul",
    "div",
    "where",
    "exp",
    "sum",
    "var",
    "cumsum",
    "sort",
    "index_put",
    "scatter_add",
    "addmm",
    "bmm",
    "softmax",
    "nn.functional.conv2d",
    "nn.functional.batch_norm",
    "nn.functional.layer_norm",
    "nn.functional.embedding",
    "nn.functional.cross_entropy",
    "nn.functional.scaled_dot_product_attention",
)
# Steps so short that launching their operators one by one takes longer than what they do.
LAUNCH_BOUND = ("mlp_small", "resnet18_cifar", "gpt", "lstm")
# Tools of compute-sanitizer, with their limits in seconds. The first finds the most.
SANITIZERS = {"memcheck": 180.0, "racecheck": 120.0, "initcheck": 120.0, "synccheck": 120.0}
OK, BAD, NOT_RUN = "ok", "BAD", "not run"


class OutOfTime(Exception):
    """The time of the whole run is over."""


@dataclass
class Row:
    """One finding."""

    part: str
    what: str
    status: str
    said: str

    def __str__(self) -> str:
        return f"{self.part:12} {self.status:8} {self.what:28} {self.said}"


@dataclass
class Check:
    """A run of the parts: where results go, and until when the part may go on."""

    out: Path
    dry: bool
    deadline: float
    rows: list[Row] = field(default_factory=list)

    @property
    def executor(self) -> str:
        """Where acc's operators run."""
        return "host" if self.dry else "cuda"

    def add(self, part: str, what: str, status: str, said: object) -> None:
        """Notes a finding, in the table on the disk too: an interrupted run leaves what it has."""
        self.rows.append(Row(part, what, status, str(said)))
        print(self.rows[-1], flush=True)
        (self.out / "table.txt").write_text("".join(f"{row}\n" for row in self.rows))

    def run(
        self, command: Sequence[str], limit_s: float, **env: str
    ) -> tuple[int | None, list[str]]:
        """Runs a command with its limit, or what is left of the part; status and output.

        The status is None when it was stopped; then whatever it had started is gone as well. Raises
        OutOfTime when that was, or would be, because the part has come to its end.
        """
        left_s = self.deadline - time.monotonic()
        if left_s < LEAST_S:
            raise OutOfTime
        environment = {
            **os.environ,
            "ACC_EXECUTOR": self.executor,
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
            **env,
        }
        child = subprocess.Popen(
            [str(word) for word in command],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = child.communicate(timeout=min(limit_s, left_s))
            status: int | None = child.returncode
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            output, _ = child.communicate()
            status = None
        with (self.out / "log.txt").open("a") as log:
            log.write(f"$ {' '.join(map(str, command))}\n{output}\nstatus {status}\n\n")
        if status is None and left_s < limit_s:
            raise OutOfTime
        return status, output.splitlines()

    def judge(
        self, part: str, what: str, command: Sequence[str], limit_s: float, **env: str
    ) -> None:
        """A row for a command that says at its end what became of it."""
        began = time.monotonic()
        status, lines = self.run(command, limit_s, **env)
        seconds = time.monotonic() - began
        last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
        said = f"stopped after {seconds:.0f} s: {last}" if status is None else last
        self.add(part, what, OK if status == 0 else BAD, f"{said} ({seconds:.0f} s)")

    def probe(self, part: str, *arguments: str, limit_s: float = 90.0, script: str = PROBE) -> None:
        """Rows that a script prints, one JSON list of what, status and text per line."""
        words = [*arguments, "--small"] if self.dry else list(arguments)
        status, lines = self.run([sys.executable, script, *words], limit_s)
        for line in lines:
            if line.startswith("ROW "):
                self.add(part, *json.loads(line[4:]))
        if status != 0:
            last = next((line.strip() for line in reversed(lines) if line.strip()), "no output")
            how = "stopped" if status is None else f"status {status}"
            self.add(part, " ".join(arguments), BAD, f"{how}: {last}")


def part_env(check: Check) -> None:
    """The machine, its software, and what is missing."""
    for tool in ("nvidia-smi", "g++", "cmake", "ninja", "compute-sanitizer"):
        path = shutil.which(tool)
        check.add("env", tool, OK if path else NOT_RUN, path or "not installed")
    check.probe("env", "env")


def part_build(check: Check) -> None:
    """The extension, for this interpreter and its torch."""
    check.judge("build", "extension", [sys.executable, "scripts/native.py", "develop"], LIMIT_S)


def pytest_of(
    check: Check, part: str, what: str, arguments: Sequence[str], limit_s: float, **env: str
) -> None:
    """A row for tests, which need pytest."""
    if importlib.util.find_spec("pytest") is None:
        check.add(part, what, NOT_RUN, "pytest is not installed")
        return
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "--tb=short", "--maxfail=40"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    check.judge(part, what, command, limit_s, **env)


def part_tests(check: Check) -> None:
    """Tests that need a GPU, those of what differs between executors, and whole programs."""
    if not check.dry:
        pytest_of(check, "tests", f"marked {MARKED}", ["tests/python", "-m", MARKED], 90)
    names = TESTS[:1] if check.dry else TESTS
    for name in names:
        chosen = ["-k", "state_carried"] if check.dry else []
        pytest_of(check, "tests", name, [f"tests/python/{name}.py", *chosen], 60)
    captured = ["tests/python/test_captured_plans.py", "-k"]
    captured.append("values_are_those and schedule" if check.dry else "values_are_those")
    host = {"ACC_HOST_GRAPHS": "1"} if check.dry else {}
    pytest_of(check, "tests", "captured, nofuse", captured, 60, ACC_MODE="nofuse", **host)
    if not check.dry:  # they are stages of `make test`, in every way
        pytest_of(check, "tests", "programs", ["tests/programs", "-k", "not emulated"], 120)
        models = ["tests/models/test_fused.py", "tests/models/test_plans.py"]
        pytest_of(check, "tests", "models", models, 90)
    names = OPERATORS[:2] if check.dry else OPERATORS
    chosen = [word for name in names for word in ("--op", name)]
    survey = [sys.executable, "tests/opinfo/survey.py", *chosen]
    check.judge("tests", f"{len(names)} operators", survey, 60)


def part_opinfo(check: Check) -> None:
    """Every operator against PyTorch's own samples."""
    name = "test_harness" if check.dry else "test_opinfo"
    pytest_of(check, "opinfo", name, [f"tests/opinfo/{name}.py"], 500)


def part_numerics(check: Check) -> None:
    """Gradients and 20 steps of training beside eager's in another process; see Tolerance in
    cases.py. And what NVIDIA does not say of its epilogues."""
    cases = ["mlp_small"] if check.dry else ["mlp_small", "gpt", "resnet18_cifar", "lstm", "block"]
    for case in cases:
        with tempfile.TemporaryDirectory() as folder:
            for where in ("cpu" if check.dry else "cuda", "acc"):
                check.probe("numerics", "gradients", case, where, f"{folder}/gradients.pt")
        quick = ["--alternations", "1", "--window-s", "0.05"]
        bench(check, "numerics", case, "eager,acc", quick)
    check.probe("numerics", "epilogues")


def bench(
    check: Check,
    part: str,
    case: str,
    modes: str,
    more: Sequence[str],
    limit_s: float = 150.0,
) -> None:
    """A row for a benchmark case: a wrong result is bad, a missed requirement is not.

    It holds the lines of run.py's table: mode, variant, threads, windows, milliseconds, ratios.
    """
    suite = "host" if check.dry else "gpu"
    command = [sys.executable, "benchmarks/run.py", "--suite", suite, "--case", case]
    command += ["--modes", modes, *more]
    began = time.monotonic()
    status, lines = check.run(command, limit_s)
    wrong = [line for line in lines if line.startswith("FAILED: ")]
    rows = [line.split() for line in lines[: lines.index("") if "" in lines else None]]
    said = [" ".join(words[1:]) for words in rows if words[:1] == [case] and len(words) > 4]
    text = (wrong or lines or ["no output"])[-1] if wrong or not said else "; ".join(said)
    # 3: foreign load, 4: a requirement was missed
    good = status in (0, 3, 4) and not wrong
    if status == 3:
        text += "; foreign load: no evidence"
    check.add(part, case, OK if good else BAD, f"{text} ({time.monotonic() - began:.0f} s)")


def part_steps(check: Check) -> None:
    """How steps ran: submissions of captured work, what was left out of it and why, idle time, and
    whether batches wait for the steps before."""
    for case in ["mlp_small"] if check.dry else ["mlp_small", "resnet18_cifar", "gpt"]:
        check.probe("steps", "steps", case)
        for device in ("acc",) if check.dry else ("cuda", "acc"):
            check.probe("steps", "trace", case, device)
    check.probe("steps", "copies")


def part_kernels(check: Check) -> None:
    """Bandwidth of generated kernels against that of a copy."""
    check.probe("kernels", "kernels", limit_s=180)


def part_bench(check: Check, case: str = "") -> None:
    """Speed against eager, torch.compile and a CUDA graph captured by hand.

    `launch` names those of LAUNCH_BOUND, which are compared without the modes of torch.compile that
    compile for minutes. What is measured of a case of its own may be claimed.
    """
    names = LAUNCH_BOUND if case == "launch" else [case] if case else ["seed", *LAUNCH_BOUND]
    modes = "eager,compile,graph,acc,capture"
    more = ["--alternations", "3", "--window-s", "0.2", "--compile-forms", "model"]
    limit_s = 60.0
    if case:
        more = ["--alternations", "9", "--window-s", "0.5"]
        more += ["--compile-forms", "model"] if case == "launch" else ["--compile-timeout-s", "150"]
        limit_s = LIMIT_S / len(names)
    if case and case != "launch":
        modes = "eager,eager_tuned,compile,graph,acc,capture"
    if check.dry:
        names = [case] if case in CASES else ["mlp_small"]
        modes, more = "eager,acc", ["--alternations", "1", "--window-s", "0.05"]
    for name in names:
        file = ["--json", str(check.out / f"{name}.jsonl")]
        bench(check, "bench", name, modes, [*more, *file], limit_s)


def part_ranks(check: Check) -> None:
    """Collectives in captured work, of a process group with one process, and between its pieces."""
    for way in ("ddp", "between", "fsdp", "shards"):
        check.probe("ranks", way, script=RANKS)


def part_sanitizer(check: Check) -> None:
    """What NVIDIA's tool sees in the steps of a small network: bytes out of bounds, races in shared
    memory, bytes that nobody wrote, threads that miss a barrier."""
    tool = shutil.which("compute-sanitizer")
    for what, limit_s in SANITIZERS.items():
        if tool is None or check.dry:
            said = "no GPU in a dry run" if tool else "compute-sanitizer is not installed"
            check.add("sanitizer", what, NOT_RUN, said)
            continue
        command = [tool, "--tool", what, "--error-exitcode", "9"]
        command += [sys.executable, PROBE, "steps", "mlp_small", "--small"]
        check.judge("sanitizer", what, command, limit_s)


# In the order of a run without --only, with what they may take of its time; those with nothing are
# no parts of it.
PARTS: dict[str, tuple[float, Callable[[Check], None]]] = {
    "env": (15, part_env),
    "build": (110, part_build),
    "steps": (70, part_steps),
    "numerics": (75, part_numerics),
    "kernels": (30, part_kernels),
    "tests": (120, part_tests),
    "ranks": (20, part_ranks),
    "bench": (100, part_bench),
    "opinfo": (0, part_opinfo),
    "sanitizer": (0, part_sanitizer),
}


def run_parts(check: Check, name: str, case: str) -> None:
    """One part, or those of a whole run, each until its share of the time is over."""
    until = time.monotonic()
    for part, (share_s, run) in PARTS.items():
        if not (part == name or (not name and share_s)):
            continue
        until += LIMIT_S if name else share_s
        check.deadline = until
        if case:
            run = functools.partial(part_bench, case=case)
        try:
            run(check)
        except OutOfTime:
            check.add(part, "the rest of it", NOT_RUN, "its share of the time was over")
        except Exception as error:  # the other parts have something to tell all the same
            check.add(part, part, BAD, f"{type(error).__name__}: {error}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser("benchmarks/gpu_check.sh", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", metavar="PART", help=f"{', '.join(PARTS)} or bench:CASE")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    name, _, case = (options.only or "").partition(":")
    if name and (name not in PARTS or (case and name != "bench")):
        parser.error(f"--only {options.only}: the parts are {', '.join(PARTS)} and bench:CASE")
    if case and case not in (*CASES, "launch"):
        parser.error(f"--only {options.only}: the cases are launch, {', '.join(CASES)}")
    options.out.mkdir(parents=True, exist_ok=True)
    check = Check(options.out.resolve(), options.dry_run, 0.0)
    run_parts(check, name, case)
    print("\n" + (check.out / "table.txt").read_text(), end="")
    return 1 if any(row.status == BAD for row in check.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
