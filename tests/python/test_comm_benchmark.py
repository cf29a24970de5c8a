"""benchmarks/comm.py: what has to cross the link, what is judged, and what is said without root."""

from __future__ import annotations

import json

import pytest

from benchmarks import comm, comm_hosts, comm_steps, hosts
from benchmarks.checksums import Checksum
from benchmarks.stats import Window

MIB = 1 << 20


@pytest.mark.parametrize(
    ("way", "inside", "times"),
    [("plain", 2, 1.5), ("hierarchical", 2, 1.0), ("fp16", 2, 0.75), ("between hosts", 2, 2.0),
     ("plain", 8, 1.875), ("hierarchical", 8, 1.0)],
)  # fmt: skip
def test_bytes_that_cross_the_link(way, inside, times):
    assert comm_hosts.crossing_bytes(way, 100 * MIB, inside) == times * 100 * MIB


def test_chosen_elements_cross_with_their_places():
    size = 4 * 1000 * 100  # bytes of 100,000 elements, of which 1,000 are chosen
    assert comm_hosts.crossing_bytes("top-k", size, 2) == 3 * 1000 * (8 + 4)
    assert comm_hosts.crossing_bytes("top-k fp16", size, 2) == 3 * 1000 * (8 + 2)
    assert comm_hosts.crossing_bytes("within a host", size, 2) is None


@pytest.mark.parametrize(
    ("seconds", "foreign", "holds"), [(0.24, 0.0, True), (0.26, 0.0, False), (0.24, 0.3, None)]
)
def test_the_must_is_judged_where_others_let_it(seconds, foreign, holds):
    times = {"plain": [0.36] * 3, "hierarchical": [seconds] * 3}
    line = comm_hosts._line("hierarchical", 25 * MIB, times, 0.0, 1.0, foreign)
    assert line["limit_s"] == pytest.approx(0.2097152)
    assert line["holds"] is holds and line["valid"] is (holds is not None)
    assert line["over_plain"] == pytest.approx(0.36 / seconds)
    assert ("INVALID" in comm_hosts.row(line)) is (holds is None)
    small = comm_hosts._line("hierarchical", MIB, times, 0.0, 1.0, foreign)
    assert "must" not in small


def test_what_is_missing_is_a_row(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(hosts.shutil, "which", lambda name: None if name == "tc" else name)
    monkeypatch.setattr(comm.run, "require_plugin", lambda: None)
    monkeypatch.setattr(comm.load, "choose_cores", lambda count: [0, 0])
    monkeypatch.setattr(comm.load, "check_usable", lambda cores: None)
    file = tmp_path / "lines.jsonl"
    assert comm.main(["--part", "hosts", "--json", str(file)]) == 0
    head, line = map(json.loads, file.read_text().splitlines())
    assert head["suite"] == "comm hosts"
    assert line["not_run"] == "tc missing: apt-get install iproute2"
    assert "not run: tc missing" in capsys.readouterr().out


def test_without_root_there_are_no_hosts(monkeypatch):
    monkeypatch.setattr(hosts.shutil, "which", lambda name: name)
    monkeypatch.setattr(hosts.os, "geteuid", lambda: 1000)
    with pytest.raises(hosts.NotAvailable, match="need root"), hosts.two_hosts(1.0):
        pass


def modes(foreign: float, acc_ms: float = 100.0) -> list[comm_steps.Mode]:
    found = []
    for name, ms in (("eager", 120.0), ("acc", acc_ms)):
        mode = comm_steps.Mode(name, None, checksums=[Checksum("", (), ())])
        mode.windows = [
            Window(i, 10, (ms + i) / 100, 1.0, foreign * (ms + i) / 100, 2) for i in range(9)
        ]
        mode.overlaps = [0.5, 0.7, 0.9] if name == "acc" else []
        found.append(mode)
    return found


@pytest.mark.parametrize(("foreign", "holds"), [(0.0, True), (0.5, None)])
def test_steps_are_judged_on_windows_without_foreign_load(foreign, holds):
    measured = modes(foreign)
    selected = {mode.name: comm_steps.stats.select(mode.windows) for mode in measured}
    line = comm_steps._ratio_line("gpt", "ddp", measured, selected)
    assert line["ratio"] == pytest.approx(124 / 104) and line["holds"] is holds
    lines = [comm_steps._line("gpt", "ddp", m, selected[m.name], 2) for m in measured]
    assert [each["overlap"] for each in lines] == [None, 0.7]
    assert [each["overlap_holds"] for each in lines] == [None, True]
    assert lines[1]["median_ms"] == pytest.approx(104.0)
    table = comm_steps.markdown([{"kind": "header"}, *lines, line])
    assert ("[1.19 (" in table) is (holds is None) and "| 25 MiB |" in table


@pytest.mark.parametrize(
    ("acc_ms", "overlap", "foreign", "status"),
    [
        (100.0, 0.7, 0.0, comm.run.EXIT_OK),
        (200.0, 0.7, 0.0, comm.run.EXIT_MISSED),  # slower than eager
        (100.0, 0.4, 0.0, comm.run.EXIT_MISSED),
        (100.0, 0.4, 0.5, comm.run.EXIT_INVALID),
    ],
)
def test_a_must_that_is_missed_is_in_the_exit_status(acc_ms, overlap, foreign, status):
    measured = modes(foreign, acc_ms)
    measured[1].overlaps = [overlap] * 3
    selected = {mode.name: comm_steps.stats.select(mode.windows) for mode in measured}
    lines = [comm_steps._line("gpt", "ddp", m, selected[m.name], 2) for m in measured]
    lines.append(comm_steps._ratio_line("gpt", "ddp", measured, selected))
    assert comm.status(lines) == status
