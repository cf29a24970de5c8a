"""Functions on containers of tensors, and on rows of layers."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import UserDict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from torchacc.partition import best_cuts

_PLAIN = (str, bytes, int, float, complex, type)


def apply_to_tensors(
    fn: Callable[[Tensor], Any], container: Any, whole: Callable[[Any], Any] | None = None
) -> Any:
    """`container` with `fn(tensor)` in the place of every tensor in it.

    Goes into tuples, named tuples, lists, sets, mappings, packed sequences (their data) and
    dataclass objects, which are copied, not changed, and keep their type. What holds no tensor is
    passed through.

    Args:
        fn: what is done to each tensor.
        container: anything.
        whole: called with each object that is no tensor, number, string, plain tuple, list or dict.
            What it returns stands for the object, unless that is NotImplemented.
    """
    if isinstance(container, Tensor):
        return fn(container)
    kind = type(container)
    # Every batch of a loader comes here: first what nearly all are, by few calls.
    if kind is tuple or kind is list:
        items = [
            fn(item) if isinstance(item, Tensor) else apply_to_tensors(fn, item, whole)
            for item in container
        ]
        return items if kind is list else tuple(items)
    if container is None or isinstance(container, _PLAIN):
        return container
    if whole is not None and kind is not dict:
        made = whole(container)
        if made is not NotImplemented:
            return made
    if isinstance(container, PackedSequence):
        return PackedSequence(fn(container.data), *container[1:])
    # Not a function in this one, which would be a cycle that keeps what `fn` holds.
    visit = functools.partial(_visit, fn, whole)
    if isinstance(container, (tuple, set, frozenset)):
        return _filled_like(container, [visit(item) for item in container])
    if isinstance(container, Mapping):
        return mapping_like(container, {key: visit(value) for key, value in container.items()})
    if isinstance(container, (list, deque)):
        rebuilt = copy.copy(container)
        for index, value in enumerate(container):
            rebuilt[index] = visit(value)
        return rebuilt
    if dataclasses.is_dataclass(container):
        rebuilt = copy.copy(container)
        for entry in dataclasses.fields(container):
            if hasattr(container, entry.name):
                value = visit(getattr(container, entry.name))
                object.__setattr__(rebuilt, entry.name, value)  # frozen ones too
        return rebuilt
    return container


def _visit(fn: Callable[[Tensor], Any], whole: Callable[[Any], Any] | None, item: Any) -> Any:
    return apply_to_tensors(fn, item, whole)


def _filled_like(container: Any, items: list[Any]) -> Any:
    """A tuple or set of the type of `container` that holds `items`."""
    kind = type(container)
    # Not by its own constructor, which may take something else.
    if isinstance(container, set):
        made = set.__new__(kind)
        set.update(made, items)
    else:
        base: Any = tuple if isinstance(container, tuple) else frozenset
        try:
            made = base.__new__(kind, items)
        except TypeError:  # types that are written in C have their own
            made = kind(items)
    if hasattr(container, "__dict__"):
        vars(made).update(vars(container))
    return made


def mapping_like(mapping: Mapping[Any, Any], made: dict[Any, Any]) -> Any:
    """A mapping of the type of `mapping` that holds `made`, which has its keys; a dict if such a
    one cannot be made.
    """
    kind: Any = type(mapping)
    if kind is dict or not hasattr(kind, "__setitem__"):
        return made
    if isinstance(mapping, (dict, UserDict)) or hasattr(kind, "__copy__"):
        rebuilt = copy.copy(mapping)
        for key, value in made.items():
            rebuilt[key] = value
        return rebuilt
    # A shallow copy of another one may share what both keep their items in.
    try:
        rebuilt = kind(made)
        holds = len(rebuilt) == len(made) and all(rebuilt[key] is made[key] for key in made)
    except Exception:  # its constructor takes something else
        return made
    return rebuilt if holds else made


def partition_balanced(weights: Sequence[float], num_parts: int, eps: float = 1e-3) -> list[int]:
    """Divides a row of layers into runs so that the heaviest run weighs as little as it can.

    Args:
        weights: of each layer, not negative.
        num_parts: how many runs, at least 1.
        eps: taken for compatibility and without effect: the result is exact.

    Returns:
        `num_parts` + 1 numbers: run i has the layers from the i-th to before the next. With fewer
        layers than runs the last runs are empty.

    Raises:
        ValueError: `num_parts` is below 1.
    """
    if num_parts < 1:
        raise ValueError(f"[partition_balanced] num_parts = {num_parts}: should be at least 1.")
    if not weights:
        return [0] * (num_parts + 1)
    before = [0, *accumulate(weights)]
    ends = best_cuts(len(weights), num_parts, lambda i, j: before[j] - before[i], max)
    return [0, *ends, *[len(weights)] * (num_parts - len(ends))]
