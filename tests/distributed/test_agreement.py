"""Processes that were given different options hear of it, all of them, before anything changes."""

from __future__ import annotations

from tests.distributed.ranks import run_ranks
from tests.distributed.test_data_parallel import SETUP

# What each process is told of, where the processes have an option of the config unlike.
UNLIKE = {
    "dist.pp.split_points = [['blocks.1'], ['head']][RANK]": "pp.split_points = ['blocks.1']",
    "dist.pp.split_points = [[plain.blocks[1]], ['head']][RANK]": "['blocks.1']",
    "dist.pp.num_micro_batches = 2 + 2 * RANK": "dist.pp.num_micro_batches = 2, and",
    "dist.pp.broadcast_loss = RANK == 0": "dist.pp.broadcast_loss = True, and",
    "dist.fsdp.wrap_layer_cls = [{'Block'}, set()][RANK]": "wrap_layer_cls = ['Block']",
    "compute.bf16 = RANK == 0": "compute.bf16 = True, and process 1 has compute.bf16 = False",
    "dataloader.shard = RANK == 0": "dataloader.shard = True, and",
}


def test_processes_with_other_options_are_refused(device):
    code = SETUP
    for option in UNLIKE:
        code += f"""
config, plain = torchacc.Config(), models.made(0)
config.dist.pp.size, config.dist.pp.split_points = 2, ["blocks.1"]
config.{option}
error = refused(lambda: torchacc.accelerate(plain, [torch.ones(2, 4)], config))
left = [str(plain.first.weight.device), type(plain.first).__name__]
report(**{{{option!r}: [error, left]}})
"""
    for each in run_ranks(code, 2):
        assert list(each.reports) == list(UNLIKE)
        for option, (error, left) in each.reports.items():
            assert "the processes have other options" in error, option
            assert UNLIKE[option] in error, option
            assert left == ["cpu", "Linear"], option


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
