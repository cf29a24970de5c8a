"""Where kernels of a GPU draw, operators would draw on the host: plans do without these."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "one_thread", "recording", "plans_of_a_gpu")

RUNS = 8


def launches(step: Callable[[], object]) -> tuple[list[int], int]:
    """Of kernels in each of the runs of a plan; and how many runs there were without any."""
    found = []
    with helpers.counting() as counted:
        for _ in range(RUNS):
            before = helpers.stats()["kernel_launches"]
            kept = step()
            helpers.flush()
            found.append(helpers.stats()["kernel_launches"] - before)
            del kept
    return found, counted["runs_unfused"]


def test_many_draws_wait_for_their_kernel_in_the_first_run():
    x = torch.ones(1 << 20, device=helpers.DEVICE)
    helpers.flush()
    assert launches(lambda: F.dropout(x, 0.25)) == ([1] * RUNS, 0)


def test_what_is_drawn_in_the_first_run_is_what_the_operator_draws():
    x = torch.randn(1 << 20)
    y = x.to(helpers.DEVICE)
    helpers.flush()
    draw = torch.acc.get_rng_state().view(torch.int64).tolist()
    expected, _ = torch.ops.acc.native_dropout(x, 2**31, 2.0, *draw)
    assert torch.equal(F.dropout(y, 0.5).cpu(), expected)


def test_few_draws_wait_for_nothing():
    x = torch.ones(1000, device=helpers.DEVICE)
    helpers.flush()
    found, unfused = launches(lambda: F.dropout(x, 0.25))
    assert found[0] == 0 and found[-1] == 1 and unfused > 0


COMPARED = """
import torch
from torch.nn.functional import dropout
from tests import helpers
from tests.python.test_drawing_plans import launches

helpers.emulate_gpu()
helpers.extension().capture_plans(False)
x, y = torch.ones(1 << 20, device="acc"), torch.ones(64, 64, device="acc")
helpers.flush()
found, unfused = launches(lambda: (dropout(x, 0.25), y.softmax(-1) * 2))
assert found[:6] == [2, 1, 2, 1, 2, 1] and unfused == 0, (found, unfused)
"""


def test_a_kernel_that_draws_is_not_compared_with_the_operator():
    """What does not draw is, in three runs of each form at least."""
    helpers.run_python(COMPARED, ACC_DETERMINISTIC="0")
