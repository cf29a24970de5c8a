"""`accelerate` with `config.dist.fsdp`: numbers, states of models and optimizers, and warnings."""

from __future__ import annotations

import pytest
import torch

from tests import helpers
from tests.distributed import models
from tests.distributed.ranks import run_ranks
from tests.distributed.test_data_parallel import SETUP, TRAIN, close

SHARD = (
    SETUP
    + """
config.dist.fsdp.size = 2
config.dist.fsdp.wrap_layer_cls = {"Block"}
"""
)


MORE = (
    (2, "config.dist.fsdp.flatten_parameters = False"),
    (4, "config.dist.fsdp.size = 4"),
    (4, "config.dist.topology = ['fsdp', 'dp', 'pp', 'tp']"),
)


@pytest.fixture(scope="module")
def alone():
    return models.alone()


@pytest.mark.parametrize(
    ("ranks", "change"),
    [
        (2, ""),
        (4, ""),  # two times two
        *(MORE if helpers.FULL else []),
    ],
)
def test_parts_of_a_batch_train_like_the_whole(device, ranks, change, alone):
    losses, state = alone
    done = [each.reports for each in run_ranks(SHARD + change + TRAIN, ranks)]
    mean = torch.tensor([each["losses"] for each in done]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-5)
    for each in done:
        close(each["state"], state)
        assert each["state"] == done[0]["state"]


def test_checkpointed_units_train_the_same(device, alone):
    """Units are gathered again for what backward computes again; two of three are checkpointed."""
    change = """
config.memory.gc, config.memory.gc_cls, config.memory.gc_cnt = True, {"Block"}, 2
calls, forward = [], models.Block.forward
models.Block.forward = lambda self, x: calls.append(1) or forward(self, x)
"""
    for each in run_ranks(SHARD + change + TRAIN + "report(calls=len(calls))", 2):
        close(each.reports["state"], alone[1])
        assert each.reports["calls"] == 5 * models.STEPS


def test_a_process_holds_its_part_of_every_unit(device):
    code = (
        SHARD
        + """
plain = models.made(RANK)
keys, total = list(plain.state_dict()), sum(p.numel() for p in plain.parameters())
model = torchacc.accelerate(plain, config=config)
held = [p.numel() for p in model.parameters()]
report(units=len(held), held=sum(held), total=total, same=list(model.state_dict()) == keys)
report(kinds=[type(m).__name__ for m in (model, model.model, model.model.model)])
assert model.device == torch.device(DEVICE, RANK) and model.note == "mine"
model.note = "other"
assert plain.note == "other"
"""
    )
    code += """
whole = list(dict(models.made(0).named_modules()))
report(modules=list(dict(model.named_modules())) == whole,
       buffers=dict(model.named_buffers()).keys() == {"scale"},
       parameters=sorted(dict(model.named_parameters())))
"""
    for each in run_ranks(code, 2):
        found = each.reports
        assert found["modules"] and found["buffers"]
        blocks = [f"blocks.{index}._flat_param" for index in range(3)]
        assert found["parameters"] == ["_flat_param", *blocks]
        assert found["units"] == 4 and found["same"]  # three blocks and the rest
        assert found["total"] / 2 <= found["held"] <= found["total"] / 2 + 4
        assert found["kinds"] == ["DistributedParallel", "FullyShardedDataParallel", "ShardedUnits"]


def test_names_are_the_models_where_parameters_are_kept(device):
    code = (
        SHARD
        + """
config.dist.fsdp.flatten_parameters = False
plain = models.made(RANK)
names = [name for name, _ in plain.named_parameters()]
plain.head.bias.requires_grad_(False)
model = torchacc.accelerate(plain, config=config)
report(same=[name for name, _ in model.named_parameters()] == names,
       frozen=[name for name, p in model.named_parameters() if not p.requires_grad])
try:
    plain = models.made(RANK)
    plain.blocks[1].up.bias.requires_grad_(False)
    config.dist.fsdp.flatten_parameters = True
    torchacc.accelerate(plain, config=config)
except ValueError as error:
    report(error=str(error), whole=all(p.device.type == "cpu" for p in plain.parameters()))
"""
    )
    for each in run_ranks(code, 2):
        assert each.reports["same"] and each.reports["frozen"] == ["head.bias"]
        assert "makes one parameter of blocks.1." in each.reports["error"]
        assert "blocks.1.up.bias, which is not" in each.reports["error"]
        assert each.reports["whole"], "the model was changed before it was refused"


def test_states_can_be_saved_whole_and_go_into_another_number_of_processes(device, tmp_path):
    """Two processes train and save, four go on; one process on the CPU does it all."""
    half = models.STEPS // 2
    code = (
        SHARD
        + f"""
from torchacc.dist import FullyShardedDataParallel as Sharded
config.dist.fsdp.size = WORLD
batches = [tuple(models.part(t, RANK, WORLD) for t in pair) for pair in models.data()]
FILE, HALF = {str(tmp_path / "state")!r}, {half}
"""
        + """
model, loader = torchacc.accelerate(models.made(RANK), batches, config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
def train(batches):
    for x, y in batches:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x.to(DEVICE)), y.to(DEVICE)).backward()
        optimizer.step()
"""
    )
    save = """
train(batches[:HALF])
state = model.state_dict()
whole = Sharded.full_optim_state_dict(model, optimizer)
assert bool(whole) == (RANK == 0)
if RANK == 0:
    assert whole["state"]["head.bias"]["exp_avg"].shape == (2,)
    torch.save({"model": state, "optimizer": whole}, FILE)
"""
    load = """
saved = torch.load(FILE, map_location="cpu")
model.load_state_dict(saved["model"])
whole = saved["optimizer"] if RANK == 0 else None
optimizer.load_state_dict(Sharded.optim_state_dict_to_load(model, optimizer, whole))
train(batches[HALF:])
report(state={name: value.tolist() for name, value in model.state_dict().items()})
"""
    run_ranks(code + save, 2)
    expected = models.alone()[1]
    for each in run_ranks(code + load, 4):
        close(each.reports["state"], expected)


def test_gradients_are_clipped_by_the_norm_over_all_parts(device):
    code = (
        SHARD
        + """
model = torchacc.accelerate(models.made(0), config=config)
(model(torch.ones(2, 4, device=model.device)) * 100).sum().backward()
report(norm=float(model.clip_grad_norm_(1.0)), after=float(model.clip_grad_norm_(1.0)))
"""
    )
    plain = models.made(0)
    (plain(torch.ones(2, 4)) * 100).sum().backward()
    norm = float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0))
    for each in run_ranks(code, 2):
        assert each.reports["norm"] == pytest.approx(norm, rel=1e-5)
        assert each.reports["after"] == pytest.approx(1.0, rel=1e-4)


def test_classes_that_the_model_does_not_have_are_warned_of_once(device):
    """What matches is wrapped, and the rest is one unit."""
    code = (
        SHARD
        + """
def units(*names):
    config.dist.fsdp.wrap_layer_cls = set(names)
    model = torchacc.accelerate(models.made(0), config=config)
    model(torch.ones(2, 4, device=model.device)).sum().backward()
    return len(list(model.parameters()))
report(none=units("Blok", "Convolution"), some=units("Block", "Blok"), all=units("Block"))
"""
    )
    said = (
        "dist.fsdp.wrap_layer_cls = ['Blok', 'Convolution']: the model has no module of class "
        "'Blok'. Did you mean 'Block'? Nor of class 'Convolution'. "
        "It has: Block, Linear, Net, Sequential. What is in"
    )
    for rank, each in enumerate(run_ranks(code, 2)):
        assert each.reports == {"none": 1, "some": 4, "all": 4}
        assert each.stderr.count(said) == (rank == 0)
        assert each.stderr.count("the model has no module of class") == 2 * (rank == 0)


def test_optimizer_states_of_a_model_that_is_not_sharded_are_refused(device):
    from torchacc.dist import FullyShardedDataParallel

    model = models.made(0)
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match="the model is a Net that is not sharded"):
        FullyShardedDataParallel.full_optim_state_dict(model, optimizer)


def test_an_optimizer_of_parameters_that_were_replaced_is_an_error(device):
    """Without that the model would stay as it is. Those of `kept` stay the same objects."""
    code = (
        SETUP
        + """
from torchacc.dist import tp
from torchacc_device import _scaling

def built_before(change):
    config = torchacc.Config()
    change(config)
    plain = models.made(0)
    early = torch.optim.SGD(plain.parameters(), lr=0.1)
    if config.dist.tp.size > 1:
        plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
        tp.parallelize(plain.blocks[0], plan, config)
    model = torchacc.accelerate(plain, config=config)
    model(torch.ones(2, 4, device=model.device)).sum().backward()
    return model, early

model, flat = built_before(lambda config: setattr(config.dist.fsdp, "size", 2))
report(flat=refused(flat.step))
scaler = torch.amp.GradScaler(DEVICE)
report(scaled=refused(lambda: (scaler.scale(torch.zeros((), device=DEVICE)), scaler.step(flat))))

late, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler(DEVICE)
scaler.scale(model(torch.ones(2, 4, device=model.device)).sum()).backward()
scaler.step(late)
report(synchronised=_scaling.synchronised())

def keep(config):
    config.dist.fsdp.size, config.dist.fsdp.flatten_parameters = 2, False
model, kept = built_before(keep)
before = {name: value.tolist() for name, value in model.state_dict().items()}
report(kept=refused(kept.step))
report(moved=sum(v.tolist() != before[name] for name, v in model.state_dict().items()))

report(split=refused(built_before(lambda config: setattr(config.dist.tp, "size", 2))[1].step))
"""
    )
    for each in run_ranks(code, 2):
        found = each.reports
        advice = "Build the optimizer after torchacc.accelerate(...)"
        assert "16 of the 16 parameters of this SGD are no longer the model's" in found["flat"]
        assert "4 of the 16 parameters" in found["split"]
        assert all(advice in found[way] for way in ("flat", "scaled", "split"))
        assert found["synchronised"] == {}  # looking for such keeps no step from the device
        assert found["kept"] == "accepted" and found["moved"] == 16


UNITS = (
    SETUP
    + """
from torchacc.dist import tp
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.blocks = nn.Embedding(11, 6), nn.Sequential(models.Block(), models.Block())
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.words.weight
    def forward(self, ids):
        return self.head(self.blocks(self.words(ids)))
def asked(change=lambda plain: None, names=(), flat=True, **sizes):
    config = torchacc.Config()
    for name, size in sizes.items():
        setattr(getattr(config.dist, name), "size", size)
    config.dist.fsdp.wrap_layer_cls, config.dist.fsdp.flatten_parameters = set(names), flat
    if "pp" in sizes:
        config.dist.pp.split_points = ["blocks.1"]
    plain = Tied()
    change(plain)
    if "tp" in sizes:
        plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
        tp.parallelize(plain.blocks[0], plan, config)
    before = [(name, id(p), str(p.device)) for name, p in plain.named_parameters()]
    said = refused(lambda: torchacc.accelerate(plain, config=config))
    now = [(name, id(p), str(p.device)) for name, p in plain.named_parameters()]
    return [said, before == now]
"""
)


def test_units_of_one_kind_each_may_be_flat(device):
    """Subclasses of a class are units too, and in half precision batch norms, which stay exact."""
    code = """
class Other(models.Block):
    pass
def subclass(plain):
    plain.blocks[1] = Other().requires_grad_(False)
def norm(plain):
    plain.blocks[1] = nn.BatchNorm1d(5).requires_grad_(False)
report(subclass=asked(subclass, names=["Block"], fsdp=WORLD),
       none=asked(subclass, names=["Other"], fsdp=WORLD),
       exact=asked(norm, fsdp=WORLD))
config.compute.bf16 = True
torchacc.Config = lambda: config
report(half=asked(norm, fsdp=WORLD))
"""
    for each in run_ranks(UNITS + code, 2):
        assert each.reports["subclass"][0] == each.reports["none"][0] == "accepted"
        assert each.reports["half"][0] == "accepted"
        said, same = each.reports["exact"]
        assert same and "blocks.1.weight, which is not" in said


def test_a_parameter_in_two_units_is_refused_before_anything_changes(device):
    """Else each unit trains a copy. Stages hold operations, and modules of torch as a whole."""
    code = """
def share(plain):
    plain.blocks[1].up = plain.blocks[0].up
def freeze(plain):
    plain.words.weight.requires_grad_(False)
report(frozen=asked(freeze, names=["Embedding"], flat=False, fsdp=WORLD),
       flat=asked(names=["Embedding"], fsdp=WORLD),
       kept=asked(names=["Embedding"], flat=False, fsdp=WORLD),
       module=asked(share, names=["Block"], fsdp=WORLD),
       twice=asked(lambda plain: plain.blocks.append(plain.blocks[0]), names=["Block"], fsdp=WORLD),
       together=asked(names=["Block"], fsdp=WORLD))
if WORLD == 4:
    report(layers=asked(names=["Embedding"], fsdp=2, tp=2),
           stages=asked(share, names=["Linear", "Block"], fsdp=2, pp=2))
"""
    for ranks in (2, 4) if helpers.FULL else (4,):
        for rank, each in enumerate(run_ranks(UNITS + code, ranks)):
            found = each.reports
            assert found.pop("together")[0] == found.pop("frozen")[0] == "accepted"
            if ranks == 4:
                assert found.pop("stages")[0] == "accepted"
                told = "wrap_layer_cls: no unit of class Block. A stage" in each.stderr
                assert told == (rank == 0)
            for way, (said, same) in found.items():
                assert same, way
                assert "are one parameter, and would be in two units (" in said, way
            assert "(words, a Embedding, and the model itself)" in found["flat"][0]
            assert "(blocks.0, a Block, and blocks.2, a Block)" in found["twice"][0]
            assert "blocks.0.up.weight and blocks.1.up.weight are one" in found["module"][0]


def test_parameters_that_torch_cannot_shard_are_named_before_anything_changes(device):
    """Contiguous ones are asked for where layers or stages are split."""
    code = """
def scalar(plain):
    plain.blocks[1].factor = nn.Parameter(torch.ones(()))
def strided(plain):
    plain.blocks[1].up.weight = nn.Parameter(torch.ones(6, 10).t())
report(flat=asked(scalar, fsdp=4), kept=asked(scalar, flat=False, fsdp=4),
       layers=asked(scalar, fsdp=2, tp=2), copies=asked(scalar, dp=2, tp=2),
       elsewhere=asked(scalar, fsdp=2, pp=2))
report(strides={"layers": asked(strided, fsdp=2, tp=2), "stages": asked(strided, fsdp=2, pp=2),
                "flat": asked(strided, fsdp=4)})
"""
    for each in run_ranks(UNITS + code, 4):
        strides = each.reports.pop("strides")
        assert strides.pop("flat")[0] == each.reports.pop("elsewhere")[0] == "accepted"
        for way, (said, same) in each.reports.items():
            assert same and "blocks.1.factor is a 0-dimensional parameter" in said, way
        for way, (said, same) in strides.items():
            assert same and "blocks.1.up.weight has the shape [10, 6] and" in said, way
