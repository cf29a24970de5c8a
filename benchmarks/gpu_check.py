"""What only a machine with a GPU can tell, in parts that survive each other's failures.

    python benchmarks/gpu_check.py --out DIR [--only PART] [--dry-run]

Nothing but torch is assumed; what else is missing costs the parts that need it, whose rows then
say why. Packages may come along in a folder on PYTHONPATH, the two with CUDA's headers (`python
scripts/native.py cuda-wheels`), too. All parts without --only, and each part with it, take at most
nine minutes; without it each does what tells most, and what a part does not need of its time is for
those behind it. A part that is asked for is built for first, where there is no build with CUDA yet.

DIR gets table.txt (a line per finding; the end of the output has it in short, what is wrong first),
log.txt (all that was printed) and the JSON lines of benchmarks, in a file or two: callers may fetch
only a few. They hold the commit, or REVISION of the environment in a copy without git.
--dry-run does the same on the host executor, with as little work as shows that all parts work.
Exit status: 0 all is well, 1 a row is not.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import importlib.util
import json
import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:1] = [str(ROOT), str(ROOT / "scripts")]

import native  # noqa: E402  (they need the path, and no torch)
from benchmarks import load, report  # noqa: E402
from benchmarks.cases import CASES  # noqa: E402
from benchmarks.gpu_tests import (  # noqa: E402
    FEW_MARKED,
    FEW_MODELS,
    FEW_PROGRAMS,
    MARKED,
    MARKED_FIRST,
    MODELS,
    OPERATORS,
    TESTS,
)

PROBE, RANKS = "benchmarks/gpu_probe.py", "benchmarks/gpu_ranks.py"
LIMIT_S = 540.0
LEAST_S = 5.0  # no command is worth beginning with less
GRACE_S = 5.0  # what is over its limit may put its things away
HANGS_S = 45  # a test that takes longer ends its process, with a traceback in log.txt
PRINTED = 10_000  # characters of the table at the end: callers may see only the end of the output
# Steps so short that launching their operators one by one takes longer than what they do.
LAUNCH_BOUND = ("mlp_small", "resnet18_cifar", "gpt", "lstm")
COMPILED = ("mlp_small", "lstm", "resnet18_cifar", "gpt")
# What is measured where all cases share the time, until it is over: the result file, the case, the
# modes. No file has a mode of a case twice: what one run measured is no ratio to what another did.
# Of what is bound by launches torch.compile comes late, since it takes longer than all else, and
# first where it compiles least. The last is for its start: the operator would draw on the host
# (lazy/exec/kernels.h).
SHARING = (
    ("bench", "seed", "eager,compile,graph,acc"),
    *(("bench", case, "eager,graph,acc") for case in LAUNCH_BOUND),
    *(("bench-compile", case, "eager,compile") for case in COMPILED),
    ("bench", "gpt2_dropout", "eager,acc"),
)
# With less time no case begins: several processes have to start, one after the other, and where
# torch.compile is all that is new, it has to come to its end.
CASE_S, COMPILED_S = 20.0, 35.0
# Tools of compute-sanitizer, with their limits in seconds. The first finds the most.
SANITIZERS = {"memcheck": 180.0, "racecheck": 120.0, "initcheck": 120.0, "synccheck": 120.0}
# As little as shows that a case runs.
QUICK = ("--alternations", "1", "--window-s", "0.05")
OK, BAD, MISSED, NOT_RUN = "ok", "BAD", "missed", "not run"
# What tests/conftest.py says where a test has ended CUDA's context.
DEVICE_LOST = re.compile(r"stopping after (tests/.+), which lost the device")
# What pytest says where it or that has ended the tests.
STOPPED = re.compile(r"^!+ (xdist.+ )?stopping after ")
# What a test had already that was stopped: a failure, of a file that cannot be read as well.
FAILS = re.compile(r"\b(FAILED|ERROR)\b|^collect.* / \d+ error")
# What faulthandler says of a test that hangs; not all versions of pytest end it then.
HANGS = re.compile(r"\bTimeout \(\d+:\d\d:\d\d")
# What Python says of a package that is missing.
MISSING = re.compile(r"ModuleNotFoundError: No module named '(\w+)")
# torch's operator database needs no more of expecttest than that it is there.
EXPECTTEST = """import unittest

ACCEPT = False
TestCase = unittest.TestCase
"""


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
    """A run of the parts: where results go, what nobody keeps, until when the part may go on."""

    out: Path
    scratch: Path
    dry: bool
    deadline: float = 0.0
    brief: bool = False  # all parts share the time, and each does what tells most
    rows: list[Row] = field(default_factory=list)

    @property
    def executor(self) -> str:
        """Where acc's operators run."""
        return "host" if self.dry else "cuda"

    @property
    def left_s(self) -> float:
        """Seconds until the part has to end."""
        return self.deadline - time.monotonic()

    @functools.cached_property
    def environment(self) -> dict[str, str]:
        """What all commands get."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        if not installed("expecttest"):
            (self.scratch / "site").mkdir()
            (self.scratch / "site/expecttest.py").write_text(EXPECTTEST)
            paths.append(str(self.scratch / "site"))
        found = {
            **os.environ,
            "ACC_EXECUTOR": self.executor,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        }
        if not self.dry:
            found["ACC_CUDA"] = "1"  # a build for the host would tell nothing
        if not os.access(Path.home(), os.W_OK):
            found.setdefault("ACC_CACHE_DIR", str(self.scratch / "kernels"))
        return found

    def is_built(self) -> bool:
        """Whether this interpreter and its torch have a build; with CUDA, but for a dry run."""
        try:
            facts = runpy.run_path(str(ROOT / "torchacc_device/_build_info.py"))
            torch = native.find_torch()
        except (OSError, native.BuildError):
            return False
        made = facts.get("PYTHON_TAG"), facts.get("TORCH_VERSION")
        fits = made == (native.python_tag(), torch.version)
        return fits and (self.dry or facts.get("CUDA") is not None)

    def unbuilt(self) -> str:
        """Why nothing but a build can run; empty in a dry run, and with a build for CUDA."""
        if self.dry:
            return ""
        if any(row.part == "build" and row.status != OK for row in self.rows):
            return "no CUDA build: the part build says why"
        return "" if self.is_built() else "no CUDA build for this interpreter and its torch"

    def add(self, part: str, what: str, status: str, said: object) -> None:
        """Notes a finding, in the table on the disk too: an interrupted run leaves what it has."""
        self.rows.append(Row(part, what, status, str(said)))
        print(self.rows[-1], flush=True)
        (self.out / "table.txt").write_text("".join(f"{row}\n" for row in self.rows))

    def run(
        self, command: Sequence[str], limit_s: float, *, partial: bool = False, **env: str
    ) -> tuple[int | None, list[str]]:
        """Runs a command with its limit, or what is left of the part; status and output.

        The status is None when it was stopped; then whatever it had started is gone as well. Raises
        OutOfTime when that would be because the part has come to its end, and when it was, unless
        what it said so far is wanted (`partial`).
        """
        left_s = self.left_s
        if left_s < LEAST_S:
            raise OutOfTime
        # Into a file: what outlives the command may hold a pipe for ever.
        with (self.out / "log.txt").open("a+", errors="replace") as log:
            log.write(f"$ {' '.join(map(str, command))}\n")
            log.flush()
            begin = log.tell()
            child = subprocess.Popen(
                [str(word) for word in command],
                cwd=ROOT,
                env={**self.environment, **env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status: int | None = child.wait(timeout=min(limit_s, left_s))
            except subprocess.TimeoutExpired:
                status = None
            finally:  # an interrupt, too: the child has a session of its own and hears none
                if child.returncode is None:
                    end_tree(child)
            log.seek(begin)
            output = log.read()
            log.write(f"\nstatus {status}\n\n")
        if status is None and left_s < limit_s and not partial:
            raise OutOfTime
        return status, output.splitlines()

    def judge(
        self,
        part: str,
        what: str,
        command: Sequence[str],
        limit_s: float,
        *,
        late: str = BAD,
        **env: str,
    ) -> None:
        """A row for a command that says at its end what became of it. If it is over its limit, it
        is `late`: one that ends what hangs by itself has only been slow."""
        began = time.monotonic()
        status, lines = self.run(command, limit_s, **env)
        took = f"({time.monotonic() - began:.0f} s)"
        if status is None:
            self.add(part, what, late, f"stopped: {last_of(lines)} {took}")
        else:
            self.add_of(part, what, status == 0, f"{last_of(lines)} {took}", lines)

    def add_of(self, part: str, what: str, good: bool, said: str, lines: Iterable[str]) -> None:
        """A row of what a command said: a package that it misses is no fault of acc, nor a GPU that
        a tool cannot watch (compute-sanitizer, where a sandbox stands before the driver)."""
        lines = list(lines)
        missing = next(filter(None, map(missing_package, lines)), None)
        if missing and not good:
            self.add(part, what, NOT_RUN, f"{missing} is not installed")
        elif not good and any("Device not supported" in line for line in lines):
            self.add(part, what, NOT_RUN, "the tool says: Device not supported")
        else:
            self.add(part, what, OK if good else BAD, said)

    def probe(self, part: str, *arguments: str, limit_s: float = 90.0, script: str = PROBE) -> None:
        """Rows that a script prints, one JSON list of what, status and text per line."""
        words = [*arguments, "--small"] if self.dry else list(arguments)
        status, lines = self.run([sys.executable, script, *words], limit_s, partial=True)
        for line in lines:
            if line.startswith("ROW "):
                self.add(part, *json.loads(line[4:]))
        if status is None and self.left_s < LEAST_S:
            raise OutOfTime
        if status != 0:
            how = "stopped" if status is None else f"status {status}"
            what = " ".join(word for word in arguments if os.sep not in word)
            self.add_of(part, what, False, f"{how}: {last_of(lines)}", lines)


def end_tree(child: subprocess.Popen[bytes]) -> None:
    """Ends a process and all that it started, what has a session of its own as well."""
    members = load.tree_of(child.pid, load.process_table())  # its end leaves the others orphans
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
    deadline = time.monotonic() + GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
        members |= load.tree_of(child.pid, load.process_table())
    if child.returncode is not None:
        members.discard(child.pid)
    for pid in members:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE_S)  # not for ever: one that hangs in a driver does not end


def last_of(lines: Sequence[str]) -> str:
    """The last line that says something."""
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def installed(package: str) -> bool:
    """Whether this interpreter finds it."""
    return importlib.util.find_spec(package) is not None


def missing_package(line: str) -> str | None:
    """The package whose absence a line tells, unless it is there or our own."""
    found = MISSING.search(line)
    name = found and found[1]
    if not name or (ROOT / name).is_dir() or installed(name):
        return None
    return name


def tool_of(name: str) -> str | None:
    """A program where the build looks for it, or of an installed toolkit."""
    folders = [folder / "bin" for folder in native.toolkit_folders(dict(os.environ))]
    return native.find_tool(name) or next(
        (str(folder / name) for folder in folders if os.access(folder / name, os.X_OK)), None
    )


def part_env(check: Check) -> None:
    """The machine, its software, and what is missing."""
    revision = report.revision()
    said = revision or "neither git nor REVISION in the environment tells it"
    check.add("env", "revision", OK if revision else NOT_RUN, said)
    for tool in ("nvidia-smi", "g++", "cmake", "ninja", "compute-sanitizer"):
        path = tool_of(tool)
        check.add("env", tool, OK if path else NOT_RUN, path or "not installed")
    packages = ("numpy", "scipy", "torchvision", "triton", "pytest", "expecttest")
    absent = ", ".join(name for name in packages if not installed(name))
    said = f"not installed: {absent}" if absent else ", ".join(packages)
    check.add("env", "packages", NOT_RUN if absent else OK, said)
    smi = tool_of("nvidia-smi")
    if smi:
        fields = "name,driver_version,power.limit,clocks.sm,clocks.max.sm,clocks.mem"
        query = [smi, f"--query-gpu={fields}", "--format=csv"]
        status, lines = check.run(query, 10.0)
        said = "; ".join(lines) if status == 0 else last_of(lines)
        check.add("env", "driver, power, clocks", OK if status == 0 else NOT_RUN, said)
    check.probe("env", "env")


def part_build(check: Check) -> None:
    """The extension, for this interpreter and its torch.

    A dry run leaves one that is there as it is, which others may be using, and says what it would
    be made with.
    """
    verb = "info" if check.dry and check.is_built() else "develop"
    check.judge("build", "extension", [sys.executable, "scripts/native.py", verb], LIMIT_S)


def started(lines: Iterable[str]) -> tuple[str, bool, bool]:
    """The last test that pytest began, whether it ended as well, and whether it took too long."""
    test, ended, hung = "", True, False
    for line in lines:
        begun = re.match(r"tests/\S+\.py::\S+", line)
        if begun:
            test, ended, hung, line = begun[0], False, False, line[begun.end() :]
        hung = hung or HANGS.search(line) is not None
        if re.search(r"\b(PASSED|FAILED|SKIPPED|XFAIL|XPASS|ERROR)\b", line):
            ended = True
    return test, ended, hung


class Ended(NamedTuple):
    """How a process of tests ended: the test that it did not come past, if there is one, whether
    others of its file may run behind it, in another process, and whether any has passed."""

    test: str = ""
    goes_on: bool = False
    passed: bool = True


def pytest_once(
    check: Check,
    part: str,
    what: str,
    arguments: Sequence[str],
    limit_s: float,
    hangs_s: float,
    **env: str,
) -> Ended:
    """A row for tests, which need pytest, and how their process ended."""
    # Nothing of pyproject.toml's, which knows options of plugins that may be missing.
    options = ["-v", "--no-header", "-p", "no:cacheprovider", "--tb=short", "-o", "addopts=-rfE"]
    options += [
        "--continue-on-collection-errors",
        "--maxfail=40",
        "-o",
        f"faulthandler_timeout={hangs_s}",
    ]
    options += ["-o", "faulthandler_exit_on_timeout=true"]  # known to some versions
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    began = time.monotonic()
    env["COLUMNS"] = "200"  # for the reason behind a test's name
    status, lines = check.run(command, limit_s, partial=True, **env)
    seconds = time.monotonic() - began
    took = f"({seconds:.0f} s)"
    test, ended, hung = started(lines)
    hung = hung if test else seconds > hangs_s
    if status is None and not hung and not any(map(FAILS.search, lines)):  # only slow
        where = f"{'after' if ended else 'in'} {test}" if test else "before a test began"
        passed = sum("PASSED" in line for line in lines)
        check.add(part, what, NOT_RUN, f"the time was over {where}, {passed} passed {took}")
        return Ended(test)
    if not test:  # none of them could be collected, say
        check.add_of(part, what, status == 0, f"{last_of(lines).strip('= ')} {took}", lines)
        return Ended()
    if status is None or not ended:
        how = "stopped" if status is None else f"ended with status {status}"
        check.add(part, what, BAD, f"{how} {'after' if ended else 'in'} {test} {took}")
        return Ended(test)
    failed = [line for line in lines if line.startswith(("FAILED ", "ERROR tests"))]
    names = [line.split(" - ")[0] for line in failed[1:5]]
    said = "; ".join([f"{last_of(lines).strip('= ')} {took}", *failed[:1], *names])
    said = said if status in (0, 1) else f"status {status}: {said}"
    check.add(part, what, OK if status == 0 else BAD, said)
    stopped = [line for line in lines if STOPPED.search(line)]
    lost = next(filter(None, map(DEVICE_LOST.search, stopped)), None)
    passed = re.search(r"\b\d+ passed\b", said) is not None
    if lost:
        return Ended(lost[1], True, passed)
    return Ended(test, False, passed) if stopped else Ended()


def pytest_of(
    check: Check,
    part: str,
    what: str,
    files: Sequence[str],
    limit_s: float,
    *chosen: str,
    needs: Sequence[str] = (),
    hangs_s: float = HANGS_S,
    **env: str,
) -> None:
    """Rows for files of tests, which one process takes: each start costs seconds.

    A test that ends its process, or takes longer than `hangs_s`, costs the rest of its file: the
    files after it get another process. After one that loses the device the rest of its file does,
    too, since CUDA refuses the first process everything. Two processes in a row in which many
    tests fail, or one has lost the device, and none passes are the last.
    """
    absent = next((name for name in ("pytest", *needs) if not installed(name)), None)
    if absent:
        check.add(part, what, NOT_RUN, f"{absent} is not installed")
        return
    left = []
    for file in files:
        lacking = sorted({name for name in imported(ROOT / file) if not installed(name)})
        if lacking:
            check.add(part, Path(file).stem, NOT_RUN, f"{', '.join(lacking)} is not installed")
        else:
            left.append(file)
    until = time.monotonic() + limit_s
    hangs_s = min(hangs_s, 0.75 * limit_s)  # or the group's time would be over before
    words = list(chosen)
    in_vain = 0
    while left:
        test, goes_on, passed = pytest_once(
            check, part, what, [*left, *words], until - time.monotonic(), hangs_s, **env
        )
        in_vain = 0 if passed else in_vain + 1
        file = test.partition("::")[0]
        words = [*chosen, "--after", test] if goes_on else list(chosen)
        if file in left:
            left = left[left.index(file) + (0 if goes_on else 1) :]
        elif not goes_on:
            left = []
        names = ", ".join(Path(name).stem for name in left)
        if left and in_vain == 2:
            check.add(part, what, NOT_RUN, f"no test passes; {names} were not tried")
            return
        if left and (until - time.monotonic() < LEAST_S or check.left_s < LEAST_S):
            check.add(part, what, NOT_RUN, f"no time was left for {names}")
            return


def imported(file: Path) -> set[str]:
    """The packages that a test file imports before its tests run; without expecttest's, which is
    stood in for."""
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body if file.is_file() else ():
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names} - {"expecttest"}


def marked() -> list[str]:
    """The files with tests that need a GPU: to collect all the others takes longer."""
    texts = {file: file.read_text() for file in sorted((ROOT / "tests/python").glob("test_*.py"))}
    found = [file for file, text in texts.items() if f"pytest.mark.{MARKED}" in text]
    found.sort(key=lambda file: file.stem != MARKED_FIRST)
    return [str(file.relative_to(ROOT)) for file in found]


def part_tests(check: Check) -> None:
    """Tests that need a GPU, operators, whole programs, models, captured programs in `nofuse`; with
    what is left of the time those of what else differs between executors.

    Each group has a limit of its own; where all parts share the time, a small one, for what a few
    programs and models tell.
    """
    brief = check.brief and not check.dry
    limits = (45.0, 30.0, 25.0, 25.0, 20.0) if brief else (100.0, 60.0, 120.0, 90.0, 60.0)
    marked_s, operators_s, programs_s, models_s, nofuse_s = limits
    if not check.dry:
        words = ["-m", MARKED, *(["-k", FEW_MARKED] if brief else [])]
        pytest_of(check, "tests", f"marked {MARKED}", marked(), marked_s, *words)
    names = OPERATORS[:2] if check.dry else OPERATORS
    words = [word for name in names for word in ("--op", name)]
    what = f"{len(names)} operators"
    if installed("numpy"):
        survey = [sys.executable, "tests/opinfo/survey.py", "--jobs", "2" if check.dry else "4"]
        check.judge("tests", what, [*survey, *words], operators_s, late=NOT_RUN)
    else:
        check.add("tests", what, NOT_RUN, "numpy is not installed")
    if not check.dry:  # they are stages of `make test`, in every way
        words = ["-k", FEW_PROGRAMS if brief else "not emulated"]
        pytest_of(check, "tests", "programs", ["tests/programs"], programs_s, *words, hangs_s=120)
        words = ["-k", FEW_MODELS] if brief else []
        pytest_of(check, "tests", "models", MODELS, models_s, *words, needs=["torchvision"])
    env = {"ACC_MODE": "nofuse", **({"ACC_HOST_GRAPHS": "1"} if check.dry else {})}
    captured = ["tests/python/test_captured_plans.py"]
    pytest_of(check, "tests", "captured, nofuse", captured, nofuse_s, **env)
    names = TESTS[:1] if check.dry else TESTS
    words = ["-k", "state_carried"] if check.dry else []
    files = [f"tests/python/{name}.py" for name in names]
    pytest_of(check, "tests", "of the executor", files, LIMIT_S, *words)


def part_opinfo(check: Check) -> None:
    """Every operator against PyTorch's own samples."""
    name = "test_harness" if check.dry else "test_opinfo"
    jobs = os.environ.get("ACC_TEST_JOBS") or str(min(8, len(os.sched_getaffinity(0))))
    files, env = [f"tests/opinfo/{name}.py"], {"ACC_TEST_JOBS": "1" if check.dry else jobs}
    # the first test waits for all of the database
    pytest_of(check, "opinfo", name, files, 500, needs=["numpy"], hangs_s=500, **env)


def part_numerics(check: Check) -> None:
    """Gradients and 20 steps of training beside eager's in another process; see Tolerance in
    cases.py. And what NVIDIA does not say of its epilogues.

    The 20 steps are those with which the part bench begins, where there is one.
    """
    check.probe("numerics", "epilogues")
    cases = ["gpt", "mlp_small", "resnet18_cifar", "lstm", "block"]
    for case in cases[1:2] if check.dry else cases[:1] if check.brief else cases:
        with tempfile.TemporaryDirectory() as folder:
            for where in ("cpu" if check.dry else "cuda", "acc"):
                check.probe("numerics", "gradients", case, where, f"{folder}/gradients.pt")
        if not check.brief:
            bench(check, "numerics", case, "eager,acc", QUICK)


def bench(
    check: Check,
    part: str,
    case: str,
    modes: str,
    more: Sequence[str],
    limit_s: float = 150.0,
) -> None:
    """A row for a benchmark case: a wrong result is bad, a missed requirement is one to look at.

    It holds the lines of run.py's table (mode, variant, threads, windows, milliseconds, ratios) and
    what was judged. run.py ends by itself before its limit, with what it has.
    """
    suite = "host" if check.dry else "gpu"
    command = [sys.executable, "benchmarks/run.py", "--suite", suite, "--case", case]
    left_s = min(limit_s, check.left_s)
    command += ["--modes", modes, *more, "--limit-s", str(max(1.0, left_s - 2 * GRACE_S))]
    began = time.monotonic()
    status, lines = check.run(command, limit_s, partial=True)
    wrong = [line for line in lines if line.startswith("FAILED: ")]
    rows = [line.split() for line in lines[: lines.index("") if "" in lines else None]]
    said = [" ".join(words[1:]) for words in rows if words[:1] == [case] and len(words) > 4]
    said += [line for line in lines if line.startswith("must ")]
    text = (wrong or lines or ["no output"])[-1] if wrong or not said else "; ".join(said)
    over = status is None and check.left_s < LEAST_S
    if status is None and not over:
        text = (
            f"stopped at its limit of {limit_s:.0f} s, being slow or in a mode that hangs: {text}"
        )
    # 3: foreign load, 4: a requirement was missed
    good = status in (0, 3, 4) and not wrong
    if status == 3:
        text += "; foreign load: no evidence"
    text += f" ({time.monotonic() - began:.0f} s)"
    if status == 4 and good:
        check.add(part, case, MISSED, text)
    elif over and not wrong:
        check.add(part, case, NOT_RUN, f"to the end, the time was over: {text}")
    else:
        check.add_of(part, case, good, text, lines)
    if over:
        raise OutOfTime


def part_steps(check: Check) -> None:
    """How steps ran: submissions of captured work, what was left out of it and why, idle time, and
    whether batches wait for the steps before.

    By itself of cases with many parameters, too: the time of a replay grows with its buffers.
    """
    check.probe("steps", "copies")
    cases = ["mlp_small", "resnet18_cifar", "gpt", "resnet50_16", "gpt2_4"]
    for case in cases[:1] if check.dry or check.brief else cases:
        check.probe("steps", "steps", case, limit_s=180)
        for device in ("acc",) if check.dry else () if check.brief else ("cuda", "acc"):
            check.probe("steps", "trace", case, device)


def part_kernels(check: Check) -> None:
    """Bandwidth of generated kernels against that of a copy."""
    for what in ("kernels",) if check.brief else ("kernels", "norms"):
        check.probe("kernels", what, limit_s=180)


def part_record(check: Check) -> None:
    """What operators cost the host: recorded, looked up, replayed, and their memory."""
    check.probe("record", "record")


def part_bench(check: Check, case: str = "") -> None:
    """Speed against eager, torch.compile and a CUDA graph captured by hand.

    `launch` names those of LAUNCH_BOUND, which are compared without the modes of torch.compile that
    compile for minutes. What is measured of a case of its own may be claimed.
    """
    more, limit_s = ["--alternations", "9", "--window-s", "0.5"], LIMIT_S
    if check.dry:
        only = case if case in CASES else "mlp_small"
        runs, more = [(case or "bench", only, "eager,acc")], [*QUICK]
    elif not case:
        runs, limit_s = [*SHARING], 130.0 if check.brief else 150.0
        more = ["--alternations", "3", "--window-s", "0.2", "--compile-forms", "model"]
        more += ["--no-warm-start"] if check.brief else []
    elif case == "launch":
        runs = [(case, name, "eager,compile,graph,acc,capture") for name in LAUNCH_BOUND]
        more, limit_s = [*more, "--compile-forms", "model"], LIMIT_S / len(runs)
    else:
        runs = [(case, case, "eager,eager_tuned,compile,graph,acc,capture")]
        more += ["--compile-timeout-s", "150"]
    for file in {file for file, *_ in runs}:  # an earlier call's
        (check.out / f"{file}.jsonl").unlink(missing_ok=True)
    for file, name, modes in runs:
        if check.left_s < (COMPILED_S if modes == "eager,compile" else CASE_S):
            raise OutOfTime
        options = [*more, "--json", str(check.out / f"{file}.jsonl"), "--append"]
        bench(check, "bench", name, modes, options, limit_s)


def part_ranks(check: Check) -> None:
    """Collectives in captured work, of a process group with one process, and between its pieces."""
    for way in ("ddp", "between") if check.brief else ("ddp", "between", "fsdp", "shards"):
        check.probe("ranks", way, script=RANKS)


def part_sanitizer(check: Check) -> None:
    """What NVIDIA's tool sees in the steps of a small network: bytes out of bounds, races in shared
    memory, bytes that nobody wrote, threads that miss a barrier."""
    tool = tool_of("compute-sanitizer")
    for what, limit_s in SANITIZERS.items():
        if tool is None or check.dry:
            said = "no GPU in a dry run" if tool else "compute-sanitizer is not installed"
            check.add("sanitizer", what, NOT_RUN, said)
            continue
        # Of generated kernels (codegen's key_of_text names them; the option is --kernel-name from
        # release 2023.3 on) and of this process alone: its compilers are others, and what ATen's
        # kernels do takes hours to watch.
        command = [tool, "--tool", what, "--error-exitcode", "9", "--kernel-name", "kns=acc_"]
        command += ["--target-processes", "application-only"]
        command += [sys.executable, PROBE, "steps", "mlp_small", "--small"]
        # A block for each tensor: within a cached one nothing is out of bounds, nor unwritten.
        # Captured work has a pool of its own, so there none may be.
        alone = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "ACC_MODE": "nograph"}
        env = alone if what in ("memcheck", "initcheck") else {}
        check.judge("sanitizer", what, command, limit_s, **env)


# In the order of a run without --only, with what they may take of its time; those with nothing are
# no parts of it. Whether it works comes first, then how fast it is; tests can use all that is left
# and come last. docs/gpu.md says how long each is thought to take.
PARTS: dict[str, tuple[float, Callable[[Check], None]]] = {
    "env": (15, part_env),
    "build": (85, part_build),
    "steps": (28, part_steps),
    "numerics": (35, part_numerics),
    "bench": (228, part_bench),
    "kernels": (26, part_kernels),
    "ranks": (25, part_ranks),
    "tests": (98, part_tests),
    "record": (0, part_record),
    "opinfo": (0, part_opinfo),
    "sanitizer": (0, part_sanitizer),
}


def run_parts(check: Check, name: str, case: str) -> None:
    """One part, or those of a whole run, each until its share of the time is over."""
    until = time.monotonic()
    end = until + LIMIT_S
    check.brief = not name
    for part, (share_s, run) in PARTS.items():
        if not (part == name or (not name and share_s)):
            continue
        # A build takes what it takes: nothing runs without. Then the last parts have less.
        until = min(max(until, time.monotonic()) + share_s, end)
        check.deadline = end if name or part == "build" else until
        if case:
            run = functools.partial(part_bench, case=case)
        try:
            if part not in ("env", "build"):
                if name and check.unbuilt():
                    part_build(check)
                why = check.unbuilt()
                if why:
                    check.add(part, part, NOT_RUN, why)
                    continue
            run(check)
        except OutOfTime:
            check.add(part, "the rest of it", NOT_RUN, "its share of the time was over")
        except Exception as error:  # the other parts have something to tell all the same
            check.add(part, part, BAD, f"{type(error).__name__}: {error}")


def in_short(rows: Sequence[Row]) -> str:
    """The table in PRINTED characters: what is wrong or missed first, long lines cut."""
    order = {BAD: 0, MISSED: 1}
    lines: list[str] = []
    left = PRINTED
    for row in sorted(rows, key=lambda row: order.get(row.status, 2)):
        line = str(row) if len(str(row)) <= 500 else f"{str(row)[:500]}..."
        left -= len(line) + 1
        if left < 100:  # for the last line
            lines.append(f"{len(rows) - len(lines)} more rows in table.txt")
            break
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


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
    with tempfile.TemporaryDirectory(prefix="acc-gpu-check-") as scratch:
        check = Check(options.out.resolve(), Path(scratch), options.dry_run)
        run_parts(check, name, case)
    print("\n" + in_short(check.rows), end="")
    return 1 if any(row.status == BAD for row in check.rows) else 0


if __name__ == "__main__":
    sys.exit(main())
