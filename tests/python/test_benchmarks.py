"""The benchmark harness: statistics, foreign load, checksums, and what makes a run fail."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import (
    cases,
    driver,
    limits,
    load,
    measure,
    models,
    overhead,
    record,
    report,
    run,
    stats,
    worker,
)
from benchmarks.case import LESS_PRECISE
from benchmarks.cases import CASES, Case, Tolerance
from benchmarks.checksums import Checksum, checksum_of, mismatch
from benchmarks.driver import Worker, WorkerError, WorkerTimeout
from benchmarks.measure import Settings
from benchmarks.stats import Window
from tests import helpers
from tests.fake_workers import Fakes, lines_of

ROOT = Path(__file__).resolve().parents[2]


def window(alternation: int, ms: float = 1.0, foreign: float = 0.0) -> Window:
    return Window(alternation, 1000, ms, 0.5, foreign, 2)


# --- statistics ---------------------------------------------------------------------------------


def test_median_and_percentile():
    assert stats.median([3.0, 1.0, 2.0]) == 2.0
    assert stats.median([4.0, 1.0, 2.0, 3.0]) == 2.5
    assert stats.percentile([0.0, 10.0], 0.25) == 2.5
    assert stats.percentile([5.0], 0.975) == 5.0
    for empty in (stats.median, lambda values: stats.percentile(values, 0.5)):
        with pytest.raises(ValueError, match="no values"):
            empty([])


def test_speedup_is_the_ratio_of_medians_inside_its_interval():
    baseline = [10.0, 10.5, 9.5, 10.2, 9.9, 10.1, 10.0, 9.8, 10.3]
    measured = [value / 2.0 for value in baseline]
    ratio = stats.speedup(baseline, measured[::-1])
    assert ratio.value == pytest.approx(2.0)
    assert ratio.low < 2.0 < ratio.high
    assert 1.8 < ratio.low and ratio.high < 2.2
    assert ratio == stats.speedup(baseline, measured[::-1])


def test_pairing_cancels_drift_that_hits_both_modes():
    drift = [1.0, 1.3, 0.9, 1.6, 1.1, 1.4, 1.0, 1.2, 1.5]
    measured = [0.8 * value for value in drift]
    paired = stats.speedup(drift, measured)
    unpaired = stats.speedup(drift, measured, paired=False)
    assert paired.low == pytest.approx(1.25) and paired.high == pytest.approx(1.25)
    assert unpaired.high - unpaired.low > 0.2


def test_a_must_holds_by_the_lower_end_with_a_slack_of_two_hundredths():
    assert stats.Ratio(1.5, 0.96, 2.0).holds(0.97)
    assert stats.Ratio(0.96, 0.95, 0.97).holds(0.97)
    assert not stats.Ratio(1.5, 0.9499, 2.0).holds(0.97)
    assert stats.Ratio(1.0, 0.98, 1.0).holds(1.0)
    assert not stats.Ratio(1.2, 0.979, 1.5).holds(1.0)


@pytest.mark.parametrize(
    "baseline, measured", [([], [1.0]), ([1.0], []), ([1.0, 2.0], [1.0]), ([0.0], [1.0])]
)
def test_speedup_refuses_input_that_has_no_ratio(baseline, measured):
    with pytest.raises(ValueError, match=r"\[benchmarks.stats\]"):
        stats.speedup(baseline, measured)


def test_a_window_is_dirty_above_five_percent_and_three_ticks():
    assert not Window(0, 1, 1.0, 2.0, 0.099, 2).is_dirty()
    assert Window(0, 1, 1.0, 2.0, 0.101, 2).is_dirty()
    assert not Window(0, 1, 0.1, 0.1, 0.029, 1).is_dirty()  # ticks, not load
    assert Window(0, 1, 0.1, 0.1, 0.031, 1).is_dirty()


def test_more_than_a_fifth_of_dropped_windows_is_no_result():
    windows = [window(index) for index in range(8)]
    dirty = [window(8 + index, foreign=1.0) for index in range(3)]
    kept = stats.select(windows + dirty[:2])
    assert (len(kept.clean), kept.dropped, kept.total) == (8, 2, 10)
    assert kept.is_valid()
    assert not stats.select(windows + dirty).is_valid()
    assert not stats.select([]).is_valid()


def test_only_alternations_clean_in_both_modes_are_paired():
    first = [window(0, 1.0), window(1, 2.0), window(3, 4.0)]
    second = [window(1, 20.0), window(2, 30.0), window(3, 40.0)]
    assert stats.pair(first, second) == ([2.0, 4.0], [20.0, 40.0])


# --- memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cpu", "acc"])
def test_the_peak_of_memory_is_above_the_level_and_leaves_out_the_checksum(where):
    code = f"""
        import json, torch
        from benchmarks import worker
        if "{where}" == "acc":
            import torchacc_device
        def use(mib):
            kept = torch.ones(mib << 18, device="{where}")
            kept.sum().item()
            return kept
        device = worker.DeviceAccess("{where}")
        device.mark_level()
        use(64)
        with device.uncounted():
            use(256)
            kept = use(128)
        use(80)
        print(json.dumps(device.peak()))
    """
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert 79.0 < json.loads(output)["peak_mib"] < 120.0


# --- checksums ----------------------------------------------------------------------------------


def test_checksums_see_every_bit_and_survive_json():
    outputs = [torch.arange(6.0).reshape(2, 3), torch.tensor(3)]
    first = checksum_of([0.5, 0.25], outputs)
    assert Checksum.from_json(json.loads(json.dumps(first.to_json()))) == first
    assert checksum_of([0.5, 0.25], [outputs[0].t().contiguous().t(), outputs[1]]) == first
    flipped = outputs[0].clone()
    flipped[1, 2] = torch.nextafter(flipped[1, 2], torch.tensor(6.0))
    second = checksum_of([0.5, 0.25], [flipped, outputs[1]])
    assert second.digest != first.digest
    assert mismatch(first, first, exact=True, tolerance=Tolerance()) is None
    assert mismatch(first, second, exact=True, tolerance=Tolerance()) is not None
    assert mismatch(first, second, exact=False, tolerance=Tolerance()) is None


def test_one_wrong_element_is_out_of_tolerance():
    right = torch.ones(1000)
    wrong = right.clone()
    wrong[500] = -1.0  # the norm stays as it is
    why = mismatch(
        checksum_of([1.0], [right]),
        checksum_of([1.0], [wrong]),
        exact=False,
        tolerance=Tolerance(),
    )
    assert why is not None and "output 0" in why


@pytest.mark.parametrize(
    "values, expected",
    [
        ([1.0, 2.0, 3.0], None),
        ([1.0 + 5e-5, 2.0, 3.0], None),
        ([1.0 + 5e-4, 2.0, 3.0], "step 1 returned"),
        ([1.0, 2.03, 3.0], None),
        ([1.0, 2.0, 3.1], "step 3 returned"),
        ([1.0, float("nan"), 3.0], "step 2 returned nan"),
        ([1.0, 2.0], "2 steps instead of 3"),
    ],
)
def test_values_of_steps_within_tolerance(values, expected):
    base = Checksum("a", (1.0, 2.0, 3.0), ())
    why = mismatch(base, Checksum("b", tuple(values), ()), exact=False, tolerance=Tolerance())
    assert why is None if expected is None else expected in why


def test_an_overhead_is_the_median_of_pairs_whose_order_alternates(monkeypatch):
    # The machine gets slower from pair to pair, and disturbs the last.
    runs = [("hand", 1.0), ("accelerate", 1.25), ("accelerate", 2.5), ("hand", 2.0)]
    runs += [("hand", 4.0), ("accelerate", 40.0)]
    left = iter(runs)

    def run(case, way, threads):
        expected, seconds = next(left)
        assert (case, way, threads) == ("mlp", expected, 1)
        return {"seconds": seconds, "cpu_seconds": 3.0}

    monkeypatch.setattr(overhead, "_in_a_process", run)
    line = overhead.compare("mlp", threads=1, pairs=3)
    assert next(left, None) is None
    assert (line["ratio"], line["ratio_low"], line["ratio_high"]) == (1.25, 1.25, 10.0)
    assert line["cpu_ratio"] == 1.0 and line["hand_seconds"] == 2.0


# --- cases --------------------------------------------------------------------------------------


def test_the_cases_and_musts_are_those_of_the_plan():
    assert list(CASES) == [
        "mlp",
        "mlp_small",
        "resnet18",
        "resnet18_cifar",
        "gpt",
        "lstm",
        "lstm_unrolled",
        "block",
        "pointwise",
        "optimizer",
        "optimizer_fused",
        "seed",
        "seed_amp",
        "resnet50",
        "resnet50_16",
        "resnet50_64",
        "resnet50_1024",
        "resnet50_bf16",
        "resnet50_tf32",
        "swin",
        "swin_16",
        "swin_512",
        "swin_bf16",
        "vit_32",
        "vit_256",
        "bert_base_32",
        "bert_base_256",
        "bert_large_8",
        "bert_large_64",
        "gpt2",
        "gpt2_4",
        "gpt2_64",
        "gpt2_dropout",
        "llama_160m",
        "llama_1b",
        "mlp_5",
        "resnet18_cifar_32",
        *(
            f"dlrm_{tables}_{rows}{precision}"
            for tables in (26, 100)
            for rows in (4096, 65536)
            for precision in ("", "_bf16")
        ),
        "dynamic_2",
        "dynamic_8",
        "dynamic_32",
        "dynamic_padded",
        "dynamic_short",
        "dynamic_item",
        "dynamic_parts",
    ]
    on_hosts = {name: CASES[name] for name in cases.names_of("host")}
    assert list(CASES)[: len(on_hosts)] == list(on_hosts)
    assert cases.names_of("gpu") == list(CASES)
    assert {name: tuple(case.must.items()) for name, case in on_hosts.items()} == {
        "mlp": (("eager", 1.3), ("compile", 1.3)),
        "mlp_small": (("eager", 2.0), ("compile", 2.0)),
        "resnet18": (("eager", 1.05), ("compile", 1.0)),
        "resnet18_cifar": (("eager", 1.05), ("compile", 1.0)),
        "gpt": (("eager", 1.05), ("compile", 1.0)),
        "lstm": (("eager", 1.0), ("compile", 1.0)),
        "lstm_unrolled": (("eager", 1.5), ("compile", 1.5)),
        "block": (("eager", 1.05), ("compile", 1.0)),
        "pointwise": (("eager", 4.0), ("compile", 2.0)),
        "optimizer": (("eager", 2.5), ("eager_tuned", 1.0)),
        "optimizer_fused": (("eager", 1.0),),
    }
    assert {name: case.gpu_must for name, case in CASES.items() if case.gpu_must} == {
        **dict.fromkeys(("mlp_small", "resnet18_cifar", "gpt", "lstm"), {"eager": 3.0}),
        **dict.fromkeys(("mlp_5", "resnet18_cifar_32"), {"eager": 3.0, "compile": 1.0}),
        "seed": {"eager": 1.25},
        "seed_amp": {"eager": 2.0},
        "resnet50": {"compile": 1.0},
        "resnet50_16": {"graph": 1.0, "compile": 1.0},
        "swin": {"eager": 1.83, "compile": 1.0},
        **{f"vit_{rows}": {"eager_tuned": 1.1} for rows in (32, 256)},
        **{
            f"bert_{name}": {"eager_tuned": 1.15}
            for name in ("base_32", "base_256", "large_8", "large_64")
        },
        **{name: {"compile": 1.0} for name in ("gpt2", "gpt2_4", "gpt2_64", "llama_1b")},
        **{name: {"eager": 3.0} for name in CASES if name.startswith("dlrm_")},
    }
    tight = {name for name, case in CASES.items() if case.memory_must == 0.9}
    assert tight == {"gpt", "resnet18"}
    assert {case.memory_must for case in CASES.values()} == {0.9, 1.05}


def test_pointwise_is_twenty_operators_of_which_five_transcendental():
    class Count(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    inputs = torch.randn(8), torch.randn(8)
    with Count() as count, torch.no_grad():
        models.pointwise_chain(*inputs)
    transcendental = {"tanh", "exp", "sin", "erf", "sigmoid", "log1p", "cos"}
    assert len(count.names) == 20
    assert len(transcendental & set(count.names)) == 7


def test_the_optimizer_case_has_a_hundred_tensors_and_ten_million_parameters():
    program = cases.build("optimizer", "cpu", "plain")
    assert len(program.parameters) == 100
    assert sum(parameter.numel() for parameter in program.parameters) == 10_000_000
    assert len(program.gradients) >= 4


@pytest.mark.parametrize("name", ["mlp", "mlp_small", "lstm", "block"])
def test_inputs_rotate_over_four_batches_and_steps_are_repeatable(name):
    first, second = (cases.build(name, "cpu", "plain") for _ in range(2))
    assert len(first.batches) >= 4
    sums = {tuple(batch[0].flatten()[:4].tolist()) for batch in first.batches}
    assert len(sums) == len(first.batches)
    values = [[program.step(index) for index in range(3)] for program in (first, second)]
    assert values[0] == values[1]
    assert len(set(values[0])) == 3
    assert (
        checksum_of(values[0], first.outputs()).digest
        == checksum_of(values[1], second.outputs()).digest
    )


def test_the_unrolled_lstm_is_the_lstm():
    torch.manual_seed(3)
    fused, unrolled = models.Lstm(8), models.UnrolledLstm(8)
    with torch.no_grad():
        for layer in range(2):
            for ours, theirs in ((unrolled.inputs, "ih"), (unrolled.recurrent, "hh")):
                ours[layer].weight.copy_(getattr(fused.lstm, f"weight_{theirs}_l{layer}"))
                ours[layer].bias.copy_(getattr(fused.lstm, f"bias_{theirs}_l{layer}"))
        unrolled.head.load_state_dict(fused.head.state_dict())
        x = torch.randn(5, 3, 8)
        torch.testing.assert_close(unrolled(x), fused(x))


def test_variants_of_the_modes():
    convolutional = Case("c", "", convolutional=True)
    assert cases.variants_of(convolutional, "eager") == ("plain",)
    assert cases.variants_of(convolutional, "acc") == ("plain",)
    assert cases.variants_of(convolutional, "compile") == ("model", "step", "max-autotune")
    assert cases.variants_of(convolutional, "eager_tuned") == ("fused", "fused+channels_last")
    assert cases.variants_of(Case("b", "", has_optimizer=False), "eager_tuned") == ("plain",)
    assert cases.variants_of(convolutional, "capture") == ("capture",)
    on_gpu = ("model", "reduce-overhead", "max-autotune")
    assert cases.variants_of(convolutional, "compile", "gpu") == on_gpu
    tuned = ("fused+benchmark", "fused+benchmark+channels_last")
    assert cases.variants_of(convolutional, "eager_tuned", "gpu") == tuned
    assert cases.variants_of(convolutional, "graph", "gpu") == (tuned[1] + "+graph",)
    assert cases.variants_of(Case("b", ""), "graph", "gpu") == ("fused+graph",)


# --- a case with workers that only pretend ------------------------------------------------------


@pytest.fixture
def fakes(tmp_path, monkeypatch) -> Fakes:
    monkeypatch.setattr(load, "foreign_seconds", lambda before, after: 0.0)
    return Fakes(tmp_path)


def test_a_case_in_two_modes(fakes):
    result = fakes.measure({"acc": {"ms": 5.0}}, ("eager", "acc"))
    assert (result.failures, result.invalid, result.missed) == ([], [], [])
    rows = lines_of(result, "result")
    fields = "case mode threads n median_ms min_ms max_ms first_step_s step20_s peak_mib checksum"
    for row in rows.values():
        assert set(fields.split()) <= set(row)
        assert row["n"] >= stats.MIN_ALTERNATIONS and row["valid"] and row["dropped"] == 0
        assert (row["first_step_s"], row["step20_s"]) == (0.5, 2.0)
    assert rows["eager"]["median_ms"] == pytest.approx(10.0)
    ratio = lines_of(result, "ratio")["acc"]
    assert ratio["against"] == "eager" and ratio["ratio"] == pytest.approx(2.0)
    assert ratio["must"] == 1.0 and ratio["holds"] is True
    assert run.verdict([result], True) == (run.EXIT_OK, [])
    text = report.table(result.lines)
    assert "2.000 (2.000..2.000)" in text and "must holds: fake acc/eager speed" in text
    assert "fake" in report.svg(result.lines) and "acc 2.00" in report.svg(result.lines)
    assert fakes.alive() == []


def test_a_step_that_is_not_captured_is_shown_with_its_reason(fakes):
    refusal = {
        "raises_at": "cold",
        "error": "RuntimeError: [torchacc.capture] it reads (/a/b/x.py:3)",
    }
    result = fakes.measure({"capture": refusal}, ("eager", "capture"))
    assert (result.failures, result.missed) == ([], [])
    assert result.notes == ["fake: the step is not captured: it reads (x.py:3)"]
    assert lines_of(result, "result")["capture"]["n"] == 0
    assert "none runs" in report.table(result.lines)
    broken = fakes.measure({"capture": {"raises_at": "cold"}}, ("eager", "capture"))
    assert len(broken.failures) == 1 and not broken.notes
    fast = fakes.measure({"capture": {"ms": 1.0}}, ("eager", "compile", "acc", "capture"))
    ratios = {(r["mode"], r["against"]) for r in fast.lines if r["kind"] == "ratio"}
    assert {("capture", "eager"), ("capture", "compile")} <= ratios
    assert ("capture", "acc") not in ratios


@pytest.mark.parametrize("mode", ["acc", "compile"])
def test_modes_may_differ_within_tolerance_only(fakes, mode):
    near = {"digest": "other", "values": [1.00001, 2.001]}
    assert fakes.measure({mode: near}, ("eager", mode)).failures == []
    far = {"digest": "other", "values": [1.1, 2.0]}
    result = fakes.measure({mode: far}, ("eager", mode))
    assert len(result.failures) == 1 and "within tolerance expected" in result.failures[0]
    assert f"checksum mismatch, {mode}" in result.failures[0]
    status, messages = run.verdict([result], True)
    assert status == run.EXIT_FAILED
    assert messages[0].startswith("FAILED: fake: checksum mismatch")


def test_on_a_gpu_what_cudnn_rounds_may_differ_more(fakes):
    near = {"acc": {"digest": "other", "values": [1.005, 2.01]}}
    rounded = Case("fake", "a fake", gpu_tolerance=LESS_PRECISE)
    found = {
        suite: fakes.measure(near, ("eager", "acc"), case=rounded, suite=suite).failures
        for suite in ("host", "gpu")
    }
    assert len(found["host"]) == 1 and found["gpu"] == []
    wider = {name for name, case in CASES.items() if case.gpu_tolerance == LESS_PRECISE}
    assert wider == {"resnet18", "resnet18_cifar", "lstm"}


def test_a_value_that_is_not_finite_fails_even_alone(fakes):
    plans = {"eager": {"values": [1.0, float("nan")]}}
    assert "step 2 returned nan" in fakes.measure(plans, ("eager",)).failures[0]


def test_the_fastest_way_to_compile_is_reported_and_the_others_are_ended(fakes):
    plans = {
        "compile/model": {"ms": 9.0},
        "compile/step": {"ms": 6.0},
        "compile/max-autotune": {"raises_at": "cold"},
        "compile/step+channels_last": {"ms": 7.0},
    }
    case = Case("fake", "a fake", convolutional=True)
    row = lines_of(fakes.measure(plans, ("eager", "compile"), case=case), "result")["compile"]
    assert row["variant"] == "step" and row["median_ms"] == pytest.approx(6.0)
    tried = {entry["variant"]: entry for entry in row["variants"]}
    assert list(tried) == ["model", "step", "max-autotune", "step+channels_last"]
    assert "ValueError: from compile/max-autotune" in tried["max-autotune"]["error"]
    assert tried["model"]["median_ms"] == pytest.approx(9.0)
    assert fakes.alive() == []


def test_a_form_that_does_not_compile_in_time_is_noted_and_is_no_failure(fakes):
    case = Case("fake", "a fake", compile_timeout_s=0.5)
    result = fakes.measure({"compile": {"hangs_at": "cold"}}, ("eager", "compile"), case=case)
    assert result.failures == []
    assert "no form of compile runs" in result.notes[0] and "within 0 s" in result.notes[0]
    row = lines_of(result, "result")["compile"]
    assert row["n"] == 0 and row["median_ms"] is None and len(row["variants"]) == 1
    assert "none runs" in report.table(result.lines)
    assert fakes.alive() == []


@pytest.mark.parametrize("mode", ["eager", "acc"])
def test_a_mode_that_dies_fails_the_run_with_its_last_words(fakes, mode):
    result = fakes.measure({mode: {"dies_at": "cold"}}, ("eager", "acc"))
    assert len(result.failures) == 1
    assert f"{mode} does not run" in result.failures[0]
    assert f"the last words of {mode}/plain" in result.failures[0]
    assert run.verdict([result], True)[0] == run.EXIT_FAILED


def test_a_mode_that_dies_in_a_window_ends_every_process(fakes):
    with pytest.raises(WorkerError, match="ended with status 9"):
        fakes.measure({"acc": {"dies_at": "memory"}}, ("eager", "acc"))
    assert fakes.alive() == []


def test_a_missed_must_and_too_much_memory(fakes):
    result = fakes.measure({"acc": {"ms": 11.0, "peak": 106.0}}, ("eager", "acc"))
    assert any("fake: acc is 0.909x as fast as eager" in text for text in result.missed)
    assert any("1.06x the memory" in text for text in result.missed)
    assert run.verdict([result], True)[0] == run.EXIT_MISSED
    assert report.table(result.lines).count("MISSED") == 2
    (row,) = [row for row in report.markdown(result.lines).splitlines() if "`fake`" in row]
    assert row.split("|")[1:8] == [
        *(" `fake` ", " **0.91** (0.91 to 0.91) ", " 1 ", "  ", "  ", " **1.06** ", " 1.05 ")
    ]


def test_foreign_load_makes_a_run_invalid_after_more_tries(fakes, monkeypatch):
    monkeypatch.setattr(load, "foreign_seconds", lambda before, after: 100.0)
    result = fakes.measure({}, ("eager", "acc"), alternations=9)
    assert len(result.invalid) == 2
    assert "18 of 18 windows" in result.invalid[0]
    assert run.verdict([result], True)[0] == run.EXIT_INVALID
    row = lines_of(result, "result")["acc"]
    assert row["median_ms"] is None and row["valid"] is False


def test_rounds_are_added_until_nine_are_clean(fakes, monkeypatch):
    readings = iter([100.0, 100.0, 100.0] + [0.0] * 1000)  # warm-up, then the first round
    monkeypatch.setattr(load, "foreign_seconds", lambda before, after: next(readings))
    result = fakes.measure({"eager": {"ms": 1000.0}}, ("eager",), alternations=9)
    row = lines_of(result, "result")["eager"]
    assert (row["n"], row["dropped"], row["valid"]) == (9, 2, True)


def test_a_timeout_ends_the_worker(fakes):
    fakes.plans.write_text(json.dumps({"eager": {"hangs_at": "build"}}))
    spec = measure.worker_spec("fake", "eager", "plain", Settings("host", ("eager",), (0,)))
    with pytest.raises(WorkerTimeout, match="fake/eager/plain: no answer to 'build'"):
        fakes.spawn(spec).ask({"do": "build"}, 1.0)
    assert fakes.alive() == []


# --- processes and the command line -------------------------------------------------------------


def test_every_worker_has_fresh_caches_and_no_autoload(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/elsewhere")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "1")
    values = driver.environment(3, tmp_path / "caches", "host")
    assert values["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "0"
    assert values["OMP_NUM_THREADS"] == "3" and values["ACC_EXECUTOR"] == "host"
    folders = [
        Path(values[name])
        for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "ACC_CACHE_DIR")
    ]
    assert len(set(folders)) == 3
    assert all(folder.is_dir() and not list(folder.iterdir()) for folder in folders)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--modes", "eager,fast"], "unknown mode fast"),
        (["--modes", ","], "unknown mode (none)"),
        (["--modes", "eager", "--threads", "100000"], "--threads 100000"),
        (["--modes", "eager", "--threads", "0"], "Choose 1 to"),
        (["--modes", "eager", "--alternations", "0"], "must be positive"),
        (["--modes", "eager", "--limit-s", "0"], "--limit-s 0: a case needs time"),
    ],
)
def test_what_cannot_be_run_is_refused(arguments, message, capsys):
    assert run.main(["--suite", "host", *arguments]) == run.EXIT_REFUSED
    assert message in capsys.readouterr().err


def test_acc_is_refused_where_it_is_not_built(monkeypatch, capsys):
    monkeypatch.setattr(run.importlib.util, "find_spec", lambda name: None)
    assert run.main(["--suite", "host", "--case", "mlp_small"]) == run.EXIT_REFUSED
    assert "make develop" in capsys.readouterr().err


def test_the_gpu_suite_is_refused_without_a_gpu(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert run.main(["--suite", "gpu", "--case", "mlp_small"]) == run.EXIT_REFUSED
    said = capsys.readouterr().err
    assert "needs an NVIDIA GPU" in said and "Nothing was measured" in said


def test_a_quick_run_of_the_command(tmp_path):
    file = tmp_path / "result.jsonl"
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--suite", "host"]
    command += ["--case", "mlp_small", "--modes", "eager", "--threads", "1"]
    command += ["--alternations", "2", "--window-s", "0.02", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    # Other tests may load the machine: 3 says so, and the rest of the file is there all the same.
    assert done.returncode in (run.EXIT_OK, run.EXIT_INVALID), done.stdout + done.stderr
    header, started, row = map(json.loads, file.read_text().splitlines())
    assert (started["kind"], started["mode"]) == ("started", "eager") and started["warm_ms"] > 0.0
    assert header["kind"] == "header" and header["claimable"] is False
    assert {"date", "machine", "revision", "environment"} <= set(header)
    assert (row["case"], row["mode"], row["threads"]) == ("mlp_small", "eager", 1)
    assert 0.0 < row["first_step_s"] < row["step20_s"] and row["peak_mib"] >= 0.0
    assert row["n"] + row["dropped"] >= 2 and len(row["checksum"]) == 32
    assert row["versions"]["torch"] == torch.__version__ and row["versions"]["threads"] == 1
    assert "mlp_small" in done.stdout and "fewer or shorter windows" in done.stdout
    assert "/" not in json.dumps(header["machine"]) and str(ROOT) not in file.read_text()


def test_a_file_may_hold_several_runs(fakes, tmp_path):
    """Each with its header; without --append the last one alone."""
    fakes.plans.write_text("{}")
    words = "--suite host --threads 1 --alternations 1 --window-s 0.02 --modes eager --case".split()
    file = tmp_path / "lines.jsonl"

    def cases_after(case: str, *more: str) -> list[str]:
        run.run(run.parse([*words, case, "--json", str(file), *more]), fakes.spawn)
        lines = report.read([file])
        cases = [line["case"] for line in lines if line["kind"] == "result"]
        assert [line["cases"] for line in lines if line["kind"] == "header"] == [
            [case] for case in cases
        ]
        return cases

    assert cases_after("mlp", "--append") == ["mlp"]
    assert cases_after("block", "--append") == ["mlp", "block"]
    assert cases_after("gpt") == ["gpt"]


def still_running(pids: set[int]) -> set[int]:
    """Those that have not ended; an orphan that nobody waits for has, and keeps its number."""
    running = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            stat = Path(f"/proc/{pid}/stat").read_text()
            if stat[stat.rindex(")") + 2] != "Z":
                running.add(pid)
    return running


def test_a_terminated_run_ends_its_workers_and_removes_its_folders(tmp_path):
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "--suite", "host"]
    command += ["--case", "mlp_small", "--modes", "eager", "--window-s", "100"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    try:
        members: set[int] = set()
        for _ in range(1200):
            table = load.process_table()
            members = {pid for pid, entry in table.items() if entry.parent == process.pid}
            if members and list(tmp_path.iterdir()):
                break
            time.sleep(0.05)
        assert members and list(tmp_path.iterdir())
        process.terminate()
        assert process.wait(timeout=60) == 143
        assert list(tmp_path.iterdir()) == []
        # A worker that was just being started is not killed: it ends where its pipe is closed.
        deadline = time.monotonic() + 60
        while (left := still_running(members)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not left
    finally:
        process.kill()
        process.wait()


def test_a_baseline_beside_the_plugin_is_refused(acc_only, tmp_path, monkeypatch):
    with pytest.raises(RuntimeError, match="no baseline"):
        worker.assert_no_plugin()
    (tmp_path / "loads_plugin.py").write_text(
        "import torchacc_device\nfrom benchmarks.cases import build\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    settings = Settings("host", ("eager",), (load.choose_cores(1)[0],))
    spec = measure.worker_spec("mlp_small", "eager", "plain", settings)
    with_plugin = Worker({**spec, "module": "loads_plugin"})
    try:
        with pytest.raises(WorkerError, match="no baseline"):
            with_plugin.ask({"do": "build"}, 120.0)
    finally:
        with_plugin.close()


def test_acc_computes_the_bits_of_eager(acc_only, monkeypatch):
    monkeypatch.setenv("ACC_SKIP_PASSES", "fuse,accumulate,layout")
    modes = ("eager", "acc")
    cores = (load.choose_cores(1)[0],)
    settings = Settings("host", modes, cores, alternations=1, window_s=0.02)
    result = measure.measure_case(CASES["mlp_small"], settings)
    assert result.failures == []
    rows = lines_of(result, "result")
    assert rows["acc"]["checksum"] == rows["eager"]["checksum"]
    assert rows["acc"]["versions"]["executor"] == "host"


@pytest.mark.usefixtures("recording")
def test_capture_runs_a_case(acc_only):
    cores = (load.choose_cores(1)[0],)
    settings = Settings("host", ("eager", "capture"), cores, alternations=1, window_s=0.02)
    result = measure.measure_case(CASES["mlp_small"], settings)
    assert (result.failures, result.notes) == ([], [])
    assert lines_of(result, "result")["capture"]["variant"] == "capture"


@pytest.mark.usefixtures("recording")
@pytest.mark.skipif(not helpers.FULL, reason="ten million parameters; with ACC_TEST_FULL=1")
def test_capture_says_why_it_does_not_run_a_case(acc_only):
    cores = (load.choose_cores(1)[0],)
    settings = Settings("host", ("capture",), cores, alternations=1, window_s=0.02)
    result = measure.measure_case(CASES["optimizer"], settings)
    assert result.failures == []
    assert len(result.notes) == 1 and "another tensor at each call" in result.notes[0]


def test_the_cost_of_recording_is_measured_without_python(acc_only):
    settings = Settings(
        "host",
        ("acc",),
        (load.choose_cores(1)[0],),
        alternations=1,
        window_s=0.02,
        spawn=record.RecordWorker,
    )
    result = record.measure(record.MEASUREMENTS[0], settings)
    assert result.failures == []
    (line,) = result.lines
    assert (line["case"], line["mode"]) == ("add_below_autograd", "acc")
    assert line["n"] + line["dropped"] >= 1
    assert line["median_us"] is None or 0.0 < line["median_us"] < 1000.0
    assert "add_below_autograd" in record.table(result.lines)


@pytest.mark.usefixtures("recording")
def test_the_parts_of_a_step(acc_only, tmp_path):
    file = tmp_path / "limits.jsonl"
    names = ["mlp", "pointwise"] if helpers.FULL else ["mlp"]
    arguments = ["--case", *names, "--round-s", "0.01", "--json", str(file)]
    assert limits.main(arguments) == 0
    head, *rows = map(json.loads, file.read_text().splitlines())
    assert head["kind"] == "header" and head["cases"] == names == [row["case"] for row in rows]
    for row in rows:
        assert row["acc_ms"] > 0 and row["copy_gb_s"] > 0
        parts = row["library_ms"] + row["kernels_ms"] + row["other_ms"] + row["left_ms"]
        assert parts == pytest.approx(row["acc_ms"])
    assert rows[0]["library_ms"] > rows[0]["kernels_ms"] > 0
    if helpers.FULL:
        assert rows[1]["library_ms"] == 0 < rows[1]["kernels_ms"]
        assert rows[1]["library_alone"] is None


def test_the_script_that_measures_a_host_calls_what_there_is():
    script = ["sh", str(ROOT / "benchmarks/host_check.sh")]

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*script, *arguments], capture_output=True, text=True, check=False)

    lines = call("--dry-run", "word").stdout.splitlines()
    assert len(lines) == 16
    measured, names = set(), []
    for line in lines:
        _, program, *options = line.split()
        if program != "benchmarks/run.py":
            assert (ROOT / program).exists()
            names.append(options[options.index("--json") + 1])
            continue
        made = run.parse(options)
        assert made.json.name.partition("-host-")[2].startswith("word-")
        names.append(str(made.json))
        if made.threads == [1] and not made.startup:
            measured |= set(made.case)
    assert len(set(names)) == len(lines)
    assert measured == set(cases.names_of("host"))
    assert call("--dry-run", "word", "large").stdout.count("\n") == 1
    assert call("--dry-run", "word").returncode == 0
    refused = call("--dry-run", "word", "huge")
    assert (refused.returncode, "no part huge" in refused.stderr) == (2, True)
    assert "a word for the machine" in call().stderr


@pytest.mark.parametrize(
    ("ends", "status", "parts"),
    [("0 0", 0, 2), ("4 0", 0, 2), ("3 0", 3, 2), ("0 3", 3, 2), ("3 1", 1, 2), ("1 0", 1, 1)],
)
def test_what_the_parts_of_that_script_end_with(tmp_path, ends, status, parts):
    """0: measured, 4: a requirement is missed, 3: a busy neighbour, 1: a failure."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
        f"set -- {ends}\n[ $(wc -l < {tmp_path}/calls) = 1 ] || shift\nexit $1\n"
    )
    python.chmod(0o755)
    script = ["sh", str(ROOT / "benchmarks/host_check.sh"), "word", "small", "large"]
    done = subprocess.run(script, env={**os.environ, "PYTHON": str(python)}, check=False)
    assert done.returncode == status
    assert len((tmp_path / "calls").read_text().splitlines()) == parts
