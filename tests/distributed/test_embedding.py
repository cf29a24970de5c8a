"""torchacc.embedding in several processes: all give the same rows, and train one table."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("acc_only")

SETUP = """
import torchacc
from torch import nn
from torchacc.embedding import embedding_lookup_sparse, get_variable

class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = get_variable("t", 4, capacity=20)
        self.last = nn.Linear(4, 1)

    def forward(self, ids):
        ends = torch.arange(0, ids.numel() + 1, ids.shape[1])
        return self.last(embedding_lookup_sparse(self.table, (ids.flatten(), ends)))

def train(model, batches):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for ids in batches:
        optimizer.zero_grad()
        model(ids.to("acc")).square().mean().backward()
        optimizer.step()

torch.manual_seed(0)
inner = Pooled()
batches = [torch.randint(-5, 10, (4, 3)) for _ in range(4)]
"""


def test_all_give_the_same_rows_and_train_like_one() -> None:
    alone = (
        SETUP
        + """
model = torchacc.accelerate(inner)
for batch in batches:
    inner.table.add(batch)
train(model, batches)
report(ids=inner.table.ids.tolist(), weight=inner.table.weight.tolist())
"""
    )
    together = (
        SETUP
        + """
model = torchacc.accelerate(inner)
mine = [batch[2 * RANK : 2 * RANK + 2] for batch in batches]
report(text=refused(lambda: model(mine[0].to("acc"))), none=inner.table.ids.tolist())
before = torchacc.report()
for batch in mine:
    inner.table.add(batch)
report(ids=inner.table.ids.tolist(), made=torchacc.report(before).counters.get("plans_built", 0))
train(model, mine)
inner.table.eval()
report(unknown=inner.table(torch.tensor([99])).tolist(), same=inner.table.ids.tolist())
report(weight=inner.table.weight.tolist(), state=model.state_dict()["table._extra_state"].tolist())
dist.destroy_process_group()
"""
    )
    (one,) = (each.reports for each in run_ranks(alone, 1))
    first, second = (each.reports for each in run_ranks(together, 2))
    assert first["ids"] == second["ids"] == first["state"] == first["same"] == one["ids"]
    assert first["weight"] == second["weight"]
    torch.testing.assert_close(torch.tensor(first["weight"]), torch.tensor(one["weight"]))
    for each in (first, second):
        assert "ids are new, and several processes train together" in each["text"]
        assert each["none"] == [] and each["unknown"] == [[0.0] * 4]
        assert each["made"] == 0, "other ids are other plans"


def test_processes_that_gave_other_rows_before_are_told() -> None:
    code = (
        SETUP
        + """
inner(torch.tensor([[1, 2 + RANK]]))
model = torchacc.accelerate(inner)
report(text=refused(lambda: inner.table.add(torch.tensor([7]))), ids=inner.table.ids.tolist())
dist.destroy_process_group()
"""
    )
    for rank, each in enumerate(run_ranks(code, 2)):
        told = "the processes have given rows to different ids, this one to 2"
        assert told in each.reports["text"]
        assert each.reports["ids"] == [1, 2 + rank]
