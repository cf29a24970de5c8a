"""benchmarks/gpu_check.sh, on the host: the one call that a machine with a GPU gets has to work."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

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


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize(
    "part",
    ["env", "steps", "kernels"]
    # What they run `make test` runs without them, too, or takes long on a host.
    + (["numerics", "ranks", "bench", "tests", "opinfo", "bench:seed"] if helpers.FULL else []),
)
def test_a_part_works(tmp_path, part):
    status, rows = run_check(tmp_path, "--dry-run", "--only", part)
    assert status == 0, "\n".join([*rows, (tmp_path / "log.txt").read_text()[-3000:]])
    assert rows
    assert all(row.split()[0] == part.partition(":")[0] for row in rows)
    assert any(" ok " in row for row in rows)
    assert len(list(tmp_path.iterdir())) <= 8


def test_a_missing_tool_costs_its_rows_only(tmp_path):
    status, rows = run_check(tmp_path, "--dry-run", "--only", "sanitizer")
    assert status == 0
    said = [row.split()[:4] for row in rows]
    assert said == [["sanitizer", "not", "run", tool] for tool in gpu_check.SANITIZERS]


def test_each_sanitizer_has_its_share(tmp_path, monkeypatch):
    """A tool that takes all of its own leaves the others theirs."""
    ran = []

    def judge(check, part, what, command, limit_s):
        ran.append((what, command[:3], limit_s))

    monkeypatch.setattr(gpu_check.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(gpu_check.Check, "judge", judge)
    gpu_check.part_sanitizer(gpu_check.Check(tmp_path, False, 0.0))
    assert [what for what, *_ in ran] == ["memcheck", "racecheck", "initcheck", "synccheck"]
    assert [command for _, command, _ in ran] == [
        ["/bin/compute-sanitizer", "--tool", what] for what, *_ in ran
    ]
    assert sum(limit_s for *_, limit_s in ran) <= gpu_check.LIMIT_S


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
        assert all("BAD" in row for row in rows)


def torch_sees_a_gpu() -> bool:
    """Asked in another process: this one has registered acc."""
    code = "import torch; raise SystemExit(not torch.cuda.is_available())"
    return helpers.template().run(code, helpers.child_env(), timeout=60).returncode == 0


def test_each_part_has_its_share_of_the_time(tmp_path, monkeypatch, capfd):
    """What one does not need is for those behind it; what one exceeds is nobody's but its own."""
    assert sum(share for share, _ in gpu_check.PARTS.values()) == gpu_check.LIMIT_S
    monkeypatch.setattr(gpu_check, "LEAST_S", 0.0)

    def sleeps(part: str, seconds: float) -> Callable[[gpu_check.Check], None]:
        return lambda check: check.judge(part, "sleep", ["sleep", str(seconds)], 60.0)

    def fails(check: gpu_check.Check) -> None:
        raise ValueError("no such thing")

    parts = {
        "slow": (0.5, sleeps("slow", 30.0)),
        "wrong": (1.5, fails),
        "patient": (0.1, sleeps("patient", 1.0)),
        "asked for": (0.0, sleeps("asked for", 0.0)),
    }
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    began = time.monotonic()
    status = gpu_check.main(["--out", str(tmp_path), "--dry-run"])
    assert (status, time.monotonic() - began < 10.0) == (1, True)
    rows = [row.split()[:3] for row in (tmp_path / "table.txt").read_text().splitlines()]
    assert rows == [["slow", "not", "run"], ["wrong", "BAD", "wrong"], ["patient", "ok", "sleep"]]
    said = capfd.readouterr().out
    assert said.endswith("\n\n" + (tmp_path / "table.txt").read_text())
    assert "its share of the time was over" in said and "ValueError: no such thing" in said
    assert gpu_check.main(["--out", str(tmp_path / "one"), "--only", "asked for"]) == 0
    # and one that is asked for has all of the time, and no more
    monkeypatch.setattr(gpu_check, "LIMIT_S", 0.5)
    parts["asked for"] = (0.0, sleeps("asked for", 30.0))
    began = time.monotonic()
    assert gpu_check.main(["--out", str(tmp_path / "late"), "--only", "asked for"]) == 0
    assert time.monotonic() - began < 10.0
    assert (tmp_path / "late/table.txt").read_text().split()[2:4] == ["not", "run"]


def test_the_default_call_goes_through_its_parts(tmp_path, monkeypatch):
    """In order, each with commands that exist.

    What they do is tested part by part: together they start two dozen processes, minutes of them.
    """
    ran = []

    def run(check, command, limit_s, **env):
        ran.extend(word.partition("::")[0] for word in map(str, command) if ".py" in word)
        return 0, ['ROW ["it", "ok", "said"]', "mlp_small acc plain 1 9 1.0 ms 2.0", "", "done"]

    monkeypatch.setattr(gpu_check.Check, "run", run)
    assert gpu_check.main(["--out", str(tmp_path), "--dry-run"]) == 0
    rows = [row.split()[0] for row in (tmp_path / "table.txt").read_text().splitlines()]
    default = [part for part, (share_s, _) in gpu_check.PARTS.items() if share_s]
    assert list(dict.fromkeys(rows)) == default
    assert ran
    assert all((helpers.ROOT / name).exists() for name in ran)


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
        done = helpers.template().run(code, helpers.child_env(), timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    rows("cpu")
    assert '"gradients of mlp_small", "ok"' in rows("acc")
    kept = torch.load(file)
    torch.save({name: each * 1.05 for name, each in kept.items()}, file)
    assert '"gradients of mlp_small", "BAD"' in rows("acc")
