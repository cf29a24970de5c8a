"""`torchacc.Config`: names, types, values, what is not available, and that nothing is shared."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re

import pytest
import torch

import torchacc
from torchacc import config as tree

# Every option with a value of the right type that is not its default.
OPTIONS = {
    "backend": "eager",
    "compute.fp16": True,
    "compute.bf16": True,
    "compute.acc_scaled_dot_attn": True,
    "compute.disable_kernel_patches": True,
    "memory.gc": True,
    "memory.gc_cls": {"Block"},
    "memory.gc_cnt": 2,
    "dataloader.buckets": [16, 32],
    "dataloader.max_length": 64,
    "dataloader.num_buckets": 4,
    "dataloader.pad_value_dict": {"tokens": 1},
    "dist.dp.size": 1,
    "dist.tp.size": 2,
    "dist.pp.size": 2,
    "dist.pp.num_micro_batches": 2,
    "dist.pp.input_names": ["x"],
    "dist.pp.split_points": ["layer2"],
    "dist.pp.broadcast_loss": False,
    "dist.fsdp.size": 4,
    "dist.fsdp.wrap_layer_cls": {"Bottleneck"},
    "dist.fsdp.flatten_parameters": False,
    "dist.fsdp.sync_module_states": True,
    "dist.fsdp.use_spmd": True,
    "dist.fsdp.shard_output_callable": print,
    "dist.sp.size": 2,
    "dist.topology": ["fsdp", "dp", "pp", "tp"],
}
WRONG = object()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def owner(config, path):
    """The node that holds the option `path`, and the option's name."""
    *nodes, name = path.split(".")
    for node in nodes:
        config = getattr(config, node)
    return config, name


def options(node, path=()):
    for entry in dataclasses.fields(node):
        value = getattr(node, entry.name)
        if dataclasses.is_dataclass(value):
            yield from options(value, (*path, entry.name))
        else:
            yield ".".join((*path, entry.name))


def test_the_table_above_names_every_option():
    assert set(options(torchacc.Config())) == set(OPTIONS)


def test_the_defaults_are_valid():
    torchacc.Config().validate()


@pytest.mark.parametrize("path", OPTIONS)
def test_an_option_keeps_what_it_is_given(path):
    node, name = owner(torchacc.Config(), path)
    setattr(node, name, OPTIONS[path])
    assert getattr(node, name) == OPTIONS[path]


@pytest.mark.parametrize("path", OPTIONS)
def test_a_wrong_type_is_refused_where_it_is_written(path):
    config = torchacc.Config()
    node, name = owner(config, path)
    before = getattr(node, name)
    with pytest.raises(TypeError, match=rf"{path} should be .*\(object\)"):
        setattr(node, name, WRONG)
    assert getattr(node, name) == before


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("compute.fp16", 1),
        ("dist.dp.size", True),
        ("dist.dp.size", 1.0),
        ("memory.gc_cls", "Bottleneck"),
        ("memory.gc_cls", ["Bottleneck"]),
        ("dist.fsdp.wrap_layer_cls", {1}),
        ("dataloader.buckets", (16, 32)),
        ("dataloader.buckets", [16, "32"]),
        ("dataloader.pad_value_dict", {"x": "0"}),
        ("dist.pp.split_points", ["a", torch.nn.Identity()]),
    ],
)
def test_a_type_that_is_nearly_right_is_refused(path, value):
    node, name = owner(torchacc.Config(), path)
    with pytest.raises(TypeError, match=path):
        setattr(node, name, value)


def test_a_value_that_went_wrong_after_its_assignment_is_found():
    config = torchacc.Config()
    config.dist.fsdp.wrap_layer_cls.add(3)
    with pytest.raises(TypeError, match=r"dist\.fsdp\.wrap_layer_cls"):
        config.validate()


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("bakend", "backend"),
        ("memory.gc_class", "memory.gc_cls"),
        ("dist.fsdp.wrap_cls", "dist.fsdp.wrap_layer_cls"),
        ("dataloader.bucket", "dataloader.buckets"),
    ],
)
def test_an_unknown_name_is_refused_with_the_likely_one(path, meant):
    node, name = owner(torchacc.Config(), path)
    with pytest.raises(AttributeError, match=rf"Did you mean {meant}\?"):
        setattr(node, name, 1)
    with pytest.raises(AttributeError, match=rf"Did you mean {meant}\?"):
        getattr(node, name)


def test_an_unknown_name_like_no_other_lists_what_there_is():
    with pytest.raises(AttributeError, match="It has: gc, gc_cls, gc_cnt"):
        torchacc.Config().memory.zzz = 1


def test_a_node_of_the_wrong_kind_is_refused():
    with pytest.raises(TypeError, match="compute should be a ComputeConfig"):
        torchacc.Config().compute = {"fp16": True}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("memory.gc_cnt", -1),
        ("dataloader.max_length", 0),
        ("dataloader.buckets", []),
        ("dataloader.buckets", [0, 8]),
        ("dist.dp.size", 0),
        ("dist.tp.size", 0),
        ("dist.pp.size", 0),
        ("dist.pp.num_micro_batches", 0),
        ("dist.fsdp.size", 0),
        ("dist.sp.size", 0),
        ("dist.topology", ["dp", "dp", "pp", "tp"]),
        ("dist.topology", ["dp", "fsdp", "pp", "tp", "sp"]),
        ("dist.pp.split_points", ["layer2"]),
        ("backend", "cuda"),
        ("memory.gc", True),  # without gc_cls
        ("dataloader.num_buckets", 4),  # without max_length
    ],
)
def test_a_value_out_of_range_is_refused_by_name(path, value):
    config = torchacc.Config()
    node, name = owner(config, path)
    setattr(node, name, value)
    with pytest.raises(ValueError, match=path.replace(".", r"\.")):
        config.validate()


def test_both_half_types_at_once_are_a_contradiction():
    config = torchacc.Config()
    config.compute.fp16 = config.compute.bf16 = True
    with pytest.raises(ValueError, match="cannot both be True"):
        config.validate()


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("backend", "eager"),
        ("compute.fp16", True),
        ("compute.bf16", True),
        ("compute.acc_scaled_dot_attn", True),
        ("dist.dp.size", 2),
        ("dist.tp.size", 2),
        ("dist.pp.size", 2),
        ("dist.fsdp.size", 4),
        ("dist.sp.size", 2),
    ],
)
def test_what_is_not_available_is_refused_by_name(path, value):
    config = torchacc.Config()
    node, name = owner(config, path)
    setattr(node, name, value)
    text = re.escape(f"{path} = {value!r} is not available in this version. ") + r"\w+"
    with pytest.raises(NotImplementedError, match=text):
        config.validate()


@pytest.mark.parametrize("world", ["", "1"])
def test_a_launcher_of_one_process_is_fine(monkeypatch, world):
    monkeypatch.setenv("WORLD_SIZE", world)
    torchacc.Config().validate()


def test_a_launcher_of_several_processes_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(NotImplementedError, match=r"dist\.dp\.size: WORLD_SIZE=4"):
        torchacc.Config().validate()


def test_two_configs_share_nothing():
    first, second = torchacc.Config(), torchacc.Config()
    first.dist.fsdp.wrap_layer_cls.add("Block")
    first.dist.topology.reverse()
    first.compute.fp16 = True
    assert second == torchacc.Config()
    assert second.dist is not first.dist


def test_validation_changes_nothing(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    config = torchacc.Config()
    config.validate()
    assert config == torchacc.Config()
    assert config.dist.dp.size is None


def test_a_config_can_be_copied_and_pickled():
    config = torchacc.Config()
    config.memory.gc_cls = {"Block"}
    assert copy.deepcopy(config) == config
    assert pickle.loads(pickle.dumps(config)) == config
    changed = copy.deepcopy(config)
    changed.memory.gc_cls.add("Other")
    assert config.memory.gc_cls == {"Block"}


def test_a_config_can_be_written_in_one_expression():
    config = torchacc.Config(memory=tree.MemoryConfig(gc=True, gc_cls={"Block"}))
    config.validate()
    assert config.memory.gc_cls == {"Block"}


def test_questions_about_the_whole():
    config = torchacc.Config()
    assert config.is_lazy_backend() and not config.is_eager_backend()
    assert not config.is_distributed_parallel() and not config.is_tracing_enabled()
    config.dist.pp.size = 2
    assert config.is_distributed_parallel() and config.is_tracing_enabled()
    with pytest.raises(NotImplementedError, match="get_mesh"):
        config.get_mesh()
