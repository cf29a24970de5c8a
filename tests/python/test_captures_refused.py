"""Captures that fail: what was submitted to them is done all the same, once, in another way.

A host captures everything and does at once what it captures. Here it is told to forget, as a GPU
does, what was submitted to a capture that failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import torchacc
from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread", "capturing")


@pytest.fixture(autouse=True, params=["operators", "kernels of a GPU"])
def captured(request, device) -> Iterator[None]:
    extension = helpers.extension()
    if extension.executor_name() != "host":
        pytest.skip("a GPU refuses by itself: test_captured_on_cuda.py")
    extension.capture_plans(True)
    if request.param == "operators":
        extension.skip_passes(helpers.BIT_BY_BIT)
    else:
        helpers.emulate_gpu()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    extension.refuse_captures("")
    helpers.emulate_gpu(on=False)
    extension.skip_passes("")
    extension.capture_plans(None)


# What was said since the process began: nothing is said twice.
TOLD: list[str] = []


@pytest.fixture(autouse=True)
def told(capfd) -> Iterator[Callable[[], list[str]]]:
    """All warnings so far, of this test and the ones before."""

    def read() -> list[str]:
        TOLD.extend(line for line in capfd.readouterr().err.splitlines() if "Warning" in line)
        return TOLD

    yield read
    read()


class Steps:
    """A step that changes what it is given, before, between and behind two library calls."""

    def __init__(self, device: str) -> None:
        self.x = helpers.drawn(48, 48, device=device)
        self.state = torch.zeros(48, 48, device=device)
        self.done = 0
        self.expected = torch.zeros(48, 48)
        self.on_host = self.x.cpu()

    def run(self) -> Tensor:
        """One, whose result is right."""
        result = self.record()
        helpers.synchronize()
        self.check(result)
        return result

    def record(self) -> Tensor:
        self.done += 1
        self.state.add_(1)
        made = (self.state @ self.x).cumsum(0)
        self.state.add_(made.flip(0).cumprod(1)[0, 0] * 0 + 1)
        return made * 2 + self.state

    def check(self, result: Tensor) -> None:
        before = torch.full((48, 48), 2.0 * self.done - 1)
        made = (before @ self.on_host).cumsum(0) * 2 + 2 * self.done
        torch.testing.assert_close(result.cpu(), made, rtol=1e-5, atol=1e-3)
        assert self.state.unique().tolist() == [2.0 * self.done]


def test_a_refused_operator_is_called_between_the_pieces(device, told):
    helpers.extension().refuse_captures("aten::cumsum,aten::cumprod")
    steps = Steps(device)
    before = torchacc.report()
    for _ in range(8):
        steps.run()
    with helpers.counting() as counted:
        for _ in range(6):
            steps.run()
    assert (counted["captures"], counted["captures_submitted"]) == (0, 6)
    assert counted["captured_launches"] == 18
    found = torchacc.report(since=before)
    names = [name.split(" at ")[0] for name in found.of("not_captured/failed")]
    assert sorted(names) == ["aten::cumprod", "aten::cumsum"]
    for name in names:
        (said,) = [text for text in told() if f" {name} " in text]
        assert "between its pieces" in said and "injected" in said
    assert "it cannot be captured" in str(found)


@pytest.mark.parametrize("refused", ["begin", "end"])
def test_where_nothing_can_be_captured_steps_go_operator_by_operator(device, told, refused):
    helpers.extension().refuse_captures(refused)
    steps = Steps(device)
    with helpers.counting() as counted:
        for _ in range(8):
            steps.run()
            torch.acc.empty_cache()  # has nothing to do with it
    assert (counted["captures"], counted["captures_submitted"]) == (1, 0)
    assert counted["not_captured/failed/all"] == 1
    assert len([text for text in told() if "operator by operator" in text and refused in text]) == 1
    assert counted["errors"] == 0


@pytest.mark.parametrize("missing", range(4))
def test_a_capture_that_finds_no_memory_is_made_later(device, told, missing):
    """The run goes on without, and what it had submitted to the capture is submitted again."""
    extension = helpers.extension()
    extension.refuse_captures("nothing")
    steps = Steps(device)
    steps.run()
    said = len(told())
    with helpers.counting() as counted:
        for _ in range(50):
            if counted_captures() > counted.before.get("captures", 0):
                break
            extension.fail_allocations(missing, 1, 48 * 48 * 4)
            steps.run()
            extension.fail_allocations(0, 0, 0)
        else:
            pytest.fail(f"nothing was captured: {helpers.stats()}")
        for _ in range(6):
            steps.run()
    assert counted["errors"] == 0
    assert counted["captures_submitted"] >= 5
    assert len(told()) == said


@pytest.mark.parametrize("found", range(3))
def test_a_run_that_finds_no_memory_counts_once(device, found):
    """Its capture fails, and for the rest of it a capture is dropped that was not worth it yet."""
    extension = helpers.extension()
    extension.refuse_captures("nothing")
    steps = Steps(device)
    for _ in range(3):
        steps.run()
    steps.x = steps.x.clone()  # elsewhere: what is captured does not fit
    helpers.synchronize()
    extension.fail_allocations(found, 2, 48 * 48 * 4)
    with helpers.counting() as counted:
        steps.run()
    extension.fail_allocations(0, 0, 0)
    assert (counted["captures"], counted["captures_submitted"]) == (1, 0)
    with helpers.counting() as counted:
        steps.run()
    assert counted["captures"] == 1  # after the second one that fails a run goes without


def multiplying(device: str, size: int) -> Callable[[], None]:
    """A step that is a plan of its own for each size."""
    x = helpers.drawn(size, size, device=device)
    expected = (x.cpu() @ x.cpu()).cumsum(0)

    def step() -> None:
        made = (x @ x).cumsum(0)
        helpers.synchronize()
        torch.testing.assert_close(made.cpu(), expected, rtol=1e-5, atol=1e-3)

    return step


def test_a_thread_captures_what_it_has_run_itself(device):
    """Libraries have handles and choices of algorithms by thread, and make none in a capture."""
    step = multiplying(device, 40)
    with helpers.counting() as counted:
        for _ in range(4):
            step()
    assert counted["captures"] == 1
    torch.acc.empty_cache()  # drops it
    with ThreadPoolExecutor(1) as other:
        for captures in (0, 1):
            with helpers.counting() as counted:
                other.submit(step).result()
            assert counted["captures"] == captures
    with helpers.counting() as counted:
        step()
    assert (counted["captures"], counted["captures_submitted"]) == (0, 1)


def test_where_each_step_has_a_thread_of_its_own_one_is_captured(device):
    step = multiplying(device, 44)
    with helpers.counting() as counted:
        for _ in range(24):
            with ThreadPoolExecutor(1) as thread:
                thread.submit(step).result()
    assert counted["captures"] == 1
    assert counted["captures_submitted"] >= 4


def counted_captures() -> int:
    return helpers.stats().get("captures", 0)


def test_while_memory_is_short_captures_are_tried_more_and_more_rarely(device):
    """For as long as that may be, and then one is made."""
    extension = helpers.extension()
    extension.refuse_captures("nothing")
    steps = Steps(device)
    try:
        extension.fail_captured_work(captures=1 << 40, submissions=0)
        with helpers.counting() as counted:
            for _ in range(80):
                steps.run()
    finally:
        extension.fail_captured_work(captures=0, submissions=0)
    assert counted["captures"] == counted["not_captured/failed/no memory"]
    assert 6 <= counted["captures"] <= 8
    assert counted["errors"] == 0
    with helpers.counting() as counted:
        for _ in range(70):
            steps.run()
    assert counted["captures"] == 1
    assert counted["captures_submitted"] >= 5


def test_so_are_those_whose_run_finds_no_memory_outside_of_its_pieces(device):
    extension = helpers.extension()
    extension.refuse_captures("aten::mm,aten::cumsum,aten::cumprod,aten::flip")
    steps = Steps(device)
    steps.run()
    with helpers.counting() as counted:
        for _ in range(40):
            extension.fail_allocations(0, 1, 48 * 48 * 4)
            steps.run()
            extension.fail_allocations(0, 0)
    assert 4 <= counted["captures"] <= 12
    assert counted["errors"] == 0


def test_captured_work_that_is_not_launched_for_want_of_memory_waits(device):
    """The driver needs some for that, too. Nothing of the work was done, and it is done once."""
    extension = helpers.extension()
    steps = Steps(device)
    for _ in range(5):
        steps.run()
    with helpers.counting() as counted:
        made = steps.record()
        extension.fail_captured_work(captures=0, submissions=1)
        try:
            with pytest.raises(torch.OutOfMemoryError, match="goes on at this operator"):
                helpers.synchronize()
        finally:
            extension.fail_captured_work(captures=0, submissions=0)
        helpers.synchronize()
    assert (counted["errors"], counted["captures_submitted"]) == (1, 1)
    steps.check(made)
    steps.run()


@pytest.mark.parametrize("failure", ["cuda", "cublas"])
def test_memory_that_is_missing_elsewhere_is_memory(device, failure):
    """In calls of CUDA beside torch's allocator, and in libraries: what is captured makes way."""
    extension = helpers.extension()
    steps = Steps(device)
    with helpers.counting() as counted:
        extension.fail_allocations(0, 1, 48 * 48 * 4, failure)
        try:
            steps.run()
            assert extension.allocations_counted() > 1
        finally:
            extension.fail_allocations(0, 0)
    assert counted["errors"] == 0


def test_a_later_piece_that_cannot_begin_is_no_operators_fault(device):
    helpers.extension().refuse_captures("aten::cumsum,begin later")
    steps = Steps(device)
    before = torchacc.report()
    with helpers.counting() as counted:
        for _ in range(8):
            steps.run()
    assert counted["not_captured/failed/all"] == 1
    assert (counted["captures"], counted["captures_submitted"]) == (2, 0)
    names = torchacc.report(since=before).of("not_captured/failed")
    assert sorted(name.split(" at ")[0] for name in names) == ["all", "aten::cumsum"]


def test_an_operator_that_spoils_a_capture_in_silence_is_found(device, told):
    """Not the one behind it, whose call fails."""
    helpers.extension().refuse_captures("late aten::cumsum")
    steps = Steps(device)
    before = torchacc.report()
    for _ in range(4):
        steps.run()
    with helpers.counting() as counted:
        for _ in range(4):
            steps.run()
    assert (counted["captures"], counted["captures_submitted"]) == (0, 4)
    names = torchacc.report(since=before).of("not_captured/failed")
    assert [name.split(" at ")[0] for name in names] == ["aten::cumsum"]


@pytest.mark.parametrize("runs", [1, 5], ids=["the run that is captured", "a submission"])
def test_what_is_lost_with_the_device_says_so(device, runs):
    """A GPU that is gone: the error has eager's type, says what to do, and nothing is repeated."""
    extension = helpers.extension()
    x = helpers.drawn(48, 48, device=device)
    state = torch.zeros(4, device=device)

    def step() -> Tensor:
        state.add_(1)
        made = x.sort(0)[0]
        return made.cumsum(0)

    for _ in range(runs):
        made = step()
        helpers.synchronize()
    kept = made.clone()
    helpers.synchronize()
    expected = kept.cpu()
    del made
    with helpers.counting() as counted:
        made = step()
        extension.fail_allocations(0, 1, 48 * 48 * 4, "lost")
        try:
            with pytest.raises(torch.AcceleratorError, match="aten::sort") as raised:
                helpers.synchronize()
        finally:
            extension.fail_allocations(0, 0, 0)
    assert counted["captures_submitted"] == (runs == 5)
    assert raised.value.error_code == 719
    assert "of no more use to this process" in str(raised.value)
    assert counted["errors"] == 1
    with pytest.raises(RuntimeError, match="no valid contents"):
        made.cpu()
    assert state.tolist() == [runs + 1] * 4
    assert torch.equal(kept.cpu(), expected)
