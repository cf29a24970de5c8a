"""The process of one mode: builds a program and runs steps when the driving process says so.

Started by driver.py as `worker.py SPEC READ_FD WRITE_FD`. Requests and answers are JSON objects,
one a line, on two pipes; standard output stays free for whatever libraries print. The requests:

    {"do": "build"}                 -> {"versions": {...}}
    {"do": "cold", "steps": n}      -> {"first_step_s", "total_s"}
    {"do": "check"}                 -> {"checksum": {...}}: of the cold steps
    {"do": "window", "steps": k}    -> {"seconds"}: of k steps, device idle before and after
    {"do": "memory"}                -> {"peak_mib", "host_peak_mib"}: above the level before step 1
    {"do": "counters"}              -> {"counters": {...}}: acc's, by name
    {"do": "measure", ...}          -> what the program's own method `measure` says
    {"do": "exit"}

A failure is answered with {"error": traceback} and ends the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BASELINES = ("eager", "eager_tuned", "compile", "graph")


def assert_no_plugin() -> None:
    """Raises RuntimeError when a PrivateUse1 backend is registered in this process."""
    import torch

    name = torch._C._get_privateuse1_backend_name()
    has_kernels = torch._C._dispatch_has_kernel_for_dispatch_key(
        "aten::empty.memory_format", "PrivateUse1"
    )
    if name != "privateuseone" or has_kernels or "torchacc_device" in sys.modules:
        raise RuntimeError(
            f"[benchmarks.worker] a baseline runs beside the PrivateUse1 backend {name!r}, so it "
            "is no baseline. Uninstall what registers it, or keep it from being loaded."
        )


class DeviceAccess:
    """Synchronisation and memory of the device that a mode runs on."""

    def __init__(self, device: str) -> None:
        import torch

        self.device = device
        self.on_gpu = device == "cuda"
        if device == "acc":
            import torchacc_device

            self.on_gpu = torchacc_device._C.executor_name() == "cuda"
        if self.on_gpu:
            torch.cuda.init()
        self._torch = torch
        self._levels = {"peak_mib": 0.0, "host_peak_mib": 0.0}
        self._highest = dict(self._levels)

    def synchronize(self) -> None:
        """Waits until the device is idle."""
        if self.device != "cpu":
            getattr(self._torch, self.device).synchronize()

    def mark_level(self) -> None:
        """The present memory is the level above which the peak is reported."""
        self._levels = self._reset_peaks()

    def _reset_peaks(self) -> dict[str, float]:
        """Gives back what is free, and returns what is left."""
        from benchmarks import load

        gc.collect()
        self.synchronize()
        # Memory that was freed but not given back would hide what the next steps need.
        if self.device == "acc":
            self._torch.acc.empty_cache()
        if platform.libc_ver()[0] == "glibc":
            ctypes.CDLL(None).malloc_trim(0)
        if self.on_gpu:
            self._torch.cuda.reset_peak_memory_stats()
        load.reset_own_peak()
        host = load.own_memory_mib("VmRSS")
        device = self._torch.cuda.memory_reserved() / 2**20 if self.on_gpu else host
        return {"peak_mib": device, "host_peak_mib": host}

    def peak(self) -> dict[str, float]:
        """MiB above the level so far: of the device's own memory, and of this process."""
        from benchmarks import load

        host = load.own_memory_mib("VmHWM")
        device = self._torch.cuda.max_memory_reserved() / 2**20 if self.on_gpu else host
        now = {"peak_mib": device, "host_peak_mib": host}
        for name, level in self._levels.items():
            self._highest[name] = max(self._highest[name], now[name] - level)
        return dict(self._highest)

    @contextlib.contextmanager
    def uncounted(self) -> Iterator[None]:
        """What the body needs is not part of the peak, nor what it leaves behind (the code of
        libraries that it was the first to touch)."""
        self.peak()
        before = self._reset_peaks()
        yield
        for name, after in self._reset_peaks().items():
            self._levels[name] += max(0.0, after - before[name])


def versions(device: DeviceAccess) -> dict[str, Any]:
    """What a result file must say about this process."""
    import torch

    found: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
    }
    if device.device == "acc":
        import torchacc_device
        from torchacc_device._build_info import VERSION

        found["torchacc"] = VERSION
        found["executor"] = torchacc_device._C.executor_name()
    if device.on_gpu:
        found["cuda"] = torch.version.cuda
        found["gpu"] = torch.cuda.get_device_name()
    return found


class Session:
    """The program of this process and what it has done so far."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec
        self.device: DeviceAccess | None = None
        self.program: Any = None
        self.index = 0
        self.values: list[float] = []

    def build(self, _: dict[str, Any]) -> dict[str, Any]:
        import torch

        torch.set_num_threads(self.spec["threads"])
        if self.spec["mode"] in BASELINES:
            assert_no_plugin()
        else:
            importlib.import_module("torchacc_device")
        self.device = DeviceAccess(self.spec["device"])
        wanted = self.spec.get("executor")
        module = importlib.import_module(self.spec.get("module", "benchmarks.cases"))
        self.program = module.build(
            self.spec["case"],
            self.spec["device"],
            self.spec.get("variant", "plain"),
            **({"small": True} if self.spec.get("small") else {}),
        )
        found = versions(self.device)
        if wanted and found.get("executor", wanted) != wanted:
            raise RuntimeError(
                f"[benchmarks.worker] acc runs on executor {found['executor']!r}, the suite asks "
                f"for {wanted!r}. Look at `python -m torchacc env`."
            )
        if self.spec["mode"] in BASELINES:
            assert_no_plugin()
        self.device.mark_level()
        return {"versions": found}

    def cold(self, request: dict[str, Any]) -> dict[str, Any]:
        """The first steps, from the call of step 1 to the read of the last one."""
        start = time.perf_counter()
        self.values = [self.program.step(0)]
        first = time.perf_counter() - start
        for self.index in range(1, request["steps"]):
            self.values.append(self.program.step(self.index))
        return {"first_step_s": first, "total_s": time.perf_counter() - start}

    def check(self, _: dict[str, Any]) -> dict[str, Any]:
        from benchmarks.checksums import checksum_of

        with self.device.uncounted():
            checksum = checksum_of(self.values, self.program.outputs())
        return {"checksum": checksum.to_json()}

    def window(self, request: dict[str, Any]) -> dict[str, Any]:
        """Times `steps` steps; programs that time themselves have a method `window`."""
        steps = request["steps"]
        self.device.synchronize()
        if hasattr(self.program, "window"):
            return {"seconds": self.program.window(steps)}
        first, last = self.index + 1, self.index + steps
        self.index = last
        every = self.spec.get("read_every", 1)
        start = time.perf_counter()
        for index in range(first, last + 1):
            self.program.step(index, read=index % every == 0 or index == last)
        self.device.synchronize()
        return {"seconds": time.perf_counter() - start}

    def memory(self, _: dict[str, Any]) -> dict[str, Any]:
        return self.device.peak()

    def counters(self, _: dict[str, Any]) -> dict[str, Any]:
        import torchacc_device

        return {"counters": dict(torchacc_device._C.stats())}

    def measure(self, request: dict[str, Any]) -> dict[str, Any]:
        return self.program.measure(request)


def serve(session: Session, requests: Any, answers: Any) -> None:
    """Answers requests until "exit", the end of the pipe, or a failure."""
    for line in requests:
        request = json.loads(line)
        if request["do"] == "exit":
            return
        try:
            answer = getattr(session, request["do"])(request)
        except Exception:
            answers.write(json.dumps({"error": traceback.format_exc()}) + "\n")
            answers.flush()
            return
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def main() -> None:
    """Pins the process before anything that starts threads is imported, then serves."""
    spec = json.loads(sys.argv[1])
    os.sched_setaffinity(0, spec["cores"])
    # The tree that this file stands in is what is measured, not an installed copy.
    sys.path[0] = str(Path(__file__).resolve().parent.parent)
    with (
        os.fdopen(int(sys.argv[2]), "r") as requests,
        os.fdopen(int(sys.argv[3]), "w") as answers,
    ):
        serve(Session(spec), requests, answers)


if __name__ == "__main__":
    main()
