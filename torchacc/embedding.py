"""Embedding tables by id: any int64 may name a row, and equal ids are looked up once.

What TI-ACC has for TensorFlow as `tiacc_training.tensorflow.get_variable`, for PyTorch: a table
whose rows are given to ids as these are first seen, hashes of features for example, and the two
lookups of TensorFlow on it.

    table = torchacc.embedding.get_variable("ads", dim=16, capacity=100_000)
    vectors = torchacc.embedding.embedding_lookup(table, ids)  # (*ids.shape, 16)
    pooled = torchacc.embedding.embedding_lookup_sparse(table, (values, offsets), combiner="mean")

Which row an id has is known on the host, and a lookup reads its ids there. That splits the step
where the step itself has computed the ids, or where a batch of the loader is read behind operators
that are recorded already. Ids that are on the host, or a batch that is read first in the step,
split nothing; for several lookups of one batch read it once (`ids = ids.cpu()`). What follows is
recorded. The number of distinct ids is another one in each batch: it is rounded up to a power of
two, so that few plans are made. `torchacc.capture` leaves out what a step does on the host, and
takes no step with a lookup.
"""

from __future__ import annotations

import array
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchacc.dist import rendezvous

__all__ = ["DynamicEmbedding", "embedding_lookup", "embedding_lookup_sparse", "get_variable"]

# Of all tables: a lock in each could not be copied or pickled with it.
_LOCK = threading.Lock()
# The sum of the weights to this power, and the root of it, is what a combiner divides by.
_POWERS = {"sum": 0, "mean": 1, "sqrtn": 2}


class DynamicEmbedding(nn.Module):
    """A table of `capacity` vectors, which ids get in the order in which they are first seen.

    Those that are new in the same lookup get theirs in ascending order. All vectors are there
    from the beginning, with their first values: `weight`, of (capacity + 1, dim), is one parameter
    that never grows, so that an optimizer may be built at any time. Gradients are as large as it
    is, as with `nn.Embedding`, and so are the optimizer's states; a weight decay acts on rows that
    no id has yet, too.

    When training, an id that is new gets the next row. After `eval()` it gets none, and its vector
    is the last row, which begins as zeros. A table that is full refuses further ids: no id loses
    its row.

    Which ids have which rows is part of `state_dict()`.

    Several processes that train together have to give the same rows: there a lookup refuses new
    ids, and `add`, which all call, gives them theirs. Each process holds the whole table.

    Args:
        name: what errors call the table.
        dim: the length of a vector.
        initializer: fills a tensor (capacity, dim) in place, as the functions of `torch.nn.init`
            do; None is the standard normal distribution, as in `nn.Embedding`.
        capacity: how many ids may have a row.
        device, dtype: of `weight`.

    Raises:
        ValueError: `dim` or `capacity` is not a whole number of at least 1.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        initializer: Callable[[Tensor], object] | None = None,
        *,
        capacity: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for what, number in (("dim", dim), ("capacity", capacity)):
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ValueError(
                    f"[embedding] {name}: {what} should be a whole number of at least 1, not "
                    f"{number!r}."
                )
        self.name, self.dim, self.capacity = name, dim, capacity
        self.initializer = nn.init.normal_ if initializer is None else initializer
        self.weight = nn.Parameter(torch.empty(capacity + 1, dim, device=device, dtype=dtype))
        self._rows: dict[int, int] = {}
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Gives all rows first values, and takes them from the ids that had them."""
        self.initializer(self.weight[: self.capacity])
        self.weight[self.capacity :].zero_()
        self._rows.clear()

    @property
    def ids(self) -> Tensor:
        """The ids that have a row, in the order of the rows: (n,) int64 on the CPU."""
        with _LOCK:
            return torch.tensor(list(self._rows), dtype=torch.int64)

    def forward(self, ids: Tensor) -> Tensor:
        """`embedding_lookup(self, ids)`."""
        return embedding_lookup(self, ids)

    def add(self, ids: Tensor) -> None:
        """Gives rows to those of `ids` that have none, in the order in which they stand.

        In several processes all have to call it, each with the ids that it is going to look up; all
        ids get the same rows everywhere, those of the first process first.

        Raises:
            TypeError: `ids` are no integers.
            ValueError: there are not as many rows left: none is given.
            RuntimeError: the processes had given rows to different ids before, or one of them does
                not call this.
        """
        asked = self._on_host(ids).flatten().tolist()
        if _is_one_of_several():
            new = [key for key in dict.fromkeys(asked) if key not in self._rows]
            told = array.array("q", [hash(tuple(self._rows)), *new]).tobytes()
            # On the host: tensors of the device would make a plan for each number of ids.
            everyone = [
                memoryview(each).cast("q").tolist()
                for each in rendezvous(f"torchacc.embedding, table {self.name}", told)
            ]
            if len({known for known, *_ in everyone}) > 1:
                raise RuntimeError(
                    f"[embedding] {self.name}: the processes have given rows to different ids, "
                    f"this one to {len(self._rows)}. Load the same state in all of them, and give "
                    "rows by `add` alone."
                )
            asked = [key for _, *new in everyone for key in new]
        with _LOCK:
            self._give(asked)

    def get_extra_state(self) -> Tensor:
        """`ids`, for `state_dict()`."""
        return self.ids

    def set_extra_state(self, state: Tensor) -> None:
        """Gives the rows to the ids of a `state_dict()`, in their order."""
        with _LOCK:
            self._rows = {key: row for row, key in enumerate(state.tolist())}

    def extra_repr(self) -> str:
        return f"{self.name!r}, dim={self.dim}, {len(self._rows)} of {self.capacity} rows given"

    def _on_host(self, ids: Tensor) -> Tensor:
        if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.is_complex():
            kind = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise TypeError(
                f"[embedding] {self.name}: ids are a tensor of integers, not {kind}. Hash what is "
                "no number to int64 first."
            )
        return ids.detach().to("cpu", torch.int64)

    def _give(self, ids: Iterable[int]) -> None:
        """Gives the next rows to those of `ids` that have none; the lock is held."""
        new = [key for key in dict.fromkeys(ids) if key not in self._rows]
        first = len(self._rows)
        if first + len(new) > self.capacity:
            raise ValueError(
                f"[embedding] {self.name}: {first} of {self.capacity} rows are given, and "
                f"{len(new)} ids are new (the first is {new[0]}). Raise capacity, or map rare ids "
                "to one."
            )
        self._rows.update(zip(new, range(first, first + len(new)), strict=True))

    def _find(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the distinct ids, and where each id (n,) stands among them; on the host.

        The rows are as many as the next power of two; those that are too many are the last row.
        """
        distinct, place = torch.unique(ids, return_inverse=True)
        keys = distinct.tolist()
        with _LOCK:
            none = itertools.repeat(self.capacity)
            rows = array.array("q", map(self._rows.get, keys, none))
            if self.training and self.capacity in rows:
                if _is_one_of_several():
                    raise RuntimeError(
                        f"[embedding] {self.name}: {rows.count(self.capacity)} ids are new, and "
                        "several processes train together, which have to give the same rows. Call "
                        "add(ids) in all of them before the lookup."
                    )
                self._give(keys)
                rows = array.array("q", map(self._rows.__getitem__, keys))
        rows.extend([self.capacity] * (_rounded(len(rows)) - len(rows)))
        return torch.frombuffer(rows, dtype=torch.int64), place


def get_variable(
    name: str,
    dim: int,
    initializer: Callable[[Tensor], object] | None = None,
    *,
    capacity: int,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> DynamicEmbedding:
    """A new table for `embedding_lookup`; see `DynamicEmbedding` for the arguments.

    Unlike TensorFlow's, a second call with the same name makes another table: keep the first one.
    """
    return DynamicEmbedding(name, dim, initializer, capacity=capacity, device=device, dtype=dtype)


def embedding_lookup(params: DynamicEmbedding, ids: Tensor) -> Tensor:
    """The vectors of `ids`, which has any shape: (*ids.shape, dim), on the table's device.

    Raises:
        TypeError: `params` is no table, or `ids` are no integers.
        ValueError: the table is full, and an id is new.
        RuntimeError: an id is new, and several processes train together.
    """
    _check_table(params)
    on_host = params._on_host(ids)
    rows, place = params._find(on_host.flatten())
    return _gather(params.weight, rows, place).view(*on_host.shape, params.dim)


def embedding_lookup_sparse(
    params: DynamicEmbedding,
    sp_ids: Tensor | tuple[Tensor, Tensor],
    sp_weights: Tensor | None = None,
    combiner: str = "mean",
) -> Tensor:
    """One vector for each of several bags of ids: (bags, dim), on the table's device.

    The combiners are those of TensorFlow's documentation (`tf.nn.embedding_lookup_sparse`): "sum"
    adds the vectors times their weights, "mean" divides that by the sum of the weights, and "sqrtn"
    by the root of the sum of their squares. Where that is 0, and for a bag without ids, which
    TensorFlow does not define, the result is 0.

    Args:
        params: the table.
        sp_ids: a jagged tensor (`torch.nested`, layout `torch.jagged`) of two dimensions, or the
            pair (values, offsets): all ids in a row, and where the bags begin, with the number of
            ids at the end, which is `nn.EmbeddingBag`'s form with `include_last_offset=True`.
        sp_weights: a weight for each id, in the same order: a jagged tensor, or (number of ids,).
            None is 1 for each. Read on the host, as the ids are; gradients reach them.
        combiner: "sum", "mean" or "sqrtn".

    Raises:
        TypeError: `params` is no table, or `sp_ids` are not jagged or no integers.
        ValueError: offsets, weights and ids do not go together, there is no such combiner, or the
            table is full and an id is new.
        RuntimeError: an id is new, and several processes train together.
    """
    _check_table(params)
    if combiner not in _POWERS:
        raise ValueError(
            f"[embedding] {params.name}: combiner should be one of {', '.join(_POWERS)}, not "
            f"{combiner!r}."
        )
    ids, offsets = _jagged(params, sp_ids)
    counts = offsets.diff()
    bags, length = len(counts), _rounded(len(ids))
    bag = torch.repeat_interleave(torch.arange(bags), counts)
    weights = _weights(params, sp_weights, len(ids))
    # Sums of 16 bits would stop growing.
    dtype = torch.promote_types(params.weight.dtype, torch.float32)
    if weights is not None or combiner != "sum":
        weights = _divided(weights, bag, bags, _POWERS[combiner], dtype)
    rows, place = params._find(ids)
    found = _gather(params.weight, rows, _padded(place, length, 0)).to(dtype)
    if weights is not None:
        found = found * _padded(weights, length, 0).to(found.device)[:, None]
    # What the padding has found goes into one more bag, which nobody sees.
    into = _padded(bag, length, bags).to(found.device)
    pooled = found.new_zeros(bags + 1, params.dim).index_add(0, into, found)[:bags]
    return pooled.to(params.weight.dtype)


def _check_table(params: object) -> None:
    if not isinstance(params, DynamicEmbedding):
        raise TypeError(
            "[embedding] params should be a table that get_variable has made, not "
            f"{type(params).__name__}. For a weight whose rows are numbered use "
            "torch.nn.functional.embedding or embedding_bag."
        )


def _gather(weight: Tensor, rows: Tensor, place: Tensor) -> Tensor:
    """Rows of the table, once each, and then from these: (len(place), dim)."""
    distinct = weight.index_select(0, rows.to(weight.device))
    return distinct.index_select(0, place.to(weight.device))


def _jagged(params: DynamicEmbedding, sp_ids: Any) -> tuple[Tensor, Tensor]:
    """Ids (n,) and offsets (bags + 1,), on the host."""
    if isinstance(sp_ids, Tensor) and sp_ids.layout is torch.jagged:
        packed: Any = sp_ids.contiguous()
        values, offsets = packed.values(), packed.offsets()
    elif isinstance(sp_ids, (tuple, list)) and len(sp_ids) == 2:
        values, offsets = sp_ids
    else:
        raise TypeError(
            f"[embedding] {params.name}: sp_ids should be a jagged tensor or a pair (values, "
            f"offsets), not {type(sp_ids).__name__}. For as many ids in each bag use "
            "embedding_lookup and sum."
        )
    ids, offsets = params._on_host(values), params._on_host(offsets)
    if ids.dim() != 1:
        raise ValueError(
            f"[embedding] {params.name}: the ids of all bags are one row, not {tuple(ids.shape)}."
        )
    ends = offsets.dim() == 1 and len(offsets) > 0
    if not ends or offsets[0] != 0 or offsets[-1] != len(ids) or (offsets.diff() < 0).any():
        raise ValueError(
            f"[embedding] {params.name}: offsets should go from 0 to the number of ids, "
            f"{len(ids)}, which is the last of them, and never fall, unlike {offsets.tolist()}."
        )
    return ids, offsets


def _weights(params: DynamicEmbedding, sp_weights: Tensor | None, count: int) -> Tensor | None:
    """The weights (count,), on the host."""
    if sp_weights is None:
        return None
    if sp_weights.layout is torch.jagged:
        packed: Any = sp_weights.contiguous()
        sp_weights = packed.values()
    if sp_weights.shape != (count,):
        raise ValueError(
            f"[embedding] {params.name}: there are {count} ids, and sp_weights of the shape "
            f"{tuple(sp_weights.shape)}. Each id has one weight, in the same order."
        )
    return sp_weights.cpu()


def _divided(
    weights: Tensor | None, bag: Tensor, bags: int, power: int, dtype: torch.dtype
) -> Tensor:
    """What each vector is multiplied by: its weight, divided as the combiner says.

    `bag` says which of the `bags` each id is in.
    """
    weights = torch.ones(len(bag), dtype=dtype) if weights is None else weights.to(dtype)
    if power == 0:
        return weights
    sums = torch.zeros(bags, dtype=dtype).index_add(0, bag, weights**power)
    # Not 0 even where the result is not used: its derivative would be no number.
    roots = sums.where(sums != 0, torch.ones_like(sums)) ** (1 / power)
    return weights * (sums != 0)[bag] / roots[bag]


def _padded(values: Tensor, length: int, value: int) -> Tensor:
    return nn.functional.pad(values, (0, length - len(values)), value=value)


def _rounded(count: int) -> int:
    """The next power of two, at least 1."""
    return 1 << max(count - 1, 0).bit_length()


def _is_one_of_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
