"""What test_collectives.py runs on each rank: every collective, compared with Gloo's.

The reference is computed by Gloo on contiguous CPU copies, in the same processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

RANK, WORLD = 0, 1  # set by `run`
# Gloo adds these.
NUMBERS = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
# These only move, or are what Gloo does not add.
OTHERS = (torch.bool, torch.complex64, torch.int16)


@dataclass(frozen=True)
class Case:
    name: str
    run: Callable[[Callable[[Tensor], Tensor]], list[Tensor]]


def values(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Small numbers that differ from rank to rank; their sums are exact in every type."""
    generator = torch.Generator().manual_seed(1000 * seed + RANK)
    made = torch.randint(0, 4, shape, generator=generator)
    if dtype.is_complex:
        return torch.complex(made.float(), made.flip(0).float()).to(dtype)
    return made.to(dtype)


# Where a tensor lies in its storage. `at` puts a CPU tensor on the device that is tested.
def plain(tensor: Tensor, at: Callable[[Tensor], Tensor]) -> Tensor:
    return at(tensor)


def column(tensor: Tensor, at: Callable[[Tensor], Tensor]) -> Tensor:
    """Every third element of a larger storage."""
    return at(torch.stack([tensor, tensor, tensor], dim=-1))[..., 1]


def later(tensor: Tensor, at: Callable[[Tensor], Tensor]) -> Tensor:
    """A view that begins behind other elements."""
    return at(torch.cat([tensor.flatten(), tensor.flatten()]))[tensor.numel() :].view(tensor.shape)


def transposed(tensor: Tensor, at: Callable[[Tensor], Tensor]) -> Tensor:
    return at(tensor.transpose(0, -1).contiguous()).transpose(0, -1)


PLACES = (plain, column, later, transposed)


def placed(tensor: Tensor, at: Callable[[Tensor], Tensor], place: Any) -> Tensor:
    """Gloo itself does not see strides."""
    return (plain if at is torch.clone else place)(tensor, at)


def single(tensor: Tensor, at: Callable[[Tensor], Tensor]) -> Tensor:
    """The only element as a 0-dim tensor. Gloo takes no such where it divides tensors."""
    return at(tensor) if at is torch.clone else at(tensor)[0]


def tensors(dtype: torch.dtype) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    for place in PLACES:

        def make(at: Any, seed: int = 0, *, place: Any = place) -> Tensor:
            return placed(values(4, 3, dtype=dtype, seed=seed), at, place)

        yield place.__name__, make
    yield "0-dim", lambda at, seed=0: at(values(1, dtype=dtype, seed=seed)[0].clone())
    yield "empty", lambda at, seed=0: at(values(0, 3, dtype=dtype, seed=seed))


def reductions() -> Iterator[Case]:
    ops = dist.ReduceOp
    for dtype in NUMBERS:
        for op in (ops.SUM, ops.PRODUCT, ops.MIN, ops.MAX):
            for name, make in tensors(dtype):

                def all_reduce(at: Any, make: Any = make, op: Any = op) -> list[Tensor]:
                    x = make(at)
                    dist.all_reduce(x, op)
                    return [x]

                yield Case(f"all_reduce {dtype} {op} {name}", all_reduce)
        if not dtype.is_floating_point:
            for op in (ops.BAND, ops.BOR, ops.BXOR):

                def bitwise(at: Any, dtype: Any = dtype, op: Any = op) -> list[Tensor]:
                    x = at(values(5, dtype=dtype))
                    dist.all_reduce(x, op)
                    return [x]

                yield Case(f"all_reduce {dtype} {op}", bitwise)
        for name, make, op in reduced_to(dtype):
            for root in roots():

                def reduce(
                    at: Any, make: Any = make, op: Any = op, root: int = root
                ) -> list[Tensor]:
                    x = make(at)
                    dist.reduce(x, root, op)
                    return [x] if RANK == root else []

                yield Case(f"reduce {dtype} {op} {name} to {root}", reduce)

            def reduce_scatter(at: Any, make: Any = make, op: Any = op) -> list[Tensor]:
                out = make(at, 9)
                dist.reduce_scatter(out, [make(at, seed) for seed in range(WORLD)], op)
                return [out]

            yield Case(f"reduce_scatter {dtype} {op} {name}", reduce_scatter)

            def coalesced(at: Any, make: Any = make, op: Any = op) -> list[Tensor]:
                xs = [make(at), make(at, 1)]
                dist.all_reduce_coalesced(xs, op)
                return xs

            yield Case(f"all_reduce_coalesced {dtype} {op} {name}", coalesced)
        for name, part, all_, op in divided_to(dtype):

            def reduce_scatter_tensor(
                at: Any, part: Any = part, all_: Any = all_, op: Any = op
            ) -> list[Tensor]:
                out = part(at)
                dist.reduce_scatter_tensor(out, all_(at), op)
                return [out.reshape(-1)]

            yield Case(f"reduce_scatter_tensor {dtype} {op} {name}", reduce_scatter_tensor)


def reduced_to(dtype: torch.dtype) -> Iterator[tuple[str, Callable[..., Tensor], Any]]:
    """Sums of tensors in all places, and the other operations of one in its own memory."""
    ops = dist.ReduceOp
    made = list(tensors(dtype))
    yield from ((*each, ops.SUM) for each in made)
    yield from ((*made[0], op) for op in besides_sum(dtype))


def besides_sum(dtype: torch.dtype) -> tuple[Any, ...]:
    ops = dist.ReduceOp
    bitwise = () if dtype.is_floating_point else (ops.BAND, ops.BOR, ops.BXOR)
    return ops.PRODUCT, ops.MIN, ops.MAX, *bitwise


def divided(
    dtype: torch.dtype,
) -> Iterator[tuple[str, Callable[..., Tensor], Callable[..., Tensor]]]:
    """A part, and what holds one for each rank."""
    for place in PLACES:
        yield (
            place.__name__,
            lambda at, place=place: placed(values(3, 2, dtype=dtype), at, place),
            lambda at, place=place: placed(values(3 * WORLD, 2, dtype=dtype), at, place),
        )
    yield (
        "0-dim",
        lambda at: single(values(1, dtype=dtype), at),
        lambda at: at(values(WORLD, dtype=dtype)),
    )
    yield (
        "empty",
        lambda at: at(values(0, 2, dtype=dtype)),
        lambda at: at(values(0, 2, dtype=dtype)),
    )


def divided_to(
    dtype: torch.dtype,
) -> Iterator[tuple[str, Callable[..., Tensor], Callable[..., Tensor], Any]]:
    """Sums of those in all places, and the other operations of one in its own memory."""
    made = list(divided(dtype))
    yield from ((*each, dist.ReduceOp.SUM) for each in made)
    yield from ((*made[0], op) for op in besides_sum(dtype))


def together(at: Callable[[Tensor], Tensor]) -> AbstractContextManager[Any]:
    """Collectives in it are one; Gloo has no such manager."""
    return nullcontext() if at is torch.clone else dist._coalescing_manager()


def managed() -> Iterator[Case]:
    for dtype in NUMBERS:
        for name, make, op in reduced_to(dtype):

            def all_reduces(at: Any, make: Any = make, op: Any = op) -> list[Tensor]:
                xs = [make(at), make(at, 1)]
                with together(at):
                    for x in xs:
                        dist.all_reduce(x, op)
                return xs

            yield Case(f"all_reduce, coalesced by a manager {dtype} {op} {name}", all_reduces)
        for name, part, all_, op in divided_to(dtype):

            def reduce_scatters(
                at: Any, part: Any = part, all_: Any = all_, op: Any = op
            ) -> list[Tensor]:
                outs = [part(at), part(at)]
                inputs = [all_(at), all_(at) + 1]
                with together(at):
                    for out, each in zip(outs, inputs, strict=True):
                        dist.reduce_scatter_tensor(out, each, op)
                return [out.reshape(-1) for out in outs]

            what = f"reduce_scatter_tensor, coalesced by a manager {dtype} {op} {name}"
            yield Case(what, reduce_scatters)
        for name, part, all_ in divided(dtype):

            def all_gathers(at: Any, part: Any = part, all_: Any = all_) -> list[Tensor]:
                outs, mine = [all_(at), all_(at)], [part(at), part(at) + 1]
                with together(at):
                    for out, each in zip(outs, mine, strict=True):
                        dist.all_gather_into_tensor(out, each)
                return outs

            what = f"all_gather_into_tensor, coalesced by a manager {dtype} {name}"
            yield Case(what, all_gathers)


def roots() -> list[int]:
    return sorted({0, WORLD - 1})


def rooted(dtype: torch.dtype, name: str, make: Callable[..., Tensor]) -> Iterator[Case]:
    for root in roots():

        def broadcast(at: Any, root: int = root) -> list[Tensor]:
            x = make(at)
            dist.broadcast(x, root)
            return [x]

        yield Case(f"broadcast {dtype} {name} from {root}", broadcast)

        def gather(at: Any, root: int = root) -> list[Tensor]:
            out = [make(at, 9) for _ in range(WORLD)] if RANK == root else None
            dist.gather(make(at), out, root)
            return out or []

        yield Case(f"gather {dtype} {name} to {root}", gather)

        def scatter(at: Any, root: int = root) -> list[Tensor]:
            out = make(at, 9)
            parts = [make(at, seed) for seed in range(WORLD)] if RANK == root else None
            dist.scatter(out, parts, root)
            return [out]

        yield Case(f"scatter {dtype} {name} from {root}", scatter)


def movements() -> Iterator[Case]:
    for dtype in NUMBERS:
        for name, make in tensors(dtype):
            yield from rooted(dtype, name, make)

            def all_gather(at: Any, make: Any = make) -> list[Tensor]:
                out = [make(at, 9) for _ in range(WORLD)]
                dist.all_gather(out, make(at))
                return out

            yield Case(f"all_gather {dtype} {name}", all_gather)

            def coalesced(at: Any, make: Any = make) -> list[Tensor]:
                sent = [make(at), make(at, 1)[:2]] if make(at).dim() else [make(at)]
                out = [[torch.zeros_like(each) for each in sent] for _ in range(WORLD)]
                dist.all_gather_coalesced(out, sent)
                return [each for parts in out for each in parts]

            yield Case(f"all_gather_coalesced {dtype} {name}", coalesced)

        for name, part, all_ in divided(dtype):

            def into(at: Any, part: Any = part, all_: Any = all_) -> list[Tensor]:
                out = all_(at)
                dist.all_gather_into_tensor(out, part(at))
                return [out]

            yield Case(f"all_gather_into_tensor {dtype} {name}", into)

        for place in PLACES:
            for least in (0, 1):

                def unequal(
                    at: Any, dtype: Any = dtype, place: Any = place, least: int = least
                ) -> list[Tensor]:
                    # rank r sends r rows, or one more, to each
                    rows = list(range(least, WORLD + least))
                    out = placed(torch.zeros(sum(rows), 2, dtype=dtype), at, place)
                    x = placed(values(WORLD * rows[RANK], 2, dtype=dtype), at, place)
                    dist.all_to_all_single(out, x, rows, [rows[RANK]] * WORLD)
                    return [out]

                yield Case(f"all_to_all_single {dtype} {place.__name__} {least}", unequal)

        for name, _, all_ in divided(dtype):

            def equal(at: Any, all_: Any = all_) -> list[Tensor]:
                out = torch.zeros_like(all_(at))
                dist.all_to_all_single(out, all_(at))
                return [out]

            if name != "0-dim":
                yield Case(f"all_to_all_single in equal parts {dtype} {name}", equal)


def neighbours() -> Iterator[Case]:
    if WORLD == 1:
        return  # Gloo has no connection to itself
    right, left = (RANK + 1) % WORLD, (RANK - 1) % WORLD
    for dtype in NUMBERS:
        for name, make in tensors(dtype):

            def batch(at: Any, make: Any = make) -> list[Tensor]:
                out = make(at, 9)
                sent = make(at)
                ops = [dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, out, left)]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
                return [out]

            yield Case(f"batch_isend_irecv {dtype} {name}", batch)

            def one(at: Any, make: Any = make) -> list[Tensor]:
                out = make(at, 9)
                work = dist.isend(make(at), right, tag=5)
                dist.recv(out, left, tag=5)
                work.wait()
                return [out]

            yield Case(f"isend and recv {dtype} {name}", one)

    def from_anybody(at: Any) -> list[Tensor]:
        if RANK > 0:
            dist.send(at(values(3, dtype=torch.int64)), 0)
            return []
        out = [at(torch.zeros(3, dtype=torch.int64)) for _ in range(WORLD - 1)]
        for x in out:
            dist.recv(x)
        return [torch.stack(out).sum(0)]

    yield Case("recv from anybody", from_anybody)


@dataclass(frozen=True)
class Own:
    """What Gloo does not have: a call, and what it gives from `count` values of each rank."""

    name: str
    call: Callable[[Any], Tensor]
    combine: Callable[[list[Tensor]], Tensor]
    count: int = 3


def lists() -> Iterator[Own]:
    """Rank r sends its r-th part to each."""
    for dtype in NUMBERS:
        for place in (plain, column, later, single):
            count = 1 if place is single else 3

            def exchanged(at: Any, place: Any = place, dtype: Any = dtype) -> Tensor:
                sent = values(1 if place is single else 3, dtype=dtype)
                parts = [place(sent + 10 * r, at) for r in range(WORLD)]
                out = [place(torch.zeros_like(sent), at) for _ in range(WORLD)]
                dist.all_to_all(out, parts)
                return torch.stack(out).flatten() - 10 * RANK

            yield Own(f"all_to_all {dtype} {place.__name__}", exchanged, torch.cat, count)

    def nothing(at: Any) -> Tensor:
        out = [at(torch.zeros(0)) for _ in range(WORLD)]
        dist.all_to_all(out, [torch.zeros_like(each) for each in out])
        return torch.cat(out)

    yield Own("all_to_all torch.float32 empty", nothing, torch.cat, 0)


def several() -> Iterator[Case]:
    evens = dist.new_group(list(range(0, WORLD, 2)), backend="cpu:gloo,acc:acc")

    def subgroup(at: Any) -> list[Tensor]:
        x = at(values(3, dtype=torch.float32))
        if RANK % 2 == 0:
            dist.all_reduce(x, group=evens)
        dist.all_reduce(x)
        return [x]

    yield Case("a group on a subset, then all", subgroup)

    first = dist.new_group(list(range((WORLD + 1) // 2)), backend="cpu:gloo,acc:acc")

    def two_groups(at: Any) -> list[Tensor]:
        x = at(values(4, dtype=torch.float32))
        for group, inside in ((evens, RANK % 2 == 0), (first, RANK < (WORLD + 1) // 2)) * 2:
            if not inside:
                continue
            dist.all_reduce(x, group=group)
            dist.broadcast(x[1:3].clone(), 0, group=group)
            out = at(torch.zeros(4 * group.size()))
            dist.all_gather_into_tensor(out, x, group=group)
            dist.reduce_scatter_tensor(x, out, dist.ReduceOp.MAX, group=group)
        return [x]

    yield Case("several in two groups by turns", two_groups)

    def chain(at: Any) -> list[Tensor]:
        x = at(values(6, dtype=torch.float32))
        y = at(values(6, dtype=torch.float32, seed=1))
        first = dist.all_reduce(x, async_op=True)
        second = dist.all_reduce(y, async_op=True)
        second.wait()
        y.add_(1)
        first.wait()
        dist.broadcast(y, 0)
        return [x * y]

    yield Case("two at a time, waited for in the other order", chain)

    def coalescing(at: Any) -> list[Tensor]:
        xs = [at(values(n, dtype=torch.float32, seed=n)) for n in (1, 4, 9)]
        if at is torch.clone:  # Gloo has no such manager
            for x in xs:
                dist.all_reduce(x)
            return xs
        with dist._coalescing_manager(async_ops=True) as manager:
            for x in xs:
                dist.all_reduce(x)
        manager.wait()
        return xs

    yield Case("coalesced", coalescing)

    alone = dist.new_group(backend="acc")
    for name, group in (("objects", None), ("objects in memory of acc", alone)):

        def objects(at: Any, group: Any = group) -> list[Tensor]:
            mine = {"rank": RANK, "text": "x" * RANK}
            all_ = [{"rank": r, "text": "x" * r} for r in range(WORLD)]
            got: list[Any] = [None] * WORLD
            dist.all_gather_object(got, mine, group)
            assert got == all_
            sent = [f"from {RANK}"]
            dist.broadcast_object_list(sent, WORLD - 1, group)
            assert sent == [f"from {WORLD - 1}"]
            last = RANK == WORLD - 1
            got = [None] * WORLD
            dist.gather_object(mine, got if last else None, WORLD - 1, group)
            assert got == (all_ if last else [None] * WORLD)
            one: list[Any] = [None]
            dist.scatter_object_list(one, all_ if last else None, WORLD - 1, group)
            assert one == [mine]
            return []

        yield Case(name, objects)


def moves(dtype: torch.dtype) -> Iterator[Own]:
    """What only moves elements, of a type of which Gloo moves none or some."""

    def gathered(at: Any) -> Tensor:
        out = at(torch.zeros(3 * WORLD, dtype=dtype))
        dist.all_gather_into_tensor(out, at(values(3, dtype=dtype)))
        return out

    yield Own(f"all_gather_into_tensor {dtype}", gathered, torch.cat)

    def broadcast(at: Any) -> Tensor:
        x = at(values(3, dtype=dtype))
        dist.broadcast(x, WORLD - 1)
        return x

    yield Own(f"broadcast {dtype}", broadcast, lambda all_: all_[-1])

    def all_gather(at: Any) -> Tensor:
        out = [at(torch.zeros(3, dtype=dtype)) for _ in range(WORLD)]
        dist.all_gather(out, at(values(3, dtype=dtype)))
        return torch.cat(out)

    yield Own(f"all_gather {dtype}", all_gather, torch.cat)

    def there_and_back(at: Any) -> Tensor:
        mine = at(values(3, dtype=dtype))
        parts = [torch.zeros_like(mine) for _ in range(WORLD)]
        dist.gather(mine, parts if RANK == 0 else None, 0)
        out = torch.zeros_like(mine)
        dist.scatter(out, parts if RANK == 0 else None, 0)
        return out

    yield Own(f"gather, and scatter {dtype}", there_and_back, lambda all_: all_[RANK])

    def exchanged(at: Any) -> Tensor:
        mine = at(values(3, dtype=dtype))
        out = at(torch.zeros(3 * WORLD, dtype=dtype))
        dist.all_to_all_single(out, torch.cat([mine] * WORLD))
        return out

    yield Own(f"all_to_all_single {dtype}", exchanged, torch.cat)

    def around(at: Any) -> Tensor:
        out = at(torch.zeros(3, dtype=dtype))
        work = dist.isend(at(values(3, dtype=dtype)), (RANK + 1) % WORLD)
        dist.recv(out, (RANK - 1) % WORLD)
        work.wait()
        return out

    if WORLD > 1:
        yield Own(f"isend and recv {dtype}", around, lambda all_: all_[RANK - 1])


def own() -> Iterator[Own]:
    for dtype in OTHERS:
        yield from moves(dtype)

    def reduced(dtype: torch.dtype, op: Any) -> Callable[[Any], Tensor]:
        def call(at: Any) -> Tensor:
            x = at(values(3, dtype=dtype))
            dist.all_reduce(x, op)
            return x

        return call

    ops = dist.ReduceOp
    stacked = lambda all_: torch.stack(all_)  # noqa: E731
    yield Own("sum bool", reduced(torch.bool, ops.SUM), lambda a: stacked(a).any(0))
    yield Own("product bool", reduced(torch.bool, ops.PRODUCT), lambda a: stacked(a).all(0))
    yield Own("sum complex", reduced(torch.complex64, ops.SUM), lambda a: stacked(a).sum(0))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        yield Own(
            f"average {dtype}",
            reduced(dtype, ops.AVG),
            lambda a: stacked(a).float().mean(0).to(a[0].dtype),
        )
    yield Own(
        "average int32",
        reduced(torch.int32, ops.AVG),
        lambda a: stacked(a).sum(0).int() // WORLD,
    )
    yield Own(
        "a factor before",
        reduced(torch.float32, dist._make_nccl_premul_sum(0.5)),
        lambda a: stacked(a).sum(0) * 0.5,
    )

    def scattered(at: Any) -> Tensor:
        out = at(torch.zeros(2))
        inputs = at(values(2 * WORLD, dtype=torch.float32))
        dist.reduce_scatter_tensor(out, inputs, ops.AVG)
        torch.testing.assert_close(inputs.cpu(), values(2 * WORLD, dtype=torch.float32))
        gathered = at(torch.zeros(2 * WORLD))
        dist.all_gather_into_tensor(gathered, out)
        return gathered

    yield Own("reduce_scatter_tensor average", scattered, lambda a: stacked(a).mean(0), 2 * WORLD)

    def in_place(at: Any) -> Tensor:
        out = at(torch.zeros(2 * WORLD))
        mine = out[2 * RANK : 2 * RANK + 2]
        mine.copy_(at(values(2, dtype=torch.float32)))
        dist.all_gather_into_tensor(out, mine)
        return out

    yield Own("all_gather_into_tensor of a part of its output", in_place, torch.cat, 2)

    def into_input(at: Any) -> Tensor:
        parts = at(values(2 * WORLD, dtype=torch.float32))
        mine = parts[2 * RANK : 2 * RANK + 2]
        dist.reduce_scatter_tensor(mine, parts)
        gathered = at(torch.zeros(2 * WORLD))
        dist.all_gather_into_tensor(gathered, mine)
        mine.copy_(at(values(2 * WORLD, dtype=torch.float32))[2 * RANK : 2 * RANK + 2])
        torch.testing.assert_close(parts.cpu(), values(2 * WORLD, dtype=torch.float32))
        return gathered

    name = "reduce_scatter_tensor into a part of its input"
    yield Own(name, into_input, lambda a: stacked(a).sum(0), 2 * WORLD)


def compare(name: str, mine: list[Tensor], expected: list[Tensor]) -> str | None:
    for x, y in zip(mine, expected, strict=True):
        if x.device.type != "acc":
            return f"{name}: result on {x.device}"
        if not torch.equal(x.cpu(), y):
            return f"{name}: {x.cpu().tolist()} instead of {y.tolist()}"
    return None


def run(rank: int, world: int, device: torch.device) -> dict[str, Any]:
    """Names of the cases, and what was wrong. Of two processes at the same case none may leave."""
    global RANK, WORLD
    RANK, WORLD = rank, world

    def on_device(tensor: Tensor) -> Tensor:
        return tensor.to(device)

    wrong = []
    names = []
    for case in (*reductions(), *movements(), *managed(), *neighbours(), *several()):
        mine = case.run(on_device)
        expected = case.run(torch.clone)
        names.append(case.name)
        wrong.append(compare(case.name, mine, expected))
    for one in (*lists(), *own()):
        result = one.call(on_device)
        inputs: list[Any] = [None] * WORLD
        dist.all_gather_object(inputs, values(one.count, dtype=result.dtype))
        names.append(one.name)
        wrong.append(compare(one.name, [result], [one.combine(inputs)]))
    return {"names": names, "wrong": [text for text in wrong if text]}
