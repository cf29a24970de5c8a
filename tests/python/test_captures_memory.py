"""Captures on a device that has little more memory than a step needs.

The host's heap then does as PyTorch's allocator on CUDA: what is freed is cached, the cache of one
pool is in the way of another, and while a pool is open nothing is given back for it.
"""

from __future__ import annotations

import pytest
import torch

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "capturing")


@pytest.fixture(autouse=True)
def on_a_host(device: str) -> None:
    if helpers.extension().executor_name() != "host":
        pytest.skip("the memory that is limited is that of the host executor")


SETUP = """
from tests import helpers
extension = helpers.extension()
extension.skip_passes(helpers.BIT_BY_BIT)  # no generated kernels
x = torch.ones(512, 512).to(DEVICE)  # 1 MiB
MIB = x.nbytes
state = torch.zeros(4, device=DEVICE)
done = 0

def step():
    global done
    done += 1
    state.add_(1)
    made = (x * 2).cumsum(0).sin().cumsum(1).cos().cumsum(0).sort(0)[0].cumsum(1)
    helpers.synchronize()
    return made

def of_cpu(host):
    return (host * 2).cumsum(0).sin().cumsum(1).cos().cumsum(0).sort(0)[0].cumsum(1)

def check(made):
    assert state.tolist() == [done] * 4
    torch.testing.assert_close(made.cpu(), of_cpu(torch.ones(512, 512)), rtol=1e-4, atol=1e-2)

def needed():
    # By a run that is not captured, in MiB.
    for mib in range(1, 64):
        extension.release_memory(0)
        extension.limit_memory(mib * MIB)
        try:
            made = step()
        except torch.OutOfMemoryError:
            extension.limit_memory(None)
            helpers.synchronize()
            continue
        del made
        return mib
    raise AssertionError("a step finds no memory")
"""


def run(code: str) -> None:
    helpers.run_python(SETUP + code, ACC_DETERMINISTIC="1", OMP_NUM_THREADS="1")


def test_a_step_that_fills_most_of_the_memory_is_captured(device):
    """What runs before have left in the allocator's cache makes way for the pool."""
    run(
        """
extension.limit_memory(needed() * 3 // 2 * MIB)
extension.capture_plans(True)
with helpers.counting() as counted:
    check(step())
    check(step())
assert counted["captures"] == 1
assert counted["not_captured/failed/no memory"] == 0
extension.limit_memory(None)  # a host's captured work allocates in each submission
with helpers.counting() as counted:
    check(step())
assert counted["captures_submitted"] == 1
"""
    )


def test_a_capture_that_fails_leaves_its_memory_to_the_run(device):
    """The rest of the run goes step by step, and has room for it."""
    run(
        """
extension.limit_memory(needed() * 3 // 2 * MIB)
extension.refuse_captures("end")
extension.capture_plans(True)
with helpers.counting() as counted:
    for _ in range(4):
        check(step())
assert counted["not_captured/failed/all"] == 1, counted
assert counted["errors"] == 0
"""
    )


@pytest.mark.usefixtures("plans_of_a_gpu")
def test_captures_that_are_dropped_before_they_are_worth_it_are_made_seldom(device):
    """As by a program that empties the cache in each step, until it no longer does."""
    x = torch.ones(64, 64).to(device)

    def step() -> None:
        assert (x @ x).cumsum(0)[0, 0].item() == 64

    for _ in range(8):
        step()
    with helpers.counting() as counted:
        for _ in range(100):
            torch.acc.empty_cache()
            step()
    assert 1 <= counted["captures"] <= 8  # after 0, 1, 3, ... 63 runs without
    with helpers.counting() as counted:
        for _ in range(100):
            step()
    assert counted["captures"] == 1 and counted["captures_submitted"] >= 36
