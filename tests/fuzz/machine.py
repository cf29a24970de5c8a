"""Random programs over tensors: what an instruction means, and how a program runs on a device.

A program is a list of instructions (name, a, b, k): registers a and b, modulo the registers there
are, and a small number. What an instruction cannot do with its registers - shapes that do not
broadcast, a type that has no such operator - it leaves undone; shapes and types are the same on all
devices, so that is decided alike. What PyTorch refuses is a result, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Instruction = tuple[str, int, int, int]

SHAPES = [(4, 6), (3, 5), (9, 16), (1, 7), (2, 33), (5, 50), (70, 3)]
DTYPES = [torch.float32, torch.int64, torch.bool, torch.float64, torch.int32, torch.bfloat16]
HALVES = [torch.bfloat16, torch.float16]
NUMBERS = [2, -1, 3, 0.5]
NEWEST = 8
INDICES = 16


@dataclass(frozen=True)
class Program:
    """Instructions, the inputs they begin with, and which registers are read at the end.

    The inputs are of one row of SHAPES and what broadcasts with it; `dtypes` index DTYPES.
    """

    shape: int
    dtypes: tuple[int, int]
    instructions: tuple[Instruction, ...]
    kept: int  # bits: the registers that live to the end
    exact: bool  # False: functions and optimizers, compared within bounds

    def inputs(self, device: str) -> list[Tensor]:
        """New memory with the same values at every call."""
        rows, columns = SHAPES[self.shape]
        first, second = (DTYPES[i] for i in self.dtypes)
        shapes = [(rows, columns), (rows, columns), (columns,), (rows, 1), ()]
        dtypes = [first, second, first, first, first]
        generator = torch.Generator().manual_seed(5)
        made = []
        for shape, dtype in zip(shapes, dtypes, strict=True):
            values = torch.randn(shape, generator=generator) * 3
            values = values > 0 if dtype == torch.bool else values.to(dtype)
            if dtype in (torch.int32, torch.int64):  # they wrap around
                values.view(-1)[1::5] = torch.iinfo(dtype).max
                values.view(-1)[2::5] = torch.iinfo(dtype).min
            made.append(values.to(device))
        return made


@dataclass
class Registers:
    """The state of a run."""

    values: list[Tensor | None]
    results: list[Any] = field(default_factory=list)

    def place(self, index: int) -> int:
        """From NEWEST on counted from the latest, for chains."""
        count = len(self.values)
        return index % count if index < NEWEST else (NEWEST - 1 - index) % count

    def get(self, index: int) -> Tensor | None:
        return self.values[self.place(index)]

    def drop(self, index: int) -> None:
        self.values[self.place(index)] = None

    def read(self, value: Tensor) -> None:
        """Adds the strides that mean something, and a copy on the CPU."""
        pairs = zip(value.stride(), value.shape, strict=True)
        self.results.append(tuple(stride for stride, size in pairs if size > 1))
        self.results.append(value.to("cpu", copy=True))


def _broadcasts(a: Tensor, b: Tensor) -> bool:
    pairs = zip(reversed(a.shape), reversed(b.shape), strict=False)
    return all(m == n or m == 1 or n == 1 for m, n in pairs)


def _is_bool(*tensors: Tensor) -> bool:
    return any(t.dtype == torch.bool for t in tensors)


Made = Tensor | None
Apply = Callable[[Tensor, Tensor, int], Made]


def _arithmetic(fn: Callable[[Tensor, Any], Tensor]) -> Apply:
    def apply(a: Tensor, b: Tensor, k: int) -> Made:
        if _is_bool(a) and _is_bool(b):
            return None
        return fn(a, b) if _broadcasts(a, b) else None

    return apply


def _numeric(fn: Callable[[Tensor, Any], Tensor]) -> Apply:
    def apply(a: Tensor, b: Tensor, k: int) -> Made:
        return None if _is_bool(a) else fn(a, NUMBERS[k])

    return apply


def _compared(fn: Callable[[Tensor, Any], Tensor]) -> Apply:
    def apply(a: Tensor, b: Tensor, k: int) -> Made:
        return fn(a, b) if _broadcasts(a, b) else None

    return apply


def _where(a: Tensor, b: Tensor, k: int) -> Made:
    return torch.where(a > 0, a, b) if _broadcasts(a, b) else None


def _masked_fill(a: Tensor, b: Tensor, k: int) -> Made:
    mask = b if b.dtype == torch.bool else b > 0
    if _is_bool(a) or not _broadcasts(a, b):
        return None
    return a.masked_fill(mask, int(NUMBERS[k]))


def _clamp(a: Tensor, b: Tensor, k: int) -> Made:
    return None if _is_bool(a) else a.clamp(-1 - k, 1 + k)


def _cast(a: Tensor, b: Tensor, k: int) -> Made:
    # A float beyond the integers has no one value as an integer.
    dtype = (torch.float32, torch.int64, torch.bool, torch.float64)[k]
    if a.is_floating_point() and not dtype.is_floating_point and dtype != torch.bool:
        return a.nan_to_num(0, 0, 0).clamp(-1000, 1000).to(dtype)
    return a.to(dtype)


def _one_zero(fn: Callable[[Tensor, Tensor, int], Made]) -> Apply:
    """Without the sign of zeros: ATen's vectorised loop takes the second of 0.0 and -0.0, what is
    left over at its end the first.
    """

    def apply(a: Tensor, b: Tensor, k: int) -> Made:
        made = fn(a, b, k)
        return made + 0.0 if made is not None and made.is_floating_point() else made

    return apply


def _summed(a: torch.Tensor, k: int) -> torch.Tensor:
    return a.sum(dim=k % a.dim(), keepdim=True) if a.dim() else a.sum()


PURE: dict[str, Apply] = {
    "add": _arithmetic(torch.add),
    "sub": _arithmetic(lambda a, b: None if _is_bool(a, b) else a - b),
    "mul": _arithmetic(torch.mul),
    "maximum": _one_zero(_compared(torch.maximum)),
    "minimum": _one_zero(_compared(torch.minimum)),
    "add number": _numeric(lambda a, k: a + k),
    "mul number": _numeric(lambda a, k: a * k),
    "number minus": _numeric(lambda a, k: k - a),
    "div": lambda a, b, k: (
        a / b if a.is_floating_point() and _broadcasts(a, b) and a.dtype == b.dtype else None
    ),
    "neg": lambda a, b, k: None if _is_bool(a) else -a,
    "abs": lambda a, b, k: None if _is_bool(a) else a.abs(),
    "relu": lambda a, b, k: None if _is_bool(a) else a.relu(),
    "not": lambda a, b, k: torch.logical_not(a),
    "clamp": _clamp,
    "where": _where,
    "masked fill": _masked_fill,
    "less": _compared(torch.lt),
    "equal": _compared(torch.eq),
    "cast": _cast,
    "to half": lambda a, b, k: a.to(HALVES[k % 2]),
    "clone": lambda a, b, k: a.clone(),
    "contiguous": lambda a, b, k: a.contiguous(),
    "and": lambda a, b, k: a & b if _is_bool(a) and _is_bool(b) and _broadcasts(a, b) else None,
    # Of small whole numbers, so that the order of the additions does not matter.
    "sum": lambda a, b, k: _summed(a.round().clamp(-8, 8) if a.is_floating_point() else a, k),
    "amax": _one_zero(lambda a, b, k: a.amax(dim=k % a.dim()) if a.dim() else a.amax()),
    "dropout": lambda a, b, k: (
        torch.ops.acc.native_dropout(a, 1 << 31, 2.0, 7, 8 * k)[0]
        if a.is_floating_point()
        else None
    ),
    # ATen's own, between the generated ones
    "cumsum": lambda a, b, k: a.cumsum(0) if a.dim() else None,
    "cat": lambda a, b, k: torch.cat([a, a]) if a.dim() else None,
}

FUNCTIONS: dict[str, Apply] = {
    "exp": lambda a, b, k: (-a.abs()).exp() if a.is_floating_point() else None,
    "tanh": lambda a, b, k: a.tanh() if a.is_floating_point() else None,
    "sigmoid": lambda a, b, k: a.sigmoid() if a.is_floating_point() else None,
    "gelu": lambda a, b, k: (
        torch.nn.functional.gelu(a) if a.is_floating_point() and a.dim() else None
    ),
    "sqrt": lambda a, b, k: (a.abs() + 1).sqrt() if a.is_floating_point() else None,
    "softmax": lambda a, b, k: a.softmax(-1) if a.is_floating_point() and a.dim() else None,
    "mean": lambda a, b, k: (
        a.mean(dim=k % a.dim(), keepdim=k > 1) if a.is_floating_point() and a.dim() else None
    ),
    "layer norm": lambda a, b, k: (
        torch.nn.functional.layer_norm(a, a.shape[-1:], eps=1.0)
        if a.is_floating_point() and a.dim()
        else None
    ),
}

VIEWS: dict[str, Apply] = {
    "rows from 1": lambda a, b, k: a[1:] if a.dim() and a.shape[0] > 1 else None,
    "rows to -1": lambda a, b, k: a[:-1] if a.dim() and a.shape[0] > 1 else None,
    "every second": lambda a, b, k: a[..., ::2] if a.dim() else None,
    "one row": lambda a, b, k: a[k % a.shape[0]] if a.dim() else None,
    "columns": lambda a, b, k: a[:, 1 : 3 + k] if a.dim() == 2 and a.shape[1] > 1 else None,
    "transposed": lambda a, b, k: a.t() if a.dim() == 2 else None,
    "flat": lambda a, b, k: a.view(-1) if a.is_contiguous() else None,
    "expanded": lambda a, b, k: a.unsqueeze(0).expand(2, *a.shape) if a.dim() < 3 else None,
    "unsqueezed": lambda a, b, k: a.unsqueeze(-1) if a.dim() < 3 else None,
    "detached": lambda a, b, k: a.detach(),
}


def _writable(a: Tensor, b: Tensor) -> bool:
    if not _broadcasts(a, b) or a.dim() < b.dim():
        return False
    return torch.broadcast_shapes(a.shape, b.shape) == a.shape


def _write(fn: Callable[[Tensor, Tensor], Tensor]) -> Apply:
    def apply(a: Tensor, b: Tensor, k: int) -> Made:
        if a.dtype == b.dtype and not _is_bool(a) and _writable(a, b):
            fn(a, b)
        return None

    return apply


def _write_number(fn: Callable[[Tensor, Any], Tensor]) -> Apply:
    def apply(a: Tensor, b: Tensor, k: int) -> Made:
        if a.is_floating_point():
            fn(a, NUMBERS[k])
        return None

    return apply


def _copy(a: Tensor, b: Tensor, k: int) -> Made:
    whole = not a.is_floating_point() and a.dtype != torch.bool
    if _writable(a, b) and not (b.is_floating_point() and whole):
        a.copy_(b)
    return None


def _part(a: Tensor, b: Tensor, k: int) -> Made:
    if a.dim() and a.shape[0] > 1:
        part = (a[1:], a[:1], a[::2], a[-1])[k]
        if k % 2:
            part.copy_(part.clone())
        part.fill_(1)
    return None


def _add_part(a: Tensor, b: Tensor, k: int) -> Made:
    if a.dim() and a.shape[0] > 1 and not _is_bool(a):
        (a[1:], a[:1], a[::2], a[-1])[k].add_(2)
    return None


def _shift(a: Tensor, b: Tensor, k: int) -> Made:
    if a.dim() and a.shape[0] > 1:
        a[1:] = a[:-1].clone() if k % 2 else a[0]
    return None


WRITES: dict[str, Apply] = {
    "add_": _write(Tensor.add_),
    "mul_": _write(Tensor.mul_),
    "sub_": _write(Tensor.sub_),
    "mul_ number": _write_number(Tensor.mul_),
    "add_ number": _write_number(Tensor.add_),
    "neg_": lambda a, b, k: _none(_is_bool(a) or a.neg_()),
    "relu_": lambda a, b, k: _none(_is_bool(a) or a.relu_()),
    "zero_": lambda a, b, k: _none(a.zero_()),
    "copy_": _copy,
    "fill part": _part,
    "add to part": _add_part,
    "shift": _shift,
}


def _none(_: object) -> None:
    return None


def _optimizer(a: Tensor, b: Tensor, k: int) -> Made:
    """Two steps of an optimizer over copies of both registers, each other's gradients.

    Where a gradient is what a subtraction left, a last bit of what was subtracted moves a parameter
    by lr / eps times as much, 40 times after two steps of both: search.BOUNDS have room for that.
    """
    if a.dtype != torch.float32 or b.dtype != torch.float32 or a.shape != b.shape:
        return None
    parameters = [t.clone().contiguous() for t in (a, b, a[:1] if a.dim() else a)]
    gradients = [t.tanh() for t in reversed(parameters[:2])] + [parameters[2] * 0.5]
    make: Any = (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, eps=1e-2, foreach=True),
        lambda p: torch.optim.Adam(p, lr=0.1, eps=1e-2, foreach=False),
        lambda p: torch.optim.RMSprop(p, lr=0.1, eps=1e-2, foreach=True),
    )[k]
    optimizer = make(parameters)
    for _ in range(2):
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return parameters[0] + parameters[1]


OPTIMIZERS: dict[str, Apply] = {"optimizer": _optimizer}

# Without a result: what the run itself does.
CONTROL = ["flush", "read", "drop"]

TABLE: dict[str, Apply] = {**PURE, **FUNCTIONS, **VIEWS, **WRITES, **OPTIMIZERS}

# Where the last bit of an operand decides everything about the result.
AMPLIFYING = {
    "less",
    "equal",
    "cast",
    "to half",
    "where",
    "masked fill",
    "div",
    "not",
    "cumsum",
    "relu",
}


def run(program: Program, device: str, flush: Callable[[], None]) -> Iterator[list[Any]]:
    """Runs a program; stops before and after it reads, and yields what it has read so far.

    Several programs can be run side by side in this way: what all of them recorded up to their next
    read then is one graph.
    """
    registers = Registers(list(program.inputs(device)))
    for name, a, b, k in program.instructions:
        x, y = registers.get(a), registers.get(b)
        if name == "flush":
            flush()
        elif x is None or y is None:
            continue
        elif name == "read":
            yield registers.results
            registers.read(x)
            yield registers.results
        elif name == "drop":
            del x, y
            registers.drop(a)
        else:
            try:
                made = TABLE[name](x, y, k)
            except (RuntimeError, IndexError) as error:
                registers.results.append(type(error).__name__)
                continue
            if made is not None:
                registers.values.append(made)
            del made
        x = y = None
    for i in range(len(registers.values)):
        if not program.kept >> (i % 16) & 1:
            registers.values[i] = None
    yield registers.results
    # In an order as random as what is kept.
    left = [value for value in registers.values if value is not None]
    random.Random(program.kept).shuffle(left)
    for value in left:
        registers.read(value)
    yield registers.results


def run_all(programs: list[Program], device: str, flush: Callable[[], None]) -> list[list[Any]]:
    """Runs programs side by side and returns what each read."""
    runs = [run(program, device, flush) for program in programs]
    results: list[list[Any]] = [[] for _ in programs]
    left = dict(enumerate(runs))
    while left:
        for i, one in list(left.items()):
            try:
                results[i] = next(one)
            except StopIteration:
                del left[i]
    return results
