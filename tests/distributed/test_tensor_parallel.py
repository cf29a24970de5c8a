"""`torchacc.dist.tp`: layers that are split over processes compute what the whole ones do."""

from __future__ import annotations

import pytest
import torch

from tests import helpers
from tests.distributed import models
from tests.distributed.ranks import run_ranks
from tests.distributed.test_data_parallel import SETUP, close

SPLIT = (
    SETUP
    + """
from torchacc.dist import tp
config.dist.tp.size = 2
plain = models.made(RANK)  # all start from the first process's
plan = {}
for index in range(3):
    plan[f"blocks.{index}.up"] = tp.ColwiseParallel()
    plan[f"blocks.{index}.down"] = tp.RowwiseParallel()
tp.parallelize(plain, plan, config)
pair = RANK // 2
batches = [tuple(models.part(t, pair, WORLD // 2) for t in both) for both in models.data()]
model, loader = torchacc.accelerate(plain, batches, config)
def whole(t):
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).tolist()
report(losses=models.trained(model, loader, foreach=False))
report(state={name: whole(value) for name, value in model.state_dict().items()})
report(part=list(model.blocks[0].up.weight.to_local().shape))
"""
)
# What several processes that have other data add: norms, and states that come back.
SEVERAL = (
    SPLIT.replace("tp.size = 2", "tp.size = 2; config.dist.CHOSEN.size = 2")
    + """
x, y = batches[0]
expected = models.made(0)
expected.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
nn.functional.mse_loss(expected(models.data()[0][0]), models.data()[0][1]).backward()
model.zero_grad()
nn.functional.mse_loss(model(x.to(model.device)), y.to(model.device)).backward()
norm = nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
report(norm=model.clip_grad_norm_(0.01).item(), expected=norm.item())
held = dict(model.named_parameters())
report(clipped=models.largest((held[name].grad.full_tensor().cpu() - p.grad).abs().max()
                              for name, p in expected.named_parameters()))
model.load_state_dict(models.made(7).state_dict())
report(loaded={name: value.tolist() for name, value in model.state_dict().items()},
       seven={name: value.tolist() for name, value in models.made(7).state_dict().items()})
"""
)


def test_split_layers_train_like_whole_ones(device):
    losses, state = models.alone()
    done = [each.reports for each in run_ranks(SPLIT, 2)]
    for each in done:
        torch.testing.assert_close(
            torch.tensor(each["losses"]), torch.tensor(losses), rtol=1e-5, atol=1e-5
        )
        close(each["state"], state)
        assert each["part"] == [5, 6]  # of 10 x 6


def test_policies_of_buckets_are_refused_where_layers_are_split(device):
    code = SPLIT.replace("model, loader", "config.dist.comm.topk = True\nmodel, loader", 1)
    for each in run_ranks(code, 4, check=False):
        assert each.status == 1
        assert "does not take layers that are split" in each.stderr


def test_an_order_that_torch_cannot_shard_over_is_refused(device):
    order = "tp.size = 2; config.dist.topology = ['tp', 'dp', 'fsdp', 'pp']"
    code = SPLIT.replace("tp.size = 2", f"fsdp.size = 2; config.dist.{order}", 1)
    for each in run_ranks(code, 4, check=False):
        assert each.status == 1
        assert "torch shards only over dimensions in the order fsdp, tp" in each.stderr


@pytest.mark.parametrize("chosen", ["dp", "fsdp"])
def test_split_layers_with_other_data_elsewhere(device, chosen):
    losses, state = models.alone()
    done = [each.reports for each in run_ranks(SEVERAL.replace("CHOSEN", chosen), 4)]
    mean = torch.tensor([each["losses"] for each in done]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-5)
    for each in done:
        close(each["state"], state)
        assert each["norm"] == pytest.approx(each["expected"], rel=1e-5)
        assert each["clipped"] < 1e-6
        assert each["loaded"] == each["seven"]
    assert [each["part"][0] for each in done] == ([5] * 4 if chosen == "dp" else [3, 3, 2, 2])


def test_a_parameter_can_be_marked_to_be_split(device):
    code = (
        SETUP
        + """
from torchacc.dist import tp
config.dist.tp.size = 2
layer = models.made(0)
whole = layer.blocks[0].up.weight.detach().clone()
made = tp.mark_sharding(layer, "blocks.0.up.weight", (0, None), config)
held = layer.blocks[0].up.weight
assert torch.equal(held.full_tensor().cpu(), whole) and held.requires_grad
assert torch.equal(held.to_local().cpu(), whole.chunk(2)[RANK])
try:
    tp.mark_sharding(layer, "blocks.0.up.weight", (0, 0), config)
except ValueError as error:
    report(error=str(error))
config.dist.tp.size = 1
try:
    tp.device_mesh(config)
except ValueError as error:
    report(one=str(error))
"""
    )
    for each in run_ranks(code, 2):
        assert "should have an entry for each dimension" in each.reports["error"]
        assert "config.dist.tp.size is 1" in each.reports["one"]


def test_a_shared_parameter_that_is_marked_stays_shared(device):
    code = """
plain.more = nn.Sequential(plain.last, nn.Linear(11, 11))  # a third name
whole = plain.words.weight.detach().clone()
tp.mark_sharding(plain, "last.weight", (0, None), config)
held = plain.last.weight
report(shared=plain.words.weight is held and plain.more[0].weight is held,
       same=torch.equal(held.full_tensor().cpu(), whole), part=held.to_local().shape[0])
"""
    parts = [6, 5]  # of 11
    for each, part in zip(run_ranks(WORDS + code, 2), parts, strict=True):
        assert each.reports == {"shared": True, "same": True, "part": part}


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_state_is_whole_and_comes_back(device, ranks):
    """Layers alone that are split, and split layers of stages: a file has all of a tensor."""
    code = (
        SETUP
        + """
from torchacc.dist import tp
config.dist.tp.size = 2
if WORLD == 4:
    config.dist.pp.size, config.dist.pp.split_points = 2, ["blocks.1"]
plain, other = models.made(0), models.made(7)
expected = plain.state_dict()
expected = {name: value.clone() for name, value in expected.items()}
for index in range(3):
    plan = {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}
    tp.parallelize(plain.blocks[index], plan, config)
model = torchacc.accelerate(plain, config=config)
path = f"{os.environ['REPORTS']}/{RANK}.pth"
torchacc.save(model.state_dict(), path, master_only=False)
for name, value in torch.load(path).items():
    assert torch.equal(value, expected[name]), name
result = model.load_state_dict(other.state_dict())
assert not result.missing_keys and not result.unexpected_keys
for name, value in model.state_dict().items():
    assert torch.equal(value.cpu(), other.state_dict()[name]), name
report(names=list(model.state_dict()), part=list(plain.blocks[0].up.weight.to_local().shape))
"""
    )
    done = [each.reports for each in run_ranks(code, ranks)]
    assert all(each["part"] == [5, 6] for each in done)
    assert {name for each in done for name in each["names"]} == set(models.made(0).state_dict())


WORDS = (
    SETUP
    + """
import copy
from torch.distributed.tensor import Replicate
from torchacc.dist import tp
config.dist.tp.size = 2
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.middle = nn.Embedding(11, 6), nn.Linear(6, 6)
        self.norm, self.last = nn.LayerNorm(6), nn.Linear(6, 11, bias=False)
        self.last.weight = self.words.weight
        self.odd = nn.Linear(7, 6)
    def forward(self, ids):
        return self.last(self.norm(torch.tanh(self.middle(self.words(ids)))))
torch.manual_seed(0)
plain = Words()
def layout():
    parameters = plain.named_parameters()
    return [[n, type(p.data).__name__, str(p.device), p.requires_grad] for n, p in parameters]
rows = tp.RowwiseParallel(input_layouts=Replicate())
columns = tp.ColwiseParallel(output_layouts=Replicate())
"""
)


def test_layers_that_share_a_parameter_go_on_sharing_it(device):
    code = """
start = copy.deepcopy(plain)
model = tp.parallelize(start, {"words": rows, "last": columns}, config)
assert model.last.weight is model.words.weight
model = torchacc.accelerate(model, config=config)
assert len(list(model.parameters())) == len(list(plain.parameters()))
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
reference = torch.optim.SGD(plain.parameters(), lr=0.5)
for seed in range(4):
    ids = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed))
    loss = nn.functional.cross_entropy(model(ids.to(model.device)).flatten(0, 1).cpu(),
                                       ids.flatten())
    expected = nn.functional.cross_entropy(plain(ids).flatten(0, 1), ids.flatten())
    torch.testing.assert_close(loss, expected)
    for each, optimizer_of in ((loss, optimizer), (expected, reference)):
        each.backward()
        optimizer_of.step()
        optimizer_of.zero_grad()
report(done=True)
"""
    for each in run_ranks(WORDS + code, 2):
        assert each.reports["done"]


REFUSED = {
    "{'lasst': columns}": "ValueError: [tp] the plan names lasst, and the model has no such",
    "{'middle': columns, '*.up': rows}": "the plan names *.up, and the model has no such",
    "{'middle': columns, 'norm': columns}": "splits Linear and Embedding, and norm is a Lay",
    "rows": "splits Linear and Embedding, and this is a Words",
    "{'middle': columns, 'odd': tp.RowwiseParallel()}": "odd has 7 inputs, which dist.tp",
    "{'middle': 'columns'}": "TypeError: [tp] the plan has 'columns' for 'middle'",
    "{'last': columns}": "splits words.weight not at all, last.weight along 0",
    "{'words': columns, 'last': columns}": "splits words.weight along 1, last.weight along 0",
}


def test_plans_that_cannot_be_are_refused_before_anything_changes(device):
    code = WORDS + "before = layout()\n"
    for plan in REFUSED:
        code += f"""
error = refused(lambda: tp.parallelize(plain, {plan}, config))
report(**{{{plan!r}: [error, layout() == before]}})
"""
    for each in run_ranks(code, 2):
        assert list(each.reports) == list(REFUSED)
        for plan, (error, same) in each.reports.items():
            assert REFUSED[plan] in error, plan
            assert same, plan


def test_what_is_replicated_is_the_first_process_s_and_stays_frozen(device):
    code = """
with torch.no_grad():
    for parameter in plain.norm.parameters():
        parameter.fill_(1 + RANK)
plain.norm.weight.requires_grad_(False)
tp.parallelize(plain, {"norm": tp.SequenceParallel()}, config)
model = torchacc.accelerate(plain, config=config)
trained = [p.requires_grad for p in model.norm.parameters()]
report(trained=trained, values=[p.detach().to_local()[0].item() for p in model.norm.parameters()])
"""
    for each in run_ranks(WORDS + code, 2):
        assert each.reports == {"trained": [False, True], "values": [1.0, 1.0]}


def test_units_may_be_inside_of_others(device):
    """Also where a norm, which half precision keeps in float32, is named as a unit."""
    code = """
config.dist.fsdp.size, config.dist.fsdp.wrap_layer_cls = 2, {"Block", "Linear"}
plan = {f"blocks.{index}.up": tp.ColwiseParallel() for index in range(3)}
plan |= {f"blocks.{index}.down": tp.RowwiseParallel() for index in range(3)}
x, y = (models.part(t, RANK // 2, 2) for t in models.data()[0])
def gradients(kind):
    config.compute.bf16 = kind != "plain"
    plain = models.made(0)
    if kind != "plain":
        plain.blocks.append(nn.BatchNorm1d(6))
        config.dist.fsdp.wrap_layer_cls.add("BatchNorm1d")
    model = torchacc.accelerate(tp.parallelize(plain, plan, config), config=config)
    nn.functional.mse_loss(model(x.to(model.device)), y.to(model.device)).backward()
    report(**{kind: sum(type(m).__name__.startswith("FSDP") for m in plain.modules())})
    return {name: p.grad.full_tensor().cpu() for name, p in model.named_parameters()}
expected = models.made(0)
nn.functional.mse_loss(expected(models.data()[0][0]), models.data()[0][1]).backward()
found = gradients("plain")
for name, parameter in expected.named_parameters():
    torch.testing.assert_close(found[name], parameter.grad)
found = gradients("half")
report(norm=sum(float(value.abs().sum()) for name, value in found.items() if "blocks.3" in name))
"""
    for each in run_ranks(
        SETUP + "from torchacc.dist import tp\nconfig.dist.tp.size = 2" + code, 4
    ):
        assert each.reports["plain"] == 12  # three blocks, eight layers and the model
        assert each.reports["half"] == 13 and each.reports["norm"] > 0


@pytest.mark.parametrize("kind", ["dp", "fsdp"])
def test_what_has_other_data_has_the_buffers_of_the_first(device, kind):
    """Before a forward, as in DistributedDataParallel, and so in the evaluation after training."""
    code = f"""
plain.norm = nn.BatchNorm1d(6)
config.dist.{kind}.size = 2
tp.parallelize(plain, {{"words": rows, "last": columns}}, config)
model = torchacc.accelerate(plain, config=config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
def told(when):
    report(**{{when: [b.tolist() for n, b in model.named_buffers() if n.startswith("norm")]}})
for seed in range(3):
    generator = torch.Generator().manual_seed(10 * seed + RANK // 2)
    ids = torch.randint(0, 11, (4,), generator=generator).to(model.device)
    # Sent again before the second forward, they are still what the first one's backward knows.
    (model(ids).square().mean() + model(ids.flip(0)).square().mean()).backward()
    optimizer.step()
    optimizer.zero_grad()
told("own")
model.eval()
with torch.no_grad():
    model(ids)
    told("evaluated")
    group = config.get_mesh().group("dp")._get_backend(model.device)
    before = group._get_sequence_number_for_group()
    model(ids)
    report(again=group._get_sequence_number_for_group() - before)
"""
    done = [each.reports for each in run_ranks(WORDS + code, 4)]
    assert done[0]["own"] == done[1]["own"] != done[2]["own"]
    assert all(each["evaluated"] == done[0]["own"] for each in done)
    assert all(each["again"] == 0 for each in done), "nothing had changed"


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [(2, "tp"), (4, "fsdp"), *([(4, "dp"), (4, "pp")] if helpers.FULL else [])],
)
def test_steps_without_an_exchange_add_up(device, ranks, kind):
    code = """
if KIND == "pp":
    config.dist.pp.split_points = ["middle"]
if KIND != "tp":
    getattr(config.dist, KIND).size = 2
start = copy.deepcopy(plain)
del start.odd, plain.odd
tp.parallelize(start, {"words": rows, "last": columns} if KIND != "pp" else {"middle": columns},
               config)
model = torchacc.accelerate(start, config=config)
for seed in range(3):
    ids = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed))
    mine = ids.chunk(2)[RANK // 2] if KIND in ("dp", "fsdp") else ids
    with model.no_sync() if seed < 2 else torch.enable_grad():
        if KIND == "pp":
            model.forward_backward(mine, output_fn=lambda out: out.square().mean())
        else:
            model(mine.to(model.device)).square().mean().backward()
    plain(ids).square().mean().backward()
expected = dict(plain.named_parameters(remove_duplicate=False))
for name, parameter in model.named_parameters():
    gradient = parameter.grad
    gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    torch.testing.assert_close(gradient.cpu(), expected[name].grad)
report(done=True)
"""
    for each in run_ranks(f"KIND = {kind!r}" + WORDS + code, ranks):
        assert each.reports["done"]


def test_processes_that_share_layers_drop_the_same(device):
    """Whatever the program seeded; and what they all have stays the same."""
    code = """
class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(4, 8), nn.Linear(8, 4), nn.Dropout(0.5)
        self.norm = nn.LayerNorm(4)
    def forward(self, x):
        return self.norm(self.drop(self.down(torch.tanh(self.up(x)))))
torch.manual_seed(RANK)
plain = Dropping()
tp.parallelize(plain, {"up": tp.ColwiseParallel(), "down": tp.RowwiseParallel()}, config)
model = torchacc.accelerate(plain, config=config)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5, foreach=False)
for _ in range(3):
    model(torch.ones(6, 4, device=model.device)).exp().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
report(norm=model.norm.weight.tolist(), own=torch.rand(2).tolist())
"""
    first, second = (each.reports for each in run_ranks(WORDS + code, 2))
    assert first["norm"] == second["norm"]
    assert first["own"] != second["own"]


def test_stages_share_a_parameter_that_is_split(device):
    code = """
del plain.odd
config.dist.pp.size, config.dist.pp.split_points = 2, ["norm"]
config.dist.pp.num_micro_batches = 2
model = tp.parallelize(copy.deepcopy(plain), {"words": rows, "last": columns}, config)
model = torchacc.accelerate(model, config=config)
for seed in range(3):
    ids = torch.randint(0, 11, (4, 5), generator=torch.Generator().manual_seed(seed))
    loss = model.forward_backward(ids, output_fn=lambda out: out.square().mean())
    expected = plain(ids).square().mean()
    expected.backward()
    torch.testing.assert_close(loss.cpu(), expected.detach())
grads = dict(plain.named_parameters(remove_duplicate=False))
for name, parameter in model.named_parameters():
    grad = parameter.grad
    grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    torch.testing.assert_close(grad.cpu(), grads[name].grad)
norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
torch.testing.assert_close(model.clip_grad_norm_(0.1).cpu(), norm)
report(done=True)
"""
    for each in run_ranks(WORDS + code, 4):
        assert each.reports["done"]


def test_processes_that_share_layers_read_the_same(device):
    """Also what a data set draws, where workers read it; else the log says that it is not so."""
    code = """
from torch.utils.data import DataLoader, Dataset
class Noisy(Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index + torch.rand(())
config.dataloader.shard = True
torch.manual_seed(RANK)
for workers in (1, 0):
    data = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers)
    _, loader = torchacc.accelerate(models.made(0), data, config)
    report(**{str(workers): [batch.tolist() for batch in loader]})
from torch.utils.data.distributed import DistributedSampler
def refuses(**options):
    sampler = DistributedSampler(range(8), **options)
    data = DataLoader(range(8), batch_size=4, sampler=sampler)
    return refused(lambda: torchacc.accelerate(models.made(0), data, config))
report(sampler=[refuses(), refuses(num_replicas=1, rank=0)])
# One that reads nothing is no other part, and nobody waits for it.
config.dataloader.shard = False
data = DataLoader(range(8), sampler=DistributedSampler(range(8))) if RANK == 0 else None
report(alone=refused(lambda: torchacc.accelerate(models.made(0), data, config)))
"""
    first, second = run_ranks(SETUP + "config.dist.tp.size = 2\n" + code, 2)
    assert first.reports["1"] == second.reports["1"]
    for number, each in enumerate((first, second)):
        over_all, over_parts = each.reports["sampler"]
        assert "with dist.tp.size = 2 some processes read the same" in over_all
        assert f"({number}, 2) here, and [(0, 2), (1, 2)] on all" in over_all
        assert "This one needs (0, 1)." in over_all and over_parts == "accepted"
        assert each.reports["alone"] == "accepted"
    floors = [[[int(x) for x in batch] for batch in each.reports["0"]] for each in (first, second)]
    assert floors[0] == floors[1]
    line = "into 1 parts, each for 2 processes, which read the same."
    own = line + " What the data set or collate_fn draws at random is each process's own"
    assert first.stderr.count(line) == 2 and first.stderr.count(own) == 1


def test_a_model_with_split_layers_is_taken_again_as_it_is(device):
    """As for a loader of validation."""
    code = (
        SPLIT
        + """
again, other = torchacc.accelerate(model, batches, config)
report(same=again is model, losses_again=models.trained(again, other, foreach=False))
scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
split = next(p for p in model.parameters() if hasattr(p, "to_local"))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
(x, y), *_ = other
scaler.scale(nn.functional.mse_loss(model(x), y)).backward()
if RANK == 0:  # an overflow of one process
    split.grad.to_local().fill_(float("inf"))
before = [whole(p) for p in model.parameters()]
scaler.step(optimizer)
report(skipped=[whole(p) for p in model.parameters()] == before)
"""
    )
    for each in run_ranks(code, 2):
        assert each.reports["same"] and each.reports["skipped"]
