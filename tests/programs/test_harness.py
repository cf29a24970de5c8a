"""The harness of the programs: a wrong result, an exception and a crash are each told."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest

from tests import helpers
from tests.programs import test_programs as harness
from tests.programs.batch import run_program


@pytest.fixture
def good():
    return run_program("view_chain_write", "cpu")


def test_equal_results_pass(good):
    harness._compare(run_program("view_chain_write", "cpu"), good)


@pytest.mark.parametrize("what", ["values", "stride", "dtype", "count", "python", "error"])
def test_differences_fail(good, what):
    bad = copy.deepcopy(good)
    if what == "values":
        bad.result[0].values[0, 0] += 1
    elif what == "stride":
        bad.result[0].stride = (9, 9)
    elif what == "dtype":
        bad.result[0].dtype = "torch.float64"
    elif what == "count":
        bad.result.pop()
    elif what == "python":
        bad.result[-1] += 1
    else:
        bad.error = "raised"
    with pytest.raises(AssertionError):
        harness._compare(bad, good)


def test_a_crash_is_one_program_and_the_others_go_on(tmp_path, monkeypatch):
    folder = tmp_path / "crash"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys, types, os, signal\n"
        "bad = types.ModuleType('tests.programs.scripts.crashes')\n"
        "bad.run = lambda device: os.kill(os.getpid(), signal.SIGSEGV)\n"
        "sys.modules['tests.programs.scripts.crashes'] = bad\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    names = ["in_place_chain", "crashes", "view_chain_write"]
    found = harness._batch("cpu", names, tmp_path)
    assert "status -11" in found["crashes"].error
    assert not found["in_place_chain"].error
    assert not found["view_chain_write"].error


def test_a_lost_device_is_that_of_one_program(acc_only, tmp_path, monkeypatch):
    """CUDA refuses everything behind an error in a kernel."""
    if helpers.on_cuda():
        pytest.skip("waits that fail are those of the host")
    folder = tmp_path / "loses"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(
        "import sys, types\n"
        "def run(device):\n"
        "    import torch\n"
        "    from tests import helpers\n"
        "    helpers.extension().fail_waits(710)\n"
        "    return torch.ones(2, device=device)\n"
        "bad = types.ModuleType('tests.programs.scripts.loses')\n"
        "bad.run = run\n"
        "sys.modules['tests.programs.scripts.loses'] = bad\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    names = ["in_place_chain", "loses", "view_chain_write"]
    found = harness._batch(acc_only, names, tmp_path)
    assert "of no more use to this process" in found["loses"].error
    assert not found["in_place_chain"].error
    assert not found["view_chain_write"].error


def test_errors_that_end_a_gpus_context_are_left_out_there(monkeypatch):
    monkeypatch.setattr(helpers, "on_cuda", lambda: False)
    assert harness._run() == harness.NAMES
    monkeypatch.setattr(helpers, "on_cuda", lambda: True)
    assert set(harness.NAMES) - set(harness._run()) == {"index_error_in_step"}


def test_programs_that_no_test_is_about_do_not_run():
    def item(module=harness, **params: str) -> SimpleNamespace:
        return SimpleNamespace(module=module, callspec=SimpleNamespace(params=params))

    last, first = harness.NAMES[-1], harness.NAMES[0]
    chosen = [item(name=name, way="captured") for name in (last, first, last)]
    chosen += [SimpleNamespace(module=harness), item(module=pytest, name=harness.NAMES[1])]
    assert harness._asked(chosen) == [first, last]
    assert harness._asked([*chosen, item(way="captured")]) == harness.NAMES


def test_every_round_is_compared(good):
    several = run_program("view_chain_write", "cpu", rounds=3)
    harness._compare(several, good)
    several.earlier[1][0].values[0, 0] += 1
    with pytest.raises(AssertionError, match="round 2"):
        harness._compare(several, good, close=True)


@pytest.mark.parametrize("error, seen", [(1e-6, False), (1e-4, True)])
def test_near_is_near(error, seen):
    good = run_program("activations", "cpu")
    bad = copy.deepcopy(good)
    bad.result[1].values *= 1 + error
    if seen:
        with pytest.raises(AssertionError):
            harness._compare(bad, good, close=True)
    else:
        harness._compare(bad, good, close=True)
    with pytest.raises(AssertionError):
        harness._compare(bad, good)
