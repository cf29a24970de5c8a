"""The documents' scripts for several processes, taken from them as they are, under torchrun.

The driver seeds every process alike, so all have the same data: averaged gradients are then those
of one process, and the numbers have to be.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import helpers
from tests.seeds import extract
from tests.seeds.scripts import HERE, LINE, text_of

BATCH, EVERY = 8, 20 if helpers.FULL else 8  # four processes on two cores
TORCHRUN = ("-m", "torch.distributed.run", "--standalone")
# Of ACC_SKIP_PASSES: all passes, or those that keep eager's bits.
ALL, EXACT = None, helpers.BIT_BY_BIT
# What all passes may come to. Their last bits are others, and fifty layers on random labels train
# apart: the loss by 0.02 of it in 8 steps and 0.09 in 20, parameters by 5e-6 and 1.1e-5 of their
# norm. With a learning rate that is a tenth higher the norm is 2.8e-4 away in 8 steps.
LOSS, NORM = 0.2 if helpers.FULL else 0.1, 5e-5
# Two processes would train `one` twice.
pytestmark = pytest.mark.xdist_group("documents")


def small(source: str) -> str:
    return extract.shrink(source, rows=BATCH * EVERY, side=32, epochs=1, batch=BATCH, every=EVERY)


def launch(
    script: Path, source: str, *command: str, timeout: float = 500, **env: str | None
) -> subprocess.CompletedProcess[str]:
    script.write_text(source)
    return subprocess.run(
        [sys.executable, *command, str(HERE / "driver.py"), str(script)],
        cwd=script.parent,
        env=helpers.child_env(
            **{
                "ACC_TEST_REGISTER": "1",
                "ACC_SKIP_PASSES": EXACT,
                "OMP_NUM_THREADS": "1",
                "OMP_WAIT_POLICY": "passive",
                **env,
            }
        ),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


class Run:
    """What the processes of a script printed: its own lines, and the driver's reports."""

    def __init__(self, done: subprocess.CompletedProcess[str], ranks: int) -> None:
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
        lines = done.stdout.splitlines()
        reports = [line for line in lines if line.startswith("REPORT ")]
        self.reports = [json.loads(line.removeprefix("REPORT ")) for line in reports]
        assert len(self.reports) == ranks
        self.losses = []
        for line in lines:
            if line not in reports:
                match = LINE.match(line)
                assert match, f"not a line that these scripts print: {line!r}"
                assert (match[1], match[2]) == ("0", str(EVERY))
                self.losses.append(float(match[3]))


def assert_ran_on(run: Run, device: str, passes: str | None = ALL) -> None:
    devices = sorted(report["device"] for report in run.reports)
    assert devices == [f"{device}:{rank}" for rank in range(len(run.reports))]
    for report in run.reports:
        assert report["parameters"] == [report["device"]] and report["gradients"]
        assert report["loader"] == "AsyncLoader"
        assert (report["kernels"] > 0) == (passes is ALL), "kernels are generated where they may be"


@pytest.fixture(scope="module")
def one(device_name, tmp_path_factory) -> Run:
    """The data parallel script by plain `python`: a process alone can be asked for its rank."""
    script = tmp_path_factory.mktemp("one") / "resnet_acc.py"
    return Run(launch(script, small(extract.data_parallel_script(text_of("001")))), 1)


@pytest.fixture(scope="module")
def device_name() -> str:
    return helpers.load_device()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "passes"),
    [(1, EXACT), (2, EXACT), (4, EXACT), (2, ALL)],
    ids=["1", "2", "4", "2-all-passes"],
)
def test_data_parallel(device, tmp_path, one, ranks, passes):
    source = small(extract.data_parallel_script(text_of("001")))
    command = (*TORCHRUN, f"--nproc_per_node={ranks}")
    done = launch(tmp_path / "resnet_acc.py", source, *command, ACC_SKIP_PASSES=passes)
    run = Run(done, ranks)
    assert_ran_on(run, device, passes)
    assert len(run.losses) == 1  # printed by the first process
    loss, norm = (LOSS, NORM) if passes is ALL else (0, 1e-6)
    assert run.losses == pytest.approx(one.losses, rel=loss, abs=0)
    for report in run.reports:
        assert report["norm"] == pytest.approx(one.reports[0]["norm"], rel=norm)
        assert ranks == 1 or report["transfers"] > EVERY, "gradients were not exchanged"


@pytest.mark.slow
@pytest.mark.parametrize("passes", [EXACT, ALL], ids=["exact", "all-passes"])
def test_fully_sharded(device, tmp_path, one, passes):
    source = small(extract.fsdp_script(text_of("001")))
    command = (*TORCHRUN, "--nproc_per_node=4")
    done = launch(tmp_path / "resnet_acc.py", source, *command, ACC_SKIP_PASSES=passes)
    run = Run(done, 4)
    assert_ran_on(run, device, passes)
    around = {"rel": LOSS} if passes is ALL else {"abs": 2e-4}
    assert run.losses == pytest.approx(one.losses * 4, **around)
    # Each process has a part of every parameter: their squares add up to the whole's.
    norm = sum(report["norm"] ** 2 for report in run.reports) ** 0.5
    assert norm == pytest.approx(one.reports[0]["norm"], rel=NORM if passes is ALL else 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_fully_sharded_by_too_few_processes(device, tmp_path, ranks):
    source = small(extract.fsdp_script(text_of("001")))
    command = (*TORCHRUN, f"--nproc_per_node={ranks}")
    done = launch(tmp_path / "resnet_acc.py", source, *command, timeout=300)
    assert done.returncode != 0 and "REPORT" not in done.stdout
    count = "there is 1" if ranks == 1 else "there are 2"
    text = f"dist.fsdp.size = 4 need a multiple of 4 processes, and {count}"
    # torchrun ends the others when the first of them has failed.
    assert text in done.stderr and "torchrun --nproc_per_node=4" in done.stderr


def assert_in_half(done: subprocess.CompletedProcess[str], run: Run, device: str, one: Run) -> None:
    """What fails when autocast, or the scaler, is off."""
    assert_ran_on(run, device)
    for report in run.reports:
        assert report["types"] == {"Conv2d": ["torch.float16"], "Linear": ["torch.float16"]}
        enabled, first, last = report["scaler"]
        assert enabled and first == 65536.0 and 1.0 <= last <= first
    assert "Disabling" not in done.stderr
    assert re.search(r"aten::convolution\(%\d+:f16", done.stderr), "no product of half types"
    # After some steps on random labels; test_autocast.py follows float32 closely.
    assert run.losses == pytest.approx(one.losses, rel=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [0, 1, 2, 4])
def test_mixed_precision(device, tmp_path, one, ranks):
    """0: by plain `python`. The numbers of processes that have the same data are the same."""
    source = small(extract.mixed_precision_script(text_of("002")))
    command = (*TORCHRUN, f"--nproc_per_node={ranks}") if ranks else ()
    env = {"ACC_SKIP_PASSES": ALL, "ACC_TEST_TYPES": "1", "ACC_DUMP": "graph"}
    done = launch(tmp_path / "resnet_acc.py", source, *command, **env)
    assert_in_half(done, Run(done, max(ranks, 1)), device, one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "instead", "seen"),
    [
        ("autocast(dtype=torch.float16)", "autocast(enabled=False)", "torch.float32"),
        ("GradScaler()", "GradScaler(enabled=False)", r"assert \(False"),
    ],
)
def test_what_is_switched_off_would_be_seen(device, tmp_path, one, asked, instead, seen):
    source = small(extract.mixed_precision_script(text_of("002")))
    assert source.count(asked) == 1
    env = {"ACC_SKIP_PASSES": ALL, "ACC_TEST_TYPES": "1", "ACC_DUMP": "graph"}
    done = launch(tmp_path / "resnet_acc.py", source.replace(asked, instead), **env)
    run = Run(done, 1)
    with pytest.raises(AssertionError, match=seen):
        assert_in_half(done, run, device, one)


def test_the_scripts_of_the_documents_are_what_we_know():
    for number in ("001", "002"):
        source = small(extract.data_parallel_script(text_of(number)))
        assert source.count("torch.distributed.") == 2 and "init_process_group" not in source
        compile(source, "data parallel", "exec")
    source = small(extract.fsdp_script(text_of("001")))
    assert 'config.dist.fsdp.wrap_layer_cls = {"Bottleneck"}' in source
    compile(source, "fully sharded", "exec")
