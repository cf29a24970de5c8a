"""What the benchmark demands of which mode, how programs start, and the tables and the picture."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks import load, measure, report, startup
from benchmarks.cases import Case
from benchmarks.driver import Worker
from benchmarks.measure import Settings
from tests.fake_workers import Fakes, lines_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def fakes(tmp_path, monkeypatch) -> Fakes:
    monkeypatch.setattr(load, "foreign_seconds", lambda before, after: 0.0)
    return Fakes(tmp_path)


def with_threads(lines: list[dict], threads: int) -> list[dict]:
    return [{**line, "threads": threads} for line in lines]


def test_musts_of_speed_are_for_one_thread(fakes):
    case = Case("fake", "a fake", must={"eager": 3.0}, goal=4.0)
    plans = {"acc": {"ms": 5.0}}
    assert len(fakes.measure(plans, ("eager", "acc"), case=case).missed) == 1
    two = Settings("host", ("eager", "acc"), (0, 0), spawn=fakes.spawn)
    assert measure.measure_case(case, two).missed == []


def test_a_must_against_tuned_eager_has_it_run(fakes):
    case = Case("fake", "a fake", has_optimizer=False, must={"eager_tuned": 1.0})
    result = fakes.measure({"acc": {"ms": 5.0}}, ("eager", "acc"), case=case)
    assert set(lines_of(result, "result")) == {"eager", "eager_tuned", "acc"}
    assert {line["against"] for line in result.lines if line.get("holds")} >= {"eager_tuned"}
    assert set(lines_of(fakes.measure({}, ("eager",), case=case), "result")) == {"eager"}


def test_only_the_named_forms_of_compile_are_tried(fakes):
    case = Case("fake", "a fake", convolutional=True)
    result = fakes.measure({}, ("eager", "compile"), case=case, compile_forms=("step",))
    row = lines_of(result, "result")["compile"]
    assert [entry["variant"] for entry in row["variants"]] == ["step"]


def test_the_summary_says_what_must_be_and_whether_it_is(fakes):
    case = Case("fake", "a fake", must={"eager": 1.5, "compile": 3.0}, goal=4.0, memory_must=0.9)
    modes = ("eager", "compile", "acc")
    plans = {"acc": {"ms": 5.0, "peak": 95.0}}
    lines = fakes.measure(plans, modes, case=case, compile_forms=("model",)).lines
    others = with_threads(fakes.measure({"acc": {"ms": 8.0}}, modes[::2]).lines, 2)
    head, first, second = report.summary(lines + others).splitlines()
    assert head.split()[:5] == ["case", "mode", "threads", "x", "eager"]
    assert first.split() == (
        "fake acc 1 2.00 >= 1.50 yes 2.00 >= 3.00 NO 4.00 0.95 <= 0.90 NO".split()
    )
    assert second.split()[:8] == "fake acc 2 1.25 >= 1.00 yes 1.00".split()
    text = report.table(lines + others)
    assert "2.000 (2.000..2.000)" in text and "1.250 (1.250..1.250)" in text
    picture = report.svg(lines + others)
    assert "acc 2.00" in picture and "acc 1.25" not in picture and ">1 thread, torch 0<" in picture


def test_what_foreign_load_spoilt_is_not_judged(fakes, monkeypatch):
    readings = itertools.cycle([100.0, 0.0, 0.0])
    monkeypatch.setattr(load, "foreign_seconds", lambda before, after: next(readings))
    case = Case("fake", "a fake", must={"eager": 3.0})
    result = fakes.measure({}, ("eager", "acc"), case=case, alternations=9)
    (ratio,) = lines_of(result, "ratio").values()
    assert ratio["valid"] is False and ratio["holds"] is None and result.missed == []
    assert "must not judged: fake acc/eager speed 1.000" in report.table(result.lines)
    assert "| [1.00 (1.00 to 1.00)] | 3 |" in report.markdown(result.lines)
    assert "[1.00]" in report.summary(result.lines)


def test_two_runs_of_a_case_are_not_mixed(fakes, tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    lines = fakes.measure({}, ("eager", "acc"), case=Case("fake", "a fake")).lines
    for file in (first, second):
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert len(report.read([first])) == len(lines)
    both = r"a.jsonl, run 0, and b.jsonl, run 0, both have fake in mode eager"
    with pytest.raises(ValueError, match=both):
        report.read([first, second])
    # nor those of one file (run.py --append)
    head = json.dumps({"kind": "header", "threads": 1}) + "\n"
    other = [{**line, "case": "other"} for line in lines]
    text, of_another = (
        "".join(json.dumps(each) + "\n" for each in made) for made in (lines, other)
    )
    first.write_text(head + text + head + of_another)
    assert len(report.read([first])) == 2 + 2 * len(lines)
    first.write_text(head + text + head + of_another + head + text)
    both = r"a.jsonl, run 1, and a.jsonl, run 3, both have fake in mode eager"
    with pytest.raises(ValueError, match=both):
        report.read([first])


def test_a_run_that_measured_starts_adds_these_alone():
    """As the tables of docs/performance.md were made."""
    folder = ROOT / "benchmarks" / "results"
    names = ("threads1-small", "start")
    small, start = (folder / f"2026-11-23-host-epyc-{name}.jsonl" for name in names)
    assert any('"mlp_small"' in line for line in start.read_text().splitlines())
    lines = report.read([start, small])
    kinds = [line["kind"] for line in lines]
    assert [each for each in lines if each["kind"] == "result"] == [
        each for each in report.read([small]) if each["kind"] == "result"
    ]
    assert "startup" in kinds and report.markdown(lines).count("| `mlp_small` |") == 1


def test_the_start_is_measured_with_caches_cold_and_warm(fakes):
    fakes.plans.write_text(
        json.dumps(
            {
                "acc": {"cold": [0.9, 4.0], "warm": [0.6, 2.6]},
                "compile": {"cold": [30.0, 31.0], "warm": [7.0, 8.0]},
            }
        )
    )

    def start(spec, caches) -> Worker:
        return Worker(spec, (sys.executable, str(fakes.script)), caches=caches)

    settings = Settings("host", ("eager", "compile", "acc"), (load.choose_cores(1)[0],))
    result = startup.measure_startup(settings, start)
    found = {(line["mode"], line["cache"], line["what"]): line for line in result.lines}
    assert len(found) == 12 and (result.failures, result.invalid) == ([], [])
    assert found["acc", "cold", "step20_s"]["seconds"] == 4.0
    assert found["acc", "cold", "step20_s"]["over_eager_s"] == pytest.approx(2.0)
    assert found["acc", "cold", "first_step_s"]["over_eager_s"] == pytest.approx(0.4)
    assert found["compile", "warm", "first_step_s"]["seconds"] == 7.0
    assert found["compile", "warm", "first_step_s"]["must"] is None
    holds = {key[1:]: line["holds"] for key, line in found.items() if line["must"] is not None}
    assert holds == {
        ("cold", "first_step_s"): True,
        ("cold", "step20_s"): True,
        ("warm", "first_step_s"): True,
        ("warm", "step20_s"): False,
    }
    assert len(result.missed) == 1 and "0.60 s over eager's 2.00 s" in result.missed[0]
    started = [line.split()[0] for line in fakes.started.read_text().splitlines()]
    assert started.count("eager/plain") == startup.REPEATS
    assert started.count("acc/plain") == 2 * startup.REPEATS
    assert started.count("compile/model") == 2 * startup.COMPILE_REPEATS
    assert "step20_s" in report.summary(result.lines) and fakes.alive() == []


def test_starts_with_foreign_load_are_repeated(fakes, monkeypatch):
    fakes.plans.write_text("{}")
    loads = iter([100.0, 0.0])
    monkeypatch.setattr(load, "foreign_seconds", lambda before, after: next(loads, 0.0))

    def start(spec, caches) -> Worker:
        return Worker(spec, (sys.executable, str(fakes.script)), caches=caches)

    settings = Settings("host", ("eager",), (load.choose_cores(1)[0],))
    result = startup.measure_startup(settings, start)
    assert len(fakes.started.read_text().splitlines()) == startup.REPEATS + 1
    assert result.invalid == [] and {line["dirty"] for line in result.lines} == {0}
    monkeypatch.setattr(load, "foreign_seconds", lambda before, after: 100.0)
    again = startup.measure_startup(settings, start)
    assert again.invalid == ["gpt: 3 starts of eager had foreign load"]


def test_result_files_are_shown_and_drawn_together(tmp_path, capsys):
    files = sorted((ROOT / "benchmarks" / "results").glob("2026-11-21-host-epyc-threads*mlp.jsonl"))
    picture = tmp_path / "folder" / "picture.svg"
    assert len(files) == 2
    assert report.main([*map(str, files), "--svg", str(picture)]) == 0
    rows = [row.split()[:3] for row in capsys.readouterr().out.splitlines()]
    assert ["mlp", "acc", "1"] in rows and ["mlp", "acc", "2"] in rows
    drawn = ElementTree.fromstring(picture.read_text())
    texts = ["".join(part.itertext()) for part in drawn.iter() if part.tag.endswith("text")]
    assert "mlp" in texts and "eager 1.00" in texts
    assert any("1 thread, AMD EPYC, 2026-11-21, torch 2.11.0" in text for text in texts)
