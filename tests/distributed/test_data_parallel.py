"""`accelerate` in several processes, data parallel: numbers, and what the model looks like."""

from __future__ import annotations

import pytest
import torch

from tests import helpers
from tests.distributed import models
from tests.distributed.ranks import run_ranks

SETUP = """
import torchacc
from torch import nn
from tests.distributed import models
config = torchacc.Config()
"""
TRAIN = """
batches = [tuple(models.part(t, RANK, WORLD) for t in pair) for pair in models.data()]
model, loader = torchacc.accelerate(models.made(RANK), batches, config)
report(losses=models.trained(model, loader))
report(state={name: value.tolist() for name, value in model.state_dict().items()})
"""


def close(actual, expected, tolerance: float = 1e-5) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            torch.tensor(actual[name]), torch.tensor(value), rtol=tolerance, atol=tolerance
        )


@pytest.fixture(scope="module")
def alone():
    return models.alone()


@pytest.mark.parametrize("ranks", [2, 4] if helpers.FULL else [2])
def test_parts_of_a_batch_train_like_the_whole(device, ranks, alone):
    """Every process has another model to begin with; all start from the first one's."""
    losses, state = alone
    done = [each.reports for each in run_ranks(SETUP + TRAIN, ranks)]
    mean = torch.tensor([each["losses"] for each in done]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(losses), rtol=1e-5, atol=1e-5)
    for each in done:
        close(each["state"], state)
        assert each["state"] == done[0]["state"], "the replicas differ"


def test_a_container_has_its_items(device):
    code = (
        SETUP
        + """
import copy
model = torchacc.accelerate(nn.Sequential(nn.Linear(4, 6), nn.ReLU()))
report(length=len(model), kinds=[type(each).__name__ for each in model],
       second=type(model[1]).__name__, there=model[1] in list(model))
average = copy.deepcopy(model)
report(copied=torch.equal(average[0].weight, model[0].weight), own=average[0] is not model[0])
plain = torchacc.accelerate(models.made(0))
report(true=bool(plain))
try:
    len(plain)
except TypeError as error:
    report(error=str(error))
"""
    )
    for each in run_ranks(code, 2):
        found = each.reports
        assert (found["length"], found["kinds"]) == (2, ["Linear", "ReLU"])
        assert found["second"] == "ReLU" and found["there"] and found["true"]
        assert found["copied"] and found["own"]
        assert "'Net' has no len()" in found["error"]


def test_an_optimizer_that_was_built_before_goes_on_working(device, alone):
    code = (
        SETUP
        + """
batches = [tuple(models.part(t, RANK, WORLD) for t in pair) for pair in models.data()]
plain = models.made(RANK)
optimizer = torch.optim.AdamW(plain.parameters(), lr=0.02)
before = list(plain.parameters())
model, loader = torchacc.accelerate(plain, batches)
assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()
report(state={name: value.tolist() for name, value in model.state_dict().items()})
"""
    )
    for each in run_ranks(code, 2):
        close(each.reports["state"], alone[1])


def test_the_model_looks_as_it_does_in_one_process(device):
    code = (
        SETUP
        + """
import copy, io
plain = models.made(0)
names = {
    "state": list(plain.state_dict()),
    "parameters": [name for name, _ in plain.named_parameters()],
    "buffers": [name for name, _ in plain.named_buffers()],
    "modules": [name for name, _ in plain.named_modules()],
    "children": [name for name, _ in plain.named_children()],
}
model = torchacc.accelerate(plain)
assert model is not plain and type(model).__name__ == "DistributedParallel"
assert names == {
    "state": list(model.state_dict()),
    "parameters": [name for name, _ in model.named_parameters()],
    "buffers": [name for name, _ in model.named_buffers()],
    "modules": [name for name, _ in model.named_modules()],
    "children": [name for name, _ in model.named_children()],
}
assert model.device == plain.device == torch.device(DEVICE, RANK)
assert model.head is plain.head and model.blocks[1].up is plain.blocks[1].up
assert model.note == "mine" and "note" in dir(model)
model.note = "other"
assert plain.note == "other"
model.extra = nn.Linear(1, 1)
assert plain.extra is model.extra
del model.extra
assert not hasattr(plain, "extra") and not hasattr(model, "extra")
model.eval()
assert not plain.training and not plain.blocks[0].training and not model.training
model.train()
assert plain.training and plain.blocks[0].up.training and model.training
model.apply(lambda m: setattr(m, "seen", True))
assert plain.seen and plain.head.seen
saved = io.BytesIO()
torch.save(model.state_dict(), saved)
saved.seek(0)
other = models.made(5)
other.load_state_dict(torch.load(saved, map_location="cpu"))
assert torch.equal(other.head.weight, model.head.weight.cpu())
model.load_state_dict(models.made(7).state_dict())
assert torch.equal(plain.head.weight.cpu(), models.made(7).head.weight)
assert model.get_submodule("blocks.0.up") is plain.blocks[0].up
assert type(model.model).__name__ == "DataParallel"  # the wrapper inside
assert type(model.model.model).__name__ == "DistributedDataParallel"
assert model.config.dist.dp.size == 2 and model.mesh.get_dp_num() == 2
with model.no_sync():
    pass
try:
    model.nothing
except AttributeError as error:
    report(error=str(error))
"""
    )
    for each in run_ranks(code, 2):
        assert each.reports["error"] == (
            "'Net' object, trained by several processes, has no attribute 'nothing'"
        )


def test_attributes_of_the_model_go_before_those_of_the_wrapper(device):
    code = (
        SETUP
        + """
class Own(models.Net):
    def __init__(self):
        super().__init__()
        self.config, self.model = {"hidden": 6}, nn.Linear(4, 4)
    def forward(self, x):
        return super().forward(self.model(x))
plain = Own()
model = torchacc.accelerate(plain)
assert model.config == {"hidden": 6} and model.model is plain.model
assert model.mesh.get_world_size() == 2
"""
    )
    run_ranks(code, 2)


def test_a_second_call_takes_the_model_as_it_is(device):
    code = (
        SETUP
        + """
model, first = torchacc.accelerate(models.made(0), [torch.ones(2, 4)])
again, second = torchacc.accelerate(model, [torch.zeros(2, 4)])
assert again is model and second.device == model.device == first.device
assert torchacc.accelerate(model) is model
other = torchacc.accelerate(models.made(1))  # a second model of its own
assert other is not model and torch.equal(other.head.bias.cpu(), models.made(1).head.bias)
"""
    )
    run_ranks(code, 2)


def test_a_model_that_the_program_wrapped_itself_is_left_to_it(device):
    code = (
        SETUP
        + """
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("acc")
torch.acc.set_device(RANK)
mine = DistributedDataParallel(models.made(0).to(DEVICE))
model, loader = torchacc.accelerate(mine, [torch.ones(2, 4)])
assert model is mine and model.device == torch.device(DEVICE, RANK)
model(next(iter(loader))).sum().backward()
dist.destroy_process_group()
"""
    )
    run_ranks(code, 2)


def test_a_model_without_anything_to_train_is_not_wrapped_inside(device):
    code = (
        SETUP
        + """
plain = models.made(RANK).requires_grad_(False)
model = torchacc.accelerate(plain)
assert model.model is plain and torch.equal(model.head.bias.cpu(), models.made(0).head.bias)
assert model(torch.ones(2, 4, device=model.device)).shape == (2, 2)
"""
    )
    run_ranks(code, 2)


def test_parameters_that_forward_does_not_use(device):
    code = (
        SETUP
        + """
class Choosing(models.Net):
    def forward(self, x):
        if RANK == 1:  # one process uses all
            return super().forward(x)
        return self.head(self.first(x)) * self.scale
config.dist.dp.find_unused_parameters = True
torch.manual_seed(0)
batches = [tuple(models.part(t, RANK, WORLD) for t in pair) for pair in models.data()]
model, loader = torchacc.accelerate(Choosing(), batches, config)
report(losses=models.trained(model, loader))
report(weight=model.blocks[0].up.weight.tolist())
"""
    )
    first, second = (each.reports for each in run_ranks(code, 2))
    assert first["weight"] == second["weight"]
    torch.manual_seed(0)
    assert first["weight"] != models.Net().blocks[0].up.weight.tolist(), "it was trained"


def test_checkpointed_modules_train_the_same(device, alone):
    code = SETUP + "config.memory.gc, config.memory.gc_cls = True, {'Block'}\n" + TRAIN
    for each in run_ranks(code, 2):
        close(each.reports["state"], alone[1])


def test_a_divided_loader_reads_everything_once(device):
    code = (
        SETUP
        + """
from torch.utils.data import DataLoader, TensorDataset
config.dataloader.shard = True
torch.manual_seed(RANK)  # another order in each process, were it not divided
data = DataLoader(TensorDataset(torch.arange(24.0)), batch_size=4, shuffle=True)
model, loader = torchacc.accelerate(models.made(0), data, config)
report(length=len(loader))
report(read=[[x.tolist() for (x,) in loader] for _ in range(2)])
"""
    )
    done = [each.reports for each in run_ranks(code, 2)]
    for epoch in range(2):
        rows = [sum(each["read"][epoch], []) for each in done]
        assert sorted(sum(rows, [])) == list(range(24))
    assert [each["length"] for each in done] == [3, 3]
    assert done[0]["read"][0] != done[0]["read"][1]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        ("list(range(3))", "Each of the 2 processes iterates the loader as it was made"),
        (
            "DataLoader(rows, sampler=DistributedSampler(rows, 2, RANK))",
            "DistributedSampler divides",
        ),
        ("DataLoader(rows)", "The data is divided (dataloader.shard) into 2 parts."),
    ],
)
def test_the_log_says_once_who_reads_what(device, make, text):
    code = (
        SETUP
        + f"""
from torch.utils.data import DataLoader, DistributedSampler
rows = list(range(4))
mine = DistributedSampler(rows, 2, RANK)
config.dataloader.shard = {make == "DataLoader(rows)"}
model, _ = torchacc.accelerate(models.made(0), {make}, config)
torchacc.accelerate(model, {make}, config)
"""
    )
    first, second = run_ranks(code, 2)
    assert first.stderr.count(text) == 1 and text not in second.stderr
    assert first.stderr.count("2 processes train together (dp 2)") == 1


# --- what is refused ------------------------------------------------------------------------------


def refusals(code: str, ranks: int = 2) -> list[str]:
    """What each process says when it ends with an error; none may wait for another."""
    done = run_ranks(SETUP + code, ranks, check=False)
    assert [each.status for each in done] == [1] * ranks
    # After the error may come what c10d warns of.
    return ["".join(each.stderr.splitlines(True)[-4:]) for each in done]


def test_models_that_differ_are_refused_on_every_process(device):
    for said in refusals("torchacc.accelerate(models.Net(3 if RANK == 0 else 2))"):
        assert "process 0 has blocks.2.up.weight (float32 [10, 6]), and process 1 has head" in said
    for said in refusals("torchacc.accelerate(nn.Linear(2, 2, bias=RANK == 0))"):
        assert "process 0 has 2 tensors, and process 1 has 1 tensors" in said


def test_a_loader_that_reads_ahead_cannot_be_divided(device):
    code = """
config.dataloader.shard = True
model, loader = torchacc.accelerate(models.made(0), [torch.ones(1)] * 4, config)
assert torchacc.accelerate(model, loader, config)[1] is loader and len(loader) == 2
torchacc.accelerate(model, torchacc.AsyncLoader([torch.ones(1)] * 4), config)
"""
    for said in refusals(code):
        assert "the loader is an AsyncLoader, which reads ahead" in said


def test_sizes_that_need_other_processes_are_refused_on_every_process(device):
    code = "config.dist.fsdp.size = 4\ntorchacc.accelerate(models.made(0), config=config)"
    for said in refusals(code):
        assert "dist.fsdp.size = 4 need a multiple of 4 processes, and there are 2" in said
        assert "torchrun --nproc_per_node=4" in said


def test_a_model_on_the_device_of_another_process_is_refused(device):
    for rank, said in enumerate(
        refusals("torchacc.accelerate(models.made(0).to(torch.device(DEVICE, 1 - RANK)))")
    ):
        assert f"the model is on acc:{1 - rank}, and this process uses acc:{rank}" in said


def test_a_wrapped_model_on_the_cpu_is_refused(device):
    code = """
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("cpu:gloo,acc:acc")
torchacc.accelerate(DistributedDataParallel(models.made(0)))
"""
    for said in refusals(code):
        assert "a DistributedDataParallel on the CPU" in said and "Pass the model itself" in said


ORDER = """
import re, sys
from torch import nn
import torchacc
from tests import helpers
from tests.distributed import models
from torchacc.dist import agree, distributed_parallel, several

accelerate = sys.modules["torchacc.accelerate"]
CALLS = {
    "Options": [(torchacc.Config, "validate")],
    "Processes": [(several, "prepare")],
    "Checks": [(several, "check"), (accelerate, "check_classes")],
    "Loader": [(accelerate, "_wrap")],
    "Context": [(accelerate, "get_global_context")],
    "Hooks": [(accelerate, "install_hooks")],
    "Patches": [(accelerate, "patch")],
    "Checkpoints": [(accelerate, "checkpoint_classes")],
    "Move": [(nn.Module, "to")],
    "Values": [(agree, "broadcast_from_first")],
    "Device": [(accelerate, "follow_device"), (several, "follow_device")],
    "Wrapper": [(distributed_parallel.DistributedParallel, "__init__")],
}
seen = []
def spy(title, owner, name):
    original = getattr(owner, name)
    def called(*args, **kwargs):
        if title not in seen:
            seen.append(title)
        return original(*args, **kwargs)
    setattr(owner, name, called)
for title, calls in CALLS.items():
    for call in calls:
        spy(title, *call)

def done(**options):
    seen.clear()
    config = torchacc.Config()
    config.memory.gc, config.memory.gc_cls = True, {"Block"}
    for name, size in options.items():
        getattr(config.dist, name).size = size
    torchacc.accelerate(models.made(0), [torch.ones(1)], config)
    return list(seen)

page = (helpers.ROOT / "docs/migration.md").read_text()
section = page.partition("## What `accelerate` does, in this order")[2].partition("\\n## ")[0]
report(documented=re.findall(r"^\\d+\\. \\*\\*(\\w+)\\*\\*:", section, re.M), titles=list(CALLS))
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_accelerate_does_in_order_what_the_document_says(device, ranks):
    code = ORDER + "report(done=done())\nreport(sharded=done(fsdp=2) if WORLD == 2 else None)"
    for each in run_ranks(code, ranks):
        found = each.reports
        everything = found["documented"]
        assert everything == found["titles"] and len(everything) == 12
        alone = [title for title in everything if title not in ("Values", "Wrapper")]
        assert found["done"] == (alone if ranks == 1 else everything)
        if ranks == 2:
            assert found["sharded"] == [title for title in everything if title != "Move"]
