"""Processes that were forked: what works there, and a clear error for what cannot."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.helpers import extension, run_python

pytestmark = pytest.mark.usefixtures("acc_only")


class Squares(Dataset):
    """Draws and computes on the CPU in each worker."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.manual_seed(index)
        assert torch.acc._is_in_bad_fork()
        return torch.tensor(float(index)) ** 2 + 0 * torch.rand(())


def test_loader_workers_run_after_the_device_was_used() -> None:
    x = torch.ones(2, device="acc") + 1
    assert x.tolist() == [2.0, 2.0]
    pending = torch.ones(3, device="acc") * 5  # goes into the children unsubmitted
    loader = DataLoader(Squares(), batch_size=4, num_workers=2, multiprocessing_context="fork")
    values = [v for batch in loader for v in batch.to("acc").tolist()]
    assert values == [float(i * i) for i in range(12)]
    assert pending.tolist() == [5.0] * 3
    assert not torch.acc._is_in_bad_fork()


def in_child(target: Any) -> str:
    """What `target` returns, or the text of what it raises, in a forked child."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        try:
            text = str(target())
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        sender.send(text)
        sender.close()
        os._exit(0)

    process = context.Process(target=run)
    process.start()
    try:
        assert receiver.poll(60), "the child hangs"
        return receiver.recv()
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()


USES = {
    "factory": lambda: torch.ones(2, device="acc"),
    "copy": lambda: torch.ones(2).to("acc"),
    "empty": lambda: torch.empty(2, device="acc"),
    "synchronize": lambda: torch.acc.synchronize(),
    "init": lambda: torch.acc.init(),
    "generator": lambda: torch.Generator("acc"),
    "event": lambda: torch.acc.Event().record(),
    "stream": lambda: torch.acc.Stream(),
    "memory": lambda: torch.acc.memory_allocated(),
    "pin": lambda: torch.ones(2).pin_memory(),
}


@pytest.mark.parametrize("use", USES)
def test_using_the_device_in_a_late_fork_is_a_clear_error(use: str) -> None:
    torch.ones(1, device="acc").item()
    text = in_child(USES[use])
    assert text.startswith("RuntimeError"), text
    assert "forked after its parent had used it" in text and "spawn" in text


def test_using_a_tensor_of_the_parent_is_a_clear_error() -> None:
    x = torch.ones(3, device="acc")
    for use in (lambda: x + 1, lambda: x.add_(1), lambda: x.cpu(), lambda: x.sum().item()):
        assert "forked after its parent had used it" in in_child(use)
    assert (x + 1).tolist() == [2.0] * 3


def test_the_cpu_works_in_a_late_fork() -> None:
    torch.ones(1, device="acc").item()

    def work() -> list[float]:
        torch.manual_seed(3)
        assert torch.acc._is_in_bad_fork() and not torch.acc.is_initialized()
        return (torch.ones(2) * 2).tolist()

    assert in_child(work) == "[2.0, 2.0]"


def test_training_on_the_cpu_works_in_a_late_fork() -> None:
    torch.ones(1, device="acc").item()

    def work() -> list[float]:
        w = torch.nn.Parameter(torch.ones(2))
        w.grad = torch.ones(2)
        torch.optim.SGD([w], lr=0.25).step()
        return w.tolist()

    assert in_child(work) == "[0.75, 0.75]"


def test_tensors_of_the_parent_may_die_in_the_child() -> None:
    kept = [torch.ones(100, device="acc") for _ in range(10)]
    event = torch.acc.Event()
    event.record()
    holder = [kept, event]

    def drop() -> str:
        holder.clear()
        return "dropped"

    del kept, event
    assert in_child(drop) == "dropped"
    assert holder[0][0].sum().item() == 100.0


def test_batches_of_the_parent_may_die_in_the_child() -> None:
    """On a GPU their memory is known to two streams."""
    holder = [torch.ones(100).to("acc")]
    torch.acc.synchronize()

    def drop() -> str:
        holder.clear()
        return "dropped"

    assert in_child(drop) == "dropped"
    assert holder[0].sum().item() == 100.0


EARLY = """
import os
torch.manual_seed(3)
assert not torch.acc.is_initialized()
child = os.fork()
if child == 0:
    assert not torch.acc._is_in_bad_fork()
    again = torch.Generator("acc").manual_seed(3)
    drawn = torch.rand(4, device="acc")
    ok = drawn.equal(torch.rand(4, device="acc", generator=again))
    ok &= (torch.ones(2, device="acc") + 1).tolist() == [2.0, 2.0]
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert (torch.ones(2, device="acc") + 2).tolist() == [3.0, 3.0]
print("both")
"""


def test_a_fork_before_the_first_use_works_on_both_sides() -> None:
    # Who insists on CUDA has its driver asked at import.
    assert "both" in run_python(EARLY, ACC_EXECUTOR=None).stdout


SPAWNED = "print((torch.ones(2, device='acc') + 1).sum().item())"


def test_a_spawned_process_works() -> None:
    torch.ones(1, device="acc").item()
    assert run_python(SPAWNED, fresh=True).stdout == "4.0\n"


def test_a_child_forked_with_work_pending_ends() -> None:
    """At its exit it does not run its parent's work, for which it has no threads."""
    code = """
import os, sys, time
x = torch.ones(256, 256, device=DEVICE)
(x @ x).sum().item()
pending = x @ x
child = os.fork()
if child == 0:
    sys.exit(0)
for _ in range(300):
    done, status = os.waitpid(child, os.WNOHANG)
    if done:
        break
    time.sleep(0.1)
else:
    os.kill(child, 9)
assert done and status == 0, (done, status)
assert pending[0, 0].item() == 256.0
"""
    run_python(code)


FORK_WHILE_A_COMPILER_WORKS = """
import os, sys, time
from pathlib import Path
from tests import helpers

def training():
    net = helpers.small_net(DEVICE)
    opt = torch.optim.SGD(net.parameters(), lr=0.05)
    x = torch.ones(6, 4, device=DEVICE)
    while True:
        opt.zero_grad()
        loss = ((net(x) - 1) ** 2).mean()
        loss.backward()
        opt.step()
        yield loss.item()

folder = Path(os.environ["ACC_CACHE_DIR"]).parent
steps = training()
losses = [next(steps) for _ in range(3)]
while not (folder / "started").exists():
    time.sleep(0.01)
child = os.fork()
if child == 0:
    sys.exit((torch.ones(2) * 2).tolist() != [2.0, 2.0])
assert os.waitpid(child, 0)[1] == 0
assert helpers.stats()["kernel_launches"] == 0
(folder / "go").touch()
while helpers.stats()["kernel_launches"] == 0:
    losses.append(next(steps))
    time.sleep(0.01)
assert losses[-1] < losses[2] < losses[0], losses
"""


def test_training_goes_on_after_a_fork_while_a_compiler_works(tmp_path: Path) -> None:
    """The child, which computes on the CPU and ends, takes no compiler away from its parent."""
    if extension().executor_name() != "host":
        pytest.skip("the compiler that waits here is the host's")
    (tmp_path / "cache").mkdir(mode=0o700)
    compiler = tmp_path / "compiler"
    compiler.write_text(
        '#!/bin/sh\ncase "$*" in *version*) exec g++ "$@" ;; esac\n'
        f"touch {tmp_path}/started; until [ -e {tmp_path}/go ]; do sleep 0.01; done\n"
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    done = run_python(
        FORK_WHILE_A_COMPILER_WORKS,
        ACC_CACHE_DIR=str(tmp_path / "cache"),
        ACC_CXX=str(compiler),
        ACC_MODE="full",
        ACC_DETERMINISTIC="0",
    )
    # Python 3.12 itself warns of a fork beside threads.
    warned = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert all("use of fork() may lead to deadlocks" in line for line in warned), done.stderr


def test_a_forked_child_leaves_its_parents_group_alone() -> None:
    code = """
import os, torch, torchacc
model = torchacc.accelerate(torch.nn.Linear(2, 2))
model(torch.ones(1, 2, device=model.device)).sum().item()
torch.distributed.all_reduce(torch.ones(2, device=model.device))
if os.fork() == 0:
    import atexit
    atexit._run_exitfuncs()
    assert torch.distributed.is_initialized()
    os._exit(0)  # a child that drops a group of Gloo's waits for its threads, on every device
_, status = os.wait()
print(status, model(torch.ones(1, 2, device=model.device)).shape)
"""
    done = run_python(code, fresh=True)
    assert done.stdout.strip() == "0 torch.Size([1, 2])"
    assert "left with an error" not in done.stderr and "destroyed" not in done.stderr
