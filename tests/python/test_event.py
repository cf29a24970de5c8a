"""Events: an event is done when the work recorded before it is done."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch

from tests.helpers import counting, extension

pytestmark = pytest.mark.usefixtures("acc_only")


def pending() -> int:
    return extension().pending(0)


def record_something() -> torch.Tensor:
    """A result that is recorded and not computed."""
    extension().flush()
    x = torch.ones(4, device="acc")
    assert pending() > 0, "nothing is pending: the test would prove nothing"
    return x


def test_an_event_belongs_to_torch() -> None:
    assert isinstance(torch.acc.Event(), torch.Event)
    assert torch.acc.Event().device.type == "acc"
    assert isinstance(torch.acc.Stream().record_event(), torch.acc.Event)


def test_an_event_that_was_never_recorded_is_done() -> None:
    event = torch.acc.Event()
    assert event.query()
    event.synchronize()
    event.wait()


@pytest.mark.usefixtures("recording")
def test_recording_submits_nothing() -> None:
    record_something()
    before = pending()
    torch.acc.Event().record()
    assert pending() == before


@pytest.mark.usefixtures("recording")
def test_query_submits_what_was_recorded_before() -> None:
    x = record_something()
    event = torch.acc.Event()
    event.record()
    with counting() as counted:
        while not event.query():
            pass
    assert pending() == 0 and counted["flush_event"] == 1
    assert x.tolist() == [1.0] * 4


@pytest.mark.usefixtures("recording")
def test_query_of_an_event_with_nothing_before_it_submits_nothing() -> None:
    torch.acc.synchronize()
    event = torch.acc.Event()
    event.record()
    record_something()
    before = pending()
    while not event.query():
        pass
    event.synchronize()
    if extension().executor_name() == "host":
        assert pending() >= before > 0


@pytest.mark.usefixtures("recording")
def test_synchronize_submits_and_waits() -> None:
    x = record_something()
    event = torch.acc.current_stream().record_event()
    event.synchronize()
    assert pending() == 0 and event.query()
    assert x.tolist() == [1.0] * 4


def test_wait_orders_streams() -> None:
    x = torch.zeros(8, device="acc")
    side = torch.acc.Stream()
    with torch.acc.stream(side):
        x.add_(3)
        event = torch.acc.Event()
        event.record()
    event.wait()
    event.wait(torch.acc.current_stream())
    torch.acc.current_stream().wait_event(event)
    assert (x * 2).tolist() == [6.0] * 8


def slow_work() -> torch.Tensor:
    x = torch.ones(512, 512, device="acc")
    for _ in range(20):
        x = (x @ x) * 1e-3
    return x


def test_elapsed_time_covers_the_work_between() -> None:
    slow_work().cpu()  # kernels and plans are there
    torch.acc.synchronize()
    begin, end = (torch.acc.Event(enable_timing=True) for _ in range(2))
    wall = time.perf_counter()
    begin.record()
    result = slow_work()
    end.record()
    end.synchronize()
    wall = (time.perf_counter() - wall) * 1e3
    assert result.shape == (512, 512)
    elapsed = begin.elapsed_time(end)
    assert 0.1 < elapsed <= wall * 1.05
    assert end.elapsed_time(begin) == pytest.approx(-elapsed)


def test_elapsed_time_ends_when_the_work_ended() -> None:
    """It used to end when somebody asked."""
    begin, end = (torch.acc.Event(enable_timing=True) for _ in range(2))
    torch.acc.synchronize()
    wall = time.perf_counter()
    begin.record()
    x = torch.ones(4, device="acc") * 3
    end.record()
    assert x.tolist() == [3.0] * 4  # submits, and is the end of it
    wall = (time.perf_counter() - wall) * 1e3
    time.sleep(wall / 1e3 + 0.1)  # much longer, however long that took
    end.synchronize()
    assert 0 <= begin.elapsed_time(end) <= wall * 1.05


@pytest.mark.usefixtures("recording")
def test_elapsed_time_submits() -> None:
    begin, end = (torch.acc.Event(enable_timing=True) for _ in range(2))
    begin.record()
    record_something()
    end.record()
    try:
        assert begin.elapsed_time(end) >= 0
    except RuntimeError as error:  # a GPU may still be busy, as in torch.cuda
        assert "completed" in str(error)
    assert pending() == 0


def test_elapsed_time_wants_timing_and_recorded_events() -> None:
    with pytest.raises(ValueError, match="enable_timing"):
        torch.acc.Event().elapsed_time(torch.acc.Event())
    timed = [torch.acc.Event(enable_timing=True) for _ in range(2)]
    with pytest.raises(ValueError, match="recorded"):
        timed[0].elapsed_time(timed[1])


@pytest.mark.usefixtures("recording")
def test_an_event_can_be_recorded_again() -> None:
    begin, end = (torch.acc.Event(enable_timing=True) for _ in range(2))
    begin.record()
    end.record()
    end.synchronize()
    first = begin.elapsed_time(end)
    time.sleep(0.02)
    slow_work()
    end.record()
    assert pending() > 0
    end.synchronize()
    assert begin.elapsed_time(end) > first + 15


@pytest.mark.usefixtures("recording")
def test_events_may_die_before_their_work_is_submitted() -> None:
    x = record_something()
    for _ in range(100):
        torch.acc.Event().record()
    gc.collect()
    kept = torch.acc.Event()
    kept.record()
    assert x.tolist() == [1.0] * 4
    kept.synchronize()
    assert kept.query()


def test_events_on_other_streams_cover_recorded_work() -> None:
    """Recorded work runs in one order, whatever stream was current."""
    x = torch.ones(256, 256, device="acc")
    side = torch.acc.Stream()
    with torch.acc.stream(side):
        y = x @ x
    event = side.record_event()
    event.synchronize()
    assert pending() == 0 and y[0, 0].item() == 256.0


def test_two_devices_wait_for_each_other(two_devices) -> None:
    """And an event stays on the device that it was recorded on."""
    from tests.helpers import run_python

    code = """
x = torch.zeros(4, device="acc:0")
x.add_(5)
event = torch.acc.default_stream(0).record_event()
torch.acc.default_stream(1).wait_event(event)
y = x.to("acc:1") * 2
assert y.tolist() == [10.0] * 4
try:
    event.record(torch.acc.default_stream(1))
except RuntimeError as error:
    assert "belongs to acc:0" in str(error), error
    print("done")
"""
    out = run_python(code, ACC_HOST_DEVICES="2").stdout
    assert "done" in out


def test_a_loop_that_polls_ends() -> None:
    """A step whose result nobody reads is submitted by the poll."""
    w = torch.ones(16, device="acc", requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=0.5)
    for _ in range(3):
        w.square().sum().backward()
        event = torch.acc.Event()
        event.record()
        limit = time.monotonic() + 30
        while not event.query():
            assert time.monotonic() < limit, "the event never became done"
        optimizer.step()
        optimizer.zero_grad()
    assert w.tolist() == [0.0] * 16


@pytest.mark.usefixtures("recording")
def test_an_event_recorded_while_another_thread_submits_waits_for_it(one_thread) -> None:
    """Work that one thread is doing is before an event that another one records meanwhile."""
    x = torch.ones(600, 600, device="acc") / 600
    extension().flush()
    y = x
    for _ in range(30):
        y = y @ x
    event = torch.acc.Event()
    with counting() as counted:
        submitting = threading.Thread(target=extension().flush)
        submitting.start()
        while pending() > 0:
            pass
        event.record()
        event.synchronize()
    assert counted["materialisations"] >= 1, "the event was done before the work before it"
    submitting.join()
    assert abs(y[0, 0].item() - 1 / 600) < 1e-5
