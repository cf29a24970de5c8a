"""torch.autograd.detect_anomaly: eager's errors, with the forward call that is to blame."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests import helpers


class Spoiled(torch.autograd.Function):
    """Doubles; its gradient is not a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * float("nan")


class Broken(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        raise ValueError("no gradient today")


def root_of_negative(device: str) -> None:
    x = torch.tensor([1.0, -1.0, 4.0], device=device, requires_grad=True)
    y = (x * 3).sqrt()  # to blame
    (y * 2).sum().backward()


def zero_by_zero(device: str) -> None:
    x = torch.zeros(3, device=device, requires_grad=True)
    y = (x * 0).sqrt() * 0  # to blame
    y.sum().backward()


def spoiled_function(device: str) -> None:
    x = torch.ones(2, 3, device=device, requires_grad=True)
    y = Spoiled.apply(x + 1)  # to blame
    y.sum().backward()


def second_derivative(device: str) -> None:
    x = torch.zeros(3, device=device, requires_grad=True)
    (g,) = torch.autograd.grad((x * x).sum(), x, create_graph=True)
    z = (g.sqrt() * 0).sum()  # to blame
    torch.autograd.grad(z, x)


def in_a_module(device: str) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).to(device)
    out = net(torch.ones(2, 4).to(device))
    loss = (out - out.detach() - 1).sqrt().sum()  # to blame
    loss.backward()


PROGRAMS = [root_of_negative, zero_by_zero, spoiled_function, second_derivative, in_a_module]


def told(
    program: Callable[[str], None], device: str, **how: Any
) -> tuple[str, list[tuple[str, str]]]:
    """The error of a program that fails, and of the warnings that came with it first line and
    traceback, from the program's own frame on.
    """
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with (
            torch.autograd.detect_anomaly(**how),
            pytest.raises((RuntimeError, ValueError)) as raised,
        ):
            program(device)
    # What called the program is another line each time.
    called = f"in {program.__name__}\n"
    texts = [str(warning.message) for warning in seen]
    return f"{raised.type.__name__}: {raised.value}", [
        (text.partition("\n")[0], text.partition(called)[2]) for text in texts
    ]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_errors_are_those_of_eager(device, program):
    error, texts = told(program, device)
    assert (error, texts) == told(program, "cpu")
    assert "returned nan values in its 0th output" in error
    assert any(
        head.startswith("Error detected in") and "# to blame" in trace for head, trace in texts
    )


def test_an_exception_in_backward_names_the_forward_call(device):
    def program(where: str) -> None:
        x = torch.ones(2, device=where, requires_grad=True)
        y = Broken.apply(x * 2)  # to blame
        y.sum().backward()

    for how in ({"check_nan": True}, {"check_nan": False}):
        error, texts = told(program, device, **how)
        assert (error, texts) == told(program, "cpu", **how)
        assert error == "ValueError: no gradient today"
        assert any(
            "Error detected in BrokenBackward" in head and "# to blame" in trace
            for head, trace in texts
        )


def test_without_the_check_gradients_pass_as_they_are(device):
    def run(where: str) -> list[torch.Tensor]:
        x = torch.tensor([1.0, -1.0, 4.0], device=where, requires_grad=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly(check_nan=False):
                x.sqrt().sum().backward()
        return [x.grad.cpu()]

    (got,), (expected,) = run(device), run("cpu")
    assert torch.equal(got.isnan(), expected.isnan()) and expected.isnan().any()
    assert got[0] == expected[0] and got[2] == expected[2]


def test_the_switch_for_the_whole_program(device):
    torch.autograd.set_detect_anomaly(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(RuntimeError, match="'SqrtBackward0' returned nan values"):
                root_of_negative(device)
    finally:
        torch.autograd.set_detect_anomaly(False)
    x = torch.tensor([-1.0], device=device, requires_grad=True)
    x.sqrt().sum().backward()
    assert x.grad.isnan().all()


def test_a_training_loop_stops_at_the_step_that_spoils_it(device):
    def run(where: str) -> tuple[list[float], str]:
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(where)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, foreach=True)
        x = torch.randn(6, 4).to(where)
        losses = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with torch.autograd.detect_anomaly():
                for i in range(8):
                    if i == 5:
                        with torch.no_grad():
                            net[0].weight[2, 1] = float("nan")
                    loss = net(x).square().mean()
                    losses.append(loss)
                    optimizer.zero_grad()
                    try:
                        loss.backward()
                    except RuntimeError as error:
                        return [value.item() for value in losses], str(error)
                    optimizer.step()
        raise AssertionError("no step was spoiled")

    got, error = run(device)
    expected, message = run("cpu")
    assert error == message and "returned nan values" in error
    assert len(got) == len(expected) == 6
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.usefixtures("recording")
def test_plans_are_the_same_after_it(acc_only):
    torch.manual_seed(2)
    net = nn.Linear(4, 2).to(acc_only)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=True)
    x = torch.ones(3, 4, device=acc_only)

    def step() -> None:
        optimizer.zero_grad()
        net(x).sum().backward()
        optimizer.step()

    for _ in range(4):
        step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            step()
    for _ in range(2):
        step()
    with helpers.counting() as counted:
        step()
        step()
    assert counted["plans_built"] == 0 and counted["plan_follows"] == 2
