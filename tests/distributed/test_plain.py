"""What programs of plain PyTorch ask of a process group, on acc."""

from __future__ import annotations

import pytest

from tests import helpers
from tests.distributed.ranks import run_to_end

pytestmark = pytest.mark.usefixtures("acc_only")

BEGIN = """
import warnings
from torch import nn
from torch.nn.parallel import DistributedDataParallel
torch.acc.set_device(RANK % torch.acc.device_count())
device = torch.device(DEVICE, torch.acc.current_device())

def train(model, hook=None, steps=6, **options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)).to(device)
    net = DistributedDataParallel(net, **options)
    if hook is not None:
        hook(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for i in range(steps):
        torch.manual_seed(10 * i + RANK)
        optimizer.zero_grad()
        net(torch.randn(4, 8).to(device)).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]

def equal_on_all_ranks(tensors):
    for tensor in tensors:
        there = [None] * WORLD
        dist.all_gather_object(there, tensor)
        if not all(torch.equal(tensor, other) for other in there):
            return False
    return True
"""
END = """
dist.destroy_process_group()
"""


def one(code: str, ranks: int = 2) -> list:
    return run_to_end(BEGIN + code + END, ranks)


@pytest.mark.parametrize("backend", ['"acc"', '"lazy"', "None", '"cpu:gloo,acc:acc"'])
def test_names_of_the_backend(backend):
    code = f"""
dist.init_process_group({backend})
plain = train(None)
report(equal=equal_on_all_ranks(plain), backend=dist.get_backend())
dist.barrier(device_ids=[device.index])
"""
    for rank in one(code):
        assert rank.reports["equal"]
        assert "warning" not in rank.stderr.lower()


@pytest.mark.parametrize("backend", ['"acc"', '"cpu:gloo,acc:acc"'])
def test_a_monitored_barrier_names_who_is_missing(backend):
    code = f"""
from datetime import timedelta
dist.init_process_group({backend})
store = dist.distributed_c10d._get_default_store()
dist.monitored_barrier()
torch.distributed.monitored_barrier(dist.group.WORLD, timedelta(seconds=30), wait_all_ranks=True)
if RANK == 0:
    try:
        dist.monitored_barrier(timeout=timedelta(seconds=1))
    except RuntimeError as error:
        report(error=str(error))
    store.set("told", "1")
store.wait(["told"])
try:
    dist.monitored_barrier(timeout=5)
except TypeError as error:
    report(wrong=str(error))
"""
    first, second = one(code)
    assert "Rank 1 failed to pass monitoredBarrier" in first.reports["error"]
    assert "timedelta" in first.reports["wrong"]


@pytest.mark.parametrize("backend", ['"acc"', '"cpu:gloo,acc:acc"', '"gloo"'])
def test_a_program_that_has_told_its_device_makes_groups_of_gloo(backend):
    code = f"""
dist.init_process_group({backend}, device_id=device)
gloo = dist.new_group(backend="gloo")
dist.monitored_barrier(gloo)
dist.barrier(gloo)
there = [None] * WORLD
dist.all_gather_object(there, RANK, group=gloo)
x = torch.full((3,), RANK + 1.0)
dist.all_reduce(x, group=gloo)
more = dist.new_group(backend="acc")
y = x.to(device)
for group in (more,) if {backend} == "gloo" else (more, None):
    dist.all_reduce(y, group=group)
report(there=there, sums=[x[0].item(), y[0].item()], backend=dist.get_backend(gloo))
"""
    for rank in one(code):
        sums = [3.0, 6.0 if backend == '"gloo"' else 12.0]
        assert rank.reports == {"there": [0, 1], "sums": sums, "backend": "gloo"}


@pytest.mark.parametrize("options", ["", ", device_id=device"])
def test_groups_are_split(options):
    code = f"""
dist.init_process_group("acc"{options})
from datetime import timedelta
pairs = dist.split_group(split_ranks=[[0, 2], [1]], timeout=timedelta(seconds=50))
x = torch.full((3,), float(RANK), device=device)
dist.all_reduce(x, group=pairs)
report(sum=x.tolist(), size=pairs.size())
again = dist.split_group(pairs, [[0]]) if RANK != 1 else None
report(again=again is not None)
some = dist.new_group([0, 1])
if RANK < 2:
    x = torch.ones(1, device=device)
    dist.all_reduce(x, group=some)
    report(some=x.item())
for wrong in ([], [[]], [[0, 0, 1, 2]], [[0, 1, 2, 3]]):
    try:
        dist.split_group(split_ranks=wrong)
    except ValueError as error:
        report(wrong=str(error))
"""
    for number, rank in enumerate(one(code, 3)):
        found = rank.reports
        assert (found["sum"], found["size"]) == (([1.0] * 3, 1) if number == 1 else ([2.0] * 3, 2))
        assert found["again"] is (number == 0)
        assert found.get("some") == (2.0 if number < 2 else None)
        assert "should be ranks of the group, 0 to 2" in found["wrong"]


def test_a_mesh_of_what_is_called_cuda_is_split_off_a_group_that_knows_its_device():
    """torch splits such a group itself, by the function that it bound when it was imported."""
    code = """
import torchacc
from torch.distributed.device_mesh import init_device_mesh
torchacc.patch(devices=True)
dist.init_process_group("nccl", device_id=torch.device("cuda", device.index))
mesh = init_device_mesh("cuda", (2, 2))
sums = []
for dimension in range(2):
    x = torch.full((3,), float(RANK), device="cuda")
    dist.all_reduce(x, group=mesh.get_group(dimension))
    sums.append(x[0].item())
report(sums=sums, names=[mesh.get_group(dimension).group_name for dimension in range(2)])
"""
    sums = [[2.0, 1.0], [4.0, 1.0], [2.0, 5.0], [4.0, 5.0]]
    for rank, expected in zip(one(code, 4), sums, strict=True):
        assert rank.reports["sums"] == expected
        assert all("split/" in name for name in rank.reports["names"])


def test_groups_are_split_whose_ranks_are_in_unlike_numbers_of_groups():
    """torch names a group that only its ranks make by how many each of them is in."""
    code = """
from datetime import timedelta
dist.init_process_group("acc")
def summed(group):
    x = torch.full((3,), 1.0 + RANK, device=device)
    dist.all_reduce(x, group=group)
    return x[0].item()
def split(*arguments):
    return dist.split_group(*arguments, timeout=timedelta(seconds=20), group_desc="a part")
if RANK == 0:
    dist.new_group([0], use_local_synchronization=True)
first, second = split(None, [[2, 0], [1]]), split(None, [[0, 2], [1]])
report(sums=[summed(first), summed(second)])
if RANK != 1:
    part = split(first, [[1, 0]])
    names = {group.group_name for group in (first, second, part)}
    report(part=summed(part), ranks=dist.get_process_group_ranks(part), said=part.group_desc,
           names=len(names))
    dist.destroy_process_group(part)
    report(again=summed(split(first, [[0, 1]])))
"""
    for number, rank in enumerate(one(code, 3)):
        found = rank.reports
        assert found["sums"] == ([2, 2] if number == 1 else [4, 4])
        if number != 1:
            assert (found["part"], found["again"], found["ranks"]) == (4, 4, [0, 2])
            assert (found["said"], found["names"]) == ("a part", 3)


def test_a_group_can_be_aborted():
    """By another thread of a process that waits for a rank which does not come."""
    code = """
import threading, time
dist.init_process_group("acc")
store = dist.distributed_c10d._get_default_store()
if RANK == 0:
    backend = dist.group.WORLD._get_backend(device)
    began = time.monotonic()
    x = torch.ones(4, device=device)
    dist.all_reduce(x)
    try:
        threading.Timer(1, backend.abort).start()
        x.sum().item()
    except dist.DistBackendError as error:
        report(error=str(error), seconds=time.monotonic() - began)
    store.set("told", "1")
store.wait(["told"])
"""
    first, _ = run_to_end(BEGIN + code, 2, check=False)
    assert "rank 0 failed: it has aborted the group" in first.reports["error"]
    assert first.reports["seconds"] < 10


def test_a_receive_is_over_when_it_says_so():
    """Both ranks ask before they send; what came is there without a call of wait."""
    code = """
import time
dist.init_process_group("acc")
other = 1 - RANK
by_polling, by_future = torch.zeros(3, device=device), torch.zeros(3, device=device)
polled = dist.irecv(by_polling, other)
asked = dist.irecv(by_future, other, tag=1)
future = asked.get_future()
assert asked.get_future() is not None and asked.is_success()  # nobody waits here
report(early=polled.is_completed() or future.done())
dist.barrier()
mine = torch.ones(3, device=device) * (RANK + 1)
dist.send(mine, other)
dist.send(mine * 10, other, tag=1)
while not polled.is_completed():
    time.sleep(0.01)
report(polled=by_polling.tolist(), success=polled.is_success())
future.wait()
report(future=by_future.tolist())
"""
    for number, rank in enumerate(one(code)):
        found = rank.reports
        assert not found["early"] and found["success"]
        assert found["polled"] == [2.0 - number] * 3
        assert found["future"] == [10 * (2.0 - number)] * 3


def test_a_collective_of_one_process_is_over_when_asked():
    code = """
dist.init_process_group("acc")
x = torch.ones(3, device=device)
work = dist.all_reduce(x, async_op=True)
report(asked=sum(not work.is_completed() for _ in range(100)), x=x.tolist())
report(again=work.is_completed())
"""
    (only,) = one(code, ranks=1)
    assert only.reports == {"asked": 0, "x": [1.0] * 3, "again": True}


def test_asking_in_the_middle_of_a_strict_step_is_refused_and_fails_nothing():
    """Whether a collective is over could only be told by submitting the step in parts."""
    code = """
import torchacc
dist.init_process_group("acc")
x = torch.ones(3, device=device)
with torchacc.strict(after=0):
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    report(said=refused(work.is_completed), success=work.is_success())
torchacc.mark_step()  # whose plan is a new one
work.wait()
report(y=y.tolist(), done=work.is_completed(), after=work.is_success())
"""
    for rank in one(code):
        found = rank.reports
        assert "[strict]" in found["said"] and "in the middle of a step" in found["said"]
        assert found["success"] and found["after"] and found["done"]
        assert found["y"] == [4.0] * 3


def test_ctrl_c_ends_the_wait_for_sends_that_nobody_receives():
    code = """
import os, signal, threading, time
dist.init_process_group("acc")
store = dist.distributed_c10d._get_default_store()
if RANK == 0:
    dist.isend(torch.ones(1 << 18, device=device), 1)
    began = time.monotonic()
    try:
        threading.Timer(1, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        dist.destroy_process_group()
    except KeyboardInterrupt:
        report(seconds=time.monotonic() - began)
    store.set("over", "1")
    os._exit(0)
store.wait(["over"])
os._exit(0)
"""
    first, _ = run_to_end(BEGIN + code, 2)
    assert 0.5 < first.reports["seconds"] < 60


def test_sends_that_nobody_receives_are_bounded():
    code = """
dist.init_process_group("acc")
store = dist.distributed_c10d._get_default_store()
block = torch.ones(1 << 20, device=device)  # 4 MiB
if RANK == 0:
    import threading
    sent = []
    def send():
        for _ in range(200):
            dist.send(block, 1)
            sent.append(1)
    thread = threading.Thread(target=send)
    thread.start()
    thread.join(3)
    report(under_way=len(sent), alive=thread.is_alive())
    store.set("go", "1")
    thread.join()
    report(all=len(sent))
else:
    store.wait(["go"])
    for _ in range(200):
        dist.recv(block, 0)
"""
    first, _ = one(code)
    assert first.reports["alive"] and 0 < first.reports["under_way"] <= 65
    assert first.reports["all"] == 200


def test_sends_begin_before_those_ahead_of_them_were_received():
    code = """
dist.init_process_group("acc")
sent = [torch.full((2,), i + 100.0 * RANK, device=device) for i in range(80)]
got = [torch.zeros(2, device=device) for _ in sent]
works = [dist.isend(each, 1 - RANK, tag=i) for i, each in enumerate(sent)]
works += [dist.irecv(each, 1 - RANK, tag=i) for i, each in enumerate(got)]
for work in works:
    work.wait()
report(one_by_one=[float(each[0]) for each in got])
large = torch.full((35 << 20,), float(RANK), device=device)  # 140 MiB
kinds = [dist.isend, dist.isend, dist.irecv, dist.irecv]
tensors = [large, large + 2, torch.empty_like(large), torch.empty_like(large)]
for work in dist.batch_isend_irecv(
    [dist.P2POp(kind, each, 1 - RANK) for kind, each in zip(kinds, tensors)]
):
    work.wait()
report(together=[float(each[-1]) for each in tensors[2:]])
"""
    for rank, each in enumerate(one(code)):
        other = 1 - rank
        assert each.reports["one_by_one"] == [i + 100.0 * other for i in range(80)]
        assert each.reports["together"] == [float(other), other + 2.0]


def test_what_was_sent_at_the_end_of_a_program_arrives():
    code = """
dist.init_process_group("acc")
if RANK == 0:
    dist.send(torch.arange(3.0, device=device), 1)
    polled = dist.isend(torch.full((3,), 7.0, device=device), 1, tag=3)
    assert polled.is_completed()  # its contents are kept
    dist.isend(torch.ones(3, device=device), 1, tag=9)  # nobody asks for it, and nobody takes it
else:
    import time
    time.sleep(1)
    x = torch.zeros(3, device=device)
    dist.recv(x, 0)
    report(x=x.tolist())
    dist.recv(x, 0, tag=3)
    report(polled=x.tolist())
"""
    ended = run_to_end(BEGIN + code, 2)
    assert ended[1].reports == {"x": [0.0, 1.0, 2.0], "polled": [7.0] * 3}


def test_a_send_that_fails_says_so_itself():
    code = """
import datetime, os, time
dist.init_process_group("acc", timeout=datetime.timedelta(seconds=20))
store = dist.distributed_c10d._get_default_store()
if RANK == 1:
    store.wait(["sent"])
    os._exit(0)
works = [dist.isend(torch.ones(1 << 20, device=device), 1, tag=tag) for tag in range(2)]
store.set("sent", "1")
time.sleep(1)
report(ends=refused(dist.group.WORLD._wait_for_pending_works))
report(one=refused(works[0].wait), other=refused(works[1].wait))
os._exit(0)
"""
    ended = run_to_end(BEGIN + code, 2)
    said = ended[0].reports
    # the first failure is told by whoever asks for all, the other by its own send
    assert "an earlier send of this group has failed" in said["ends"]
    assert {said["one"] == "accepted", said["other"] == "accepted"} == {True, False}
    assert "the send has failed" in said["one"] + said["other"]


def test_hooks_of_ddp():
    code = """
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
dist.init_process_group("cpu:gloo,acc:acc")
def powersgd(net):
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
def away(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))
plain = train(None)
def on_cpu(hook):
    global device
    device, there = torch.device("cpu"), device
    try:
        return train(None, hook)
    finally:
        device = there
report(against_gloo=away(train(None, powersgd), on_cpu(powersgd)))
for name, hook in {
    "allreduce": lambda net: net.register_comm_hook(None, default_hooks.allreduce_hook),
    "fp16": lambda net: net.register_comm_hook(None, default_hooks.fp16_compress_hook),
    "bf16": lambda net: net.register_comm_hook(None, default_hooks.bf16_compress_hook),
    "powersgd": powersgd,
}.items():
    found = train(None, hook)
    report(**{name: away(found, plain), name + "_equal": equal_on_all_ranks(found)})
"""
    for rank in one(code):
        found = rank.reports
        assert found["allreduce"] == 0
        assert 0 < found["fp16"] < 1e-2
        assert 0 < found["bf16"] < 1e-1
        assert found["powersgd"] > 0 and found["against_gloo"] < 1e-5
        assert all(found[name + "_equal"] for name in ("allreduce", "fp16", "bf16", "powersgd"))


def test_gradients_add_up_without_exchange():
    code = """
dist.init_process_group("acc")
torch.manual_seed(0)
net = DistributedDataParallel(nn.Linear(8, 1).to(device))
x = torch.full((2, 8), float(RANK + 1), device=device)
with net.no_sync():
    net(x).sum().backward()
alone = net.module.weight.grad.cpu().tolist()
net(x).sum().backward()
report(alone=alone, all=net.module.weight.grad.cpu().tolist())
"""
    done = one(code)
    for number, rank in enumerate(done):
        assert rank.reports["alone"] == [[2.0 * (number + 1)] * 8]
        # the mean over ranks of twice as much
        assert rank.reports["all"] == [[2 * 2.0 * 1.5] * 8]


def test_a_sharded_optimizer():
    code = """
from torch.distributed.optim import ZeroRedundancyOptimizer
dist.init_process_group("cpu:gloo,acc:acc")
def run(make):
    torch.manual_seed(0)
    net = DistributedDataParallel(nn.Linear(8, 4).to(device))
    optimizer = make(net.parameters())
    for i in range(5):
        torch.manual_seed(i + RANK)
        optimizer.zero_grad()
        net(torch.randn(4, 8).to(device)).square().mean().backward()
        optimizer.step()
    return [p.detach().cpu() for p in net.parameters()]
plain = run(lambda p: torch.optim.AdamW(p, lr=0.01))
sharded = run(lambda p: ZeroRedundancyOptimizer(p, torch.optim.AdamW, lr=0.01))
report(away=max(float((a - b).abs().max()) for a, b in zip(plain, sharded, strict=True)),
       equal=equal_on_all_ranks(sharded))
"""
    for rank in one(code):
        assert rank.reports["away"] < 1e-6
        assert rank.reports["equal"]


def test_dtensors():
    code = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel, RowwiseParallel, parallelize_module)
dist.init_process_group("acc")
mesh = init_device_mesh(DEVICE, (WORLD,))
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
x = torch.randn(4, 8)
expected = net(x)
expected.sum().backward()
gradients = [p.grad.clone() for p in net.parameters()]
net.zero_grad()
net = parallelize_module(net.to(device), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
found = net(x.to(device))
found.sum().backward()
report(
    forward=float((found.cpu() - expected).abs().max()),
    backward=max(float((p.grad.full_tensor().cpu() - g).abs().max())
                 for p, g in zip(net.parameters(), gradients, strict=True)),
    moved=float((distribute_tensor(x.to(device), mesh, [Shard(0)])
                 .redistribute(mesh, [Shard(1)]).full_tensor().cpu() - x).abs().max()),
)
"""
    for rank in one(code):
        assert rank.reports["forward"] < 1e-5
        assert rank.reports["backward"] < 1e-5
        assert rank.reports["moved"] == 0


@pytest.mark.usefixtures("recording")
def test_dtensors_draw_random_numbers_and_the_state_stays_on_the_host():
    code = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, _random, distribute_tensor, randn
from torchacc_device import _C
dist.init_process_group("acc")
mesh = init_device_mesh(DEVICE, (WORLD,))
x = distribute_tensor(torch.ones(8, 6), mesh, [Shard(0)])
torch.nn.functional.dropout(x)  # the first one exchanges the ranks' states
def draws():
    torch.manual_seed(3)
    before = _C.stats()["flushes"]
    made = [torch.nn.functional.dropout(x) for _ in range(10)]
    made += [randn(8, 3, device_mesh=mesh, placements=[Shard(0)]), x.clone().uniform_()]
    flushes = _C.stats()["flushes"] - before
    state = torch.acc.get_rng_state().tolist()
    return flushes, state, [each.full_tensor().tolist() for each in made]
tracker = _random.OffsetBasedRNGTracker
move, moved = tracker._get_device_state, []
tracker._get_device_state = lambda self: moved.append(True) or move(self)
flushes, state, made = draws()
report(flushes=flushes, moved=len(moved), different=made[0] != made[1])
tracker._distribute_region = tracker._distribute_region.__wrapped__
_, torchs_state, torchs = draws()
report(equal=made == torchs and state == torchs_state, moved_by_torch=len(moved))
"""
    for rank in one(code):
        assert rank.reports == {
            "flushes": 0,
            "moved": 0,
            "different": True,
            "equal": True,
            "moved_by_torch": 12,
        }


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_a_checkpoint_is_read_by_another_number_of_ranks(tmp_path, before, after):
    code = """
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
dist.init_process_group("cpu:gloo,acc:acc")
def make(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    fully_shard(net, mesh=init_device_mesh(DEVICE, (WORLD,)))
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)
def step(net, optimizer, seed):
    optimizer.zero_grad()
    torch.manual_seed(seed)
    net(torch.randn(4, 8).to(device)).square().mean().backward()
    optimizer.step()
def total(net):
    return [float(p.full_tensor().double().sum().cpu()) for p in net.parameters()]
"""
    write = f"""
net, optimizer = make(0)
step(net, optimizer, 1)
model, state = get_state_dict(net, optimizer)
dcp.save({{"model": model, "optimizer": state}}, checkpoint_id={str(tmp_path)!r})
step(net, optimizer, 2)
report(total=total(net))
"""
    read = f"""
net, optimizer = make(5)
model, state = get_state_dict(net, optimizer)
dcp.load({{"model": model, "optimizer": state}}, checkpoint_id={str(tmp_path)!r})
set_state_dict(net, optimizer, model_state_dict=model, optim_state_dict=state)
step(net, optimizer, 2)
report(total=total(net))
"""
    written = one(code + write, before)[0].reports["total"]
    for rank in one(code + read, after):
        assert rank.reports["total"] == pytest.approx(written, rel=1e-5)


def test_functional_collectives_and_a_work_that_nobody_waits_for():
    code = """
import gc
import torch.distributed._functional_collectives as fc
dist.init_process_group("acc")
x = torch.ones(4, device=device) * (RANK + 1)
y = fc.all_reduce(x, "sum", dist.group.WORLD)
z = fc.all_gather_tensor(x, 0, dist.group.WORLD)
w = fc.reduce_scatter_tensor(z, "sum", 0, dist.group.WORLD)
dist.all_reduce(torch.ones(1000, device=device), async_op=True)  # and nobody has the tensor
gc.collect()
late = torch.ones(3, device=device)
work = dist.all_reduce(late, async_op=True)
report(y=y.cpu().tolist(), z=z.cpu().tolist(), w=w.cpu().tolist(), late=late.cpu().tolist(),
       done=work.is_completed(), success=work.is_success())
"""
    for number, rank in enumerate(one(code)):
        found = rank.reports
        assert found["y"] == [3.0] * 4
        assert found["z"] == [1.0] * 4 + [2.0] * 4
        assert found["w"] == [2.0 * (number + 1)] * 4
        assert found["late"] == [2.0] * 3
        assert found["done"] and found["success"]


def test_collectives_in_inference_mode():
    """Threads that are in no such mode copy some of the results."""
    code = """
dist.init_process_group("acc")
other = 1 - RANK
def results():
    def made(size=2):
        return torch.empty(size, device=device)
    x = torch.arange(4.0, device=device) + 10 * RANK
    parts, listed, scattered = list(x.chunk(2)), made(), made()
    exchanged, gathered = [made(), made()], [made(4), made(4)]
    dist.reduce_scatter_tensor(scattered, x)
    dist.reduce_scatter(listed, parts)
    dist.all_to_all(exchanged, parts)
    dist.all_gather(gathered, x)
    mean = x.clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    received, own = made(4), made(4)
    for rank, to in ((other, received), (RANK, own)):
        dist.isend(x, rank)
        dist.recv(to, rank)
    return [t.tolist() for t in (scattered, listed, *exchanged, *gathered, mean, received, own)]
plain = results()
with torch.inference_mode():
    report(plain=plain, inferred=refused(lambda: report(found=results())))
report(after=results())
"""
    for number, rank in enumerate(one(code)):
        found = rank.reports
        assert found["inferred"] == "accepted"
        assert found["plain"] == found["found"] == found["after"]
        assert found["plain"][:2] == [[10 + 4 * number, 12 + 4 * number]] * 2


def test_distributed_autograd_and_the_optimizer_of_its_parameters():
    code = """
from torch.distributed import autograd, rpc
from torch.distributed.optim import DistributedOptimizer
from tests.distributed.models import Remote
rpc.init_rpc(f"rank{RANK}", rank=RANK, world_size=WORLD)
def run(kind, optimizer):
    first, second = rpc.remote("rank1", Remote, args=(kind,)), rpc.RRef(Remote(kind))
    parameters = [*first.rpc_sync().parameters(), *second.rpc_sync().parameters()]
    optimizer = DistributedOptimizer(optimizer, parameters, lr=0.05)
    losses = []
    for i in range(4):
        with autograd.context() as step:
            y = first.rpc_sync().forward(torch.full((2, 3), float(i)))
            loss = second.rpc_sync().forward(y).square().sum()
            autograd.backward(step, [loss])
            optimizer.step(step)
        losses.append(loss.item())
    return [*losses, first.rpc_sync().total(), second.rpc_sync().total()]
if RANK == 0:
    for optimizer in (torch.optim.SGD, torch.optim.AdamW):
        report(**{optimizer.__name__: [run(kind, optimizer) for kind in ("cpu", DEVICE)]})
rpc.shutdown()
"""
    first, _ = run_to_end(BEGIN + code, 2)
    for name in ("SGD", "AdamW"):
        expected, found = first.reports[name]
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_collectives_of_a_group_that_this_rank_is_not_in_do_nothing():
    code = """
import warnings
warnings.simplefilter("ignore")  # torch says so too
dist.init_process_group("acc")
some = dist.new_group([1])
x = torch.full((3,), float(RANK + 1), device=device)
dist.all_reduce(x, group=some)
dist.broadcast(x, 1, group=some)
dist.barrier(group=some)
report(
    size=dist.get_world_size(some),
    source=refused(lambda: dist.broadcast(x, 0, group=some)) if RANK == 1 else None,
    member=refused(lambda: dist.new_group([0, 5])),
)
dist.all_reduce(x)  # everybody is still together
report(x=x.tolist())
"""
    for number, rank in enumerate(one(code)):
        assert rank.reports["size"] == (1 if number == 1 else -1)
        assert rank.reports["x"] == [3.0] * 3
        assert number == 0 or rank.reports["source"].startswith("ValueError")
        assert "5" in rank.reports["member"] or "rank" in rank.reports["member"]


def test_a_collective_in_the_middle_of_what_is_differentiated():
    """As for other devices: backward warns that it does not know the collective, and goes on."""
    code = """
dist.init_process_group("cpu:gloo,acc:acc")
found = []
for kind in ("cpu", device):
    p = torch.ones(4, device=kind, requires_grad=True)
    loss = (p * (RANK + 1.0)).sum()
    dist.all_reduce(loss)
    (loss / WORLD).backward()
    q = p * (RANK + 3.0)
    dist.broadcast(q, 1)
    q.sum().backward()
    found.append([loss.item(), q.tolist(), p.grad.tolist()])
report(found=found)
"""
    for rank in one(code):
        cpu, acc = rank.reports["found"]
        assert acc == cpu


@pytest.mark.parametrize("mode", ["nograph", "nofuse", "eager"] if helpers.FULL else ["eager"])
def test_every_mode_trains_alike(mode):
    code = """
dist.init_process_group("cpu:gloo,acc:acc")
found = train(None)
report(equal=equal_on_all_ranks(found), total=float(sum(t.double().sum() for t in found)))
"""
    totals = [
        run_to_end(BEGIN + code + END, 2, ACC_MODE=each)[0].reports["total"]
        for each in ("full", mode)
    ]
    assert totals[1] == pytest.approx(totals[0], rel=1e-5)


def test_a_group_that_is_destroyed_has_no_thread_left():
    """One that gives a tensor of Python's back while the interpreter ends, ends the process."""
    code = """
import contextlib, time
def transports():
    names = []
    for each in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            names.append(open(f"/proc/self/task/{each}/comm").read())
    return names.count("pt_gloo_runloop\\n")
dist.init_process_group("cpu:gloo,acc:acc")
train(None)
before = transports()
dist.destroy_process_group()
until = time.monotonic() + 60  # one that has been joined may be listed for a moment
while transports() and time.monotonic() < until:
    time.sleep(0.01)
report(before=before, after=transports())
"""
    # Not a child of the template, which has imported everything before there is a group.
    for rank in run_to_end(BEGIN + code, 2, PYTHONHASHSEED="0"):
        assert rank.reports["before"] > 0 and rank.reports["after"] == 0
