"""A step compared with eager PyTorch, operator by operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torchacc.progress import Progress
from torchacc_device import _C


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A value of the step that is not what ATen makes of the same inputs.

    `operator` made it, recorded at the line `place`; `value` is which of its results, or the
    argument that it writes. `kernel` is the generated kernel that computed it, with the operators
    (and their lines) that are `fused` in it; "" where it was the operator's own kernel. `wrong` of
    `elements` elements are further away than `tolerance`; `actual`, `expected` and `error` are of
    the worst.
    """

    operator: str
    place: str
    value: str
    kernel: str
    fused: tuple[tuple[str, str], ...]
    actual: float
    expected: float
    error: float
    tolerance: float
    wrong: int
    elements: int

    def __str__(self) -> str:
        where = f" at {self.place}" if self.place else ""
        text = (
            f"{self.operator}{where}, {self.value}: {self.wrong} of {self.elements} elements are"
            f" wrong, the worst is {self.actual:.9g} instead of {self.expected:.9g}"
            f" (error {self.error:.3g}, tolerance {self.tolerance:.3g})"
        )
        if self.kernel:
            names = ", ".join(dict.fromkeys(name for name, _ in self.fused))
            text += f"\n    computed by the generated kernel {self.kernel}: {names}"
        return text


@dataclasses.dataclass(frozen=True)
class Verified:
    """What `verify` returns; its text is for people.

    `result` is what the step returned. `operators` were recorded, in `plans` plans, whose steps
    were `kernels` generated kernels and else operators; `values` were compared. `problems` says why
    a plan could not be compared. True where all plans were, and nothing was wrong.
    """

    result: Any
    plans: int
    operators: int
    kernels: int
    values: int
    mismatches: tuple[Mismatch, ...]
    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.mismatches and not self.problems

    def __str__(self) -> str:
        lines = [
            f"{self.operators} operators in {self.plans} plans, {self.kernels} generated kernels, "
            f"{self.values} values compared: " + ("as ATen's" if self else "not verified")
        ]
        lines += [f"  could not be compared: {problem}" for problem in self.problems]
        lines += [f"  {mismatch}" for mismatch in self.mismatches[:1]]
        if (more := len(self.mismatches) - 1) > 0:
            names = ", ".join(dict.fromkeys(each.operator for each in self.mismatches[1:]))
            lines.append(f"  and {more} more values, later in the step: {names}")
        return "\n".join(lines)


def verify(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Verified:
    """Runs one step and compares each value that it makes with eager PyTorch's on the CPU.

        print(torchacc.verify(train_step, x, y))

    `step(*args, **kwargs)` is called once, and everything (parameters, optimizers, random streams)
    is afterwards as after one step. Each plan that it submits is run twice, step by step: made so
    that every value is kept, on copies, which tells apart operators that are fused otherwise; then
    as it always runs, generated kernels included. Beside it each recorded operator is called by
    itself, on the CPU. Behind each step of a plan what it made is compared, and replaced by ATen's:
    so each kernel sees right inputs, an error does not spread, and the first mismatch is where the
    error is.

    A value may differ by 16 times what ATen's differs by from the same computation in float64, and
    16 roundings of its type at its largest element. What is computed with drawn numbers, and
    float64 itself, is compared with ATen's alone, to 1,024 roundings (or 16 of the half types in
    the kernel). Integers and booleans are equal.

    It takes several times the time and the memory of a step; a terminal shows for how long it has
    been at it, and how much the step has submitted so far. What passes have merged so that no
    value of the recording is left is compared where its readers are.

    Raises:
        RuntimeError: nothing is recorded, with ACC_MODE=eager or within `eager()`, or the step
            is being verified already.
    """
    _C.flush(-1, "explicit")
    _C.begin_verify()
    try:
        with _progress():
            result = step(*args, **kwargs)
            _C.flush(-1, "explicit")
    finally:
        found = _C.end_verify()
    if found["plans"] == 0:
        raise RuntimeError(
            "[torchacc.verify] the step recorded nothing that could be verified. Unset "
            "ACC_MODE=eager, leave torchacc.eager(), and compute on acc inside."
        )
    kept, planned = found["all_kept"], found["as_planned"]
    rows = kept["mismatches"] or planned["mismatches"]
    return Verified(
        result=result,
        plans=found["plans"],
        operators=planned["operators"],
        kernels=planned["kernels"],
        values=kept["values"] + planned["values"],
        mismatches=tuple(
            Mismatch(**{**row, "fused": tuple(map(tuple, row["fused"]))}) for row in rows
        ),
        problems=tuple(found["problems"]),
    )


def _progress() -> Progress:
    """How much there is to do is known at the end only: the step is recorded while it runs."""
    before = _C.stats()

    def text() -> str:
        now = _C.stats()
        operators, plans = (now[name] - before[name] for name in ("nodes", "flushes"))
        return f"{operators} operators in {plans} plans"

    return Progress("verify", text)
