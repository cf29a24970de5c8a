"""Why there were new plans: operator, argument, old value, new value, line of the program."""

from __future__ import annotations

import dataclasses

from torchacc_device import _C


@dataclasses.dataclass(frozen=True)
class NewPlan:
    """Why one plan was made.

    `why` is one of

    * "first": none was kept.
    * "changed": the step differs from the kept plan that begins with the most of its operators.
      `changed` says in what: "operator" (another one, or more, or fewer), "argument" (of
      `operator`: its `argument`), "setting" (default dtype, grad mode, ...) or "memory" (which
      arguments share memory). `aspect`, `before` and `after` are text: "shape", "[32, 8]",
      "[7, 8]".
    * "rest": what was left of a step that the plan before had cut.
    * "kept": the program still holds a result at the end that it did not hold before.
    * "other": no plan that is kept begins alike.

    `place` is the line of the program; `operators` how many the step has; `ended_by` the name of
    the counter of why it was submitted.
    """

    why: str
    text: str
    place: str
    device: int
    operators: int
    ended_by: str
    changed: str
    operator: str
    argument: str
    aspect: str
    before: str
    after: str

    def __str__(self) -> str:
        place = f"{self.place}: " if self.place else ""
        return f"{place}{self.text}"


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What `explain` returns; its text is for people. `forgotten`: older plans, not among these."""

    plans: tuple[NewPlan, ...]
    forgotten: int

    def __str__(self) -> str:
        if not self.plans:
            return "no new plans"
        count = len(self.plans) + self.forgotten
        lines = [f"{count} new plan{'s' if count > 1 else ''}"]
        if self.forgotten:
            lines[0] += f", the last {len(self.plans)} of them:"
        lines += [f"  {plan}" for plan in self.plans]
        return "\n".join(lines)


def explain() -> Explanation:
    """Why there were new plans since the last call, or since the process began.

        for x, y in loader:
            train_step(x, y)
        print(torchacc.explain())

    A plan is made when a step is not one that was recorded before: another shape, dtype or number
    that is structure, an operator more, another setting. For each, the first difference is named,
    with its line. Learning rates and other numbers that only values depend on make no plans. The
    last 256 plans are remembered. Submits nothing itself.
    """
    rows, forgotten = _C.new_plans()
    return Explanation(tuple(NewPlan(**row) for row in rows), forgotten)
