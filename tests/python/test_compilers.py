"""Training goes on, unfused, where kernels cannot be compiled or kept; it says so once.

With ACC_TEST_FULL=1 also in cases much like others, and of failures that
tests/cpp/test_compile.cpp has, too.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only")
full_only = pytest.mark.skipif(
    not helpers.FULL,
    reason="with ACC_TEST_FULL=1: one like it, or tests/cpp/test_compile.cpp, runs",
)

TRAINING = """
import json
from tests import helpers
net = helpers.small_net(DEVICE)
opt = torch.optim.AdamW(net.parameters(), lr=0.01)
x = torch.ones(6, 4, device=DEVICE)
losses = []
for step in range(6):
    opt.zero_grad()
    loss = ((net(x) - 1) ** 2).mean()
    loss.backward()
    opt.step()
    losses.append(loss.item())
for _ in range(3):
    y = -(x * 2 + 1) - x
helpers.synchronize()
print(json.dumps([losses, helpers.stats()["kernel_launches"]]))
"""


def broken_compiler(path: Path, text: str) -> str:
    """A program that says its version as g++ does, and otherwise does what a line of shell says."""
    path.write_text(f'#!/bin/sh\ncase "$*" in *version*) exec g++ "$@" ;; esac\n{text}\n')
    path.chmod(0o755)
    return str(path)


def train(
    cache: Path | str, *, fresh: bool = False, **env: str
) -> tuple[list[float], int, list[str]]:
    """Losses, launches of kernels and warnings of a process with kernels of the directory `cache`.

    `fresh`: it shares nothing with others; keys of kernels must not depend on hashes or addresses.
    """
    done = helpers.run_python(
        TRAINING, fresh=fresh, ACC_CACHE_DIR=str(cache), ACC_MODE="full", **env
    )
    losses, launches = json.loads(done.stdout.splitlines()[-1])
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == len(losses)
    return losses, launches, [line for line in done.stderr.splitlines() if "Warning" in line]


def _some(cases: Iterable[Any], *always: Any) -> list[Any]:
    """Cases of which only those of `always` run without ACC_TEST_FULL=1."""
    return [pytest.param(case, marks=() if case in always else full_only) for case in cases]


def private(folder: Path) -> Path:
    folder.chmod(0o700)
    return folder


COMPILERS = {
    "missing": (None, "/nonexistent"),
    "fails": ("echo no such option >&2; exit 1", "no such option"),
    "hangs": ("sleep 600", "took longer than 1 s"),
    "makes nothing": ("exit 0", "succeeded without a result"),
    "makes rubbish": (
        'while [ "$1" != -o ]; do shift; done; echo rubbish > "$2"',
        "is no whole library",
    ),
    "is killed": ("kill -9 $$", "ended by signal 9"),
}


@full_only
def test_a_processor_that_the_compiler_does_not_know(tmp_path):
    """Kernels are made for what every processor of this kind has."""
    unknown = 'case "$*" in *=native*) echo "unknown value native" >&2; exit 1 ;; esac'
    compiler = broken_compiler(tmp_path / "compiler", f'{unknown}\nexec g++ "$@"')
    losses, launches, warnings = train(private(tmp_path), ACC_CXX=compiler)
    assert launches > 0
    assert not warnings
    known = train(private(tmp_path), ACC_CXX="g++")[0]
    assert losses == pytest.approx(known, rel=1e-5)


def test_what_a_compiler_gets(tmp_path):
    """One run for all kernels of a plan, for this processor, of a text that includes nothing."""
    noted = (
        f'for each; do case "$each" in *.cpp) cat "$each" >> {tmp_path}/texts ;; esac; done\n'
        f'echo "$*" >> {tmp_path}/runs\nexec g++ "$@"'
    )
    compiler = broken_compiler(tmp_path / "compiler", noted)
    body = """
from tests import helpers
x, y = torch.rand(100, 50, device=DEVICE), torch.rand(300, device=DEVICE)
helpers.synchronize()
for _ in range(3):
    kept = (x * 2 + 1).tanh(), x.softmax(1) - 1, (y - 1).exp() * y
    helpers.synchronize()
assert helpers.stats()["kernel_launches"] == 3
"""
    cache = tmp_path / "cache"
    cache.mkdir()
    helpers.run_python(body, ACC_CACHE_DIR=str(private(cache)), ACC_MODE="full", ACC_CXX=compiler)
    runs = (tmp_path / "runs").read_text().splitlines()
    text = (tmp_path / "texts").read_text()
    assert len(runs) == 1, runs
    assert "=native " in runs[0]
    assert "#include" not in text
    assert text.count('extern "C" __attribute__') == 3


@pytest.mark.parametrize("name", _some(COMPILERS, "missing", "fails", "hangs"))
def test_a_compiler_that(name, tmp_path):
    text, told = COMPILERS[name]
    compiler = "/nonexistent" if text is None else broken_compiler(tmp_path / "compiler", text)
    cache = tmp_path / "cache"
    cache.mkdir()
    # The others may take as long as the machine makes them.
    limit = "1" if name == "hangs" else "300"
    _, launches, warnings = train(private(cache), ACC_CXX=compiler, ACC_COMPILE_TIMEOUT_S=limit)
    assert launches == 0
    assert len(warnings) == 1 and told in warnings[0], warnings
    assert not list(cache.rglob("*.so")), "the cache holds what did not compile"


def test_a_compiler_that_is_replaced_while_it_works(tmp_path):
    """Its kernels run. None is kept: which of the two made them, nobody knows."""
    cache = tmp_path / "cache"
    cache.mkdir()
    replaced = 'cp "$0" "$0.$$"; mv "$0.$$" "$0"; exec g++ "$@"'
    compiler = broken_compiler(tmp_path / "compiler", replaced)
    before = os.stat(compiler).st_mtime_ns  # an inode that was freed comes again
    losses, launches, warnings = train(private(cache), ACC_CXX=compiler)
    assert launches > 0 and not warnings
    assert os.stat(compiler).st_mtime_ns != before and not os.listdir(cache)
    assert losses == train(cache)[0]


@pytest.mark.parametrize("where", _some(["cannot be made", "a file", "of others"], "of others"))
def test_a_cache_that_cannot_be_used(where, tmp_path):
    """Kernels are compiled all the same, and not kept."""
    cache: Path | str = tmp_path / "cache"
    if where == "cannot be made":
        cache = "/proc/acc"  # whoever runs this, root too, cannot write there
    elif where == "a file":
        (tmp_path / "cache").write_text("")
    else:
        (tmp_path / "cache").mkdir()
        (tmp_path / "cache").chmod(0o777)
    _, launches, warnings = train(cache)
    assert launches > 0
    assert len(warnings) == 1 and str(cache) in warnings[0], warnings


# A file system mounted read-only says EROFS and this EACCES; what follows is the same. Compilers
# are programs of their own, and have root's capabilities again.
AS_ANYBODY = """
import ctypes
version_3_of_this_thread = (ctypes.c_uint32 * 2)(0x20080522, 0)
assert ctypes.CDLL(None).capset(version_3_of_this_thread, (ctypes.c_uint32 * 6)()) == 0
"""
MADE = "made = lambda: helpers.stats().get('jit/compiled', 0)\n"
ANOTHER_KERNEL = """
for _ in range(3):
    ((x * 3).abs() - x.square()).tolist()
print(loaded_all, made() > 0)
"""


def test_a_cache_full_of_kernels_that_may_only_be_read(tmp_path):
    """They are loaded. What is missing is compiled and not kept, which is said once."""
    cache = private(tmp_path)
    losses, launches, _ = train(cache, fresh=True)
    files = sorted(os.listdir(cache))
    cache.chmod(0o500)
    # The kernel behind the loop may not have been kept by a process that ended right then.
    training = TRAINING.replace("for _ in", "loaded_all = made() == 0\nfor _ in")
    body = AS_ANYBODY + MADE + training + ANOTHER_KERNEL
    done = helpers.run_python(body, ACC_CACHE_DIR=str(cache), ACC_MODE="full")
    trained, made = done.stdout.splitlines()
    assert json.loads(trained) == [losses, launches] and launches > 0
    assert made == "True True"
    warnings = [line for line in done.stderr.splitlines() if "Warning" in line]
    assert len(warnings) == 1 and f"cannot be kept in the cache directory {cache}" in warnings[0]
    assert sorted(os.listdir(cache)) == files


# What the system says where no file may grow is another word than on a full disk; what follows is
# the same: each write fails.
FULL_DISK = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2048, 2048))
"""


def test_a_full_disk(tmp_path):
    cache = private(tmp_path)
    done = helpers.run_python(FULL_DISK + TRAINING, ACC_CACHE_DIR=str(cache), ACC_MODE="full")
    losses, launches = json.loads(done.stdout.splitlines()[-1])
    assert launches == 0 and len(losses) == 6
    assert len([line for line in done.stderr.splitlines() if "Warning" in line]) == 1, done.stderr
    assert not [file for file in cache.rglob("*") if file.is_file() and file.stat().st_size > 0]
    _, launches, warnings = train(cache)
    assert launches > 0 and not warnings


def test_two_processes_that_need_the_same_kernels_at_once(tmp_path):
    cache = private(tmp_path)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(train, cache, fresh=True) for _ in range(2)]
    found = [run.result() for run in runs]
    assert found[0] == found[1]
    assert found[0][1] > 0 and not found[0][2]
    assert train(cache, fresh=True) == found[0]


@full_only
def test_losses_are_those_of_training_with_kernels(tmp_path):
    fused, launches, warnings = train(private(tmp_path))
    assert launches > 0 and not warnings
    unfused, _, _ = train(tmp_path, ACC_CXX="/nonexistent")
    torch.testing.assert_close(torch.tensor(fused), torch.tensor(unfused), rtol=1e-4, atol=1e-5)


def lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def interrupt_while_compiling(folder: Path, body: str, **env: str) -> None:
    """Ctrl-C ends the program; neither a compiler nor half a file stays."""
    started = folder / "started"
    compiler = broken_compiler(folder / "compiler", f"echo $$ >> {started}; exec sleep 900")
    cache = folder / "cache"
    cache.mkdir()
    child = subprocess.Popen(
        helpers.python_command(body + "\nprint('went on')"),
        cwd=helpers.ROOT,
        env=helpers.child_env(
            ACC_CACHE_DIR=str(private(cache)), ACC_MODE="full", ACC_CXX=compiler, **env
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 60
    while not started.exists() and time.monotonic() < deadline and child.poll() is None:
        time.sleep(0.02)
    assert started.exists(), child.communicate(timeout=60)
    time.sleep(0.3)  # into the wait for it
    os.killpg(child.pid, signal.SIGINT)
    said, error = child.communicate(timeout=120)
    assert "KeyboardInterrupt" in error and "went on" not in said
    deadline = time.monotonic() + 60  # one that has ended is there until the system has seen it
    for pid in started.read_text().split():
        while lives(pid):
            assert time.monotonic() < deadline, f"compiler {pid} lives on"
            time.sleep(0.02)
    assert not list(cache.rglob("*.so"))


@pytest.mark.parametrize("deterministic", _some(["0", "1"], "1"))
def test_an_interrupt_while_a_compiler_works(tmp_path, deterministic):
    interrupt_while_compiling(tmp_path, TRAINING, ACC_DETERMINISTIC=deterministic)


def test_an_interrupt_while_processes_ask_whether_there_are_kernels(tmp_path):
    """As they do when they make a group."""
    interrupt_while_compiling(
        tmp_path, "from tests import helpers\nhelpers.extension().kernels_problem()"
    )


def test_kernels_do_not_depend_on_the_locale(tmp_path):
    """Whose decimal point is a comma."""
    made = subprocess.run(
        ["localedef", "-i", "de_DE", "-f", "UTF-8", str(tmp_path / "de_DE.UTF-8")],
        capture_output=True,
        text=True,
    )
    if not (tmp_path / "de_DE.UTF-8").exists():
        pytest.skip(f"no such locale can be made here: {made.stderr}")
    done = helpers.run_python(
        """
import locale
from tests import helpers
locale.setlocale(locale.LC_ALL, "de_DE.UTF-8")
assert locale.localeconv()["decimal_point"] == ","
x = torch.linspace(-2, 2, 999)
for _ in range(4):
    y = torch.nn.functional.gelu(x.to(DEVICE)) + 0.5
    helpers.flush()
torch.testing.assert_close(y.cpu(), torch.nn.functional.gelu(x) + 0.5)
print(helpers.stats()["kernel_launches"])
""",
        ACC_MODE="full",
        ACC_CACHE_DIR=str(private(tmp_path)),
        LOCPATH=str(tmp_path),
    )
    assert int(done.stdout) > 0 and "[jit]" not in done.stderr


ONE_PLAN = "x = torch.ones(9, device=DEVICE)\nfor _ in range(4):\n    (x * 2 + 1).tolist()\n"


@pytest.mark.parametrize("terminal", _some([True, False], True))
def test_a_terminal_shows_how_far_a_slow_compiler_is(tmp_path, terminal):
    """Where a run waits however long; the line goes at the end. Elsewhere nothing is printed."""
    # It ends when the line has been there; where there is none, later than it would be.
    wait = f"until [ -e {tmp_path}/go ]; do sleep 0.05; done" if terminal else "sleep 4"
    slow = broken_compiler(tmp_path / "compiler", f'{wait}; exec g++ "$@"')
    reader, writer = os.openpty() if terminal else os.pipe()
    cache = tmp_path / "cache"
    cache.mkdir()
    with open(reader, "rb", buffering=0) as said, open(writer, "wb") as heard:
        child = subprocess.Popen(
            helpers.python_command(ONE_PLAN),
            cwd=helpers.ROOT,
            env=helpers.child_env(
                ACC_CACHE_DIR=str(private(cache)),
                ACC_MODE="full",
                ACC_CXX=slow,
                ACC_DETERMINISTIC="1",
            ),
            stdout=subprocess.DEVNULL,
            stderr=heard,
        )
        os.set_blocking(reader, False)
        text, deadline = "", time.monotonic() + 120
        while terminal and " s" not in text and child.poll() is None:
            assert time.monotonic() < deadline, text
            time.sleep(0.02)
            text += (said.read(1 << 16) or b"").decode()
        (tmp_path / "go").touch()
        assert child.wait(timeout=120) == 0
        text += (said.read(1 << 16) or b"").decode()
    lines = re.findall(r"\r\x1b\[K(.*?)(?=\r|$)", text)
    if not terminal:
        assert "compiled" not in text
        return
    first = re.fullmatch(r"\[kernels\] compiled 0 of \d+, (\d+) s", lines[0])
    assert first and int(first[1]) >= 3, text  # later only where the whole process stood still
    assert lines[-1] == "" and lines.count("") < len(lines)
