"""A benchmark that is stopped: what it had is told, and what is missing is named."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest

from benchmarks import driver, load, measure, run
from benchmarks.cases import Case
from benchmarks.driver import Stopped
from benchmarks.measure import STOPPED, Settings
from tests.fake_workers import Fakes, lines_of


@pytest.fixture
def fakes(tmp_path, monkeypatch) -> Fakes:
    monkeypatch.setattr(load, "foreign_seconds", lambda before, after: 0.0)
    return Fakes(tmp_path)


@pytest.fixture
def terminable():
    """SIGTERM stops, as in the program."""
    before = signal.getsignal(signal.SIGTERM)
    driver.clean_up_when_terminated()
    yield
    signal.signal(signal.SIGTERM, before)


def terminate_when(fakes: Fakes, started: str, times: int = 1) -> None:
    """Sends this process SIGTERM once so many workers of a name have begun."""

    def wait() -> None:
        while fakes.started.read_text().count(started) < times:
            time.sleep(0.01)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def test_what_was_measured_is_told(fakes, terminable, tmp_path, capsys):
    """torch.compile takes too long; the modes that matter most have begun before."""
    plans = {"eager": {"ms": 10.0}, "acc": {"ms": 5.0}, "compile": {"hangs_at": "cold"}}
    fakes.plans.write_text(json.dumps(plans))
    file = tmp_path / "lines.jsonl"
    words = "--suite host --case mlp_small block --modes eager,compile,acc --threads 1 --startup"
    options = run.parse([*words.split(), "--json", str(file)])
    terminate_when(fakes, "compile/model")
    assert run.run(options, fakes.spawn) == run.EXIT_STOPPED == 143
    assert fakes.alive() == []
    started = [line.split()[0] for line in fakes.started.read_text().splitlines()]
    assert started == ["eager/plain", "acc/plain", "compile/model"]
    out, err = capsys.readouterr()
    assert "mlp_small: acc (plain): first step 0.50 s, step 20 after 2.00 s" in err
    table, _, _ = out.partition("\n\n")
    rows = {words[1]: words for words in map(str.split, table.splitlines())}
    assert rows["eager"][2:6] == ["plain", "1", "1", "10.000"]
    assert rows["acc"][2:6] == ["plain", "1", "1", "5.000"]
    assert " ".join(rows["compile"][2:]).startswith(f"{STOPPED} 1 0")
    assert "must not judged: mlp_small acc/eager speed 2.000" in out
    assert f"note: mlp_small: compile {STOPPED}" in out
    assert f"note: {STOPPED}: block, the first steps" in out
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    kinds = [(line["kind"], line.get("mode")) for line in lines]
    assert kinds[:3] == [("header", None), ("started", "eager"), ("started", "acc")]
    assert lines[2]["warm_ms"] == 5.0
    by_mode = {line["mode"]: line for line in lines if line["kind"] == "result"}
    counted = {mode: line["n"] for mode, line in by_mode.items()}
    assert counted == {"eager": 1, "acc": 1, "compile": 0}
    assert by_mode["compile"]["why"] == STOPPED
    assert not by_mode["acc"]["valid"]


def test_windows_of_a_case_that_is_stopped_count_as_far_as_they_go(fakes, monkeypatch):
    alternate = measure.alternate

    def stopped(runs, settings) -> None:
        alternate(runs, settings)
        raise Stopped(143)

    monkeypatch.setattr(measure, "alternate", stopped)
    case = Case("fake", "a fake", must={"eager": 3.0})
    result = fakes.measure({}, ("eager", "acc"), case=case, alternations=9)
    assert result.stopped and (result.failures, result.invalid, result.missed) == ([], [], [])
    assert {line["n"] for line in lines_of(result, "result").values()} == {9}
    assert {line["peak_mib"] for line in lines_of(result, "result").values()} == {None}
    ratio = lines_of(result, "ratio")["acc"]
    assert (ratio["valid"], ratio["holds"]) == (False, None)
    assert fakes.alive() == []


def test_a_case_that_is_stopped_behind_its_windows_is_judged(fakes, terminable):
    """What was to come is a start with warm caches, on a GPU."""
    case = Case("fake", "a fake", gpu_must={"eager": 3.0})
    plans = {"acc": {"hangs_warm_at": "cold"}}
    terminate_when(fakes, "acc/plain", 2)
    result = fakes.measure(plans, ("eager", "acc"), case=case, suite="gpu")
    assert result.stopped and result.notes == [f"fake: acc with warm caches {STOPPED}"]
    assert lines_of(result, "ratio")["acc"]["holds"] is False
    assert lines_of(result, "memory")["acc"]["holds"] is True
    assert [line["cache"] for line in result.lines if line["kind"] == "start"] == ["cold"]
    assert fakes.alive() == []


def test_one_signal_stops(terminable):
    with pytest.raises(Stopped) as caught:
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == run.EXIT_STOPPED
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.parametrize(("grace_s", "status"), [(60.0, 0), (0.0, -signal.SIGKILL)])
def test_a_worker_without_grace_is_ended_at_once(fakes, monkeypatch, grace_s, status):
    """It stands still unless it is waited for: it may not be faster than its end."""
    fakes.plans.write_text("{}")
    spec = measure.worker_spec("fake", "eager", "plain", Settings("host", ("eager",), (0,)))
    worker = fakes.spawn(spec)
    worker.ask({"do": "build"}, 60.0)
    os.kill(worker.pid, signal.SIGSTOP)
    wait = worker._process.wait

    def go_on(timeout=None):
        if timeout:
            os.kill(worker.pid, signal.SIGCONT)
        return wait(timeout)

    monkeypatch.setattr(worker._process, "wait", go_on)
    worker.close(grace_s)
    assert worker._process.returncode == status


def test_wrong_results_of_a_case_that_is_stopped_fail(fakes, monkeypatch):
    def stopped(runs, settings) -> None:
        raise Stopped(143)

    monkeypatch.setattr(measure, "alternate", stopped)
    wrong = {"digest": "other", "values": [1.1, 2.0]}
    result = fakes.measure({"acc": wrong}, ("eager", "acc"))
    assert len(result.failures) == 1 and "checksum mismatch" in result.failures[0]


def test_compiling_leaves_time_for_the_windows(fakes):
    """Of 100 s these need 36; of 30, all."""
    deadline = time.monotonic() + 100.0
    settings = Settings("host", ("eager", "compile"), (0,), 9, 1.0, deadline=deadline)
    assert 34.0 < measure.compile_s(Case("c", ""), settings) <= 64.0
    assert measure.compile_s(Case("c", "", compile_timeout_s=9.0), settings) == 9.0
    plans = {"compile": {"hangs_at": "cold"}}
    result = fakes.measure(plans, ("eager", "acc", "compile"), window_s=0.5, limit_s=30.0)
    assert not result.stopped and "no form of compile runs" in result.notes[0]
    assert result.failures == [] and lines_of(result, "ratio")["acc"]["holds"] is True


def test_what_compiles_starts_last():
    assert sorted(measure.STARTING) == sorted(measure.MODES)
    assert measure.STARTING[:2] == ("eager", "acc") and measure.STARTING[-1] == "compile"


def test_starts_that_are_stopped_are_named(fakes, terminable):
    from benchmarks import startup

    fakes.plans.write_text(json.dumps({"acc": {"hangs_at": "cold"}}))
    terminate_when(fakes, "acc/plain")
    settings = Settings("host", ("eager", "acc"), (load.choose_cores(1)[0],))
    result = startup.measure_startup(settings, fakes.spawn)
    assert result.stopped and result.notes == [f"gpt: starts of acc {STOPPED}"]
    assert {line["mode"] for line in result.lines} == {"eager"}
