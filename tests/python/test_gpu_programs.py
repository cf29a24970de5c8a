"""The programs of the benchmark's cases for GPUs, in little on a host."""

from __future__ import annotations

import pytest
import torch

from benchmarks import models, trainings
from benchmarks.cases import CASES, build
from benchmarks.checksums import checksum_of, mismatch
from tests import helpers

# Of each kind of program one; with ACC_TEST_FULL=1 all that differ on a host.
SOME = (
    "resnet50_bf16",
    "swin",
    "vit_32",
    "bert_base_32",
    "llama_1b",
    "dlrm_26_4096_bf16",
    "dynamic_2",
    "dynamic_padded",
    "dynamic_short",
    "dynamic_parts",
)
MORE = (
    "resnet50",
    "resnet50_tf32",
    "swin_bf16",
    "bert_large_8",
    "gpt2",
    "llama_160m",
    "dlrm_26_4096",
    "dlrm_100_4096",
    "dynamic_8",
    "dynamic_32",
)


@pytest.mark.usefixtures("one_thread", "recording")
@pytest.mark.parametrize("name", [*SOME, *(MORE if helpers.FULL else ())])
def test_a_case_trains_as_eager_and_repeats_its_plans(acc_only, name):
    case, steps = CASES[name], max(9, CASES[name].period + 2)
    eager, acc = (build(name, where, "plain", small=True) for where in ("cpu", helpers.DEVICE))
    found = [
        checksum_of([program.step(index) for index in range(steps)], program.outputs())
        for program in (eager, acc)
    ]
    assert mismatch(*found, exact=False, tolerance=case.tolerance) is None
    stats = helpers.extension().stats
    for index in range(steps, steps + case.period + 4):
        acc.step(index)
    before = stats()
    for index in range(steps, steps + case.period):
        acc.step(index)
    built = {key: count - before.get(key, 0) for key, count in stats().items()}
    assert built["steps"] > 0
    assert [
        key for key in built if key.startswith(("fallback", "plans_built")) and built[key]
    ] == []


def test_what_begins_as_zeros_begins_beside_them():
    network = trainings.begun(models.small_resnet(10))
    assert all(parameter.any() for parameter in network.parameters())


def shapes_of(name: str, steps: int) -> list[tuple[int, ...]]:
    program = build(name, "cpu", "plain", small=True)
    return [tuple(program.batch(index)[0].shape) for index in range(steps)]


@pytest.mark.parametrize("count", [2, 8, 32])
def test_lengths_come_in_turn(count):
    shapes = shapes_of(f"dynamic_{count}", 2 * count)
    assert shapes[:count] == shapes[count:] and len(set(shapes)) == count
    assert CASES[f"dynamic_{count}"].period == count
    lengths = trainings.lengths_of(count, small=False)
    assert max(lengths) == 512 and len(set(lengths)) == count and min(lengths) > 100


def test_the_last_of_eight_batches_is_short():
    assert shapes_of("dynamic_short", 8) == [(2, 16)] * 7 + [(1, 16)]


def test_acc_pads_many_lengths_to_eight(acc_only):
    lengths = trainings.lengths_of(32, small=True)
    eager, acc = (
        build("dynamic_padded", where, "plain", small=True) for where in ("cpu", helpers.DEVICE)
    )
    plain, padded = ([program.batch(index) for index in range(32)] for program in (eager, acc))
    assert [batch[0].shape[1] for batch in plain] == lengths
    assert {batch[0].shape[1] for batch in padded} <= {5, 10, 15, 20, 25, 30, 35, 40}
    for (words, targets), (more, others) in zip(plain, padded, strict=True):
        length = words.shape[1]
        assert torch.equal(more[:, :length].cpu(), words) and not more[:, length:].any()
        assert torch.equal(others[:, :length].cpu(), targets) and (others[:, length:] == -100).all()


def test_gradients_of_parts_are_those_of_the_batch():
    in_parts, whole = (build("dynamic_parts", "cpu", "plain", small=True) for _ in "ab")
    assert in_parts.parts == 4 and in_parts.batch(0)[0].shape == (8, 16)
    whole.parts = 1
    losses = [program.step(0) for program in (in_parts, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    for each, other in zip(in_parts.model.parameters(), whole.model.parameters(), strict=True):
        assert (each.grad - other.grad).norm() <= 2e-2 * other.grad.norm()
