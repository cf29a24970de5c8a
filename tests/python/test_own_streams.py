"""A program's own streams: what it submits there with an address that it was told comes first.

The host has no streams, so what is looked at is when the device's work is made to wait for them.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, library

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only")


def waits() -> int:
    return helpers.stats().get("stream_waits/own", 0)


@pytest.fixture(autouse=True)
def none_is_known(acc_only: None) -> None:
    """Of tests before this one."""
    x = torch.ones(2, device="acc")
    for _ in range(2):
        x.add_(1).sum().item()
    before = waits()
    x.add_(1).sum().item()
    assert waits() == before, "a test before this one still has a tensor"


seen: list[int] = []


@library.custom_op("acc_test::looks_at_waits", mutates_args=(), device_types=("cpu", "cuda"))
def looks_at_waits(x: Tensor) -> Tensor:
    seen.append(waits())
    return x.clone()


looks_at_waits.register_fake(torch.empty_like)


def test_work_comes_behind_a_stream_under_which_an_address_was_told() -> None:
    x = torch.ones(8, device="acc")
    with torch.acc.stream(torch.acc.Stream()):
        y = x + 1
        assert y.data_ptr() != 0
        before = waits()
        seen.clear()
        assert looks_at_waits(y * 2).sum().item() == 32
    assert seen and seen[0] > before, "the plan began before what is in the stream"
    # As long as the address is good, whatever stream is current.
    before = waits()
    assert (y * 3).sum().item() == 48
    assert waits() > before


def test_reads_come_behind_it_with_nothing_recorded() -> None:
    y = torch.ones(1, device="acc") + 1
    with torch.acc.stream(torch.acc.Stream()):
        assert y.data_ptr() != 0
    reads = {
        "item": y.item,
        "cpu": y.cpu,
        "operator at once": y.nonzero,
        "resize": lambda: y.untyped_storage().resize_(4096),
    }
    for name, read in reads.items():
        before = waits()
        read()
        assert waits() > before, name


def test_dlpack_tells_an_address_too() -> None:
    y = torch.ones(4, device="acc") + 1
    with torch.acc.stream(torch.acc.Stream()):
        capsule = y.__dlpack__()
    before = waits()
    assert y.sum().item() == 8
    assert waits() > before
    del capsule


@pytest.mark.parametrize("told_first", [True, False])
def test_record_stream_names_one(told_first: bool) -> None:
    y = torch.ones(4, device="acc") + 1
    side = torch.acc.Stream()
    if told_first:
        assert y.data_ptr() != 0
    y.record_stream(side)
    if not told_first:
        assert y.data_ptr() != 0
    before = waits()
    assert (y + 1).sum().item() == 12
    assert waits() > before


def test_a_stream_is_forgotten_after_the_wait_that_follows_the_last_tensor() -> None:
    x = torch.ones(8, device="acc")
    ys = [x + 1, x + 2]
    with torch.acc.stream(torch.acc.Stream()):
        assert all(y.data_ptr() for y in ys)
    expected = [True, True, True, False, False]
    found = []
    for number in range(len(expected)):
        if number in (1, 2):
            del ys[-1]
        helpers.flush()
        before = waits()
        x.add_(1)
        helpers.flush()
        found.append(waits() > before)
    assert found == expected


@pytest.mark.usefixtures("capturing")
def test_captured_work_waits_before_it_writes_a_freed_result_again() -> None:
    extension = helpers.extension()
    extension.capture_plans(True)
    torch.use_deterministic_algorithms(True)  # or kernels are first tried against operators
    try:
        x = torch.randn(64, 64, device="acc")
        side = torch.acc.Stream()
        addresses, waited, submitted = [], [], []
        for _ in range(12):
            with helpers.counting() as counted:
                y = (x @ x).relu() * 2
                extension.mark_step()
            waited.append(counted["stream_waits/own"])
            submitted.append(counted["captures_submitted"])
            addresses.append(y.data_ptr())
            y.record_stream(side)
            del y
    finally:
        torch.use_deterministic_algorithms(False)
        extension.capture_plans(None)
    assert sum(submitted[-4:]) == 4 and len(set(addresses[-4:])) == 1, (submitted, addresses)
    assert all(waited[1:]), waited


def test_there_is_nothing_to_wait_for_without_them() -> None:
    before = waits()
    x = torch.ones(8, device="acc")
    side = torch.acc.Stream()
    y = x + 1
    assert y.data_ptr() != 0
    y.record_stream(torch.acc.default_stream())
    with torch.acc.stream(side):
        z = y * 2
        z.record_stream(side)  # nobody was told its address
        assert z.sum().item() == 32
    assert waits() == before
