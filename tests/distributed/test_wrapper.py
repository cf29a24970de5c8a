"""The wrapper around a model: as a part of another module, its hooks, and whose attributes are."""

from __future__ import annotations

import pytest
from torch import nn

from tests.distributed.ranks import run_ranks
from tests.distributed.test_data_parallel import SETUP

PLAN = "{'up': tp.ColwiseParallel(), 'down': tp.RowwiseParallel()}"
SPLIT = f"""
from torchacc.dist import tp
config.dist.tp.size = 2
def before(net):
    for block in net.blocks:
        tp.parallelize(block, {PLAN}, config)
    return net
"""
FLAT = "config.dist.fsdp.size, config.dist.fsdp.wrap_layer_cls = 2, {'Block'}\n"
# By the way of training: how many processes, and what a program says for it.
WAYS = {
    "dp": (2, ""),
    "fsdp": (2, FLAT),
    "fsdp, kept": (2, FLAT + "config.dist.fsdp.flatten_parameters = False\n"),
    "tp": (2, SPLIT),
    "tp and dp": (4, SPLIT + "config.dist.dp.size = 2\n"),
    "tp and fsdp": (4, SPLIT + FLAT),
}
BEGIN = (
    SETUP
    + """
def before(net):
    return net
"""
)


def in_ways(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("ranks", "way"), [WAYS[name] for name in names], ids=names)


# --- as a part of another module ------------------------------------------------------------------

NESTED = """
class Outer(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net, self.tail = net, nn.Linear(2, 2)

def same(found, expected):
    return all(torch.equal(found[name].cpu(), value) for name, value in expected.items())

torch.manual_seed(0)
model = Outer(torchacc.accelerate(before(models.made(0)), config=config))
other = Outer(models.made(7)).state_dict()
assert list(model.state_dict()) == list(other)
assert same(model.net.state_dict(), models.made(0).state_dict())
loaded = model.load_state_dict(other)
assert not loaded.missing_keys and not loaded.unexpected_keys
assert same(model.state_dict(), other)
third = Outer(models.made(8)).state_dict()
model.load_state_dict(third, strict=False)
assert same(model.state_dict(), third)

short = {name: value for name, value in other.items() if name != "net.head.bias"}
short["net.more"] = torch.ones(1)
loaded = model.load_state_dict(short, strict=False)
report(missing=loaded.missing_keys, unexpected=loaded.unexpected_keys)
report(strict=refused(lambda: model.load_state_dict(short)))
wide = {**other, "net.head.bias": torch.ones(5)}
report(shape=refused(lambda: model.load_state_dict(wide)))
"""


@in_ways(*WAYS)
def test_a_part_of_another_module_is_saved_and_loaded_with_it(device, ranks, way):
    for each in run_ranks(BEGIN + way + NESTED, ranks):
        found = each.reports
        assert (found["missing"], found["unexpected"]) == (["net.head.bias"], ["net.more"])
        assert 'Missing key(s) in state_dict: "net.head.bias".' in found["strict"]
        assert 'Unexpected key(s) in state_dict: "net.more".' in found["strict"]
        assert "net: Error(s) in loading" in found["shape"]
        assert "size mismatch for" in found["shape"]


VERSIONS = """
class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)
    def forward(self, x):
        return self.last(self.norm(self.first(x)))

plain = Normed()
if config.dist.tp.size == 2:
    tp.parallelize(plain, {"first": tp.ColwiseParallel()}, config)
model = torchacc.accelerate(plain, config=config)
mine = model.state_dict()
state = Normed().state_dict()
if "norm.bias" in mine:
    assert mine._metadata["norm"] == {"version": 2}
# Only a state of another version may be without it.
del state["norm.num_batches_tracked"]
report(missing=model.load_state_dict(state, strict=False).missing_keys)
"""


@pytest.mark.parametrize(
    ("ranks", "way"),
    [*WAYS.values(), (2, "config.dist.pp.size, config.dist.pp.split_points = 2, ['last']\n")],
    ids=[*WAYS, "pp"],
)
def test_modules_are_told_the_version_of_a_state(device, ranks, way):
    done = [each.reports["missing"] for each in run_ranks(BEGIN + way + VERSIONS, ranks)]
    assert done[0] == ["norm.num_batches_tracked"]
    others = [] if "pp.size" in way else done[0]  # the first stage has it alone
    assert all(each == others for each in done[1:])


# --- whose attributes are -------------------------------------------------------------------------

CLASHES = """
PRIVATE = (
    "_buffers_of_all", "_config", "_device", "_failed", "_inner", "_loss", "_mesh", "_names",
    "_prepared", "_run", "_stage", "_tied", "_user", "_ways", "_wrap",
)
class Own(models.Net):
    def __init__(self):
        super().__init__()
        for name in PRIVATE:
            setattr(self, name, "mine")
model = torchacc.accelerate(before(Own()), config=config)
wrappers = [model]
while isinstance(wrappers[-1].model, torchacc.dist.ParallelModule):
    wrappers.append(wrappers[-1].model)
report(kinds=[type(each).__name__ for each in wrappers])
report(clashes=[
    [type(each).__name__, name]
    for each in wrappers for name in PRIVATE if getattr(each, name, None) != "mine"
])
for name in PRIVATE:
    for each in wrappers:
        setattr(each, name, type(each).__name__)
        assert getattr(model, name) == type(each).__name__
if config.dist.pp.size > 1:
    model.forward_backward(torch.ones(2, 4), output_fn=lambda out: out.sum())
else:
    model(torch.ones(2, 4, device=model.device)).sum().backward()
report(trained=any(p.grad is not None for p in model.parameters()))
"""


@pytest.mark.parametrize(
    ("ranks", "way", "kind"),
    [
        (*WAYS["dp"], "DataParallel"),
        (*WAYS["fsdp"], "FullyShardedDataParallel"),
        (*WAYS["tp and fsdp"], "Composable"),
        (2, "config.dist.pp.size, config.dist.pp.split_points = 2, ['head']\n", "PipelineParallel"),
    ],
    ids=["dp", "fsdp", "tp and fsdp", "pp"],
)
def test_private_attributes_of_a_model_are_its_own(device, ranks, way, kind):
    for each in run_ranks(BEGIN + way + CLASHES, ranks):
        assert each.reports["kinds"][:2] == ["DistributedParallel", kind]
        assert each.reports["clashes"] == [] and each.reports["trained"]


def test_private_names_of_wrappers_can_be_told_from_a_models(device):
    from torchacc import dist
    from torchacc.dist.composable import Composable

    for kind in (
        dist.ParallelModule,
        dist.DistributedParallel,
        dist.DataParallel,
        dist.FullyShardedDataParallel,
        dist.PipelineParallel,
        Composable,
    ):
        private = [name for name in vars(kind) if name.startswith("_") and name[:2] != "__"]
        own = [name for name in private if not hasattr(nn.Module, name)]
        assert all(name.startswith("_acc_") for name in own), own
