"""Pads batches of variable length to a few lengths, so that few shapes reach the device."""

from __future__ import annotations

import bisect
import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from torchacc.logger import logger, say_once

DEFAULT_PAD_VALUES: Mapping[str, int] = {"input_ids": 0, "attention_mask": 0, "labels": -100}
DEFAULT_BUCKETS = 8


def uniform_buckets(max_length: int, num_buckets: int) -> list[int]:
    """`num_buckets` equal steps up to `max_length`, rounded up; the last one is `max_length`."""
    return sorted({-(-max_length * i // num_buckets) for i in range(1, num_buckets + 1)})


class Bucketing:
    """Pads the last dimension of the named tensors of a batch to the next bucket.

    The length of a batch is the last dimension of the first tensor that `pad_values` names. A batch
    longer than every bucket gets a bucket of its own length.
    """

    def __init__(self, buckets: list[int], pad_values: Mapping[str, float] | None = None) -> None:
        self._buckets = sorted(set(buckets))
        self._pad_values = dict(DEFAULT_PAD_VALUES if pad_values is None else pad_values)

    def pad(self, batch: Any) -> Any:
        """The padded batch; `batch` itself when there is nothing to pad. CPU tensors only.

        `batch` is a mapping from str to anything; what is no mapping is returned as it is, and said
        once.
        """
        if not isinstance(batch, Mapping):
            say_once(
                "bucketing-type",
                f"[bucketing] a batch is {type(batch).__name__}, only mappings can be padded. "
                "Let the collate function return a dict, or unset dataloader.buckets.",
            )
            return batch
        named = {
            key: batch[key]
            for key in self._pad_values
            if key in batch and isinstance(batch[key], Tensor) and batch[key].dim() > 0
        }
        if not named:
            say_once(
                "bucketing-keys",
                f"[bucketing] a batch with the keys {sorted(map(str, batch))} has none of "
                f"{sorted(self._pad_values)}: not padded. Name its tensors in "
                "dataloader.pad_value_dict.",
            )
            return batch
        length = next(iter(named.values())).shape[-1]
        bucket = self._bucket(length)
        if bucket == length:
            return batch
        self._warn_of_unnamed(batch, length)
        padded = copy.copy(batch) if type(batch) is not dict else dict(batch)
        for key, tensor in named.items():
            if tensor.shape[-1] == length:
                padded[key] = torch.nn.functional.pad(
                    tensor, (0, bucket - length), value=self._pad_values[key]
                )
        logger.debug(
            "original length: %d, bucket length: %d, padding length: %d",
            length,
            bucket,
            bucket - length,
        )
        return padded

    def _bucket(self, length: int) -> int:
        at = bisect.bisect_left(self._buckets, length)
        if at == len(self._buckets):
            say_once(
                "bucketing-length",
                f"[bucketing] a batch of length {length} is longer than the largest bucket "
                f"({self._buckets[-1]}); such lengths are not padded and each makes a plan of its "
                "own. Raise dataloader.max_length.",
            )
            self._buckets.append(length)
        return self._buckets[at]

    def _warn_of_unnamed(self, batch: Mapping[str, Any], length: int) -> None:
        for key, value in batch.items():
            if key in self._pad_values or not isinstance(value, Tensor):
                continue
            if value.dim() > 1 and value.shape[-1] == length:
                say_once(
                    ("bucketing-unnamed", key),
                    f"[bucketing] {key!r} is as long as the padded tensors ({length}) and is not "
                    "padded. Name it in dataloader.pad_value_dict.",
                )
