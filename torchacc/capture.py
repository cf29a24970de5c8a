"""Whole-step replay: a training or inference step that runs without its Python."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Sequence
from itertools import starmap
from typing import Any

import torch
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_is_leaf,
    tree_map,
    tree_unflatten,
)

from torchacc.device import device_type
from torchacc.guards import Guards
from torchacc.utils.utils import apply_to_tensors
from torchacc_device import _C, _scaling

# Leaves of the results: an argument, a tensor that the step makes, or a plain value.
_ARGUMENT, _TENSOR, _VALUE = range(3)

# How many calls a capture is put off for those that were cut: DDP arranges its buckets anew, which
# reads on the host, in the second or (static_graph) the third one.
_MOST_PUT_OFF = 4

# A scale of 65536 is halved to 1 by sixteen.
_MOST_FIRST_STEPS = 50
_ONLY_OVERFLOWS = (
    "[torchacc.capture] {} calls were recorded, and an optimizer has still not taken its first "
    "step, since all its gradients overflowed under the GradScaler: nothing is replayed until it "
    "has. Look at the loss: it may be infinite or not a number."
)
_SCALED = (
    " GradScaler.step reads for {}: {}. Call scaler.step and scaler.update behind the captured "
    "step, or use an optimizer that needs no read."
)


def capture(fn: Callable[..., Any], *, warmup: int = 3) -> CapturedStep:
    """Makes a step replayable: from call `warmup + 1` on, its operators run without its Python.

    ```python
    step = torchacc.capture(train_step)  # zero_grad, forward, backward, optimizer.step()
    for x, y in loader:
        loss = step(x, y)
    ```

    The first `warmup` calls run `fn` and are steps like any other; each is recorded as one plan,
    and the last two are compared. From then on a call runs that plan:

    * Tensor arguments are taken by reference at each call. They may be other tensors every time,
      of the same shape, dtype, strides and device, but require gradients only if they did at
      capture. CPU tensors are copied to acc first, so `fn` sees acc tensors; such a copy is read
      only, and a CPU tensor that `fn` writes, or that requires gradients, is refused. So is what is
      made of other tensors, such as a DTensor. Tensors may stand in nested lists, tuples, dicts and
      whatever else `torch.utils._pytree` knows, keywords in any order. Everything else must be
      equal to what it was at capture: arrays of numpy number by number, and objects that define
      equality (sets, dataclasses, namespaces) also where they are the same ones, changed in place.
      An argument that was in the memory of a tensor which `fn` knows as well (a buffer of the
      model, a variable) in both recorded calls that are compared has to stay there, and to begin
      where it began if that was one place: `fn` may use either.
    * Parameters, buffers, optimizer state and other tensors that `fn` uses are read and written
      where they are. They have to stay the same objects in the same place of the same storages, of
      the same shape; loading new values into them (`load_state_dict` of a module, `copy_`) is fine.
      So have requires_grad of parameters, the settings and parameter groups of optimizers that step
      in `fn`, train() or eval() of modules, the number of parts, parameters and buffers of modules
      that it calls, and the modules and optimizers that it uses: a layer or an optimizer that is
      added or in the place of another one is a reason to capture again.
    * So have variables that `fn`, or `forward` of a module that it calls, reads: attributes of its
      object (the probability of a dropout, the momentum of a batch norm), globals and those around
      it. Numbers, texts, devices, members of enums, None and tuples of these have to stay equal and
      of their type, and modules, optimizers and acc tensors the same, be they in lists, tuples or
      dicts of up to 1000 entries. So have the numbers, texts, tensors and arrays that the code
      reads of a variable by names and keys that it spells out: `args.lr`, `cfg["lr"]`,
      `cfg.get("lr")`, `self.cfg.optim.lr`, `nets[0].p`, also by a local name that is set once (`cfg
      = self.cfg`), in objects that have them as their own attributes, dicts, lists, classes and
      Python modules of the program. Other entries of such a dict may change. Tensors on the CPU,
      also in a module that is called, and arrays of numpy are constants of the step: up to 1 MiB (a
      container with all in it) they have to hold the same numbers, and a larger one has to stay the
      same, a tensor without a write that autograd counts; those in a larger container are not
      looked at. But not what `fn` sets itself, nor what changed between the last two recorded
      calls, as a counter does: these computed the same. Not noticed is what is read by functions
      that are no methods of the object, by names that are computed (`getattr(args, name)`,
      `cfg[key]`, a loop over `cfg.items()`), or of objects that keep it elsewhere (in slots, behind
      properties and `__getitem__` of their own, on their class), nor an attribute or entry that was
      not there at capture.
    * So have the settings of PyTorch that change what operators compute, such as deterministic
      algorithms, flushing of denormals, the number of threads of the thread that calls, or the
      default dtype.
    * Results are fresh tensors, in the structure in which `fn` returned them, of whatever pytree
      knows. They carry no gradient graph, in the first calls neither. An argument that `fn` returns
      comes back itself.
    * What `fn` leaves behind gets new contents: after a call, a `p.grad` that the step makes is the
      same tensor object as after the last recorded call, with new contents. A gradient that was
      set to None meanwhile stays None; one that was put in its place is replaced by a new tensor.
      So gradients are to be zeroed within `fn`. If they were None at the beginning of the recorded
      calls and `fn` only adds to them, a replay does not add to what was put there since.
    * Random operators draw what they would have drawn, and generators move on as they would have:
      also those that `fn` seeds, or seeds and puts back (`torch.random.fork_rng`).

    What Python does besides does not happen in a replay: counters, learning rate schedulers,
    `print`, hooks, lists that `fn` appends to, autocast around the call (put it into `fn`). A
    learning rate that changes has to be a tensor on acc, which schedulers then write (one on the
    CPU is a number like others, which may not change), and an optimizer that computes with its step
    count needs `capturable=True`. What a step decides by data on the host (`item()`) cannot be
    captured.

    `torch.amp.GradScaler` can be part of the step with an optimizer that takes its scale
    (`fused=True`, its learning rate a number), and with those of torch's that can be capturable,
    and SGD, whether they are made so or not, if nothing hooks their steps and parameters are dense.
    With others (Adagrad, say) `scaler.step` asks the host whether there was an overflow, and stays
    outside; the error says which and why. So do collectives of tensors on the host. Until an
    optimizer under a scaler has taken its first step, which makes its state, each call asks the
    host, and those do not count as warm-up: of the default scale of 65536 the first few overflow.

    Nor does a call that was cut where another one was not: DistributedDataParallel reads on the
    host where it arranges its buckets anew, once, at the beginning of its second or third forward.
    Up to 4 calls more are recorded for that. A step that is cut in each call is refused at once.

    With ACC_MODE=eager or nofuse, where nothing is recorded as a whole, every call runs `fn`.
    While `fn` is recorded, no other thread may read tensors of the device on the host, or replay a
    step there; the thread of an AsyncLoader does not. Replays may come from any thread, one after
    the other.

    Args:
        fn: the step. It keeps all that it works on, as closures and modules do.
        warmup: recorded calls, at least 2. Three let an optimizer make its state in the first. Two
            at least are recorded behind the last that does not count (above); a warning says so
            where 50 began with a GradScaler's question.

    Returns:
        A callable with the arguments of `fn`.

    Raises:
        ValueError: `warmup` is below 2.
        RuntimeError: by the last call of the warm-up, whose work is done all the same, and by all
            calls after it: the step cannot be replayed. It reads on the host, is submitted in
            parts, computes numbers anew at each call (both values are given), uses other tensors at
            each call, or records on several devices or nothing. The message names operator and
            line. Where it writes an argument on the CPU, by the first call; a write that autograd
            does not count (through `.data`, a collective) is not noticed there, and lost.
        RuntimeError: by any call with an argument on the CPU that requires gradients, or one that
            is made of other tensors.
        RuntimeError: by a replay that a guard forbids; nothing was run then.
        TypeError: where an object is asked for a step that was captured in the body of its class.
            Capture the method of each object (in `__init__`), or make it a staticmethod.
    """
    if warmup < 2:
        raise ValueError(
            f"[torchacc.capture] warmup is {warmup}: two calls are compared at least. Leave it out."
        )
    return CapturedStep(fn, warmup)


class CapturedStep:
    """What `capture` returns.

    Attributes:
        recorded: how many calls were recorded so far.
        replays: how many were replayed.
    """

    def __init__(self, fn: Callable[..., Any], warmup: int) -> None:
        self._fn = fn
        self._warmup = warmup
        self._step = _C.CapturedStep((), [])
        self._error: str | None = None
        self._runs_fn = _C.mode() in ("eager", "nofuse")
        self._ready = False
        self._begins = False  # the last call took, or skipped, an optimizer's first step
        self._cut = False  # the last call was submitted in parts
        self._some_whole = False  # and another one was not
        self._put_off = 0  # how often the last call of the warm-up was none
        self._structure: TreeSpec | None = None
        self._keywords: tuple[str, ...] = ()  # in the order of the first call
        self._flat = -1  # number of arguments, when all are leaves that are given by position
        self._device = torch.device(device_type(), 0)
        self._on_cpu: list[int] = []
        self._results: tuple[Any, list[tuple[int, Any]]] | None = None
        self._one_tensor = False
        self._guards = Guards(fn)
        self.recorded = 0
        self.replays = 0

    def __repr__(self) -> str:
        state = f"{self._step.operators} operators" if self._ready else "not captured yet"
        return f"<torchacc.capture of {self._fn!r}: {state}>"

    def __get__(self, instance: object, owner: type | None = None) -> CapturedStep:
        if instance is None:
            return self
        raise TypeError(
            "[torchacc.capture] a function was captured in the body of "
            f"class {type(instance).__name__}, where it has no object. Capture the method of each "
            "object, as by self.step = torchacc.capture(self.step) in __init__, or make it a "
            "staticmethod."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._ready:
            return self._record(args, kwargs)
        if self._flat == len(args) and not kwargs:
            leaves = args
        else:
            leaves = self._leaves_of(args, kwargs)
        given = leaves
        if self._on_cpu:
            leaves = self._moved(leaves)
        results = self._step.replay(leaves)
        self.replays += 1
        if self._one_tensor:
            return results[0]
        return self._rebuilt(given, results)

    # --- recording ---------------------------------------------------------------------------

    def _record(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._error is not None:
            raise RuntimeError(self._error)
        if self._runs_fn:
            return self._run(args, kwargs)
        leaves = self._leaves_of(args, kwargs)
        if self.recorded == 0:
            self._look_at(args, leaves)
        with torch.inference_mode(False):  # where writes are counted
            moved = self._moved(leaves)
        args, kwargs = tree_unflatten(moved, self._structure)
        may_be_last = self.recorded + 1 >= self._warmup and not self._begins
        first_steps, later_steps = _scaling.first_steps, _scaling.later_steps
        self._step.begin(moved)
        try:
            with self._guards.recording(may_be_last):
                returned = self._fn(*args, **kwargs)
            results, tensors = self._look_at_results(returned, moved)
        except BaseException:
            self._step.cancel()
            raise
        last = self._is_last(may_be_last)
        self._begins = _scaling.first_steps > first_steps
        if self._begins and self.recorded == _MOST_FIRST_STEPS:
            warnings.warn(_ONLY_OVERFLOWS.format(self.recorded), stacklevel=3)
        del returned, args, kwargs
        if last:
            # What only waits for the collector is nothing that the step leaves behind.
            gc.collect()
        try:
            self._step.end(tensors, last)
            before, self._results = self._results, results
            self.recorded += 1
            self._check_not_written(leaves, moved)
            if not last:
                self._guards.remember()
                return self._rebuilt(leaves, tensors)
            _compare(before, results)
            self._check_gradients(moved)
        except RuntimeError as error:
            # An operator that fails is no reason not to try again at the next call.
            text = str(error)
            if text.startswith("[torchacc.capture]"):
                if _scaling.later_steps > later_steps:
                    text += "".join(starmap(_SCALED.format, _scaling.synchronised().items()))
                    error.args = (text,)
                self._fail(text)
            raise
        del tensors
        try:
            tensors = self._step.take_results()
            self._guards.keep(self._step)
        except BaseException as error:
            self._fail(f"[torchacc.capture] the step cannot be guarded: {error}")
            raise
        self._guards.forget()
        self._one_tensor = results[0].is_leaf() and results[1] == [(_TENSOR, 0)]
        self._ready = True
        return self._rebuilt(leaves, tensors)

    def _is_last(self, may_be_last: bool) -> bool:
        """Within a recorded call: whether it and the one before are those that are compared."""
        cut_before, self._cut = self._cut, self._step.cut
        self._some_whole = self._some_whole or not self._cut
        if not may_be_last or self._put_off == _MOST_PUT_OFF:
            return may_be_last
        put_off = self._some_whole and (cut_before or self._cut)
        self._put_off += put_off
        return not put_off

    def _fail(self, text: str) -> None:
        """All later calls raise this; nothing of the step is kept."""
        self._error = text
        self._step = _C.CapturedStep((), [])
        self._results = None
        self._guards.forget()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call where nothing is recorded: with the arguments and the results of the others."""
        leaves, self._structure = tree_flatten((args, kwargs))
        self._find_devices(leaves)
        with torch.inference_mode(False):
            moved = self._moved(leaves)
        args, kwargs = tree_unflatten(moved, self._structure)
        given = {id(copy): leaf for copy, leaf in zip(moved, leaves, strict=True)}
        returned = tree_map(
            lambda leaf: given[id(leaf)] if id(leaf) in given else _detached(leaf),
            self._fn(*args, **kwargs),
        )
        self._check_not_written(leaves, moved)
        return returned

    def _leaves_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        if self._structure is None:
            self._keywords = tuple(kwargs)
        elif kwargs.keys() == set(self._keywords):
            kwargs = {name: kwargs[name] for name in self._keywords}
        leaves, structure = tree_flatten((args, kwargs))
        if self._structure is None:
            self._structure = structure
        if structure != self._structure:
            raise RuntimeError(
                "[torchacc.capture] the arguments are nested in another way than at capture: "
                f"{_text(structure)} is not {_text(self._structure)}. Capture another step for "
                "that."
            )
        return tuple(leaves)

    def _look_at(self, args: tuple[Any, ...], leaves: tuple[Any, ...]) -> None:
        self._find_devices(leaves)
        if len(args) == len(leaves) and all(map(tree_is_leaf, args)):
            self._flat = len(args)
        kept = tuple(map(_as_it_is, self._moved(leaves)))
        self._step = _C.CapturedStep(kept, _names(self._structure))

    def _find_devices(self, leaves: Sequence[Any]) -> None:
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        on_acc = [tensor.device for tensor in tensors if tensor.device.type == device_type()]
        current = torch.device(device_type(), _C.current_device())
        self._device = on_acc[0] if on_acc else current
        self._on_cpu = [
            index
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"
        ]

    def _moved(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """The leaves with acc tensors for CPU tensors."""
        if not self._on_cpu:
            return tuple(leaves)
        moved = list(leaves)
        for index in self._on_cpu:
            leaf = moved[index]
            if not isinstance(leaf, torch.Tensor) or leaf.device.type != "cpu":
                continue
            if leaf.requires_grad:
                raise RuntimeError(
                    f"[torchacc.capture] {_names(self._structure)[index]} is on the CPU and "
                    "requires gradients, which a copy on acc would keep from it. Pass detach(), or "
                    "a tensor on acc."
                )
            moved[index] = leaf.detach().to(self._device)
        return tuple(moved)

    def _check_not_written(self, leaves: Sequence[Any], moved: tuple[Any, ...]) -> None:
        for index in self._on_cpu:
            if moved[index] is not leaves[index] and moved[index]._version > 0:
                raise RuntimeError(
                    f"[torchacc.capture] the function writes {_names(self._structure)[index]}, "
                    "which is on the CPU: it writes a copy on acc, and the tensor stays as it was. "
                    "Pass a tensor on acc, or write another one than the argument."
                )

    def _look_at_results(
        self, returned: Any, arguments: tuple[Any, ...]
    ) -> tuple[tuple[Any, list[tuple[int, Any]]], list[torch.Tensor]]:
        """What the function returned: where each leaf comes from, and the acc tensors."""
        leaves, structure = tree_flatten(returned)
        found: list[tuple[int, Any]] = []
        tensors: list[torch.Tensor] = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                found.append((_VALUE, leaf))
                continue
            index = next((i for i, argument in enumerate(arguments) if argument is leaf), None)
            if index is not None:
                found.append((_ARGUMENT, index))
            elif leaf.device.type == device_type():
                found.append((_TENSOR, len(tensors)))
                tensors.append(leaf.detach())
            else:
                found.append((_VALUE, leaf.detach()))
        return (structure, found), tensors

    def _check_gradients(self, arguments: tuple[Any, ...]) -> None:
        for name, leaf in zip(_names(self._structure), arguments, strict=True):
            if not isinstance(leaf, torch.Tensor) or not leaf.is_leaf or leaf.grad is None:
                continue
            if self._step.uses(leaf.grad):
                raise RuntimeError(
                    f"[torchacc.capture] the step leaves a gradient on {name}, and other arguments "
                    "would get none. Return it (torch.autograd.grad), or keep that tensor out of "
                    "the arguments."
                )

    def _rebuilt(self, leaves: tuple[Any, ...], tensors: list[torch.Tensor]) -> Any:
        assert self._results is not None
        structure, found = self._results
        made = []
        for kind, value in found:
            if kind == _TENSOR:
                made.append(tensors[value])
            else:
                made.append(leaves[value] if kind == _ARGUMENT else value)
        return tree_unflatten(made, structure)


def _text(structure: TreeSpec) -> str:
    return " ".join(str(structure).split())


def _names(structure: TreeSpec) -> list[str]:
    """What errors call the leaves of (args, kwargs)."""
    paths, _ = tree_flatten_with_path(tree_unflatten(range(structure.num_leaves), structure))
    names = []
    for (which, first, *rest), _ in paths:
        begin = f"args{keystr((first,))}" if which.idx == 0 else f"argument '{first.key}'"
        names.append(begin + keystr(tuple(rest)))
    return names


def _as_it_is(leaf: Any) -> Any:
    """What tells later whether an argument changed: a copy, if it may change in place."""
    kept: dict[int, object] = {}  # what is told by identity, which a copy has in common
    seen: set[int] = set()
    found = [leaf]
    while found:
        each = found.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        kind = type(each)
        if issubclass(kind, torch.Tensor) or kind.__eq__ is object.__eq__:
            kept[id(each)] = each
        else:
            found += gc.get_referents(each)
    try:
        made = copy.deepcopy(leaf, kept)
    except Exception:  # whatever an object raises that is not made for it
        return leaf
    return made if _C.are_equal(made, leaf) else leaf


def _holds_tensors(value: Any) -> bool:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    apply_to_tensors(note, value)
    return bool(found)


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _compare(before: Any, now: Any) -> None:
    """Raises RuntimeError unless the last two calls returned the same but for tensors on acc."""
    if before[0] != now[0]:
        raise RuntimeError(
            "[torchacc.capture] the function returned another structure in the last two calls: "
            f"{_text(before[0])}, then {_text(now[0])}. Return the same one always."
        )
    for (old_kind, old), (kind, new) in zip(before[1], now[1], strict=True):
        if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
            raise RuntimeError(
                "[torchacc.capture] the function returns a tensor that is not on acc, which a "
                "replay would not compute. Return the acc tensor."
            )
        if old is new and old_kind == kind:
            continue
        if _holds_tensors(new):
            raise RuntimeError(
                f"[torchacc.capture] the function returns tensors in a {type(new).__name__}, which "
                "torch.utils._pytree does not know, so a replay would not put new ones there. "
                "Return them in a tuple or dict, or call "
                f"torch.utils._pytree.register_dataclass({type(new).__name__}) if it is one."
            )
        if old_kind != kind or type(old) is not type(new) or not _C.are_equal(old, new):
            raise RuntimeError(
                f"[torchacc.capture] the function returned {old!r} and then {new!r}, which Python "
                "computed and a replay would not. Return a tensor of acc, or nothing."
            )
