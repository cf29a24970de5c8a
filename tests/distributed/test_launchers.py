"""`xlarun` and TI-ACC's launcher start what torchrun starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import helpers

SCRIPT = """
import json, os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LIGHT_2D_ALLREDUCE")
found = {name: os.environ.get(name) for name in names}
found["arguments"] = sys.argv[1:]
with open(os.path.join(os.environ["FOUND"], found["RANK"]), "w") as file:
    json.dump(found, file)
sys.exit(int(os.environ.get("STATUS", "0")))
"""
XLARUN = ("-c", "from tiacc_training.launcher import xlarun; xlarun()")
TIACC = ("-m", "tiacc_training.torch.distributed.launch")


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
        timeout=120,
        check=False,
    )


def found(folder: Path, ranks: int) -> list[dict]:
    return [json.loads((folder / str(rank)).read_text()) for rank in range(ranks)]


@pytest.mark.parametrize(
    ("launcher", "arguments"),
    [
        (XLARUN, ["--fp16"]),
        (TIACC, ["--local_rank={}", "--fp16"]),
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


@pytest.mark.parametrize("launcher", [XLARUN, TIACC] if helpers.FULL else [TIACC])
def test_the_failure_of_the_program_is_that_of_the_launcher(tmp_path, launcher):
    options = ("--standalone", "--nproc_per_node=1", "script.py")
    done = launch(tmp_path, *launcher, *options, STATUS="3")
    assert done.returncode != 0
    assert "exitcode  : 3" in done.stderr


@pytest.mark.parametrize("launcher", [XLARUN, TIACC])
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
