"""Half precision and loss scaling in several processes: all take a step, or none does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import helpers
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("acc_only")

CODE = """
import math, warnings
import torchacc
from torch.nn import functional as F
from tests.distributed.models import made

def train(half, overflows=(), steps=12, region=False, part=False, **fsdp):
    config = torchacc.Config()
    for name, value in fsdp.items():
        setattr(config.dist.fsdp, name, value)
    if half:
        setattr(config.compute, half, True)
    model = torchacc.accelerate(made(3), config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    scaler = torch.cuda.amp.GradScaler(init_scale=1024.0, enabled=half == "fp16")
    losses, sums = [], []
    for i in range(steps):
        torch.manual_seed(100 * i + RANK)
        x = torch.randn(8, 4).to(model.device)
        with torch.autocast("cuda", enabled=region):
            y = model(x)
        kinds = str(y.dtype)
        loss = (y.float() - x[:, :2].float().sin()).square().mean()
        overflow = i in overflows and RANK == WORLD - 1
        if overflow and not part:
            loss = loss * math.inf
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if overflow and part:  # one element, behind all exchanges of gradients
            gradients = [p.grad for p in model.parameters() if p.grad is not None]
            gradients = [g.to_local() if hasattr(g, "to_local") else g for g in gradients]
            next(g for g in gradients if g.numel()).view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        sums.append(sum(float(p.detach().double().sum()) for p in model.parameters()))
    found = dict(losses=losses, sums=sums, scale=scaler.get_scale(), kinds=kinds)
    if half and "wrap_layer_cls" in fsdp:  # units that the program calls by themselves
        with torch.no_grad(), torch.autocast("cuda", enabled=False):
            found["part"] = str(model.blocks(torch.ones(2, 6, device=model.device)).dtype)
    return found
"""
WAYS: dict[str, dict[str, Any]] = {
    "flat": {"size": 2},
    "units": {"size": 2, "wrap_layer_cls": {"Block"}, "flatten_parameters": False},
    "replicas": {},
}


def test_trainings_follow_float32():
    code = f"""
KINDS = ((None, False), ("fp16", True), ("fp16", False), ("bf16", False))
for way, options in {WAYS!r}.items():
    report(**{{way: {{
        f"{{half}} {{region}}": train(half, region=region, **options)
        for half, region in KINDS if region or half is None or options
    }}}})
"""
    for rank in run_ranks(CODE + code, 2):
        assert list(rank.reports) == list(WAYS)
        for way, trainings in rank.reports.items():
            plain = trainings.pop("None False")
            assert plain["losses"][-1] < 0.7 * plain["losses"][0], way
            assert len(trainings) == (3 if WAYS[way] else 1)
            for name, found in trainings.items():
                # bfloat16 has eight bits
                bound = 0.03 if name.startswith("fp16") else 0.1
                assert found["losses"] == pytest.approx(plain["losses"], rel=bound), (way, name)
                assert found["losses"] != plain["losses"], "nothing was in half precision"
                # The region's own type stays; else float32 comes out.
                assert found["kinds"] == ("torch.float16" if "True" in name else "torch.float32")
                assert found["scale"] == (1024.0 if name.startswith("fp16") else 1.0)
                assert found.get("part", "torch.float32") == "torch.float32"
                assert ("part" in found) == ("wrap_layer_cls" in WAYS[way])


DIGITS = """
from torch import nn
from sklearn.datasets import load_digits

scanned = load_digits()
images = torch.tensor(scanned.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(scanned.target)

def train_digits(half, sharded, steps):
    config = torchacc.Config()
    config.dist.fsdp.size, config.compute.fp16 = sharded, half
    torch.manual_seed(0)
    model = torchacc.accelerate(nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 16, 10),
    ), config=config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.cuda.amp.GradScaler(enabled=half)
    losses = []
    for i in range(steps):
        rows = (torch.arange(64 * i, 64 * i + 64) % len(labels))[RANK::WORLD]
        with torch.cuda.amp.autocast(enabled=half):
            out = model(images[rows].to(model.device))
            loss = F.cross_entropy(out, labels[rows].to(model.device))
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return dict(losses=torch.stack(losses).tolist(), kind=str(out.dtype))
"""


# Processes, and how many of them have a parameter in parts (1: data parallel).
@pytest.mark.parametrize(("ranks", "sharded"), [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)])
def test_digits_are_learnt_as_in_float32(ranks: int, sharded: int):
    """Losses of 100 steps within 2 % of float32's, as means of ten over all ranks, since a batch of
    64 is noise."""
    code = "\n" + "".join(
        f"report({name}=train_digits({half}, {sharded}, 100))\n"
        for name, half in (("plain", False), ("half", True))
    )
    found = [rank.reports for rank in run_ranks(CODE + DIGITS + code, ranks)]
    losses = {
        kind: torch.tensor([each[kind]["losses"] for each in found]).mean(0)
        for kind in ("plain", "half")
    }
    assert {each["half"]["kind"] for each in found} == {"torch.float16"}
    assert losses["plain"][-10:].mean() < 0.2 * losses["plain"][0]
    plain, half = (losses[kind].unfold(0, 10, 10).mean(1) for kind in ("plain", "half"))
    assert not torch.equal(plain, half), "nothing was in half precision"
    assert ((half - plain).abs() / plain).max() < 0.02


def test_batch_norms_stay_in_float32():
    """Without classes that are units too; torch's kernels take no statistics of half types."""
    code = """
import torchacc
from torch import nn
config = torchacc.Config()
config.dist.fsdp.size, config.compute.fp16 = 2, True
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
model = torchacc.accelerate(net, config=config)
y = model(torch.randn(8, 4, device=model.device))
y.square().sum().backward()
norm = net[1]
report(kind=str(norm.running_mean.dtype), moved=bool(norm.running_mean.abs().sum() > 0))
"""
    for rank in run_ranks(code, 2):
        assert rank.reports == {"kind": "torch.float32", "moved": True}


def test_inputs_stay_as_they_are():
    """Autocast casts what its operators take: positions, masks and targets are exact."""
    code = """
import torchacc
from torch import nn
class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(4, 6), nn.Linear(6, 4)
    def forward(self, x, time):
        y = self.head(self.up(x))
        return y + (time - 1000), y.dtype
def made(half, options):
    config = torchacc.Config()
    for name, value in options.items():
        setattr(config.dist.fsdp, name, value)
    setattr(config.compute, half, True)
    return torchacc.accelerate(Timed(), config=config)
for way in ({"size": 2}, {"size": 2, "wrap_layer_cls": {"Linear"}}):
    for half in ("bf16", "fp16"):
        model = made(half, way)
        time = torch.full((2, 1), 1000.2, device=model.device)
        with torch.no_grad():
            far, kind = model(torch.ones(2, 4, device=model.device), time)
            near, _ = model(torch.ones(2, 4, device=model.device), time * 0 + 1000)
        report(**{half + str(len(way)): [float((far - near).mean()), str(kind)]})
"""
    for rank in run_ranks(code, 2):
        for way, (away, kind) in rank.reports.items():
            assert away == pytest.approx(0.2, abs=1e-3), way
            assert kind == (f"torch.{'float16' if way.startswith('fp16') else 'bfloat16'}")


def test_an_overflow_on_one_rank_is_one_on_all():
    code = f"""
for way, options in {WAYS!r}.items():
    report(**{{way: train("fp16", (3, 4, 8), region=True, **options)}})
"""
    for rank in run_ranks(CODE + code, 2):
        assert list(rank.reports) == list(WAYS)
        for way, found in rank.reports.items():
            sums = found["sums"]
            skipped = [i for i in range(1, len(sums)) if sums[i] == sums[i - 1]]
            assert skipped == [3, 4, 8], way
            assert found["scale"] == 128.0, way


def test_an_overflow_is_one_for_replicas_of_shards():
    """Two groups of two processes each, flat and in units; one element of the last one's part."""
    ways = {way: options for way, options in WAYS.items() if options}
    code = f"""
for way, options in {ways!r}.items():
    report(**{{way: train("fp16", (2,), steps=4, region=True, part=True, **options)}})
mesh = torchacc.Config.from_dict(dict(dist=dict(fsdp=dict(size=2)))).get_mesh()
report(sizes=[mesh.get_dp_num(), mesh.get_fsdp_num()])
"""
    ranks = run_ranks(CODE + code, 4)
    for rank in ranks:
        assert rank.reports["sizes"] == [2, 2]
        for way in ways:
            sums, scale = rank.reports[way]["sums"], rank.reports[way]["scale"]
            assert [i for i in range(1, 4) if sums[i] == sums[i - 1]] == [2], way
            assert scale == 512.0, way
    for way in ways:  # replicas are alike
        first, second = ([rank.reports[way]["sums"] for rank in ranks[i : i + 2]] for i in (0, 2))
        assert first == second, way


def test_torchs_own_sharding_takes_a_scaler_and_stages_without_gradients_take_part():
    code = """
from torch.distributed.fsdp import fully_shard
from torchacc_device import _scaling
dist.init_process_group("acc")
torch.acc.set_device(RANK % torch.acc.device_count())
net = made(3).to(DEVICE)
fully_shard(net)  # the default mesh is the accelerator's
report(mesh=net.first.weight.device_mesh.device_type)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
sums = []
for i in range(4):
    optimizer.zero_grad()
    loss = net(torch.ones(2, 4, device=DEVICE)).sum() * (math.inf if i == 2 and RANK else 1.0)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    sums.append(sum(float(p.to_local().detach().double().sum()) for p in net.parameters()))
report(skipped=sums[1] == sums[2], taken=sums[2] != sums[3], scale=scaler.get_scale())
_scaling.step_together(net)
with torch.no_grad():
    net(torch.ones(2, 4, device=DEVICE))  # FSDP may leave whole parameters in their place
report(known=list(_scaling._groups_of(optimizer)) == [None])

# A stage of which nothing was used: the others wait for its word all the same.
stage = torch.nn.Module()
stage.alone = alone = torch.nn.Parameter(torch.ones(3, device=DEVICE))
_scaling.step_together(stage)
optimizer, scaler = torch.optim.SGD([alone], lr=1.0), torch.amp.GradScaler(DEVICE)
scaler.scale(alone.sum() * (math.inf if RANK else 1.0))
if RANK == 1:
    alone.grad = torch.full((3,), math.inf, device=DEVICE)
scaler.unscale_(optimizer)
report(found=[float(v) for v in
              scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()])
"""
    for rank in run_ranks(CODE + code, 2):
        assert rank.reports == {
            "mesh": "acc",
            "skipped": True,
            "taken": True,
            "scale": 4.0,
            "known": True,
            "found": [1.0],
        }


def test_an_overflow_in_one_part_is_one_for_all_that_hold_parts():
    """Of torch's own sharding and of DTensors, of which `accelerate` has not heard."""
    code = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
dist.init_process_group("acc")
torch.acc.set_device(RANK % torch.acc.device_count())
mesh = init_device_mesh(DEVICE, (1, WORLD))
net = made(3).to(DEVICE)
fully_shard(net)
split = torch.nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh, [Replicate(), Shard(0)]))
cases = {
    "sharded": (list(net.parameters()), lambda: net(torch.ones(2, 4, device=DEVICE)).sum()),
    "split": ([split], lambda: split.sum().full_tensor()),
}
for name, (parameters, loss) in cases.items():
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=8.0)
    sums = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(loss()).backward()
        if step == 1 and RANK == 1:  # one element, of one process
            parameters[0].grad.to_local().view(-1)[0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        sums.append(sum(float(p.to_local().detach().double().sum()) for p in parameters))
    report(**{name: dict(
        skipped=sums[0] == sums[1], taken=sums[1] != sums[2], scale=scaler.get_scale())})

def found(placement, values):
    "What unscaling finds; `values`: of this process's part of the gradient, or None."
    whole = torch.nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate(), placement]))
    if values is not None:
        sums = Partial() if placement.is_replicate() else placement
        whole.grad = DTensor.from_local(values.to(DEVICE), mesh, [Replicate(), sums])
    optimizer, scaler = torch.optim.SGD([whole], lr=1.0), torch.amp.GradScaler(DEVICE)
    scaler.scale(torch.zeros((), device=DEVICE))
    scaler.unscale_(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return [value.item() for value in found.values()]
report(
    none=found(Shard(0), torch.full((1, 2), math.inf) if RANK else None),
    sums=found(Replicate(), torch.full((2, 2), math.inf if RANK else 1.0)),
    finite=found(Shard(0), torch.ones(1, 2)),
)
"""
    for rank in run_ranks(CODE + code, 2):
        for name in ("sharded", "split"):
            assert rank.reports[name] == {"skipped": True, "taken": True, "scale": 4.0}, name
        assert rank.reports["none"] == rank.reports["sums"] == [1.0]
        assert rank.reports["finite"] == [0.0]


SCALED = """
import copy, math
import torchacc
from torch import nn
from torchacc.dist import tp
from tests.distributed.models import made
config = torchacc.Config()
plain = made(0)
x = torch.randn(4, 4, generator=torch.Generator().manual_seed(1))

def train(model, optimizer, scaler, backward):
    scales, norms = [], []
    for step in range(4):
        optimizer.zero_grad()
        backward(math.inf if step == 2 else 1.0)
        scaler.unscale_(optimizer)
        norms.append(float(model.clip_grad_norm_(1e9)))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    report(scales=scales, norms=norms)

reference = made(0)
with_reference = torch.optim.SGD(reference.parameters(), lr=0.1)
expected = []
for step in range(3):
    with_reference.zero_grad()
    reference(x).square().mean().backward()
    expected.append(float(nn.utils.get_total_norm([p.grad for p in reference.parameters()])))
    with_reference.step()
report(expected=expected)
"""


@pytest.mark.parametrize("kind", ["torch.cuda.amp.GradScaler", "torchacc.amp.GradScaler"])
def test_a_scaler_of_a_pipeline_begins_alike_on_all_stages(kind):
    """Only the last stage scales a loss."""
    code = f"""
config.dist.pp.size, config.dist.pp.split_points = 2, ["blocks.1"]
config.dist.pp.num_micro_batches = 2
model = torchacc.accelerate(plain, config=config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = {kind}(init_scale=1024.0)
def backward(factor):
    def output_fn(out):
        return scaler.scale(out.square().mean() * factor)
    return model.forward_backward(x, output_fn=output_fn)
train(model, optimizer, scaler, backward)
"""
    for rank in run_ranks(SCALED + code, 2):
        assert rank.reports["scales"] == [1024.0, 1024.0, 512.0, 512.0]
        norms = rank.reports["norms"]
        assert norms[:2] + norms[3:] == pytest.approx(rank.reports["expected"], rel=1e-5)


@pytest.mark.parametrize("ranks", [2, 4] if helpers.FULL else [4])
def test_a_scaler_takes_split_layers(ranks):
    code = """
config.dist.tp.size = 2
for index in range(3):
    plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    tp.parallelize(plain.blocks[index], plan, config)
model = torchacc.accelerate(plain, config=config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
scaler = torch.amp.GradScaler("acc", init_scale=1024.0)
def backward(factor):
    loss = model(x.to(model.device)).square().mean()
    # On one process alone: the others hear of it.
    scaler.scale(loss * (factor if RANK == 0 else 1.0)).backward()
train(model, optimizer, scaler, backward)
"""
    for rank in run_ranks(SCALED + code, ranks):
        assert rank.reports["scales"] == [1024.0, 1024.0, 512.0, 512.0]
        norms = rank.reports["norms"]
        assert norms[:2] + norms[3:] == pytest.approx(rank.reports["expected"], rel=1e-5)


STEADY = """
from torch.distributed.fsdp import fully_shard
from torchacc.dist import tp
from torchacc_device import _scaling
from tests import helpers
WARM_UP, STEPS = 4, 16

def wrapped(way):
    config, plain = torchacc.Config(), made(3)
    if way == "alone":
        return plain.to(DEVICE)
    if way == "units":
        return fully_shard(plain.to(DEVICE))
    if way == "flat":
        config.dist.fsdp.size = 2
    if way == "split":
        config.dist.tp.size = 2
        for block in plain.blocks:
            plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
            tp.parallelize(block, plan, config)
    return torchacc.accelerate(plain, config=config)

def steady(way):
    model = wrapped(way)
    foreach = False if way == "split" else None  # torch does not mix DTensors with others
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=foreach)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=256.0)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    factors = [torch.tensor(factor).to(DEVICE) for factor in (1.0, math.inf)]
    steps = []
    for i in range(STEPS):
        with helpers.counting() as counted:
            with torch.autocast(DEVICE, torch.float16):
                y = model(x)
            optimizer.zero_grad()
            overflows = i % 5 == 3 and (RANK == 1 or way == "alone")
            scaler.scale(y.float().square().mean() * factors[overflows]).backward()
            scaler.step(optimizer)
            scaler.update()
        steps.append({key: counted[key] for key in counted.after
                      if re.fullmatch("flush_[a-z_]+|waits/.*|plans_built", key) and counted[key]})
    state = torch.cat([whole(p).detach().cpu().flatten() for p in parameters(model)])
    return steps[WARM_UP:], state

def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

def parameters(model):
    names = [name for name, _ in made(3).named_parameters()]
    state = model.state_dict()
    return [state[name] for name in names]

torchacc.accelerate(made(0))  # makes the group
_, expected = steady("alone")
report(moved=float((expected - torch.cat([p.flatten() for p in made(3).parameters()])).abs().max()))
for way in ("replicas", "flat", "units", "split"):
    steps, state = steady(way)
    report(**{way: steps, way + " away": float((state - expected).abs().max())})
report(synchronised=_scaling.synchronised())
"""


def test_steps_of_several_processes_read_nothing_and_make_no_plan():
    """Under autocast and a scaler, some of them skipped; each way trains as one process does."""
    for rank in run_ranks(CODE + "import re" + STEADY, 2, ACC_MODE="full"):
        found = rank.reports
        assert found["synchronised"] == {} and found["moved"] > 0.05
        for way in ("replicas", "flat", "units", "split"):
            assert found[f"{way} away"] < 2e-3, way
            # A process that was held up for long has submitted the first part of its step, and the
            # next one may begin elsewhere.
            pairs = zip(found[way], found[way][1:], strict=False)
            steps = [each for last, each in pairs if "flush_idle" not in last | each]
            assert len(steps) >= 3
            assert steps == [{"flush_step": 1}] * len(steps), (way, found[way])
