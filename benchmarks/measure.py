"""Measures one case: starts every mode, compares what they compute, then alternates windows."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from benchmarks import load, stats
from benchmarks.cases import CASES, Case, variants_of
from benchmarks.checksums import Checksum, mismatch
from benchmarks.driver import Worker, WorkerError, WorkerTimeout
from benchmarks.stats import Ratio, Window
from benchmarks.worker import BASELINES

COLD_STEPS = 20
SETUP_TIMEOUT_S = 600.0
# On a GPU a loss is read now and then: who reads each one has the GPU wait for Python each time.
READ_EVERY = {"host": 1, "gpu": 10}
GPU_MEMORY_MUST = 1.0  # over eager's peak
# What is measured against them. "capture" is acc with the step under torchacc.capture.
OURS = ("acc", "capture")
MODES = (*BASELINES, *OURS)

Spawn = Callable[[Mapping[str, Any]], Worker]


@dataclass(frozen=True)
class Settings:
    """How a run measures. `suite` is "host" or "gpu"; `cores` are what every mode is pinned to.

    `compile_forms` are the forms of torch.compile that are tried, in place of all of a case's, each
    for at most `compile_timeout_s`, if that is less than the case says.
    """

    suite: str
    modes: tuple[str, ...]
    cores: tuple[int, ...]
    alternations: int = 11
    window_s: float = 1.0
    spawn: Spawn = Worker
    compile_forms: tuple[str, ...] = ()
    compile_timeout_s: float = math.inf

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
    step_ms: float
    windows: list[Window] = field(default_factory=list)
    memory: dict[str, float] = field(default_factory=dict)


@dataclass
class CaseResult:
    """All that one case yields: lines for the JSON file, and what makes the run fail.

    `failures` (wrong results, a mode that does not run), `invalid` (foreign load), and
    `missed` (a must that does not hold) are sentences; `notes` are for the reader only.
    """

    case: str
    lines: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    invalid: list[str] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def worker_spec(case: str, mode: str, variant: str, settings: Settings) -> dict[str, Any]:
    """What the worker of a mode is told."""
    baseline_device = "cuda" if settings.suite == "gpu" else "cpu"
    spec: dict[str, Any] = {
        "case": case,
        "mode": mode,
        "variant": variant,
        "device": "acc" if mode in OURS else baseline_device,
        "cores": list(settings.cores),
        "threads": len(settings.cores),
        "read_every": READ_EVERY[settings.suite],
        "small": settings.suite == "host" and case in CASES and CASES[case].gpu_only,
    }
    if mode in OURS:
        spec["executor"] = "cuda" if settings.suite == "gpu" else "host"
    return spec


def _start(case: Case, mode: str, variant: str, settings: Settings) -> ModeRun:
    """Starts one variant of a mode, runs its first steps from cold and warms it up."""
    worker = settings.spawn(worker_spec(case.name, mode, variant, settings))
    try:
        versions = worker.ask({"do": "build"}, SETUP_TIMEOUT_S)["versions"]
        level = load.tree_mib(worker.pid)
        peak = level

        def sample() -> None:
            nonlocal peak
            peak = max(peak, load.tree_mib(worker.pid))

        limit = SETUP_TIMEOUT_S
        if mode == "compile":
            limit = min(case.compile_timeout_s, settings.compile_timeout_s)
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
            step_ms=_warm_up(worker, settings.window_s),
        )
    except BaseException:
        worker.close()
        raise


def _warm_up(worker: Worker, window_s: float) -> float:
    """Runs growing windows until one is long enough to tell the step time (ms)."""
    steps = 1
    while True:
        window = worker.window(0, steps, SETUP_TIMEOUT_S)
        if window.seconds >= 0.3 * window_s or steps >= 4096:
            return window.step_ms
        steps *= 2


def _probe_ms(run: ModeRun, settings: Settings) -> float:
    steps = _steps_per_window(run.step_ms, 0.5 * settings.window_s)
    return stats.median([run.worker.window(0, steps, SETUP_TIMEOUT_S).step_ms for _ in range(3)])


def _steps_per_window(step_ms: float, window_s: float) -> int:
    return max(1, min(10_000, round(1000.0 * window_s / step_ms)))


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
            steps = _steps_per_window(run.step_ms, settings.window_s)
            limit = SETUP_TIMEOUT_S + 20.0 * steps * run.step_ms / 1000.0
            if steps > 1:
                # The other modes have emptied the processor's caches.
                run.worker.window(alternation, max(1, steps // 20), limit)
            windows.append(run.worker.window(alternation, steps, limit))
            run.windows.append(windows[-1])
        complete += not any(window.is_dirty() for window in windows)


def measure_case(case: Case, settings: Settings) -> CaseResult:
    """Runs one case in all modes of `settings` and judges it.

    Every process that is started is ended before this returns or raises.
    """
    settings = settings_of(case, settings)
    result = CaseResult(case.name)
    runs: list[ModeRun] = []
    tried: dict[str, list[dict[str, Any]]] = {mode: [] for mode in settings.modes}
    try:
        for mode in settings.modes:
            try:
                run = start_mode(case, mode, settings, tried[mode])
            except WorkerError as error:
                refusal = _refusal(error) if mode == "capture" else None
                if refusal is not None:
                    result.notes.append(f"{case.name}: the step is not captured: {refusal}")
                    tried[mode][-1]["error"] = refusal
                    result.lines.append(_absent_line(case, mode, settings, tried[mode]))
                    continue
                result.failures.append(f"{case.name}: {mode} does not run: {error}")
                continue
            if run is None:
                errors = "; ".join(f"{t['variant']}: {t.get('error')}" for t in tried[mode])
                result.notes.append(f"{case.name}: no form of {mode} runs: {errors}")
                result.lines.append(_absent_line(case, mode, settings, tried[mode]))
            else:
                runs.append(run)
        _compare(case, runs, settings, result)
        if runs:
            alternate(runs, settings)
        for run in runs:
            run.memory = run.worker.ask({"do": "memory"}, SETUP_TIMEOUT_S)
    finally:
        for run in runs:
            run.worker.close()
    for run in runs:
        result.lines.append(_result_line(case, run, settings, tried[run.mode], result))
    _judge(case, {run.mode: run for run in runs}, settings, result)
    return result


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
    for run in runs:
        exact = run is reference
        why = mismatch(reference.checksum, run.checksum, exact=exact, tolerance=case.tolerance)
        if why is not None:
            result.failures.append(
                f"{case.name}: checksum mismatch, {run.mode} ({run.variant}) against "
                f"{reference.mode} ({'bit-equal' if exact else 'within tolerance'} expected): {why}"
            )


def _absent_line(
    case: Case, mode: str, settings: Settings, tried: list[dict[str, Any]]
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
    }


def _result_line(
    case: Case,
    run: ModeRun,
    settings: Settings,
    tried: list[dict[str, Any]],
    result: CaseResult,
) -> dict[str, Any]:
    """The JSON line of one mode; adds a sentence to `result` when foreign load spoils it."""
    selection = stats.select(run.windows)
    if not selection.is_valid():
        result.invalid.append(
            f"{case.name}: {selection.dropped} of {selection.total} windows of {run.mode} had "
            f"foreign load (at most {stats.MAX_DROPPED_FRACTION:.0%} may). Repeat the run on a "
            "quiet machine."
        )
    clean = selection.clean
    times = [window.step_ms for window in clean]
    steps = sum(window.steps for window in clean)
    peak = run.memory["peak_mib"]
    if settings.suite == "host":
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
        "valid": selection.is_valid(),
        "host_peak_mib": max(run.memory["host_peak_mib"], run.sampled_peak_mib),
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
            valid = all(stats.select(runs[name].windows).is_valid() for name in (mode, against))
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
    """The goal against eager; that of cases which must be faster than torch.compile is for it."""
    if settings.suite == "host":
        return case.goal if against == "eager" else None
    aimed = "eager" if "eager" in case.gpu_must else "compile"
    return case.gpu_goal if against == aimed else None


def _judge_memory(case: Case, settings: Settings, result: CaseResult) -> None:
    peaks = {line["mode"]: line["peak_mib"] for line in result.lines if line["kind"] == "result"}
    if peaks.get("acc") is None or not peaks.get("eager"):
        return
    ratio = peaks["acc"] / peaks["eager"]
    must = case.memory_must if settings.suite == "host" else GPU_MEMORY_MUST
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
        }
    )
    if not holds:
        result.missed.append(
            f"{case.name}: acc needs {ratio:.2f}x the memory of eager ({peaks['acc']:.1f} against "
            f"{peaks['eager']:.1f} MiB above the level before the first step), at most "
            f"{must:.2f}x"
        )
