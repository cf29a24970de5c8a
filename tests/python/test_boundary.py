"""Step boundaries: the batch of a loader, else the end of `optimizer.step()`, else a call."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

import torchacc
from tests import helpers
from torchacc import boundary
from torchacc_device import _boundary


class Extension:
    """Stands for the extension module: notes each boundary, and has as much pending as told."""

    def __init__(self):
        self.pending_now = 0
        self.threads = []
        self.reasons = []

    def is_in_bad_fork(self):
        return False

    def pending(self, device):
        return self.pending_now

    def excuse_step(self, on):
        assert not on

    def flush(self, device, reason):
        self.threads.append(threading.current_thread())
        self.reasons.append(reason)
        self.pending_now = 0


@pytest.fixture
def extension(device, monkeypatch):
    extension = Extension()
    monkeypatch.setattr(_boundary, "_C", extension)
    monkeypatch.setattr(_boundary._thread, "loops", _boundary.Loops())
    boundary.install_hooks()
    return extension


@pytest.fixture
def marks(extension):
    """One entry for each boundary: the thread that made it. Every step leaves work behind it."""
    after = [0]

    def pending(device):
        after[0] += 1
        return after[0]

    extension.pending = pending
    return extension.threads


def make_optimizer(device):
    parameter = torch.nn.Parameter(torch.ones(2, device=device))
    parameter.grad = torch.ones(2, device=device)
    return torch.optim.SGD([parameter], lr=0.1)


def batches(count, device):
    return torchacc.AsyncLoader([torch.ones(1) for _ in range(count)], device)


# --- who makes the boundary ---------------------------------------------------------------------


def test_without_a_loader_each_optimizer_step_is_a_boundary(device, marks):
    optimizer = make_optimizer(device)
    for step in range(1, 4):
        optimizer.step()
        assert len(marks) == step


@pytest.mark.parametrize("optimizer_class", [torch.optim.Adam, torch.optim.LBFGS])
def test_every_kind_of_optimizer_is_seen(device, marks, optimizer_class):
    parameter = torch.nn.Parameter(torch.ones(2, device=device))
    optimizer = optimizer_class([parameter])

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert len(marks) == 1


def test_with_a_loader_the_batch_is_the_only_boundary(device, marks):
    optimizer = make_optimizer(device)
    for step, _ in enumerate(batches(4, device), 1):
        optimizer.step()
        assert len(marks) == step
    assert len(marks) == 5  # and one after the last


def test_two_optimizers_share_the_boundary_of_their_batch(device, marks):
    first, second = make_optimizer(device), make_optimizer(device)
    for step, _ in enumerate(batches(3, device), 1):
        first.step()
        second.step()
        assert len(marks) == step


def test_training_on_one_batch_has_a_boundary_per_step(device, marks):
    """The loader handed out one batch and never drives the loop again."""
    iterator = iter(batches(2, device))
    next(iterator)
    optimizer = make_optimizer(device)
    marks.clear()
    for _ in range(5):
        optimizer.step()
    assert len(marks) == 4  # the first could not be told from a step of the loader's loop


@pytest.mark.parametrize("leave", ["break", "exception", "end"])
def test_after_a_loader_loop_the_optimizer_makes_the_boundary_again(device, marks, leave):
    def loop():
        for _ in batches(3, device):
            if leave == "break":
                break
            if leave == "exception":
                raise ZeroDivisionError

    if leave == "exception":
        with pytest.raises(ZeroDivisionError):
            loop()
    else:
        loop()
    marks.clear()
    make_optimizer(device).step()
    assert len(marks) == 1


def test_a_validation_loop_inside_a_training_loop(device, marks):
    optimizer = make_optimizer(device)
    marks_at_step = []
    for _ in batches(2, device):
        optimizer.step()
        for _ in batches(2, device):
            pass
        marks_at_step.append(len(marks))
    # One for each batch; the one after a loop's last batch comes before it ends. The optimizer
    # added none.
    assert marks_at_step == [1 + 3, 1 + 3 + 1 + 3]


def test_a_loader_in_one_thread_does_not_hide_the_steps_of_another(device, marks):
    iterator = iter(batches(3, device))
    next(iterator)
    marks.clear()
    thread = threading.Thread(target=make_optimizer(device).step)
    thread.start()
    thread.join()
    assert marks == [thread]
    del iterator


def test_gradient_accumulation_has_one_boundary_per_batch(device, marks):
    optimizer = make_optimizer(device)
    counts = []
    for i, _ in enumerate(batches(6, device)):
        if i % 3 == 2:
            optimizer.step()
        counts.append(len(marks))
    assert counts == [1, 2, 3, 4, 5, 6]


def test_a_step_that_fails_is_no_boundary(device, marks):
    optimizer = make_optimizer(device)

    def closure():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(closure)
    assert marks == []


# --- a boundary that moves up to the optimizer --------------------------------------------------


def loop(extension, optimizers, device, count=5, step=10, after=0):
    """The reasons of the boundaries of a loop that records `step` nodes before each optimizer step
    and `after` nodes after the last."""
    for _ in batches(count, device):
        for optimizer in optimizers:
            extension.pending_now += step
            optimizer.step()
        extension.pending_now += after
    return extension.reasons


def test_with_nothing_after_the_step_the_optimizer_makes_the_boundary(device, extension):
    """Else a window of n steps would hold the work of n - 1 when the script reads its clock."""
    reasons = loop(extension, [make_optimizer(device)], device)
    # Nothing is known in the first iteration. The loader's own calls find nothing pending.
    assert reasons == ["loader", "loader", *["step", "loader"] * 4]


def test_with_something_after_the_step_the_loader_makes_the_boundary(device, extension):
    assert loop(extension, [make_optimizer(device)], device, after=3) == ["loader"] * 6


def test_of_two_optimizers_the_last_one_makes_the_boundary(device, extension):
    optimizers = [make_optimizer(device), make_optimizer(device)]
    assert loop(extension, optimizers, device) == ["loader", "loader", *["step", "loader"] * 4]


def test_what_follows_the_step_now_and_then_moves_the_boundary_back_once(device, extension):
    optimizer = make_optimizer(device)
    boundaries = []
    for i, _ in enumerate(batches(8, device)):
        extension.reasons.clear()
        extension.pending_now += 10
        optimizer.step()
        boundaries.append(extension.reasons == ["step"])
        if i == 4:
            extension.pending_now += 2  # an average of the weights, every few steps
    assert boundaries == [False, True, True, True, True, False, True, True]


def test_a_host_read_after_the_step_does_not_hide_the_end_of_the_step(device, extension):
    optimizer = make_optimizer(device)
    boundaries = []
    for _ in batches(4, device):
        extension.reasons.clear()
        extension.pending_now += 10
        optimizer.step()
        boundaries.append(extension.reasons == ["step"])
        extension.pending_now = 0  # the loss was read: everything is submitted
    assert boundaries == [False, True, True, True]


@pytest.mark.parametrize("updates", [1, 2])
def test_behind_the_scalers_last_update_is_the_end_of_the_step(device, extension, updates):
    optimizers = [make_optimizer(device) for _ in range(updates)]
    scaler = object()
    submitted = []
    for _ in batches(4, device):
        extension.reasons.clear()
        for optimizer in optimizers:
            extension.pending_now += 10
            optimizer.step()
            extension.pending_now += 2
            _boundary.after_update(scaler)
        submitted.append((extension.reasons == ["step"], extension.pending_now))
    # With what the update recorded, and once for all of a batch's updates.
    assert submitted == [(False, 12 * updates), *[(True, 0)] * 3]


def test_what_follows_the_scalers_update_leaves_the_boundary_to_the_loader(device, extension):
    optimizer, scaler = make_optimizer(device), object()
    for _ in batches(4, device):
        extension.reasons.clear()
        extension.pending_now += 10
        optimizer.step()
        _boundary.after_update(scaler)
        extension.pending_now += 3
        assert extension.reasons == []


def test_without_a_loader_the_scalers_update_is_no_boundary(device, extension):
    optimizer, scaler = make_optimizer(device), object()
    for _ in range(3):
        optimizer.step()
        _boundary.after_update(scaler)
    assert extension.reasons == ["step"] * 3


def test_with_a_scaler_training_on_one_batch_has_a_boundary_per_step(device, extension):
    optimizer, scaler = make_optimizer(device), object()
    for i, _ in enumerate(batches(3, device)):
        extension.reasons.clear()
        for _ in range(4 if i == 2 else 1):
            extension.pending_now += 10
            optimizer.step()
            extension.pending_now += 2
            _boundary.after_update(scaler)
    # The first by the update, as in the iteration before; then by the optimizer, which repeats.
    assert extension.reasons == [*["step"] * 4, "loader"]


# --- the hook -----------------------------------------------------------------------------------


def test_the_hook_is_there_once_and_can_be_removed(device, marks):
    before = len(_global_optimizer_post_hooks)
    boundary.install_hooks()
    assert len(_global_optimizer_post_hooks) == before
    try:
        boundary.remove_hooks()
        assert len(_global_optimizer_post_hooks) == before - 1
        boundary.remove_hooks()
        make_optimizer(device).step()
        assert marks == []
    finally:
        boundary.install_hooks()
    assert len(_global_optimizer_post_hooks) == before


# --- the explicit calls -------------------------------------------------------------------------


def test_mark_step_and_sync_are_boundaries(device, marks):
    torchacc.mark_step()
    assert len(marks) == 1
    torchacc.sync()
    assert len(marks) == 2
    torchacc.sync(wait=True)
    assert len(marks) == 3


def test_explicit_boundaries_submit_what_was_recorded(acc_only, recording):
    for submit in (torchacc.mark_step, torchacc.sync, lambda: torchacc.sync(wait=True)):
        x = torch.ones(3, device=recording) + 1
        with helpers.counting() as counted:
            submit()
        assert counted["flushes"] == 1
        assert x.tolist() == [2.0, 2.0, 2.0]


def test_a_boundary_with_nothing_recorded_is_free(acc_only):
    torchacc.sync(wait=True)
    with helpers.counting() as counted:
        for _ in range(10):
            torchacc.mark_step()
    assert counted["flushes"] == 0


def test_a_native_loop_makes_one_plan_for_all_its_steps(acc_only, recording):
    model = torch.nn.Linear(4, 2).to(recording)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(3, 4, device=recording)).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    with helpers.counting() as counted:
        for _ in range(20):
            step()
    assert counted["flush_step"] == 20
    assert counted["plans_built"] == 0
    helpers.synchronize()
