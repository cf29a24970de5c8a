"""`torchacc.report`: what it counts, and which line of the program it names."""

from __future__ import annotations

import re

import pytest
import torch

import torchacc
from tests import helpers
from tests.python.places import line

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread")

F = torch.nn.functional


@pytest.fixture
def since(recording):
    """A report before the test, so that a later one is of the test alone."""
    helpers.flush()
    return torchacc.report()


def test_lines_that_read_values_are_named(device, since):
    x = torch.ones(4, 4, device=device)
    for _ in range(3):
        (x + 1).sum().item()  # read
    x.mul(2).cpu()  # copied
    found = torchacc.report(since=since)
    assert found.of("flush_read") == {line("read"): 3, line("copied"): 1}
    assert found.counters["flush_read"] == 4
    text = str(found)
    assert f"{line('read')} (read)" in text
    assert "a value was read" in text


def test_reading_what_is_there_is_counted_apart(device, since):
    x = torch.ones(4, 4, device=device) + 1
    x.cpu()  # submits
    x.cpu()  # waits
    x.to("cpu", non_blocking=True)
    for _ in range(2):
        x[0, 0].item()  # element
    total = x.sum()
    torchacc.sync()  # ends
    torchacc.sync()
    total.item()  # number
    torch.acc.synchronize()  # stands still
    event = torch.acc.Event()
    event.record()
    event.synchronize()  # event
    torch.acc.current_stream().synchronize()  # stream
    found = torchacc.report(since=since)
    assert found.of("flush_read") == {line("submits"): 1}
    assert found.of("waits") == {
        line("element"): 2,
        line("number"): 1,
        line("stands still"): 1,
        line("event"): 1,
        line("stream"): 1,
        line("waits"): 1,
    }
    assert "read or waited for, of what was submitted before" in str(found)
    assert f"{line('ends')} (explicit)" in str(found)


def test_operators_without_a_kernel_are_named(device, since):
    x = torch.arange(4.0).to(device) - 1
    (x + 0).nonzero()  # dependent
    found = torchacc.report(since=since)
    assert found.of("fallback") == {"aten::nonzero": 1}
    assert found.of("flush_data_dependent") == {line("dependent"): 1}
    text = str(found)
    assert "aten::nonzero" in text and line("dependent") in text


def test_ends_of_steps_are_counted_without_places(device, since):
    x = torch.ones(4, device=device, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=0.1)
    for _ in range(3):
        x.sum().backward()
        optimizer.step()
    torchacc.mark_step()
    found = torchacc.report(since=since)
    assert found.counters["flush_step"] == 3
    assert not found.of("flush_step")
    assert "ended by optimizer.step()" in str(found)


def test_what_is_not_captured_is_named_with_the_reason(device, capturing, since):
    """A number of an operator of ATen that changes: the graph would have the old one."""
    extension = helpers.extension()
    extension.capture_plans(True)
    extension.skip_passes(helpers.BIT_BY_BIT)
    try:
        x = torch.ones(64, device=device)
        for i in range(8):
            y = torch.cumsum(x, 0).mul(0.5 + i)  # changes
            helpers.flush()
        assert y[3].item() == 4 * 7.5
    finally:
        extension.skip_passes("")
        extension.capture_plans(None)
    found = torchacc.report(since=since)
    assert found.of("not_captured/number") == {f"aten::mul.Tensor at {line('changes')}": 1}
    assert found.counters["captures_submitted"] >= 1
    text = str(found)
    assert "a number of it changes" in text and line("changes") in text


@pytest.mark.usefixtures("recording")
def test_a_report_is_of_what_came_since(device):
    first = torchacc.report()
    assert torchacc.report(since=first).counters.get("flush_read", 0) == 0
    (torch.ones(3, device=device) + 1).sum().item()
    later = torchacc.report()
    assert later.counters["flushes"] > first.counters["flushes"]
    assert torchacc.report(since=later).counters == {}


def test_reports_follow_one_another(device, since):
    """Each is about what came since the one before, which was such a report itself."""
    x = torch.ones(4, 4, device=device)
    for reads in (2, 3, 1):
        for _ in range(reads):
            (x + 1).sum().item()
        since = torchacc.report(since=since)
        assert since.counters["flush_read"] == reads


@pytest.mark.usefixtures("recording")
def test_a_report_submits_nothing(device):
    helpers.flush()
    x = torch.ones(4, device=device) + 1
    waiting = helpers.extension().pending(0)
    torchacc.report()
    assert waiting == helpers.extension().pending(0) > 0
    del x


def test_memory_is_that_of_tensors(device):
    helpers.flush()
    before = torchacc.report().memory["tensors"]
    x = torch.ones(1 << 20, device=device)
    helpers.flush()
    found = torchacc.report().memory
    assert found["tensors"] - before == 4 << 20
    assert found["at most"] >= found["tensors"]
    del x
    assert "MiB" in str(torchacc.report())


def test_steps_are_told_as_replayed_or_made_with_their_time(device, recording, since):
    x = torch.ones(64, device=device)
    for _ in range(5):
        kept = x.exp() * 2 + 1
        torchacc.mark_step()
    found = torchacc.report(since=since)
    counters = found.counters
    assert counters["plan_hits"] + counters["plan_follows"] == 5 - counters.get("plans_built", 0)
    assert 0 < counters["run_us"] * 1e-6 < found.seconds
    text = str(found)
    assert int(re.search(r"\n  replayed +(\d+)\n", text)[1]) >= 3
    assert re.search(r"\n  making plans +[0-9.]+ s\n", text)
    assert re.search(r"\n  running plans, waiting for kernels +[0-9.]+ s\n", text)
    assert kept.shape == (64,)
