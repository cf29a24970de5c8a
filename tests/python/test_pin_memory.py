"""Pinned host memory: allocation, recognition, copies, the DataLoader."""

from __future__ import annotations

import gc

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers import extension

pytestmark = pytest.mark.usefixtures("acc_only")


def test_pinned_tensors_are_recognised() -> None:
    x = torch.arange(100.0)
    assert not x.is_pinned()
    pinned = x.pin_memory()
    assert pinned.is_pinned() and pinned.device.type == "cpu"
    assert torch.equal(pinned, x)
    assert pinned[37:].is_pinned() and pinned.view(10, 10).t().is_pinned()
    assert pinned.pin_memory().data_ptr() == pinned.data_ptr()
    assert not pinned.clone().is_pinned()
    assert not torch.arange(100.0).is_pinned()


def test_factories_pin() -> None:
    assert torch.empty(5, pin_memory=True).is_pinned()
    assert torch.zeros(3, pin_memory=True).tolist() == [0.0] * 3
    assert torch.tensor([1, 2], pin_memory=True).is_pinned()
    assert torch.empty(0, pin_memory=True).numel() == 0


@pytest.mark.usefixtures("only_this_frees")
def test_a_freed_block_is_not_pinned_any_more() -> None:
    stats = torch.acc.host_memory_stats()
    pinned = torch.empty(1 << 20, dtype=torch.uint8, pin_memory=True)
    now = torch.acc.host_memory_stats()
    assert now["active_bytes.current"] - stats["active_bytes.current"] >= 1 << 20
    address = pinned.data_ptr()
    if extension().executor_name() == "host":
        assert address % 4096 == 0
    del pinned
    gc.collect()
    assert torch.acc.host_memory_stats()["active_bytes.current"] == stats["active_bytes.current"]


def test_statistics_are_reset() -> None:
    x = torch.empty(1 << 16, dtype=torch.uint8, pin_memory=True)
    assert torch.acc.host_memory_stats()["allocated_bytes.allocated"] >= 1 << 16
    torch.acc.reset_accumulated_host_memory_stats()
    assert torch.acc.host_memory_stats()["allocated_bytes.allocated"] == 0
    torch.acc.reset_peak_host_memory_stats()
    stats = torch.acc.host_memory_stats()
    assert stats["allocated_bytes.peak"] == stats["allocated_bytes.current"] >= x.numel()


@pytest.mark.parametrize("non_blocking", [False, True])
def test_copies_to_and_from_pinned_memory(non_blocking: bool) -> None:
    source = torch.arange(1000.0).pin_memory()
    x = source.to("acc", non_blocking=non_blocking)
    target = torch.empty(1000, pin_memory=True)
    target.copy_(x * 2, non_blocking=non_blocking)
    torch.acc.synchronize()
    assert torch.equal(target, torch.arange(1000.0) * 2)


def test_a_blocking_copy_has_read_its_source() -> None:
    source = torch.ones(1000).pin_memory()
    x = source.to("acc")
    source.zero_()
    assert x.sum().item() == 1000.0


def test_a_pageable_source_is_read_before_the_call_returns() -> None:
    source = torch.ones(1000)
    x = source.to("acc", non_blocking=True)
    source.zero_()
    assert x.sum().item() == 1000.0


def test_a_pinned_source_may_die_before_its_copy_is_done() -> None:
    results = []
    for i in range(20):
        source = torch.full((4096,), float(i)).pin_memory()
        results.append(source.to("acc", non_blocking=True) + 1)
        del source
    assert [r[0].item() for r in results] == [float(i + 1) for i in range(20)]
    assert [r[-1].item() for r in results] == [float(i + 1) for i in range(20)]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_loader_pins_its_batches(workers: int) -> None:
    data = TensorDataset(torch.arange(40.0), torch.arange(40))
    loader = DataLoader(data, batch_size=8, pin_memory=True, num_workers=workers)
    seen = []
    for x, y in loader:
        assert x.is_pinned() and y.is_pinned()
        seen += x.to("acc", non_blocking=True).mul(2).tolist()
        assert y.to("acc", non_blocking=True).cpu().tolist() == y.tolist()
    assert seen == [2.0 * i for i in range(40)]


def test_an_acc_tensor_cannot_be_pinned() -> None:
    with pytest.raises(RuntimeError, match="pin"):
        torch.ones(2, device="acc").pin_memory()
    assert not torch.ones(2, device="acc").is_pinned()
