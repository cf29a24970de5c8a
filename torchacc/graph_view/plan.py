"""A plan as plain values: what the extension tells, and what every format derives from it."""

from __future__ import annotations

import bisect
from collections import Counter
from dataclasses import dataclass
from pathlib import PurePath
from typing import TypedDict

PLACES = ("arena", "own", "adopted", "given")  # of buffers, in the order in which they are shown
PLACE_TEXT = {
    "arena": "small intermediates, at planned offsets of one block",
    "own": "a block of its own, made before the first step that writes it",
    "adopted": "whatever memory the operator returned",
    "given": "there before: parameters, optimizer state, the batch",
    "none": "no memory: it stays in registers of a fused kernel",
}
ENDED_BY = {
    "flush_explicit": "the program asked for it (torchacc.sync(), synchronize())",
    "flush_read": "a value was read (item(), printing, a copy to the CPU)",
    "flush_step": "optimizer.step() ended",
    "flush_loader": "the loader handed out the next batch",
    "flush_fallback": "an operator came that cannot be recorded",
    "flush_data_dependent": "an operator came whose result's shape depends on data",
    "flush_cap": "too much was pending (ACC_MAX_PENDING, ACC_MAX_PENDING_MB)",
    "flush_event": "an event or a stream was queried",
    "flush_resize": "a tensor with contents was resized",
    "flush_pointer": "somebody asked for an address",
    "flush_eager": "ACC_MODE submits each operator at once",
    "flush_exit": "the process ended",
    "flush_exchange": "something was sent to another process",
    "flush_idle": "the program did nothing for a while, and other processes waited for it",
}


class Node(TypedDict):
    """An operator that runs. `reads` and `writes` are buffers, `step` is where it runs.

    `autograd` is the node of the backward pass that ran ("AddmmBackward0"; "" outside of it), and
    the place that of its forward operator, or of the Python that it ran.
    """

    op: str
    text: str
    file: str
    line: int
    function: str
    autograd: str
    step: int
    reads: list[int]
    writes: list[int]


class Step(TypedDict):
    """One operator (`kernel` is None), or all that one generated kernel computes.

    `seconds` is the time in the fastest timed run, None without one; `held_bytes` what the plan
    holds meanwhile: its arena and its blocks, inputs not counted.
    """

    nodes: list[int]
    kernel: int | None
    launches: int
    seconds: float | None
    held_bytes: int


class Buffer(TypedDict):
    """Memory of one tensor storage. `place` is a key of PLACE_TEXT; `offset` counts in the arena.

    `first` and `last` are the steps that touch it, where there is a place; an output is kept for
    the program beyond the last step.
    """

    kind: str
    place: str
    bytes: int
    offset: int
    group: int
    first: int
    last: int
    output: bool


class Kernel(TypedDict):
    """A generated kernel: the name of its function, operations on each element, operands."""

    name: str
    operations: int
    operands: int


class PlanData(TypedDict):
    """What `_C.plan_data` returns. `loop`: operators of the plans that run in turn, this first."""

    device: int
    ended_by: str
    loop: list[int]
    recorded: int
    arena_bytes: int
    peak_bytes: int
    timed_runs: int
    waits_for_kernels: bool
    nodes: list[Node]
    steps: list[Step]
    buffers: list[Buffer]
    kernels: list[Kernel]


def size_text(n: float) -> str:
    """`n` bytes for people: "312 B", "1.5 MiB"."""
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" or n >= 100 else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} GiB"


def time_text(seconds: float | None) -> str:
    """A time for people: "3.1 us", "12.4 ms"; "-" for None."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"


def short_op(name: str) -> str:
    """`add_` for "aten::add_.Tensor"."""
    return name.rpartition("::")[2].partition(".")[0]


def source_text(node: Node, full: bool = False) -> str:
    """`net.py:12 forward`, `net.py:12 forward, AddmmBackward0`, `backward of AddmmBackward0`, "".

    As far as it is known.
    """
    if not node["file"]:
        return f"backward of {node['autograd']}" if node["autograd"] else ""
    file = node["file"] if full else PurePath(node["file"]).name
    text = f"{file}:{node['line']} {node['function']}"
    return f"{text}, {node['autograd']}" if node["autograd"] else text


def step_label(plan: PlanData, step: Step) -> str:
    """The operator, or the operators of a fused step with how often each occurs."""
    names = Counter(short_op(plan["nodes"][node]["op"]) for node in step["nodes"])
    text = ", ".join(name if n == 1 else f"{name} x{n}" for name, n in names.items())
    return text if step["kernel"] is None else f"kernel {step['kernel']}: {text}"


def total_seconds(plan: PlanData) -> float | None:
    """The sum over all steps; None when they were not timed."""
    times = [step["seconds"] for step in plan["steps"] if step["seconds"] is not None]
    return sum(times) if times else None


def lifetime(plan: PlanData, buffer: Buffer) -> tuple[int, int]:
    """The steps during which the buffer holds memory, both included.

    Given memory is there from the start; an output stays to the end.
    """
    end = len(plan["steps"]) - 1 if buffer["output"] else buffer["last"]
    return (0 if buffer["place"] == "given" else buffer["first"]), end


def placed(plan: PlanData) -> list[int]:
    """The buffers that are in memory, in order of place and then of lifetime."""
    buffers = plan["buffers"]
    found = [i for i, buffer in enumerate(buffers) if buffer["place"] in PLACES]
    return sorted(
        found, key=lambda i: (PLACES.index(buffers[i]["place"]), lifetime(plan, buffers[i]))
    )


@dataclass
class Lane:
    """Where a buffer is drawn within its place: in rows of equal height, and in bytes."""

    row: int
    at: int


def lanes(plan: PlanData) -> dict[int, Lane]:
    """A lane for each buffer that is in memory; those alive together do not overlap in one place.

    In the arena `at` is the planned offset; elsewhere it is only for the picture.
    """
    found: dict[int, Lane] = {}
    for place in PLACES:
        rows, heights = _Packer(), _Packer()
        for i in placed(plan):
            buffer = plan["buffers"][i]
            if buffer["place"] != place:
                continue
            first, last = lifetime(plan, buffer)
            row = rows.put(first, last, 1)
            at = buffer["offset"]
            if place != "arena":
                at = heights.put(first, last, buffer["bytes"])
            found[i] = Lane(row, at)
    return found


class _Packer:
    """Puts intervals, in order of their begin, at the lowest free position."""

    def __init__(self) -> None:
        self._used: list[tuple[int, int, int]] = []  # begin, end, last step; by begin

    def put(self, first: int, last: int, size: int) -> int:
        self._used = [entry for entry in self._used if entry[2] >= first]
        at = 0
        for begin, end, _ in self._used:
            if begin - at >= size:
                break
            at = max(at, end)
        if size > 0:
            bisect.insort(self._used, (at, at + size, last))
        return at


def place_of(node: Node) -> tuple[str, int, str, str]:
    """What places differ by: file, line, function, node of autograd."""
    return node["file"], node["line"], node["function"], node["autograd"]


@dataclass
class Line:
    """What the operators of one line of the program amount to."""

    node: Node  # one of them, for its place
    operators: int = 0
    seconds: float = 0.0
    steps: int = 0


def by_line(plan: PlanData) -> list[Line]:
    """Lines of the program, the most expensive first.

    The time of a fused step goes to its operators in equal parts.
    """
    found: dict[tuple[str, int, str, str], Line] = {}
    for step in plan["steps"]:
        seen = set()
        for index in step["nodes"]:
            node = plan["nodes"][index]
            key = place_of(node)
            line = found.setdefault(key, Line(node))
            line.operators += 1
            line.seconds += (step["seconds"] or 0.0) / len(step["nodes"])
            line.steps += key not in seen
            seen.add(key)
    return sorted(found.values(), key=lambda line: (-line.seconds, -line.operators))


def _peak_step(plan: PlanData) -> str:
    held = [step["held_bytes"] for step in plan["steps"]]
    return f"in step {held.index(max(held))}" if held else "with no step"


def summary(plan: PlanData) -> list[str]:
    """What the plan is, in sentences for somebody who has never seen one."""
    steps, kernels = plan["steps"], [s for s in plan["steps"] if s["kernel"] is not None]
    inside = sum(len(step["nodes"]) for step in kernels)
    text = [
        f"The program called {plan['recorded']} operators on acc:{plan['device']} before the plan"
        f" ended: {ENDED_BY.get(plan['ended_by'], plan['ended_by'])}.",
        f"{len(plan['nodes'])} operators run, after unused ones were dropped and lists of tensors"
        f" taken apart, in {len(steps)} steps:"
        f" {len(steps) - len(kernels)} are one operator each, {len(kernels)} are generated kernels"
        f" that compute {inside} operators in one pass over memory each.",
        f"At its peak, {_peak_step(plan)}, it holds {size_text(plan['peak_bytes'])} beside its"
        f" inputs, {size_text(plan['arena_bytes'])} of it the arena.",
    ]
    seconds = total_seconds(plan)
    if seconds is None:
        text.append(
            "No times: run steps within `with torchacc.profile_plans():` before torchacc.graph, or"
            " call torchacc.graph(path, step=fn)."
        )
    else:
        text.append(
            f"The steps take {time_text(seconds)}, each at its best in {plan['timed_runs']} timed"
            " runs."
        )
    if plan["waits_for_kernels"]:
        text.append(
            "This run went without generated kernels: they are made meanwhile, and used from the"
            " plan's second run on."
        )
    if len(plan["loop"]) > 1:
        others = ", ".join(map(str, plan["loop"]))
        text.append(
            f"The loop runs {len(plan['loop'])} plans in turn, of {others} operators; this is the"
            " first of these. torchacc.graph(path, step=fn) shows the largest."
        )
    return text
