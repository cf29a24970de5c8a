"""Which epochs compute in half precision: TI-ACC's adaptive mixed precision.

TI-ACC's documents say what the parameters are and what each policy is for. By which rules policies
1 and 2 decide they do not say: those here are ours.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

# By what the first and the second generation of TI-ACC call them.
TIME, LEARNING_RATE, LOSS = 0, 1, 2
_NAMES = {
    "TimeSchedulePolicy": TIME,
    "TimeLearningRatePolicy": LEARNING_RATE,
    "LossPolicy": LOSS,
}
# A scale below it makes gradients smaller, which is no reason to scale: something else is wrong.
_LEAST_SCALE = 1.0


class _Default(int):
    """A default, which is told from the same number given by the program."""


_START, _INTERVAL, _INTERVAL_HOLD = _Default(10), _Default(1000), _Default(100)


@dataclass
class _State:
    """What a policy knows from the epochs before; plain values, for checkpoints."""

    # The last epoch that was decided on, and what was decided.
    epoch: int | None = None
    enabled: bool = False
    reason: str = "no epoch has been asked about"
    # The scaler's scale when it was last read; None outside the window.
    scale: float | None = None
    # Policy 1: the epoch of the decision that holds, None outside the window; what it was; the
    # learning rate then; how often the scaler has backed off since.
    decided: int | None = None
    held: bool = False
    lr: float | None = None
    backoffs: int = 0
    # Policy 2: the loss that was last given; the period which one that is no finite number ended.
    loss: float | None = None
    ended: int | None = None


class MixedPrecision_TrainingPolicy:
    """Decides for each epoch whether its autocast region is enabled.

    An epoch is decided on when it is first asked about: later calls with the same epoch answer the
    same and read nothing, so that a program may ask in each step. Then the scaler's scale is read
    at most once, and `loss`, if it is a tensor, with policy 2 alone. An epoch before the last one
    begins anew.

    * Policy 0, "TimeSchedulePolicy": on in the epochs `start_step` to `end_step`, both included.
    * Policy 1, "TimeLearningRatePolicy": decides in the same epochs, and each decision holds for
      `hold_step` of them: on, unless since the decision before (before the first one: since the
      epoch before) the learning rate has risen, or the scaler has backed off more than once. It is
      for phases in which the loss fluctuates.
    * Policy 2, "LossPolicy": on in the epochs `interval_time` to `interval_time +
      interval_hold_time`, both included, and again from each multiple of `interval_time`, while the
      loss falls neither too slowly nor too fast: by `r_min` to `r_max` of itself, and once on by
      `margin` less or more. A loss that is no finite number ends the period. With the defaults
      nothing is on before epoch 1000.

    Where the scale has fallen below 1 the region is off, with a warning. In several processes it is
    on where all of them want it, so that they compute alike: all have to ask about each epoch, in
    the default group of torch.distributed.

    Args:
        policy: 0, 1, 2, or the name.
        start_step, hold_step, end_step, interval_time, interval_hold_time: in epochs. Those that
            the policy does not use may be anything. Policies 0 and 1 need `end_step`, policy 1
            `hold_step`.
        start_time, hold_time, end_time, test_interval, test_step: other names of these.

    Raises:
        ValueError: a parameter that the policy uses is missing or wrong; the text names it.
        TypeError: a parameter is given under two names, with two values.
    """

    # Of policy 2: the least and the largest fall of the loss, as a share of it, with which the
    # region goes on; what it may be less or more once it is.
    r_min: float = 0.0
    r_max: float = 0.5
    margin: float = 0.05

    def __init__(
        self,
        policy: int | str,
        start_step: int | None = _START,
        hold_step: int | None = None,
        end_step: int | None = None,
        interval_time: int | None = _INTERVAL,
        interval_hold_time: int | None = _INTERVAL_HOLD,
        *,
        start_time: int | None = None,
        hold_time: int | None = None,
        end_time: int | None = None,
        test_interval: int | None = None,
        test_step: int | None = None,
    ) -> None:
        self.policy = _policy(policy)
        start_step = _either("start_step", start_step, "start_time", start_time)
        hold_step = _either("hold_step", hold_step, "hold_time", hold_time)
        end_step = _either("end_step", end_step, "end_time", end_time)
        interval = _either("interval_time", interval_time, "test_interval", test_interval)
        hold = _either("interval_hold_time", interval_hold_time, "test_step", test_step)
        if self.policy == LOSS:
            self.interval_time = self._needed("interval_time", interval, _INTERVAL, least=1)
            self.interval_hold_time = self._needed("interval_hold_time", hold, _INTERVAL_HOLD, 1)
        else:
            self.start_step = self._needed("start_step", start_step, _START, least=0)
            self.end_step = self._needed("end_step", end_step, None, least=0)
            if self.end_step < self.start_step:
                raise ValueError(
                    f"[mixed precision] end_step is {self.end_step}, which is before start_step, "
                    f"{self.start_step}. Give the last epoch that may be on."
                )
        if self.policy == LEARNING_RATE:
            self.hold_step = self._needed("hold_step", hold_step, None, least=1)
        self._state = _State()

    def _needed(self, name: str, value: object, default: int | None, least: int) -> int:
        if value is None and default is None:
            raise ValueError(f"[mixed precision] policy {self.policy} needs {name}, in epochs.")
        return _whole(name, default if value is None else value, least)

    def enable_mixed_precision(
        self, epoch: int, lr: Any = None, loss: Any = None, scaler: Any = None
    ) -> bool:
        """Whether the autocast regions of `epoch` are enabled.

        Args:
            epoch: at least 0. TI-ACC counts from 1, and `end_step` is on, too.
            lr: the learning rate of this epoch, a number; for policy 1.
            loss: that of the epoch before, a number or a tensor of one element; for policy 2, whose
                first call may have none.
            scaler: the GradScaler, whose scale is then looked at. Without one, as in bfloat16, it
                is not.

        Raises:
            ValueError: an argument that the policy uses is missing or wrong, or the processes ask
                about different epochs. What was decided before stays.
        """
        epoch = _whole("epoch", epoch, least=0)
        before = self._state
        if epoch == before.epoch:
            return before.enabled
        goes_on = before.epoch is not None and epoch > before.epoch
        now = replace(before) if goes_on else _State()
        inside = self._is_inside(epoch)
        if inside:
            self._look_at(scaler, now)
        else:
            now.scale, now.backoffs = None, 0
        if self.policy == TIME:
            on, why = inside, f"epochs {self.start_step} to {self.end_step} are on"
        elif self.policy == LEARNING_RATE:
            on, why = self._by_learning_rate(epoch, inside, lr, now)
        else:
            on, why = self._by_loss(epoch, inside, loss, goes_on, now)
        collapsed = on and now.scale is not None and now.scale < _LEAST_SCALE
        if collapsed:
            on, why = False, f"the scaler's scale has fallen to {now.scale:g}"
        now.enabled = _all_want(on, epoch)
        now.reason = why if now.enabled == on else "another process wants it off"
        if now.decided == epoch:
            now.held = now.enabled
        now.epoch = epoch
        self._state = now
        if collapsed:  # said last: a program may make an error of it, and the others wait
            warnings.warn(
                f"[mixed precision] epoch {epoch} is computed in full precision: {why}. Look for "
                "what overflows in the model.",
                stacklevel=2,
            )
        return now.enabled

    def _is_inside(self, epoch: int) -> bool:
        """Whether the epoch is one of those in which the policy may be on."""
        if self.policy != LOSS:
            return self.start_step <= epoch <= self.end_step
        period, since = divmod(epoch, self.interval_time)
        return period >= 1 and since <= self.interval_hold_time

    def _look_at(self, scaler: Any, now: _State) -> None:
        """Reads the scale, and counts how often it was backed off since it was read before."""
        if scaler is None or not scaler.is_enabled():
            now.scale = None
            return
        scale = float(scaler.get_scale())
        if now.scale is not None and 0 < scale < now.scale:
            # What it has grown in between is not seen: there are at least as many.
            now.backoffs += round(
                math.log(now.scale / scale) / -math.log(scaler.get_backoff_factor())
            )
        now.scale = scale

    def _by_learning_rate(self, epoch: int, inside: bool, lr: Any, now: _State) -> tuple[bool, str]:
        rate = self._argument("lr", lr, epoch)
        if not math.isfinite(rate):
            raise ValueError(f"[mixed precision] lr of epoch {epoch} is {rate}, and no rate.")
        last = self.hold_step - 1
        if inside and now.decided is not None and epoch - now.decided <= last:
            return now.held, f"decided for epochs {now.decided} to {now.decided + last}"
        before, now.lr = now.lr, rate
        backoffs, now.backoffs = now.backoffs, 0
        if not inside:
            now.decided = None
            return False, f"epochs before {self.start_step} and after {self.end_step} are off"
        now.decided = epoch
        if before is not None and rate > before:
            return False, f"the learning rate has risen from {before:g} to {rate:g}"
        if backoffs > 1:
            return False, f"the scaler has backed off {backoffs} times"
        return True, f"the learning rate, {rate:g}, has not risen"

    def _by_loss(
        self, epoch: int, inside: bool, loss: Any, goes_on: bool, now: _State
    ) -> tuple[bool, str]:
        value = None
        if loss is not None or (inside and goes_on):
            value = self._argument("loss", loss, epoch)
        is_finite = value is not None and math.isfinite(value)
        before, now.loss = now.loss, value if is_finite else None
        if not inside:
            return False, "the epoch is in no period that is on"
        period = epoch // self.interval_time
        if value is not None and not is_finite:
            now.ended = period
        if now.ended == period:
            start = period * self.interval_time
            return False, f"a loss of the period from epoch {start} on was no finite number"
        if value is None or before is None:
            return True, "the period is on until it is known how the loss changes"
        fall = _fall(before, value)
        margin = self.margin if now.enabled else 0.0
        on = self.r_min - margin <= fall <= self.r_max + margin
        return on, f"the loss has fallen by {fall:.2%}, from {before:g} to {value:g}"

    def _argument(self, name: str, value: Any, epoch: int) -> float:
        if value is None:
            raise ValueError(f"[mixed precision] policy {self.policy} needs {name} (epoch {epoch})")
        if isinstance(value, torch.Tensor):
            value = value.detach().item() if value.numel() == 1 else value.tolist()
        if isinstance(value, bool) or not hasattr(type(value), "__float__"):
            raise ValueError(f"[mixed precision] {name} of epoch {epoch} is {value!r}, no number.")
        return float(value)

    def explain(self) -> str:
        """What was decided last, and why."""
        state = self._state
        if state.epoch is None:
            return state.reason
        return f"epoch {state.epoch} is {'on' if state.enabled else 'off'}: {state.reason}"

    def state_dict(self) -> dict[str, Any]:
        """What the next decisions depend on but for the parameters: numbers and texts."""
        return {"policy": self.policy, **asdict(self._state)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes on where `state_dict()` was called.

        Raises ValueError if that was not of the same policy; nothing is changed then.
        """
        state = dict(state_dict)
        policy = state.pop("policy", None)
        if policy != self.policy:
            raise ValueError(f"[mixed precision] this is policy {self.policy}, not {policy!r}.")
        if state.keys() != asdict(self._state).keys():
            odd = sorted(state.keys() ^ asdict(self._state).keys())
            raise ValueError(f"[mixed precision] a state has other entries: {', '.join(odd)}.")
        self._state = _State(**state)


def _policy(policy: object) -> int:
    if isinstance(policy, str) and policy in _NAMES:
        return _NAMES[policy]
    if isinstance(policy, int) and not isinstance(policy, bool) and policy in _NAMES.values():
        return policy
    raise ValueError(
        f"[mixed precision] policy is {policy!r}. It is 0, 1, 2, or {', '.join(_NAMES)}."
    )


def _either(name: str, value: object, alias: str, other: object) -> object:
    """What was given under one of two names; None where neither was."""
    if isinstance(value, _Default):
        value = None
    if value is not None and other is not None and value != other:
        raise TypeError(
            f"[mixed precision] {name} is {value!r}, and {alias}, which is another name of it, is "
            f"{other!r}. Give one of them."
        )
    return other if value is None else value


def _whole(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ValueError(
            f"[mixed precision] {name} is {value!r}, and should be a whole number of at least "
            f"{least}."
        )
    return number


def _fall(before: float, now: float) -> float:
    """By which part of itself a loss has fallen; below 0 where it has risen."""
    if before == 0:
        return 0.0 if now == 0 else math.copysign(math.inf, -now)
    return (before - now) / abs(before)


def _all_want(on: bool, epoch: int) -> bool:
    """Whether all processes of the default group want the region on."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return on
    kinds = [device.type for device in getattr(dist.group.WORLD, "_device_types", ())]
    device = "cpu" if "cpu" in kinds or not kinds else kinds[0]
    # The least of the epochs' negatives is the last epoch: one exchange tells that they are equal.
    told = torch.tensor([int(on), epoch, -epoch], device=device)
    dist.all_reduce(told, dist.ReduceOp.MIN)
    everyone, first, last = told.tolist()
    if first != -last:
        raise ValueError(
            f"[mixed precision] this process asks about epoch {epoch}, and others about epochs "
            f"{first} to {-last}. Ask about the same epochs on all of them."
        )
    return bool(everyone)
