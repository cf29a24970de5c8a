"""`torchacc.accelerate`: what it returns, what it changes, and what it refuses."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import torchacc
from tests import helpers
from torchacc.utils.checkpoint import gradient_checkpoint
from torchacc_device import _patches


@pytest.fixture
def forget_said():
    from torchacc import logger

    logger.forget_said_for_testing()


class Block(nn.Module):
    """Counts its forward calls, which gradient checkpointing doubles."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x, scale=1.0):
        self.calls += 1
        return torch.tanh(self.linear(x)) * scale


class Net(nn.Module):
    def __init__(self, blocks=3):
        super().__init__()
        self.blocks = nn.Sequential(*(Block() for _ in range(blocks)))
        self.head = nn.Linear(4, 2)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return self.head(self.blocks(x))


def make_loader(count=10, batch_size=4, **options):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator)
    y = torch.randint(0, 2, (count,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size, **options)


def train(model, loader, device, epochs=3):
    """The losses of an ordinary training loop."""
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x.to(device)), y.to(device))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses


# --- what comes back ----------------------------------------------------------------------------


def test_a_model_alone_comes_back_alone(device):
    model = Net()
    assert torchacc.accelerate(model) is model


def test_model_and_loader_come_back_in_this_order(device):
    model, plain = Net(), make_loader()
    result = torchacc.accelerate(model, plain)
    assert type(result) is tuple and len(result) == 2
    assert result[0] is model
    assert type(result[1]) is torchacc.AsyncLoader and result[1]._loader is plain


def test_an_empty_loader_is_a_loader(device):
    _, loader = torchacc.accelerate(Net(), [])
    assert type(loader) is torchacc.AsyncLoader and loader._loader == []


def test_the_config_may_be_the_third_argument_and_is_hardly_changed(device):
    config, expected = torchacc.Config(), torchacc.Config()
    model, loader = torchacc.accelerate(Net(), make_loader(), config)
    expected.dist.dp.size = 1
    assert config == expected
    assert torchacc.accelerate(model, config=config) is model


def test_the_loader_has_a_second_name(device):
    _, loader = torchacc.accelerate(Net(), dataloader=make_loader())
    assert type(loader) is torchacc.AsyncLoader
    with pytest.raises(TypeError, match="pass one of them"):
        torchacc.accelerate(Net(), make_loader(), dataloader=make_loader())


# --- what it does -------------------------------------------------------------------------------


def test_parameters_and_buffers_move_and_stay_the_same_objects(device):
    model = Net()
    model.tied = model.head
    parameters = dict(model.named_parameters())
    torchacc.accelerate(model)
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name]
        assert isinstance(parameter, nn.Parameter) and parameter.device.type == device
    assert model.seen.device.type == device
    assert model.tied.weight is model.head.weight


def test_an_optimizer_made_before_goes_on_working(device):
    torch.manual_seed(0)
    model, reference = Net(), Net()
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torchacc.accelerate(model)
    x = torch.ones(2, 4)
    model(x.to(device)).sum().backward()
    optimizer.step()
    reference(x).sum().backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    helpers.assert_same(model.head.weight.cpu(), reference.head.weight)


def test_training_gives_the_numbers_of_eager(unfused, device):
    torch.manual_seed(0)
    reference = Net()
    model, loader = torchacc.accelerate(copy.deepcopy(reference), make_loader())
    assert train(model, loader, model.device) == train(reference, make_loader(), "cpu")
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        helpers.assert_same(mine, theirs)


def test_the_model_knows_its_device(device):
    model = torchacc.accelerate(Net())
    assert isinstance(model.device, torch.device)
    assert model.device == torchacc.lazy_device() == model.head.weight.device
    assert torch.ones(1).to(model.device).device.type == device


def test_a_device_that_the_class_computes_is_left_alone(device):
    class Computed(Net):
        @property
        def device(self):
            return next(self.parameters()).device

    model = torchacc.accelerate(Computed())
    assert model.device == model.head.weight.device and "device" not in model.__dict__


@pytest.mark.parametrize("kind", [torch.device, str])
def test_a_device_that_the_model_noted_is_brought_up_to_date(device, kind):
    model = Net()
    model.device = kind("cpu")
    torchacc.accelerate(model)
    assert type(model.device) is type(kind("cpu"))
    assert torch.device(model.device) == torchacc.lazy_device()


def test_the_device_follows_the_parameters(device):
    model = torchacc.accelerate(Net())
    assert model.cpu().device == torch.device("cpu")
    assert model.to(device).device.type == device
    outer = nn.Sequential(model)
    outer.cpu()
    assert model.device == torch.device("cpu")
    assert copy.deepcopy(model).device == torch.device("cpu")
    empty = torchacc.accelerate(nn.Identity())
    assert empty.device == torchacc.lazy_device()


@pytest.mark.parametrize("noted", [None, "cpu", torch.device("cpu")])
def test_a_saved_model_names_no_lazy_device(device, noted):
    model = Net()
    if noted is not None:
        model.device = noted
    torchacc.accelerate(model)
    model(torch.ones(2, 4).to(model.device))
    lazy = torchacc.lazy_device()
    name = len(lazy.type).to_bytes(4, "little") + lazy.type.encode()  # as pickle writes it
    file, sanity = io.BytesIO(), io.BytesIO()
    torch.save(model.cpu(), file)
    torch.save(lazy, sanity)
    assert name in sanity.getvalue() and name not in file.getvalue()
    loaded = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
    assert torch.device(loaded.device) == torch.device("cpu")
    assert type(loaded.device) is (str if isinstance(noted, str) else torch.device)
    assert type(loaded) is Net and loaded.__dict__.get("device") == noted


def test_other_models_of_the_class_have_no_device(device):
    torchacc.accelerate(Net())
    other = Net()
    assert not hasattr(other, "device")
    with pytest.raises(AttributeError, match="'Net' object has no attribute 'device'"):
        other.device
    other.device = "here"
    assert other.device == "here" and other.__dict__["device"] == "here"
    del other.device
    assert not hasattr(other, "device")


def test_a_device_that_is_noted_later_is_kept(device):
    model = torchacc.accelerate(Net())
    model.device = torch.device("meta")
    assert model.device == torch.device("meta")
    model.to(device)
    assert model.device == torch.device("meta")
    torchacc.accelerate(model)
    assert model.device == torchacc.lazy_device()


def test_a_second_call_changes_nothing(device):
    config = torchacc.Config()
    config.memory.gc = True
    config.memory.gc_cls = {"Block"}
    model, loader = torchacc.accelerate(Net(), make_loader(), config)
    parameters = list(model.parameters())
    again, same = torchacc.accelerate(model, loader, config)
    assert again is model and same is loader
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    model(torch.ones(1, 4, device=device)).sum().backward()
    assert [block.calls for block in model.blocks] == [2, 2, 2]


def test_a_second_loader_for_validation(unfused, device):
    model, training = torchacc.accelerate(Net(), make_loader())
    model, validation = torchacc.accelerate(model, make_loader(6))
    direct = torchacc.AsyncLoader(make_loader(6), model.device)
    assert len(training) == 3 and len(validation) == len(direct) == 2
    for epoch in range(2):
        train(model, training, model.device, epochs=1)
        model.eval()
        with torch.no_grad():
            sums = [
                sum(model(x).sum().item() for x, _ in loader) for loader in (validation, direct)
            ]
        model.train()
        assert sums[0] == sums[1], f"epoch {epoch}"


@pytest.mark.parametrize(
    ("name", "value", "expected"), [("num_buckets", 2, [4, 8]), ("buckets", "auto", [1, 8])]
)
def test_buckets_of_the_config_reach_the_loader(device, name, value, expected):
    config = torchacc.Config()
    config.dataloader.max_length = 8
    setattr(config.dataloader, name, value)
    config.dataloader.pad_value_dict = {"x": 5}
    batches = [{"x": torch.zeros(1, n)} for n in (1, 5)]
    _, loader = torchacc.accelerate(Net(), batches, config)
    assert [batch["x"].shape[-1] for batch in loader] == expected


def test_a_checkpoint_of_an_accelerated_model_is_an_ordinary_one(device):
    torch.manual_seed(0)
    reference = Net()
    model = torchacc.accelerate(copy.deepcopy(reference))
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    assert list(loaded) == list(reference.state_dict())
    for name, value in reference.state_dict().items():
        helpers.assert_same(loaded[name], value, what=name)


def test_gradients_can_be_fetched(device):
    model = torchacc.accelerate(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert torchacc.fetch_gradients(optimizer) == []
    model.head.weight.sum().backward()
    (gradient,) = torchacc.fetch_gradients(optimizer)
    assert gradient.shape == model.head.weight.shape and not gradient.requires_grad
    assert gradient.data_ptr() == model.head.weight.grad.data_ptr()


def test_the_context_has_the_options_of_the_last_call(device):
    context = torchacc.get_global_context()
    assert isinstance(context, torchacc.GlobalContext)
    config, refused = torchacc.Config(), torchacc.Config()
    refused.compute.fp16 = refused.compute.bf16 = True
    torchacc.accelerate(Net(), config=config)
    with pytest.raises(ValueError, match=r"compute\.fp16 and compute\.bf16"):
        torchacc.accelerate(Net(), config=refused)
    assert torchacc.get_global_context() is context and context.config is config
    assert context.mesh.get_world_size() == 1


def test_what_is_lazy_is_there(acc_only, monkeypatch):
    assert torchacc.import_utils.is_torch_xla_available()
    monkeypatch.setattr(torch.acc, "device_count", lambda: 0)
    assert not torchacc.import_utils.is_torch_xla_available()
    with pytest.raises(NotImplementedError, match=r"no acc device .* `python -m torchacc env`"):
        torchacc.lazy_device()


def test_core_has_the_same_names(device):
    assert all(getattr(torchacc, n) is getattr(torchacc.core, n) for n in torchacc.core.__all__)


def test_questions_about_devices_and_tensors(device):
    lazy = torchacc.lazy_device()
    assert lazy.type == device and lazy.index is not None
    assert torchacc.is_lazy_device(lazy) and torchacc.is_lazy_device(device)
    assert torchacc.is_lazy_tensor(torch.ones(1, device=lazy))
    assert not torchacc.is_lazy_tensor("text")
    assert not torchacc.is_lazy_device("meta")
    if device != "cpu":
        assert not torchacc.is_lazy_device("cpu")
        assert not torchacc.is_lazy_tensor(torch.ones(1))


# --- gradient checkpointing ---------------------------------------------------------------------


def checkpointed(gc_cls, gc_cnt=None, blocks=3):
    config = torchacc.Config()
    config.memory.gc = True
    config.memory.gc_cls = gc_cls
    config.memory.gc_cnt = gc_cnt
    torch.manual_seed(0)
    return torchacc.accelerate(Net(blocks), config=config)


@pytest.mark.parametrize(
    ("count", "calls"), [(None, [2, 2, 2]), (0, [1, 1, 1]), (2, [2, 2, 1]), (9, [2, 2, 2])]
)
def test_the_named_modules_compute_again_in_backward(device, count, calls):
    model = checkpointed({"Block"}, count)
    model(torch.ones(2, 4, device=device)).sum().backward()
    assert [block.calls for block in model.blocks] == calls


def test_checkpointing_changes_no_number_and_no_name(device):
    torch.manual_seed(0)
    reference = Net()
    model = checkpointed({"Block"})
    assert list(model.state_dict()) == list(reference.state_dict())
    x = torch.randn(2, 4)
    model(x.to(device)).sum().backward()
    reference(x).sum().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        helpers.assert_same(mine.grad, theirs.grad)


def test_without_gradients_nothing_is_computed_twice(device):
    model = checkpointed({"Block"})
    with torch.no_grad():
        model(torch.ones(2, 4, device=device))
    assert [block.calls for block in model.blocks] == [1, 1, 1]


def test_checkpointing_passes_keywords_and_can_be_copied_and_pickled(device):
    block = Block()
    assert gradient_checkpoint(block, {"Block"}) is block
    x = torch.ones(1, 4, requires_grad=True)
    for other in (copy.deepcopy(block), pickle.loads(pickle.dumps(block))):
        assert torch.equal(other(x, scale=2.0), block(x, scale=2.0))
        with torch.no_grad():
            other.linear.weight.zero_()
            other.linear.bias.zero_()
        other.calls = 0
        # The copy runs its own weights, not those that it was copied from.
        assert other(x).abs().sum() == 0 and other.calls == 1
    assert block(x).abs().sum() > 0


def test_a_class_that_the_model_does_not_have_is_refused(device):
    """By the field, its value, and what there is."""
    there = "It has: Block, Linear, Net, Sequential"
    with pytest.raises(ValueError) as raised:
        checkpointed({"Blok"})
    assert str(raised.value) == (
        "[config] memory.gc_cls = {'Blok'}: the model has no module of class 'Blok'. "
        f"Did you mean 'Block'? {there}"
    )
    with pytest.raises(ValueError) as raised:
        gradient_checkpoint(Net(), {"Transformer"})
    assert str(raised.value) == (
        "[gradient_checkpoint] gc_cls = {'Transformer'}: the model has no module of class "
        f"'Transformer'. {there}"
    )


def test_units_that_the_model_does_not_have_are_warned_of_in_one_process_too(acc_only, caplog):
    config = torchacc.Config()
    config.dist.fsdp.wrap_layer_cls = {"Blok"}
    torchacc.accelerate(Net(), config=config)
    assert "wrap_layer_cls = ['Blok']: the model has no module of class 'Blok'" in caplog.text


@pytest.mark.parametrize("gc", [True, False])
def test_a_class_that_the_model_does_not_have_is_refused_before_anything_is_changed(acc_only, gc):
    torchacc.unpatch()
    before, context = _patches.applied(), torchacc.get_global_context().config
    config = torchacc.Config()
    config.memory.gc = gc
    config.memory.gc_cls = {"Blok"}
    data = TensorDataset(torch.ones(4, 4))
    sampler = DistributedSampler(data, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="no module of class 'Blok'"):
        torchacc.accelerate(Net(), DataLoader(data, sampler=sampler), config)
    assert _patches.applied() == before and "set_epoch" not in vars(sampler)
    assert torchacc.get_global_context().config is context


# --- what it refuses ----------------------------------------------------------------------------


def test_a_model_that_is_none(device):
    with pytest.raises(TypeError, match="the model is a Tensor, not a torch.nn.Module"):
        torchacc.accelerate(torch.ones(1))
    with pytest.raises(TypeError, match="The model comes first, then the loader"):
        torchacc.accelerate(make_loader(), Net())


def test_a_loader_that_cannot_be_iterated(device):
    model = Net()
    with pytest.raises(TypeError, match=r"\[accelerate\] the loader is a int"):
        torchacc.accelerate(model, 3)
    with pytest.raises(TypeError, match="wrap it in a torch.utils.data.DataLoader"):
        torchacc.accelerate(model, make_loader().dataset)
    assert "device" not in model.__dict__  # refused before anything was changed


def test_a_config_that_is_none(device):
    with pytest.raises(TypeError, match="config is a dict, not a torchacc.Config"):
        torchacc.accelerate(Net(), make_loader(), {"fp16": True})


def test_a_config_that_asks_for_too_much_changes_nothing(device):
    config = torchacc.Config()
    config.dist.fsdp.size = 4
    model = Net()
    with pytest.raises(ValueError, match=r"dist\.fsdp\.size = 4 need a multiple of 4 processes"):
        torchacc.accelerate(model, make_loader(), config)
    assert model.head.weight.device.type == "cpu"


def test_a_parameter_without_values(device):
    model = Net()
    model.head = nn.Linear(4, 2, device="meta")
    with pytest.raises(ValueError, match="parameter head.weight is on the meta device"):
        torchacc.accelerate(model)


def test_a_loader_of_another_device(acc_only):
    loader = torchacc.AsyncLoader(make_loader(), "cpu")
    with pytest.raises(ValueError, match="the loader already delivers to cpu"):
        torchacc.accelerate(Net(), loader)


def test_models_on_a_second_device(acc_only):
    code = """
import torchacc
model = torchacc.accelerate(torch.nn.Linear(2, 2).to("acc:1"))
assert model.device == torch.device("acc:1"), model.device
mixed = torch.nn.Sequential(torch.nn.Linear(2, 2).to("acc:1"), torch.nn.Linear(2, 2).to("acc:0"))
try:
    torchacc.accelerate(mixed)
except ValueError as error:
    print(error)
with torch.acc.device(1):
    model, loader = torchacc.accelerate(torch.nn.Linear(2, 2), [torch.ones(1, 2)])
assert model.device == torch.device("acc:1") == model.weight.device
for x in loader:
    assert x.device == torch.device("acc:1")
    print(model(x).shape)
"""
    printed = helpers.run_python(code, ACC_HOST_DEVICES="2", ACC_EXECUTOR="host").stdout
    assert "parameter 1.weight is on acc:0, and other parameters are on acc:1" in printed
    assert "torch.Size([1, 2])" in printed


def test_buckets_for_a_loader_that_reads_ahead_already_are_pointed_out(device, caplog, forget_said):
    config = torchacc.Config()
    config.dataloader.max_length = 8
    batches = [{"input_ids": torch.ones(1, 3), "attention_mask": torch.ones(1, 3)}]
    _, loader = torchacc.accelerate(nn.Linear(2, 2), batches, config)
    assert torchacc.accelerate(nn.Linear(2, 2), loader, config)[1] is loader
    assert "was made without" not in caplog.text
    torchacc.accelerate(nn.Linear(2, 2), torchacc.AsyncLoader(batches), config)
    assert caplog.text.count("its batches are not padded") == 1
