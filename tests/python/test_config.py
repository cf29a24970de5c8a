"""`torchacc.Config`: names, types, values, what is not available, and that nothing is shared."""

from __future__ import annotations

import copy
import dataclasses
import json
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
    "dataloader.read_ahead": False,
    "dataloader.shard": True,
    "dist.dp.size": 1,
    "dist.dp.find_unused_parameters": True,
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
    "dist.comm.fusion_threshold": 1 << 20,
    "dist.comm.compression": "fp16",
    "dist.comm.hierarchical": True,
    "dist.comm.intra_size": 4,
    "dist.comm.hierarchical_threshold": 1 << 20,
    "dist.comm.topk": True,
    "dist.comm.topk_ratio": 0.1,
    "dist.comm.topk_threshold": 1 << 10,
    "dist.comm.topk_fp16": True,
    "dist.comm.streams": 2,
    "dist.topology": ["fsdp", "dp", "pp", "tp"],
}
WRONG = object()
# What a launcher may say about the exchange of gradients, and the option that it is for.
SWITCHES = {
    "LIGHT_2D_ALLREDUCE": ("hierarchical", "1", True),
    "LIGHT_INTRA_SIZE": ("intra_size", "4", 4),
    "LIGHT_HIERARCHICAL_THRESHOLD": ("hierarchical_threshold", "4096", 4096),
    "LIGHT_TOPK_ALLREDUCE": ("topk", "1", True),
    "LIGHT_TOPK_RATIO": ("topk_ratio", "0.5", 0.5),
    "LIGHT_TOPK_THRESHOLD": ("topk_threshold", "2048", 2048),
    "LIGHT_TOPK_FP16": ("topk_fp16", "1", True),
    "TIACC_TRAINING_FUSION_THRESHOLD": ("fusion_threshold", "25217728", 25217728),
    "TIACC_TRAINING_NUM_NCCL_STREAMS": ("streams", "3", 3),
}


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in ("WORLD_SIZE", *SWITCHES):
        monkeypatch.delenv(name, raising=False)
    # Tests of other files leave a group of this process alone.
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)


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
    with pytest.raises(AttributeError, match=rf"Did you mean {meant}\? Its value is 17\."):
        setattr(node, name, 17)
    with pytest.raises(AttributeError, match=rf"Did you mean {meant}\?"):
        getattr(node, name)


def test_an_unknown_name_like_no_other_lists_what_there_is():
    with pytest.raises(AttributeError, match="It has: gc, gc_cls, gc_cnt"):
        torchacc.Config().memory.zzz = 1


LONG = list(range(1000))


@pytest.mark.parametrize(
    ("refused", "kind"),
    [
        (lambda: setattr(torchacc.Config().memory, "gc_class", LONG), AttributeError),
        (lambda: torchacc.Config.from_dict({"memory": {"gc_class": LONG}}), ValueError),
        (lambda: torchacc.Config.from_dict({"memory": LONG}), TypeError),
        (lambda: setattr(torchacc.Config(), "memory", LONG), TypeError),
        (torchacc.Config.from_dict({"dataloader": {"buckets": LONG}}).validate, ValueError),
    ],
)
def test_a_long_value_is_shortened(refused, kind):
    with pytest.raises(kind, match=r"\[0, 1, .*, 20, 21\.\.\.") as told:
        refused()
    assert len(str(told.value)) < 200


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
        ("dist.topology", ["dp", "fsdp", "pp", "tp", "ep"]),
        ("dist.topology", ["dp", "fsdp", "sp", "tp"]),
        ("dist.pp.split_points", ["layer2"]),
        ("dist.comm.fusion_threshold", 0),
        ("dist.comm.intra_size", 0),
        ("dist.comm.hierarchical_threshold", -1),
        ("dist.comm.topk_ratio", 0.0),
        ("dist.comm.topk_ratio", 1.5),
        ("dist.comm.compression", "int8"),
        ("dist.comm.streams", 0),
        # More processes than there are.
        ("dist.dp.size", 2),
        ("dist.tp.size", 2),
        ("dist.fsdp.size", 4),
        ("dist.sp.size", 2),
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
        ("dist.fsdp.use_spmd", True),
        ("dist.fsdp.shard_output_callable", print),
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


@pytest.mark.parametrize(
    ("sizes", "dp"),
    [({}, 8), ({"fsdp": 4}, 2), ({"tp": 2, "fsdp": 2}, 2), ({"sp": 8}, 1), ({"dp": 2, "tp": 4}, 2)],
)
def test_data_parallel_takes_the_processes_that_are_left(monkeypatch, sizes, dp):
    monkeypatch.setenv("WORLD_SIZE", "8")
    config = torchacc.Config()
    for name, size in sizes.items():
        getattr(config.dist, name).size = size
    config.validate()
    assert config.dist.dp.size == dp
    config.validate()  # what was filled in is right


@pytest.mark.parametrize(
    ("world", "sizes", "text"),
    [
        ("2", {"fsdp": 4}, "dist.fsdp.size = 4 need a multiple of 4 processes, and there are 2"),
        ("", {"fsdp": 4}, "dist.fsdp.size = 4 need a multiple of 4 processes, and there is 1"),
        ("6", {"fsdp": 2, "tp": 2}, "dist.fsdp.size = 2 and dist.tp.size = 2 need a multiple of 4"),
        ("4", {"dp": 8}, "dist.dp.size = 8 need 8 processes, and there are 4"),
        ("4", {"dp": 1}, "dist.dp.size = 1 need 1 processes, and there are 4"),
    ],
)
def test_another_number_of_processes_is_refused_with_both(monkeypatch, world, sizes, text):
    monkeypatch.setenv("WORLD_SIZE", world)
    config = torchacc.Config()
    for name, size in sizes.items():
        getattr(config.dist, name).size = size
    with pytest.raises(ValueError, match=re.escape(text) + ".*torchrun --nproc_per_node="):
        config.validate()


@pytest.mark.parametrize("world", ["0", "-1", "two"])
def test_a_launcher_that_says_nonsense_is_refused(monkeypatch, world):
    monkeypatch.setenv("WORLD_SIZE", world)
    with pytest.raises(ValueError, match=f"WORLD_SIZE={world} in the environment"):
        torchacc.Config().validate()


def test_a_pipeline_has_one_split_point_less_than_stages(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = torchacc.Config()
    config.dist.pp.size = 2
    with pytest.raises(ValueError, match=r"dist\.pp\.split_points.*1 stages.*size is 2"):
        config.validate()
    config.dist.pp.split_points = ["layer2"]
    config.validate()
    config.dist.pp.size, config.dist.pp.split_points = 3, ["layer2", "layer2"]
    with pytest.raises(ValueError, match="should name each module once"):
        config.validate()


@pytest.mark.parametrize("name", ["pp", "tp", "sp"])
def test_processes_that_need_the_same_lengths_do_not_learn_them(monkeypatch, name):
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = torchacc.Config()
    config.dataloader.buckets = "auto"
    config.validate()
    config = torchacc.Config()
    config.dist.pp.split_points = ["layer2"] if name == "pp" else []
    getattr(config.dist, name).size = 2
    config.dataloader.buckets = [8]
    config.validate()
    config.dataloader.buckets = "auto"
    text = rf"dataloader\.buckets = 'auto': the processes of dist\.{name}\.size = 2 need the same"
    with pytest.raises(ValueError, match=text):
        config.validate()


def test_buckets_are_measured_where_the_environment_asks_for_it(monkeypatch):
    monkeypatch.setenv("TIACC_TRAINING_FUSION_THRESHOLD", "auto")
    config = torchacc.Config()
    assert config.dist.comm.fusion_threshold == "auto"
    config.validate()
    with pytest.raises(TypeError, match="'auto' or None"):
        config.dist.comm.fusion_threshold = "large"


@pytest.mark.parametrize("variable", SWITCHES)
def test_the_launcher_switches_how_gradients_are_exchanged(monkeypatch, variable):
    name, text, value = SWITCHES[variable]
    monkeypatch.setenv(variable, text)
    config = torchacc.Config()
    assert getattr(config.dist.comm, name) == value
    monkeypatch.setenv(variable, "much")
    with pytest.raises(ValueError, match=f"{variable}=much in the environment"):
        torchacc.Config()


def test_gradients_are_exchanged_in_one_way(monkeypatch):
    config = torchacc.Config()
    config.dist.comm.topk = config.dist.comm.hierarchical = True
    with pytest.raises(ValueError, match=r"dist\.comm\.hierarchical.*dist\.comm\.topk is set too"):
        config.validate()
    monkeypatch.setenv("WORLD_SIZE", "4")
    config = torchacc.Config()
    config.dist.fsdp.size, config.dist.comm.topk = 4, True
    with pytest.raises(ValueError, match=r"dist\.fsdp\.size = 4 scatters them"):
        config.validate()


def test_two_configs_share_nothing():
    first, second = torchacc.Config(), torchacc.Config()
    first.dist.fsdp.wrap_layer_cls.add("Block")
    first.dist.topology.reverse()
    first.compute.fp16 = True
    assert second == torchacc.Config()
    assert second.dist is not first.dist


def test_validation_fills_in_one_size_and_changes_nothing_else(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    config, expected = torchacc.Config(), torchacc.Config()
    config.validate()
    expected.dist.dp.size = 1
    assert config == expected


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


# --- plain values and files -----------------------------------------------------------------------


def filled() -> torchacc.Config:
    config = torchacc.Config()
    for path, value in OPTIONS.items():
        if value is not print:
            node, name = owner(config, path)
            setattr(node, name, copy.copy(value))
    return config


@pytest.mark.parametrize("make", [torchacc.Config, filled], ids=["defaults", "others"])
def test_plain_values_and_back(make):
    config = make()
    plain = config.to_dict()
    assert json.loads(json.dumps(plain)) == plain
    assert torchacc.Config.from_dict(plain) == config
    assert torchacc.Config.from_dict({}) == torchacc.Config()
    # nothing is shared
    again = torchacc.Config.from_dict(plain)
    plain["dist"]["topology"].append("sp")
    assert config.dist.topology != plain["dist"]["topology"]
    assert again == config


def test_what_no_file_can_hold_is_named():
    config = torchacc.Config()
    config.dist.fsdp.shard_output_callable = print
    with pytest.raises(ValueError, match=r"dist\.fsdp\.shard_output_callable.*in the program"):
        config.to_dict()


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".json", '{"compute": {"bf16": true}, "dist": {"fsdp": {"wrap_layer_cls": ["Block"]}}}'),
        (".yaml", "compute:\n  bf16: true\ndist:\n  fsdp:\n    wrap_layer_cls: [Block]\n"),
        (".yml", "compute: {bf16: true}\ndist: {fsdp: {wrap_layer_cls: [Block]}}\n"),
    ],
)
def test_a_file(tmp_path, suffix, text):
    if suffix != ".json":
        pytest.importorskip("yaml")
    path = tmp_path / f"config{suffix}"
    path.write_text(text)
    config = torchacc.Config.from_file(path)
    assert config.compute.bf16 and config.dist.fsdp.wrap_layer_cls == {"Block"}
    path.write_text("" if suffix != ".json" else "{}")
    assert torchacc.Config.from_file(str(path)) == torchacc.Config()


def test_a_file_of_yaml_may_repeat_what_it_has_named(tmp_path):
    pytest.importorskip("yaml")
    path = tmp_path / "config.yaml"
    path.write_text("memory: {gc_cls: &cls [Block]}\n")
    path.write_text(path.read_text() + "dist: {fsdp: {wrap_layer_cls: *cls}}\n")
    config = torchacc.Config.from_file(path)
    assert config.memory.gc_cls == config.dist.fsdp.wrap_layer_cls == {"Block"}
    assert config.memory.gc_cls is not config.dist.fsdp.wrap_layer_cls


@pytest.mark.parametrize(
    ("name", "text", "kind", "message"),
    [
        (
            "a.json",
            '{"compute": {"fp61": 1}}',
            ValueError,
            r"compute\.fp61.*compute\.fp16.*is 1.*a\.json",
        ),
        ("a.json", '{"memory": {"gc": "yes"}}', TypeError, r"memory\.gc.*'yes'.*a\.json"),
        ("a.json", '{"dist": {"fsdp": {"wrap_layer_cls": [[1]]}}}', TypeError, r"wrap_layer_cls"),
        ("a.json", '{"dist": 3}', TypeError, r"dist should be a mapping.*3"),
        (
            "a.yaml",
            "dist: {fsdp: {wrap_layer: [Block]}}",
            ValueError,
            r"dist\.fsdp\.wrap_layer\..*wrap_layer_cls.*\['Block'\].*a\.yaml",
        ),
        ("a.yml", "dist: [", ValueError, r"a\.yml is not YAML"),
        ("a.json", "[1]", TypeError, r"the configuration should be a mapping"),
        ("a.json", "{", ValueError, r"a\.json is not JSON: .*line 1"),
        ("a.json", '{"dist": {}, "dist": {}}', ValueError, r"a\.json has dist twice"),
        ("a.yaml", "memory: {gc: on, gc: off}", ValueError, r"a\.yaml has gc twice in one place"),
        pytest.param(
            "a.json", "[" * 100_000, ValueError, r"a\.json is not JSON: .*recursion", id="deep JSON"
        ),
        pytest.param(
            "a.yaml", "[" * 5000, ValueError, r"a\.yaml is not YAML: .*recursion", id="deep YAML"
        ),
        pytest.param(
            "a.json", f"[{'9' * 5000}]", ValueError, r"a\.json is not JSON: .* digits", id="digits"
        ),
        ("a.yaml", "backend: 2026-11-45", ValueError, r"a\.yaml is not YAML: day is out of range"),
        ("a.yaml", "memory: {gc: !!bool maybe}", ValueError, r"a\.yaml is not YAML: 'maybe'"),
        ("a.json", b"\xff", ValueError, r"a\.json is not text in UTF-8"),
        ("a.toml", "", ValueError, r"a\.toml should be a \.json"),
        ("missing.json", None, OSError, r"missing\.json"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path, name, text, kind, message):
    if name.endswith(("yaml", "yml")):
        pytest.importorskip("yaml")
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(kind, match=message) as raised:
        torchacc.Config.from_file(path)
    assert raised.type.__module__ == "builtins"
