"""How many plans are kept: ACC_PLAN_CACHE_MB, in which what they have captured is counted."""

from __future__ import annotations

import json

import pytest

from tests import helpers

pytestmark = pytest.mark.usefixtures("acc_only", "recording")

PLANS = """
import json
from tests import helpers
extension = helpers.extension()
for size in range(2, 32):
    x = torch.ones(size, device=DEVICE)
    for _ in range(4):
        y = x
        for _ in range(40):
            y = torch.cumsum(y * 0.5, 0)
        helpers.flush()
    assert y[0].item() == 0.5 ** 40
held = extension.held_memory(0)
torch.acc.empty_cache()
again = extension.held_memory(0)
of_captures = "of captured work, on the host"
print(json.dumps([helpers.stats(), dict(held)[of_captures], dict(again)[of_captures]]))
"""


@pytest.mark.usefixtures("capturing")
def test_what_is_captured_counts(device):
    if helpers.extension().executor_name() != "host":
        pytest.skip("on a GPU all of it is captured")
    found = {}
    for captures in ("0", "1"):
        done = helpers.run_python(
            PLANS, ACC_HOST_GRAPHS=captures, ACC_PLAN_CACHE_MB="1", ACC_DETERMINISTIC="1"
        )
        found[captures] = json.loads(done.stdout.splitlines()[-1])
    (plain, nothing, _), (captured, held, after) = found["0"], found["1"]
    assert plain["captures_submitted"] == nothing == after == 0
    assert captured["captures_submitted"] > 0
    assert captured["plans_built"] == plain["plans_built"]
    assert captured["plans_evicted"] > plain["plans_evicted"] > 0
    assert 0 < held < 1 << 20


FOLLOWED = """
from tests import helpers
inputs = [torch.ones(shape, device=DEVICE) for shape in [(3, 4), (5, 6), (7, 8)]]
def chain(x):
    for _ in range(30):
        x = torch.cumsum(x * 0.5, 0)
    helpers.flush()
def run(sizes):
    for size in sizes:
        for x in inputs:
            chain(x)
        chain(torch.ones(size, device=DEVICE))
run(range(10, 15))
with helpers.counting() as counted:
    run(range(15, 40))
assert counted["plans_evicted"] > 10, dict(counted.after)
assert counted["plan_follows"] >= 40
assert counted["plans_built"] == 25
"""


def test_plans_that_are_followed_are_in_use(device):
    """The recorder knows the next plan by itself; the cache is told all the same."""
    helpers.run_python(FOLLOWED, ACC_PLAN_CACHE_MB="1", ACC_DETERMINISTIC="1")
