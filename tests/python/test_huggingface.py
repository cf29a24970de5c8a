"""`torchacc.accelerate_hf_trainer`, with stand-ins for the packages: tests/ecosystem has them."""

from __future__ import annotations

import os
import sys
import types
from typing import Any

import pytest

import torchacc

VARIABLE = "ACCELERATE_TORCH_DEVICE"

pytestmark = pytest.mark.usefixtures("acc_only")


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Modules of accelerate and transformers, by name, with what is wrapped in them."""
    names = ("accelerate", "accelerate.state", "transformers", "transformers.training_args")
    made: dict[str, Any] = {name: types.ModuleType(name) for name in names}
    made["transformers"].__version__ = "9.9"
    methods = {"_prepare_backend": lambda self: None}
    made["accelerate.state"].PartialState = type("PartialState", (), methods)
    made["transformers.training_args"].is_torch_bf16_gpu_available = lambda: False
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setenv(VARIABLE, "cpu")
    return made


def state_of(packages: dict[str, Any]) -> tuple[Any, ...]:
    arguments = vars(packages["transformers.training_args"])
    return (
        os.environ[VARIABLE],
        packages["accelerate.state"].PartialState._prepare_backend,
        arguments.get("is_torch_bf16_gpu_available"),
    )


def test_what_is_changed_is_taken_back(packages):
    before = state_of(packages)
    torchacc.accelerate_hf_trainer()
    torchacc.accelerate_hf_trainer()
    device, backend, bfloat16 = state_of(packages)
    assert device == "acc:0" and backend is not before[1] and bfloat16()
    torchacc.accelerate_hf_trainer(enable=False)
    assert state_of(packages) == before


def test_a_package_that_lacks_what_has_to_be_changed_is_refused_and_nothing_is_changed(packages):
    del packages["transformers.training_args"].is_torch_bf16_gpu_available
    before = state_of(packages)
    text = r"transformers 9\.9 has no transformers\.training_args\.is_torch_bf16_gpu_available"
    with pytest.raises(ImportError, match=text):
        torchacc.accelerate_hf_trainer()
    assert state_of(packages) == before
