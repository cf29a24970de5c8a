"""DLPack and the array protocols: other libraries share the memory of an acc tensor."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

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


EXPORTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "torch": lambda x: torch.to_dlpack(x),
    "utils": lambda x: torch.utils.dlpack.to_dlpack(x),
    "module": lambda x: torch._C._to_dlpack(x),
    "versioned": lambda x: torch._C._to_dlpack_versioned(x),
    "method": lambda x: x.__dlpack__(),
}


@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_capsules_are_of_the_memory(export: Callable[[torch.Tensor], Any]) -> None:
    x = torch.arange(4.0, device="acc") * 2
    y = torch.from_dlpack(export(x))
    assert y.device.type in ("cpu", "cuda") and y.data_ptr() == x.data_ptr()
    y.add_(1)
    assert (x + 1).tolist() == (y + 1).tolist() == [2.0, 4.0, 6.0, 8.0]


@pytest.mark.usefixtures("recording")
def test_what_was_refused_stays_lazy() -> None:
    z = torch.ones(4, dtype=torch.complex64, device="acc")
    with pytest.raises(BufferError, match="conjugate"):
        z.conj().__dlpack__()
    extension().flush()
    made = z + 1
    assert extension().pending(0) == 1
    assert made.tolist() == [2.0] * 4


def test_an_unknown_device_of_another_library_is_not_acc() -> None:
    from torchacc_device import _patches

    unwrapped = _patches._before["torch._C._to_dlpack"]
    capsule = unwrapped(torch.ones(3, device="acc"))  # of the device that torch calls an extension
    with pytest.raises(BufferError, match="another library"):
        torch.from_dlpack(capsule)


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class ExchangeApi(ctypes.Structure):
    """DLPackExchangeAPI of dlpack.h."""

    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("older", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("export", ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)),
        ("import_", ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)),
        ("borrow", ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(DLTensor))),
        ("stream", ctypes.c_void_p),
    )


def exchange_api() -> ExchangeApi:
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
    capsule = torch.Tensor.__dlpack_c_exchange_api__
    return ExchangeApi.from_address(pointer(capsule, b"dlpack_exchange_api"))


@pytest.mark.parametrize("device", ["acc", "cpu"])
def test_libraries_that_exchange_tensors_from_c(device: str) -> None:
    api = exchange_api()
    x = (torch.arange(6.0, device=device) * 2).view(2, 3)
    borrowed = DLTensor()
    assert api.borrow(x, ctypes.byref(borrowed)) == 0
    assert borrowed.device_type == x.__dlpack_device__()[0]
    assert borrowed.data == x.data_ptr()
    assert borrowed.shape[: borrowed.ndim] == [2, 3]
    assert borrowed.strides[: borrowed.ndim] == [3, 1]

    managed = ctypes.c_void_p()
    assert api.export(x, ctypes.byref(managed)) == 0
    made = ctypes.py_object()
    assert api.import_(managed, ctypes.byref(made)) == 0
    y = made.value
    ctypes.pythonapi.Py_DecRef(made)  # `y` has its own reference
    assert y.data_ptr() == x.data_ptr() and y.tolist() == x.tolist()
    y.add_(1)
    assert (x + 1).tolist() == [[2.0, 4.0, 6.0], [8.0, 10.0, 12.0]]


@pytest.mark.usefixtures("recording")
def test_what_got_a_copy_shares_nothing(on_host: None) -> None:
    x = torch.arange(4.0, device="acc")
    copied = np.from_dlpack(x, copy=True)
    x += 1
    assert extension().pending(0) > 0, "operators on it run at once from now on"
    assert copied.tolist() == [0.0, 1.0, 2.0, 3.0] and x.tolist() == [1.0, 2.0, 3.0, 4.0]
