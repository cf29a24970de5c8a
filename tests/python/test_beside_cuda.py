"""CUDA in a process in which acc is registered: what is warned of, what fails, what stays."""

from __future__ import annotations

import atexit
import contextlib
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torchacc
import torchacc_device
from tests import helpers


@pytest.mark.usefixtures("acc_only")
@pytest.mark.parametrize("used", [True, False])
def test_registering_after_cuda_was_used_warns(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, used: bool
) -> None:
    monkeypatch.setattr(torchacc_device, "_registered", False)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: used)
    monkeypatch.setattr(atexit, "register", lambda call: call)
    torchacc_device._register()
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [("backward on CUDA tensors fails" in text) for text in said] == [True] * used
    assert torch.accelerator.current_accelerator() == torch.device("acc")


def on_cuda(*shape: int) -> torch.Tensor:
    """A tensor on CUDA; without a GPU one that has no contents."""
    return torch.ones(*shape, device="cuda", requires_grad=True)


@pytest.mark.usefixtures("acc_only")
def test_backward_on_cuda_tensors_fails_and_nothing_else_does() -> None:
    """The message is the one that docs/troubleshooting.md quotes; acc goes on."""
    without_gpu = contextlib.nullcontext() if torch.cuda.is_available() else FakeTensorMode()
    # In this thread: those of autograd may be in the error still when the process ends.
    with torch.autograd.set_multithreading_enabled(False), without_gpu:
        weight = on_cuda(4, 4)
        loss = (weight @ weight).sum()
        assert loss.device == torch.device("cuda", 0)
        with pytest.raises(RuntimeError) as raised:
            loss.backward()
        assert weight.grad is None
    message = str(raised.value).partition(" at ")[0]
    assert f'"{message}"' in (helpers.ROOT / "docs" / "troubleshooting.md").read_text()
    x = torch.ones(2, device="acc", requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [2, 2]


@pytest.mark.usefixtures("acc_only")
@pytest.mark.parametrize("patched", [False, True])
def test_regions_of_cuda_act_on_cuda_tensors(
    monkeypatch: pytest.MonkeyPatch, patched: bool
) -> None:
    """Patched they are acc's, and CUDA's as well."""
    # torch disables a region where it knows of no GPU.
    monkeypatch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    without_gpu = contextlib.nullcontext() if torch.cuda.is_available() else FakeTensorMode()
    if patched:
        torchacc.patch()
    try:
        with without_gpu:
            x = on_cuda(4, 4)
            ours = torch.ones(4, 4, device="acc")
            with torch.autocast("cuda"):
                kinds = (x @ x).dtype, (x @ x).softmax(0).dtype, (ours @ ours).dtype
            after = (x @ x).dtype
    finally:
        torchacc.unpatch()
    half, single = torch.float16, torch.float32
    assert kinds == (half, single, half if patched else single)
    assert x.device.type == "cuda" and after == single


@pytest.mark.usefixtures("acc_only")
def test_the_accelerator_of_the_process_is_acc() -> None:
    """A device that is only an index, and what torch asks of "the" accelerator."""
    assert torch.device(0) == torch.device("acc", 0)
    assert torch.get_device_module() is torch.acc
    assert torch.accelerator.device_count() == torch.acc.device_count()
    assert torch.ones(2).pin_memory().device == torch.device("cpu")


CALLS = """
print(torch.cuda.is_available(), torch.cuda.device_count(), torch.device("cuda"))
for call in (
    lambda: torch.ones(2, device="cuda").sum().item(),
    lambda: torch.ones(2).cuda().device,
    lambda: torch.nn.Linear(2, 2).to("cuda").weight.dtype,
    lambda: torch.cuda.synchronize(),
    lambda: torch.cuda.Stream().device,
    lambda: torch.zeros(2, device="meta").to("cuda").shape,
):
    try:
        print(call())
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.usefixtures("acc_only")
def test_what_is_asked_of_cuda_gets_the_answers_that_it_gets_without_acc(tmp_path: Path) -> None:
    """Tensors, modules and streams, or why there are none."""
    alone = helpers.run_beside(tmp_path, "import torch\n" + CALLS)
    beside = helpers.run_python(CALLS)
    assert alone.returncode == 0, alone.stderr
    assert alone.stdout == beside.stdout and len(alone.stdout.splitlines()) >= 7
