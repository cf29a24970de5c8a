"""A training loop makes its plans in the first steps and none later."""

from __future__ import annotations

import pytest
import torch

from tests import helpers
from tests.models import zoo

STEPS = 200
EARLY = 3
LOG_EVERY = 20


def _loop(
    case: zoo.Case, optimizer: str, device: str, log_every: int, log_early: bool = False
) -> list[int]:
    """Trains with a schedule, reads the loss every `log_every` steps; new plans of each step.

    The loss is read behind the optimizer's step, or before it with `log_early`. The end of the step
    is what the device takes for it: the optimizer's.
    """
    model = case.model.to(device)
    opt = zoo.OPTIMIZERS[optimizer](list(model.parameters()))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=STEPS)
    batches = [zoo.move(batch, device) for batch in case.batches]
    plans = []
    for step in range(STEPS):
        before = helpers.stats().get("plans_built", 0)
        loss = case.loss(model, batches[step % len(batches)])
        opt.zero_grad()
        loss.backward()
        log = step % log_every == log_every - 1
        if log and log_early:
            assert torch.isfinite(torch.tensor(loss.item()))
        opt.step()
        schedule.step()
        if log and not log_early:
            assert torch.isfinite(torch.tensor(loss.item()))
        plans.append(helpers.stats().get("plans_built", 0) - before)
    return plans


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("log_early", [False, True])
@pytest.mark.parametrize(
    ("model", "optimizer"),
    [("mlp", "sgd"), ("mlp", "adamw"), ("gpt", "adamw"), ("lstm", "sgd"), ("lstm", "rmsprop")],
)
def test_no_new_plans_after_step_3(one_thread, acc_only, model, optimizer, log_early):
    """A step that is read in its middle is two parts, which are planned where one first is."""
    plans = _loop(zoo.make(model), optimizer, acc_only, LOG_EVERY, log_early)
    assert helpers.stats()["plans_built"] >= 1, "nothing was planned: the counter is dead"
    late = {step + 1: n for step, n in enumerate(plans) if n and step >= EARLY}
    if log_early:
        assert 1 <= late.pop(LOG_EVERY) <= 2
    assert late == {}, f"new plans by step: {late}"


def test_logging_every_step_makes_no_plan_per_step(one_thread, acc_only):
    plans = _loop(zoo.make("mlp"), "adamw", acc_only, log_every=1)
    assert sum(plans[EARLY:]) == 0, plans


def test_a_second_model_makes_its_own_plans_and_leaves_the_first_ones(one_thread, acc_only):
    first, second = zoo.make("mlp"), zoo.make("gpt")
    models = [(c, c.model.to(acc_only)) for c in (first, second)]
    opts = [zoo.OPTIMIZERS["adam"](list(m.parameters())) for _, m in models]
    batches = [[zoo.move(b, acc_only) for b in c.batches] for c in (first, second)]
    plans = []
    for step in range(40):
        before = helpers.stats()["plans_built"]
        for (case, model), opt, data in zip(models, opts, batches, strict=True):
            opt.zero_grad()
            case.loss(model, data[step % 4]).backward()
            opt.step()
        plans.append(helpers.stats()["plans_built"] - before)
    assert sum(plans[EARLY:]) == 0, plans
