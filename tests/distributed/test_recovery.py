"""A store that is lost, and a training that torchrun starts again from its checkpoint."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests import helpers
from tests.distributed import models
from tests.distributed.ranks import run_to_end
from tests.distributed.test_faults import BEGIN, END

pytestmark = pytest.mark.usefixtures("acc_only")

TRAIN = """
model = DistributedDataParallel(nn.Linear(8, 8).to(device))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train(steps, at=lambda i: None):
    for i in range(steps):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 8, device=device)).square().mean()
        loss.backward()
        at(i)
        optimizer.step()
        loss.item()
"""


def free_port() -> int:
    """Below those that the system gives to connections: it is free until it is used."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


@contextlib.contextmanager
def kept_store() -> Iterator[tuple[int, int]]:
    """The process that keeps a store, and the store's port."""
    keep = (
        "import time, torch.distributed as dist; "
        "store = dist.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False); "
        "print(store.port, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", keep],
        stdout=subprocess.PIPE,
        text=True,
        env=helpers.child_env(TORCH_DEVICE_BACKEND_AUTOLOAD="0"),
    ) as keeper:
        try:
            yield keeper.pid, int(keeper.stdout.readline())
        finally:
            keeper.kill()


def test_a_store_that_dies_with_its_rank():
    """Rank 0 keeps the store, as with torchrun's variables set by hand."""
    code = """
def die(i):
    if RANK == 0 and i == 50:
        os.kill(os.getpid(), signal.SIGKILL)
heard(lambda: train(400, die))
"""
    alone = {"TORCHELASTIC_USE_AGENT_STORE": None, "MASTER_PORT": str(free_port())}
    first, *others = run_to_end(BEGIN + TRAIN + code + END, 3, check=False, **alone)
    assert first.status == -9
    for rank in others:
        assert rank.reports["kind"] == "DistBackendError"
        assert rank.reports["seconds"] < 18
        text = rank.reports["text"]
        assert "all_reduce of 72 Float" in text
        assert "store does not answer, so the process that keeps it, rank 0" in text
        assert "frame #" not in text


def test_training_goes_on_without_its_store():
    code = """
def lose(i):
    if RANK == 0 and i == 10:
        os.kill(KEEPER, signal.SIGKILL)
heard(lambda: train(20, lose))
time.sleep(2)
heard(lambda: train(20))
x = torch.ones(4, device=device)
work = dist.all_reduce(x, async_op=True)
time.sleep(0.5)
while not work.is_completed():
    time.sleep(0.01)
report(alone=work.is_success() and x.tolist() == [2] * 4)
report(weight=model.module.weight.sum().item())
began = time.monotonic()
try:
    dist.new_group([0, 1])
except Exception as error:
    report(group=str(error), after=time.monotonic() - began)
"""
    with kept_store() as (keeper, port):
        program = f"KEEPER = {keeper}\n" + BEGIN + TRAIN + code + END
        first, second = run_to_end(program, 2, MASTER_PORT=str(port))
    assert first.reports["weight"] == second.reports["weight"]
    for rank in (first, second):
        assert rank.reports["text"] == "" and rank.reports["alone"]
        assert "the store of a process group does not answer" in rank.stderr
        assert rank.reports["group"] and rank.reports["after"] < 18


def test_a_store_that_hangs_keeps_nobody_longer_than_the_timeout():
    """It is there, and does not answer: training goes on, and a rank that is late is an error."""
    code = """
def hang(i):
    if RANK == 0 and i == 3:
        os.kill(KEEPER, signal.SIGSTOP)
heard(lambda: train(10, hang))
x = torch.ones(4, device=device)
if RANK == 1:
    time.sleep(TIMEOUT + 4)
    os._exit(0)
heard(lambda: (dist.all_reduce(x), x.sum().item()))
"""
    with kept_store() as (keeper, port):
        program = f"KEEPER = {keeper}\n" + BEGIN.replace("TIMEOUT = 50", "TIMEOUT = 4") + TRAIN
        first, second = run_to_end(program + code + END, 2, MASTER_PORT=str(port))
    assert second.reports["text"] == "" and second.reports["seconds"] < 10
    assert first.reports["kind"] == "DistBackendError"
    assert first.reports["seconds"] < 14
    assert "in collective number" in first.reports["text"]
    assert "the group's store does not answer" in first.reports["text"]


def test_a_failure_is_told_as_soon_as_a_silent_store_answers_again():
    code = """
if RANK == 0:
    train(3)
    os.kill(KEEPER, signal.SIGSTOP)
    time.sleep(1)
    def wrong():
        table = torch.ones(10, device=device)
        bad = torch.index_select(table, 0, torch.tensor([50], device=device))
        dist.all_reduce(torch.ones(4, device=device))  # it never begins this one
        bad.sum().item()
    heard(wrong)
    os.kill(KEEPER, signal.SIGCONT)
    while not os.path.exists(os.environ["REPORTS"] + "/1"):
        time.sleep(0.05)  # it does not end: that would tell the others
else:
    train(3)
    x = torch.ones(4, device=device)
    heard(lambda: (dist.all_reduce(x), x.sum().item()))
"""
    with kept_store() as (keeper, port):
        program = f"KEEPER = {keeper}\n" + BEGIN.replace("TIMEOUT = 50", "TIMEOUT = 30") + TRAIN
        end = "os._exit(0)\n"
        first, second = run_to_end(program + code + end, 2, MASTER_PORT=str(port))
    assert first.reports["kind"] == "IndexError"
    assert second.reports["kind"] == "DistBackendError"
    assert "rank 0 failed: [aten::index_select] failed" in second.reports["text"]
    assert second.reports["seconds"] < 30  # the timeout


ELASTIC = """
import json, os, signal, sys
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tests.distributed import models
from tests.helpers import DEVICE, load_device
load_device()
folder, dies = sys.argv[1], int(sys.argv[2])
dist.init_process_group("acc")
rank, world = dist.get_rank(), dist.get_world_size()
torch.acc.set_device(int(os.environ["LOCAL_RANK"]))
device = torch.device(DEVICE, torch.acc.current_device())
model = DistributedDataParallel(models.made(rank).to(device))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
begin, losses, file = 0, [], os.path.join(folder, "checkpoint")
if os.path.exists(file):
    saved = torch.load(file, map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    begin, losses = saved["step"], saved["losses"]
for i, (x, y) in list(enumerate(models.data()))[begin:]:
    x, y = (models.part(t, rank, world).to(device) for t in (x, y))
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    if rank == 1 and i == dies and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    losses.append(mean.item())
    if rank == 0 and i % 2 == 1:
        saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                 "step": i + 1, "losses": losses}
        torch.save(saved, file + ".new")
        os.replace(file + ".new", file)
if rank == 0:
    with open(os.path.join(folder, "done"), "w") as out:
        json.dump({"losses": losses, "began": begin}, out)
dist.destroy_process_group()
"""


def test_torchrun_starts_again_from_the_checkpoint(tmp_path):
    (tmp_path / "script.py").write_text(ELASTIC)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"),
            *("--nproc_per_node=2", str(tmp_path / "script.py"), str(tmp_path), "5"),
        ],
        cwd=helpers.ROOT,
        env=helpers.child_env(OMP_NUM_THREADS="1", PYTHONPATH=str(helpers.ROOT)),
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "done").read_text())
    assert found["began"] == 4  # the step that had not been saved is done again
    losses, _ = models.alone()
    torch.testing.assert_close(
        torch.tensor(found["losses"]), torch.tensor(losses), rtol=1e-5, atol=1e-5
    )
