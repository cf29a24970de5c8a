"""Schedules of `torch.distributed.pipelining` on acc, and what a rank sends to itself."""

from __future__ import annotations

import pytest

from tests import helpers
from tests.distributed.ranks import GROUP, LEAVE, run_ranks

pytestmark = pytest.mark.usefixtures("acc_only")

PIPELINE = """
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules
from tests.distributed.models import largest

def block(i):
    torch.manual_seed(i)
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh())

def places(name, kind):
    '''The stages of this rank.'''
    if not issubclass(kind, schedules.PipelineScheduleMulti):
        return [RANK]
    if name in ("ZBVZeroBubble", "DualPipeV"):
        return [RANK, 2 * WORLD - 1 - RANK]
    return [RANK, RANK + WORLD]

def away(mine, theirs):
    return float((mine.cpu() - theirs).norm() / theirs.norm())

def run(name):
    kind = schedules.get_schedule_class(name)
    mine = places(name, kind)
    count = WORLD * len(mine)
    whole = nn.Sequential(*(block(i) for i in range(count)))
    torch.manual_seed(count)
    x, target = torch.randn(16, 6), torch.randn(16, 6)
    modules = {i: block(i).to(device) for i in mine}
    stages = [PipelineStage(module, i, count, device) for i, module in modules.items()]
    schedule = kind(stages if len(mine) > 1 else stages[0], 8, loss_fn=nn.functional.mse_loss)
    found = []
    for _ in range(3):
        for module in (whole, *modules.values()):
            module.zero_grad()
        expected = nn.functional.mse_loss(whole(x), target)
        expected.backward()
        losses = []
        last = {"target": target.to(device), "losses": losses} if count - 1 in mine else {}
        schedule.step(*([x.to(device)] if 0 in mine else []), **last)
        for i, module in modules.items():
            for p, q in zip(module.parameters(), whole[i].parameters(), strict=True):
                found.append(away(p.grad, q.grad))
        if losses:
            found.append(away(torch.stack(losses).detach().mean(), expected.detach()))
    return largest(found)
"""
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble",
             "ZBVZeroBubble", "DualPipeV")  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4] if helpers.FULL else [2])
def test_every_schedule_gives_the_gradients_of_the_whole_model(ranks):
    code = "".join(f"report(**{{{name!r}: run({name!r})}})\n" for name in SCHEDULES)
    for rank in run_ranks(GROUP + PIPELINE + code + LEAVE, ranks):
        assert set(rank.reports) == set(SCHEDULES)
        assert all(away < 1e-6 for away in rank.reports.values()), rank.reports


def test_a_rank_sends_to_itself():
    code = """
x = torch.arange(4.0, device=device) + RANK
y, z = torch.empty(2, 2, device=device), torch.empty(4, device=device)
# the receives are told apart by their order, and do not see what is written later
received = [dist.irecv(y, RANK), dist.irecv(z, RANK)]
report(early=received[0].is_completed())
dist.isend(x, RANK)
x += 10
dist.isend(x, RANK)
received[1].wait()
received[0].wait()
report(y=y.tolist(), z=z.tolist())
peer = 1 - RANK
mine, theirs = torch.empty(4, device=device), torch.empty(4, device=device)
for work in dist.batch_isend_irecv([
    dist.P2POp(dist.irecv, mine, RANK), dist.P2POp(dist.irecv, theirs, peer),
    dist.P2POp(dist.isend, x, RANK), dist.P2POp(dist.isend, x, peer),
]):
    work.wait()
report(mine=mine.tolist(), theirs=theirs.tolist())
def refused(function):
    try:
        function()
    except RuntimeError as error:
        return str(error)
report(nothing=refused(lambda: dist.irecv(z, RANK).wait()))
"""
    for number, rank in enumerate(run_ranks(GROUP + code + LEAVE, 2)):
        found = rank.reports
        assert not found["early"]
        assert found["y"] == [[number, number + 1], [number + 2, number + 3]]
        assert found["z"] == found["mine"] == [10 + number + i for i in range(4)]
        assert found["theirs"] == [11 - number + i for i in range(4)]
        assert "was not sent. Call isend before" in found["nothing"]


def test_a_receive_from_itself_is_there_when_it_is_completed():
    code = """
x, y, z = torch.arange(3.0, device=device), *(torch.zeros(n, device=device) for n in (3, 2))
early = dist.irecv(y, RANK)
report(early=early.is_completed())
dist.isend(x, RANK)
report(late=early.is_completed(), y=y.tolist())
dist.isend(x, RANK)
wrong = dist.irecv(z, RANK)
report(wrong=wrong.is_completed(), why=refused(wrong.wait))
"""
    (found,) = run_ranks(GROUP + code + LEAVE, 1)
    assert found.reports["early"] is False and found.reports["late"] is True
    assert found.reports["y"] == [0.0, 1.0, 2.0]
    assert found.reports["wrong"] is True and "recv of 2" in found.reports["why"]
