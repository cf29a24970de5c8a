"""torchvision's classification models train as accurately as with eager: twelve, or all of them.

`ACC_TEST_FULL=1` runs all; each takes 20 steps. With `ACC_TEST_RESULTS` naming a file, what was
measured is kept there, and what this build has measured is not measured again: a run that was ended
goes on, and several processes can share one.
"""

from __future__ import annotations

import ctypes
import gc

import pytest
import torch

from tests import helpers
from tests.models import record, vision

# The largest models take minutes, and give way to all that runs beside them.
pytestmark = pytest.mark.timeout(7200 if helpers.FULL else 3600)


@pytest.fixture
def memory_given_back(device):
    """Nothing of one model is kept while the next one runs."""
    yield
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    if helpers.ON_ACC:
        torch.acc.empty_cache()


@pytest.mark.parametrize("model", vision.MODELS if helpers.FULL else vision.FEW)
def test_as_accurate_as_eager(one_thread, memory_given_back, device, model):
    make = vision.OPTIMIZERS[vision.optimizer(model)]
    line = record.measured(model, lambda: vision.make(model), vision.optimizer(model), make, device)
    failures = line["failures"]
    assert not failures, "\n".join(failures)


def test_all_of_torchvision_is_here():
    assert len(vision.MODELS) == 80
    assert set(vision.FEW) <= set(vision.MODELS)


def test_a_line_names_the_worst_value_and_its_step():
    even, odd = (1e-6, 1e-6, 0.0), (9e-6, 1e-6, 0.0)
    runs = [{"loss": even, "update of w": odd if step == 7 else even} for step in range(20)]
    line = record.summary(runs)
    # The root mean square of one nine and nineteen ones is 2.24; 2 and a floor of 0.12 are allowed.
    assert (line["worst_of"], line["worst_step"], line["over"]) == ("update of w", 8, 1)
    assert record.summary([{"loss": even}])["over"] == 0
