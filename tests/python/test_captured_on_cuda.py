"""What only a GPU can refuse: operators that wait for the device in the middle of a capture."""

from __future__ import annotations

import warnings

import pytest
import torch

import torchacc
from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "capturing")


@pytest.fixture(autouse=True)
def on_cuda(device):
    if helpers.extension().executor_name() != "cuda":
        pytest.skip("a host captures everything")


def test_what_cannot_be_captured_is_called_between_the_pieces(device):
    """Numbers that are drawn on the host are copied: no part of a CUDA graph."""
    x = torch.ones(64, 64, device=device)
    weights = torch.ones(64, device=device)
    before = torchacc.report()
    told = []
    for _ in range(12):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            y = (x @ x).cumsum(0)
            drawn = torch.multinomial(weights, 8, replacement=True)
            z = y.index_select(0, drawn).sum(1)
            helpers.flush()
        told += [str(each.message) for each in caught]
        assert torch.equal(z.cpu(), (64.0 * 64 * (drawn.cpu() + 1)).float())
    found = torchacc.report(since=before)
    failed = found.of("not_captured/failed")
    assert [name.split(" at ")[0] for name in failed] == ["acc::multinomial"]
    assert found.counters["captures_submitted"] >= 6
    assert len([text for text in told if "acc::multinomial" in text]) == 1


def test_a_copy_of_a_cuda_tensor_waits_for_what_makes_it(device):
    x = torch.randn(4096, 4096, device="cuda")
    for _ in range(6):
        y = x
        for _ in range(20):
            y = y @ x * 1e-2
        copied = y.to(device)
        helpers.flush()
        assert torch.equal(copied.cpu(), y.cpu())


def test_a_copy_from_the_host_waits_for_no_work(device):
    """Copies are on a stream of their own, and work that is submitted later waits for them."""
    x = torch.randn(4096, 4096, device=device)
    source = torch.randn(1024, 1024).pin_memory()
    for _ in range(6):
        y = x
        for _ in range(20):
            y = y @ x * 1e-2
        torchacc.mark_step()
        copied = source.to(device, non_blocking=True)
        doubled = copied * 2
        del copied
        other = source.to(device, non_blocking=True)  # may not lie where the copy is still read
        other.zero_()
        helpers.flush()
        assert torch.equal(doubled.cpu(), source * 2)
        assert not other.cpu().any()
