"""The wrapper around a model: as a part of another module, its hooks, and whose attributes are."""

from __future__ import annotations

import pytest
from torch import nn

from tests import helpers
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
# Both of the last are Composable, and the second has more to gather.
TRIED = [name for name in WAYS if helpers.FULL or name != "tp and dp"]
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


@in_ways(*TRIED)
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
config.dist.fsdp.wrap_layer_cls = set()  # it has no Block
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
    [
        *(WAYS[name] for name in TRIED),
        (2, "config.dist.pp.size, config.dist.pp.split_points = 2, ['last']\n"),
    ],
    ids=[*TRIED, "pp"],
)
def test_modules_are_told_the_version_of_a_state(device, ranks, way):
    done = [each.reports["missing"] for each in run_ranks(BEGIN + way + VERSIONS, ranks)]
    assert done[0] == ["norm.num_batches_tracked"]
    others = [] if "pp.size" in way else done[0]  # the first stage has it alone
    assert all(each == others for each in done[1:])


# --- hooks, and what else nn.Module keeps ---------------------------------------------------------


def test_hooks_of_calls_are_called(device):
    code = """
model = torchacc.accelerate(models.made(0))
calls = []
model.register_forward_pre_hook(lambda module, args: calls.append("before forward"))
model.register_forward_hook(lambda module, args, out: calls.append("forward"))
model.register_full_backward_pre_hook(lambda module, grads: calls.append("before backward"))
model.register_full_backward_hook(lambda module, grads, outs: calls.append("backward"))
model(torch.ones(2, 4, device=model.device, requires_grad=True)).sum().backward()
report(calls=calls)
"""
    for each in run_ranks(SETUP + code, 2):
        expected = ["before forward", "forward", "before backward", "backward"]
        assert each.reports["calls"] == expected


STATES = """
model = torchacc.accelerate(before(models.made(0)), config=config)
calls = []
def renamed(module, state, prefix, versions):
    calls.append("saved")
    state[prefix + "top.bias"] = state.pop(prefix + "head.bias")
def named_back(module, state, prefix, *rest):
    calls.append("before load")
    state[prefix + "head.bias"] = state.pop(prefix + "top.bias")
model.register_state_dict_pre_hook(lambda module, prefix, keep: calls.append("before save"))
model.register_state_dict_post_hook(renamed)
model.register_load_state_dict_pre_hook(named_back)
model.register_load_state_dict_post_hook(lambda module, keys: calls.append("loaded"))
state = model.state_dict()
report(saved=calls[:], there="top.bias" in state and "head.bias" not in state)
calls.clear()
for name, value in state.items():
    state[name] = value.clone()  # it may share memory with the model
with torch.no_grad():
    for parameter in model.parameters():
        parameter.zero_()
model.load_state_dict(state)
report(loaded=[each for each in calls if "load" in each])
report(same=all(torch.equal(value, state[name]) for name, value in model.state_dict().items()))
report(some=float(state["top.bias"].abs().sum()) > 0)
"""


@in_ways("dp", "fsdp", "tp")
def test_hooks_of_states_are_called_with_the_models_names(device, ranks, way):
    for each in run_ranks(BEGIN + way + STATES, ranks):
        assert each.reports == {
            "saved": ["before save", "saved"],
            "there": True,
            "loaded": ["before load", "loaded"],
            "same": True,
            "some": True,
        }


def test_a_call_can_be_compiled(device):
    code = """
model = torchacc.accelerate(models.made(0))
x = torch.ones(2, 4, device=model.device)
expected = model(x)
model.compile(backend="eager")
torch.testing.assert_close(model(x), expected)
model(x).sum().backward()
report(done=all(p.grad is not None for p in model.parameters()))
"""
    for each in run_ranks(SETUP + code, 2):
        assert each.reports["done"]


def test_what_is_registered_is_the_models(device):
    code = """
plain = models.made(0)
model = torchacc.accelerate(plain)
model.register_buffer("extra", torch.ones(3))
model.register_parameter("gain", nn.Parameter(torch.ones(1)))
model.add_module("more", nn.Linear(1, 1))
model.register_module("other", nn.Linear(1, 1))
for name in ("extra", "gain", "more", "other"):
    assert getattr(plain, name) is getattr(model, name)
assert {"extra", "gain", "more.bias", "other.bias"} <= set(model.state_dict())
assert "gain" in dict(model.named_parameters()) and "more" in dict(model.named_children())
report(again=refused(lambda: model.register_buffer("head", torch.ones(1))))
"""
    for each in run_ranks(SETUP + code, 2):
        assert "attribute 'head' already exists" in each.reports["again"]


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
