"""Collectives on acc tensors are Gloo's on contiguous copies, whatever views they get."""

from __future__ import annotations

from collections import Counter

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


COLUMNS = (1, 2, 4)  # ranks, of the table in docs/distributed.md


def documented(ranks: int) -> dict[str, int]:
    """How many cases the table says were compared, by collective."""
    text = (helpers.ROOT / "docs" / "distributed.md").read_text()
    rows = text.split("## Compared with Gloo\n")[1].split("\n## ")[0].splitlines()
    found = {}
    for row in rows:
        name, *counts = (cell.strip() for cell in row.strip("|").split("|"))
        if len(counts) == len(COLUMNS) and counts[0].isdigit():
            found[name.strip("`")] = int(counts[COLUMNS.index(ranks)])
    return {name: count for name, count in found.items() if count}


@pytest.mark.parametrize("ranks", COLUMNS)
def test_every_collective_equals_gloo(ranks):
    for each in run_ranks(ALL, ranks):
        assert each.reports["wrong"] == []
        compared = Counter(name.split(" torch.")[0] for name in each.reports["names"])
        assert dict(compared) == documented(ranks), "the table of docs/distributed.md is another"
