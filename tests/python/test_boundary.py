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


@pytest.fixture
def marks(device, monkeypatch):
    """One entry for each boundary, with the thread that made it."""
    marks = []
    monkeypatch.setattr(_boundary, "mark_step", lambda: marks.append(threading.current_thread()))
    boundary.install_hooks()
    return marks


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
    # One for each batch, and one after the last of each loop; the optimizer added none.
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


def test_explicit_boundaries_submit_what_was_recorded(acc_only):
    for submit in (torchacc.mark_step, torchacc.sync, lambda: torchacc.sync(wait=True)):
        x = torch.ones(3, device=acc_only) + 1
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


def test_a_native_loop_makes_one_plan_for_all_its_steps(acc_only):
    model = torch.nn.Linear(4, 2).to(acc_only)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        model(torch.ones(3, 4, device=acc_only)).sum().backward()
        optimizer.step()

    for _ in range(3):
        step()
    with helpers.counting() as counted:
        for _ in range(20):
            step()
    assert counted["flush_step"] == 20
    assert counted["plans_built"] == 0
    helpers.synchronize()
