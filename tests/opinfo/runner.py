"""Runs operators in worker processes and survives their crashes and hangs.

A worker that dies names the sample it died in; that sample becomes a failure of the category
`crash` (or `hang`), and a new worker goes on behind it.
"""

from __future__ import annotations

import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests import helpers
from tests.opinfo import check
from tests.opinfo.worker import RECORD

# The program of a worker. PyTorch's test helpers ask for GPUs when they are imported, which starts
# CUDA's driver, and no child that is forked later could use it. The samples are a host's, too: none
# names CUDA as its device.
WORKER = (
    "import torch; torch.cuda.is_available = lambda: False; "
    "from tests.opinfo import worker; worker.main()"
)
SOURCE = "torch.testing._internal.common_methods_invocations"
HANG_SECONDS = 90.0
# An operator that crashes this often in one variant is not asked again.
CRASHES_PER_REQUEST = 3
TOGETHER = 64  # requests whose kernels are made by one run of the compiler
OUT_SAMPLES = 3  # out= forms differ by geometry only


@dataclass
class Result:
    """What came of one operator in one variant and dtype."""

    op: str
    variant: str
    dtype: str
    samples: int = 0
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    random: bool = False
    fused: tuple[int, int] = (0, 0)  # samples with generated kernels: in calls, in gradients
    on_a_gpu: tuple[int, int] = (0, 0)  # calls of its kernels, plans as captured work
    unmade: str = ""
    gave_up: bool = False  # crashed too often; its other samples were not run

    def failed_samples(self) -> set[int]:
        """The indices of the samples that failed in any way."""
        return {index for index, _, _ in self.failures}


class _Worker:
    """One child process and its pipes."""

    def __init__(self, source: str, env: dict[str, str]) -> None:
        self.progress = tempfile.NamedTemporaryFile(prefix="acc-opinfo-")
        self.progress.write(bytes(RECORD.size))
        self.progress.flush()
        self.errors = tempfile.TemporaryFile(prefix="acc-opinfo-")
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, source, self.progress.name],
            cwd=helpers.ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            bufsize=0,
            start_new_session=True,  # it forks: they are ended together
        )
        self.pending = b""
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)
        self.requests = 0
        self.died_at: tuple[int, int] | None = None  # where the last child died, if one did
        self.answer(time.monotonic() + 300)

    def ask(self, request: dict[str, Any]) -> None:
        """Sends a request."""
        self.requests += 1
        self.process.stdin.write(json.dumps(request).encode() + b"\n")

    def position(self) -> tuple[int, int]:
        """The number of the request and the index of the sample that the worker is in."""
        with open(self.progress.name, "rb") as file:
            request, sample = RECORD.unpack(file.read(RECORD.size))
        return request, sample

    def answer(self, deadline: float | None = None) -> dict[str, Any] | str:
        """Waits for an answer; `crash` or `hang` and how, when none comes."""
        last, looks = self.position(), 0
        while b"\n" not in self.pending:
            if self.selector.select(timeout=1.0):
                chunk = self.process.stdout.read(1 << 16)
                if not chunk:
                    return f"crash: the worker ended, status {self.process.wait()}"
                self.pending += chunk
                continue
            # By seconds in which this process looked: where all stood still, nothing hangs.
            here = self.position()
            last, looks = here, looks + 1 if here == last else 0
            if deadline is None and looks > HANG_SECONDS:
                return f"hang: no progress for {HANG_SECONDS:.0f} s"
            if deadline is not None and time.monotonic() > deadline:
                return "hang: the worker did not start"
        line, self.pending = self.pending.split(b"\n", 1)
        answer = json.loads(line)
        if "died" not in answer:
            return answer
        self.died_at = tuple(answer["at"])
        return f"crash: {answer['died']}{self._last_words()}"

    def _last_words(self) -> str:
        self.errors.seek(0, 2)
        self.errors.seek(max(0, self.errors.tell() - 4000))
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return f"; last words: {lines[-1]}" if lines else ""

    def forget_words(self) -> None:
        """Drops what was written to stderr so far."""
        self.errors.seek(0)
        self.errors.truncate()

    def revived(self, answer: str) -> _Worker | None:
        """The worker with a new child after a crash; None when it had to be ended."""
        if self.process.poll() is None and answer.startswith("crash"):
            self.requests, self.died_at = 0, None  # a new child counts anew
            self.forget_words()
            return self
        self.kill()
        self.end()
        return None

    def kill(self) -> None:
        """Kills the process and its child."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()

    def end(self) -> None:
        """Ends the process and its child, whatever they do."""
        self.process.stdin.close()
        if self.process.poll() is None:
            try:
                self.process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                self.kill()
        self.process.stdout.close()
        self.selector.close()
        self.progress.close()
        self.errors.close()


def _run_one(
    worker: _Worker | None, request: dict[str, Any], source: str, env: dict[str, str]
) -> tuple[_Worker | None, Result]:
    result = Result(request["op"], request["variant"], request["dtype"])
    skip = 0
    for _ in range(CRASHES_PER_REQUEST):
        if worker is None:
            worker = _Worker(source, env)
        worker.ask({**request, "skip": skip})
        answer = worker.answer()
        while isinstance(answer, dict) and "failure" in answer:
            result.failures.append(tuple(answer["failure"]))
            answer = worker.answer()
        if isinstance(answer, dict):
            result.samples += answer["samples"]
            result.random |= answer["random"]
            result.fused = tuple(answer.get("fused", (0, 0)))
            result.on_a_gpu = tuple(answer.get("on_a_gpu", (0, 0)))
            result.unmade = answer.get("unmade", "")
            return worker, result
        number, index = worker.died_at or worker.position()
        if number != worker.requests:  # it died before it began
            index = skip
        worker = worker.revived(answer)
        category, _, text = answer.partition(": ")
        result.failures.append((index, category, text))
        result.samples += index - skip + 1
        skip = index + 1
        if "only" in request:
            return worker, result
    result.gave_up = True
    return worker, result


def _prepare(
    wanted: list[dict[str, Any]], worker: _Worker | None, source: str, env: dict[str, str]
) -> _Worker | None:
    """Has the kernels of requests made together. What dies here dies again where it is named."""
    if not any(request["variant"] in check.CLOSE for request in wanted):
        return worker
    if worker is None:
        worker = _Worker(source, env)
    worker.ask({"prepare": wanted})
    answer = worker.answer()
    return worker.revived(answer) if isinstance(answer, str) else worker


def requests(
    source: str, variants: Iterable[str], dtypes: Iterable[torch.dtype] | None, names: Iterable[str]
) -> list[dict[str, Any]]:
    """The requests for the operators of a database: all of them, or those in `names`.

    A name selects the operator of that name and its variants. `dtypes` None means every dtype that
    the CPU supports.
    """
    chosen = set(names)
    made = []
    for op in importlib.import_module(source).op_db:
        name = check.full_name(op)
        if chosen and name not in chosen and op.name not in chosen:
            continue
        for dtype in sorted(op.supported_dtypes("cpu"), key=str) if dtypes is None else dtypes:
            for variant in variants:
                if check.supports(op, variant, dtype):
                    request: dict[str, Any] = {
                        "op": name,
                        "variant": variant,
                        "dtype": str(dtype).removeprefix("torch."),
                    }
                    if variant == check.OUT:
                        request["limit"] = OUT_SAMPLES
                    made.append(request)
    return made


def run(
    wanted: list[dict[str, Any]],
    *,
    source: str = SOURCE,
    jobs: int = 1,
    env: dict[str, str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Result]:
    """Runs the requests in `jobs` worker processes; results come in the order of the requests."""
    env = helpers.child_env(ACC_SKIP_PASSES=helpers.BIT_BY_BIT) if env is None else env
    results: list[Result | None] = [None] * len(wanted)
    # Requests of one operator stay together; operators are dealt from one queue, several at a time
    # if their kernels are made together.
    at_least = TOGETHER if any(r["variant"] in check.CLOSE for r in wanted) else 1
    position = 0
    lock = threading.Lock()
    broken: list[BaseException] = []

    def serve() -> None:
        nonlocal position
        worker: _Worker | None = None
        try:
            while not broken:
                with lock:
                    if position >= len(wanted):
                        break
                    first = position
                    last = first + 1
                    while last < len(wanted) and (
                        wanted[last]["op"] == wanted[last - 1]["op"] or last - first < at_least
                    ):
                        last += 1
                    position = last
                worker = _prepare(wanted[first:last], worker, source, env)
                for i in range(first, last):
                    worker, results[i] = _run_one(worker, wanted[i], source, env)
                if progress:
                    progress(last, len(wanted))
        except BaseException as error:
            broken.append(error)
            raise
        finally:
            if worker is not None:
                worker.end()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(max(1, jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        while thread.is_alive():  # a join in slices, so that Ctrl-C comes through
            thread.join(0.2)
    if broken:
        raise RuntimeError(f"a worker could not be run: {broken[0]}") from broken[0]
    return [r for r in results if r is not None]
