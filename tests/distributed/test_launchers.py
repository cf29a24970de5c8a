"""`xlarun` and TI-ACC's launcher start what torchrun starts."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import helpers
from tests.distributed.test_recovery import free_port

SCRIPT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LIGHT_2D_ALLREDUCE")
found = {name: os.environ.get(name) for name in names}
found["arguments"] = sys.argv[1:]
with open(os.path.join(os.environ["FOUND"], found["RANK"]), "w") as file:
    json.dump(found, file)
sys.exit(int(os.environ.get("STATUS", "0")))
"""
TORCHRUN = ("-m", "torch.distributed.run")
XLARUN = ("-c", "from tiacc_training.launcher import xlarun; xlarun()")
TIACC = ("-m", "tiacc_training.torch.distributed.launch")
TIACC_2 = ("-m", "tiacc_training.distributed.launch")


def launch(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a launcher with the arguments after it, which name `script.py` somewhere."""
    (folder / "script.py").write_text(SCRIPT)
    environ = helpers.child_env(
        **{"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", **env}, FOUND=str(folder), OMP_NUM_THREADS="1"
    )
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def found(folder: Path, ranks: int) -> list[dict]:
    return [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("launcher", "arguments"),
    [
        (XLARUN, ["--fp16"]),
        (TIACC, ["--local_rank={}", "--fp16"]),
        (TIACC_2, ["--local_rank={}", "--fp16"]),
    ],
)
def test_a_launcher_starts_the_program_once_for_each_rank(tmp_path, launcher, arguments):
    options = ("--standalone", "--nproc_per_node=2", "script.py", "--fp16")
    done = launch(tmp_path, *launcher, *options, LIGHT_2D_ALLREDUCE="1")
    assert done.returncode == 0, done.stderr
    assert found(tmp_path, 2) == [
        {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LIGHT_2D_ALLREDUCE": "1",
            "arguments": [text.format(rank) for text in arguments],
        }
        for rank in range(2)
    ]


def test_the_arguments_of_tiacc(tmp_path):
    """As its document calls it, for one machine."""
    done = launch(
        tmp_path,
        *("-u", *TIACC, "--nproc_per_node", "1", "--nnodes", "1", "--node_rank", "0"),
        *("--master_addr", "127.0.0.1", "--master_port", "0", "script.py"),
    )
    assert done.returncode == 0, done.stderr
    assert found(tmp_path, 1)[0]["arguments"] == ["--local_rank=0"]


def test_a_script_for_cuda_gets_its_argument_behind_its_name(tmp_path):
    """`-m torchacc run script.py` is what runs it; the argument used to end up before `run`."""
    options = ("--standalone", "--nproc_per_node=1", "-m", "torchacc", "run", "script.py", "--fp16")
    done = launch(tmp_path, *TIACC, *options, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert done.returncode == 0, done.stderr
    assert found(tmp_path, 1)[0]["arguments"] == ["--local_rank=0", "--fp16"]


@pytest.mark.parametrize("launcher", [XLARUN, TIACC] if helpers.FULL else [TIACC])
def test_the_failure_of_the_program_is_that_of_the_launcher(tmp_path, launcher):
    options = ("--standalone", "--nproc_per_node=1", "script.py")
    done = launch(tmp_path, *launcher, *options, STATUS="3")
    assert done.returncode != 0
    assert "exitcode  : 3" in done.stderr


@pytest.mark.parametrize("launcher", [XLARUN, TIACC, TIACC_2])
def test_a_launcher_without_a_program_says_how_it_is_used(tmp_path, launcher):
    done = launch(tmp_path, *launcher)
    assert done.returncode == 2
    assert "usage:" in done.stderr and "training_script" in done.stderr


PLAIN = """
import json, os
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("acc")
device = torch.device("acc", int(os.environ["LOCAL_RANK"]))
model = DistributedDataParallel(nn.Linear(4, 4).to(device))
model(torch.ones(2, 4, device=device)).sum().backward()
with open(os.path.join(os.environ["FOUND"], os.environ["RANK"]), "w") as file:
    json.dump([str(hook[1]) for hook in model._comm_hooks], file)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("switch", ["0", "1"] if helpers.FULL else ["1"])
def test_a_program_without_accelerate_follows_the_switches(tmp_path, switch):
    (tmp_path / "plain.py").write_text(PLAIN)
    done = launch(
        tmp_path,
        *(*TIACC, "--use_env", "--standalone", "--nproc_per_node=2", "plain.py"),
        LIGHT_2D_ALLREDUCE=switch,
        TORCH_DEVICE_BACKEND_AUTOLOAD="1",
    )
    assert done.returncode == 0, done.stderr
    said = ["all-reduce over 1 machines of 2 processes"] if switch == "1" else []
    assert found(tmp_path, 2) == [said, said]


NODES = """
import json, os
import torch
import torch.distributed as dist
import torchacc
from torchacc.dist import Mesh, comm
model = torchacc.accelerate(torch.nn.Linear(4, 1, bias=False))
rank, world = dist.get_rank(), dist.get_world_size()
x = torch.tensor([float(rank)], device=model.device)
model(x.expand(2, 4)).sum().backward()
dist.all_reduce(x)
mesh = Mesh(dp_num=2, tp_num=2)
row = torch.tensor([float(rank)], device=model.device)
dist.all_reduce(row, group=mesh.get_tp_proc_group())
found = {
    "node": os.environ["GROUP_RANK"],
    "device": model.device.index,
    "ranks": [rank, world, torchacc.dist.local_rank()],
    "sum": x.item(),
    "gradient": model.weight.grad.tolist(),
    "inside": comm.processes_inside(range(world), None),
    "tp": [mesh.get_tp_rank_groups(), mesh.get_dp_rank_groups(), row.item()],
}
with open(os.path.join(os.environ["FOUND"], str(rank)), "w") as file:
    json.dump(found, file)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("launcher", [TORCHRUN, TIACC])
def test_the_launchers_of_two_machines_start_one_training(tmp_path, launcher):
    """On this one, whose devices both use."""
    (tmp_path / "nodes.py").write_text(NODES)
    options = ("--nnodes=2", "--nproc_per_node=2", "--master_addr=127.0.0.1")
    port = f"--master_port={free_port()}"

    def start(node: int) -> subprocess.CompletedProcess[str]:
        return launch(
            tmp_path,
            *(*launcher, *options, port, f"--node_rank={node}", "nodes.py"),
            LIGHT_2D_ALLREDUCE="1",
            TORCH_DEVICE_BACKEND_AUTOLOAD="1",
        )

    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(start, range(2)))
    for each in done:
        assert each.returncode == 0, each.stderr
    assert found(tmp_path, 4) == [
        {
            "node": str(rank // 2),
            "device": rank % 2,
            "ranks": [rank, 4, rank % 2],
            "sum": 6.0,
            "gradient": [[3.0] * 4],  # 2 rows of its rank's number, averaged
            "inside": 2,
            "tp": [[[0, 1], [2, 3]], [[0, 2], [1, 3]], 1.0 + 4 * (rank // 2)],
        }
        for rank in range(4)
    ]
    assert "all-reduce over 2 machines of 2 processes" in done[0].stderr
