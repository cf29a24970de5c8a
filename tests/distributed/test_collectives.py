"""Collectives on acc tensors are Gloo's on contiguous copies, whatever views they get."""

from __future__ import annotations

import pytest

from tests import helpers
from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("acc_only")

ALL = """
from tests.distributed import collectives
dist.init_process_group("cpu:gloo,acc:acc")
torch.acc.set_device(RANK % torch.acc.device_count())
report(**collectives.run(RANK, WORLD, torch.device(DEVICE, torch.acc.current_device())))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("ranks", [1, 2, 4] if helpers.FULL else [1, 2])
def test_every_collective_equals_gloo(ranks):
    for each in run_ranks(ALL, ranks):
        assert len(each.reports["names"]) > 500
        assert each.reports["wrong"] == []
