"""TI-ACC's names of both generations, and how a program of the second one begins."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests import helpers
from tests.python.test_grad_scaler import Training
from tiacc_training import tiacc_init
from tiacc_training.calc import get_fused_optimizer


def run_fresh(code: str, **env: str) -> str:
    """Runs a program in an interpreter that has imported nothing; returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=helpers.child_env(**{"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **env}),
        cwd=helpers.ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- names ----------------------------------------------------------------------------------------


def test_the_names_of_both_generations() -> None:
    code = """
import sys
import tiacc_training.torch
first = tiacc_training.torch.tiacc_torch_warp.MixedPrecision_TrainingPolicy
from tiacc_training import tiacc_training as package, tiacc_init
assert package is tiacc_training
assert package.calc.MixedPrecision_TrainingPolicy is first
assert package.distributed and callable(package.calc.get_fused_optimizer)
try:
    package.nothing
except AttributeError as error:
    print(error)
print("torchacc_device._C" in sys.modules)
"""
    assert run_fresh(code).splitlines() == [
        "module 'tiacc_training' has no attribute 'nothing'",
        "False",  # imports register no device
    ]


def test_launchers_and_tools_import_no_torch_before_they_need_it() -> None:
    assert run_fresh("import sys, tiacc_training; print('torch' in sys.modules)") == "False\n"


# --- tiacc_init -----------------------------------------------------------------------------------

# As the demo of the second generation is made: the calls and their order.
DEMO = """
import torch
from tiacc_training import tiacc_training, tiacc_init

@tiacc_init(params={'training_framework': 'pytorch'})
def main(epochs, rows=8):
    "The program."
    torch.manual_seed(0)
    torch.cuda.set_device(0)
    model = torch.nn.Linear(4, 1).cuda(0)
    criterion = torch.nn.MSELoss().cuda(0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    optimizer = tiacc_training.calc.get_fused_optimizer(optimizer)
    scaler = torch.cuda.amp.GradScaler(
        init_scale=128, growth_factor=2, backoff_factor=0.5, growth_interval=10**9, enabled=True
    )
    policy = tiacc_training.calc.MixedPrecision_TrainingPolicy(
        policy="TimeSchedulePolicy", start_time=2, end_time=epochs
    )
    images = torch.randn(rows, 4).cuda(non_blocking=True)
    target = torch.randn(rows, 1).cuda(non_blocking=True)
    for epoch in range(1, epochs + 1):
        mixed = policy.enable_mixed_precision(epoch, scaler=scaler)
        with torch.cuda.amp.autocast(enabled=mixed):
            output = model(images)
            loss = criterion(output, target)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print(epoch, mixed, output.dtype, model.weight.device, scaler.get_scale())

print(main.__name__, main.__doc__, torch.cuda.is_available(), hasattr(torch, "acc"))
main(3)
print(torch.cuda.is_available(), torch.zeros(1).cuda().device)
"""


@pytest.mark.usefixtures("acc_only")
def test_a_program_of_the_second_generation_runs_on_acc() -> None:
    assert run_fresh(DEMO, CUDA_VISIBLE_DEVICES="").splitlines() == [
        "main The program. False False",  # to decorate does nothing yet
        "1 False torch.float32 acc:0 128.0",
        "2 True torch.float16 acc:0 128.0",
        "3 True torch.float16 acc:0 128.0",
        "True acc:0",
    ]


@pytest.mark.usefixtures("acc_only")
def test_the_program_may_be_called_twice_and_gets_its_arguments() -> None:
    from torchacc_device import _patches

    @tiacc_init()
    def main(*values: int, sign: int) -> int:
        assert torch.empty(1, device="cuda").device.type == "acc"
        return sign * sum(values)

    assert not torch.cuda.is_available()
    try:
        assert main(1, 2, sign=-1) == -3
        assert main(3, sign=1) == 3
    finally:
        _patches.undo_as_cuda()
    assert not torch.cuda.is_available()


@pytest.mark.parametrize(
    ("params", "kind", "told"),
    [
        (print, TypeError, "@tiacc_init.params="),
        ({"training_framework": "tensorflow"}, ValueError, "'tensorflow'; only 'pytorch'"),
        ({"training_framework": "pytorch", "level": 3}, ValueError, "params has 'level'"),
    ],
)
def test_other_params_are_refused(params: Any, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        tiacc_init(params)


# --- get_fused_optimizer --------------------------------------------------------------------------

FUSED: dict[str, tuple[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": ("_fused_sgd_", lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": ("_fused_sgd_", lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    "adam": ("_fused_adam_", lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True)),
    "adamw": ("_fused_adamw_", lambda p: torch.optim.AdamW(p, lr=0.01)),
    "for-loop": ("_fused_adamw_", lambda p: torch.optim.AdamW(p, lr=0.01, foreach=False)),
    "foreach": ("_fused_adamw_", lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True)),
}


@pytest.mark.usefixtures("acc_only")
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_built_optimizer_goes_on_fused(name: str, before: int, scaled: bool, monkeypatch) -> None:
    """With the values of one that is not, on the CPU, also with steps that a scaler skips."""
    operator, make = FUSED[name]
    calls = []
    original = getattr(torch, operator)
    monkeypatch.setattr(
        torch, operator, lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs)
    )
    # What may be in memory that was never written.
    monkeypatch.setattr(torch, "empty_like", lambda of: torch.full_like(of, float("nan")))
    ours, reference = (
        Training(device, make, init_scale=256.0, growth_interval=3, enabled=scaled)
        for device in ("acc", "cpu")
    )
    schedules = [
        torch.optim.lr_scheduler.ExponentialLR(t.optimizer, 0.9) for t in (ours, reference)
    ]
    for i in range(10):
        if i == before:
            assert not calls
            assert get_fused_optimizer(ours.optimizer) is ours.optimizer
            assert ours.optimizer.defaults["fused"]
        for training, schedule in zip((ours, reference), schedules, strict=True):
            training.step(scaled and i in (0, 4, 6))
            schedule.step()
        for mine, other in zip(ours.net.parameters(), reference.net.parameters(), strict=True):
            torch.testing.assert_close(mine.cpu(), other, rtol=1e-4, atol=3e-5)
    assert len(calls) == 10 - before
    # On the CPU they would have each update run at once, outside the plan.
    counts = [state["step"] for state in ours.optimizer.state.values() if "step" in state]
    assert all(count.device.type == "acc" for count in counts)
    assert ours.scaler.get_scale() == reference.scaler.get_scale()
    torch.testing.assert_close(
        ours.state()["state"], reference.state()["state"], rtol=1e-4, atol=3e-5
    )


@pytest.mark.usefixtures("acc_only", "recording")
@pytest.mark.parametrize("name", ["momentum", "adamw"])
def test_fused_steps_under_a_scaler_read_nothing(name: str) -> None:
    training = Training("acc", FUSED[name][1], init_scale=256.0)
    get_fused_optimizer(training.optimizer)
    for _ in range(3):
        training.step(False)
    with helpers.counting() as counted:
        for i in range(4):
            training.step(i == 2)
    assert counted["transfers"] == 0


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_a_fused_optimizer_is_as_one_that_was_built_so(kind: Any, foreach: bool | None) -> None:
    parameters = [nn.Parameter(torch.ones(2))]
    built = kind(parameters, lr=0.1, fused=True)
    made = get_fused_optimizer(kind(parameters, lr=0.1, foreach=foreach))
    assert made.param_groups == built.param_groups and made.defaults == built.defaults
    assert made._step_supports_amp_scaling and built._step_supports_amp_scaling


class Own(torch.optim.SGD):
    """Whose step might do anything."""


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda p: torch.optim.RMSprop(p, lr=0.1), "RMSprop as it is: only torch's"),
        (lambda p: Own(p, lr=0.1), "Own as it is: only torch's"),
        (lambda p: torch.optim.Adam(p, lr=0.1, differentiable=True), "it is differentiable"),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
            "its first step does without dampening",
        ),
    ],
)
def test_other_optimizers_stay_as_they_are(make: Any, told: str, caplog) -> None:
    optimizer = make(nn.Linear(2, 2).parameters())
    before = repr(optimizer)
    with caplog.at_level(logging.INFO, logger="TorchAcc"):
        assert get_fused_optimizer(optimizer) is optimizer
    assert repr(optimizer) == before and told in caplog.text


def test_parameters_without_a_fused_kernel_are_told(caplog) -> None:
    optimizer = torch.optim.SGD([torch.zeros(2, dtype=torch.complex64, requires_grad=True)], lr=0.1)
    with caplog.at_level(logging.INFO, logger="TorchAcc"):
        get_fused_optimizer(optimizer)
    assert not optimizer.param_groups[0]["fused"]
    assert "a parameter is torch.complex64 on cpu" in caplog.text
