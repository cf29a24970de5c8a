"""Checkpoints of an accelerated model: saved by two processes, made whole and divided here."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

from tests import helpers
from tests.distributed import models
from tests.distributed.ranks import run_ranks
from tests.distributed.test_data_parallel import SETUP, close
from torchacc.dist import state_dict_utils as utils
from torchacc.dist.optimizer_states import same

STEPS = models.STEPS // 2
BEGIN = (
    SETUP
    + f"""
import os
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torchacc.dist import FullyShardedDataParallel as Sharded
from torchacc.dist.fsdp import sharded_module
STEPS = {STEPS}
batches = [tuple(models.part(t, RANK, WORLD) for t in pair) for pair in models.data()]

def made(flat, shards=WORLD):
    config = torchacc.Config()
    config.dist.fsdp.size = shards
    config.dist.fsdp.wrap_layer_cls = {{"Block"}}
    config.dist.fsdp.flatten_parameters = flat
    model = torchacc.accelerate(models.made(RANK), config=config)
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)

def train(model, optimizer, batches):
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.to(DEVICE)), y.to(DEVICE)).backward()
        optimizer.step()

def values(model):
    return {{name: value.tolist() for name, value in model.state_dict().items()}}
"""
)
SAVE = """
for way, flat in (("flat", True), ("kept", False)):
    model, optimizer = made(flat)
    train(model, optimizer, batches[:STEPS])
    name = f"{FOLDER}/{way}/rank-{RANK}-of-{WORLD}"
    os.makedirs(f"{FOLDER}/{way}", exist_ok=True)
    shards = Sharded.sharded_model_state_dict(model)
    states = Sharded.sharded_optim_state_dict(model, optimizer)
    torchacc.save(shards, name + "-model.pth", master_only=False)
    torchacc.save(states, name + "-optimizer.pth", master_only=False)
    # As TorchAcc's own examples do it: whole tensors, and states by their numbers.
    metadata = model.model.model.get_shard_metadata()
    name = f"{FOLDER}/{way}/rank{RANK}-of-{WORLD}"
    torchacc.save({"model": model.state_dict(), "shard_metadata": metadata},
                  name + "-model.raw", master_only=False)
    torchacc.save({"optimizer": optimizer.state_dict(), "shard_metadata": metadata},
                  name + "-optimizer.raw", master_only=False)
    full = Sharded.full_optim_state_dict(model, optimizer)
    torchacc.save({"model": model.state_dict(), "optimizer": full}, f"{FOLDER}/{way}/full",
                  global_master=True)

    held = sum(value.numel() for value in shards["model"].values())
    report(**{f"{way} part": held / sum(value.numel() for value in model.state_dict().values())})
    path = f"{FOLDER}/{way}/rank-{RANK}-of-{WORLD}-model.pth"
    saved, other = torch.load(path), torch.load(path.replace(f"rank-{RANK}", f"rank-{1 - RANK}"))
    again = torch.load(path.replace("model.pth", "optimizer.pth"))
    with torch.no_grad():
        x = batches[0][0].to(DEVICE)
        before = model.eval()(x).cpu()  # the root's whole parameters stay
        at = values(model)
        report(**{f"{way} refused": [
            refused(lambda: model.load_state_dict(other)),
            refused(lambda: model.load_state_dict({**saved["model"], "scale": torch.ones(3)})),
            refused(lambda: model.load_state_dict({"_flat_param": saved["model"]["_flat_param"]})),
            refused(lambda: Sharded.optim_state_dict_to_load(model, optimizer, saved)),
        ]})
        unchanged = values(model) == at
        model.load_state_dict({name: value * 0 for name, value in saved["model"].items()})
        nothing = model(x).abs().max().item()
        model.load_state_dict(saved)
        after = model(x).cpu()
    report(**{f"{way} loaded": unchanged and nothing == 0 and torch.equal(before, after)})
    model.train()
    train(model, optimizer, batches[STEPS:])
    first = values(model)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(Sharded.optim_state_dict_to_load(model, optimizer, again))
    train(model, optimizer, batches[STEPS:])
    report(**{f"{way} same bits": values(model) == first, f"{way} end": first})

model, optimizer = made(True)
train(model, optimizer, batches[:STEPS])
states = dict(zip(("model", "optimizer"), get_state_dict(sharded_module(model), optimizer)))
dcp.save(states, checkpoint_id=f"{FOLDER}/dcp")
"""
# The recipe of docs/checkpoints.md.
LOAD = """
from torch.distributed.checkpoint.state_dict import set_state_dict
model, optimizer = made(True)
target = sharded_module(model)
m, o = get_state_dict(target, optimizer)
dcp.load({"model": m, "optimizer": o}, checkpoint_id=f"{FOLDER}/dcp")
set_state_dict(target, optimizer, model_state_dict=m, optim_state_dict=o)
train(model, optimizer, batches[STEPS:])
report(dcp=values(model))
"""


# Two processes would make `saved` twice.
pytestmark = pytest.mark.xdist_group("checkpoints")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder, and what the two processes reported."""
    folder = tmp_path_factory.mktemp("saved")
    code = f"FOLDER={str(folder)!r}" + BEGIN + SAVE + LOAD
    return folder, [each.reports for each in run_ranks(code, 2)]


WAYS = pytest.mark.parametrize("way", ["flat", "kept"])


@WAYS
def test_each_process_saves_its_half_and_goes_on_from_it(device, saved, way):
    end = models.alone()[1]
    for found in saved[1]:
        assert 0.5 <= found[f"{way} part"] < 0.53
        assert found[f"{way} loaded"] and found[f"{way} same bits"]
        close(found[f"{way} end"], end)
        close(found["dcp"], end)


@WAYS
def test_shards_that_do_not_fit_are_refused_and_change_nothing(device, saved, way):
    for rank, found in enumerate(saved[1]):
        other, shape, missing, kind = found[f"{way} refused"]
        assert f"holds shard {rank} of 2, and what is to be loaded is shard {1 - rank}" in other
        assert "RuntimeError" in shape and "scale has the shape [3], and is []" in shape
        assert "missing: blocks.0._flat_param" in missing
        assert "and no 'optimizer'" in kind


@WAYS
def test_whole_files_are_what_torch_gathers(device, saved, way):
    folder = saved[0] / way
    full = torch.load(folder / "full")
    (model, _), (optimizer, _) = utils.consolidate_and_reshard_fsdp_checkpoint(folder)
    assert same(model, dict(full["model"])) and same(optimizer, full["optimizer"])
    assert same(torch.load(folder / "model_consolidated.pth"), model)
    assert same(torch.load(folder / "optimizer_consolidated.pth"), optimizer)
    raw, _ = utils.consolidate_and_reshard_fsdp_checkpoint(
        folder, "rank*-model.raw", "rank*-optimizer.raw", save_checkpoint=False
    )
    assert same(raw[0], model)


@WAYS
def test_what_processes_save_by_numbers_is_made_whole_too(device, saved, way):
    folder = saved[0] / way
    whole, _ = utils.consolidate_and_reshard_fsdp_optim_dict(
        folder, "rank*-optimizer.raw", save_optimizer=False
    )
    assert same(whole["state"], torch.load(folder / "full")["optimizer"]["state"])


def test_a_plain_model_goes_on_from_whole_files(device, saved):
    folder = saved[0] / "flat"
    (state, _), (optimizer_state, _) = utils.consolidate_and_reshard_fsdp_checkpoint(
        folder, save_checkpoint=False
    )
    model = models.made(5)
    model.load_state_dict(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    set_optimizer_state_dict(model, optimizer, optimizer_state)
    for x, y in models.data()[STEPS:]:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    close({name: value.tolist() for name, value in model.state_dict().items()}, models.alone()[1])


@WAYS
def test_two_shards_made_of_four_are_those_that_were_saved(device, saved, way, tmp_path):
    utils.consolidate_and_reshard_fsdp_checkpoint(saved[0] / way, reshard_num=4, save_dir=tmp_path)
    four = utils.load_checkpoints(tmp_path, "rank-*-of-4-model.pth")
    assert [each["shard_metadata"]["rank"] for each in four] == [0, 1, 2, 3]
    held = [sum(value.numel() for value in each["model"].values()) for each in four]
    assert len(set(held)) == 1 and held[0] < 130  # of 455
    models_, optimizers = utils.consolidate_and_reshard_fsdp_checkpoint(
        tmp_path, reshard_num=2, save_checkpoint=False
    )
    for kind, (states, metadata) in (("model", models_), ("optimizer", optimizers)):
        expected = utils.load_checkpoints(saved[0] / way, f"rank-*-of-2-{kind}.pth")
        assert metadata[0]["save_id"] == metadata[1]["save_id"]
        for rank in range(2):
            before = expected[rank]["shard_metadata"]
            assert metadata[rank]["save_id"] not in ("", before["save_id"])  # a save of its own
            assert metadata[rank]["save_id"] == models_[1][0]["save_id"]  # of both kinds
            assert metadata[rank]["kinds"] == ["model", "optimizer"] and before["kinds"] == []
            assert metadata[rank] | {"save_id": before["save_id"], "kinds": []} == before
            if kind == "optimizer":
                assert same(states[rank], expected[rank][kind])
                continue
            for name, tensor in states[rank].items():
                other = expected[rank][kind][name]
                differ = other[(tensor != other) & (other != 42)] if tensor.dim() else other[None]
                assert differ.numel() == 0 or torch.equal(tensor, other), name


def test_dcp_writes_the_same_under_the_models_names(device, saved, tmp_path):
    dcp_to_torch_save(saved[0] / "dcp", tmp_path / "file")
    found, full = torch.load(tmp_path / "file"), torch.load(saved[0] / "flat" / "full")
    assert same(found["model"], dict(full["model"]))
    for name, state in full["optimizer"]["state"].items():
        assert same(found["optimizer"]["state"][name], state), name


FOUR = (
    """
for way, flat in (("flat", True), ("kept", False)):
    model, optimizer = made(flat)
    name = f"{FOLDER}/{way}/rank-{RANK}-of-{WORLD}"
    model.load_state_dict(torch.load(name + "-model.pth"))
    state = torch.load(name + "-optimizer.pth")
    optimizer.load_state_dict(Sharded.optim_state_dict_to_load(model, optimizer, state))
    train(model, optimizer, batches[STEPS:])
    report(**{way: values(model)})
"""
    + LOAD
    + """
model, optimizer = made(True, shards=2)  # each shard twice
shards = Sharded.sharded_model_state_dict(model)
path = f"{FOLDER}/hybrid/rank-{RANK}-of-{WORLD}-model.pth"
torchacc.save(shards, path, master_only=False)
report(hybrid=values(model))
"""
)


ALONE = """
import io
torch.distributed.init_process_group("acc")
config = torchacc.Config()
config.dist.fsdp.wrap_layer_cls = {"Block"}
model = Sharded(models.made(0), config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)

train(model, optimizer, batches[:2])
file, before = io.BytesIO(), values(model)
torchacc.save((Sharded.sharded_model_state_dict(model),
               Sharded.sharded_optim_state_dict(model, optimizer)), file)
train(model, optimizer, batches[2:4])
after = values(model)
file.seek(0)
shards, states = torch.load(file)
name = next(iter(shards["model"]))
held = states["optimizer"]
report(refused=[
    refused(lambda: model.load_state_dict({**shards["model"], name: 3})),
    refused(lambda: model.load_state_dict({**shards["model"], 5: 3})),
    refused(lambda: Sharded.optim_state_dict_to_load(model, optimizer, {"optimizer": held})),
    refused(lambda: Sharded.optim_state_dict_to_load(model, optimizer, {
        **states, "optimizer": {**held, "state": {**held["state"], "other": {}}}})),
], unchanged=values(model) == after)
model.load_state_dict(shards)
optimizer.load_state_dict(Sharded.optim_state_dict_to_load(model, optimizer, states))
back = values(model)
train(model, optimizer, batches[2:4])
report(moved=before != after, back=back == before, again=values(model) == after)
"""


def test_a_single_process_goes_back_to_what_it_saved(device):
    (done,) = run_ranks(BEGIN + ALONE, 1)
    refused = done.reports.pop("refused")
    assert done.reports == {"unchanged": True, "moved": True, "back": True, "again": True}
    number, unknown, keys, other = refused
    assert "flat_param is a int and no tensor" in number
    assert "shards that are not of this model: not known: 5." in unknown
    assert "ValueError: [fsdp] the optimizer's state has optimizer, and should have" in keys
    assert "ValueError: [fsdp] the shard has a state of 'other', which is no parameter" in other


@pytest.mark.skipif(not helpers.FULL, reason="four processes: make test-full")
def test_four_processes_go_on_from_the_shards_of_two(device, saved):
    folder = saved[0]
    for way in ("flat", "kept"):
        utils.consolidate_and_reshard_fsdp_checkpoint(folder / way, reshard_num=4)
    (folder / "hybrid").mkdir()
    done = [each.reports for each in run_ranks(f"FOLDER={str(folder)!r}" + BEGIN + FOUR, 4)]
    end = models.alone()[1]
    for found in done:
        for way in ("flat", "kept", "dcp"):
            close(found[way], end)
    whole, _ = utils.consolidate_and_reshard_fsdp_model_dict(folder / "hybrid")
    assert {name: value.tolist() for name, value in whole.items()} == done[0]["hybrid"]
