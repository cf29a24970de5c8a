"""Runs every test, the quick ones first, and stops at the first stage that fails.

    run_tests.py [--full] [--keep-going] [--mode MODE ...] [--set-up PYTHON] [STAGE ...]

Each stage is a process of its own and prints its runner's own closing lines; after it comes how
long it took, and how much of that time the cores were busy. A stage that leaves a core idle for
most of its time runs beside another such (`BESIDE`) and prints what it has to say behind it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import native

ROOT = native.ROOT
sys.path.insert(0, str(ROOT))

from benchmarks import gpu_check  # noqa: E402  (it needs the path, and no torch)

# Processes that share a stage: one per core, as far as each has memory for the largest test.
LARGEST_TEST = 6 << 30  # bytes
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
PROCESSES = max(1, min(len(os.sched_getaffinity(0)), MEMORY // LARGEST_TEST, 4))


# glibc gives large blocks back when they are freed and takes them, page by page, when the next are
# needed: half the time of a step of a large model on the CPU.
KEPT_HEAP = ":".join(f"glibc.malloc.{name}_threshold={LARGEST_TEST}" for name in ("mmap", "trim"))


# Where setup.sh puts the packages of others that are tested with the device.
ECOSYSTEM = str(ROOT / ".venv" / "ecosystem")

# Beside another stage: what waits for others there, or for a time to pass, gets a core at once.
GIVING_WAY = ("nice", "-n", "19")

# What runs a stage in an environment, and writes to where this process does; or beside another
# stage, to which it gives way, and writes to the given file.
Stage = Callable[[dict[str, str], IO[str] | None], int]


def pytest(
    *arguments: str,
    share: str = "",
    heap: str = "",
    packages: str = "",
    variables: Mapping[str, str] | None = None,
    full: Sequence[str] = (),
) -> Stage:
    """A stage that runs pytest; no test collected is a failure.

    `share`: how several processes share it, by tests ("load"; "worksteal" where some are long, so
    that one process does not end long before another), by files ("loadfile") or by groups that
    tests name ("loadgroup"). `heap`: what glibc is told of it. `packages`: a prefix beside the
    interpreter's own with more of them. `variables`: of the environment. `full`: arguments where
    everything is to run.
    """

    def run(environ: dict[str, str], output: IO[str] | None) -> int:
        more = () if environ.get("ACC_TEST_FULL", "0") in ("", "0") else full
        command = [sys.executable, "-m", "pytest", "-q", *arguments, *more]
        environ = {**environ, **(variables or {})}
        if share:
            command += ["-n", str(PROCESSES), "--dist", share]
            # Each process has a thread per core. One that waits for another must not spin where
            # that one could run: it is half of the time of the documents' scripts.
            environ = {"OMP_WAIT_POLICY": "passive", **environ}
        if heap:
            heaps = filter(None, (environ.get("GLIBC_TUNABLES"), heap))
            environ = {**environ, "GLIBC_TUNABLES": ":".join(heaps)}
        if packages:
            where = {"base": packages, "platbase": packages}
            folders = [sysconfig.get_path(kind, vars=where) for kind in ("purelib", "platlib")]
            paths = filter(None, (*dict.fromkeys(folders), environ.get("PYTHONPATH")))
            environ = {**environ, "PYTHONPATH": os.pathsep.join(paths)}
        if output is not None:
            command = [*GIVING_WAY, *command]
        return subprocess.run(
            command, cwd=ROOT, env=environ, stdout=output, stderr=output
        ).returncode

    return run


def ctest(sanitizer: str) -> Stage:
    """A stage that builds and runs tests/cpp, under a sanitizer or none.

    Where not everything is to run, what runs under the address sanitizer runs only there.
    """

    def run(environ: dict[str, str], output: IO[str] | None) -> int:
        command = [sys.executable, str(ROOT / "scripts/native.py"), "ctest"]
        if sanitizer:
            command += ["--sanitizer", sanitizer]
        if environ.get("ACC_TEST_FULL", "0") in ("", "0"):
            command.append("--once")
        return subprocess.run(
            [*(GIVING_WAY if output is not None else ()), *command],
            cwd=ROOT,
            env=environ,
            stdout=output,
            stderr=output,
        ).returncode

    return run


# What gpu_check.py runs, and stage `python` on the emulator of GPUs.
EMULATED_ANYWAY = (
    "test_captured_plans",
    "test_captured_loops",
    "test_drawing_kernels",
    "test_drawing_plans",
    "test_reductions_in_parts",
    "test_epilogues",
)

# In this order: what breaks most often and says so soonest comes first.
STAGES: dict[str, Stage] = {
    "layout": pytest("tests/python/test_layout.py", "tests/python/test_packaging.py"),
    "cpp": ctest(""),
    "cpp-address": ctest("address"),
    "cpp-thread": ctest("thread"),
    "threads": pytest("tests/threads", share="load"),
    "programs": pytest("tests/programs", share="loadgroup"),
    "python": pytest(
        "tests/python",
        "--ignore=tests/python/test_layout.py",
        "--ignore=tests/python/test_packaging.py",
        "--no-loadscope-reorder",  # the files with most tests are not those that take longest
        share="loadfile",
    ),
    "fuzz": pytest("tests/fuzz", share="loadgroup"),
    "models": pytest("tests/models", "--ignore=tests/models/test_vision.py", share="worksteal"),
    "torchvision": pytest("tests/models/test_vision.py", share="worksteal", heap=KEPT_HEAP),
    "seeds": pytest("tests/seeds", share="loadfile"),
    "distributed": pytest("tests/distributed", share="loadgroup"),
    "opinfo": pytest("tests/opinfo", share="loadfile"),
    # As on a GPU: plans are captured, with its kernels, which tests/cuda_emulator runs.
    "emulated": pytest(
        *(f"tests/python/{name}.py" for name in gpu_check.TESTS if name not in EMULATED_ANYWAY),
        share="loadfile",
        variables={"ACC_TEST_EMULATOR": "1", "ACC_HOST_GRAPHS": "1"},
        full=[*(f"tests/python/{name}.py" for name in EMULATED_ANYWAY), *gpu_check.MODELS],
    ),
    "ecosystem": pytest("tests/ecosystem", share="loadfile", packages=ECOSYSTEM),
    "gpu_kernels": pytest("tests/gpu_kernels", share="worksteal"),
}
# Stages that run beside a later one, where that runs too. What they hold may not depend on time.
BESIDE = {
    "cpp-address": "cpp-thread",
    "threads": "programs",
    "fuzz": "seeds",
    "torchvision": "distributed",
}
# The stage that needs no torch: what loads and unpacks packages leaves it a core.
WITHOUT_TORCH = "cpp-address"
# Modes of the device, and the stages that run in the one they are told, or in the default one; the
# others choose for themselves.
MODES = ("full", "nograph", "nofuse", "eager")
IN_ANY_MODE = ("python", "models", "seeds")
# Where the stages leave the text of generated kernels for the last one; fuzz does not: it has
# thousands, others each time.
KERNEL_TEXTS = ROOT / "build" / "kernel_texts"


class Beside:
    """A stage that runs while another does; `finish` waits for it and prints what it wrote."""

    def __init__(self, label: str, stage: Stage, environ: dict[str, str]) -> None:
        self.label = label
        self._output = tempfile.TemporaryFile("w+")
        self._code = 1
        self._thread = threading.Thread(target=self._run, args=(stage, environ))
        self._thread.start()

    def _run(self, stage: Stage, environ: dict[str, str]) -> None:
        self._code = stage(environ, self._output)

    def finish(self) -> int:
        self._thread.join()
        print(f"== {self.label} (beside it)", flush=True)
        self._output.seek(0)
        sys.stdout.write(self._output.read())
        sys.stdout.flush()
        self._output.close()
        return self._code


def set_up(python: str, environ: dict[str, str]) -> tuple[int, int]:
    """Installs and builds what the stages need. Its status, and that of the stage beside it."""
    print("== set-up (0 s)", flush=True)
    more = Beside(WITHOUT_TORCH, STAGES[WITHOUT_TORCH], environ)
    command = ["sh", str(ROOT / "scripts/setup.sh"), "test", python]
    code = subprocess.run(command, cwd=ROOT, env=environ).returncode
    return code, more.finish()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="run_tests.py", description=__doc__.splitlines()[0])
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--full", action="store_true", help="all samples, dtypes and models")
    parser.add_argument(
        "--mode",
        action="append",
        choices=MODES,
        help=f"ACC_MODE of {', '.join(IN_ANY_MODE)}; all, one after the other, with --full",
    )
    parser.add_argument("--keep-going", action="store_true", help="run the stages after a failure")
    parser.add_argument(
        "--set-up",
        metavar="PYTHON",
        help=f"first finish what `setup.sh tools` began, for that interpreter; {WITHOUT_TORCH} runs"
        " meanwhile",
    )
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.stages if name not in STAGES]
    if unknown:
        parser.error(f"no stage {', '.join(unknown)}; there are {', '.join(STAGES)}")
    environ = dict(os.environ)
    # pip compiles no Python here (setup.sh), so each process would compile all that it imports.
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if arguments.full:
        environ["ACC_TEST_FULL"] = "1"
        environ.setdefault("ACC_TEST_RESULTS", str(ROOT / "build" / "accuracy.jsonl"))
    if arguments.stages != ["gpu_kernels"]:
        shutil.rmtree(KERNEL_TEXTS, ignore_errors=True)
    KERNEL_TEXTS.mkdir(parents=True, exist_ok=True)
    environ.setdefault("ACC_TEST_JOBS", str(PROCESSES))
    # Numpy's threads, which nothing uses, spin as each process begins: 6 % of an import of torch.
    environ.setdefault("OPENBLAS_NUM_THREADS", "1")

    def environ_of(stage: str) -> dict[str, str]:
        kept = {} if stage == "fuzz" else {"ACC_KERNEL_TEXTS": str(KERNEL_TEXTS)}
        return {**environ, **kept}

    modes = arguments.mode or (MODES if arguments.full else ("",))
    failed: list[str] = []
    began = time.monotonic()
    runs = [
        (name, mode)
        for name in arguments.stages or STAGES
        for mode in (modes if name in IN_ANY_MODE else ("",))
    ]
    if arguments.set_up is not None:
        code, tested = set_up(arguments.set_up, environ)
        if code != 0:
            return code
        failed += [WITHOUT_TORCH] if tested != 0 else []
        left = arguments.keep_going or not failed
        runs = [(name, mode) for name, mode in runs if left and name != WITHOUT_TORCH]
    names = [name for name, _ in runs]
    beside = {other: name for name, other in BESIDE.items() if name in names and other in names}
    for name, mode in runs:
        if name in BESIDE and BESIDE[name] in names:
            continue
        chosen = {"ACC_MODE": mode} if mode else {}
        print(f"== {f'{name} {mode}'.strip()} ({time.monotonic() - began:.0f} s)", flush=True)
        start = os.times()
        other = beside.pop(name, None)  # once, in whichever mode this stage runs first
        more = Beside(other, STAGES[other], environ_of(other)) if other is not None else None
        label = f"--mode {mode} {name}" if mode else name
        results = {label: STAGES[name]({**environ_of(name), **chosen}, None)}
        if more is not None:
            results[more.label] = more.finish()
        end = os.times()
        busy = end.children_user - start.children_user + end.children_system - start.children_system
        print(f"   {end.elapsed - start.elapsed:.0f} s, {busy:.0f} s of CPU time", flush=True)
        failed += [label for label, code in results.items() if code != 0]
        if failed and not arguments.keep_going:
            break
    if failed:
        full = " --full" if arguments.full else ""
        again = f"{Path(sys.executable).name} scripts/run_tests.py{full}"
        print("failed; again:", *(f"\n  {again} {what}" for what in failed), file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
