"""Which epochs TI-ACC's policies compute in half precision, and what it costs to ask."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests import helpers
from tiacc_training.torch.tiacc_torch_warp import MixedPrecision_TrainingPolicy as Policy


class Scaler:
    """A scaler whose scale the test sets; it counts how often it is read."""

    def __init__(self, scale: float = 65536.0, backoff: float = 0.5) -> None:
        self.scale, self.backoff, self.reads = scale, backoff, 0

    def is_enabled(self) -> bool:
        return True

    def get_scale(self) -> float:
        self.reads += 1
        return self.scale

    def get_backoff_factor(self) -> float:
        return self.backoff


def on(policy: Policy, epochs: Sequence[int], **series: Sequence[Any]) -> list[int]:
    """The epochs that the policy turns on; `series` has an argument's value for each epoch."""
    return [
        epoch
        for place, epoch in enumerate(epochs)
        if policy.enable_mixed_precision(
            epoch, **{name: values[place] for name, values in series.items()}
        )
    ]


# --- parameters -----------------------------------------------------------------------------------


def test_the_positions_are_those_of_the_samples() -> None:
    """The table of parameters in the documents has another order."""
    policy = Policy(1, 3, 2, 9, 7, 4)
    assert (policy.start_step, policy.hold_step, policy.end_step) == (3, 2, 9)
    policy = Policy(2, 3, 2, 9, 7, 4)
    assert (policy.interval_time, policy.interval_hold_time) == (7, 4)


def test_defaults_are_the_documented_ones() -> None:
    assert Policy(0, end_step=12).start_step == 10
    assert Policy(0, None, end_step=12).start_step == 10
    assert (Policy(2).interval_time, Policy(2).interval_hold_time) == (1000, 100)


@pytest.mark.parametrize(
    ("number", "name"),
    [(0, "TimeSchedulePolicy"), (1, "TimeLearningRatePolicy"), (2, "LossPolicy")],
)
def test_policies_have_names(number: int, name: str) -> None:
    assert Policy(name, 1, 1, 2).policy == Policy(number, 1, 1, 2).policy == number


def test_the_other_names_of_parameters() -> None:
    policy = Policy(1, start_time=3, hold_time=2, end_time=9)
    assert (policy.start_step, policy.hold_step, policy.end_step) == (3, 2, 9)
    policy = Policy(2, test_interval=7, test_step=4)
    assert (policy.interval_time, policy.interval_hold_time) == (7, 4)
    assert Policy(0, 3, end_step=9, end_time=9, start_time=3).end_step == 9  # twice the same


@pytest.mark.parametrize(
    ("name", "alias"),
    [
        ("start_step", "start_time"),
        ("hold_step", "hold_time"),
        ("end_step", "end_time"),
        ("interval_time", "test_interval"),
        ("interval_hold_time", "test_step"),
    ],
)
def test_two_values_for_one_parameter_are_refused(name: str, alias: str) -> None:
    with pytest.raises(TypeError, match=f"{name} is 10, and {alias}.* is 20"):
        Policy(1, **{"hold_step": 1, "end_step": 30, name: 10, alias: 20})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"policy": 3}, "policy is 3"),
        ({"policy": True}, "policy is True"),
        ({"policy": "loss"}, "policy is 'loss'.*LossPolicy"),
        ({"policy": 0}, "policy 0 needs end_step"),
        ({"policy": 1, "end_step": 20}, "policy 1 needs hold_step"),
        ({"policy": 1, "hold_step": 2}, "policy 1 needs end_step"),
        ({"policy": 0, "end_step": 9}, "end_step is 9, which is before start_step, 10"),
        ({"policy": 0, "start_step": -1, "end_step": 9}, "start_step is -1"),
        ({"policy": 0, "start_step": 1.5, "end_step": 9}, "start_step is 1.5"),
        ({"policy": 1, "hold_step": 0, "end_step": 20}, "hold_step is 0"),
        ({"policy": 2, "interval_time": 0}, "interval_time is 0"),
        ({"policy": 2, "interval_hold_time": -5}, "interval_hold_time is -5"),
        ({"policy": 2, "interval_time": "often"}, "interval_time is 'often'"),
    ],
)
def test_parameters_that_are_missing_or_wrong_are_named(arguments: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Policy(**arguments)


def test_what_a_policy_does_not_use_may_be_anything() -> None:
    """Programs hand all six to each policy."""
    assert Policy(0, 1, None, 2, 0, None).policy == 0
    assert Policy(2, 9, "no", 1).policy == 2


# --- what is asked --------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [-1, True, 1.5, None, "1"])
def test_an_epoch_is_a_whole_number(epoch: Any) -> None:
    with pytest.raises(ValueError, match=f"epoch is {epoch!r}"):
        Policy(0, 1, end_step=2).enable_mixed_precision(epoch)


@pytest.mark.parametrize(
    ("lr", "told"),
    [
        (None, "policy 1 needs lr .epoch 2"),
        ("0.1", "lr of epoch 2 is '0.1', no number"),
        ([0.1], r"lr of epoch 2 is \[0.1\], no number"),
        (torch.ones(2), r"lr of epoch 2 is \[1.0, 1.0\], no number"),
        (math.nan, "lr of epoch 2 is nan"),
    ],
)
def test_a_learning_rate_is_a_number(lr: Any, told: str) -> None:
    """And an error leaves what was decided before."""
    policy = Policy(1, 1, 1, 5)
    assert policy.enable_mixed_precision(1, lr=0.1)
    before = policy.state_dict()
    with pytest.raises(ValueError, match=told):
        policy.enable_mixed_precision(2, lr=lr)
    assert policy.state_dict() == before


def test_the_first_call_may_have_no_loss_and_others_need_it_in_a_period() -> None:
    policy = Policy(2, interval_time=2, interval_hold_time=1)
    assert policy.enable_mixed_precision(2, loss=None)
    with pytest.raises(ValueError, match="policy 2 needs loss .epoch 3"):
        policy.enable_mixed_precision(3)
    with pytest.raises(ValueError, match="loss of epoch 3 is 'low'"):
        policy.enable_mixed_precision(3, loss="low")
    assert not Policy(2, interval_time=2, interval_hold_time=1).enable_mixed_precision(1)


def test_an_epoch_is_decided_on_once() -> None:
    policy, scaler = Policy(1, 1, 1, 9), Scaler()
    assert policy.enable_mixed_precision(1, lr=0.1, scaler=scaler)
    assert policy.enable_mixed_precision(1, lr=0.2, scaler=scaler)
    assert scaler.reads == 1
    assert not policy.enable_mixed_precision(2, lr=0.2, scaler=scaler)
    assert not policy.enable_mixed_precision(2, lr=0.1, scaler=scaler)
    assert scaler.reads == 2


def test_an_earlier_epoch_begins_anew() -> None:
    policy = Policy(1, 1, 10, 50)
    assert on(policy, range(12), lr=[0.1] * 5 + [0.2] * 7) == list(range(1, 11))
    assert on(policy, range(3), lr=[0.3] * 3) == [1, 2]


# --- policy 0 -------------------------------------------------------------------------------------


def test_time_is_on_from_the_first_to_the_last_epoch() -> None:
    policy = Policy(0, 3, end_step=5)
    assert policy.explain() == "no epoch has been asked about"
    assert on(policy, range(1, 8)) == [3, 4, 5]
    assert policy.explain() == "epoch 7 is off: epochs 3 to 5 are on"
    assert on(Policy(0, 1, end_step=5), range(1, 6)) == [1, 2, 3, 4, 5]
    assert on(Policy(0, 4, end_step=4), range(1, 8)) == [4]


def test_time_looks_at_no_scale_outside() -> None:
    scaler = Scaler()
    on(Policy(0, 3, end_step=5), range(1, 8), scaler=[scaler] * 7)
    assert scaler.reads == 3


# --- policy 1 -------------------------------------------------------------------------------------


def test_a_rising_rate_is_off_for_the_hold() -> None:
    #         1    2    3    4    5    6    7    8    9    10   11
    rates = [0.1, 0.1, 0.1, 0.2, 0.3, 0.3, 0.2, 0.2, 0.1, 0.1, 0.1]
    policy = Policy(1, 2, 2, 9)
    # Decided at 2 (0.1 after 0.1), 4 (0.2 after 0.1), 6 (0.3 after 0.2), 8 (0.2 after 0.3).
    assert on(policy, range(1, 12), lr=rates) == [2, 3, 8, 9]
    assert "after 9 are off" in policy.explain()


def test_warming_up_into_the_window_is_off() -> None:
    """Before the first decision stands the rate of the epoch before."""
    assert on(Policy(1, 3, 1, 5), range(1, 7), lr=[0.1, 0.2, 0.3, 0.3, 0.2, 0.1]) == [4, 5]
    assert on(Policy(1, 3, 1, 5), range(3, 7), lr=[0.3, 0.3, 0.2, 0.1]) == [3, 4, 5]


def test_a_hold_ends_with_the_window() -> None:
    assert on(Policy(1, 2, 100, 4), range(1, 7), lr=[0.1] * 6) == [2, 3, 4]


@pytest.mark.parametrize(
    ("backoffs", "expected"), [(0, [1, 2, 3, 4]), (1, [1, 2, 3, 4]), (2, [1, 2])]
)
def test_a_scaler_that_backs_off_again_is_off(backoffs: int, expected: list[int]) -> None:
    policy, scaler = Policy(1, 1, 2, 4), Scaler(backoff=0.25)
    found = []
    for epoch in range(1, 5):
        if epoch in (2, 3) and backoffs >= epoch - 1:
            scaler.scale /= 4
        found += [epoch] * policy.enable_mixed_precision(epoch, lr=0.1, scaler=scaler)
    assert found == expected
    if backoffs == 2:
        assert "decided for epochs 3 to 4" in policy.explain()


def test_backoffs_of_an_earlier_hold_do_not_count() -> None:
    policy, scaler = Policy(1, 1, 1, 9), Scaler()
    for epoch in range(1, 9):
        assert policy.enable_mixed_precision(epoch, lr=0.1, scaler=scaler)
        scaler.scale /= 2
    scaler.scale /= 2
    assert not policy.enable_mixed_precision(9, lr=0.1, scaler=scaler)
    assert policy.explain() == "epoch 9 is off: the scaler has backed off 2 times"


# --- policy 2 -------------------------------------------------------------------------------------


def test_a_loss_that_falls_is_on_in_each_period() -> None:
    """Both ends of a period belong to it."""
    losses = [0.9**epoch for epoch in range(1, 15)]
    policy = Policy(2, interval_time=4, interval_hold_time=2)
    assert on(policy, range(1, 15), loss=losses) == [4, 5, 6, 8, 9, 10, 12, 13, 14]


def test_the_defaults_are_never_on_before_epoch_1000() -> None:
    policy = Policy(2)
    losses = [0.999**epoch for epoch in range(1, 1203)]
    assert on(policy, range(1, 1203), loss=losses) == list(range(1000, 1101))


def test_a_loss_that_falls_too_slowly_or_too_fast_is_off() -> None:
    """With a margin while it is on, so that a loss that hovers does not switch each time."""
    policy = Policy(2, interval_time=10, interval_hold_time=9)
    falls = {10: 0.1, 11: -0.04, 12: -0.06, 13: -0.04, 14: 0.01, 15: 0.54, 16: 0.56, 17: 0.54}
    falls |= {18: 0.5, 19: 0.0}
    losses = [1.0]
    for fall in falls.values():
        losses.append(losses[-1] * (1 - fall))
    losses[9] = losses[8] * 0.501  # 0.5 is not seen exactly
    losses[10] = losses[9]
    assert on(policy, [9, *falls], loss=losses) == [10, 11, 14, 15, 18, 19]
    policy = Policy(2, interval_time=10, interval_hold_time=9)
    policy.r_min, policy.r_max, policy.margin = 0.2, 0.9, 0.0
    assert on(policy, [9, *falls], loss=losses) == [15, 16, 17, 18]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, torch.tensor(math.nan)])
def test_a_loss_that_is_no_finite_number_ends_the_period(bad: Any) -> None:
    losses = [0.9**epoch for epoch in range(1, 12)]
    policy = Policy(2, interval_time=4, interval_hold_time=3)
    assert on(policy, range(1, 12), loss=losses) == list(range(4, 12))
    losses[4] = bad  # epoch 5
    policy = Policy(2, interval_time=4, interval_hold_time=3)
    assert on(policy, range(1, 8), loss=losses) == [4]
    assert policy.explain() == (
        "epoch 7 is off: a loss of the period from epoch 4 on was no finite number"
    )
    assert on(policy, range(8, 12), loss=losses[7:]) == [8, 9, 10, 11]


def test_a_loss_of_zero_is_no_division() -> None:
    policy = Policy(2, interval_time=2, interval_hold_time=1)
    assert on(policy, range(1, 6), loss=[0.0, 0.0, 0.1, 0.0, 0.0]) == [2, 5]


# --- the scale ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_scale_that_has_collapsed_is_off_with_a_warning(number: int) -> None:
    policy, scaler = Policy(number, 1, 1, 9, 1, 1), Scaler()
    arguments = {"lr": 0.1, "scaler": scaler}
    assert policy.enable_mixed_precision(1, loss=1.0, **arguments)
    scaler.scale = 0.5
    if number == 1:  # it has backed off 17 times: that is a reason of its own
        assert not policy.enable_mixed_precision(2, loss=0.9, **arguments)
    else:
        with pytest.warns(UserWarning, match="epoch 2 .*scale has fallen to 0.5"):
            assert not policy.enable_mixed_precision(2, loss=0.9, **arguments)
        assert policy.explain() == "epoch 2 is off: the scaler's scale has fallen to 0.5"
    with pytest.warns(UserWarning, match="epoch 3 "):
        assert not policy.enable_mixed_precision(3, loss=0.8, **arguments)
    scaler.scale = 1.0
    assert policy.enable_mixed_precision(4, loss=0.7, **arguments)


def test_a_disabled_scaler_is_not_looked_at() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5, enabled=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on(Policy(1, 1, 1, 3), range(1, 4), lr=[0.1] * 3, scaler=[scaler] * 3) == [1, 2, 3]


# --- checkpoints ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "parameters", [(0, 3, None, 9), (1, 2, 3, 12), (2, None, None, None, 5, 3)]
)
def test_a_policy_goes_on_from_its_state(parameters: Any) -> None:
    """From each epoch: the states pass through JSON, as they may in a checkpoint."""
    rates = [0.1, 0.1, 0.2, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1, 0.3, 0.1, 0.1, 0.1]
    losses = [1.0, 0.9, 0.8, 0.79, 0.7, 0.71, 0.6, 0.5, 0.49, 0.5, math.nan, 0.3, 0.2]
    scales = [512, 256, 128, 128, 64, 64, 64, 32, 16, 8, 4, 4, 4]

    def ask(policy: Policy, epoch: int) -> tuple[bool, str]:
        scaler = Scaler(scales[epoch - 1])
        found = policy.enable_mixed_precision(
            epoch, lr=rates[epoch - 1], loss=losses[epoch - 1], scaler=scaler
        )
        return found, policy.explain()

    whole = Policy(*parameters)
    expected = {}
    states = {}
    for epoch in range(1, 14):
        expected[epoch] = ask(whole, epoch)
        states[epoch] = json.dumps(whole.state_dict(), allow_nan=False)
    assert {said for said, _ in expected.values()} == {True, False}
    for last, state in states.items():
        policy = Policy(*parameters)
        policy.load_state_dict(json.loads(state))
        assert policy.explain() == expected[last][1]
        assert {e: ask(policy, e) for e in range(last, 14)} == {
            e: expected[e] for e in range(last, 14)
        }


def test_a_state_of_another_policy_is_refused() -> None:
    policy = Policy(0, 1, end_step=3)
    policy.enable_mixed_precision(2)
    before = policy.state_dict()
    with pytest.raises(ValueError, match="this is policy 0, not 2"):
        policy.load_state_dict(Policy(2).state_dict())
    with pytest.raises(ValueError, match="other entries: phase"):
        policy.load_state_dict({**before, "phase": 1})
    assert policy.state_dict() == before


# --- on the device --------------------------------------------------------------------------------


class Training:
    """A small network under the policy's region; a step asks the policy, as the samples do."""

    def __init__(self, policy: Policy, width: int = 7) -> None:
        torch.manual_seed(0)
        self.policy = policy
        self.net = nn.Sequential(nn.Linear(5, width), nn.Tanh(), nn.Linear(width, 1)).to("acc")
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scaler = torch.amp.GradScaler("acc", init_scale=256.0)
        self.x = torch.randn(16, 5).to("acc")
        self.loss: torch.Tensor | None = None

    def step(self, epoch: int) -> torch.dtype:
        self.optimizer.zero_grad()
        enabled = self.policy.enable_mixed_precision(
            epoch, lr=0.01, loss=self.loss, scaler=self.scaler
        )
        with torch.autocast("acc", torch.float16, enabled=enabled):
            output = self.net(self.x)
        self.loss = output.float().square().mean()
        self.scaler.scale(self.loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return output.dtype


@pytest.mark.parametrize("parameters", [(0, 1, None, 99), (1, 1, 2, 99), (2, 0, 0, 0, 1, 1)])
@pytest.mark.usefixtures("acc_only", "recording")
def test_an_epoch_costs_a_read_and_a_step_none(parameters: Any) -> None:
    training = Training(Policy(*parameters))
    training.policy.r_min, training.policy.r_max = -math.inf, math.inf
    for epoch in range(1, 4):
        for _ in range(4):
            training.step(epoch)
    for epoch in range(4, 7):
        with helpers.counting() as counted:
            training.step(epoch)
        # Of the scale and the loss together: the second one has its value already.
        assert counted["flush_read"] == 1
        with helpers.counting() as counted:
            for _ in range(5):
                assert training.step(epoch) == torch.float16
        assert counted["flush_read"] == 0 and counted["flushes"] == 5


@pytest.mark.usefixtures("acc_only", "recording")
def test_switching_goes_between_two_plans() -> None:
    """One for a step in float32 and one in float16, whatever the number of switches."""
    training = Training(Policy(0, 4, end_step=5), width=11)
    for _ in range(4):
        assert training.step(1) == torch.float32
    built = []
    for epoch in [4, 5, 6, 7] * 6:  # an epoch before the last one begins anew
        plans = []
        for _ in range(5):
            with helpers.counting() as counted:
                dtype = training.step(epoch)
            assert dtype == (torch.float16 if epoch in (4, 5) else torch.float32)
            plans.append(counted["plans_built"])
        built.append(plans)
    # The read cuts the first step of an epoch in two; the others have one plan.
    assert built[0][1:] == [1, 0, 0, 0]
    assert built[1:] == [[0] * 5] * 23


@pytest.mark.usefixtures("acc_only", "recording")
def test_reads_are_those_of_the_line_that_asks() -> None:
    training = Training(Policy(0, 1, end_step=99))
    training.step(1)
    with helpers.counting() as counted:
        training.step(2)
    lines = [key for key in counted.after if key.startswith("flush_read/") and counted[key]]
    assert len(lines) == 1 and lines[0].startswith("flush_read/test_adaptive_precision.py:")
    assert lines[0].endswith(" in step")
