"""What the documents say of single calls, for the rows of `api_table.py`.

`api_docs.py` makes the calls.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

# Gets `torchacc`, of which scripts import nothing before they know where it is.
Call = Callable[[Any], object]


class Case(NamedTuple):
    """One call. `outcome` is the documented one: the type of an error, or what is returned.

    `why`: the reason for which it is another here, if it is.
    """

    when: str
    outcome: object
    call: Call
    why: str = ""


# --- the calls ------------------------------------------------------------------------------------

MODEL = torch.nn.Linear(2, 2)


def among(count: int, call: Call) -> Call:
    """In the first of `count` processes, none of which communicates."""

    def called(ta: Any) -> object:
        from torch.testing._internal.distributed import fake_pg

        from torchacc.dist import mesh

        torch.distributed.init_process_group(
            "cpu:fake,acc:fake", store=fake_pg.FakeStore(), rank=0, world_size=count
        )
        try:
            return call(ta)
        finally:
            mesh.forget()
            torch.distributed.destroy_process_group()

    return called


def without_devices(call: Call) -> Call:
    def called(ta: Any) -> object:
        with mock.patch.object(torch.get_device_module("acc"), "device_count", lambda: 0):
            return call(ta)

    return called


def with_variables(variables: Mapping[str, str], call: Call) -> Call:
    """With no other variables in the environment."""

    def called(ta: Any) -> object:
        with mock.patch.dict(os.environ, variables, clear=True):
            return call(ta)

    return called


def without_packages(names: Iterable[str], call: Call) -> Call:
    """Where they cannot be imported."""

    def called(ta: Any) -> object:
        with mock.patch.dict(sys.modules, dict.fromkeys(names)):
            return call(ta)

    return called


def config(ta: Any, options: Mapping[str, object]) -> Any:
    """A new `Config` with these options, by their paths."""
    made = ta.Config()
    for path, value in options.items():
        node = made
        *parts, name = path.split(".")
        for part in parts:
            node = getattr(node, part)
        setattr(node, name, value)
    return made


def valid(ta: Any, options: Mapping[str, object]) -> Any:
    """The same, with what `validate` fills in."""
    made = config(ta, options)
    made.validate()
    return made


def validated(options: Mapping[str, object]) -> Call:
    return lambda ta: valid(ta, options)


def in_units(ta: Any, name: str) -> None:
    """A model of which modules of class `name` are units."""
    options = {"dist.fsdp.size": 2, "dist.fsdp.wrap_layer_cls": {name}}
    ta.dist.DistributedParallel(torch.nn.Linear(2, 2), config(ta, options))


def with_checkpoints(ta: Any, name: str) -> None:
    """A model of which modules of class `name` compute again in backward."""
    options = {"memory.gc": True, "memory.gc_cls": {name}}
    ta.accelerate(MODEL, config=config(ta, options))


def attention(ta: Any) -> None:
    ta.ops.flash_attn_xla(*[torch.ones(1, 2, 3, 4)] * 3)


def ulysses(ta: Any) -> None:
    """With three heads."""
    ta.ops.context_parallel.ulysses(*[torch.ones(1, 2, 3, 4)] * 3)


def grouped(ta: Any, *sizes: int, times: int = 1) -> None:
    for _ in range(times):
        ta.ops.context_parallel.initialize_context_parallel(*sizes)


def log_level(ta: Any) -> str:
    from torchacc.logger import level_from_environment

    return logging.getLevelName(level_from_environment())


def padding(ta: Any) -> dict[str, float]:
    """What is added to each key of a batch."""
    batch = {
        key: torch.ones(1, 3, dtype=torch.int64)
        for key in ("input_ids", "attention_mask", "labels")
    }
    (padded,) = ta.AsyncLoader([batch], "cpu", buckets=[4])
    return {key: tensor[0, 3].item() for key, tensor in padded.items()}


def lengths(ta: Any, max_length: int, **options: int) -> list[int]:
    """What the lengths up to `max_length` are padded to."""
    batches = [{"input_ids": torch.ones(1, length)} for length in range(1, max_length + 1)]
    loader = ta.AsyncLoader(batches, "cpu", max_length=max_length, **options)
    return sorted({batch["input_ids"].shape[1] for batch in loader})


def other_keys(ta: Any) -> list[Any]:
    batch = {"input_ids": torch.ones(1, 3), "more": torch.ones(1)}
    return list(ta.AsyncLoader([batch], "cpu", buckets=[4]))


@contextlib.contextmanager
def _shards() -> Iterator[str]:
    """A folder with the files of a model and its optimizer, of one process."""
    from torchacc.dist import shard_format, state_dict_utils

    unit = shard_format.Unit(2, "float32", (shard_format.Part("weight", (2,), (1,), 0),))
    layout = shard_format.Layout(0, 1, {"unit": unit}, ("unit",), {}).to_dict()
    model = {"unit": torch.ones(2)}
    optimizer = {"state": {}, "param_groups": [{"params": ["unit"]}]}
    with tempfile.TemporaryDirectory() as folder:
        for kind, state in (("model", model), ("optimizer", optimizer)):
            path = os.path.join(folder, f"rank-0-of-1-{kind}.pth")
            state_dict_utils.save_checkpoints([state], [layout], [path], kind)
        yield folder


def written(*options: str) -> Call:
    """The files that the consolidation command writes, all of them beside the shards."""

    def called(ta: Any) -> object:
        with _shards() as folder:
            before = set(os.listdir(folder))
            if status := ta.dist.consolidate.main(["--ckpt_dir", folder, *options]):
                return status
            return sorted(path.name for path in Path(folder).iterdir() if path.name not in before)

    return called


# --- the cases, by the names of the rows ----------------------------------------------------------

_VALUE = "`python -O` drops assertions"
_MODEL_IS_WRONG = "the model is wrong, and no version would take it"
_NOT_NEEDED = "not needed"
_NO_SUCH_CLASS = "a class of which the model has no module"
_PADDING = Case("None pads with", {"input_ids": 0, "attention_mask": 0, "labels": -100}, padding)
_BOTH = validated({"compute.fp16": True, "compute.bf16": True})
_KINDS = ("model", "optimizer")
_WHOLE = [f"{kind}_consolidated.pth" for kind in _KINDS]


def _beside_buckets(path: str) -> tuple[Case]:
    both = {"dataloader.buckets": [4], path: 8}
    return (
        Case(
            "beside `buckets = [4]` pads to",
            [4],
            lambda ta: valid(ta, both).dataloader.buckets,
            "one of the two would be without effect",
        ),
    )


def _less(path: str, low: int = 1) -> tuple[Case]:
    return (Case(f"less than {low}", ValueError, validated({path: low - 1})),)


def _not_sharded(name: str, *more: object) -> tuple[Case]:
    def call(ta: Any) -> object:
        return getattr(ta.dist.FullyShardedDataParallel, name)(MODEL, None, *more)

    return (Case("a model that is not sharded", NotImplementedError, call, _MODEL_IS_WRONG),)


def _liger(name: str) -> tuple[Case, ...]:
    def call(ta: Any, **options: bool) -> object:
        return getattr(ta.ops, name)(**options)

    without = without_packages(["liger_kernel"], call)
    both = ("both kinds of cross entropy", AssertionError, lambda ta: call(ta, cross_entropy=True))
    missing = Case("if liger_kernel is missing", ImportError, without, _NOT_NEEDED)
    return (missing,) if name == "apply_liger_kernel" else (Case(*both), missing)


CASES: dict[str, tuple[Case, ...]] = {
    "AsyncLoader": (
        _PADDING._replace(when="`pad_value_dict=None` pads with"),
        Case("buckets for `max_length=64`", 8, lambda ta: len(lengths(ta, 64))),
        Case(
            "`max_length=20, num_buckets=8` pads to",
            [2, 4, 6, 8, 10, 12, 14, 16],
            lambda ta: lengths(ta, 20, num_buckets=8),
            "rounded up, so that the last is `max_length`",
        ),
        Case(
            "a batch with other keys than `pad_value_dict`",
            AssertionError,
            other_keys,
            "they are left as they are; all batches need the same of those that are padded",
        ),
    ),
    "lazy_device": (
        Case("no such device", NotImplementedError, without_devices(lambda ta: ta.lazy_device())),
    ),
    "mark_dynamic": (
        Case("wrong types", AssertionError, lambda ta: ta.mark_dynamic(torch.ones(2), "0", 4)),
        Case("no such dimension", ValueError, lambda ta: ta.mark_dynamic(torch.ones(2), 1, 4)),
        Case("a bound below the size", ValueError, lambda ta: ta.mark_dynamic(torch.ones(2), 0, 1)),
    ),
    "Config.validate": (
        Case("a value of another type", AssertionError, validated({"memory.gc": 1}), _VALUE),
    ),
    "backend": (Case("another word", AssertionError, validated({"backend": "another"}), _VALUE),),
    "compute.fp16": (Case("with `compute.bf16`", ValueError, _BOTH),),
    "compute.bf16": (Case("with `compute.fp16`", ValueError, _BOTH),),
    "memory.gc_cls": (
        Case(
            _NO_SUCH_CLASS, AssertionError, among(1, lambda ta: with_checkpoints(ta, "A")), _VALUE
        ),
    ),
    "memory.gc_cnt": _less("memory.gc_cnt", 0),
    "dataloader.max_length": _beside_buckets("dataloader.max_length"),
    "dataloader.num_buckets": _beside_buckets("dataloader.num_buckets"),
    "dataloader.pad_value_dict": (_PADDING,),
    "dist.dp.size": (
        Case(
            "None, of 8 processes with `tp.size = 2`",
            4,
            with_variables(
                {"WORLD_SIZE": "8"}, lambda ta: valid(ta, {"dist.tp.size": 2}).dist.dp.size
            ),
        ),
        *_less("dist.dp.size"),
        Case(
            "the other sizes do not divide the number of processes",
            AssertionError,
            with_variables({"WORLD_SIZE": "3"}, validated({"dist.tp.size": 2})),
            _VALUE,
        ),
    ),
    "dist.tp.size": _less("dist.tp.size"),
    "dist.pp.size": _less("dist.pp.size"),
    "dist.pp.num_micro_batches": _less("dist.pp.num_micro_batches"),
    "dist.pp.split_points": (
        Case(
            "not one less than stages",
            AssertionError,
            validated({"dist.pp.split_points": ["a"]}),
            _VALUE,
        ),
        Case(
            "twice the same",
            AssertionError,
            validated({"dist.pp.size": 3, "dist.pp.split_points": ["a", "a"]}),
            _VALUE,
        ),
        Case(
            "names and modules",
            AssertionError,
            validated({"dist.pp.size": 3, "dist.pp.split_points": ["a", MODEL]}),
            _VALUE,
        ),
    ),
    "dist.fsdp.size": _less("dist.fsdp.size"),
    "dist.fsdp.wrap_layer_cls": (
        Case(
            _NO_SUCH_CLASS,
            AssertionError,
            among(2, lambda ta: in_units(ta, "A")),
            "a warning names the classes that there are, and the rest is sharded as one unit",
        ),
    ),
    "dist.topology": (
        Case(
            "twice the same",
            AssertionError,
            validated({"dist.topology": ["dp", "dp", "pp", "tp"]}),
            _VALUE,
        ),
        Case("another word", ValueError, validated({"dist.topology": ["dp", "fsdp", "pp", "a"]})),
    ),
    "dist.BACKEND_NAME": (Case("its value", "lazy", lambda ta: ta.dist.BACKEND_NAME),),
    "dist.EAGER_BACKEND_NAME": (Case("its value", "nccl", lambda ta: ta.dist.EAGER_BACKEND_NAME),),
    "dist.Mesh": (
        Case(
            "the sizes do not make the number of processes",
            AssertionError,
            among(2, lambda ta: ta.dist.Mesh(dp_num=3)),
            _VALUE,
        ),
        Case(
            "twice the same dimension",
            AssertionError,
            among(2, lambda ta: ta.dist.Mesh(dp_num=2, topology=["dp", "dp"])),
            _VALUE,
        ),
        Case(
            "a dimension of another name",
            ValueError,
            among(2, lambda ta: ta.dist.Mesh(dp_num=2, topology=["dp", "a"])),
        ),
    ),
    "dist.ParallelModule.forward_backward": (
        Case(
            "no stages",
            NotImplementedError,
            lambda ta: ta.dist.ParallelModule.forward_backward(MODEL),
        ),
    ),
    "dist.FullyShardedDataParallel.sharded_optim_state_dict": _not_sharded(
        "sharded_optim_state_dict"
    ),
    "dist.FullyShardedDataParallel.full_optim_state_dict": _not_sharded("full_optim_state_dict"),
    "dist.FullyShardedDataParallel.optim_state_dict_to_load": _not_sharded(
        "optim_state_dict_to_load", None
    ),
    "ops": (
        Case(
            "if flash_attn or einops is missing",
            ImportError,
            without_packages(["flash_attn", "einops"], attention),
            _NOT_NEEDED,
        ),
    ),
    **{
        f"ops.{name}": _liger(name)
        for name in (
            "apply_liger_kernel",
            "apply_liger_kernel_to_llama",
            "apply_liger_kernel_to_qwen2",
        )
    },
    "ops.context_parallel.initialize_context_parallel": (
        Case(
            "a size that does not divide the number of processes",
            ValueError,
            among(2, lambda ta: grouped(ta, 3)),
        ),
        Case("an inner size that does not", ValueError, among(2, lambda ta: grouped(ta, 2, 3))),
        Case("a second call", AssertionError, among(2, lambda ta: grouped(ta, 2, times=2))),
    ),
    "ops.context_parallel.ulysses": (
        Case("heads that the processes do not divide", ValueError, among(2, ulysses)),
    ),
    "utils.checkpoint.gradient_checkpoint": (
        Case(
            _NO_SUCH_CLASS,
            AssertionError,
            lambda ta: ta.utils.checkpoint.gradient_checkpoint(MODEL, {"A"}),
            _VALUE,
        ),
    ),
    "utils.logger": (
        Case("its name", "TorchAcc", lambda ta: ta.utils.logger.name),
        Case(
            "a line",
            "[%(asctime)s - %(levelname)s] %(message)s",
            lambda ta: ta.utils.logger.handlers[0].formatter._fmt,
        ),
    ),
    "ACC_LOG_LEVEL": (Case("unset", "INFO", with_variables({}, log_level)),),
    "--ckpt_dir": (Case("not given", SystemExit, lambda ta: ta.dist.consolidate.main([])),),
    "--ckpt_type": (
        Case("`model` writes", _WHOLE[:1], written("--ckpt_type", "model")),
        Case("`optimizer` writes", _WHOLE[1:], written("--ckpt_type", "optimizer")),
    ),
    "--reshard_num": (
        Case(
            "2 writes",
            [f"rank-{rank}-of-2-{kind}.pth" for rank in (0, 1) for kind in _KINDS],
            written("--reshard_num", "2"),
        ),
    ),
    "--save_dir": (Case("if empty, beside the shards are", _WHOLE, written()),),
}
