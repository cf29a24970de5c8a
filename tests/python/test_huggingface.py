"""`torchacc.accelerate_hf_trainer`, with stand-ins for the packages: tests/ecosystem has them."""

from __future__ import annotations

import os
import re
import sys
import types
from typing import Any

import pytest
import torch

import torchacc
from torchacc import huggingface

VARIABLE = "ACCELERATE_TORCH_DEVICE"

pytestmark = pytest.mark.usefixtures("acc_only")


class Accelerator:
    """accelerate's, as far as the list in its constructor goes."""

    def __init__(self, device: str) -> None:
        listed = ("xpu", "cuda", "npu")
        if device not in listed:
            raise ValueError(f"fp16 mixed precision requires a device in {listed}")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Modules of accelerate and transformers, by name, with what is wrapped in them."""
    names = {place[0] for place in huggingface._WRAPPED}
    names |= {"accelerate", "accelerate.utils", "transformers"}
    made: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    made["transformers"].__version__ = "9.9"
    made["accelerate"].__version__ = "9.8"
    made["accelerate.utils"].DistributedType = types.SimpleNamespace(FSDP="FSDP")
    for module, owner, name in huggingface._WRAPPED:
        if name == "__code__":
            continue
        found = made[module]
        if owner:
            if not hasattr(found, owner):
                setattr(found, owner, type(owner, (), {}))
            found = getattr(found, owner)
        setattr(found, name, lambda *args, **kwargs: (args, kwargs))
    # A function of its own, whose code changes.
    init = types.FunctionType(Accelerator.__init__.__code__, {})
    made["accelerate.accelerator"].Accelerator = type("Accelerator", (), {"__init__": init})
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(VARIABLE, "cpu")
    return made


def state_of(packages: dict[str, Any]) -> list[Any]:
    found: list[Any] = [os.environ[VARIABLE]]
    for module, owner, name in huggingface._WRAPPED:
        place = packages[module]
        for part in filter(None, owner.split(".")):
            place = getattr(place, part)
        found.append(getattr(place, name, None))
    return found


def test_what_is_changed_is_taken_back(packages):
    before = state_of(packages)
    torchacc.accelerate_hf_trainer()
    torchacc.accelerate_hf_trainer()
    now = state_of(packages)
    assert now[0] == "acc:0" and all(a is not b for a, b in zip(now, before, strict=True))
    assert packages["transformers.training_args"].is_torch_bf16_gpu_available() is True
    torchacc.accelerate_hf_trainer(enable=False)
    assert state_of(packages) == before


def test_float16_is_taken_on_acc_with_its_scaler(packages):
    accelerator = packages["accelerate.accelerator"]
    with pytest.raises(ValueError, match="fp16"):
        accelerator.Accelerator("acc")
    torchacc.accelerate_hf_trainer()
    accelerator.Accelerator("acc")
    accelerator.Accelerator("cuda")
    with pytest.raises(ValueError, match="fp16"):
        accelerator.Accelerator("another")
    scaler = accelerator.get_grad_scaler("MULTI_GPU", init_scale=4.0)
    assert scaler.scale(torch.ones((), device="acc")).item() == 4
    # torch's scaler of sharded gradients, which asks for the device as well.
    assert accelerator.get_grad_scaler("FSDP", init_scale=4.0) == (
        ("FSDP",),
        {"device": "acc", "init_scale": 4.0},
    )
    torchacc.accelerate_hf_trainer(enable=False)
    with pytest.raises(ValueError, match="fp16"):
        accelerator.Accelerator("acc")


@pytest.mark.parametrize(
    ("package", "module", "lacks"),
    [
        ("transformers 9.9", "transformers.training_args", "is_torch_bf16_gpu_available"),
        ("transformers 9.9", "transformers.trainer", "Trainer"),
        ("accelerate 9.8", "accelerate.accelerator", "Accelerator"),
        ("accelerate 9.8", "accelerate.accelerator", "get_grad_scaler"),
    ],
)
def test_a_package_that_lacks_what_has_to_be_changed_is_refused_and_nothing_is_changed(
    packages, package, module, lacks
):
    delattr(packages[module], lacks)
    before = os.environ[VARIABLE], dict(huggingface._before)
    functions = {name: dict(vars(each)) for name, each in packages.items()}
    with pytest.raises(ImportError, match=re.escape(f"{package} has no {module}.{lacks}")):
        torchacc.accelerate_hf_trainer()
    assert (os.environ[VARIABLE], huggingface._before) == before
    assert functions == {name: dict(vars(each)) for name, each in packages.items()}


def test_a_constructor_without_a_list_of_devices_is_refused(packages):
    init = packages["accelerate.accelerator"].Accelerator.__init__
    init.__code__ = (lambda self, device: None).__code__
    with pytest.raises(ImportError, match=r"accelerate 9\.8 has .* \(list of devices\)"):
        torchacc.accelerate_hf_trainer()
    assert os.environ[VARIABLE] == "cpu"
