"""`torchacc.eager` and `torchacc.step`: operators that run at once, and steps as a whole."""

from __future__ import annotations

import pytest
import torch

import torchacc
from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "recording")


@pytest.fixture(autouse=True)
def nothing_pending(device):
    helpers.flush()


def pending() -> int:
    return helpers.extension().pending(0)


def two_optimizers(device):
    models = [helpers.small_net(device) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]

    def step():
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(helpers.drawn(8, 4, device=device)).sum().backward()
            optimizer.step()

    return step


def test_eager_operators_run_at_once(device):
    x = torch.ones(3, device=device) + 1
    assert pending() > 0
    with torchacc.eager():
        assert pending() == 0  # what was recorded before is submitted
        y = x * 3
        y += 1
        assert pending() == 0
    z = y + 1
    assert pending() == 1
    assert z.tolist() == [8, 8, 8]


def test_eager_names_the_line_that_fails_by_failing_there(device):
    x, beyond = torch.ones(3, 3, device=device), torch.tensor([5000], device=device)
    recorded = x.index_select(0, beyond)
    with pytest.raises(IndexError):
        helpers.flush()
    del recorded
    with torchacc.eager(), pytest.raises(IndexError):
        x.index_select(0, beyond)


def test_backward_within_eager_runs_at_once(device):
    x = torch.ones(3, 3, device=device, requires_grad=True)
    for _ in range(2):  # on a host the first operator has backward run in this thread
        before = torch._C._is_multithreading_enabled()
        x.grad = None
        with torchacc.eager():
            (x * 2).sum().backward()
            assert pending() == 0 and not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled() == before
    assert x.grad is not None and x.grad.tolist() == [[2.0] * 3] * 3


def test_a_scope_around_the_first_operator_leaves_backward_in_this_thread():
    helpers.run_python("""
import threading, torchacc
from torchacc_device import _C
weight = torch.nn.Parameter(torch.ones(2).to(DEVICE))
with torchacc.eager():
    (weight * 2).sum()
threads = []
y = weight * 2
y.register_hook(lambda gradient: threads.append(threading.get_ident()))
y.sum().backward()
assert (threads == [threading.get_ident()]) == (_C.executor_name() == "host")
""")


def test_eager_scopes_nest_and_decorate(device):
    @torchacc.eager()
    def double(x):
        """Twice."""
        y = x * 2
        return y, pending()

    x = torch.ones(3, device=device)
    with torchacc.eager():
        with torchacc.eager():
            pass
        y = x * 2
        assert pending() == 0
    assert double.__doc__ == "Twice."
    z, waiting = double(y)
    assert waiting == 0
    w = z + 1
    assert pending() == 1
    assert w.tolist() == [5, 5, 5]


def test_eager_ends_with_an_exception(device):
    with pytest.raises(ZeroDivisionError), torchacc.eager():
        raise ZeroDivisionError
    y = torch.ones(3, device=device) + 1
    assert pending() > 0
    del y


def test_eager_trains_as_ever(device):
    found = []
    for scope in (torchacc.eager, torchacc.step):
        step = two_optimizers(device)
        with scope():
            step()
        found.append(step)
    states = []
    for step in found:
        with torchacc.step():
            step()
        cells = dict(zip(step.__code__.co_freevars, step.__closure__, strict=True))
        states.append([p.cpu() for m in cells["models"].cell_contents for p in m.parameters()])
    for x, y in zip(*states, strict=True):
        torch.testing.assert_close(x, y)


def test_two_optimizers_are_one_step(device):
    step = two_optimizers(device)
    for _ in range(3):
        with torchacc.step():
            step()
    with helpers.counting() as counted:
        for _ in range(4):
            with torchacc.step():
                step()
                assert pending() > 0
            assert pending() == 0
    assert counted["flushes"] == counted["flush_step"] == 4
    assert counted["plan_follows"] == 4


def test_a_step_begins_where_it_is_entered(device):
    x = torch.ones(3, device=device) + 1
    with helpers.counting() as counted, torchacc.step():
        assert pending() == 0
        y = x * 2
        torchacc.mark_step()  # no end of it
        assert pending() == 1
    assert counted["flush_explicit"] == 1
    assert y.tolist() == [4, 4, 4]


def test_steps_within_a_step_are_part_of_it(device):
    step = torchacc.step()(two_optimizers(device))
    with helpers.counting() as counted, torchacc.step():
        step()
        step()
    assert counted["flushes"] == 1


def test_batches_of_a_loader_do_not_end_a_step(device):
    loader = torchacc.AsyncLoader([torch.ones(4) for _ in range(3)], torch.device(device, 0))
    with helpers.counting() as counted:
        with torchacc.step():
            total = torch.zeros(4, device=device)
            for batch in loader:
                total += batch
        assert pending() == 0
    assert counted["flush_loader"] == 0
    assert total.tolist() == [3, 3, 3, 3]


def test_a_step_ends_after_an_exception_and_boundaries_are_back(device):
    with pytest.raises(ZeroDivisionError), torchacc.step():
        x = torch.ones(3, device=device) + 1
        raise ZeroDivisionError
    assert pending() == 0
    y = x * 2
    torchacc.mark_step()
    assert pending() == 0
    assert y.tolist() == [4, 4, 4]


def test_a_generator_has_its_scope_in_each_turn(device):
    @torchacc.eager()
    def values():
        x = torch.ones(2, device=device)
        while True:
            x = x * 2
            yield x, pending()

    turns = values()
    for expected in (2.0, 4.0):
        x, inside = next(turns)
        assert inside == 0
        assert x + 0 is not None and pending() > 0  # outside it is recorded
        assert x.tolist() == [expected] * 2
