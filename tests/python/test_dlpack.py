"""DLPack and the array protocols: other libraries share the memory of an acc tensor."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.dlpack import DLDeviceType

from tests.helpers import extension

pytestmark = pytest.mark.usefixtures("acc_only")


@pytest.fixture
def on_host() -> None:
    if extension().executor_name() != "host":
        pytest.skip("numpy reads host memory")


def test_the_device_is_that_of_the_memory() -> None:
    kind, index = torch.ones(2, device="acc").__dlpack_device__()
    if extension().executor_name() == "host":
        assert (kind, index) == (DLDeviceType.kDLCPU, 0)
    else:
        assert (kind, index) == (DLDeviceType.kDLCUDA, 0)


@pytest.mark.usefixtures("recording")
def test_asking_for_the_device_submits_nothing() -> None:
    extension().flush()
    x = torch.ones(2, device="acc")
    before = extension().pending(0)
    assert before > 0
    x.__dlpack_device__()
    assert extension().pending(0) == before


def test_torch_takes_the_memory() -> None:
    x = torch.arange(6.0, device="acc").view(2, 3) * 2
    y = torch.from_dlpack(x)
    assert y.device.type in ("cpu", "cuda") and y.shape == (2, 3)
    assert y.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
    assert y.data_ptr() == x.data_ptr()


@pytest.mark.usefixtures("on_host")
def test_numpy_shares_the_memory() -> None:
    x = torch.arange(6.0, device="acc").view(2, 3) + 1
    array = np.from_dlpack(x)
    assert array.tolist() == x.tolist()
    x.mul_(10)
    torch.acc.synchronize()
    assert array[1, 2] == 60.0


@pytest.mark.usefixtures("on_host")
def test_the_array_outlives_the_tensor() -> None:
    x = torch.full((1 << 16,), 3.0, device="acc")
    array = np.from_dlpack(x)
    del x
    junk = [torch.zeros(1 << 16, device="acc") for _ in range(4)]
    torch.acc.synchronize()
    assert junk[0].shape == (1 << 16,)
    assert (array == 3.0).all()


@pytest.mark.usefixtures("on_host")
def test_views_keep_offset_and_strides() -> None:
    x = torch.arange(24, device="acc").view(4, 6)[1:, ::2]
    assert np.from_dlpack(x).tolist() == x.tolist()
    assert np.from_dlpack(x.t()).tolist() == x.t().tolist()


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.float64, torch.int8, torch.int64, torch.bool, torch.complex64]
)
def test_every_dtype_goes_across(dtype: torch.dtype) -> None:
    x = torch.tensor([0, 1, 1], dtype=dtype, device="acc")
    y = torch.from_dlpack(x)
    assert y.dtype == dtype and torch.equal(y.cpu(), x.cpu())


def test_the_versioned_protocol_and_copies() -> None:
    x = torch.ones(3, device="acc")
    y = torch.from_dlpack(x, copy=True) if extension().executor_name() == "host" else None
    capsule = x.__dlpack__(max_version=(1, 0))
    assert "dltensor_versioned" in repr(capsule)
    assert "dltensor" in repr(x.__dlpack__())
    if y is not None:
        y.fill_(9)
        assert x.tolist() == [1.0] * 3


def test_tensors_with_more_than_memory_are_refused() -> None:
    with pytest.raises(BufferError, match="require gradient"):
        torch.ones(2, device="acc", requires_grad=True).__dlpack__()
    with pytest.raises(BufferError, match="conjugate"):
        torch.ones(2, dtype=torch.complex64, device="acc").conj().__dlpack__()


def test_memory_of_others_becomes_an_acc_tensor_by_copy() -> None:
    array = np.arange(4.0)
    x = torch.from_dlpack(array).to("acc")
    array[:] = 0
    assert x.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_tensors_of_the_cpu_are_as_before() -> None:
    x = torch.arange(3.0)
    assert x.__dlpack_device__() == (DLDeviceType.kDLCPU, 0)
    assert np.from_dlpack(x).tolist() == [0.0, 1.0, 2.0]
    assert torch.from_dlpack(x).data_ptr() == x.data_ptr()


def test_arrays_are_made_through_the_cpu() -> None:
    x = torch.arange(3.0, device="acc")
    assert np.asarray(x.cpu()).tolist() == x.tolist() == [0.0, 1.0, 2.0]


@pytest.mark.usefixtures("on_host")
def test_both_sides_see_what_the_other_writes() -> None:
    x = torch.arange(4.0, device="acc") * 2
    y = torch.from_dlpack(x)
    x.add_(1)
    assert y.tolist() == [1.0, 3.0, 5.0, 7.0]
    doubled = x * 2
    y.fill_(5)
    assert doubled.tolist() == [2.0, 6.0, 10.0, 14.0]
    assert (x + 1).tolist() == [6.0] * 4
    assert (x.view(2, 2)[1] + 1).tolist() == [6.0] * 2
