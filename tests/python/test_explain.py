"""`torchacc.explain`: why there was a new plan, by operator, argument, value and line."""

from __future__ import annotations

import pytest
import torch

import torchacc
from tests import helpers
from tests.python.places import line

pytestmark = pytest.mark.usefixtures("acc_only", "recording", "clean_flags")


@pytest.fixture(autouse=True)
def nothing_known(device):
    """No plans are kept, and none has been explained."""
    helpers.flush()
    helpers.extension().release_memory(0)
    torchacc.explain()


def training(device, rows=8):
    """A step of training that has been replayed, and what it was explained with."""
    model = helpers.small_net(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x, look=None):
        optimizer.zero_grad()
        hidden = model[0](x)  # first
        if look is not None:
            look(hidden)
        model[2](model[1](hidden)).sum().backward()  # second
        optimizer.step()

    for _ in range(4):
        step(helpers.drawn(rows, 4, device=device))
    found = torchacc.explain().plans
    return step, optimizer, found


def only(found):
    assert len(found.plans) == 1, str(found)
    return found.plans[0]


def test_the_first_plan_is_the_first(device):
    x = torch.ones(4, device=device)  # begins
    helpers.flush()
    plan = only(torchacc.explain())
    assert plan.why == "first" and plan.operators == 1
    assert plan.place == line("begins")
    assert "first plan" in str(plan)
    assert torchacc.explain().plans == ()
    assert str(torchacc.explain()) == "no new plans"
    assert x.tolist() == [1, 1, 1, 1]


def test_a_smaller_batch_is_named_with_both_shapes(device):
    step, _, _ = training(device)
    step(helpers.drawn(5, 4, device=device, seed=1))
    plan = only(torchacc.explain())
    assert (plan.why, plan.changed, plan.aspect) == ("changed", "argument", "shape")
    assert (plan.operator, plan.argument) == ("aten::addmm", "mat1")
    assert (plan.before, plan.after) == ("[8, 4]", "[5, 4]")
    assert "in step" in plan.place and plan.ended_by == "flush_step"
    assert "aten::addmm, mat1: shape [8, 4] -> [5, 4]" in str(plan)


def test_the_batch_of_before_is_no_new_plan_and_neither_is_a_learning_rate(device):
    step, optimizer, _ = training(device)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    step(helpers.drawn(5, 4, device=device))
    torchacc.explain()
    for rows in (8, 5, 8, 8):
        step(helpers.drawn(rows, 4, device=device))
        schedule.step()
    assert torchacc.explain().plans == ()


@pytest.mark.parametrize(
    ("before", "after", "argument", "values"),
    [
        (lambda x: x.sum(0), lambda x: x.sum(1), "dim", ("[0]", "[1]")),
        (lambda x: x.topk(2)[0], lambda x: x.topk(3)[0], "k", ("2", "3")),
    ],
    ids=["sum", "topk"],
)
def test_a_number_that_is_structure_is_named_with_both_values(
    device, before, after, argument, values
):
    x = helpers.drawn(4, 4, device=device)
    for fn in (before, before, after):
        kept = fn(x.exp())
        helpers.flush()
    plans = torchacc.explain().plans
    assert [plan.why for plan in plans] == ["first", "changed"]
    assert (plans[1].argument, plans[1].aspect) == (argument, "value")
    assert (plans[1].before, plans[1].after) == values
    assert kept.shape[0] == 4


def test_a_dtype_is_named(device):
    for dtype in (torch.float32, torch.float32, torch.float64):
        x = helpers.drawn(4, device=device).to(dtype)
        helpers.flush()
        torchacc.explain()
        y = x.exp() * 2  # computed
        helpers.flush()
    plan = only(torchacc.explain())
    assert (plan.operator, plan.argument, plan.aspect) == ("aten::exp", "self", "dtype")
    assert (plan.before, plan.after) == ("float32", "float64")
    assert plan.place == line("computed")
    del y


def test_operators_that_a_log_line_puts_in_are_counted(device):
    step, _, _ = training(device)
    kept = []

    def look(hidden):
        kept.append(hidden.detach().abs().mean())  # logged

    step(helpers.drawn(8, 4, device=device), look)
    plan = only(torchacc.explain())
    assert plan.changed == "operator"
    assert plan.aspect == "2 operators more"
    assert plan.after == plan.operator == "aten::abs"
    assert plan.place == line("logged")


def test_a_setting_is_named(device):
    x = helpers.drawn(4, device=device)

    def step():
        kept = x.exp()
        helpers.flush()
        return kept

    step()
    torchacc.explain()
    torch.use_deterministic_algorithms(True)
    step()
    plan = only(torchacc.explain())
    assert plan.changed == "setting"
    assert "deterministic algorithms: off -> on" in plan.text
    torch.use_deterministic_algorithms(False)
    torch.set_default_dtype(torch.float64)
    step()
    assert "default dtype: Float -> Double" in only(torchacc.explain()).text


def test_a_read_in_the_middle_makes_two_plans_and_is_named(device):
    step, _, _ = training(device)
    step(helpers.drawn(8, 4, device=device), lambda hidden: hidden[0, 0].item())  # reads
    cut, rest = torchacc.explain().plans
    assert (cut.why, cut.changed, cut.ended_by) == ("changed", "operator", "flush_read")
    assert cut.after == "the end"
    assert "a value is read" in cut.text
    assert cut.place.split(" ")[0] == line("reads").split(" ")[0]
    assert rest.why == "rest"
    step(helpers.drawn(8, 4, device=device))
    assert torchacc.explain().plans == ()  # the whole step's plan is still there


def test_a_result_that_is_held_from_now_on_is_named(device):
    x = helpers.drawn(4, device=device)
    for keep in (False, False, True):
        held = [x.exp()]  # held
        y = held[0] * 2
        if not keep:
            held.clear()
        helpers.flush()
    plans = torchacc.explain().plans
    assert [plan.why for plan in plans] == ["first", "kept"]
    assert plans[1].operator == "aten::exp" and plans[1].place == line("held")
    del y


def test_a_plan_that_repeats_is_widened_once(device):
    x = helpers.drawn(4, device=device)
    with helpers.counting() as counted:
        for keep in (False, False, True, True, True):
            held = [x.exp()]
            y = held[0] * 2
            if not keep:
                held.clear()
            helpers.flush()
    assert counted["plans_widened"] == 1
    del y


def test_memory_that_arguments_share_is_named(device):
    x, y = helpers.drawn(4, device=device), helpers.drawn(4, device=device, seed=1)
    for other in (y, y, x):
        z = x + other
        helpers.flush()
    plans = torchacc.explain().plans
    assert [plan.why for plan in plans] == ["first", "changed"]
    assert (plans[1].changed, plans[1].argument) == ("memory", "other")
    del z


def test_the_steps_of_training_are_explained_until_they_repeat(device):
    _, _, plans = training(device)
    assert plans[0].place.endswith("in step")
    assert [plan.why for plan in plans] == ["first"]


def test_no_more_than_the_latest_are_remembered(device):
    for size in range(1, 261):
        x = torch.ones(size, device=device) * 2
        helpers.flush()
    found = torchacc.explain()
    assert len(found.plans) == 256
    assert found.forgotten >= 4
    assert "the last 256 of them" in str(found)
    assert x.shape == (260,)
