"""Every recordable operator with a CPU kernel, run with its arguments watched.

What an operator writes decides what is recorded, in which order it runs and what may be left out.
Schemas do not tell all of it (the statistics of batch norm); the op table adds the rest. Here
PyTorch's own samples run on the CPU, forward and backward, and no operator may change an argument
that neither its schema nor the op table calls written.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.helpers import extension

SAMPLES = 2  # of each operator: they differ in shape more than in what is written
# How many recorded operators the samples reach; the others are backends' and out= twins.
REACHED = 500


def written_arguments() -> dict[str, set[str]]:
    """By recorded operator, the arguments that the recorder takes to be written."""
    table: dict[str, set[str]] = {}
    for line in extension().ops():
        name, arguments = re.match(r"([\w:.]+)\((.*?)\)", line).groups()
        table[name] = {a.strip().rstrip("!~") for a in arguments.split(",") if "!" in a}
    return table


def bits(tensor: torch.Tensor) -> bytes:
    """The whole storage behind a tensor."""
    storage = tensor.untyped_storage()
    # bytes(storage) makes a Python number of each byte, which takes longer than all else here.
    return ctypes.string_at(storage.data_ptr(), storage.nbytes())


class Watch(TorchDispatchMode):
    """Notes operators that change an argument which `written` does not name."""

    def __init__(self, written: dict[str, set[str]]) -> None:
        super().__init__()
        self.written = written
        self.reached: set[str] = set()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        if name not in self.written:
            return func(*args, **kwargs)
        given = dict(zip([a.name for a in schema.arguments], args, strict=False)) | kwargs
        mutable = [
            tensor.untyped_storage().data_ptr()
            for argument in self.written[name]
            for tensor in tensors(given.get(argument))
        ]
        before = [
            (argument, tensor, bits(tensor))
            for argument, value in given.items()
            for tensor in tensors(value)
            if tensor.untyped_storage().data_ptr() not in mutable
        ]
        result = func(*args, **kwargs)
        self.reached.add(name)
        for argument, tensor, old in before:
            if bits(tensor) != old:
                self.found.add(f"{name} writes {argument}")
        return result


def tensors(value: Any) -> list[torch.Tensor]:
    """The dense CPU tensors in a nested value."""
    return [
        leaf
        for leaf in tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
        and leaf.layout == torch.strided
        and leaf.device.type == "cpu"
        and not leaf.is_nested
    ]


def of_the_database() -> Iterator[Callable[[], Any]]:
    """Samples of PyTorch's operators: of float32, or of integers where floats are refused."""
    for op in op_db:
        types = [t for t in (torch.float32, torch.int64) if t in op.supported_dtypes("cpu")]
        if not types:
            continue
        torch.manual_seed(0)
        grad = op.supports_autograd and types[0] == torch.float32
        try:
            samples = op.sample_inputs("cpu", types[0], requires_grad=grad)
            chosen = list(itertools.islice(samples, SAMPLES))
        except Exception:  # the database cannot make them on this machine
            continue
        for sample in chosen:
            yield partial(run, op, sample)


def of_lists() -> Iterator[Callable[[], Any]]:
    """The operators on lists, which the database has no samples of, with arguments to try."""
    lists = [[torch.rand(3) + 0.5, torch.rand(2, 2) + 0.5] for _ in range(3)]
    tails: list[list[Any]] = [[], lists[1:2], [2.0], lists[1:], [[2.0, 3.0]], [torch.ones(())]]
    for name in sorted(dir(torch)):
        if name.startswith("_foreach_") and not name.endswith("_"):
            for tail in tails:
                yield partial(getattr(torch, name), lists[0], *tail)


def run(op: Any, sample: Any) -> None:
    """Forward and backward of one sample; what an operator refuses is no matter here."""
    result = op(sample.input, *sample.args, **sample.kwargs)
    ends = [t for t in tensors(result) if t.requires_grad]
    starts = [t for t in tensors((sample.input, sample.args)) if t.requires_grad]
    if ends and starts:
        torch.autograd.grad(ends, starts, [torch.ones_like(end) for end in ends], allow_unused=True)


@pytest.mark.timeout(900)
def test_no_operator_writes_what_nothing_declares(acc_only, one_thread):
    watch = Watch(written_arguments())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for call in itertools.chain(of_the_database(), of_lists()):
            try:
                with watch:
                    call()
            except Exception:  # a refusal is not what is looked for
                continue
    assert not watch.found, sorted(watch.found)
    assert len(watch.reached) >= REACHED, len(watch.reached)


def test_an_undeclared_write_is_found(acc_only):
    """Without the op table's addition the statistics of batch norm would be found."""
    written = written_arguments()
    assert {"running_mean", "running_var"} <= written["aten::native_batch_norm"]
    written["aten::native_batch_norm"] = set()
    watch = Watch(written)
    with watch:
        torch.nn.BatchNorm1d(3)(torch.arange(12.0).reshape(4, 3))
    assert watch.found == {
        "aten::native_batch_norm writes running_mean",
        "aten::native_batch_norm writes running_var",
    }
