"""Strict mode: what keeps a warm training step from being a replay is an error."""

from __future__ import annotations

from types import TracebackType

from torchacc_device import _C


class strict:
    """Switches strict mode on or off for the calling thread, as `torch.set_grad_enabled` does.

        with torchacc.strict(after=3):
            for x, y in loader:
                train_step(x, y)

    A plain call is a setting; as a context manager it puts back what was. ACC_STRICT=1 begins every
    thread as `torchacc.strict()` would.

    The first `after` steps that train are the warm-up. From then on these are errors
    (RuntimeError), which name the line and what to do:

    * work is submitted before the end of a step that trains: a value is read, the device or an
      event is waited for, an operator without a kernel that can be recorded runs at once, an
      address is asked for. The error is raised before anything is submitted: what was recorded is
      still pending, and all tensors are as they were.
    * a step that trains has a new plan. `torchacc.explain()` has the same reason. The error is
      raised at the end of the step, which was done: parameters are as after it.

    Steps end at `optimizer.step()`, a loader's next batch, `mark_step()` and `with step():`. Where
    an optimizer has not taken its first step, a GradScaler has to ask whether this is it: that step
    may do as it likes, and is none of the warm-up. A step
    trains when one of its matrix products or convolutions was recorded with gradients on or, where
    it has none, when gradients are on where it ends. So evaluation under `torch.no_grad()` or
    `torch.inference_mode()` is left alone. What is meant to be otherwise goes into
    `with torchacc.strict(False):`.

    Args:
        enabled: False switches strict mode off.
        after: how many steps that train are the warm-up, 0 or more.

    Raises:
        ValueError: `after` is negative.
    """

    def __init__(self, enabled: bool = True, *, after: int = 3) -> None:
        if after < 0:
            raise ValueError(f"[torchacc.strict] after is {after}: steps are counted from 0 on.")
        # What to put back, by entry; the first entry puts back what was before the plain call.
        self._before: list[tuple[bool, int]] = []
        self._first: tuple[bool, int] | None = _C.strict()
        self._now = (bool(enabled), after)
        _C.set_strict(*self._now)

    def __enter__(self) -> None:
        # Again: the object may be entered later, or once more.
        self._before.append(_C.strict() if self._first is None else self._first)
        self._first = None
        _C.set_strict(*self._now)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _C.set_strict(*self._before.pop())
