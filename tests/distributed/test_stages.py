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


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(
            """
            rows, length = ids.shape
            places = torch.arange(length, device=ids.device).unsqueeze(-1) * 0.01
            return self.last(self.first(self.words(ids)) + places).view(rows * length, -1)
            """,
            id="the size of an argument",
        ),
        pytest.param(
            """
            x = self.words(ids)
            rows, length, width = x.size()
            return self.last(self.first(x)).reshape(rows * length, width)
            """,
            id="the size of what an earlier stage has",
        ),
        pytest.param(
            """
            mask = ids != 0
            return self.last(self.first(self.words(ids))) * mask.unsqueeze(-1)
            """,
            id="a mask",
        ),
        pytest.param(
            """
            x = self.first(self.words(ids))
            best = x.argmax(-1)
            return self.last(x).gather(-1, best.unsqueeze(-1))
            """,
            id="integers",
        ),
        pytest.param(
            """
            x = self.words(ids)
            return self.last(self.first(x)) * (x.detach() > 0)
            """,
            id="without a gradient",
        ),
    ],
)
def test_a_later_stage_may_use(device, lines):
    body = "\n".join(f"        {line.strip()}" for line in lines.strip().splitlines())
    code = f"""
class Model(Words):
    def forward(self, ids):
{body}
compared(Model, words, words.flip(0))
report(done=True)
"""
    for each in run_ranks(COMPARED + code, 2):
        assert each.reports["done"]


def test_statistics_are_of_the_batches_alone(device):
    """Shapes are learnt by a run on zeros, which leaves no trace."""
    code = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.one = nn.Linear(4, 6), nn.BatchNorm1d(6)
        self.last, self.two = nn.Linear(6, 2), nn.BatchNorm1d(2)
    def forward(self, x):
        return self.two(self.last(torch.tanh(self.one(self.first(x)))))
x = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(1))
model, plain = compared(Model, *x, x[0, :4])
expected = dict(plain.named_buffers())
found = dict(model.named_buffers())
for name, buffer in found.items():
    torch.testing.assert_close(buffer.cpu(), expected[name])
report(names=sorted(found))
"""
    first, second = (each.reports["names"] for each in run_ranks(COMPARED + code, 2))
    assert "one.running_mean" in first and "two.num_batches_tracked" in second


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
