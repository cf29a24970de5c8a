"""Statistics of the benchmark harness: medians, intervals of ratios, the rule for a "must".

Pure functions on lists of numbers; nothing here reads a clock or a file.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

MIN_ALTERNATIONS = 9
MAX_DROPPED_FRACTION = 0.20
MUST_SLACK = 0.02
RESAMPLES = 4000


def median(values: Sequence[float]) -> float:
    """The median of `values` (any order). Raises ValueError when there are none."""
    if not values:
        raise ValueError("[benchmarks.stats] median of no values")
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return float(ordered[middle])
    return (ordered[middle - 1] + ordered[middle]) / 2.0


def percentile(values: Sequence[float], fraction: float) -> float:
    """The `fraction` quantile (0..1) of `values`, linear between neighbours."""
    if not values:
        raise ValueError("[benchmarks.stats] percentile of no values")
    ordered = sorted(values)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    weight = position - below
    return ordered[below] * (1.0 - weight) + ordered[above] * weight


@dataclass(frozen=True)
class Ratio:
    """How many times faster one mode is than a baseline: `value`, with a 95 % interval."""

    value: float
    low: float
    high: float

    def holds(self, must: float) -> bool:
        """Whether the requirement `>= must` holds: the lower end is at least must - 0.02."""
        return self.low >= must - MUST_SLACK


def speedup(
    baseline_ms: Sequence[float],
    measured_ms: Sequence[float],
    *,
    paired: bool = True,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Ratio:
    """median(baseline) / median(measured) with its 95 % bootstrap interval.

    With `paired`, element i of both lists comes from the same alternation, and alternations are
    resampled as a whole, so drift that hits both modes cancels. Without it the two lists are
    resampled independently. The result is the same for the same input and seed.
    Raises ValueError on empty or non-positive input, or on paired lists of unequal length.
    """
    if not baseline_ms or not measured_ms:
        raise ValueError("[benchmarks.stats] a ratio needs at least one value of each mode")
    if paired and len(baseline_ms) != len(measured_ms):
        raise ValueError(
            f"[benchmarks.stats] paired lists of {len(baseline_ms)} and {len(measured_ms)} values"
        )
    if min(baseline_ms) <= 0.0 or min(measured_ms) <= 0.0:
        raise ValueError("[benchmarks.stats] a time that is not positive")
    rng = random.Random(seed)
    samples = []
    for _ in range(resamples):
        picks = rng.choices(range(len(baseline_ms)), k=len(baseline_ms))
        others = picks if paired else rng.choices(range(len(measured_ms)), k=len(measured_ms))
        samples.append(
            median([baseline_ms[i] for i in picks]) / median([measured_ms[i] for i in others])
        )
    return Ratio(
        median(baseline_ms) / median(measured_ms),
        percentile(samples, 0.025),
        percentile(samples, 0.975),
    )


@dataclass(frozen=True)
class Window:
    """One timed window of one mode: `steps` steps that took `seconds` of wall-clock time.

    `cpu_seconds` is the CPU time of the mode's process tree, `foreign_seconds` the CPU time that
    anything else used on the watched cores, `cores` the number of cores the mode is pinned to.
    """

    alternation: int
    steps: int
    seconds: float
    cpu_seconds: float
    foreign_seconds: float
    cores: int

    @property
    def step_ms(self) -> float:
        """Milliseconds of wall-clock time per step."""
        return 1000.0 * self.seconds / self.steps

    def is_dirty(self) -> bool:
        """Whether foreign load makes the window worthless.

        That is more than 5 % of the time of the pinned cores, and more than 30 ms, because
        the kernel counts CPU time in ticks of 10 ms on both sides of the subtraction.
        """
        return self.foreign_seconds > max(0.05 * self.seconds * self.cores, 0.030)


@dataclass(frozen=True)
class Selection:
    """The windows of one mode that count, and how many were dropped for foreign load."""

    clean: list[Window]
    dropped: int

    @property
    def total(self) -> int:
        """All windows that were run."""
        return len(self.clean) + self.dropped

    def is_valid(self) -> bool:
        """False when more than 20 % of the windows were dropped, or none is left."""
        return bool(self.clean) and self.dropped <= MAX_DROPPED_FRACTION * self.total


def select(windows: Sequence[Window]) -> Selection:
    """Splits windows into those that count and those with foreign load."""
    clean = [window for window in windows if not window.is_dirty()]
    return Selection(clean, len(windows) - len(clean))


def pair(first: Sequence[Window], second: Sequence[Window]) -> tuple[list[float], list[float]]:
    """Milliseconds per step of the alternations that are present in both lists, in order."""
    by_alternation = {window.alternation: window for window in second}
    left, right = [], []
    for window in first:
        other = by_alternation.get(window.alternation)
        if other is not None:
            left.append(window.step_ms)
            right.append(other.step_ms)
    return left, right
