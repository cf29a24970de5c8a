"""What the stages of a pipeline hand on to each other, and what they keep to themselves."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

import torchacc
from tests.distributed.ranks import run_ranks
from tests.distributed.test_data_parallel import SETUP
from torchacc.dist.cut import split

COMPARED = (
    SETUP
    + """
import copy

def compared(kind, *batches, output_fn=lambda out: out.float().square().mean(), micro=2):
    '''Steps of a pipeline beside those of the whole model in this process.'''
    torch.manual_seed(0)
    plain = kind()
    config.dist.pp.size, config.dist.pp.split_points = 2, ["last"]
    config.dist.pp.num_micro_batches = micro
    model = torchacc.accelerate(copy.deepcopy(plain), config=config)
    for batch in batches:
        model.zero_grad()
        plain.zero_grad()
        loss = model.forward_backward(batch, output_fn=output_fn)
        parts = [output_fn(plain(part)) / micro for part in batch.chunk(micro)]
        sum(parts).backward()
        torch.testing.assert_close(loss.cpu(), sum(parts).detach())
        grads = dict(plain.named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad.cpu(), grads[name].grad)
    return model, plain

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.first = nn.Embedding(12, 6), nn.Linear(6, 6)
        self.last = nn.Linear(6, 6)

words = torch.randint(0, 12, (4, 5), generator=torch.Generator().manual_seed(1))
"""
)


LATER = {
    "the size of an argument": """
        rows, length = ids.shape
        places = torch.arange(length, device=ids.device).unsqueeze(-1) * 0.01
        return self.last(self.first(self.words(ids)) + places).view(rows * length, -1)
        """,
    "the size of what an earlier stage has": """
        x = self.words(ids)
        rows, length, width = x.size()
        return self.last(self.first(x)).reshape(rows * length, width)
        """,
    "a mask": """
        mask = ids != 0
        return self.last(self.first(self.words(ids))) * mask.unsqueeze(-1)
        """,
    "integers": """
        x = self.first(self.words(ids))
        best = x.argmax(-1)
        return self.last(x).gather(-1, best.unsqueeze(-1))
        """,
    "without a gradient": """
        x = self.words(ids)
        return self.last(self.first(x)) * (x.detach() > 0)
        """,
}


def test_a_later_stage_may_use_what_earlier_ones_have(device):
    code = ""
    for name, lines in LATER.items():
        body = "\n".join(f"        {line.strip()}" for line in lines.strip().splitlines())
        code += f"""
class Model(Words):
    def forward(self, ids):
{body}
compared(Model, words, words.flip(0))
report(**{{{name!r}: True}})
"""
    for each in run_ranks(COMPARED + code, 2):
        assert list(each.reports) == list(LATER)


def test_statistics_are_of_the_batches_alone(device):
    """Shapes are learnt by a run on zeros, which leaves no trace."""
    code = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.one = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)
        self.last, self.two = nn.Linear(6, 2, bias=False), nn.BatchNorm1d(2)
    def forward(self, x):
        return self.two(self.last(torch.tanh(self.one(self.first(x)))))
x = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1))
model, plain = compared(Model, *x, x[0, :4], output_fn=lambda out: out.exp().mean())
expected = dict(plain.named_buffers())
found = dict(model.named_buffers())
for name, buffer in found.items():
    torch.testing.assert_close(buffer.cpu(), expected[name])
report(names=sorted(found))
"""
    first, second = (each.reports["names"] for each in run_ranks(COMPARED + code, 2))
    assert "one.running_mean" in first and "two.num_batches_tracked" in second


def test_arguments_may_have_the_names_of_a_schedules(device):
    code = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
    def forward(self, input, target, losses, return_outputs):
        return ((self.last(self.first(input)) - target) * losses * return_outputs).square().mean()
torch.manual_seed(0)
plain = Model()
config.dist.pp.size, config.dist.pp.split_points = 2, ["last"]
config.dist.pp.num_micro_batches = 2
model = torchacc.accelerate(copy.deepcopy(plain), config=config)
given = [torch.randn(4, n, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 1, 1)]
for _ in range(2):
    torch.testing.assert_close(model.forward_backward(*given).cpu(), plain(*given).detach())
report(done=True)
"""
    for each in run_ranks(COMPARED + code, 2):
        assert each.reports["done"]


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None, power: int = 1, **rest) -> Tensor:
        y = self.first(x) ** power
        return self.last(y if mask is None else y * mask)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["x", "masks"], "names what is no argument of forward: masks. The arguments are: x, mask"),
        (["mask"], "leaves out what has no default: x"),
    ],
)
def test_names_of_arguments_that_are_none_are_refused(names, text):
    options = torchacc.Config().dist.pp
    options.size, options.split_points, options.input_names = 2, ["last"], names
    with pytest.raises(ValueError, match=text):
        split(Masked(), options, 0)


def test_an_argument_that_the_stages_would_ignore_is_refused(device):
    code = """
from tests.distributed.test_stages import Masked
config.dist.pp.num_micro_batches = 2
x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
model, plain = compared(Masked, x)
mask = (x > 0).float()
def step(*args, **kwargs):
    return model.forward_backward(*args, output_fn=lambda out: out.square().mean(), **kwargs)
report(mask=refused(lambda: step(x, mask)), power=refused(lambda: step(x, power=2)))
report(more=refused(lambda: step(x, more=mask)))
report(same=refused(lambda: step(x, None, power=1)))
config.dist.pp.input_names = ["x", "mask"]
model = torchacc.accelerate(copy.deepcopy(plain), config=config)
torch.testing.assert_close(step(x, mask).cpu(), plain(x, mask).square().mean().detach())
"""
    for each in run_ranks(COMPARED + code, 2):
        assert "mask would be ignored: the stages have the default" in each.reports["mask"]
        assert "power would be ignored" in each.reports["power"]
        assert "rest would be ignored" in each.reports["more"]
        assert each.reports["same"] == "accepted"


def test_steps_without_gradients_are_forward_alone(device):
    code = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop = nn.Linear(4, 6), nn.Dropout(0.5)
        self.last = nn.Linear(6, 2)
    def forward(self, x):
        return self.last(self.drop(self.first(x)))
x = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(1))
torch.manual_seed(0)
plain = Model().eval()
config.dist.pp.size, config.dist.pp.split_points = 2, ["last"]
config.dist.pp.num_micro_batches = 2
if WORLD == 4:
    config.dist.fsdp.size = 2
model = torchacc.accelerate(copy.deepcopy(plain), config=config)
assert not model.training
def output_fn(out):
    return out.square().mean()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
reference = torch.optim.SGD(plain.parameters(), lr=0.5)
for step in range(4):
    with (torch.no_grad, torch.inference_mode)[step % 2]():
        loss = model.forward_backward(x[1], output_fn=output_fn)
    torch.testing.assert_close(loss.cpu(), output_fn(plain(x[1])).detach())
    if step == 0:
        assert all(p.grad is None for p in model.parameters())
    loss = model.forward_backward(x[0], output_fn=output_fn)
    expected = output_fn(plain(x[0]))
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected.detach())
    for each in (optimizer, reference):
        each.step()
        each.zero_grad()
report(done=True)
"""
    for ranks in (2, 4):
        for each in run_ranks(COMPARED + code, ranks):
            assert each.reports["done"]


def test_there_is_no_step_after_one_that_failed(device):
    """A program that goes on after an error of one stage ends, and so do the others."""
    code = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
    def forward(self, x):
        return self.last(self.first(x))
x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
model, _ = compared(Model, x)
report(short=refused(lambda: model.forward_backward(x[:3])))
def fails(out):
    raise KeyError("mine")
report(error=refused(lambda: float(model.forward_backward(x, output_fn=fails))))
float(model.forward_backward(x, output_fn=lambda out: out.square().mean()))
"""
    first, second = run_ranks(COMPARED + code, 2, check=False)
    assert first.status == second.status == 1
    assert "has 3 rows" in first.reports["short"] and "has 3 rows" in second.reports["short"]
    assert second.reports["error"] == "KeyError: 'mine'"
    assert "an earlier step failed (KeyError: 'mine')" in second.stderr
    assert "DistBackendError" in first.reports["error"]


@pytest.mark.parametrize("kind", ["float64", "bfloat16"])
def test_the_loss_has_its_type_on_every_process(device, kind):
    code = f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
    def forward(self, x):
        return self.last(self.first(x))
torch.manual_seed(0)
plain = Model().to(torch.{kind})
config.dist.pp.size, config.dist.pp.split_points = 2, ["last"]
model = torchacc.accelerate(copy.deepcopy(plain), config=config)
x = torch.ones(4, 4, dtype=torch.{kind})
for _ in range(2):
    loss = model.forward_backward(x, output_fn=lambda out: out.square().mean())
report(kind=str(loss.dtype), loss=float(loss), expected=float(plain(x).square().mean()))
other = model.forward_backward(x, output_fn=lambda out: out.float().square().mean())
report(other=str(other.dtype), same=abs(float(other) - float(loss)) < 0.01 * float(loss))
"""
    for each in run_ranks(COMPARED + code, 2):
        assert each.reports["kind"] == each.reports["other"] == f"torch.{kind}"
        assert each.reports["same"]
        assert each.reports["loss"] == pytest.approx(each.reports["expected"], rel=1e-2)


def test_other_types_of_arguments_begin_anew(device):
    code = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
    def forward(self, x):
        return self.last(self.first(x.float()))
x = torch.randint(0, 5, (4, 4), generator=torch.Generator().manual_seed(1))
model, plain = compared(Model, x, x.float(), x.double(), x)
def step():
    return model.forward_backward(x, output_fn=lambda out: out.float().square().mean())
with torch.autocast("acc", torch.bfloat16):
    half = step()
torch.testing.assert_close(half, step(), rtol=0.05, atol=0.05)
report(other=float(half) != float(step()))
"""
    for each in run_ranks(COMPARED + code, 2):
        assert each.reports["other"]


def test_stages_ask_for_the_mode_that_they_are_in(device):
    """Not for the one that the model was in when it was traced."""
    code = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.other = nn.Linear(4, 40), nn.Linear(4, 40)
        self.last = nn.Linear(40, 4)
    def forward(self, x, scale):
        y = self.first(x)
        if not self.training:
            y = y + self.other(x) * scale
        return self.last(nn.functional.dropout(y, 0.5, self.training))
x, scale = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)), torch.full((4, 1), 2.0)
def output_fn(out):
    return out.square().mean()
from torchacc.dist import cut
traces, graph_of = [], cut.graph_of
cut.graph_of = lambda *arguments: traces.append(1) or graph_of(*arguments)
for start in (True, False):
    torch.manual_seed(0)
    plain = Model().train(start)
    config.dist.pp.size, config.dist.pp.split_points = 2, ["last"]
    config.dist.pp.num_micro_batches = 2
    model = torchacc.accelerate(copy.deepcopy(plain), config=config)
    for mode in (True, False, True):
        model.train(mode)
        losses = [float(model.forward_backward(x, scale, output_fn=output_fn)) for _ in range(2)]
        assert (losses[0] == losses[1]) == (not mode)
        if not mode:
            expected = float(output_fn(plain.eval()(x, scale)))
            assert abs(losses[0] - expected) < 1e-5
    report(names=[name for name, _ in model.named_parameters()], traces=len(traces))
"""
    done = [each.reports for each in run_ranks(COMPARED + code, 2)]
    assert [each["traces"] for each in done] == [6, 6]  # of two models: a check, and two modes
    first, second = (each["names"] for each in done)
    assert "other.weight" in first and second == ["last.weight", "last.bias"]


RETURNED = {
    "{'out': out, 'first': y}": "out['out'] + out['first'].sum()",
    "(out, None)": "out[0]",
    "[out]": "out[0]",
    "(y, (out, out, 'end'))": "out[1][1] * len(out[1][2]) + out[0].mean()",
}


def test_forward_may_return_structures(device):
    code = "x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))"
    for returned, taken in RETURNED.items():
        code += f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 6)
    def forward(self, x):
        y = self.first(x)
        out = self.last(y)
        return {returned}
compared(Model, *x, output_fn=lambda out: ({taken}).square().mean())
report(**{{{returned!r}: True}})
"""
    for each in run_ranks(COMPARED + code, 2):
        assert list(each.reports) == list(RETURNED)


WAYS = [
    "nn.ReLU(inplace=True)",
    "nn.Sequential(nn.ReLU(inplace=True))",
    "Method()",
    "Function()",
    "ByPlace()",
    "Operator()",
    "View()",
]


def test_a_stage_may_overwrite_what_it_receives(device):
    code = """
class Method(nn.Module):
    def forward(self, x):
        return x.relu_()
class Function(nn.Module):
    def forward(self, x):
        return nn.functional.relu(x, inplace=True)
class ByPlace(nn.Module):
    def forward(self, x):
        return nn.functional.relu(x, True)
class View(nn.Module):
    def forward(self, x):
        return x.flatten().relu_().view_as(x) + x
class Operator(nn.Module):
    def forward(self, x):
        x += 1
        return x
x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
"""
    for way in WAYS:
        code += f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.end = nn.Linear(4, 6), {way}, nn.Linear(6, 2)
    def forward(self, x):
        return self.end(self.last(self.first(x)))
compared(Model, *x)
report(**{{{way!r}: True}})
"""
    for each in run_ranks(COMPARED + code, 2):
        assert list(each.reports) == WAYS


def test_names_of_a_stages_state_are_the_models(device):
    """Tensors that forward reads are in it only where they are in the model's."""
    code = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("scale", torch.full((6,), 2.0), persistent=False)
        self.register_buffer("kept", torch.full((6,), 3.0))
        self.plain = torch.ones(6)
    def forward(self, x):
        return self.last(self.first(x) * self.scale + self.kept * self.plain)
x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
model, whole = compared(Model, *x)
report(done=True)
report(more=sorted(set(model.state_dict()) - set(whole.state_dict())))
model.load_state_dict(whole.state_dict())
"""
    for each in run_ranks(COMPARED + code, 2):
        assert each.reports["done"] and each.reports["more"] == []


def test_a_size_that_forward_returns_is_refused(device):
    code = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)
    def forward(self, x):
        y = self.last(self.first(x))
        return {"out": y, "rows": y.size(0)}
x = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1))
report(said=refused(lambda: compared(Model, *x, output_fn=lambda out: out["out"].sum())))
"""
    for each in run_ranks(COMPARED + code, 2):
        assert "the forward of Model returns size, which is a size" in each.reports["said"]


@pytest.mark.parametrize("kind", ["dp", "fsdp"])
def test_replicas_of_a_stage_have_the_buffers_of_the_first(device, kind):
    code = f"""
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 2)
    def forward(self, x):
        return self.last(self.norm(self.first(x)))
torch.manual_seed(0)
config.dist.{kind}.size = 2
config.dist.pp.size, config.dist.pp.split_points = 2, ["last"]
config.dist.pp.num_micro_batches = 2
model = torchacc.accelerate(Model(), config=config)
x = torch.randn(4, 8, 4, generator=torch.Generator().manual_seed(1 + RANK // 2))
def told(when):
    means = [b.tolist() for n, b in model.named_buffers() if n == "norm.running_mean"]
    report(**{{when: means}})
def step(batch):
    model.forward_backward(batch, output_fn=lambda out: out.square().mean())
for batch in (*x[:3], torch.ones(8, 4)):  # the last one is the same on all
    step(batch)
told("same")
step(x[3])
told("own")
model.eval()
with torch.no_grad():
    step(x[0])
told("evaluated")
"""
    done = [each.reports for each in run_ranks(COMPARED + code, 4)]
    assert done[0]["same"] and done[0]["same"] == done[2]["same"]
    assert done[0]["own"] != done[2]["own"]
    assert done[0]["evaluated"] == done[2]["evaluated"] == done[0]["own"]
