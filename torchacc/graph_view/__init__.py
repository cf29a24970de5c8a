"""What a step does: the plan that ran last, as a page, a picture, a Graphviz graph or text."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torchacc.boundary import sync
from torchacc.device import lazy_device
from torchacc.graph_view import dot, html, svg, text
from torchacc.graph_view.plan import PlanData
from torchacc_device import _C

_FORMATS: dict[str, Callable[[PlanData], str]] = {
    ".html": html.render,
    ".dot": dot.render,
    ".svg": svg.render,
    ".txt": text.render,
}
_WARM_UP, _TIMED = 2, 3  # calls of `step`

_lock = threading.Lock()
_timing = 0  # how many `profile_plans` are open


def graph(path: str | os.PathLike[str], *, step: Callable[[], object] | None = None) -> None:
    """Writes the plan that ran last on the current device to `path`, for people.

    The suffix chooses: `.html` a page with search, steps, memory and times; `.svg` a picture;
    `.dot` for Graphviz; `.txt` text. The file needs nothing beside itself.

    With `step`, a function of one training step, it is called five times: twice to make plans and
    kernels, three times while the time of each step of a plan is taken. The largest plan of those
    calls is written. Without it, times are those that were taken within `profile_plans()`, or while
    the plan's kernels were compared with the operators that they replace.

    Raises ValueError for another suffix, before anything is run; RuntimeError when no plan has run
    on the device, or none in the calls of `step`; OSError when the file cannot be written.
    """
    target = Path(path)
    render = _FORMATS.get(target.suffix.lower())
    if render is None:
        raise ValueError(
            f"[graph] '{target.name}' ends in '{target.suffix}', which is no format. Use one of:"
            f" {', '.join(_FORMATS)}."
        )
    ran = True
    if step is not None:
        sync()  # what waits is not of `step`
        before = _C.stats().get("flushes")
        _run_timed(step)
        ran = _C.stats().get("flushes") != before  # else the last plan is not of `step`
    device = lazy_device()
    plan: PlanData | None = _C.plan_data(device.index, largest=step is not None) if ran else None
    if plan is None:
        raise RuntimeError(f"[graph] no plan has run on {device}; {_why_none(device.index, ran)}")
    target.write_text(render(plan), encoding="utf-8")


@contextmanager
def profile_plans() -> Iterator[None]:
    """Inside, the time of each step of each plan is taken, for `graph`.

    Each step of a plan is then waited for; on the host it costs two readings of the clock. The
    fastest time counts.
    """
    global _timing
    with _lock:
        _timing += 1
        if _timing == 1:
            _C.time_plans(True)
    try:
        yield
    finally:
        with _lock:
            _timing -= 1
            if _timing == 0:
                _C.time_plans(False)


def _why_none(device: int, ran: bool) -> str:
    if _C.mode() == "eager":
        return "ACC_MODE=eager runs operators without plans. Unset it."
    if not ran:
        return (
            "step recorded nothing there. Compute on it in step, and not within torchacc.eager()."
        )
    return (
        f"{_C.pending(device)} recorded operators wait. Run a step first, or submit what was"
        " recorded with torchacc.sync()."
    )


def _run_timed(step: Callable[[], object]) -> None:
    for _ in range(_WARM_UP):
        step()
        sync()
    with profile_plans():
        _C.time_plans(True)  # inside a program's own profile_plans, too, only what step runs counts
        for _ in range(_TIMED):
            step()
            sync(wait=True)


__all__ = ["graph", "profile_plans"]
