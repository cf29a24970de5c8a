"""Streams: names, the current one, waiting, and that querying submits what was recorded."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.helpers import counting, extension

pytestmark = pytest.mark.usefixtures("acc_only")


@pytest.fixture(autouse=True)
def default_stream_again():
    yield
    torch.acc.set_stream(torch.acc.default_stream())


def pending() -> int:
    return extension().pending(0)


def record_something() -> torch.Tensor:
    """A result that is recorded and not computed."""
    extension().flush()
    x = torch.ones(4, device="acc")
    assert pending() > 0, "nothing is pending: the test would prove nothing"
    return x


def test_the_default_stream_is_current() -> None:
    assert torch.acc.current_stream() == torch.acc.default_stream()
    assert torch.acc.current_stream().stream_id == 0
    assert isinstance(torch.acc.current_stream(), torch.acc.Stream)
    assert isinstance(torch.acc.Stream(), torch.Stream)


def test_new_streams_are_different() -> None:
    streams = [torch.acc.Stream() for _ in range(4)] + [torch.acc.default_stream()]
    assert len({(s.stream_id, s.device_index) for s in streams}) == 5
    assert len(set(streams)) == 5
    same = torch.acc.Stream(
        stream_id=streams[0].stream_id, device_index=0, device_type=streams[0].device_type
    )
    assert same == streams[0] and hash(same) == hash(streams[0]) and same != streams[1]


def test_streams_take_device_and_priority() -> None:
    urgent = torch.acc.Stream("acc:0", -1)
    assert urgent.priority == -1 and urgent.device == torch.device("acc:0")
    assert torch.acc.Stream(device=0, priority=0).priority == 0
    assert torch.Stream("acc").device.type == "acc"
    with pytest.raises(RuntimeError, match="no device acc:99"):
        torch.acc.Stream(device=99)


def test_the_context_makes_a_stream_current_and_restores() -> None:
    outer, inner = torch.acc.Stream(), torch.acc.Stream()
    with torch.acc.stream(outer):
        assert torch.acc.current_stream() == outer
        with torch.acc.stream(inner), torch.acc.stream(None):
            assert torch.acc.current_stream() == inner
        with pytest.raises(ZeroDivisionError), torch.acc.stream(inner):
            _ = 1 / 0
        assert torch.acc.current_stream() == outer
    assert torch.acc.current_stream() == torch.acc.default_stream()
    with inner:
        assert torch.acc.current_stream() == inner
    assert torch.acc.current_stream() == torch.acc.default_stream()


def test_set_stream_holds_until_the_next() -> None:
    stream = torch.acc.Stream()
    torch.acc.set_stream(stream)
    torch.acc.set_stream(None)
    assert torch.acc.current_stream() == stream
    assert torch.accelerator.current_stream() == stream


def test_the_current_stream_belongs_to_the_thread() -> None:
    seen: list[torch.acc.Stream] = []
    with torch.acc.stream(torch.acc.Stream()):
        thread = threading.Thread(target=lambda: seen.append(torch.acc.current_stream()))
        thread.start()
        thread.join()
    assert seen == [torch.acc.default_stream()]


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("other", [False, True])
def test_query_submits(other: bool) -> None:
    x = record_something()
    stream = torch.acc.Stream() if other else torch.acc.current_stream()
    while not stream.query():
        pass
    assert pending() == 0 and x.tolist() == [1.0] * 4


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("other", [False, True])
def test_synchronize_submits(other: bool) -> None:
    x = record_something()
    with counting() as counted:
        (torch.acc.Stream() if other else torch.acc.current_stream()).synchronize()
    assert pending() == 0 and counted["flush_event"] == 1
    assert x.tolist() == [1.0] * 4


@pytest.mark.usefixtures("recording")
def test_waiting_between_streams_submits_nothing() -> None:
    """Trainers wait for streams many times in each step."""
    record_something()
    before = pending()
    side, main = torch.acc.Stream(), torch.acc.current_stream()
    side.wait_stream(main)
    event = side.record_event()
    main.wait_event(event)
    main.wait_stream(side)
    torch.Stream("acc").wait_stream(side)
    assert pending() == before


@pytest.mark.usefixtures("recording")
def test_record_stream_submits_nothing() -> None:
    """FSDP names a stream for what it gathers, in the middle of each step."""
    kept = record_something()
    kept.sum().item()
    result = record_something()
    before = pending()
    for stream in (torch.acc.Stream(), torch.acc.current_stream()):
        for x in (kept, result):
            x.record_stream(stream)
    assert pending() == before
    assert result.data_ptr() != 0 and pending() == 0
    result.record_stream(torch.acc.Stream())


def test_reads_under_another_stream_wait_for_the_work() -> None:
    x = torch.ones(512, 512, device="acc")
    for _ in range(3):
        with torch.acc.stream(torch.acc.Stream()):
            y = x @ x
            assert y.sum().item() == 512.0**3
            z = y @ x
            assert z.cpu()[3, 4] == 512.0**2
            pointed = (z @ x).data_ptr()
        assert pointed != 0


def test_a_stream_has_the_handle_that_cuda_streams_have() -> None:
    assert torch.acc.default_stream().cuda_stream == 0
    assert isinstance(torch.acc.Stream().cuda_stream, int)


def test_streams_see_each_others_results() -> None:
    x = torch.zeros(64, device="acc")
    main = torch.acc.current_stream()
    for i in range(8):
        side = torch.acc.Stream()
        side.wait_stream(main)
        with torch.acc.stream(side):
            x.add_(1).mul_(2 if i % 2 else 1)
        main.wait_stream(side)
        x.record_stream(side)
    expected = 0.0
    for i in range(8):
        expected = (expected + 1) * (2 if i % 2 else 1)
    assert x.tolist() == [expected] * 64


def test_backward_runs_under_another_stream() -> None:
    w = torch.ones(3, device="acc", requires_grad=True)
    with torch.acc.stream(torch.acc.Stream()):
        loss = (w * 2).sum()
    loss.backward()
    assert w.grad.tolist() == [2.0] * 3


@pytest.mark.usefixtures("recording", "outlives_wrong_data")
def test_an_error_of_recorded_work_surfaces_at_synchronize() -> None:
    x = torch.zeros(2, device="acc")
    index = torch.tensor([7], device="acc")
    y = x.index_select(0, index)
    with pytest.raises((RuntimeError, IndexError), match="index"):
        torch.acc.current_stream().synchronize()
    del y
    assert (x + 1).tolist() == [1.0, 1.0]
