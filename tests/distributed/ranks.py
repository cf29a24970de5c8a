"""Runs code in several processes with torchrun's environment, and collects what each reported.

The store at which they meet is here, on a port that the system chose.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests import helpers
from tests.template import Template

_PRELUDE = """
import json, os, sys
import torch
import torch.distributed as dist
from tests.helpers import DEVICE, load_device
load_device()
torch._C._set_print_stack_traces_on_fatal_signal(True)
RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
def report(**values):
    with open(os.environ["REPORTS"] + f"/{RANK}", "a") as file:
        file.write(json.dumps(values) + "\\n")
def refused(function):
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"
"""
# The end of a rank but for the interpreter's own and the destructors of torch's libraries, 0.17 s
# of a core, where it has come to the end of its code: with an error it ends as processes do.
_SHORT_END = """
import atexit
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""

# A group for tensors of both devices, and the rank's own device; and the end of it.
GROUP = """
dist.init_process_group("cpu:gloo,acc:acc")
torch.acc.set_device(RANK % torch.acc.device_count())
device = torch.device(DEVICE, torch.acc.current_device())
"""
LEAVE = """
dist.destroy_process_group()
"""


@dataclass(frozen=True)
class Rank:
    """One process after its end: its exit status, what it printed and what it reported."""

    status: int | None  # None: it was killed for being late
    stdout: str
    stderr: str
    reports: dict[str, Any]


# To import them takes as long as torch itself.
_MODULES = (
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
)


@functools.cache
def _template() -> Template:
    return Template(helpers.child_env(OMP_NUM_THREADS="1"), str(helpers.ROOT), _MODULES)


def run_ranks(
    code: str,
    ranks: int,
    *,
    timeout: float = 240,
    check: bool = True,
    whole_end: bool = helpers.FULL,
    **env: str | None,
) -> list[Rank]:
    """Runs `code` in `ranks` processes; it finds RANK, WORLD, DEVICE, dist and report(**values).

    With `check` a status other than 0 of any fails the test with the output of the first such.
    Processes that have not ended after `timeout` seconds are killed, and the test fails.
    Without `whole_end` what `atexit` knows is the last that a process does.
    """
    program = _PRELUDE + code + ("" if whole_end else _SHORT_END)
    _template()  # before the threads ask for it: each would make one
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(ranks) as pool:
        running = [
            pool.submit(_run, program, _environment(rank, ranks, store.port, folder, env), timeout)
            for rank in range(ranks)
        ]
        done = [
            _collect(process.result(), Path(folder), rank) for rank, process in enumerate(running)
        ]
    late = [rank for rank, each in enumerate(done) if each.status is None]
    assert not late, f"after {timeout} s still running: processes {late}\n{_texts(done)}"
    failed = [rank for rank, each in enumerate(done) if each.status != 0]
    assert not (check and failed), f"processes {failed} failed\n{_texts(done)}"
    return done


def _environment(
    rank: int, ranks: int, port: int, folder: str, env: dict[str, str | None]
) -> dict[str, str]:
    changes: dict[str, str | None] = {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "REPORTS": folder,
        **env,
    }
    return helpers.child_env(**changes)


# For tests of groups and of how they end: the libraries' threads and objects end, too.
run_to_end = functools.partial(run_ranks, whole_end=True)


def _run(
    program: str, env: dict[str, str], timeout: float
) -> subprocess.CompletedProcess[str] | subprocess.TimeoutExpired:
    """Forked from the template, unless what its environment says is read when torch is imported."""
    try:
        if _template().can_run(env):
            return _template().run(program, env, timeout)
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command,
            cwd=helpers.ROOT,
            env=env,
            timeout=timeout,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return late


def _collect(
    process: subprocess.CompletedProcess[str] | subprocess.TimeoutExpired, folder: Path, rank: int
) -> Rank:
    reports: dict[str, Any] = {}
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / str(rank)).read_text().splitlines():
            reports |= json.loads(line)
    status = None if isinstance(process, subprocess.TimeoutExpired) else process.returncode
    texts = [
        text.decode() if isinstance(text, bytes) else text or ""
        for text in (process.stdout, process.stderr)
    ]
    return Rank(status, texts[0], texts[1], reports)


def _texts(done: list[Rank]) -> str:
    return "\n".join(
        f"--- process {rank}, status {each.status}\n{each.stdout[-1500:]}\n{_ends(each.stderr)}"
        for rank, each in enumerate(done)
        if each.status != 0
    )


def _ends(text: str, most: int = 8000) -> str:
    """Where a long text begins and where it ends: the thread that crashed comes first."""
    return text if len(text) <= most else f"{text[: most // 2]}\n...\n{text[-most // 2 :]}"
