"""What the program's steps did so far: how they ran, what interrupted them, and why."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping

from torchacc.device import lazy_device
from torchacc.environment import render, size_text
from torchacc_device import _C, _scaling

_BEGAN = time.monotonic()

# Counters of submitted work are named "flush_" and the reason; these end steps.
_ENDS = {
    "step": "optimizer.step(), mark_step()",
    "loader": "a loader's next batch",
    "explicit": "sync() or synchronize()",
}
_REASONS = {
    "read": "a value was read",
    "fallback": "an operator that cannot be recorded",
    "data_dependent": "an operator whose result's shape depends on data",
    "cap": "the graph was as long as it may be",
    "event": "an event or a stream was asked",
    "resize": "memory was resized",
    "pointer": "an address was asked",
    "eager": "ACC_MODE runs operators at once",
    "exit": "the program ended",
    "exchange": "another process waited for a collective",
    "idle": "nothing was recorded for a while, and other processes may wait",
}
_OUTSIDE = {
    "number": "a number of it changes",
    "address": "what it writes lies elsewhere each time",
    "failed": "it cannot be captured",
    "host memory": "it touches the host's memory",
    "other processes": "other processes take part in it, and may run other plans",
}
_AGAIN = {
    "address": "an input lay elsewhere",
    "copied": "an input that moves is copied from then on",
    "result": "a result of the step before was still needed where it was",
}


@dataclasses.dataclass(frozen=True)
class Report:
    """What `report` returns; its text is for people.

    `counters`: events by name, of all devices of the process; `totals`: the same since the
    process began. `memory`: bytes of the current device, by name, at the time of the report.
    `scaled_on_host`: optimizers that a GradScaler cannot step without a read on the host, by
    class, and why. `seconds`: how long a time the counters are about; `at`: its end, as
    `time.monotonic()` has it.
    """

    executor: str
    mode: str
    counters: Mapping[str, int]
    totals: Mapping[str, int]
    memory: Mapping[str, int]
    scaled_on_host: Mapping[str, str]
    seconds: float
    at: float

    def of(self, group: str) -> dict[str, int]:
        """The counters that are named `group`/KEY, by KEY, the largest first.

        `of("fallback")` has operators that ran at once, `of("flush_read")` the lines of the program
        that read values while work was recorded, `of("waits")` those that read or waited for what
        had been submitted before, `of("not_captured/failed")` the operators that
        are called between the pieces of captured work because their capture failed.
        """
        start = group + "/"
        found = [(k[len(start) :], n) for k, n in self.counters.items() if k.startswith(start)]
        return dict(sorted(found, key=lambda each: (-each[1], each[0])))

    def overlap(self) -> float | None:
        """The share of the time of exchanges with other processes that the steps computed under.

        None where no such time was measured: in one process, and on a GPU, whose streams wait by
        themselves. Exchanges that go on at the same time count each.
        """
        whole = self._count("transfer_us")
        if whole == 0:
            return None
        return max(0.0, 1.0 - self._count("transfer_wait_us") / whole)

    def __str__(self) -> str:
        sections: dict[str, dict[str, object]] = {
            "steps": dict(self._steps()),
            "submitted between the ends of steps": dict(self._cuts()),
            "read or waited for, of what was submitted before": dict(self.of("waits")),
            "plans": dict(self._plans()),
            "captured work": dict(self._captured()),
            "called between the pieces of captured work": dict(self._outside()),
            "operators without a device kernel": dict(self.of("fallback")),
            "optimizers whose steps under a GradScaler read on the host": dict(self.scaled_on_host),
            "exchanges with other processes": dict(self._exchanges()),
            "kernels": dict(self._kernels()),
            "time": dict(self._times()),
            "memory": {name: size_text(size) for name, size in self.memory.items()},
        }
        return render({title: section for title, section in sections.items() if section})

    def _count(self, name: str) -> int:
        return self.counters.get(name, 0)

    def _steps(self) -> Iterator[tuple[str, object]]:
        yield "executor", f"{self.executor}, ACC_MODE={self.mode}"
        for reason, text in _ENDS.items():
            if count := self._count(f"flush_{reason}"):
                yield f"ended by {text}", count
                for place, times in self.of(f"flush_{reason}").items():
                    yield f"  {place} ({reason})", times
        yield "operators recorded", self._count("nodes")
        yield "errors", self._count("errors")

    def _cuts(self) -> Iterator[tuple[str, object]]:
        for reason, text in _REASONS.items():
            if count := self._count(f"flush_{reason}"):
                yield text, count
                for place, times in self.of(f"flush_{reason}").items():
                    yield f"  {place} ({reason})", times

    def _plans(self) -> Iterator[tuple[str, object]]:
        hits, follows = self._count("plan_hits"), self._count("plan_follows")
        yield "replayed", hits + follows + self._count("replays")
        yield "made (torchacc.explain() says why)", self._count("plans_built")
        yield "run without their kernels, not there yet", self._count("runs_unfused")
        yield "made again with more results", self._count("plans_widened")
        yield "slower than operators one by one", self._count("plans_put_aside")
        yield "dropped from the cache", self._count("plans_evicted")
        yield "found by their operators", hits
        yield "followed while they were recorded", follows
        yield "replayed by torchacc.capture", self._count("replays")

    def _captured(self) -> Iterator[tuple[str, object]]:
        seconds = self._count("capture_us") * 1e-6
        yield "runs that were captured", f"{self._count('captures')}, in {seconds:.3f} s"
        launches = self._count("captured_launches")
        yield "runs submitted", f"{self._count('captures_submitted')}, as {launches} launches"
        for reason, count in self.of("captured_again").items():
            yield f"not submitted: {_AGAIN.get(reason, reason)}", count

    def _outside(self) -> Iterator[tuple[str, object]]:
        reasons: dict[str, list[str]] = {}
        for reason, text in _OUTSIDE.items():
            for operator in self.of(f"not_captured/{reason}"):
                reasons[operator] = [*reasons.get(operator, ()), text]
        for operator, texts in reasons.items():
            yield operator, "; ".join(texts)

    def _exchanges(self) -> Iterator[tuple[str, object]]:
        if count := self._count("transfers"):
            yield "begun", count
        share = self.overlap()
        if share is not None:
            yield "under way, added up", f"{self._count('transfer_us') * 1e-6:.3f} s"
            yield "waited for", f"{self._count('transfer_wait_us') * 1e-6:.3f} s"
            yield "under computation", f"{100 * share:.1f} %"

    def _kernels(self) -> Iterator[tuple[str, object]]:
        yield "compiled", self._count("jit/compiled")
        yield "not compiled", self._count("jit/failed")
        yield "slower than operators", len(self.of("kernel_put_aside"))
        yield "launched", self._count("kernel_launches")

    def _times(self) -> Iterator[tuple[str, object]]:
        running = "submitting plans to the GPU" if self.executor == "cuda" else "running plans"
        yield f"{running}, waiting for kernels", f"{self._count('run_us') * 1e-6:.3f} s"
        yield "making plans", f"{self._count('plan_us') * 1e-6:.3f} s"
        yield "of", f"{self.seconds:.3f} s"


def report(since: Report | None = None) -> Report:
    """What happened since the process began or, given an earlier report, since then.

        before = torchacc.report()
        ...
        print(torchacc.report(since=before))

    Says what was submitted between the ends of steps, by which line of the program, where it read
    or waited for what was submitted before (on a GPU the program stands still there), and what is
    called between the pieces of captured work, and why; of exchanges with other processes, how
    much of their time steps went on computing (`Report.overlap`). Submits nothing itself: memory is
    what tensors hold whose contents have been computed.
    """
    totals = dict(_C.stats())
    earlier = {} if since is None else since.totals
    counters = {
        name: count - earlier.get(name, 0)
        for name, count in totals.items()
        if since is None or count != earlier.get(name, 0)
    }
    now = time.monotonic()
    return Report(
        executor=_C.executor_name(),
        mode=_C.mode(),
        counters=counters,
        totals=totals,
        memory=dict(_C.held_memory(lazy_device().index)),
        scaled_on_host=_scaling.synchronised(),
        seconds=now - (_BEGAN if since is None else since.at),
        at=now,
    )
