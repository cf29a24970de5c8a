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


CAPTURED = """
extension.capture_plans(True)
for _ in range(5):
    step()
held = extension.captured_bytes(0)
assert held >= 3 * MIB
"""

# What asks for 3 MiB outside of a plan: the code before, what asks, and the check of what it made.
ASKED = {
    "batch": ("host = torch.arange(768.0 * 1024)", "host.to(DEVICE)", "made.cpu().equal(host)"),
    "address": ("", "extension.alias(torch.empty(3 * MIB // 4, device=DEVICE))", "len(made)"),
    "resize": (
        "grown = torch.arange(8.0).to(DEVICE)",
        "grown.resize_(3 * MIB // 4)",
        "made[:8].tolist() == [*range(8)]",
    ),
    "torchacc.capture": (
        "import torchacc\n"
        "fill = torchacc.capture(lambda out: out.fill_(1))\n"
        "for _ in range(5): fill(torch.empty(3 * MIB // 4, device=DEVICE))\n"
        "torch.acc.empty_cache()\n" + CAPTURED,
        "fill(torch.empty(3 * MIB // 4, device=DEVICE))",
        "made.sum().item() == 3 * MIB // 4",
    ),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_asks_outside_of_plans_gets_the_memory_of_captures(device, asked):
    before, asks, is_right = ASKED[asked]
    run(
        f"""
{CAPTURED}
{before}
helpers.synchronize()
extension.limit_memory(MIB)
made = {asks}
assert extension.captured_bytes(0) == 0
extension.limit_memory(None)
assert {is_right}
check(step())
"""
    )


@pytest.mark.parametrize("asked", ["batch", "address", "resize"])
def test_where_that_is_not_enough_the_error_says_what_captures_gave_back(device, asked):
    before, asks, is_right = ASKED[asked]
    run(
        f"""
{CAPTURED}
{before}
helpers.synchronize()
extension.fail_allocations(0, 1 << 40, 1 << 20)
try:
    {asks}
    raise AssertionError("memory was found")
except torch.OutOfMemoryError as error:
    said = str(error)
extension.fail_allocations(0, 0, 0)
assert "tried to allocate 3145728 bytes" in said, said
assert (
    f"Captured steps gave {{held >> 20}} MiB back; results of theirs that are in use have 0 MiB."
    in said
), said
made = {asks}
assert {is_right}
check(step())
"""
    )


NO_MEMORY = 2  # CUDA's number

# What is called at once, and finds no memory the first time.
AT_ONCE = {
    "operator": "torch.nonzero(x[0] * torch.arange(512, device=DEVICE)).sum().item()",
    "random": "torch.poisson(rates).sum().item()",
    "read": "(x + 1).cpu().sum().item()",
}


@pytest.mark.parametrize("called", AT_ONCE)
def test_what_is_called_at_once_is_called_again(device, called):
    """As if it never had been: what is drawn is the same."""
    run(
        f"""
import contextlib, torchacc
{CAPTURED}
rates = x * 4
def call():
    torch.manual_seed(1)
    with torchacc.eager() if {called == "random"} else contextlib.nullcontext():
        return {AT_ONCE[called]}

expected = call()
helpers.synchronize()
extension.fail_waits({NO_MEMORY}, 1)
assert call() == expected
assert extension.captured_bytes(0) < MIB
for times in (2, 1):  # once more and it is an error
    made = step()
    extension.fail_waits({NO_MEMORY}, times)
    try:
        call()
        assert times == 1
    except torch.OutOfMemoryError as error:
        assert times == 2 and "failed: injected: CUDA error 2" in str(error), error
extension.fail_waits(0)
check(step())
"""
    )


def test_what_may_have_written_is_not_called_again(device):
    """It says so, and captures have given back what they had for who tries again."""
    run(
        f"""
import torchacc
{CAPTURED}
total = torch.zeros(4, device=DEVICE)
helpers.synchronize()
extension.fail_waits({NO_MEMORY}, 1)
try:
    with torchacc.eager():
        total.add_(1)
    raise AssertionError("memory was found")
except torch.OutOfMemoryError as error:
    said = str(error)
assert "[aten::add_] failed: injected" in said, said
assert f"Captured steps gave {{held >> 20}} MiB back" in said, said
assert "not tried again" in said, said
with torchacc.eager():
    total.add_(1)
assert total.tolist() == [1] * 4
check(step())
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
