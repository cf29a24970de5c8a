"""TI-ACC's document 004: its lines for adaptive mixed precision, unchanged, over some epochs."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchacc
from tests import helpers
from tests.seeds import extract
from tests.seeds.scripts import text_of

STEPS = 5


def train(parameters: Sequence[int | None], rates: Sequence[float]) -> dict[int, bool]:
    """Which epochs computed in float16: one for each learning rate, beginning with epoch 1.

    `parameters` are the document's six names, in the order in which it uses them.
    """
    once, step = extract.adaptive_precision_snippet(text_of("004"))
    compiled = compile(step, "004", "exec")
    names = "policy", "start_step", "hold_step", "end_step", "interval_time", "interval_hold_time"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
    # As its programs for CUDA run here: what the lines say of torch.cuda.amp acts on acc.
    model = torchacc.accelerate(net)
    inputs = torch.randn(32, 6)
    scope: dict[str, Any] = {
        **dict(zip(names, parameters, strict=True)),
        "model": model,
        "criterion": nn.MSELoss(),
        "optimizer": torch.optim.SGD(model.parameters(), lr=rates[0], momentum=0.5),
        "inputs": inputs.to(model.device),
        "targets": inputs.sum(1, keepdim=True).to(model.device),
        "loss": None,
    }
    exec(compile(once, "004", "exec"), scope)
    found, losses = {}, []
    for epoch, lr in enumerate(rates, 1):
        scope |= {"epoch": epoch, "lr": lr}
        for group in scope["optimizer"].param_groups:
            group["lr"] = lr
        types = set()
        for _ in range(STEPS):
            scope["optimizer"].zero_grad()
            exec(compiled, scope)
            types.add(scope["outputs"].dtype)
            assert scope["outputs"].device.type == "acc"
            assert scope["scaler"].get_scale() == 65536.0  # nothing has overflowed, and it scales
            losses.append(scope["loss"].item())
        assert types == {torch.float16 if scope["mixed_precision"] else torch.float32}
        found[epoch] = scope["mixed_precision"]
    assert losses[-1] < losses[0] / 2
    return found


@pytest.mark.usefixtures("acc_only")
@pytest.mark.parametrize(
    ("parameters", "rates", "on"),
    [
        ((0, 3, None, 6, None, None), [0.02] * 8, [3, 4, 5, 6]),
        # Decided at 2, at 4, when the rate has risen, and at 6.
        ((1, 2, 2, 7, None, None), [0.01, 0.01, 0.01, 0.02, 0.02, 0.02, 0.02, 0.01], [2, 3, 6, 7]),
        ((2, None, None, None, 3, 1), [0.01] * 8, [3, 4, 6, 7]),
    ],
    ids=["time", "learning rate", "loss"],
)
def test_the_lines_of_the_document(parameters: Any, rates: Any, on: list[int]) -> None:
    found = train(parameters, rates)
    assert [epoch for epoch, mixed in found.items() if mixed] == on
    assert 0 < len(on) < len(found)  # it is switched on and off


# What the lines leave to the program, as one for CUDA has it.
BEFORE = """
import torch
policy, start_step, hold_step, end_step = 0, 2, None, 3
interval_time = interval_hold_time = None
model = torch.nn.Linear(4, 1).cuda()
inputs, targets = torch.randn(8, 4).cuda(), torch.randn(8, 1).cuda()
criterion, optimizer = torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1)
lr, loss = 0.1, None
"""
LOOP = """
for epoch in range(1, 5):
    for _ in range(3):
        optimizer.zero_grad()
"""
AFTER = """
    print(epoch, mixed_precision, outputs.dtype, outputs.device)
"""


@pytest.mark.usefixtures("acc_only")
def test_the_lines_in_a_script_for_cuda(tmp_path: Path) -> None:
    """By `python -m torchacc run`: neither they nor the script say anything of acc."""
    once, step = extract.adaptive_precision_snippet(text_of("004"))
    script = tmp_path / "train.py"
    source = BEFORE + once + LOOP + textwrap.indent(step, " " * 8) + AFTER
    script.write_text(source, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "torchacc", "run", str(script)],
        env=helpers.child_env(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        f"{epoch} {on} torch.float{16 if on else 32} acc:0"
        for epoch, on in ((1, False), (2, True), (3, True), (4, False))
    ]


def test_the_lines_are_what_we_know() -> None:
    once, step = extract.adaptive_precision_snippet(text_of("004"))
    assert once.lstrip().startswith("import torch.cuda.amp as amp")
    assert "import tiacc_training.torch" in once and "autocast" not in once
    assert "with amp.autocast(enabled=mixed_precision):" in step
    assert step.rstrip().endswith("scaler.update()")


def test_a_document_without_the_lines_is_an_error() -> None:
    with pytest.raises(extract.SeedError, match="MixedPrecision_TrainingPolicy"):
        extract.adaptive_precision_snippet("```\nMixedPrecision_TrainingPolicy()\n```\n")
