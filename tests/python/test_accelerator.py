"""torch.accelerator.*: torch's device-independent API reaches the device."""

from __future__ import annotations

import pytest
import torch

from tests.helpers import counting, extension, run_python

pytestmark = pytest.mark.usefixtures("acc_only")


def test_acc_is_the_accelerator() -> None:
    assert torch.accelerator.is_available()
    assert torch.accelerator.current_accelerator() == torch.device("acc")
    assert torch.accelerator.current_accelerator(check_available=True).type == "acc"
    assert torch.accelerator.device_count() == torch.acc.device_count()


def test_the_current_device_is_the_same() -> None:
    assert torch.accelerator.current_device_index() == torch.acc.current_device() == 0
    torch.accelerator.set_device_index("acc:0")
    with torch.accelerator.device_index(0), torch.accelerator.device_index(None):
        assert torch.acc.current_device() == 0
    with pytest.raises(RuntimeError, match="no device acc:99"):
        torch.accelerator.set_device_index(99)


def test_indices_change_together(two_devices) -> None:
    code = """
with torch.accelerator.device_index(1):
    assert torch.acc.current_device() == 1
    assert torch.empty(1, device="acc").device.index == 1
    assert torch.accelerator.current_stream().device_index == 1
assert torch.accelerator.current_device_index() == 0
torch.acc.set_device(1)
assert torch.accelerator.current_device_index() == 1
print("done")
"""
    out = run_python(code, ACC_HOST_DEVICES="2").stdout
    assert "done" in out


def test_streams_are_the_same() -> None:
    stream = torch.acc.Stream()
    assert torch.accelerator.current_stream() == torch.acc.default_stream()
    with stream:
        assert torch.accelerator.current_stream("acc:0") == stream
    torch.accelerator.set_stream(stream)
    assert torch.acc.current_stream() == stream
    torch.accelerator.set_stream(torch.acc.default_stream())
    assert torch.accelerator.current_stream() == torch.acc.default_stream()


@pytest.mark.usefixtures("recording")
def test_synchronize_submits_everything() -> None:
    extension().flush()
    x = torch.ones(3, device="acc")
    assert extension().pending(0) > 0
    with counting() as counted:
        torch.accelerator.synchronize()
    assert extension().pending(0) == 0 and counted["flushes"] == 1
    assert x.tolist() == [1.0] * 3


@pytest.mark.usefixtures("only_this_frees")
def test_memory_is_the_same() -> None:
    base = torch.accelerator.memory_allocated()
    x = torch.ones(1 << 20, device="acc")
    assert torch.accelerator.memory_allocated() - base == 4 << 20
    assert torch.accelerator.max_memory_allocated() >= 4 << 20
    assert torch.accelerator.memory_reserved() >= torch.accelerator.memory_allocated()
    assert torch.accelerator.max_memory_reserved("acc") >= torch.accelerator.memory_reserved()
    del x
    torch.accelerator.reset_peak_memory_stats()
    torch.accelerator.reset_accumulated_memory_stats()
    assert torch.accelerator.max_memory_allocated() == torch.accelerator.memory_allocated() == base
    assert torch.accelerator.memory_stats()["allocated_bytes.all.freed"] == 0
    torch.accelerator.empty_cache()
    free, total = torch.accelerator.get_memory_info()
    assert 0 < free <= total


def test_capabilities_name_dtypes() -> None:
    dtypes = torch.accelerator.get_device_capability()["supported_dtypes"]
    assert {torch.float32, torch.bfloat16, torch.int64, torch.bool} <= set(dtypes)


def test_the_default_device_can_be_acc() -> None:
    with torch.device("acc"):
        x = torch.ones(2)
        layer = torch.nn.Linear(2, 2)
    assert x.device.type == layer.weight.device.type == "acc"
    assert torch.ones(1).device.type == "cpu"


def test_tensors_move_to_the_accelerator() -> None:
    where = torch.accelerator.current_accelerator()
    x = torch.arange(3).to(where)
    assert x.device == torch.device("acc:0") and x.to("cpu").tolist() == [0, 1, 2]
    assert x.to(0).device == x.device
    assert torch.ones(1, device=0).device == torch.device("acc:0")
