"""benchmarks/gpu_check.sh, on the host: the one call that a machine with a GPU gets has to work."""

from __future__ import annotations

import inspect
import itertools
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _pytest import faulthandler

from benchmarks import gpu_check
from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only")


def run_check(out: Path, *arguments: str, **env: str) -> tuple[int, list[str]]:
    """The status and the table of a run."""
    env = {"ACC_MODE": "full", **env}
    done = subprocess.run(
        ["sh", str(helpers.ROOT / "benchmarks/gpu_check.sh"), *arguments],
        env=helpers.child_env(OUT=str(out), PYTHON=sys.executable, **env),
        capture_output=True,
        text=True,
        check=False,
    )
    table = out / "table.txt"
    return done.returncode, table.read_text().splitlines() if table.exists() else [done.stderr]


def log_of(out: Path, rows: list[str]) -> str:
    return "\n".join([*rows, (out / "log.txt").read_text()[-3000:]])


@pytest.mark.timeout(1800)  # beside others on a slow machine it takes most of the usual ten minutes
@pytest.mark.usefixtures("recording")
def test_the_call_without_a_part_runs_to_its_end(tmp_path):
    """The very script, nothing of it replaced: all of its parts work, and have the time for it."""
    status, rows = run_check(tmp_path, "--dry-run")
    assert status == 0, log_of(tmp_path, rows)
    default = [part for part, (share_s, _) in gpu_check.PARTS.items() if share_s]
    assert list(dict.fromkeys(row.split()[0] for row in rows)) == default
    # How fast it is or how much memory it needs is not judged: a benchmark that has missed has run.
    ran = [row.split()[0] for row in rows if row.split()[1] in ("ok", "missed")]
    assert set(ran) == set(default), log_of(tmp_path, rows)
    # env tells what this machine lacks
    left_out = [row for row in rows if row.split()[1] not in ("ok", "missed")]
    assert all(row.startswith("env ") for row in left_out), log_of(tmp_path, rows)
    assert len(list(tmp_path.iterdir())) <= 8


@pytest.mark.usefixtures("recording")
@pytest.mark.skipif(not helpers.FULL, reason="make test-full: the whole run has most of it")
@pytest.mark.parametrize(
    "part",
    [
        *("env", "steps", "numerics", "kernels", "ranks", "bench", "tests", "record", "opinfo"),
        *("bench:seed", "bench:launch"),
    ],
)
def test_a_part_works_by_itself(tmp_path, part):
    status, rows = run_check(tmp_path, "--dry-run", "--only", part)
    assert status == 0, log_of(tmp_path, rows)
    assert rows
    assert all(row.split()[0] == part.partition(":")[0] for row in rows)
    assert any(row.split()[1] in ("ok", "missed") for row in rows)
    assert len(list(tmp_path.iterdir())) <= 8


def test_a_missing_tool_costs_its_rows_only(tmp_path):
    status, rows = run_check(tmp_path, "--dry-run", "--only", "sanitizer")
    assert status == 0
    said = [row.split()[:4] for row in rows]
    assert said == [["sanitizer", "not", "run", tool] for tool in gpu_check.SANITIZERS]


def test_each_sanitizer_has_its_share(tmp_path, monkeypatch):
    """A tool that takes all of its own leaves the others theirs."""
    ran, alone = [], {}

    def judge(check, part, what, command, limit_s, **env):
        ran.append((what, command[:3], limit_s))
        alone[what] = env.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1"
        assert "--kernel-name kns=acc_ --target-processes application-only" in " ".join(command)
        assert not alone[what] or env["ACC_MODE"] == "nograph"  # captured work has a pool

    monkeypatch.setattr(gpu_check, "tool_of", lambda name: f"/bin/{name}")
    monkeypatch.setattr(gpu_check.Check, "judge", judge)
    gpu_check.part_sanitizer(gpu_check.Check(tmp_path, tmp_path, dry=False))
    assert [what for what, *_ in ran] == ["memcheck", "racecheck", "initcheck", "synccheck"]
    assert [command for _, command, _ in ran] == [
        ["/bin/compute-sanitizer", "--tool", what] for what, *_ in ran
    ]
    assert sum(limit_s for *_, limit_s in ran) <= gpu_check.LIMIT_S
    assert alone == {"memcheck": True, "racecheck": False, "initcheck": True, "synccheck": False}


def test_a_tool_that_cannot_watch_the_device_is_no_fault(tmp_path, monkeypatch):
    said = {
        "memcheck": ["========= Error: Device not supported. Please refer to the documentation."],
        "racecheck": ["========= RACECHECK SUMMARY: 1 hazard displayed"],
    }
    monkeypatch.setattr(gpu_check, "SANITIZERS", dict.fromkeys(said, 60.0))
    monkeypatch.setattr(gpu_check, "tool_of", lambda name: f"/bin/{name}")
    run = lambda check, command, limit_s, **env: (1, said[command[2]])  # noqa: E731
    monkeypatch.setattr(gpu_check.Check, "run", run)
    check = gpu_check.Check(tmp_path, tmp_path, dry=False)
    gpu_check.part_sanitizer(check)
    assert [row.status for row in check.rows] == [gpu_check.NOT_RUN, gpu_check.BAD]


def test_what_fails_is_bad_and_the_rest_goes_on(tmp_path):
    status, rows = run_check(tmp_path, "--dry-run", "--only", "kernels", ACC_MODE="fast")
    assert status == 1
    assert "BAD" in rows[-1]
    for wrong, answer in (
        ("everything", "the parts are env, build"),
        ("bench:nothing", "the cases are launch, mlp,"),
    ):
        status, said = run_check(tmp_path / "no", "--only", wrong)
        assert status == 2
        assert answer in said[0]
    # without --dry-run operators would run on CUDA, which is not here
    if not torch_sees_a_gpu():
        status, rows = run_check(tmp_path, "--only", "kernels")
        assert status == 1
        judged = (
            rows if gpu_check.Check(tmp_path, tmp_path, dry=False).unbuilt() == "" else rows[:1]
        )
        assert all("BAD" in row for row in judged)


def torch_sees_a_gpu() -> bool:
    """Asked in another process: this one has registered acc."""
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return helpers.template().run(code, helpers.child_env(), timeout=300).returncode == 0


def test_each_part_has_its_share_of_the_time(tmp_path, monkeypatch, capfd):
    """What one does not need is for those behind it; what one exceeds is nobody's but its own."""
    assert sum(share for share, _ in gpu_check.PARTS.values()) == gpu_check.LIMIT_S
    monkeypatch.setattr(gpu_check, "LEAST_S", 0.0)

    def sleeps(part: str, seconds: float) -> Callable[[gpu_check.Check], None]:
        return lambda check: check.judge(part, "sleep", ["sleep", str(seconds)], 900.0)

    def fails(check: gpu_check.Check) -> None:
        raise ValueError("no such thing")

    parts = {
        "slow": (0.5, sleeps("slow", 600.0)),
        "wrong": (300.0, fails),
        "patient": (0.1, sleeps("patient", 1.0)),
        "asked for": (0.0, sleeps("asked for", 0.0)),
    }
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    began = time.monotonic()
    status = gpu_check.main(["--out", str(tmp_path), "--dry-run"])
    assert (status, time.monotonic() - began < 300.0) == (1, True)
    table = (tmp_path / "table.txt").read_text()
    rows = [row.split()[:3] for row in table.splitlines()]
    assert rows == [["slow", "not", "run"], ["wrong", "BAD", "wrong"], ["patient", "ok", "sleep"]]
    said = capfd.readouterr().out
    slow, wrong, patient = table.splitlines(keepends=True)
    assert said.endswith(f"\n\n{wrong}{slow}{patient}")  # what is wrong first
    assert "its share of the time was over" in said and "ValueError: no such thing" in said
    dry = ["--dry-run", "--only", "asked for"]
    assert gpu_check.main(["--out", str(tmp_path / "one"), *dry]) == 0
    # and one that is asked for has all of the time, and no more
    monkeypatch.setattr(gpu_check, "LIMIT_S", 0.5)
    parts["asked for"] = (0.0, sleeps("asked for", 600.0))
    began = time.monotonic()
    assert gpu_check.main(["--out", str(tmp_path / "late"), *dry]) == 0
    assert time.monotonic() - began < 300.0
    assert (tmp_path / "late/table.txt").read_text().split()[2:4] == ["not", "run"]


def test_a_build_that_takes_long_takes_it_from_the_last_parts(tmp_path, monkeypatch):
    deadlines = {}

    def part(name: str, seconds: float) -> Callable[[gpu_check.Check], None]:
        def run(check: gpu_check.Check) -> None:
            deadlines[name] = check.deadline
            clock[0] += seconds

        return run

    clock = [100.0]
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(gpu_check, "LIMIT_S", 10.0)
    parts = {"env": (1.0, part("env", 1.0)), "build": (2.0, part("build", 6.0))}
    parts |= {"steps": (2.0, part("steps", 1.5)), "bench": (5.0, part("bench", 0.0))}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    gpu_check.run_parts(check_for(tmp_path), "", "")
    assert deadlines == {"env": 101.0, "build": 110.0, "steps": 109.0, "bench": 110.0}


def rows_of(check: gpu_check.Check) -> list[tuple[str, str]]:
    return [(row.what, f"{row.status}: {row.said}") for row in check.rows]


def check_for(out: Path, *, dry: bool = True, seconds: float = 900.0) -> gpu_check.Check:
    scratch = out / "scratch"
    scratch.mkdir(parents=True)
    return gpu_check.Check(out, scratch, dry, time.monotonic() + seconds)


def over_when(monkeypatch, begun: Callable[[], bool]) -> None:
    """The limit of each command is over as soon as it has begun what it is stopped in, however long
    that takes.
    """
    wait, limited = subprocess.Popen.wait, set()

    def over(child, timeout=None):
        if child.pid in limited:  # it is being ended
            return wait(child, timeout)
        limited.add(child.pid)
        deadline = time.monotonic() + 200.0
        while not begun():
            assert time.monotonic() < deadline and child.poll() is None
            time.sleep(0.01)
        return wait(child, 0.0)

    monkeypatch.setattr(subprocess.Popen, "wait", over)


def commands_of(
    monkeypatch, out: Path, part: Callable[[gpu_check.Check], None], *, dry: bool
) -> list[str]:
    """What a part would run, each with the variables that are its own."""
    ran = []

    def run(check, command, limit_s, *, partial=False, **env):
        own = [f"{name}={value}" for name, value in env.items()]
        ran.append(" ".join([*own, *map(str, command[1:])]))
        return 0, ["tests/python/test_it.py::test_it PASSED", "1 passed"]

    monkeypatch.setattr(gpu_check.Check, "run", run)
    part(check_for(out, dry=dry))
    return ran


@pytest.mark.parametrize("dry", [False, True])
def test_programs_run_in_nofuse_all_of_them(tmp_path, monkeypatch, dry):
    """Dropout and addresses that were told, too: which tests hold there their file knows."""
    ran = commands_of(monkeypatch, tmp_path, gpu_check.part_tests, dry=dry)
    (command,) = [each for each in ran if "ACC_MODE=nofuse" in each]
    assert command.endswith("tests/python/test_captured_plans.py") and " -k " not in command


def test_what_is_over_its_limit_is_gone_with_all_it_started(tmp_path, monkeypatch):
    """Processes in sessions of their own, too, and though they hold the output and hear nothing."""
    monkeypatch.setattr(gpu_check, "GRACE_S", 100.0)  # it ends as soon as it has put away
    deaf = "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    deaf += f"; open({str(tmp_path / 'pid')!r} + sys.argv[1], 'w').write(str(os.getpid()))"
    deaf += "; time.sleep(600)"
    code = f"""
        import pathlib, signal, subprocess, sys, time
        def put_away(*_):
            print("put away", flush=True)
            sys.exit()
        signal.signal(signal.SIGTERM, put_away)
        for name in "12":
            subprocess.Popen([sys.executable, "-c", {deaf!r}, name], start_new_session=True)
        print("begun", flush=True)
        time.sleep(600)
    """
    check = check_for(tmp_path / "out")
    pids = [tmp_path / f"pid{name}" for name in "12"]

    def begun() -> bool:
        said = (tmp_path / "out/log.txt").read_text().endswith("\nbegun\n")
        return said and all(file.exists() and file.read_text() for file in pids)

    over_when(monkeypatch, begun)
    began = time.monotonic()
    status, lines = check.run([sys.executable, "-c", textwrap.dedent(code)], 3.0)
    assert time.monotonic() - began < 400.0
    assert (status, lines) == (None, ["begun", "put away"])
    assert "begun\nput away\n" in (tmp_path / "out/log.txt").read_text()
    for file in pids:
        pid = int(file.read_text())
        deadline = time.monotonic() + 60.0
        while runs(pid):
            assert time.monotonic() < deadline, "it is still there"
            time.sleep(0.05)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_packages_that_come_along_are_found(tmp_path, monkeypatch):
    (tmp_path / "one_that_comes_along.py").write_text("print('it is there')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    check = check_for(tmp_path / "out")
    code = "import torchacc, one_that_comes_along; print(torchacc.__file__)"
    status, lines = check.run([sys.executable, "-c", code], 300.0, ACC_EXECUTOR="host")
    assert (status, lines[0]) == (0, "it is there")
    assert lines[-1].startswith(str(helpers.ROOT))


HIDES = """
import importlib.machinery, os

finder = importlib.machinery.PathFinder
before = finder.find_spec


def find(cls, name, path=None, target=None):
    found = before(name, path, target)
    hidden = name.partition(".")[0] in os.environ.get("HIDDEN", "").split(",")
    return None if hidden and found and "-packages" in str(found.origin) else found


finder.find_spec = classmethod(find)
"""


def without(tmp_path: Path, *packages: str) -> dict[str, str]:
    """An environment of processes that find none of these, nor pytest's plugins."""
    (tmp_path / "hides").mkdir(exist_ok=True)
    (tmp_path / "hides/sitecustomize.py").write_text(HIDES)
    return {
        "PYTHONPATH": str(tmp_path / "hides"),
        "HIDDEN": ",".join(packages),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }


@pytest.mark.usefixtures("recording")
def test_missing_packages_cost_their_rows_only(tmp_path, monkeypatch):
    absent = without(tmp_path, "numpy", "expecttest", "pytest_timeout", "xdist", "torchvision")
    only = ("--dry-run", "--only", "bench:resnet18_cifar")
    status, rows = run_check(tmp_path / "out", *only, **absent)
    assert status == 0 and rows[0].split()[1] in ("ok", "missed")  # it has run
    if helpers.FULL:
        status, rows = run_check(tmp_path / "full", "--dry-run", "--only", "tests", **absent)
        assert status == 0, (tmp_path / "full/log.txt").read_text()[-3000:]
        assert any(" ok " in row and "of the executor" in row for row in rows)
        assert any(" not run " in row and "numpy is not installed" in row for row in rows)
    for name in ("numpy", "pytest"):
        monkeypatch.setattr(gpu_check, "installed", lambda package, name=name: package != name)
        check = check_for(tmp_path / name)
        gpu_check.part_opinfo(check)
        assert rows_of(check) == [("test_harness", f"not run: {name} is not installed")]


def test_without_expecttest_torchs_own_test_tools_work(tmp_path, monkeypatch):
    for name, value in without(tmp_path, "expecttest").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(gpu_check, "installed", lambda name: name != "expecttest")
    check = check_for(tmp_path / "out")
    code = "import expecttest; from torch.testing._internal.common_utils import TestCase"
    code += "; print(expecttest.__file__, issubclass(TestCase, expecttest.TestCase))"
    status, lines = check.run([sys.executable, "-c", code], 300.0)
    assert (status, lines[-1]) == (0, f"{check.scratch / 'site/expecttest.py'} True")


def fake_tests(root: Path, **files: str) -> list[str]:
    """Files of tests below a folder that stands for the repository."""
    (root / "tests").mkdir(parents=True)
    (root / "pyproject.toml").write_text((helpers.ROOT / "pyproject.toml").read_text())
    for name, text in files.items():
        (root / f"tests/{name}.py").write_text(textwrap.dedent(text))
    return [f"tests/{name}.py" for name in files]


def test_a_test_that_ends_the_process_is_named_and_the_files_after_it_run(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "LEAST_S", 0.5)
    for name, value in without(tmp_path, "pytest_timeout").items():
        monkeypatch.setenv(name, value)
    files = fake_tests(
        tmp_path,
        test_dies="import os\ndef test_well(): pass\ndef test_exits(): os._exit(3)",
        test_odd="import pytest\n@pytest.mark.timeout(9)\ndef test_wrong(): assert 1 == 2",
        test_needs="import no_such_thing\ndef test_it(): pass",
        test_hangs="import time\ndef test_sleeps(): time.sleep(600)",
        test_fine="def test_it(): pass",
    )
    check = check_for(tmp_path / "out")
    # Where pytest does not end what hangs, all of the time is over then.
    limit_s = 300.0 if "exit_on_timeout" in inspect.getsource(faulthandler) else 30.0
    gpu_check.pytest_of(check, "tests", "all", files, limit_s, hangs_s=6)
    needs, dies, *others = rows_of(check)
    assert needs == ("test_needs", "not run: no_such_thing is not installed")
    assert dies[1].startswith("BAD: ended with status 3 in tests/test_dies.py::test_exits")
    if "faulthandler_exit" in (check.out / "log.txt").read_text():  # pytest knows no such option
        others = others[:-1] + [("all", "ok")]
    hangs, fine = others
    assert hangs[1].startswith("BAD: ")
    assert " in tests/test_hangs.py::test_sleeps" in hangs[1]
    assert fine[1].startswith("ok")
    # the same where the group has less time than a test may take
    check = check_for(tmp_path / "short")
    gpu_check.pytest_of(check, "tests", "short", files[3:4], 16.0, hangs_s=60)
    ((_, said),) = rows_of(check)
    assert said.startswith("BAD: ") and " in tests/test_hangs.py::test_sleeps" in said
    # and one that hangs for longer than all of them may take
    check = check_for(tmp_path / "late", seconds=300.0)
    log = tmp_path / "late/log.txt"
    over_when(monkeypatch, lambda: "tests/test_hangs.py::test_sleeps" in log.read_text())
    gpu_check.pytest_of(check, "tests", "late", files[1::2], 600.0)
    (said,) = rows_of(check)
    assert said[1].startswith("BAD: stopped in tests/test_hangs.py::test_sleeps")  # one had failed
    log.unlink()
    gpu_check.pytest_of(check, "tests", "late", files[3:4], 600.0)
    _, said = rows_of(check)
    assert said[1].startswith("not run: the time was over in tests/test_hangs.py::test_sleeps, 0")


BEGUN = "tests/python/test_it.py::test_it"
LATE = [f"{BEGUN}[a] PASSED", f"{BEGUN}[b] "]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (LATE, f"not run: the time was over in {BEGUN}[b], 1 passed (20 s)"),
        (LATE[:1], f"not run: the time was over after {BEGUN}[a], 1 passed (20 s)"),
        (["collecting ... collected 2 items"], "not run: the time was over before a test began"),
        # one had failed, or a file, or the last hangs
        ([f"{BEGUN}[c] FAILED", *LATE], f"BAD: stopped in {BEGUN}[b]"),
        ([f"{BEGUN}[c] ERROR", *LATE], f"BAD: stopped in {BEGUN}[b]"),
        (["collecting ... collected 2 items / 1 error", *LATE], f"BAD: stopped in {BEGUN}[b]"),
        ([*LATE[:1], f"{LATE[1]}Timeout (0:00:45)!", "Thread 0x1"], f"BAD: stopped in {BEGUN}[b]"),
        # one of before was as slow, and ended
        ([f"{BEGUN}[c] Timeout (0:00:45)!", "PASSED", *LATE], "not run: the time was over in"),
    ],
)
def test_where_the_time_is_over_only_what_failed_or_hangs_is_bad(
    tmp_path, monkeypatch, lines, said
):
    clock = itertools.count(1000.0, 20.0)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(gpu_check.Check, "run", lambda *_, **__: (None, lines))
    check = check_for(tmp_path)
    gpu_check.pytest_once(check, "tests", "all", [], 20.0, 45)
    ((_, found),) = rows_of(check)
    assert found.startswith(said)


def test_tests_of_which_none_begins_hang(tmp_path, monkeypatch):
    clock = itertools.count(1000.0, 60.0)
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(gpu_check.Check, "run", lambda *_, **__: (None, ["collecting ..."]))
    check = check_for(tmp_path)
    gpu_check.pytest_once(check, "tests", "all", [], 60.0, 45)
    assert rows_of(check) == [("all", "BAD: collecting ... (60 s)")]


def test_a_survey_that_is_stopped_is_late_and_one_that_fails_is_bad(tmp_path, monkeypatch):
    """It ends what hangs by itself."""
    answers = iter([(None, []), (1, ["3 failed"])])
    monkeypatch.setattr(gpu_check.Check, "run", lambda *_, **__: next(answers))
    check = check_for(tmp_path)
    for _ in range(2):
        check.judge("tests", "operators", ["survey"], 30.0, late=gpu_check.NOT_RUN)
    assert [row.status for row in check.rows] == ["not run", "BAD"]


def test_failed_tests_and_files_are_named(tmp_path, monkeypatch):
    """A file that cannot be read costs its own tests."""
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    files = fake_tests(
        tmp_path,
        test_one="def test_a(): assert 0, 'a reason ' + 60 * 'x' + ' whole'",
        test_bad="raise ValueError",
        test_two="def test_b(): pass",
    )
    check = check_for(tmp_path / "out")
    gpu_check.pytest_of(check, "tests", "all", files, 300.0)
    ((_, said),) = rows_of(check)
    assert said.startswith("BAD: 1 failed, 1 passed, 1 error in ")
    failed, error = sorted(said.split("; ")[1:], reverse=True)
    assert failed.startswith("FAILED tests/test_one.py::test_a - AssertionError: a reason x")
    assert "x whole" in failed
    assert error == "ERROR tests/test_bad.py"


@pytest.mark.parametrize("passing", [True, False])
def test_too_many_failures_cost_a_file_and_where_nothing_passes_all(tmp_path, monkeypatch, passing):
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    first = "import pytest\n" + ("def test_well(): pass\n" if passing else "")
    first += "@pytest.mark.parametrize('each', range(60))\ndef test_wrong(each): assert 0"
    files = fake_tests(tmp_path, test_one=first, test_two=first, test_three="def test_b(): pass")
    check = check_for(tmp_path / "out")
    gpu_check.pytest_of(check, "tests", "all", files, 300.0)
    statuses = [row.status for row in check.rows]
    assert statuses == ["BAD", "BAD", "ok" if passing else "not run"]
    assert passing or check.rows[-1].said == "no test passes; test_three were not tried"


def test_without_a_build_with_cuda_nothing_else_runs(tmp_path, monkeypatch):
    """Least of all on the host: that would look like a GPU's results."""
    ran = []

    def build(check: gpu_check.Check) -> None:
        code = "import os; raise SystemExit(f'ACC_CUDA={os.environ[\"ACC_CUDA\"]}: no headers')"
        check.judge("build", "extension", [sys.executable, "-c", code], 300.0)

    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "part_build", build)
    parts = {"build": (60.0, build), "steps": (60.0, ran.append), "kernels": (60.0, ran.append)}
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    check = check_for(tmp_path / "all", dry=False)
    gpu_check.run_parts(check, "", "")
    first, *others = rows_of(check)
    assert first[1].startswith("BAD: ACC_CUDA=1: no headers")
    why = "not run: no CUDA build: the part build says why"
    assert others == [("steps", why), ("kernels", why)] and not ran
    # a part that is asked for is built for, and runs with a build that is there
    check = check_for(tmp_path / "one", dry=False)
    gpu_check.run_parts(check, "kernels", "")
    assert [row.part for row in check.rows] == ["build", "kernels"] and not ran
    torch = gpu_check.native.find_torch().version
    facts = {"CUDA": "13.0", "PYTHON_TAG": gpu_check.native.python_tag(), "TORCH_VERSION": torch}
    (tmp_path / "torchacc_device").mkdir()
    made = tmp_path / "torchacc_device/_build_info.py"
    for wrong in ({"CUDA": None}, {"PYTHON_TAG": "cp27"}, {"TORCH_VERSION": "2.0.0"}):
        made.write_text("".join(f"{name} = {value!r}\n" for name, value in (facts | wrong).items()))
        assert check_for(tmp_path / "no" / "".join(wrong), dry=False).unbuilt()
    made.write_text("".join(f"{name} = {value!r}\n" for name, value in facts.items()))
    check = check_for(tmp_path / "built", dry=False)
    gpu_check.run_parts(check, "kernels", "")
    assert ran == [check] and not check.rows


@pytest.mark.parametrize("there", [True, False])
def test_a_dry_run_leaves_a_build_that_is_there_alone(tmp_path, monkeypatch, there):
    """Processes may have it mapped; and in a checkout without one it is made."""
    monkeypatch.setattr(gpu_check.Check, "is_built", lambda check: there)
    ran = commands_of(monkeypatch, tmp_path, gpu_check.part_build, dry=True)
    assert ran == [f"scripts/native.py {'info' if there else 'develop'}"]
    ran = commands_of(monkeypatch, tmp_path / "real", gpu_check.part_build, dry=False)
    assert ran == ["scripts/native.py develop"]


def test_kernels_are_kept_where_there_is_no_home(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    monkeypatch.delenv("ACC_CACHE_DIR", raising=False)
    check = check_for(tmp_path / "out")
    folder = Path(check.environment["ACC_CACHE_DIR"])
    assert folder.parent == check.scratch
    monkeypatch.setenv("HOME", str(tmp_path))
    assert "ACC_CACHE_DIR" not in check_for(tmp_path / "at home").environment


def test_a_copy_without_git_is_told_its_revision(monkeypatch):
    def no_git(*arguments: str) -> str:
        raise FileNotFoundError("git")

    monkeypatch.setattr(gpu_check.report, "_git", no_git)
    monkeypatch.setenv("REVISION", "abc123")
    assert gpu_check.report.revision() == "abc123"
    monkeypatch.delenv("REVISION")
    assert gpu_check.report.revision() is None


def test_env_tells_the_driver_and_the_tools_of_the_build(tmp_path, monkeypatch):
    """cmake of this interpreter's packages is no program of PATH."""
    (tmp_path / "nvidia-smi").write_text(
        '#!/bin/sh\ncase "$*" in *power.limit*) echo names; echo "GPU, 580, 700 W" ;; esac\n'
    )
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpu_check.Check, "probe", lambda *_, **__: None)
    monkeypatch.setattr(gpu_check.native, "find_tool", lambda name: f"/packages/{name}")
    tool_of = gpu_check.tool_of
    smi = str(tmp_path / "nvidia-smi")
    monkeypatch.setattr(gpu_check, "tool_of", lambda n: smi if n == "nvidia-smi" else tool_of(n))
    check = check_for(tmp_path / "out")
    gpu_check.part_env(check)
    said = dict(rows_of(check))
    assert said["cmake"] == "ok: /packages/cmake"
    assert said["driver, power, clocks"] == "ok: names; GPU, 580, 700 W"
    # a tool of a toolkit that is not on PATH
    monkeypatch.setattr(gpu_check.native, "find_tool", lambda name: None)
    (tmp_path / "cuda/bin").mkdir(parents=True)
    os.symlink(smi, tmp_path / "cuda/bin/compute-sanitizer")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    assert tool_of("compute-sanitizer") == str(tmp_path / "cuda/bin/compute-sanitizer")
    assert tool_of("no-such-tool") is None


def test_a_long_table_is_printed_in_short(tmp_path):
    rows = [gpu_check.Row("tests", f"row {index}", gpu_check.OK, "x" * 90) for index in range(200)]
    rows.append(gpu_check.Row("bench", "gpt", gpu_check.MISSED, "y" * 2000))
    rows.append(gpu_check.Row("ranks", "ddp", gpu_check.BAD, "wrong"))
    text = gpu_check.in_short(rows)
    lines = text.splitlines()
    assert len(text) <= gpu_check.PRINTED
    assert [line.split()[0] for line in lines[:3]] == ["ranks", "bench", "tests"]
    assert lines[1].endswith("y...") and len(lines[1]) < 600
    assert lines[-1] == f"{203 - len(lines)} more rows in table.txt"
    assert len(gpu_check.in_short(rows[:3]).splitlines()) == 3


def test_a_missed_requirement_is_told_apart(tmp_path, monkeypatch):
    answers = iter([(4, "MISSED: 1.0 of 3.0"), (0, ""), (1, "FAILED: wrong")])

    def run(check, command, limit_s, **env):
        status, said = next(answers)
        return status, ["gpt acc plain 1 9 1.0 ms", "", said]

    monkeypatch.setattr(gpu_check.Check, "run", run)
    check = check_for(tmp_path / "out")
    for _ in range(3):
        gpu_check.bench(check, "bench", "gpt", "eager,acc", [])
    assert [row.status for row in check.rows] == ["missed", "ok", "BAD"]


def test_a_benchmark_knows_its_limit_and_what_it_had_is_told(tmp_path, monkeypatch):
    """run.py ends by itself before it; where it is stopped all the same the row has its table."""
    commands = []

    def run(check, command, limit_s, **env):
        commands.append(command)
        check.deadline = 0.0
        return None, ["gpt acc plain 1 9 1.0 ms", "", "must HOLD: gpt acc/eager speed 3.1"]

    monkeypatch.setattr(gpu_check.Check, "run", run)
    check = check_for(tmp_path / "out", seconds=1000.0)
    with pytest.raises(gpu_check.OutOfTime):
        gpu_check.bench(check, "bench", "gpt", "eager,acc", [], 120.0)
    (command,) = commands
    assert float(command[command.index("--limit-s") + 1]) == 110.0
    ((_, said),) = rows_of(check)
    assert said.startswith("not run: ")  # to its end: no fault of what is measured
    assert "acc plain 1 9 1.0 ms; must HOLD: gpt acc/eager speed 3.1" in said


@pytest.mark.usefixtures("recording")
def test_wrong_gradients_are_seen(tmp_path):
    """Those of eager, and then others."""
    file = tmp_path / "gradients.pt"

    def rows(where: str) -> str:
        arguments = ["gradients", "mlp_small", where, str(file), "--small"]
        code = f"""
import runpy, sys
sys.path.insert(0, "benchmarks")
sys.argv[1:] = {arguments!r}
runpy.run_path("benchmarks/gpu_probe.py", run_name="__main__")
"""
        done = helpers.template().run(code, helpers.child_env(), timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    rows("cpu")
    assert '"gradients of mlp_small", "ok"' in rows("acc")
    kept = torch.load(file)
    torch.save({name: each * 1.05 for name, each in kept.items()}, file)
    assert '"gradients of mlp_small", "BAD"' in rows("acc")


@pytest.mark.usefixtures("capturing")
def test_what_operators_cost_the_host(tmp_path):
    check = check_for(tmp_path)
    gpu_check.PARTS["record"][1](check)
    assert [(row.what, row.status) for row in check.rows] == [
        ("executor", "ok"),
        ("recording an operator", "ok"),
        ("looking for a plan by its hash", "ok"),
        ("a tensor of 1 MiB", "ok"),
        ("replay of 2 products", "ok"),
        ("replay of 20 products", "ok"),
        *(
            (f"AdamW of {count} parameters: {what}", "ok")
            for count in (2, 20)
            for what in ("captured", "replay, median", "replay, 99 %")
        ),
    ], (check.out / "log.txt").read_text()
    assert "at most 0.4, goal 0.25" in check.rows[1].said
