"""Measures one case: starts every mode, compares what they compute, then alternates windows."""

import math
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import load, stats
from benchmarks.cases import CASES, Case, variants_of
from benchmarks.checksums import Checksum, mismatch
from benchmarks.driver import GRACE_S, Stopped, Worker, WorkerError, WorkerTimeout
from benchmarks.stats import Ratio, Window
from benchmarks.worker import BASELINES

COLD_STEPS = 20
SETUP_TIMEOUT_S = 600.0
# On a GPU a loss is read now and then: who reads each one has the GPU wait for Python each time.
READ_EVERY = {"host": 1, "gpu": 10}
GPU_MEMORY_MUST, GPU_MEMORY_GOAL = 1.0, 0.8  # over eager's peak
# Seconds over eager's to the end of step 20 that acc may take on a GPU, by what the caches hold.
GPU_START_MUST = {"cold": 10.0, "warm": 2.0}
GPU_START_GOAL = {"cold": 3.0, "warm": 0.5}
# What is measured against them. "capture" is acc with the step under torchacc.capture.
OURS = ("acc", "capture")
MODES = (*BASELINES, *OURS)
# The order in which they start: a run that is stopped has those that matter most, and what compiles
# for minutes keeps no other waiting.
STARTING = ("eager", "acc", "graph", "capture", "eager_tuned", "compile")
STOPPED = "not run: stopped"

Spawn = Callable[..., Worker]
Tell = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Settings:
    """How a run measures. `suite` is "host" or "gpu"; `cores` are what every mode is pinned to.

    `compile_forms` are the forms of torch.compile that are tried, in place of all of a case's, each
    for at most `compile_timeout_s`, if that is less than the case says. Of the `limit_s` seconds of
    a case torch.compile, which starts last, gets what the others and the windows leave. With
    `warm_start`, acc starts once more on a GPU, from the caches that it has filled. With `kept`
    each mode is measured before the next one starts, and leaves its caches in that folder.
    """

    suite: str
    modes: tuple[str, ...]
    cores: tuple[int, ...]
    alternations: int = 11
    window_s: float = 1.0
    spawn: Spawn = Worker
    compile_forms: tuple[str, ...] = ()
    compile_timeout_s: float = math.inf
    limit_s: float = math.inf
    warm_start: bool = True
    deadline: float = math.inf  # of the case, by time.monotonic
    kept: Path | None = None

    @property
    def claimable(self) -> bool:
        """Whether results may be cited: enough alternations of windows that are long enough."""
        return self.alternations >= stats.MIN_ALTERNATIONS and self.window_s >= 0.5


@dataclass
class ModeRun:
    """One mode of one case: its process and what was measured of it."""

    mode: str
    variant: str
    worker: Worker
    versions: dict[str, Any]
    first_step_s: float
    step20_s: float
    sampled_peak_mib: float
    checksum: Checksum
    warm: Window  # the last of the warm-up's
    period: int
    windows: list[Window] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)

    @property
    def step_ms(self) -> float:
        """How long a step takes, as the warm-up saw it."""
        return self.warm.step_ms

    def steps_in(self, window_s: float) -> int:
        """About so many seconds of steps, in whole periods."""
        steps = max(1, min(10_000, round(1000.0 * window_s / self.step_ms)))
        return -(-steps // self.period) * self.period


@dataclass
class CaseResult:
    """All that one case yields: lines for the JSON file, and what makes the run fail.

    `failures` (wrong results, a mode that does not run), `invalid` (foreign load), and
    `missed` (a must that does not hold) are sentences; `notes` are for the reader only. `stopped`:
    SIGTERM came, and the lines are of what there was; unless `complete`, nothing of them is judged.
    """

    case: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stopped: bool = False
    complete: bool = True


def worker_spec(case: str, mode: str, variant: str, settings: Settings) -> dict[str, Any]:
    """What the worker of a mode is told."""
    baseline_device = "cuda" if settings.suite == "gpu" else "cpu"
    known = CASES.get(case)
    spec: dict[str, Any] = {
        "case": case,
        "mode": mode,
        "variant": variant,
        "device": "acc" if mode in OURS else baseline_device,
        "cores": list(settings.cores),
        "threads": len(settings.cores),
        "read_every": 1 if known is not None and known.reads else READ_EVERY[settings.suite],
        "small": settings.suite == "host" and known is not None and known.gpu_only,
    }
    if mode in OURS:
        spec["executor"] = "cuda" if settings.suite == "gpu" else "host"
    return spec


def compile_s(case: Case, settings: Settings) -> float:
    """What a form of torch.compile may take for its first steps."""
    windows_s = 2 * settings.alternations * len(settings.modes) * settings.window_s
    left_s = settings.deadline - windows_s - time.monotonic()
    return min(case.compile_timeout_s, settings.compile_timeout_s, max(0.0, left_s))


def _start(case: Case, mode: str, variant: str, settings: Settings) -> ModeRun:
    """Starts one variant of a mode, runs its first steps from cold and warms it up."""
    caches = settings.kept and settings.kept / f"{mode}+{variant}"
    worker = settings.spawn(worker_spec(case.name, mode, variant, settings), caches=caches)
    try:
        versions = worker.ask({"do": "build"}, SETUP_TIMEOUT_S)["versions"]
        level = load.tree_mib(worker.pid)
        peak = level

        def sample() -> None:
            nonlocal peak
            peak = max(peak, load.tree_mib(worker.pid))

        limit = SETUP_TIMEOUT_S
        if mode == "compile":
            limit = compile_s(case, settings)
        cold = worker.ask({"do": "cold", "steps": COLD_STEPS}, limit, sample)
        sample()
        answer = worker.ask({"do": "check"}, SETUP_TIMEOUT_S)
        return ModeRun(
            mode=mode,
            variant=variant,
            worker=worker,
            versions=versions,
            first_step_s=cold["first_step_s"],
            step20_s=cold["total_s"],
            sampled_peak_mib=peak - level,
            checksum=Checksum.from_json(answer["checksum"]),
            warm=_warm_up(worker, settings.window_s, case.period),
            period=case.period,
        )
    except BaseException:
        worker.close()
        raise


def _warm_up(worker: Worker, window_s: float, steps: int) -> Window:
    """Runs windows, first of so many steps, until one is long enough to tell the step time."""
    while True:
        window = worker.window(0, steps, SETUP_TIMEOUT_S)
        if window.seconds >= 0.3 * window_s or steps >= 4096:
            return window
        steps *= 2


def _probe_ms(run: ModeRun, settings: Settings) -> float:
    steps = run.steps_in(0.5 * settings.window_s)
    return stats.median([run.worker.window(0, steps, SETUP_TIMEOUT_S).step_ms for _ in range(3)])


def start_mode(
    case: Case, mode: str, settings: Settings, tried: list[dict[str, Any]]
) -> ModeRun | None:
    """Starts `mode` in its fastest variant; None when none runs. `tried` receives every variant.

    The channels-last form of the best way to compile is tried for convolutional cases, unless the
    settings name the forms. When a
    variant does not compile in time, the remaining ones, which compile more, are not tried.
    A mode that has only one variant raises what its worker raises.
    """
    variants = list(variants_of(case, mode, settings.suite))
    layout_tried = not (mode == "compile" and case.convolutional)
    if mode == "compile" and settings.compile_forms:
        variants, layout_tried = list(settings.compile_forms), True
    choice = len(variants) > 1
    best: ModeRun | None = None
    best_ms = 0.0
    try:
        while variants:
            variant = variants.pop(0)
            entry: dict[str, Any] = {"variant": variant}
            tried.append(entry)
            try:
                run = _start(case, mode, variant, settings)
            except WorkerError as error:
                if not choice:
                    raise
                entry["error"] = str(error).strip().splitlines()[-1]
                if isinstance(error, WorkerTimeout):
                    break
            else:
                try:
                    probe_ms = _probe_ms(run, settings) if choice else run.step_ms
                    if settings.kept is not None:
                        _finish([run], settings)
                        run.worker.close()
                except BaseException:
                    run.worker.close()
                    raise
                entry.update(
                    median_ms=probe_ms, first_step_s=run.first_step_s, step20_s=run.step20_s
                )
                loser: ModeRun | None = run
                if best is None or probe_ms < best_ms:
                    best, best_ms, loser = run, probe_ms, best
                if loser is not None:
                    loser.worker.close()
            if not variants and not layout_tried and best is not None:
                layout_tried = True
                variants.append(best.variant + "+channels_last")
    except BaseException:
        if best is not None:
            best.worker.close()
        raise
    return best


def alternate(runs: list[ModeRun], settings: Settings) -> None:
    """Times windows of all modes in turn, every second round in reverse order.

    Rounds are added, up to twice the asked number, until enough of them are free of foreign
    load in every mode.
    """
    enough = min(settings.alternations, stats.MIN_ALTERNATIONS)
    complete = 0
    for alternation in range(2 * settings.alternations):
        if alternation >= settings.alternations and complete >= enough:
            return
        windows = []
        for run in runs if alternation % 2 == 0 else reversed(runs):
            steps = run.steps_in(settings.window_s)
            limit = SETUP_TIMEOUT_S + 20.0 * steps * run.step_ms / 1000.0
            if steps > 1:
                # The other modes have emptied the processor's caches.
                run.worker.window(alternation, max(1, steps // 20), limit)
            windows.append(run.worker.window(alternation, steps, limit))
            run.windows.append(windows[-1])
        complete += not any(window.is_dirty() for window in windows)


def _finish(runs: list[ModeRun], settings: Settings) -> None:
    """Times the windows that count and asks for the memory."""
    alternate(runs, settings)
    for run in runs:
        run.memory = run.worker.ask({"do": "memory"}, SETUP_TIMEOUT_S)


def measure_case(case: Case, settings: Settings, tell: Tell = lambda line: None) -> CaseResult:
    """Runs one case in all modes of `settings` and judges it.

    `tell` gets a line of kind "started" of each mode as soon as it is warm: of a run that is killed
    that is what stays. When SIGTERM comes what there is, is the result. Every process that is
    started is ended before this returns or raises.
    """
    with ExitStack() as stack:
        if case.large and settings.suite == "gpu":
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="acc-bench-"))
            settings = replace(settings, kept=Path(folder))
        return _measure_case(case, settings, tell)


def _measure_case(case: Case, settings: Settings, tell: Tell) -> CaseResult:
    settings = settings_of(case, settings)
    settings = replace(settings, deadline=time.monotonic() + settings.limit_s)
    result = CaseResult(case.name, complete=False)
    found: dict[str, ModeRun] = {}
    left = sorted(settings.modes, key=STARTING.index)
    tried: dict[str, list[dict[str, Any]]] = {mode: [] for mode in settings.modes}
    try:
        for mode in tuple(left):
            run = _begin(case, mode, settings, tried[mode], result)
            left.remove(mode)
            if run is not None:
                found[mode] = run
                tell(_started_line(case, run, settings))
        runs = [found[mode] for mode in MODES if mode in found]
        if runs and settings.kept is None:
            _finish(runs, settings)
        result.complete = True
        if settings.suite == "gpu" and {"eager", "acc"} <= found.keys():
            _judge_start(case, found["eager"], found["acc"], settings, result)
    except Stopped:
        result.stopped = True
        if result.complete:
            result.notes.append(f"{case.name}: acc with warm caches {STOPPED}")
    finally:
        for run in found.values():
            run.worker.close(0.0 if result.stopped else GRACE_S)  # who stops a run does not wait
    runs = [found[mode] for mode in MODES if mode in found]
    _compare(case, runs, settings, result)
    for run in runs:
        result.lines.append(_result_line(case, run, settings, tried[run.mode], result))
    for mode in left:
        result.notes.append(f"{case.name}: {mode} {STOPPED}")
        result.lines.append(_absent_line(case, mode, settings, tried[mode], STOPPED))
    _judge(case, found, settings, result)
    return result


def _begin(
    case: Case,
    mode: str,
    settings: Settings,
    tried: list[dict[str, Any]],
    result: CaseResult,
) -> ModeRun | None:
    """Starts `mode`; None, and in `result` why, when it does not run."""
    try:
        run = start_mode(case, mode, settings, tried)
    except WorkerError as error:
        refusal = _refusal(error) if mode == "capture" else None
        if refusal is None:
            result.failures.append(f"{case.name}: {mode} does not run: {error}")
            return None
        result.notes.append(f"{case.name}: the step is not captured: {refusal}")
        tried[-1]["error"] = refusal
        run = None
    else:
        if run is None:
            errors = "; ".join(f"{t['variant']}: {t.get('error')}" for t in tried)
            result.notes.append(f"{case.name}: no form of {mode} runs: {errors}")
    if run is None:
        result.lines.append(_absent_line(case, mode, settings, tried))
    return run


def _refusal(error: WorkerError) -> str | None:
    """Why torchacc.capture does not replay the step; None when something else went wrong."""
    last = str(error).strip().splitlines()[-1]
    _, mark, reason = last.partition("[torchacc.capture] ")
    # A result file names no folders.
    return re.sub(r"/\S*/", "", reason) if mark else None


def settings_of(case: Case, settings: Settings) -> Settings:
    """With the tuned form of eager, if a must of the case is about it; without a mode that the case
    does not have."""
    wanted = set(settings.modes)
    if "eager_tuned" in case.must and {"eager", "acc"} <= wanted:
        wanted.add("eager_tuned")
    if not case.hand_captured:
        wanted.discard("graph")
    return replace(settings, modes=tuple(mode for mode in MODES if mode in wanted))


def _compare(case: Case, runs: list[ModeRun], settings: Settings, result: CaseResult) -> None:
    """Compares every mode with eager, or with the first mode when eager is not run."""
    if not runs:
        return
    reference = next((run for run in runs if run.mode == "eager"), runs[0])
    tolerance = (settings.suite == "gpu" and case.gpu_tolerance) or case.tolerance
    for run in runs:
        exact = run is reference
        why = mismatch(reference.checksum, run.checksum, exact=exact, tolerance=tolerance)
        if why is not None:
            result.failures.append(
                f"{case.name}: checksum mismatch, {run.mode} ({run.variant}) against "
                f"{reference.mode} ({'bit-equal' if exact else 'within tolerance'} expected): {why}"
            )


def _started_line(case: Case, run: ModeRun, settings: Settings) -> dict[str, Any]:
    """What is known of a mode before the windows that count."""
    return {
        "kind": "started",
        "case": case.name,
        "mode": run.mode,
        "threads": len(settings.cores),
        "variant": run.variant,
        "first_step_s": run.first_step_s,
        "step20_s": run.step20_s,
        "warm_ms": run.step_ms,
    }


def _absent_line(
    case: Case,
    mode: str,
    settings: Settings,
    tried: list[dict[str, Any]],
    why: str = "none runs",
) -> dict[str, Any]:
    names = ("median_ms", "min_ms", "max_ms", "first_step_s", "step20_s", "peak_mib", "checksum")
    return {
        "kind": "result",
        "case": case.name,
        "mode": mode,
        "threads": len(settings.cores),
        "n": 0,
        **dict.fromkeys(names),
        "suite": settings.suite,
        "variants": tried,
        "why": why,
    }


def _result_line(
    case: Case,
    run: ModeRun,
    settings: Settings,
    tried: list[dict[str, Any]],
    result: CaseResult,
) -> dict[str, Any]:
    """The JSON line of one mode; adds a sentence to `result` when foreign load spoils it."""
    if not result.complete and not run.windows:
        run.windows.append(run.warm)
    selection = stats.select(run.windows)
    if not selection.is_valid() and result.complete:
        result.invalid.append(
            f"{case.name}: {selection.dropped} of {selection.total} windows of {run.mode} had "
            f"foreign load (at most {stats.MAX_DROPPED_FRACTION:.0%} may). Repeat the run on a "
            "quiet machine."
        )
    clean = selection.clean
    times = [window.step_ms for window in clean]
    steps = sum(window.steps for window in clean)
    peak, host_peak = run.memory.get("peak_mib"), run.memory.get("host_peak_mib", 0.0)
    if settings.suite == "host" and peak is not None:
        peak = max(peak, run.sampled_peak_mib)
    return {
        "kind": "result",
        "case": case.name,
        "mode": run.mode,
        "threads": len(settings.cores),
        "n": len(clean),
        "median_ms": stats.median(times) if times else None,
        "min_ms": min(times) if times else None,
        "max_ms": max(times) if times else None,
        "first_step_s": run.first_step_s,
        "step20_s": run.step20_s,
        "peak_mib": peak,
        "checksum": run.checksum.digest,
        "suite": settings.suite,
        "variant": run.variant,
        "steps": steps,
        "cpu_ms": 1000.0 * sum(window.cpu_seconds for window in clean) / steps if steps else None,
        "dropped": selection.dropped,
        "valid": selection.is_valid() and result.complete,
        "host_peak_mib": max(host_peak, run.sampled_peak_mib),
        "variants": tried,
        "versions": run.versions,
    }


def ratio_between(baseline: ModeRun, measured: ModeRun) -> Ratio | None:
    """How many times faster `measured` is, over the alternations in which both were clean."""
    left, right = stats.pair(
        stats.select(baseline.windows).clean, stats.select(measured.windows).clean
    )
    return stats.speedup(left, right) if left else None


def _judge(case: Case, runs: dict[str, ModeRun], settings: Settings, result: CaseResult) -> None:
    """Adds a line per ratio and per memory requirement."""
    for against in BASELINES:
        for mode in MODES:
            if mode == against or not {mode, against} <= runs.keys():
                continue
            if mode not in OURS and against != "eager":
                continue
            ratio = ratio_between(runs[against], runs[mode])
            if ratio is None:
                continue
            must = _musts(case, settings).get(against) if mode == "acc" else None
            valid = result.complete and all(
                stats.select(runs[name].windows).is_valid() for name in (mode, against)
            )
            line = {
                "kind": "ratio",
                "case": case.name,
                "mode": mode,
                "against": against,
                "threads": len(settings.cores),
                "ratio": ratio.value,
                "low": ratio.low,
                "high": ratio.high,
                "must": must,
                "valid": valid,
                "holds": ratio.holds(must) if valid and must is not None else None,
                "goal": _goal(case, settings, against) if mode == "acc" else None,
            }
            result.lines.append(line)
            if line["holds"] is False:
                result.missed.append(
                    f"{case.name}: {mode} is {ratio.value:.3f}x as fast as {against} "
                    f"(95 %: {ratio.low:.3f} to {ratio.high:.3f}), must be {must:.2f}x"
                )
    _judge_memory(case, settings, result)


def _musts(case: Case, settings: Settings) -> Mapping[str, float]:
    """What is required of speed in such a run; the host's musts are for one thread."""
    if settings.suite == "gpu":
        return case.gpu_must
    return case.must if len(settings.cores) == 1 else {}


def _goal(case: Case, settings: Settings, against: str) -> float | None:
    """The goal against eager; on a GPU against what the first must is about."""
    if settings.suite == "host":
        return case.goal if against == "eager" else None
    return case.gpu_goal if against == next(iter(case.gpu_must), None) else None


def _judge_memory(case: Case, settings: Settings, result: CaseResult) -> None:
    peaks = {line["mode"]: line["peak_mib"] for line in result.lines if line["kind"] == "result"}
    if peaks.get("acc") is None or not peaks.get("eager"):
        return
    ratio = peaks["acc"] / peaks["eager"]
    on_gpu = settings.suite == "gpu"
    must = GPU_MEMORY_MUST if on_gpu else case.memory_must
    holds = ratio <= must
    result.lines.append(
        {
            "kind": "memory",
            "case": case.name,
            "mode": "acc",
            "against": "eager",
            "ratio": ratio,
            "threads": len(settings.cores),
            "must": must,
            "holds": holds,
            "goal": GPU_MEMORY_GOAL if on_gpu else None,
        }
    )
    if not holds:
        result.missed.append(
            f"{case.name}: acc needs {ratio:.2f}x the memory of eager ({peaks['acc']:.1f} against "
            f"{peaks['eager']:.1f} MiB above the level before the first step), at most "
            f"{must:.2f}x"
        )


def _judge_start(
    case: Case, eager: ModeRun, acc: ModeRun, settings: Settings, result: CaseResult
) -> None:
    """Adds lines of how long acc takes to the end of step 20 over eager, from caches that were
    empty and, in one more process, from those that the first has filled."""
    _add_start(case, "cold", acc.step20_s, eager.step20_s, settings, result)
    if not settings.warm_start:
        return
    spec = worker_spec(case.name, acc.mode, acc.variant, settings)
    worker = settings.spawn(spec, caches=acc.worker.caches)
    try:
        worker.ask({"do": "build"}, SETUP_TIMEOUT_S)
        again = worker.ask({"do": "cold", "steps": COLD_STEPS}, SETUP_TIMEOUT_S)
        _add_start(case, "warm", again["total_s"], eager.step20_s, settings, result)
    except WorkerError as error:
        result.failures.append(f"{case.name}: acc does not run with caches that are warm: {error}")
    finally:
        worker.close()


def _add_start(
    case: Case, cache: str, seconds: float, eager_s: float, settings: Settings, result: CaseResult
) -> None:
    over, must = seconds - eager_s, GPU_START_MUST[cache]
    result.lines.append(
        {
            "kind": "start",
            "case": case.name,
            "mode": "acc",
            "against": "eager",
            "threads": len(settings.cores),
            "cache": cache,
            "seconds": seconds,
            "over_eager_s": over,
            "must": must,
            "holds": over <= must,
            "goal": GPU_START_GOAL[cache],
        }
    )
    if over > must:
        result.missed.append(
            f"{case.name}: step 20 of acc, cache {cache}: {over:.2f} s over eager's "
            f"{eager_s:.2f} s, at most {must:.1f} s"
        )
