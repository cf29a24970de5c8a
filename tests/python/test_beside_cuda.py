"""acc in a process that has used CUDA."""

from __future__ import annotations

import atexit

import pytest
import torch

import torchacc_device


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
