"""Do two modes compute the same thing? Digests of exact bits, and sketches for the rest.

The worker makes a `Checksum` after step 20; the driving process compares those of two modes and
needs no torch for it.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from benchmarks.cases import Tolerance


@dataclass(frozen=True)
class Checksum:
    """What a mode computed in its first steps.

    `digest` is a hash over the bits of all values and outputs; `values` what each step returned;
    `sketch` holds, per output tensor, its Euclidean norm and its projection on a fixed random
    vector of signs, which moves with any element that is wrong.
    """

    digest: str
    values: tuple[float, ...]
    sketch: tuple[tuple[float, float], ...]

    def to_json(self) -> dict[str, Any]:
        """Plain data for the pipe."""
        return asdict(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> Checksum:
        """The inverse of to_json after a round trip through JSON."""
        sketch = tuple((float(norm), float(projection)) for norm, projection in data["sketch"])
        return Checksum(data["digest"], tuple(map(float, data["values"])), sketch)


def checksum_of(values: Sequence[float], outputs: Sequence[torch.Tensor]) -> Checksum:
    """The checksum of what the steps returned and of the output tensors, on any device."""
    import torch

    digest = hashlib.blake2b(digest_size=16)
    for value in values:
        digest.update(struct.pack("<d", value))
    generator = torch.Generator().manual_seed(7)
    sketch = []
    for output in outputs:
        host = output.detach().to("cpu").contiguous()
        digest.update(f"{tuple(host.shape)}{host.dtype}".encode())
        digest.update(ctypes.string_at(host.data_ptr(), host.numel() * host.element_size()))
        flat = host.flatten().to(torch.float64)
        signs = torch.randint(0, 2, flat.shape, generator=generator, dtype=torch.float64)
        sketch.append((flat.norm().item(), flat.dot(2.0 * signs - 1.0).item()))
    return Checksum(digest.hexdigest(), tuple(values), tuple(sketch))


def _difference(expected: float, actual: float, scale: float) -> float:
    if not (math.isfinite(expected) and math.isfinite(actual)):
        return math.inf
    if expected == actual:
        return 0.0
    return abs(expected - actual) / max(abs(scale), 1e-12)


def mismatch(
    expected: Checksum, actual: Checksum, *, exact: bool, tolerance: Tolerance
) -> str | None:
    """Why `actual` is not what `expected` is, in one line; None when they agree.

    With `exact` every bit counts, else the bounds of `tolerance`. A value that is not finite
    never agrees, in either way of comparing.
    """
    for index, value in enumerate(actual.values):
        if not math.isfinite(value):
            return f"step {index + 1} returned {value}"
    if len(expected.values) != len(actual.values):
        return f"{len(actual.values)} steps instead of {len(expected.values)}"
    if len(expected.sketch) != len(actual.sketch):
        return f"{len(actual.sketch)} outputs instead of {len(expected.sketch)}"
    if exact and expected.digest == actual.digest:
        return None
    first_step = None
    for index, (want, got) in enumerate(zip(expected.values, actual.values, strict=True)):
        bound = 0.0 if exact else (tolerance.later if index else tolerance.first)
        if _difference(want, got, want) > bound:
            first_step = f"step {index + 1} returned {got!r} instead of {want!r}"
            break
    if first_step is not None:
        return first_step
    for index, (want, got) in enumerate(zip(expected.sketch, actual.sketch, strict=True)):
        bound = 0.0 if exact else tolerance.outputs
        worst = max(_difference(w, g, want[0]) for w, g in zip(want, got, strict=True))
        if worst > bound:
            return f"output {index} differs by {worst:.2e} of its norm after the last step"
    if exact:
        return "outputs differ in bits that neither norm nor projection shows"
    return None
