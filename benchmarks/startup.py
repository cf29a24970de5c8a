"""Measures how a program starts: its first step and its first twenty, with caches cold and warm.

Every measurement is a process of its own. What it compiles goes to a folder of its own
(`ACC_CACHE_DIR`, Inductor's and Triton's); the process after it, which finds that, is the warm one.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import measure, stats
from benchmarks.cases import CASES, variants_of
from benchmarks.driver import Stopped, Worker, WorkerError
from benchmarks.measure import COLD_STEPS, SETUP_TIMEOUT_S, STOPPED, CaseResult, Settings

CASE = "gpt"
REPEATS = 3
# A pair of processes of torch.compile takes more than a minute.
COMPILE_REPEATS = 1
MODES = ("eager", "compile", "acc")
CACHES = ("cold", "warm")
FIELDS = {"first_step_s": "first_step_s", "step20_s": "total_s"}

# Seconds over eager's that acc may take, by suite, cache and field.
MUSTS = {
    ("host", "cold", "first_step_s"): 1.0,
    ("host", "cold", "step20_s"): 3.0,
    ("host", "warm", "first_step_s"): 1.0,
    ("host", "warm", "step20_s"): 0.5,
} | {("gpu", cache, "step20_s"): most for cache, most in measure.GPU_START_MUST.items()}

Seconds = dict[str, list[dict[str, float]]]
Start = Callable[[dict[str, Any], Path], Worker]


def _start(spec: dict[str, Any], caches: Path) -> Worker:
    return Worker(spec, caches=caches)


def _once(spec: dict[str, Any], caches: Path, start: Start) -> tuple[bool, dict[str, float]]:
    """Whether nothing else ran meanwhile, and the seconds of one process's first steps."""
    worker = start(spec, caches)
    try:
        worker.ask({"do": "build"}, SETUP_TIMEOUT_S)
        request = {"do": "cold", "steps": COLD_STEPS}
        window, answer = worker.watch(0, request, "total_s", SETUP_TIMEOUT_S)
        return not window.is_dirty(), {name: answer[key] for name, key in FIELDS.items()}
    finally:
        worker.close()


def _repeat(spec: dict[str, Any], repeats: int, start: Start) -> tuple[Seconds, int]:
    """The seconds of `repeats` clean pairs of processes, by cache, and how many were not clean.

    Twice as many pairs are tried at most; others then count although they are not clean. Eager has
    no cache: one process is both.
    """
    caches = CACHES if spec["mode"] != "eager" else CACHES[:1]
    pairs: list[tuple[bool, dict[str, dict[str, float]]]] = []
    while len(pairs) < 2 * repeats and sum(clean for clean, _ in pairs) < repeats:
        with tempfile.TemporaryDirectory(prefix="acc-bench-") as folder:
            runs = {cache: _once(spec, Path(folder), start) for cache in caches}
        clean = all(was_clean for was_clean, _ in runs.values())
        pairs.append((clean, {cache: seconds for cache, (_, seconds) in runs.items()}))
    pairs.sort(key=lambda pair: not pair[0])
    counted = pairs[:repeats]
    found = {cache: [seconds[cache] for _, seconds in counted] for cache in caches}
    found.setdefault("warm", found["cold"])
    return found, sum(not clean for clean, _ in counted)


def measure_startup(settings: Settings, start: Start = _start) -> CaseResult:
    """The lines of kind "startup" of the modes of `settings` that start in different ways."""
    result = CaseResult(CASE)
    case = CASES[CASE]
    medians: dict[tuple[str, str, str], float] = {}
    for mode in (mode for mode in MODES if mode in settings.modes):
        compiles = mode == "compile"
        forms = settings.compile_forms if compiles else ()
        variant = (*forms, *variants_of(case, mode))[0]
        spec = measure.worker_spec(CASE, mode, variant, settings)
        try:
            found, dirty = _repeat(spec, COMPILE_REPEATS if compiles else REPEATS, start)
        except WorkerError as error:
            result.failures.append(f"{CASE}: {mode} does not start: {error}")
            continue
        except Stopped:
            result.stopped = True
            result.notes.append(f"{CASE}: starts of {mode} {STOPPED}")
            break
        if dirty:
            result.invalid.append(f"{CASE}: {dirty} starts of {mode} had foreign load")
        for cache, runs in found.items():
            for name in FIELDS:
                medians[mode, cache, name] = stats.median([run[name] for run in runs])
                eager = medians.get(("eager", cache, name))
                must = MUSTS.get((settings.suite, cache, name))
                line = _line(mode, cache, name, medians[mode, cache, name], eager, must)
                line.update(variant=variant, threads=len(settings.cores), n=len(runs), dirty=dirty)
                result.lines.append(line)
                if line["holds"] is False:
                    result.missed.append(
                        f"{CASE}: {name} of {mode}, cache {cache}: {line['over_eager_s']:.2f} s "
                        f"over eager's {eager:.2f} s, at most {line['must']:.1f} s"
                    )
    return result


def _line(
    mode: str, cache: str, name: str, seconds: float, eager: float | None, must: float | None
) -> dict[str, Any]:
    over = None if eager is None or mode == "eager" else seconds - eager
    if mode != "acc" or over is None:
        must = None
    return {
        "kind": "startup",
        "case": CASE,
        "mode": mode,
        "cache": cache,
        "what": name,
        "seconds": seconds,
        "over_eager_s": over,
        "must": must,
        "holds": None if must is None else over <= must,
    }
