"""Files of shards without a model: made whole, divided anew, and refused where they do not fit."""

from __future__ import annotations

import copy
import json
import resource
import shutil

import pytest
import torch

from tests.killed import at_each_operation as killed_at_each_operation
from tests.terminal import said_to
from torchacc import files
from torchacc.__main__ import main
from torchacc.dist import consolidate, shard_format
from torchacc.dist import state_dict_utils as utils
from torchacc.dist.optimizer_states import same
from torchacc.dist.shard_format import Layout, Part, Unit

A = torch.arange(6.0).view(2, 3)
B = torch.arange(10.0, 14.0)
IMAGE = torch.arange(100.0, 108.0).view(1, 2, 2, 2).contiguous(memory_format=torch.channels_last)
# Two elements lie between A and B, as where addresses are aligned.
ROOT = Unit(12, "float32", (Part("a", (2, 3), (3, 1), 0), Part("b", (4,), (1,), 8)))
BLOCK = Unit(8, "float32", (Part("block.image", (1, 2, 2, 2), (8, 1, 4, 2), 0),))
UNITS = {"_flat_param": ROOT, "block._flat_param": BLOCK}
WHOLE = {"a": A, "b": B, "block.image": IMAGE, "tied": A, "count": torch.tensor(7)}
NAMES = ("a", "b", "block.image")


def layout(rank, world, **changes):
    made = {"units": UNITS, "order": tuple(UNITS), "shared": {"tied": "a"}}
    return Layout(rank=rank, world_size=world, **{**made, **changes})


def model_shards(world, **changes):
    """Shards of WHOLE, by hand: slices of the two vectors, filled up."""
    length = {name: -(-unit.numel // world) for name, unit in UNITS.items()}
    vectors = {
        "_flat_param": torch.cat([A.flatten(), torch.full((2,), 42.0), B]),
        "block._flat_param": torch.tensor([100.0, 104, 101, 105, 102, 106, 103, 107]),
    }
    made = []
    for rank in range(world):
        shards = {}
        for name, vector in vectors.items():
            filled = torch.cat([vector, torch.full((length[name] * world - len(vector),), 9.0)])
            shards[name] = filled[rank * length[name] :][: length[name]].clone()
        metadata = layout(rank, world, **changes).to_dict()
        made.append({"model": {**shards, "count": WHOLE["count"]}, "shard_metadata": metadata})
    return made


def optimizer_shards(world, **changes):
    """Adam's state of the units: the parameters, and twice as much."""
    made = []
    for shard in model_shards(world, **changes):
        state = {
            name: {"step": torch.tensor(3.0), "exp_avg": held, "exp_avg_sq": held * 2, "lr": None}
            for name, held in shard["model"].items()
            if name in UNITS
        }
        held = {"state": state, "param_groups": [{"lr": 0.1, "params": list(UNITS)}]}
        made.append({"optimizer": held, "shard_metadata": shard["shard_metadata"]})
    return made


WHOLE_OPTIMIZER = {
    "state": {
        name: {
            "step": torch.tensor(3.0),
            "exp_avg": WHOLE[name],
            "exp_avg_sq": WHOLE[name] * 2,
            "lr": None,
        }
        for name in NAMES
    },
    "param_groups": [{"lr": 0.1, "params": list(NAMES)}],
}


def write(folder, models=(), optimizers=()):
    folder.mkdir(exist_ok=True)
    for kind, shards in (("model", models), ("optimizer", optimizers)):
        for shard in shards:
            rank, world = (shard["shard_metadata"][key] for key in ("rank", "world_size"))
            torch.save(shard, folder / f"rank-{rank}-of-{world}-{kind}.pth")
    return folder


def names_in(folder):
    return sorted(path.name for path in folder.iterdir())


# --- what is right --------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [1, 2, 3, 5, 13])  # 13: more than a unit has elements
def test_a_model_is_made_whole(world):
    whole = utils.consolidate_sharded_model_checkpoints("here", model_shards(world))
    assert same(whole, WHOLE)
    assert whole["tied"] is whole["a"]
    assert whole["block.image"].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("world", [1, 2, 5, 13])
def test_an_optimizer_is_made_whole(world):
    shards = optimizer_shards(world)
    whole = utils.consolidate_sharded_optimizer_checkpoints("here", shards)
    assert same(whole, WHOLE_OPTIMIZER)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (3, 5), (2, 2), (2, 13)])
def test_shards_of_another_number_are_what_that_number_would_have_saved(before, after):
    """But for what fills vectors up, which is 0."""
    whole = utils.consolidate_sharded_model_checkpoints("here", model_shards(before))
    kept = copy.deepcopy(whole)
    made, metadata = utils.reshard_model_dict(whole, model_shards(before)[0], after)
    assert same(whole, kept), "the state that was divided was changed"
    expected = model_shards(after)
    assert metadata == [shard["shard_metadata"] for shard in expected]
    for rank, (state, shard) in enumerate(zip(made, expected, strict=True)):
        assert state.keys() == shard["model"].keys()
        for name, tensor in state.items():
            other = shard["model"][name]
            filled = (other == 9) | (other == 42)
            assert torch.equal(torch.where(filled, 0, other), tensor), (rank, name)
    template = optimizer_shards(before)[0]
    states, again = utils.reshard_optim_dict(WHOLE_OPTIMIZER, template, after)
    assert again == metadata
    for state, shard in zip(states, made, strict=True):
        held = state["state"]["_flat_param"]
        assert torch.equal(held["exp_avg"], shard["_flat_param"])
        assert torch.equal(held["exp_avg_sq"], shard["_flat_param"] * 2)
        assert held["step"] == 3 and held["lr"] is None
        assert state["param_groups"] == [{"lr": 0.1, "params": list(UNITS)}]


@pytest.mark.parametrize("world", [1, 2, 3, 5, 13])
def test_states_of_parameters_that_are_kept_are_made_whole_and_divided(world):
    """With flatten_parameters off a shard has states of what lies in it: pieces, by name."""
    template = {
        "optimizer": {"state": {}, "param_groups": [{"lr": 0.2, "params": list(NAMES)}]},
        "shard_metadata": layout(0, 2, order=NAMES).to_dict(),
    }
    states, metadata = utils.reshard_optim_dict(WHOLE_OPTIMIZER, template, world)
    if world == 5:  # three elements each: a has 3 and 3, b (from 8 on) 1, 3 and 0
        assert [sorted(each["state"]) for each in states] == [
            ["a", "block.image"],
            ["a", "block.image"],
            ["b", "block.image"],
            ["b", "block.image"],
            [],
        ]
        assert torch.equal(states[1]["state"]["a"]["exp_avg"], torch.tensor([3.0, 4, 5]))
        assert torch.equal(states[2]["state"]["b"]["exp_avg"], torch.tensor([10.0]))
        pieces = states[0]["state"]["block.image"]["exp_avg"]
        assert torch.equal(pieces, torch.tensor([100.0, 104]))
    shards = [
        {"optimizer": state, "shard_metadata": each}
        for state, each in zip(states, metadata, strict=True)
    ]
    assert same(utils.consolidate_sharded_optimizer_checkpoints("", shards), WHOLE_OPTIMIZER)


@pytest.mark.parametrize("named", [False, True])
def test_states_by_numbers_stay_so(named):
    """optimizer.state_dict() as it is: in the order of the model's, or by the names beside."""
    shards, order = optimizer_shards(2), list(UNITS)
    if named:
        order.reverse()
    for shard in shards:
        held = shard["optimizer"]
        held["state"] = {number: held["state"][name] for number, name in enumerate(order)}
        held["param_groups"][0]["params"] = [0, 1]
        if named:
            held["param_groups"][0]["param_names"] = order
    whole = utils.consolidate_sharded_optimizer_checkpoints("here", shards)
    assert same(whole["state"], WHOLE_OPTIMIZER["state"])
    states, _ = utils.reshard_optim_dict(whole, shards[0], 2)
    assert states[0]["param_groups"][0]["params"] == [0, 1]
    again = [{**shard, "optimizer": state} for shard, state in zip(shards, states, strict=True)]
    whole = utils.consolidate_sharded_optimizer_checkpoints("here", again)
    assert same(whole["state"], WHOLE_OPTIMIZER["state"])
    for rank in range(2):
        number = order.index("block._flat_param")
        saved = shards[rank]["optimizer"]["state"][number]["exp_avg"]
        assert torch.equal(states[rank]["state"][number]["exp_avg"], saved)


def test_whole_tensors_in_shards_are_taken_as_they_are():
    """What model.state_dict() and get_shard_metadata() give: each process has the whole model."""
    shards = [{**shard, "model": dict(WHOLE)} for shard in model_shards(2)]
    whole = utils.consolidate_sharded_model_checkpoints("here", shards)
    assert same(whole, WHOLE)
    states, _ = utils.reshard_model_dict(whole, shards[0], 4)
    assert torch.equal(states[1]["_flat_param"], torch.tensor([3.0, 4, 5]))


def test_of_shards_that_several_processes_hold_one_is_taken(tmp_path):
    for number, shard in enumerate((*model_shards(2, replica=1), *model_shards(2, replica=0))):
        shard["model"]["count"] = torch.tensor(shard["shard_metadata"]["replica"])
        torch.save(shard, tmp_path / f"rank{number}-of-4-model.pth")
    loaded = utils.load_checkpoints(tmp_path, utils.MODEL_PATTERN)
    assert [each["shard_metadata"]["rank"] for each in loaded] == [0, 1]
    assert [each["model"]["count"].item() for each in loaded] == [0, 0]


def test_ranks_are_in_the_order_of_their_numbers(tmp_path):
    write(tmp_path, model_shards(13))
    loaded = utils.load_checkpoints(tmp_path, utils.MODEL_PATTERN)
    assert [each["shard_metadata"]["rank"] for each in loaded] == list(range(13))


def test_metadata_are_plain_values():
    metadata = layout(1, 2, save_id="x").to_dict()
    assert json.loads(json.dumps(metadata)) == metadata
    assert (metadata["format"], metadata["version"]) == ("torchacc.fsdp", 1)
    read = shard_format.read_layout(metadata | {"kinds": ["model"]}, "here")
    assert read == layout(1, 2, save_id="x", kinds=("model",))
    del metadata["kinds"]  # as it was before there were any
    assert shard_format.read_layout(metadata, "here") == layout(1, 2, save_id="x")


# --- what is refused ------------------------------------------------------------------------------


def truncate(folder):
    path = folder / "rank-1-of-3-model.pth"
    path.write_bytes(path.read_bytes()[:-200])


def other_program(folder):
    metadata = {"rank": 1, "world_size": 3, "shard_info": {}, "flatten_info": {}}
    change(folder, lambda shard: {**shard, "shard_metadata": metadata})


def change(folder, how):
    path = folder / "rank-1-of-3-model.pth"
    torch.save(how(torch.load(path)), path)


def metadata(**changes):
    def how(shard):
        return {**shard, "shard_metadata": {**shard["shard_metadata"], **changes}}

    return lambda folder: change(folder, how)


def model(**changes):
    def how(shard):
        return {**shard, "model": {**shard["model"], **changes}}

    return lambda folder: change(folder, how)


def of_too_many(folder):
    shards = model_shards(3)
    for rank, shard in enumerate(shards):
        shard["shard_metadata"]["world_size"] = 10**20
        shard["model"] |= {name: shard["model"][name][:1] for name in UNITS}
        torch.save(shard, folder / f"rank-{rank}-of-3-model.pth")


OTHER = Unit(12, "float32", (Part("a", (12,), (1,), 0),))
OTHER_UNITS = layout(0, 1, units={**UNITS, "_flat_param": OTHER}).to_dict()["units"]
A_PART = {"name": "a", "shape": [3, 4], "offset": 0}
DAMAGE = {
    "missing": (
        lambda folder: (folder / "rank-1-of-3-model.pth").unlink(),
        ["of 3 shards", "none of rank 1", "rank-0-of-3-model.pth"],
    ),
    "of too many": (
        of_too_many,
        [f"of {10**20} shards", "3, 4, 5, 6, 7, 8, 9, 10 and more. Found"],
    ),
    "truncated": (truncate, ["rank-1-of-3-model.pth", "cannot be read", "truncated"]),
    "empty": (
        lambda folder: (folder / "rank-2-of-3-model.pth").write_bytes(b""),
        ["rank-2-of-3-model.pth (0 bytes)"],
    ),
    "not plain": (
        lambda folder: change(folder, lambda shard: {**shard, "schedule": utils.replace}),
        ["rank-1-of-3-model.pth", "more than tensors and plain values"],
    ),
    "no shard": (
        lambda folder: change(folder, lambda shard: [1, 2]),
        ["rank-1-of-3-model.pth", "a list without 'shard_metadata'"],
    ),
    "neither": (
        lambda folder: change(folder, lambda shard: {"shard_metadata": shard["shard_metadata"]}),
        ["rank-1-of-3-model.pth", "neither 'model' nor 'optimizer'"],
    ),
    "other program": (other_program, ["rank-1-of-3-model.pth", "is None, and not 'torchacc.fsdp'"]),
    "newer": (metadata(version=2), ["rank-1-of-3-model.pth", "version 2", "newer"]),
    "incomplete": (metadata(units=None), ["rank-1-of-3-model.pth", "are incomplete"]),
    "no unit": (metadata(units={"u": torch.ones(())}), ["rank-1-of-3-model.pth", "are incomplete"]),
    "shared with nothing": (
        metadata(shared={"tied": "gone"}),
        ["rank-1-of-3-model.pth", "is shared, 'gone', is no parameter"],
    ),
    "outside": (
        metadata(units={"u": {**OTHER.__dict__, "parameters": [{**A_PART, "stride": [7, 1]}]}}),
        ["rank-1-of-3-model.pth", "are incomplete", "a ends behind its unit"],
    ),
    "two of one name": (
        metadata(units={**OTHER_UNITS, "u": OTHER_UNITS["_flat_param"]}),
        ["rank-1-of-3-model.pth", "are incomplete", "two parameters have one name"],
    ),
    "in one place": (
        metadata(units={"u": {**OTHER.__dict__, "parameters": [{**A_PART, "stride": [3, 1]}]}}),
        ["rank-1-of-3-model.pth", "are incomplete", "a has elements in one place"],
    ),
    "no name": (
        metadata(order=[torch.empty(0)]),
        ["rank-1-of-3-model.pth", "are incomplete", "its order has tensor([])"],
    ),
    "rank": (metadata(rank=3), ["rank-1-of-3-model.pth", "shard 3 of 3"]),
    "same rank": (metadata(rank=0), ["of 3 shards", "none of rank 1"]),
    "other world": (
        lambda folder: write(folder, model_shards(2)[:1]),
        ["rank-0-of-3-model.pth", "one of 3 shards", "one of 2", "pattern"],
    ),
    "two of one": (
        lambda folder: shutil.copy(
            folder / "rank-0-of-3-model.pth", folder / "rank0-of-3-model.pth"
        ),
        ["rank-0-of-3-model.pth", "rank0-of-3-model.pth", "are both shard 0"],
    ),
    "other save": (metadata(save_id="b"), ["rank-1-of-3-model.pth", "'b' and ''", "interrupted"]),
    "other model": (
        metadata(units=OTHER_UNITS),
        ["rank-1-of-3-model.pth", "different models", "_flat_param holds other parameters"],
    ),
    "short": (
        model(_flat_param=torch.ones(3)),
        ["rank-1-of-3-model.pth", "4 elements, and is [3]"],
    ),
    "type": (
        model(_flat_param=torch.ones(4, dtype=torch.float64)),
        ["rank-1-of-3-model.pth", "should be of float32", "torch.float64"],
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_in_any_file_and_nothing_is_written(tmp_path, capsys, damage):
    """Beside two good files, of which the first is read first."""
    spoil, texts = DAMAGE[damage]
    write(tmp_path, model_shards(3), optimizer_shards(3))
    spoil(tmp_path)
    before = names_in(tmp_path)
    arguments = ["--ckpt_dir", str(tmp_path), "--save_dir", str(tmp_path / "new")]
    assert consolidate.main(arguments) == 1
    said = capsys.readouterr().err
    for text in texts:
        assert text in said
    assert names_in(tmp_path) == before


@pytest.mark.parametrize("key", ["param_groups", "state"])
def test_damage_of_the_optimizer_is_named_and_the_model_is_not_written(tmp_path, capsys, key):
    shards = optimizer_shards(2)
    del shards[1]["optimizer"][key]
    write(tmp_path, model_shards(2), shards)
    (tmp_path / "model_consolidated.pth").write_bytes(b"before")
    assert consolidate.main(["--ckpt_dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "rank-1-of-2-optimizer.pth" in said and "'param_groups' and 'state'" in said
    assert (tmp_path / "model_consolidated.pth").read_bytes() == b"before"


def test_states_that_cannot_be_put_together_leave_the_model_as_it_was(tmp_path, capsys):
    shards = optimizer_shards(2)
    name = next(iter(shards[1]["optimizer"]["state"]))
    shards[1]["optimizer"]["state"][name]["step"] = torch.tensor(77.0)
    write(tmp_path, model_shards(2), shards)
    (tmp_path / "model_consolidated.pth").write_bytes(b"before")
    assert consolidate.main(["--ckpt_dir", str(tmp_path)]) == 1
    assert "step" in capsys.readouterr().err
    assert (tmp_path / "model_consolidated.pth").read_bytes() == b"before"


def test_two_outputs_of_one_name_are_refused(tmp_path):
    write(tmp_path, model_shards(2), optimizer_shards(2))
    with pytest.raises(ValueError, match="would replace the model"):
        utils.consolidate_and_reshard_fsdp_checkpoint(
            tmp_path, model_save_name_pattern="x.pth", optimizer_save_name_pattern="x.pth"
        )


def changed(shards, how):
    how(shards[0 if how is whole_and_odd else 1])
    return shards


def whole_and_odd(shard):
    del shard["model"]["block._flat_param"]
    shard["model"]["block.image"] = torch.ones(8)


def drop_unit(shard):
    del shard["model"]["block._flat_param"]


def later(shard):
    shard["optimizer"]["state"]["_flat_param"]["step"] = torch.tensor(4.0)


def rate(shard):
    shard["optimizer"]["param_groups"][0]["lr"] = 0.2


def odd_shape(shard):
    shard["optimizer"]["state"]["_flat_param"]["exp_avg"] = torch.ones(2, 3)


def no_state(shard):
    del shard["optimizer"]["state"]["_flat_param"]


def odd_key(shard):
    shard["optimizer"]["state"]["_flat_param"][0] = 1.0


def unnamed(shard):
    shard["optimizer"]["param_groups"][0]["params"][0] = {}


def unknown(shard):
    shard["optimizer"]["param_groups"][0]["params"].append("other")


@pytest.mark.parametrize(
    ("kind", "how", "texts"),
    [
        ("model", drop_unit, ["block._flat_param is missing in shards 1"]),
        ("model", whole_and_odd, ["here: block.image is of shape [8]", "[1, 2, 2, 2]"]),
        ("optimizer", later, ["_flat_param, step, is 3.0 in one place and 4.0", "moments"]),
        ("optimizer", rate, ["parameter groups", "shards 0 and 1 differ"]),
        ("optimizer", odd_shape, ["exp_avg, in shard 1", "6 elements", "[2, 3]"]),
        ("optimizer", no_state, ["_flat_param differs between shards", "None"]),
        ("optimizer", odd_key, ["differs between shards", "['0', 'exp_avg', 'exp_avg_sq'"]),
        ("optimizer", unnamed, ["number 1 from here", "names a parameter {}"]),
        ("optimizer", unknown, ["shard 1 of here", "'other', which the model has not"]),
    ],
)
def test_contents_that_do_not_go_together_are_refused(kind, how, texts):
    make, whole = {
        "model": (model_shards, utils.consolidate_sharded_model_checkpoints),
        "optimizer": (optimizer_shards, utils.consolidate_sharded_optimizer_checkpoints),
    }[kind]
    with pytest.raises(ValueError) as caught:
        whole("here", changed(make(2), how))
    for text in texts:
        assert text in str(caught.value)


def test_numbers_in_several_groups_cannot_be_told_apart():
    shards = optimizer_shards(2)
    for shard in shards:
        held = shard["optimizer"]
        held["state"] = dict(enumerate(held["state"].values()))
        held["param_groups"] = [{"lr": 0.1, "params": [0]}, {"lr": 0.1, "params": [1]}]
    with pytest.raises(ValueError, match="2 groups, by numbers.*sharded_optim_state_dict"):
        utils.consolidate_sharded_optimizer_checkpoints("here", shards)


def test_states_of_another_model_are_not_divided():
    shard = model_shards(2)[0]
    with pytest.raises(ValueError, match=r"b is missing, and the shards say \[4\]"):
        utils.reshard_model_dict({**WHOLE, "b": None}, shard, 2)
    with pytest.raises(ValueError, match=r"b is of shape \[1\], and the shards say \[4\]"):
        utils.reshard_model_dict({**WHOLE, "b": torch.ones(1)}, shard, 2)
    with pytest.raises(ValueError, match="reshard_num = 0 should be 1 or more"):
        utils.reshard_model_dict(WHOLE, shard, 0)
    half = {**WHOLE_OPTIMIZER, "state": {"a": WHOLE_OPTIMIZER["state"]["a"]}}
    with pytest.raises(ValueError, match="a state of a and none of b"):
        utils.reshard_optim_dict(half, optimizer_shards(2)[0], 2)


# --- files and the command ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["all", "model", "optimizer"])
@pytest.mark.parametrize("number", [1, 4])
def test_every_type_is_converted(tmp_path, kind, number):
    write(tmp_path, model_shards(2), optimizer_shards(2))
    kinds = ["model", "optimizer"] if kind == "all" else [kind]
    if kind != "all":  # the other's files are not needed
        for path in tmp_path.glob(f"*-{'model' if kind == 'optimizer' else 'optimizer'}.pth"):
            path.unlink()
    arguments = ["--ckpt_dir", str(tmp_path), "--ckpt_type", kind, "--reshard_num", str(number)]
    to = tmp_path / "new" / "folder"
    assert main([consolidate.NAME, *arguments, "--save_dir", str(to)]) == 0
    if number == 1:
        assert names_in(to) == [f"{each}_consolidated.pth" for each in kinds]
        for each, whole in (("model", WHOLE), ("optimizer", WHOLE_OPTIMIZER)):
            if each in kinds:
                assert same(torch.load(to / f"{each}_consolidated.pth"), whole)
        return
    assert names_in(to) == sorted(
        f"rank-{rank}-of-4-{each}.pth" for rank in range(4) for each in kinds
    )
    if "model" in kinds:
        loaded = utils.load_checkpoints(to, utils.MODEL_PATTERN)
        assert same(utils.consolidate_sharded_model_checkpoints(to, loaded), WHOLE)
    if "optimizer" in kinds:
        again, none = utils.consolidate_and_reshard_fsdp_optim_dict(to, save_optimizer=False)
        assert same(again, WHOLE_OPTIMIZER) and none is None
        assert len(names_in(to)) == 4 * len(kinds)


def test_names_may_be_chosen_and_progress_is_said(tmp_path, caplog):
    folder = write(tmp_path / "a [1]", model_shards(2))  # no pattern, though it looks like one
    for rank in range(2):
        old = folder / f"rank-{rank}-of-2-model.pth"
        old.rename(folder / f"step7.{rank}")
    arguments = ["--ckpt_dir", str(folder), "--ckpt_type", "model"]
    arguments += ["--model_ckpt_name_pattern", "step7.?", "--reshard_num", "3"]
    assert consolidate.main([*arguments, "--model_save_name_pattern", "part*of*.pt"]) == 0
    assert names_in(folder) == [*(f"part{rank}of3.pt" for rank in range(3)), "step7.0", "step7.1"]
    said = caplog.text
    for text in ("shard 2 of 2", "dividing the model into 3", "written", "part2of3.pt"):
        assert text in said


def slowly(monkeypatch, where, name, stream, text):
    """Calls that wait until `stream` has shown `text`, in which # is the number of those before."""
    call, calls = getattr(where, name), []

    def wait(*arguments):
        stream.wait_for(text.replace("#", str(len(calls))))
        calls.append(name)
        return call(*arguments)

    monkeypatch.setattr(where, name, wait)
    return calls


@pytest.mark.parametrize(
    ("convert", "of", "functions", "count"),
    [  # what is whole anyhow is one of three
        (utils.consolidate_and_reshard_fsdp_model_dict, Unit, ("whole", "shards"), 3),
        (
            utils.consolidate_and_reshard_fsdp_optim_dict,
            utils,
            ("whole_of_unit", "shards_of_unit"),
            2,
        ),
    ],
)
def test_a_terminal_shows_how_far_it_is(tmp_path, monkeypatch, convert, of, functions, count):
    write(tmp_path, model_shards(2), optimizer_shards(2))
    stream = said_to(monkeypatch, terminal=True)
    kind = "model" if of is Unit else "optimizer"
    texts = (f"making the {kind} whole: # of {count}, ", f"dividing the {kind}: # of 2, ")
    made = [
        slowly(monkeypatch, of, name, stream, f"[checkpoint] {text}")
        for name, text in zip(functions, texts, strict=True)
    ]
    convert(tmp_path, reshard_num=3)
    assert list(map(len, made)) == [2, 2]
    assert stream.getvalue().endswith("\r\x1b[K")


def test_a_terminal_shows_how_much_is_written(tmp_path, monkeypatch):
    """Until all is on the disk. Memory that tensors share is in the file once."""
    stream = said_to(monkeypatch, terminal=True)
    tensor = torch.zeros(1 << 20)
    states = [{"a": tensor, "b": tensor[:5]}, {"a": torch.ones(1 << 20)}]
    shown = "[checkpoint] writing: {} of 8 MiB, "
    slowly(monkeypatch, utils, "write", stream, shown.format(0))
    on_disk = slowly(monkeypatch, files, "_to_disk", stream, shown.format(8))
    utils.save_checkpoints(states, [{}, {}], [tmp_path / "a", tmp_path / "b"], "model")
    assert len(on_disk) == 11  # both, and folders each time that names have changed


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ([], 2, "--ckpt_dir"),
        (["--ckpt_dir", "x", "--ckpt_type", "weights"], 2, "'weights'"),
        (["--ckpt_dir", "x", "--reshard_num", "0"], 2, "'0' should be a number of at least 1"),
        (["--ckpt_dir", "x", "--reshard", "two"], 2, "'two' should be a number"),
        (["--ckpt_dir", "no folder"], 1, "no file matches no folder/rank*-of-*-model.pth"),
        (
            ["--ckpt_dir", "x", "--reshard_num", "2", "--model_save_name_pattern", "one"],
            1,
            "model_save_name_pattern = 'one' should have two stars",
        ),
        (
            ["--ckpt_dir", "x", "--optimizer_save_name_pattern", "a*"],
            1,
            "optimizer_save_name_pattern = 'a*' should have no star",
        ),
    ],
)
def test_arguments_that_are_wrong_are_named(arguments, status, text, capsys):
    try:
        found = consolidate.main(arguments)
    except SystemExit as ended:
        found = ended.code
    assert found == status
    assert text in capsys.readouterr().err


def test_the_optimizer_has_to_be_the_models(tmp_path):
    write(tmp_path, model_shards(2), optimizer_shards(2, order=("block._flat_param",)))
    with pytest.raises(ValueError, match="of another model than the model's files"):
        utils.consolidate_and_reshard_fsdp_checkpoint(tmp_path)
    assert len(names_in(tmp_path)) == 4


def test_shards_are_written_together_or_not_at_all(tmp_path):
    write(tmp_path, model_shards(2))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    states, metadata = utils.consolidate_and_reshard_fsdp_model_dict(
        tmp_path, reshard_num=2, save_model=False
    )
    states[1]["count"] = (each for each in ())  # cannot be pickled
    paths = [tmp_path / name for name in sorted(before)]
    with pytest.raises(TypeError, match="pickle"):
        utils.save_checkpoints(states, metadata, paths, "model")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    states[1]["count"] = torch.zeros(30000)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50000, limits[1]))  # as on a full disk
    try:
        with pytest.raises(OSError, match="File too large"):
            utils.save_checkpoints(states, metadata, paths, "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("kind", ["all", "model", "optimizer"])
def test_files_that_are_read_are_not_written_to(tmp_path, kind, capsys):
    folder = write(tmp_path / "shards", model_shards(2), optimizer_shards(2))
    link = tmp_path / "link"
    link.symlink_to(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    arguments = ["--ckpt_dir", str(folder), "--ckpt_type", kind, "--reshard_num", "2"]
    if kind == "all":  # also a file of the other kind
        arguments += ["--save_dir", str(link), "--model_save_name_pattern", "m*-*"]
    assert consolidate.main(arguments) == 1
    said = capsys.readouterr().err
    written = "model" if kind == "model" else "optimizer"
    assert f"rank-0-of-2-{written}.pth is one of the files that are read" in said
    assert "Write to another folder (save_dir)" in said
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert consolidate.main([*arguments, "--save_dir", str(tmp_path / "new")]) == 0


def converted(folder, kinds, number, save_dir):
    convert = {
        ("model",): utils.consolidate_and_reshard_fsdp_model_dict,
        ("optimizer",): utils.consolidate_and_reshard_fsdp_optim_dict,
    }.get(kinds, utils.consolidate_and_reshard_fsdp_checkpoint)
    convert(folder, save_dir=save_dir, reshard_num=number)


def found(folder, kinds, number):
    """How often each kind was counted up when it was saved: it must be whole."""
    counts = []
    for kind in kinds:
        if number == 1:  # as any program reads it
            whole = torch.load(folder / f"{kind}_consolidated.pth")
        else:
            pattern = utils.MODEL_PATTERN if kind == "model" else utils.OPTIMIZER_PATTERN
            make = getattr(utils, f"consolidate_sharded_{kind}_checkpoints")
            whole = make(folder, utils.load_checkpoints(folder, pattern))
        if kind == "optimizer":
            whole = {key: value["exp_avg"] for key, value in whole["state"].items()}
        expected = {name: WHOLE[name] + (whole["a"] - A).view(-1)[0] for name in NAMES}
        assert same({name: whole[name] for name in NAMES}, expected)
        counts.append(int((whole["a"] - A).view(-1)[0]))
    return counts


def counted_up(shards):
    for shard in shards:
        state = shard["optimizer"]["state"] if "optimizer" in shard else {"": shard["model"]}
        for values in state.values():
            for key in ("exp_avg", *UNITS):
                if key in values:
                    values[key] = values[key] + 1
    return shards


@pytest.mark.parametrize("kinds", [("model",), ("optimizer",), ("model", "optimizer")])
@pytest.mark.parametrize("number", [1, 4])
def test_a_process_killed_at_any_moment_leaves_a_whole_checkpoint(tmp_path, kinds, number):
    """All files of the old one or all of the new one, whoever reads; and the next save is done."""
    first = write(tmp_path / "first", model_shards(2), optimizer_shards(2))
    second = write(
        tmp_path / "second", counted_up(model_shards(2)), counted_up(optimizer_shards(2))
    )
    converted(first, kinds, number, tmp_path / "before")
    names = names_in(tmp_path / "before")
    target, seen = tmp_path / "target", []
    for killed in killed_at_each_operation(
        tmp_path / "before", target, lambda: converted(second, kinds, number, target)
    ):
        counts = found(target, kinds, number)
        assert counts in ([0] * len(kinds), [1] * len(kinds)), f"killed at operation {killed}"
        seen.append(counts[0])
        if number > 1 and len(kinds) == 2:
            utils.consolidate_and_reshard_fsdp_checkpoint(target, save_checkpoint=False)
        if killed % 10 == 0:
            converted(second, kinds, number, target)
            assert found(target, kinds, number) == [1] * len(kinds)
            assert [name for name in names_in(target) if name[0] != "."] == names
            assert not any((target / name).is_symlink() for name in names)
    assert seen == sorted(seen) and {*seen} == {0, 1}
    if len(seen) > 10:  # several files
        assert seen.count(0) > 5 * len(names) and seen.count(1) > 3 * len(names)
    assert names_in(target) == names


@pytest.mark.parametrize("number", [1, 4])
def test_a_process_killed_while_it_saves_for_the_first_time_leaves_all_or_nothing(tmp_path, number):
    source = write(tmp_path / "source", model_shards(2), optimizer_shards(2))
    kinds, target = ("model", "optimizer"), tmp_path / "target"
    (tmp_path / "before").mkdir()
    seen = []
    for _ in killed_at_each_operation(
        tmp_path / "before", target, lambda: converted(source, kinds, number, target)
    ):
        there = [path for path in target.glob("[!.]*") if path.exists()]
        seen.append(bool(there))
        if there:
            assert found(target, kinds, number) == [0, 0]
        elif number > 1:
            with pytest.raises(FileNotFoundError, match="no file matches"):
                utils.load_checkpoints(target, utils.MODEL_PATTERN)
    assert seen == sorted(seen) and {*seen} == {False, True}


def test_a_model_and_an_optimizer_of_two_saves_are_told(tmp_path):
    """Where they say that they were saved together; as every process saves them they do not."""
    source = write(tmp_path / "source", model_shards(2), optimizer_shards(2, save_id="its own"))
    for name in ("one", "other"):
        utils.consolidate_and_reshard_fsdp_checkpoint(
            source, save_dir=tmp_path / name, reshard_num=2
        )
    for path in (tmp_path / "one").glob("*-model.pth"):
        shutil.copy(path, tmp_path / "other")
    before = names_in(tmp_path / "other")
    with pytest.raises(ValueError, match="the model and the optimizer were not saved at the same"):
        utils.consolidate_and_reshard_fsdp_checkpoint(tmp_path / "other")
    assert names_in(tmp_path / "other") == before
    utils.consolidate_and_reshard_fsdp_model_dict(tmp_path / "other")
    utils.consolidate_and_reshard_fsdp_optim_dict(tmp_path / "other")
    assert found(tmp_path / "other", ("model", "optimizer"), 1) == [0, 0]


def test_what_holds_itself_is_saved_as_torch_saves_it(tmp_path):
    state = {"weight": torch.ones(2)}
    state["again"] = [state]
    utils.save_checkpoints(state, None, tmp_path / "file", "model")
    found = torch.load(tmp_path / "file")
    assert found["again"][0]["weight"].tolist() == [1.0, 1.0]
    assert found["again"][0]["again"][0] is found["again"][0]


def test_numbers_of_shards_and_paths_have_to_agree(tmp_path):
    with pytest.raises(ValueError, match="2 shards, 1 metadata and 2 paths"):
        utils.save_checkpoints([{}, {}], [{}], [tmp_path / "a", tmp_path / "b"], "model")
    with pytest.raises(ValueError, match="save_type = 'weights'"):
        utils.save_checkpoints({}, None, tmp_path / "a", "weights")
    assert names_in(tmp_path) == []
