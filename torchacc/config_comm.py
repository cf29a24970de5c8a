"""The part `dist.comm` of the configuration: how data parallel training exchanges gradients.

The defaults of most options come from the environment, under the names that TI-ACC's launcher
documents; what a program assigns wins. A variable is read whenever a Config is made.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchacc.config_node import Node, is_bool, is_int, is_str, made_setting, optional, setting

COMPRESSIONS = ("fp16", "bf16")
AUTO = "auto"  # of fusion_threshold: measured


def _flag(name: str) -> Callable[[], bool]:
    def read() -> bool:
        text = os.environ.get(name, "")
        if text not in ("", "0", "1"):
            raise ValueError(f"[config] {name}={text} in the environment should be 0 or 1.")
        return text == "1"

    return read


def _number(name: str, default: Any, kind: type[int] | type[float]) -> Callable[[], Any]:
    def read() -> Any:
        text = os.environ.get(name, "")
        if not text:
            return default
        try:
            return kind(text)
        except ValueError:
            raise ValueError(
                f"[config] {name}={text} in the environment should be a number "
                f"({kind.__name__}), for example {default if default is not None else 8}."
            ) from None

    return read


def _bytes_or_auto(name: str) -> Callable[[], int | str | None]:
    number = _number(name, None, int)
    return lambda: AUTO if os.environ.get(name) == AUTO else number()


def _is_bytes_or_auto(value: Any) -> bool:
    return is_int(value) or value == AUTO


def _is_number(value: Any) -> bool:
    return is_int(value) or isinstance(value, float)


@dataclass(eq=True)
class CommConfig(Node):
    """How gradients are exchanged in data parallel training.

    `fusion_threshold` is how many bytes of gradients are sent together; None leaves that to
    DistributedDataParallel (25 MiB), and "auto" measures a few all-reduces first: the size follows
    from their latency, their bandwidth and the model (torchacc.dist.cost). `compression`, "fp16" or
    "bf16", sends gradients in that type and adds what rounding them lost to the next step's; their
    sum is rounded too. `topk` sends only the share `topk_ratio` of the largest elements of buckets
    of at least `topk_threshold` bytes, and adds the rest to the next step's; `topk_fp16` sends
    their values in float16. `hierarchical` sums buckets of less than `hierarchical_threshold` bytes
    within each machine first (`intra_size` processes each; None: as many as were started on each,
    8 where no launcher says it), then across machines, each process its part. With `streams` above
    1 buckets take turns on as many groups of the same processes, so that several are under way on
    streams of a GPU, or connections, of their own.
    """

    fusion_threshold: int | str | None = made_setting(
        _bytes_or_auto("TIACC_TRAINING_FUSION_THRESHOLD"),
        optional(_is_bytes_or_auto),
        "of int type, 'auto' or None",
    )
    compression: str | None = setting(None, optional(is_str), "of str type, or None")
    hierarchical: bool = made_setting(_flag("LIGHT_2D_ALLREDUCE"), is_bool, "of bool type")
    intra_size: int | None = made_setting(
        _number("LIGHT_INTRA_SIZE", None, int), optional(is_int), "of int type, or None"
    )
    hierarchical_threshold: int = made_setting(
        _number("LIGHT_HIERARCHICAL_THRESHOLD", 1 << 30, int), is_int, "of int type"
    )
    topk: bool = made_setting(_flag("LIGHT_TOPK_ALLREDUCE"), is_bool, "of bool type")
    topk_ratio: float = made_setting(
        _number("LIGHT_TOPK_RATIO", 0.01, float), _is_number, "a number"
    )
    topk_threshold: int = made_setting(
        _number("LIGHT_TOPK_THRESHOLD", 1 << 20, int), is_int, "of int type"
    )
    topk_fp16: bool = made_setting(_flag("LIGHT_TOPK_FP16"), is_bool, "of bool type")
    streams: int = made_setting(
        _number("TIACC_TRAINING_NUM_NCCL_STREAMS", 1, int), is_int, "of int type"
    )

    _path = "dist.comm"

    def _validate(self) -> None:
        for name in ("fusion_threshold", "intra_size", "streams"):
            if getattr(self, name) != AUTO:
                self._at_least(name, 1)
        for name in ("hierarchical_threshold", "topk_threshold"):
            self._at_least(name, 0)
        if not 0 < self.topk_ratio <= 1:
            self._bad("topk_ratio", self.topk_ratio, "should be above 0 and at most 1.")
        if self.compression not in (None, *COMPRESSIONS):
            self._bad("compression", self.compression, "should be 'fp16', 'bf16' or None.")
        chosen = [name for name in ("compression", "topk", "hierarchical") if getattr(self, name)]
        if len(chosen) > 1:
            second = chosen[1]
            self._bad(
                second,
                getattr(self, second),
                f"dist.comm.{chosen[0]} is set too, and a bucket is exchanged in one way. "
                "Set one of them.",
            )

    def is_default(self) -> bool:
        """Whether gradients are exchanged by plain all-reduces."""
        return not set(self.changed()) - {"fusion_threshold"}

    def changed(self) -> list[str]:
        """The options that ask for another exchange than DistributedDataParallel's own."""
        asked = {
            "fusion_threshold": self.fusion_threshold is not None,
            "compression": self.compression is not None,
            "topk": self.topk,
            "hierarchical": self.hierarchical,
            "streams": self.streams > 1,
        }
        return [name for name, is_asked in asked.items() if is_asked]
