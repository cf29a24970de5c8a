"""Pads batches of variable length to a few lengths, so that few shapes reach the device."""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from torchacc.logger import logger, say_once
from torchacc.partition import best_cuts
from torchacc.utils.utils import mapping_like

DEFAULT_PAD_VALUES: Mapping[str, int] = {"input_ids": 0, "attention_mask": 0, "labels": -100}
DEFAULT_BUCKETS = 8
# In place of a list of buckets: they are learnt, from so many batches.
AUTO = "auto"
LEARNING_BATCHES = 100


def uniform_buckets(max_length: int, num_buckets: int) -> list[int]:
    """`num_buckets` equal steps up to `max_length`, rounded up; the last one is `max_length`."""
    return sorted({-(-max_length * i // num_buckets) for i in range(1, num_buckets + 1)})


def least_padding(rows: Mapping[int, int], num_buckets: int) -> list[int]:
    """The at most `num_buckets` lengths to which the fewest elements have to be added.

    `rows` says how many rows of each length there are. The longest length is always a bucket.
    """
    lengths = sorted(rows)
    before = [0, *accumulate(rows[length] for length in lengths)]

    def elements(begin: int, end: int) -> int:
        return lengths[end - 1] * (before[end] - before[begin])

    return [lengths[end - 1] for end in best_cuts(len(lengths), num_buckets, elements)]


def contradiction(
    buckets: Sequence[int] | str | None, max_length: int | None, num_buckets: int | None
) -> tuple[str, str] | None:
    """The option that cannot be as it is, and why; None where the three go together."""
    numbers = (("max_length", max_length), ("num_buckets", num_buckets))
    for name, number in numbers:
        if number is not None and number < 1:
            return name, "should be at least 1."
    if buckets is None:
        if num_buckets is not None and max_length is None:
            return "num_buckets", f"it divides max_length: set that too, or buckets = {AUTO!r}."
        return None
    if isinstance(buckets, str):
        return None if buckets == AUTO else ("buckets", f"should be a list of int, or {AUTO!r}.")
    if not buckets or min(buckets) < 1:
        return "buckets", "should be lengths of at least 1."
    for name, number in numbers:
        if number is not None:
            return name, f"buckets = {list(buckets)} names all lengths. Leave one of them None."
    return None


class Buckets:
    """The lengths to pad to. What is longer than all of them stays as long as it is."""

    def __init__(self, lengths: Iterable[int]) -> None:
        self._lengths = sorted(set(lengths))

    def learn(self, tensors: Iterable[Tensor]) -> None:
        """Takes notice of the tensors of another batch, the last dimension of which is padded."""

    def next(self, length: int) -> int:
        """The bucket for `length`, which is at least as long."""
        at = bisect.bisect_left(self._lengths, length)
        if at == len(self._lengths):
            return self._above(length, self._lengths[-1])
        return self._lengths[at]

    def _above(self, length: int, largest: int) -> int:
        """What a length above the largest bucket is padded to."""
        say_once(
            "bucketing-length",
            f"[bucketing] a batch of length {length} is longer than the largest bucket "
            f"({largest}); such lengths are not padded and each makes a plan of its own. Raise "
            "dataloader.max_length, or add to dataloader.buckets.",
        )
        return length


class LearntBuckets(Buckets):
    """Learns from the first `LEARNING_BATCHES` batches which lengths to pad to.

    Meanwhile it is powers of two, up to `max_length`. Then the `num_buckets` lengths are taken that
    would have padded these batches the least; the last is `max_length`, or else the longest that
    was seen. From then on they do not change, but that without `max_length` a longer length adds
    one, the next power of two. So there are never more than log2 of the longest length + 1 lengths
    besides those learnt. The same batches in the same order make the same buckets; what was read
    ahead of a pass that was left early counts, too.
    """

    def __init__(self, num_buckets: int, max_length: int | None) -> None:
        super().__init__(())
        self._num_buckets = num_buckets
        self._max_length = max_length
        self._left = LEARNING_BATCHES
        self._rows = Counter[int]() if max_length is None else Counter({max_length: 0})

    def learn(self, tensors: Iterable[Tensor]) -> None:
        if self._left == 0:
            return
        for tensor in tensors:
            if self._max_length is None or tensor.shape[-1] <= self._max_length:
                self._rows[tensor.shape[-1]] += tensor.shape[:-1].numel()
        self._left -= 1
        if self._left == 0:
            self._lengths = least_padding(self._rows, self._num_buckets)
            logger.info(
                "buckets learnt from the lengths of %d batches: %s", LEARNING_BATCHES, self._lengths
            )

    def next(self, length: int) -> int:
        if self._left == 0:
            return super().next(length)
        if self._max_length is None:
            return _power_of_two(length)
        if length > self._max_length:
            return self._above(length, self._max_length)
        return min(_power_of_two(length), self._max_length)

    def _above(self, length: int, largest: int) -> int:
        if self._max_length is not None:
            return super()._above(length, largest)
        self._lengths.append(_power_of_two(length))
        return self._lengths[-1]


def _power_of_two(length: int) -> int:
    return 1 << max(length - 1, 0).bit_length()


def buckets_of(
    buckets: Sequence[int] | str | None, max_length: int | None, num_buckets: int | None
) -> Buckets | None:
    """What the three options ask for; None for no padding. `contradiction` has found nothing."""
    count = DEFAULT_BUCKETS if num_buckets is None else num_buckets
    if isinstance(buckets, str):
        return LearntBuckets(count, max_length)
    if buckets is not None:
        return Buckets(buckets)
    return None if max_length is None else Buckets(uniform_buckets(max_length, count))


class Bucketing:
    """Pads the last dimension of the named tensors of a batch to the next bucket.

    Each tensor has its own length. Those that share one are padded alike: the buckets are the same
    for all. Tensors of one dimension are padded only where no named tensor of the batch has more;
    beside rows, they hold a number for each row.

    Args:
        buckets: which lengths there are.
        pad_values: key to what the padding holds; None is `DEFAULT_PAD_VALUES`, and then floating
            point `labels` are left alone: those of tokens are integers; and an `attention_mask` of
            a floating point type and more than two dimensions, which is added to scores. A key that
            no batch has, or under which one holds no tensor, is passed over.
    """

    def __init__(self, buckets: Buckets, pad_values: Mapping[str, float] | None = None) -> None:
        self._buckets = buckets
        self._by_default = pad_values is None
        self._pad_values = dict(DEFAULT_PAD_VALUES if pad_values is None else pad_values)
        # The keys of the first batch, and those of them that are named.
        self._first: tuple[list[str], set[str]] | None = None
        # Two passes over one loader at once have a thread each.
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def pad(self, batch: Any) -> Any:
        """The padded batch; `batch` itself when there is nothing to pad. CPU tensors only.

        `batch` is a mapping from str to anything; what is no mapping is returned as it is, and said
        once. Raises ValueError for one that has others of the named keys than the first batch had,
        and for a tensor that cannot be padded so.
        """
        if not isinstance(batch, Mapping):
            say_once(
                "bucketing-type",
                f"[bucketing] a batch is {type(batch).__name__}, only mappings can be padded. "
                "Let the collate function return a dict, or unset dataloader.buckets.",
            )
            return batch
        self._check_keys(batch)
        named = self._named(batch)
        if not named:
            say_once(
                "bucketing-keys",
                f"[bucketing] a batch with the keys {sorted(map(str, batch))} has no tensor to pad "
                f"under one of {sorted(map(str, self._pad_values))}: not padded. Name its tensors "
                "in dataloader.pad_value_dict.",
            )
            return batch
        with self._lock:
            self._buckets.learn(named.values())
            lengths = sorted({tensor.shape[-1] for tensor in named.values()})
            bucket_of = {length: self._buckets.next(length) for length in lengths}
        missing = {length: bucket - length for length, bucket in bucket_of.items()}
        if not any(missing.values()):
            return batch
        self._point_out(batch, named, missing)
        padded = dict(batch)
        for key, tensor in named.items():
            if missing[tensor.shape[-1]]:
                padded[key] = self._padded(key, tensor, missing[tensor.shape[-1]])
        for length, bucket in bucket_of.items():
            logger.debug(
                "original length: %d, bucket length: %d, padding length: %d",
                length,
                bucket,
                missing[length],
            )
        return mapping_like(batch, padded)

    def _padded(self, key: str, tensor: Tensor, count: int) -> Tensor:
        value = self._pad_values[key]
        try:
            # Fractions, infinities and NaN; torch would cut fractions off.
            if value % 1 and not (tensor.is_floating_point() or tensor.is_complex()):
                raise ValueError("it holds whole numbers")
            return torch.nn.functional.pad(tensor, (0, count), value=value)
        except Exception as error:
            said, _, _ = str(error).partition("\n")
            raise ValueError(
                f"[bucketing] batch[{key!r}] of {tensor.dtype} and shape {list(tensor.shape)} "
                f"cannot be padded to {tensor.shape[-1] + count} with {value!r} "
                f"(dataloader.pad_value_dict): {said}."
            ) from error

    def _check_keys(self, batch: Mapping[str, Any]) -> None:
        """Raises ValueError where others of the named keys are there than in the first batch."""
        present = {key for key in self._pad_values if key in batch}
        with self._lock:
            if self._first is None:
                self._first = list(batch), present
            keys, expected = self._first
        if present == expected:
            return
        differences = [
            f"{', '.join(sorted(map(repr, names)))} {what}"
            for names, what in ((expected - present, "missing"), (present - expected, "new"))
            if names
        ]
        raise ValueError(
            f"[bucketing] batch.keys() = {list(batch)!r}: of what is padded, "
            f"{' and '.join(differences)}; the first batch of the loader had {keys!r}. Let the "
            "collate function give all batches the same keys, or name in "
            "dataloader.pad_value_dict only those that all have."
        )

    def _named(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tensors that have a length to be padded."""
        found = {key: batch[key] for key in self._pad_values if key in batch}
        found = {key: t for key, t in found.items() if isinstance(t, Tensor) and t.dim() > 0}
        if self._by_default:
            # Targets of a regression, and what is added to scores: 0 would mean "attend" there.
            for key, dims in (("labels", 0), ("attention_mask", 2)):
                if key in found and found[key].is_floating_point() and found[key].dim() > dims:
                    del found[key]
        rows = any(tensor.dim() > 1 for tensor in found.values())
        return {key: tensor for key, tensor in found.items() if tensor.dim() > 1 or not rows}

    def _point_out(
        self, batch: Mapping[str, Any], named: Mapping[str, Tensor], missing: Mapping[int, int]
    ) -> None:
        """Says what of a batch does not know of the padding, and may have to."""
        tokens = named.get("input_ids") if self._by_default else None
        if tokens is not None and "attention_mask" not in batch and missing[tokens.shape[-1]]:
            say_once(
                "bucketing-mask",
                "[bucketing] 'input_ids' is padded with token 0, and the batch has no "
                "'attention_mask' that tells these tokens from others. Add one to it, or say in "
                "dataloader.pad_value_dict what is padded with what.",
            )
        for key, value in batch.items():
            if key in named or not isinstance(value, Tensor):
                continue
            if value.dim() > 1 and missing.get(value.shape[-1]):
                say_once(
                    ("bucketing-unnamed", key),
                    f"[bucketing] {key!r} is as long as the padded tensors ({value.shape[-1]}) and "
                    "is not padded. Name it in dataloader.pad_value_dict.",
                )
