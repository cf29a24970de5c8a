"""Options of plain PyTorch that few programs use, and what they move or make, on acc."""

from __future__ import annotations

import pytest

from tests.distributed.test_plain import one

pytestmark = pytest.mark.usefixtures("acc_only")

START = """
dist.init_process_group("cpu:gloo,acc:acc")
def away(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))
"""


def two(code: str) -> list[dict]:
    return [rank.reports for rank in one(START + code)]


@pytest.mark.parametrize("ids", ["[device]", "[device.index]", "[RANK % torch.acc.device_count()]"])
def test_ddp_that_is_told_its_device_moves_the_inputs_there(ids):
    """`train` gives it inputs on the device; these are on the CPU."""
    code = f"""
plain, told = train(None), train(None, device_ids={ids}, output_device=device)
net = DistributedDataParallel(nn.Linear(8, 1).to(device), device_ids={ids})
found = net(torch.ones(4, 8))
found.sum().backward()
report(away=away(told, plain), device=str(found.device), expected=str(device),
       grad=net.module.weight.grad.tolist(), more=refused(
           lambda: DistributedDataParallel(nn.Linear(8, 1).to(device), device_ids=[0, 1])))
"""
    for found in two(code):
        assert found["away"] == 0
        assert found["device"] == found["expected"]
        assert found["grad"] == [[4.0] * 8]
        assert "device_ids can only be None or contain a single element" in found["more"]


@pytest.mark.parametrize("reduced", ["float32", "bfloat16"])
def test_ddp_in_mixed_precision(reduced):
    """The first backward is left out: torch's reducer exchanges memory there that nobody has
    written, on the CPU too (`set_mixed_precision_param_dtype` parts the buckets and their views).
    """
    code = f"""
from torch.nn.parallel.distributed import _MixedPrecision
def trained(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    net = DistributedDataParallel(net, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(7):
        torch.manual_seed(10 * i + RANK)
        value = net(torch.randn(4, 8).to(device))
        value.square().mean().backward()
        kept = {{str(each.dtype) for p in net.parameters() for each in (p, p.grad)}}
        if i > 0:
            optimizer.step()
        optimizer.zero_grad()
    return [p.detach().cpu() for p in net.parameters()], str(value.dtype), list(kept)
mixed = _MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.{reduced})
found, computed, kept = trained(mixed_precision=mixed)
report(away=away(found, trained()[0]), equal=equal_on_all_ranks(found))
report(computed=computed, kept=kept)
"""
    for found in two(code):
        assert 0 < found["away"] < 1e-2 and found["equal"]
        assert found["computed"] == "torch.bfloat16"
        assert found["kept"] == ["torch.float32"]


def test_ddp_that_reduces_some_gradients_at_the_end():
    """Those of the last layer go in one exchange, behind the gradient of the first."""
    code = """
def trained(delayed):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    options = {}
    if delayed:
        last = [(name, p) for name, p in net.named_parameters() if name.startswith("2")]
        options = dict(delay_all_reduce_named_params=last, device_ids=[device],
                       param_to_hook_all_reduce=net[0].weight)
    net = DistributedDataParallel(net, **options)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(6):
        torch.manual_seed(10 * i + RANK)
        optimizer.zero_grad()
        net(torch.randn(4, 8).to(device)).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]
plain, found = trained(False), trained(True)
report(away=away(found, plain), equal=equal_on_all_ranks(found))
"""
    for found in two(code):
        assert found["away"] < 1e-6 and found["equal"]


def test_lists_of_objects_are_sent_and_received():
    code = """
mine = [{"rank": RANK}, "text", torch.arange(3.0, device=device) + RANK]
if RANK == 0:
    dist.send_object_list(mine, 1)
    got = [None] * 3
    sender = dist.recv_object_list(got, 1, device=device)
else:
    got = [None] * 3
    sender = dist.recv_object_list(got, 0)
    dist.send_object_list(mine, 0, device=device)
report(sender=sender, got=[got[0], got[1], got[2].tolist()], device=got[2].device.type)
"""
    for number, found in enumerate(two(code)):
        other = 1 - number
        assert found["sender"] == other
        assert found["got"] == [{"rank": other}, "text", [float(other + i) for i in range(3)]]


def test_checkpoints_are_saved_beside_the_training(tmp_path):
    """What was there when `async_save` was called is saved, though steps follow at once."""
    code = f"""
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh(DEVICE, (WORLD,))
def made(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    fully_shard(net, mesh=mesh)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)
def step(net, optimizer, seed):
    optimizer.zero_grad()
    torch.manual_seed(seed)
    net(torch.randn(4, 8).to(device)).square().mean().backward()
    optimizer.step()
def whole(net):
    return [p.full_tensor().cpu() for p in net.parameters()]
net, optimizer = made(0)
step(net, optimizer, 1)
model, state = get_state_dict(net, optimizer)
saving = dcp.async_save({{"model": model, "optimizer": state}}, checkpoint_id={str(tmp_path)!r})
saved = whole(net)
for i in range(5):
    step(net, optimizer, 2 + i)
last = whole(net)
saving.result()
other, optimizer = made(5)
model, state = get_state_dict(other, optimizer)
dcp.load({{"model": model, "optimizer": state}}, checkpoint_id={str(tmp_path)!r})
set_state_dict(other, optimizer, model_state_dict=model, optim_state_dict=state)
report(saved=away(whole(other), saved), last=away(whole(other), last))
for i in range(5):
    step(other, optimizer, 2 + i)
report(after=away(whole(other), last))
"""
    for found in two(code):
        assert found["saved"] == 0 and found["last"] > 0.1
        assert found["after"] < 1e-6


def test_models_are_sharded_before_they_have_memory():
    code = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
mesh = init_device_mesh(DEVICE, (WORLD,))
def made():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.LayerNorm(16), nn.Linear(16, 1))
torch.manual_seed(0)
reference = made()
with torch.device("meta"):
    net = made()
for layer in net:
    fully_shard(layer, mesh=mesh)
fully_shard(net, mesh=mesh)
meta = all(p.is_meta for p in net.parameters())
net.to_empty(device=device)
for mine, theirs in zip(net.parameters(), reference.parameters(), strict=True):
    whole = theirs.detach().to(device)
    mine.data.copy_(torch.distributed.tensor.distribute_tensor(whole, mesh, mine.placements))
losses = []
for model, where in ((net, device), (reference, "cpu")):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for i in range(6):
        torch.manual_seed(i)  # the same on all ranks, so that one process does the same
        x = torch.randn(4, 8).to(where)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
drawn = made().to("meta")
fully_shard(drawn, mesh=mesh)
drawn.to_empty(device=device)
for layer in drawn:
    if hasattr(layer, "reset_parameters"):
        layer.reset_parameters()
bound = [float(p.full_tensor().abs().max()) for p in drawn.parameters()]
report(meta=meta, devices=sorted({p.device.type for p in net.parameters()}), found=losses[:6],
       expected=losses[6:], bound=bound)
"""
    for found in two(code):
        assert found["meta"] and found["devices"] == ["acc"]
        assert found["found"] == pytest.approx(found["expected"], rel=1e-5)
        weight, bias, scale, shift, last, _ = found["bound"]
        assert (scale, shift) == (1, 0)
        assert all(0 < each <= 8**-0.5 for each in (weight, bias)) and 0 < last <= 0.25
