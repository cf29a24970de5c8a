"""The operator harness itself: each kind of failure is seen, a crash and a hang are survived.

Both sides are the CPU here, so the device under test need not be built.
"""

from __future__ import annotations

import pytest
import torch
from torch.testing._internal.opinfo.core import ErrorInput, SampleInput

from tests import helpers
from tests.opinfo import check, exceptions, runner, worker
from tests.opinfo.fake_ops import SAMPLES

SOURCE = "tests.opinfo.fake_ops"


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], runner.Result]:
    """The results of every misbehaving operator, by name and variant."""
    patch = pytest.MonkeyPatch()
    patch.setattr(runner, "HANG_SECONDS", 6.0)
    wanted = runner.requests(SOURCE, [check.FORWARD, check.GRADIENT], [torch.float32], [])
    # A gradient that crashes or hangs adds nothing but time.
    wanted = [r for r in wanted if r["variant"] == check.FORWARD or r["op"] in ("good", "gradient")]
    found = runner.run(wanted, source=SOURCE, env=helpers.child_env(ACC_TEST_DEVICE="cpu"))
    patch.undo()
    return {(r.op, r.variant): r for r in found}


@pytest.mark.parametrize("op", ["good", "nan"])
def test_an_operator_that_agrees_passes(outcomes, op):
    result = outcomes[op, check.FORWARD]
    assert (result.samples, result.failures) == (SAMPLES, [])


@pytest.mark.parametrize(
    ("op", "category", "failed"),
    [
        ("value", "value", {2}),
        ("close", "close", {0, 1, 2, 3}),
        ("shape", "shape", {0, 1, 2, 3}),
        ("stride", "stride", {0, 1, 2, 3}),
        ("dtype", "dtype", {0, 1, 2, 3}),
        ("input", "input", {0, 1, 2, 3}),
        ("alias", "alias", {0, 1, 2, 3}),
        ("raises", "raises", {1}),
        ("accepts", "accepts", {0, 1, 2, 3}),
        ("draws", "distribution", {0, 1, 2, 3}),
    ],
)
def test_each_kind_of_difference_is_seen(outcomes, op, category, failed):
    result = outcomes[op, check.FORWARD]
    assert result.samples == SAMPLES
    assert {index for index, kind, _ in result.failures if kind == category} == failed


def test_a_wrong_gradient_is_seen(outcomes):
    assert outcomes["good", check.GRADIENT].failures == []
    assert outcomes["gradient", check.FORWARD].failures == []
    kinds = {kind for _, kind, _ in outcomes["gradient", check.GRADIENT].failures}
    assert kinds == {"value"}


def test_a_crash_names_the_sample_and_the_rest_still_runs(outcomes):
    result = outcomes["crash", check.FORWARD]
    assert [(index, kind) for index, kind, _ in result.failures] == [(1, "crash")]
    assert "SIGSEGV" in result.failures[0][2]
    assert result.samples == SAMPLES
    assert not result.gave_up


def test_an_operator_that_always_ends_the_process_is_given_up(outcomes):
    result = outcomes["leave", check.FORWARD]
    assert result.gave_up
    assert {kind for _, kind, _ in result.failures} == {"crash"}
    assert "exit status 3" in result.failures[0][2]


def test_a_lost_device_costs_one_sample(acc_only):
    """CUDA refuses everything behind an error in a kernel: another process goes on."""
    if helpers.on_cuda():
        pytest.skip("waits that fail are those of the host")
    wanted = runner.requests(SOURCE, [check.FORWARD], [torch.float32], ["lost", "good"])
    good, lost = runner.run(wanted, source=SOURCE, env=helpers.child_env())
    assert (good.samples, good.failures) == (SAMPLES, [])
    assert [(index, kind) for index, kind, _ in lost.failures] == [(1, "raises"), (1, "crash")]
    assert lost.failures[1][2].startswith("the device was lost")
    assert lost.samples == SAMPLES and not lost.gave_up


def test_a_worker_starts_no_driver_before_it_forks(tmp_path):
    """No child could use a GPU then; and the database names none in its samples."""
    (tmp_path / "progress").write_bytes(bytes(worker.RECORD.size))
    code = f"""
import os, sys


def asked(*_):
    os.write(2, b"the worker has asked CUDA's driver")
    os._exit(9)


torch._C._cuda_getDeviceCount = torch._C._cuda_init = asked
sys.argv = ["-c", {runner.SOURCE!r}, {str(tmp_path / "progress")!r}]
{runner.WORKER}
"""
    assert '"ready"' in helpers.run_python(code, ACC_TEST_DEVICE="cpu").stdout


def test_error_inputs_on_a_gpu_are_those_of_cuda(monkeypatch):
    """An index out of bounds, which the database has for the CPU alone, would end its context."""
    asked = []

    class Op:
        def error_inputs(self, device):
            asked.append(device)
            shared = torch.ones(2, device="meta" if device == "cuda" else device)
            kwargs = {"out": shared, "device": device}
            yield ErrorInput(SampleInput(shared, kwargs=kwargs), error_regex="no")

    monkeypatch.setattr(helpers, "on_cuda", lambda: False)
    assert len(list(check.samples(Op(), check.ERROR, torch.float32))) == 1
    monkeypatch.setattr(helpers, "on_cuda", lambda: True)
    (given,) = check.samples(Op(), check.ERROR, torch.float32)
    assert asked == ["cpu", "cuda"]
    assert given.sample_input.kwargs["out"] is given.sample_input.input
    assert given.sample_input.kwargs["device"] == "cpu"


def test_a_hang_is_ended(outcomes):
    result = outcomes["hang", check.FORWARD]
    assert [(index, kind) for index, kind, _ in result.failures] == [(3, "hang")]


def test_random_operators_are_found(outcomes):
    assert outcomes["draws", check.FORWARD].random
    assert not outcomes["good", check.FORWARD].random


def test_no_exception_is_listed_twice_or_without_reason():
    lines = exceptions.EXCEPTED
    keys = [(e.op, e.variant, e.category, e.dtypes) for e in lines]
    assert len(keys) == len(set(keys))
    reasons = [e.reason for e in lines]
    for table in (
        exceptions.UNINITIALISED,
        exceptions.RANDOM,
        exceptions.DRAWS_CHANNELS,
        exceptions.RUN_AT_ONCE,
        exceptions.METADATA_ONLY,
        exceptions.WITHOUT_KERNEL,
    ):
        reasons += table.values()
    assert all(len(reason) >= 5 for reason in reasons)
    assert all(e.variant in (*check.ALL_VARIANTS, *check.CLOSE) for e in lines)


def test_copies_keep_geometry_and_share_nothing():
    base = torch.arange(24.0)
    cases = [
        base.view(4, 6).t(),
        base.view(4, 6)[:, 1::2],
        base[3:4].expand(5, 1),
        base.as_strided((3, 3), (1, 2), 2),
        torch.tensor(2.0),
        torch.empty(0, 3),
        torch.empty(2, 0)[:, :0],
        torch.view_as_complex(base.view(12, 2)).conj(),
    ]
    for source in cases:
        made = helpers.clone_to(source, "cpu")
        assert helpers.tensor_differences(made, source) == []
        assert made.stride() == source.stride()
        assert made.is_conj() == source.is_conj()
        if source.numel():
            assert made.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()


def test_bit_comparison_tells_signs_of_zero_and_forgives_nan():
    nan, zero = torch.tensor([float("nan"), 1.0]), torch.tensor([0.0, 1.0])
    assert helpers.value_difference(nan, nan.clone()) is None
    assert helpers.value_difference(nan, torch.tensor([0.0, 1.0]))[0] == "value"
    assert helpers.value_difference(-zero[:1], zero[:1]) is not None
    assert helpers.value_difference(torch.tensor([1, 2]), torch.tensor([1, 3]))[0] == "value"
    assert helpers.value_difference(torch.tensor([True]), torch.tensor([False]))[0] == "value"
