"""`config.dist.pp`: stages, what they take and hand on, and the numbers of a pipeline."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import torchacc
from tests import helpers
from tests.distributed import models
from tests.distributed.ranks import run_ranks
from tests.distributed.test_data_parallel import SETUP, close
from torchacc.dist.cut import split


class Skipping(nn.Module):
    """The output of `first` is used in every stage, and `scale` only in the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.pair, self.third = nn.Sequential(nn.Tanh()), nn.Linear(4, 2)
        self.bias = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, scale: Tensor, power: int = 1) -> Tensor:
        y = self.first(x) + self.bias
        z = torch.tanh(self.second(y)) ** power
        return self.third(self.pair(z)) * scale + (y * self.bias).sum()


def options(points, names=None) -> torchacc.config.PPConfig:
    made = torchacc.Config().dist.pp
    made.size, made.split_points, made.input_names = len(points) + 1, points, names
    return made


def test_stages_one_after_the_other_are_the_model():
    model = Skipping()
    chosen = options(["second", "third"])
    stages = [split(model, chosen, stage) for stage in range(3)]
    assert [names for _, names in stages] == [["x"], [], ["scale"]]
    x, scale = torch.randn(3, 4), torch.tensor(2.0)
    first = stages[0][0](x)
    second = stages[1][0](first)
    assert isinstance(first, Tensor) and len(second) == 2  # what is added at the end travels along
    assert torch.equal(stages[2][0](*second, argument_scale=scale), model(x, scale))
    parameters = [[name for name, _ in stage.named_parameters()] for stage, _ in stages]
    assert parameters[1] == ["second.weight", "second.bias"]
    assert set(parameters[0]) == {"first.weight", "first.bias", "bias"}
    assert set(parameters[2]) == {"third.weight", "third.bias", "bias"}
    assert stages[0][0].first.weight is model.first.weight


def test_modules_and_names_are_the_same_points():
    model = Skipping()
    by_module = split(model, options([model.third]), 1)
    by_name = split(model, options(["third"]), 1)
    assert by_module[0].code == by_name[0].code and by_module[1] == by_name[1] == ["scale"]


def test_arguments_that_are_not_named_have_their_defaults():
    model = Skipping()
    stage, names = split(model, options(["third"], ["x", "scale", "power"]), 0)
    assert names == ["x", "power"]
    stage, names = split(model, options(["third"], ["x", "scale"]), 0)
    assert names == ["x"]


@pytest.mark.parametrize(
    ("points", "text"),
    [
        (["fourth"], "the model has no module fourth. Its largest parts are: first, second"),
        ([nn.ReLU()], "the model has no module a ReLU"),
        (["third", "second"], "second comes before third in forward"),
        (["first"], "stage 0 would have nothing to do, .* computes nothing there before first"),
        (["pair", "pair.0"], "stage 1 would have nothing to do, .* there before pair.0"),
    ],
)
def test_points_that_are_none_are_refused(points, text):
    with pytest.raises(ValueError, match=text):
        split(Skipping(), options(points), 0)


def test_arguments_without_names_are_refused():
    class Unnamed(Skipping):
        def forward(self, *args):
            return self.third(self.second(self.first(args[0])))

    with pytest.raises(ValueError, match=r"forward of Unnamed uses what it gets as \*args"):
        split(Unnamed(), options(["second"]), 0)


def test_a_module_that_forward_does_not_call_is_no_point():
    model = Skipping()
    model.unused = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="forward does not call unused"):
        split(model, options(["unused"]), 0)


PIPELINE = (
    SETUP
    + """
config.dist.pp.size, config.dist.pp.split_points = 2, ["blocks.1"]
config.dist.pp.num_micro_batches = MICRO
torchacc.dist.init_process_group()
mesh_rank = RANK
batches = models.data()
if WORLD == 4:
    half = RANK // 2  # the default topology: neighbours are stages of one pipeline
    batches = [tuple(models.part(t, half, 2) for t in pair) for pair in batches]
model, loader = torchacc.accelerate(models.made(RANK), batches, config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
losses = []
for x, y in loader:
    rows = iter(y.chunk(MICRO))
    optimizer.zero_grad()
    loss = model.forward_backward(x, output_fn=lambda out: nn.functional.mse_loss(out, next(rows)))
    optimizer.step()
    losses.append(float(loss))
report(losses=losses, names=list(model.state_dict()), stage=model.mesh.get_stage_id())
report(state={name: value.tolist() for name, value in model.state_dict().items()})
"""
)


@pytest.mark.parametrize(("ranks", "micro"), [(2, 4), (2, 1), *([(4, 2)] if helpers.FULL else [])])
def test_a_pipeline_trains_like_one_process(device, ranks, micro):
    losses, state = models.alone()
    done = [each.reports for each in run_ranks(f"MICRO = {micro}" + PIPELINE, ranks)]
    first, second = done[0], done[1]
    assert (first["stage"], second["stage"]) == (0, 1)
    assert not set(first["names"]) & set(second["names"])
    assert {*first["names"], *second["names"]} == set(state)
    mean = torch.tensor([each["losses"] for each in done]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-5)
    close({**first["state"], **second["state"]}, state)


def test_stages_can_have_split_layers(device):
    losses, state = models.alone()
    split_first = """batches = models.data()
from torchacc.dist import tp
config.dist.tp.size = 2
plain = models.made(RANK)
for index in range(3):
    plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    tp.parallelize(plain.blocks[index], plan, config)
"""
    code = "MICRO = 2" + PIPELINE
    for old, new in {
        "models.made(RANK)": "plain",
        "batches = models.data()\n": split_first,
        "if WORLD == 4": "if False",  # all have the same data
        "lr=0.02": "lr=0.02, foreach=False",
        "value.tolist()": "getattr(value, 'full_tensor', lambda: value)().tolist()",
    }.items():
        assert code.count(old) == 1
        code = code.replace(old, new)
    done = [each.reports for each in run_ranks(code, 4)]
    for first, second in zip(done[:2], done[2:], strict=True):
        assert (first["stage"], second["stage"]) == (0, 1)
        torch.testing.assert_close(
            torch.tensor(first["losses"]), torch.tensor(losses), rtol=1e-5, atol=1e-5
        )
        close({**first["state"], **second["state"]}, state)


def test_stages_can_be_sharded(device):
    """Each stage by two processes, which have other data."""
    losses, state = models.alone()
    code = "MICRO = 2" + PIPELINE.replace("MICRO\n", "MICRO\nconfig.dist.fsdp.size = 2\n", 1)
    code += """
loss = model.forward_backward(x, output_fn=lambda out: out.square().mean())
report(norm=model.clip_grad_norm_(1e9).item(), held=sum(p.to_local().numel()
       for p in model.parameters()))
"""
    done = [each.reports for each in run_ranks(code, 4)]
    mean = torch.tensor([each["losses"] for each in done]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-5)
    for first, second in zip(done[::2], done[1::2], strict=True):
        close({**first["state"], **second["state"]}, state)
    assert len({each["norm"] for each in done}) == 1 and done[0]["norm"] > 0
    whole = sum(p.numel() for p in models.made(0).parameters())
    assert sum(each["held"] for each in done) == whole


def test_a_batch_of_another_size_and_one_that_cannot_be_cut(device):
    """Sizes may change from step to step, and stages tell each other of those they have not met;
    what cannot be cut is refused on every process.
    """
    code = (
        SETUP
        + """
config.dist.pp.size, config.dist.pp.split_points = 2, ["blocks.1"]
config.dist.pp.num_micro_batches = 2
model = torchacc.accelerate(models.made(0), config=config)
x = torch.cat([batch for batch, _ in models.data()])[:12]
plain = models.made(0)
told, tell = [], dist.send_object_list
def telling(*arguments, **options):
    told.append(rows)
    tell(*arguments, **options)
dist.send_object_list = telling
# of the four that were used last nothing need be told
for rows in (8, 4, 8, 2, 6, 4, 8, 10, 6, 4, 8, 10, 2):
    model.zero_grad()
    loss = model.forward_backward(x[:rows], output_fn=lambda out: out.square().mean())
    expected = plain(x[:rows]).square().mean()
    torch.testing.assert_close(loss.cpu(), expected.detach(), rtol=1e-5, atol=1e-6)
errors = []
for wrong in (x[:3], x[:0], x[0, 0], 5):
    try:
        model.forward_backward(wrong, output_fn=lambda out: out.square().mean())
    except (TypeError, ValueError) as error:
        errors.append(str(error))
try:
    model.forward_backward()
except TypeError as error:
    errors.append(str(error))
rows = len(x)
loss = model.forward_backward(x, output_fn=lambda out: out.square().mean())
torch.testing.assert_close(loss.cpu(), plain(x).square().mean().detach(), rtol=1e-5, atol=1e-6)
config.dist.pp.num_micro_batches, config.dist.pp.broadcast_loss = 4, False  # of later models
again = model.forward_backward(x, output_fn=lambda out: out.square().mean())
torch.testing.assert_close(again, loss)
report(errors=errors, told=told)
"""
    )
    first, last = run_ranks(code, 2)
    assert (first.reports["told"], last.reports["told"]) == ([8, 4, 2, 6, 10, 2, 12], [])
    for each in (first, last):
        short, empty, scalar, number, missing = each.reports["errors"]
        assert "num_micro_batches = 2 parts of one size: x has 3 rows" in short
        assert "x has 0 rows" in empty
        assert "x is a 0-dimensional tensor, which cannot be cut" in scalar
        assert "x is a int" in number
        assert "missing" in missing or "not passed" in missing


TIED = """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
    def forward(self, x):
        return self.last(torch.tanh(self.first(x))).square().mean()
torch.manual_seed(0)
plain = Tied()
expected = Tied()
expected.load_state_dict(plain.state_dict())
config.dist.pp.size, config.dist.pp.split_points = 2, ["last"]
config.dist.pp.num_micro_batches = 2
"""


def test_parameters_that_sharded_stages_share_stay_equal(device):
    code = (
        SETUP
        + TIED
        + """
config.dist.fsdp.size = 2
model = torchacc.accelerate(plain, config=config)
both = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
loss = model.forward_backward(both[model.mesh.get_fsdp_rank()])
value = (expected(both[0]) + expected(both[1])) / 2
value.backward()
(grad,) = [p.grad.full_tensor().cpu() for p in model.parameters()]
torch.testing.assert_close(grad, expected.first.weight.grad)
norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
torch.testing.assert_close(model.clip_grad_norm_(0.01).cpu(), norm)
torch.optim.SGD(model.parameters(), lr=1.0).step()
torch.optim.SGD(expected.parameters(), lr=1.0).step()
(weight,) = model.state_dict().values()
torch.testing.assert_close(weight.cpu(), expected.first.weight.detach())
report(done=True)
"""
    )
    for each in run_ranks(code, 4):
        assert each.reports["done"]


def test_parameters_that_two_stages_share_stay_equal(device):
    code = (
        SETUP
        + TIED
        + """
model = torchacc.accelerate(plain, config=config)
x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
for _ in range(2):
    model.zero_grad()
    loss = model.forward_backward(x)
    report(loss=float(loss))
assert model.device == torch.device(DEVICE, RANK)
(grad,) = [p.grad.cpu() for p in model.parameters()]
value = expected(x)
value.backward()
torch.testing.assert_close(grad, expected.first.weight.grad)
norm = torch.nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
torch.testing.assert_close(model.clip_grad_norm_(0.01).cpu(), norm)
(grad,) = [p.grad.cpu() for p in model.parameters()]
torch.testing.assert_close(grad, expected.first.weight.grad)
torch.testing.assert_close(loss.cpu(), value.detach())
try:
    model(x)
except RuntimeError as error:
    report(error=str(error))
"""
    )
    for each in run_ranks(code, 2):
        assert "Call model.forward_backward" in each.reports["error"]


def test_several_parameters_that_different_stages_share(device):
    """Their groups are made in the same order everywhere, also by stages that are in some only."""
    code = (
        SETUP
        + """
import datetime
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.b.weight, self.c.bias = self.a.weight, self.a.bias
    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))).square().mean()
torch.manual_seed(0)
plain, expected = Tied(), Tied()
expected.load_state_dict(plain.state_dict())
config.dist.pp.size, config.dist.pp.split_points = 3, ["b", "c"]
dist.init_process_group("acc", timeout=datetime.timedelta(seconds=100))
model = torchacc.accelerate(plain, config=config)
groups = [group._get_backend(model.device) for group in dist.distributed_c10d._world.pg_map]
report(timeouts=[group.transport.options._timeout.total_seconds() for group in groups])
x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
model.forward_backward(x)
expected(x).backward()
grads = dict(expected.named_parameters(remove_duplicate=False))
for name, parameter in model.named_parameters():
    torch.testing.assert_close(parameter.grad.cpu(), grads[name].grad)
report(done=True)
"""
    )
    for each in run_ranks(code, 3):
        assert each.reports["done"]
        assert len(each.reports["timeouts"]) > 1 and set(each.reports["timeouts"]) == {100}


def test_a_model_that_is_not_split_has_no_pipeline(device):
    code = (
        SETUP
        + """
model = torchacc.accelerate(models.made(0))
try:
    model.forward_backward(torch.ones(2, 4))
except NotImplementedError as error:
    report(error=str(error))
"""
    )
    for each in run_ranks(code, 2):
        assert "set dist.pp.size" in each.reports["error"]


ACCUMULATED = (
    SETUP
    + """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.middle = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.last = nn.Linear(4, 4, bias=False)
        self.last.weight = self.first.weight
    def forward(self, x):
        return self.last(torch.tanh(self.middle(self.first(x))))
torch.manual_seed(0)
plain, expected = Tied(), Tied()
expected.load_state_dict(plain.state_dict())
config.dist.pp.size, config.dist.pp.split_points = 2, ["middle"]
config.dist.pp.num_micro_batches = 2
if WORLD == 4:
    setattr(getattr(config.dist, KIND), "size", 2)
model = torchacc.accelerate(plain, config=config)
x = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1))
for batch in x:  # no zero_grad between them
    mine = batch if WORLD == 2 else batch.chunk(2)[RANK // 2]
    model.forward_backward(mine, output_fn=lambda out: out.square().mean())
    expected(batch).square().mean().backward()
grads = dict(expected.named_parameters(remove_duplicate=False))
for name, parameter in model.named_parameters():
    grad = parameter.grad
    grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    torch.testing.assert_close(grad.cpu(), grads[name].grad)
report(done=True)
"""
)


@pytest.mark.parametrize(
    ("ranks", "kind"), [(2, "dp"), (4, "fsdp"), *([(4, "dp")] if helpers.FULL else [])]
)
def test_gradients_of_several_steps_add_up(device, ranks, kind):
    for each in run_ranks(f"KIND = {kind!r}" + ACCUMULATED, ranks):
        assert each.reports["done"]


def test_a_shared_parameter_may_be_unused_in_the_loss_of_a_stage(device):
    code = (
        SETUP
        + """
class Shifted(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
    def forward(self, x):
        return self.b(self.a(x)) + self.a.weight.detach().sum()
torch.manual_seed(0)
plain, expected = Shifted(), Shifted()
expected.load_state_dict(plain.state_dict())
config.dist.pp.size, config.dist.pp.split_points = 2, ["b"]
model = torchacc.accelerate(plain, config=config)
x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
model.forward_backward(x, output_fn=lambda out: out.square().mean())
expected(x).square().mean().backward()
grads = dict(expected.named_parameters())
for name, parameter in model.named_parameters():
    torch.testing.assert_close(parameter.grad.cpu(), grads[name].grad)
report(names=[name for name, _ in model.named_parameters()])
"""
    )
    first, second = (each.reports["names"] for each in run_ranks(code, 2))
    assert "a.weight" in first and "a.weight" in second


@pytest.mark.parametrize("ranks", [2, 4] if helpers.FULL else [2])
def test_a_stage_takes_its_part_of_a_whole_state(device, ranks):
    code = (
        SETUP
        + """
config.dist.pp.size, config.dist.pp.split_points = 2, ["blocks.1"]
config.dist.fsdp.size = WORLD // 2
model = torchacc.accelerate(models.made(0), config=config)
other = models.made(7).state_dict()
model.load_state_dict(other)
state = model.state_dict()
for name, value in state.items():
    assert torch.equal(value.cpu(), other[name]), name
model.load_state_dict(state)
report(names=list(state), unknown=refused(lambda: model.load_state_dict({**other, "more": 1})))
first = next(iter(state))
report(missing=refused(lambda: model.load_state_dict({n: other[n] for n in other if n != first})))
"""
    )
    done = [each.reports for each in run_ranks(code, ranks)]
    assert set(done[0]["names"]) | set(done[1]["names"]) == set(models.made(0).state_dict())
    for each in done:
        assert "Unexpected key(s) in state_dict" in each["unknown"] and "more" in each["unknown"]
        assert "Missing key(s) in state_dict" in each["missing"]


def test_a_point_inside_of_what_is_checkpointed_is_refused_before_anything_changes(device):
    code = (
        SETUP
        + """
plain = models.made(RANK)
before = plain.first.weight.clone()
config.dist.pp.size, config.dist.pp.split_points = 2, ["blocks.1.down"]
config.memory.gc, config.memory.gc_cls = True, {"Block"}
report(error=refused(lambda: torchacc.accelerate(plain, config=config)))
report(same=torch.equal(plain.first.weight, before), plain="forward" not in vars(plain.blocks[1]))
config.memory.gc_cnt = 1
report(first=refused(lambda: torchacc.accelerate(plain, config=config)))
"""
    )
    for each in run_ranks(code, 2):
        assert "has blocks.1.down, which is inside of blocks.1, a Block" in each.reports["error"]
        assert each.reports["same"] and each.reports["plain"]
        assert each.reports["first"] == "accepted"
