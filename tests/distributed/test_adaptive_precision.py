"""TI-ACC's policies decide alike on all ranks."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import LEAVE, run_ranks

pytestmark = pytest.mark.usefixtures("acc_only")

ASK = """
from tiacc_training.torch.tiacc_torch_warp import MixedPrecision_TrainingPolicy as Policy
"""
# Rank 1 alone sees its learning rate rise, in epoch 3.
APART = """
policy = Policy(1, 1, 2, 8)
rates = [0.1] * 8 if RANK == 0 else [0.1, 0.1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2]
found, said = [], {}
for epoch in range(1, 9):
    if policy.enable_mixed_precision(epoch, lr=rates[epoch - 1]):
        found.append(epoch)
    said[epoch] = policy.explain()
report(found=found, said=[said[3], said[4]])
"""


@pytest.mark.parametrize("group", ["acc", "cpu:gloo,acc:acc"])
def test_ranks_that_would_differ_agree(group):
    code = f"""
dist.init_process_group("{group}")
torch.acc.set_device(RANK % torch.acc.device_count())
"""
    first, second = run_ranks(code + ASK + APART + LEAVE, 2)
    assert first.reports["found"] == second.reports["found"] == [1, 2, 5, 6, 7, 8]
    assert first.reports["said"] == [
        "epoch 3 is off: another process wants it off",
        "epoch 4 is off: decided for epochs 3 to 4",
    ]
    said = "epoch 3 is off: the learning rate has risen from 0.1 to 0.2"
    assert second.reports["said"][0] == said


def test_a_scale_that_collapsed_on_one_rank_is_off_on_both():
    """Also where that rank's program makes errors of warnings: the other one does not wait."""
    code = """
import warnings
warnings.simplefilter("error")
dist.init_process_group("acc")
scaler = torch.amp.GradScaler("acc", init_scale=0.5 if RANK else 8.0)
policy = Policy(0, 1, end_step=9)
report(text=refused(lambda: policy.enable_mixed_precision(1, scaler=scaler)))
report(again=policy.enable_mixed_precision(1), said=policy.explain())
"""
    first, second = (each.reports for each in run_ranks(ASK + code + LEAVE, 2))
    assert not first["again"] and not second["again"]
    assert first["text"] == "accepted"
    assert "epoch 1 is computed in full precision" in second["text"]
    assert first["said"].endswith("another process wants it off")
    assert second["said"].endswith("scale has fallen to 0.5")


def test_ranks_that_ask_about_different_epochs_are_told():
    code = """
dist.init_process_group("acc")
policy = Policy(0, 1, end_step=9)
report(first=policy.enable_mixed_precision(1))
report(text=refused(lambda: policy.enable_mixed_precision(3 + RANK)), said=policy.explain())
report(again=policy.enable_mixed_precision(5))
"""
    for rank, each in enumerate(run_ranks(ASK + code + LEAVE, 2)):
        assert each.reports["first"] and each.reports["again"]
        assert each.reports["said"].startswith("epoch 1 is on")
        told = f"asks about epoch {3 + rank}, and others about epochs 3 to 4"
        assert told in each.reports["text"]


@pytest.mark.usefixtures("recording")
def test_the_agreement_makes_no_plan_for_each_epoch():
    code = """
from tests import helpers
dist.init_process_group("acc")
policy = Policy(0, 1, end_step=4)
for epoch in range(1, 8):
    policy.enable_mixed_precision(epoch)
with helpers.counting() as counted:
    for epoch in range(8, 20):
        policy.enable_mixed_precision(epoch)
report(plans=counted["plans_built"])
"""
    assert [each.reports["plans"] for each in run_ranks(ASK + code + LEAVE, 2)] == [0, 0]
