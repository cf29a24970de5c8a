"""`torchacc.strict`: after the warm-up a cut, a fallback or a new plan is an error with a line."""

from __future__ import annotations

import inspect
import re

import pytest
import torch

import torchacc
from tests import helpers
from tests.python.places import line

pytestmark = pytest.mark.usefixtures("acc_only", "recording")


@pytest.fixture(autouse=True)
def nothing_pending(device):
    helpers.flush()
    yield
    helpers.flush()


class Training:
    """A loop of training with `between` called in the middle of each step."""

    def __init__(self, device):
        self.device = device
        self.model = helpers.small_net(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.steps = 0

    def step(self, rows=8, between=None):
        self.optimizer.zero_grad()
        loss = self.model(helpers.drawn(rows, 4, device=self.device)).sum()
        if between is not None:
            between(loss)
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return loss


@pytest.fixture
def training(device):
    return Training(device)


def test_a_read_in_the_middle_of_a_step_is_an_error_and_harms_nothing(device, training):
    other = Training(device)
    with torchacc.strict(after=2):
        for _ in range(3):
            training.step().item()  # after the step's end: not in its middle
            other.step()
        with pytest.raises(RuntimeError) as raised:
            training.step(between=lambda loss: loss.item())  # read
    text = str(raised.value)
    assert text.startswith("[strict] a value is read in the middle of a step")
    place = line("read").split(" ")[0]
    assert place in text and "optimizer.step()" in text and "torchacc.strict(False)" in text
    # The step that was left is still whole: it goes on where it was.
    training.model.zero_grad()
    other.model.zero_grad()
    training.step()
    other.step()
    for mine, theirs in zip(
        helpers.state_tensors(training.model), helpers.state_tensors(other.model), strict=True
    ):
        torch.testing.assert_close(mine.cpu(), theirs.cpu())


def wait_for_event(loss):
    event = torch.acc.Event()
    event.record()
    event.synchronize()  # waited for


def wait_for_stream(loss):
    torch.acc.current_stream().synchronize()  # waited for


def wait_for_device(loss):
    torch.acc.synchronize()  # waited for


def wait_for_accelerator(loss):
    torch.accelerator.synchronize()  # waited for


@pytest.mark.parametrize(
    ("wait", "text"),
    [
        (wait_for_device, r"the device is waited for \(synchronize\(\)\)"),
        (wait_for_accelerator, r"the device is waited for \(synchronize\(\)\)"),
        (wait_for_stream, "an event or a stream is asked"),
        (wait_for_event, "an event or a stream is asked"),
    ],
)
def test_a_wait_in_the_middle_of_a_step_is_an_error(device, training, wait, text):
    with torchacc.strict(after=2):
        for _ in range(3):
            training.step()
            wait(None)  # after the step's end
            torchacc.sync(wait=True)
        training.step(between=lambda loss: torchacc.sync())  # ends a step, and waits for nothing
        with pytest.raises(RuntimeError) as raised:
            training.step(between=wait)
        assert re.match(rf"\[strict\] {text} in the middle of a step at .*", str(raised.value))
        lines, first = inspect.getsourcelines(wait)
        (place,) = (first + i for i, each in enumerate(lines) if "# waited for" in each)
        assert f"test_strict.py:{place} in {wait.__name__}" in str(raised.value)
        with torchacc.strict(False):
            training.step()  # with what was left of the other
    assert torch.isfinite(training.step()).item()


def test_the_warm_up_may_do_as_it_likes(training):
    with torchacc.strict(after=3):
        for _ in range(3):
            training.step(between=lambda loss: loss.item())
        with pytest.raises(RuntimeError, match=r"\[strict\] a value is read"):
            training.step(between=lambda loss: loss.item())


def test_an_operator_that_cannot_be_recorded_is_named(training):
    with torchacc.strict(after=1):
        training.step()
        with pytest.raises(RuntimeError) as raised:
            training.step(between=lambda loss: loss.reshape(1).nonzero())  # dependent
    assert "aten::nonzero" in str(raised.value)
    assert line("dependent").split(" ")[0] in str(raised.value)


def test_a_new_plan_is_an_error_at_the_end_of_its_step(device, training):
    with torchacc.strict(after=3):
        for _ in range(5):
            training.step()
        before = [p.detach().cpu().clone() for p in training.model.parameters()]
        with pytest.raises(RuntimeError) as raised:
            training.step(rows=5)
        text = str(raised.value)
        assert "another plan" in text and "shape [8, 4] -> [5, 4]" in text
        assert "drop_last=True" in text and "test_strict.py" in text
        after = [p.detach().cpu() for p in training.model.parameters()]
        assert not any(torch.equal(x, y) for x, y in zip(before, after, strict=True))
        training.step()
        training.step(rows=5)  # there by now


def test_mark_step_ends_a_step_as_an_optimizer_does(device):
    weight = helpers.drawn(4, 4, device=device, grad=True)

    def step(rows):
        (gradient,) = torch.autograd.grad(
            (helpers.drawn(rows, 4, device=device) @ weight).sum(), weight
        )
        with torch.no_grad():
            weight.sub_(gradient, alpha=0.1)
        torchacc.mark_step()

    with torchacc.strict(after=2):
        for _ in range(4):
            step(8)
        with pytest.raises(RuntimeError, match=r"\[strict\] a step has another plan"):
            step(7)


def test_a_step_of_a_scaler_that_raised_counts_as_taken(device):
    """Its gradients are unscaled: those of the next step are not to be taken for such."""
    model = torch.nn.Linear(2, 1, bias=False).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("acc", init_scale=1024.0)
    with torchacc.strict(after=0):
        scaler.scale(model(torch.ones(3, 2, device=device)).sum()).backward()
        with pytest.raises(RuntimeError, match="another plan"):
            scaler.step(optimizer)
    after = model.weight.tolist()
    with pytest.raises(RuntimeError, match="since the last update"):
        scaler.step(optimizer)
    scaler.update()
    assert model.weight.tolist() == after


def test_evaluation_is_left_alone(device, training):
    with torchacc.strict(after=2):
        for _ in range(3):
            training.step()
        for rows in (8, 5):
            with torch.no_grad():
                training.model(helpers.drawn(rows, 4, device=device)).sum().item()
        with torch.inference_mode():
            training.model(helpers.drawn(3, 4, device=device)).nonzero()
        training.step()


def test_a_read_without_gradients_in_a_training_step_is_one_all_the_same(training):
    def accuracy(loss):
        with torch.no_grad():
            (loss > 0).float().mean().item()

    with torchacc.strict(after=1):
        training.step()
        with pytest.raises(RuntimeError, match=r"\[strict\] a value is read"):
            training.step(between=accuracy)


def test_what_is_meant_is_allowed_and_scopes_nest(training):
    extension = helpers.extension()
    outside = extension.strict()
    with torchacc.strict(after=0):
        with torchacc.strict(False):
            training.step(between=lambda loss: loss.item())
        assert extension.strict() == (True, 0)
        with pytest.raises(RuntimeError, match=r"\[strict\]"):
            training.step(between=lambda loss: loss.item())
    assert extension.strict() == outside
    torchacc.strict(after=7)
    assert extension.strict() == (True, 7)
    torchacc.strict(False)
    assert extension.strict()[0] is False


def test_an_object_may_be_entered_later_and_again():
    extension = helpers.extension()
    scope = torchacc.strict(after=2)
    torchacc.strict(False)
    for _ in range(2):
        with scope:
            assert extension.strict() == (True, 2)
        assert extension.strict()[0] is False


def test_an_object_may_be_entered_within_itself():
    extension = helpers.extension()
    scope = torchacc.strict(after=2)
    with scope:
        with scope:
            assert extension.strict() == (True, 2)
        assert extension.strict()[0] is True
    assert extension.strict()[0] is False


def test_a_warm_up_of_fewer_than_no_steps_is_refused():
    with pytest.raises(ValueError, match="after is -1"):
        torchacc.strict(after=-1)
    assert helpers.extension().strict()[0] is False


def test_the_environment_variable_is_for_the_whole_program(device):
    done = helpers.run_python(
        """
w = torch.ones(4, 4, device=DEVICE, requires_grad=True)
o = torch.optim.SGD([w], lr=0.1)
for i in range(5):
    loss = (w @ w).sum()
    if i == 4:
        try:
            loss.item()
        except RuntimeError as error:
            print(str(error).split(" at ")[0])
    loss.backward()
    o.step()
print(loss.item() != 0)
""",
        ACC_STRICT="1",
        ACC_MODE="full",
    )
    assert done.stdout.split("\n")[:2] == [
        "[strict] a value is read in the middle of a step",
        "True",
    ]


def test_the_end_of_the_program_is_no_cut(device):
    """A step that strict mode ended is still pending when the group of one process ends."""
    done = helpers.run_python(
        """
import torchacc
model, loader = torchacc.accelerate(torch.nn.Linear(4, 4), [torch.ones(2, 4)] * 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
try:
    for i, x in enumerate(loader):
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        if i == 6:
            loss.item()
        optimizer.step()
except RuntimeError as error:
    print(str(error).split(" at ")[0])
""",
        ACC_STRICT="1",
        ACC_MODE="full",
    )
    assert done.stdout == "[strict] a value is read in the middle of a step\n"
    assert "left with an error" not in done.stderr
