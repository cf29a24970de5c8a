"""Starts the worker process of a mode and talks to it; the driving process imports no torch."""

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import load
from benchmarks.stats import Window

WORKER = Path(__file__).resolve().parent / "worker.py"
SAMPLE_INTERVAL_S = 0.2
GRACE_S = 2.0  # for a worker to end by itself


class WorkerError(RuntimeError):
    """A worker failed, died, or did not answer in time."""


class WorkerTimeout(WorkerError):
    """A worker did not answer in time and was ended."""


class Stopped(SystemExit):
    """SIGTERM came: what was measured is still to be told."""


def clean_up_when_terminated() -> None:
    """Makes SIGTERM end this process by Stopped, so that its workers are ended too."""

    def stop(signum: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would cut short what follows
        raise Stopped(128 + signum)

    signal.signal(signal.SIGTERM, stop)


def environment(threads: int, caches: Path, executor: str | None) -> dict[str, str]:
    """The environment of a worker: fixed threads, its own caches, no automatic plugin loading."""
    values = dict(os.environ)
    values["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "ACC_CACHE_DIR"):
        folder = caches / name.lower()
        folder.mkdir(parents=True, exist_ok=True)
        values[name] = str(folder)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        values[name] = str(threads)
    if executor is not None:
        values["ACC_EXECUTOR"] = executor
    return values


class Worker:
    """One worker process in its own session, with its own fresh cache folders.

    `spec` goes to worker.py: case, mode, variant, device, threads, cores and, for programs that
    are not in cases.py, module. With `caches` the folders are there, and stay: workers that are
    given the same place find what the ones before them left. `command` replaces the interpreter and
    script in tests.
    """

    def __init__(
        self,
        spec: Mapping[str, Any],
        command: Sequence[str] | None = None,
        *,
        caches: Path | None = None,
    ) -> None:
        self.spec = dict(spec)
        self.cores: list[int] = list(spec["cores"])
        self.watched = load.watched_cores(self.cores)
        self._folder = Path(tempfile.mkdtemp(prefix="acc-bench-"))
        self._log = (self._folder / "log").open("w+")
        read_requests, self._requests = os.pipe()
        self._answers, write_answers = os.pipe()
        self.caches = caches or self._folder / "caches"
        argv = [
            *(command or (sys.executable, str(WORKER))),
            json.dumps(self.spec),
            str(read_requests),
            str(write_answers),
        ]
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=environment(spec["threads"], self.caches, spec.get("executor")),
                pass_fds=(read_requests, write_answers),
                start_new_session=True,
            )
        except BaseException:  # a signal, too; a worker that has begun ends with its pipe
            os.close(self._requests)
            os.close(self._answers)
            self._log.close()
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        finally:
            os.close(read_requests)
            os.close(write_answers)
        self._received = b""
        self._busy = self._ended = False

    @property
    def label(self) -> str:
        """Case, mode and variant, for messages."""
        return f"{self.spec['case']}/{self.spec['mode']}/{self.spec.get('variant', 'plain')}"

    @property
    def pid(self) -> int:
        """The process, which is also its session's number."""
        return self._process.pid

    def ask(
        self,
        request: Mapping[str, Any],
        timeout_s: float,
        sample: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Sends one request and returns the answer; `sample` is called now and then meanwhile.

        Raises WorkerTimeout (the worker is ended) or WorkerError with the worker's traceback.
        """
        self._busy = True
        try:
            os.write(self._requests, (json.dumps(request) + "\n").encode())
        except BrokenPipeError:
            raise self._died() from None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._received:
            wait = deadline - time.monotonic()
            if wait <= 0.0:
                self.close()
                raise WorkerTimeout(
                    f"[benchmarks.driver] {self.label}: no answer to {request['do']!r} within "
                    f"{timeout_s:.0f} s"
                )
            interval = min(wait, SAMPLE_INTERVAL_S) if sample else wait
            if not select.select([self._answers], [], [], interval)[0]:
                if sample:
                    sample()
                continue
            chunk = os.read(self._answers, 1 << 20)
            if not chunk:
                raise self._died()
            self._received += chunk
        self._busy = False
        line, _, self._received = self._received.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"[benchmarks.driver] {self.label} failed:\n{answer['error']}")
        return answer

    def _died(self) -> WorkerError:
        code = self._process.wait()
        self._log.seek(0)
        tail = "".join(self._log.readlines()[-20:])
        return WorkerError(f"[benchmarks.driver] {self.label} ended with status {code}:\n{tail}")

    def window(self, alternation: int, steps: int, timeout_s: float) -> Window:
        """Times `steps` steps and measures the load of everything else meanwhile."""
        request = {"do": "window", "steps": steps}
        return self.watch(alternation, request, "seconds", timeout_s)[0]

    def watch(
        self, alternation: int, request: Mapping[str, Any], seconds: str, timeout_s: float
    ) -> tuple[Window, dict[str, Any]]:
        """Asks for `request["steps"]` steps; the load of everything else, and the answer.

        `seconds` is the answer's field with the time that they took.
        """
        before = load.read_cpu(self.pid, self.watched)
        answer = self.ask(request, timeout_s)
        after = load.read_cpu(self.pid, self.watched)
        window = Window(
            alternation,
            request["steps"],
            answer[seconds],
            after.tree - before.tree,
            load.foreign_seconds(before, after),
            len(self.cores),
        )
        return window, answer

    def close(self, grace_s: float = GRACE_S) -> None:
        """Ends the process and all that it started, and removes its folders.

        One that works on a request would hear of it afterwards: it has no grace.
        """
        if self._ended:
            return
        self._ended = True
        members = load.tree_of(self.pid, load.process_table())
        with contextlib.suppress(OSError):
            os.write(self._requests, b'{"do": "exit"}\n')
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=0.0 if self._busy else grace_s)
        # Helpers of libraries may outlive the worker, some in a session of their own.
        members |= load.tree_of(self.pid, load.process_table())
        if self._process.returncode is not None:
            members.discard(self.pid)
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._requests)
        os.close(self._answers)
        self._log.close()
        shutil.rmtree(self._folder, ignore_errors=True)
