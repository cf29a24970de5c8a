"""Processes that were given different options hear of it, all of them, before anything changes."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import run_ranks
from tests.distributed.test_data_parallel import SETUP


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("dist.pp.split_points = [['blocks.1'], ['head']][RANK]", "pp.split_points = ['blocks.1']"),
        ("dist.pp.split_points = [[plain.blocks[1]], ['head']][RANK]", "['blocks.1']"),
        ("dist.pp.num_micro_batches = 2 + 2 * RANK", "dist.pp.num_micro_batches = 2, and"),
        ("dist.pp.broadcast_loss = RANK == 0", "dist.pp.broadcast_loss = True, and"),
        ("dist.fsdp.wrap_layer_cls = [{'Block'}, set()][RANK]", "wrap_layer_cls = ['Block']"),
        ("compute.bf16 = RANK == 0", "compute.bf16 = True, and process 1 has compute.bf16 = False"),
        ("dataloader.shard = RANK == 0", "dataloader.shard = True, and"),
    ],
)
def test_processes_with_other_options_are_refused(device, option, text):
    code = (
        SETUP
        + f"""
plain = models.made(0)
config.dist.pp.size, config.dist.pp.split_points = 2, ["blocks.1"]
config.{option}
report(error=refused(lambda: torchacc.accelerate(plain, [torch.ones(2, 4)], config)))
report(where=str(plain.first.weight.device), kind=type(plain.first).__name__)
"""
    )
    for each in run_ranks(code, 2):
        assert "the processes have other options" in each.reports["error"]
        assert text in each.reports["error"]
        assert each.reports["where"] == "cpu" and each.reports["kind"] == "Linear"


def test_modules_are_the_same_option_as_their_names(device):
    code = (
        SETUP
        + """
plain = models.made(0)
config.dist.pp.size = 2
config.dist.pp.split_points = [plain.blocks[1]] if RANK else ["blocks.1"]
model = torchacc.accelerate(plain, config=config)
loss = model.forward_backward(torch.ones(2, 4), output_fn=lambda out: out.square().mean())
report(loss=float(loss))
"""
    )
    first, second = run_ranks(code, 2)
    assert first.reports["loss"] == second.reports["loss"]
