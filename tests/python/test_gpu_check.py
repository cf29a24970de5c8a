"""benchmarks/gpu_check.sh, on the host: the one call that a machine with a GPU gets has to work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    "part", ["env", "steps", "numerics", "kernels", "tests", "bench", "opinfo"]
)
def test_a_part_works(tmp_path, part):
    status, rows = run_check(tmp_path, "--dry-run", "--only", part)
    assert status == 0, "\n".join([*rows, (tmp_path / "log.txt").read_text()[-3000:]])
    assert rows
    assert all(row.split()[0] == part for row in rows)
    assert any(" ok " in row for row in rows)
    assert len(list(tmp_path.iterdir())) <= 8


def test_a_missing_tool_costs_its_row_only(tmp_path):
    status, rows = run_check(tmp_path, "--dry-run", "--only", "sanitizer")
    assert (status, "not run" in rows[0]) == (0, True)


def test_what_fails_is_bad_and_the_rest_goes_on(tmp_path):
    status, rows = run_check(tmp_path, "--dry-run", "--only", "bench", ACC_MODE="fast")
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
    env = helpers.child_env(TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    return subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0
