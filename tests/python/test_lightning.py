"""`torchacc.lightning`, with stand-ins for the package: tests/ecosystem has it."""

from __future__ import annotations

import importlib
import sys
import types
from typing import Any

import pytest
import torch

import torchacc

pytestmark = pytest.mark.usefixtures("acc_only")


class SingleDeviceStrategy:
    """Lightning's, as far as its constructor goes."""

    def __init__(self, device: torch.device, accelerator: Any) -> None:
        self.root_device, self.accelerator = device, accelerator


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Any:
    names = ("lightning", "lightning.pytorch", *(f"lightning.pytorch.{n}" for n in PARTS))
    for name in names:
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, part in PARTS.items():
        setattr(sys.modules[f"lightning.pytorch.{name}"], part.__name__, part)
    monkeypatch.delitem(sys.modules, "torchacc.lightning", raising=False)
    yield importlib.import_module("torchacc.lightning")
    torchacc.unpatch()
    del sys.modules["torchacc.lightning"], torchacc.lightning


PARTS = {"accelerators": type("Accelerator", (), {}), "strategies": SingleDeviceStrategy}


def test_the_strategy_is_of_the_current_device_and_has_autocast_act_on_it(module):
    torchacc.unpatch()
    strategy = module.LazyStrategy()
    assert strategy.root_device == torchacc.lazy_device()
    assert type(strategy.accelerator) is module.LazyAccelerator
    x = torch.ones(2, 2, device="acc")
    with torch.autocast("cuda", torch.bfloat16):
        assert (x @ x).dtype == torch.bfloat16
    assert module.LazyStrategy("acc:0").root_device == torch.device("acc:0")


def test_what_lightning_asks_about_devices(module):
    accelerator = module.LazyAccelerator()
    accelerator.setup_device(torch.device("acc:0"))
    with pytest.raises(ValueError, match="trains on acc, and the strategy has the device cpu"):
        accelerator.setup_device(torch.device("cpu"))
    assert accelerator.parse_devices(2) == [0, 1] and accelerator.parse_devices("10") == [1, 0]
    assert accelerator.get_parallel_devices([1]) == [torch.device("acc:1")]
    assert accelerator.is_available() and accelerator.name() == "acc"
    assert accelerator.auto_device_count() == torch.acc.device_count()
    assert "allocated_bytes.all.current" in accelerator.get_device_stats("acc:0")
    accelerator.teardown()
