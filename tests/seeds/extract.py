"""Takes the training scripts out of the documents, at test time; none of their text is kept here.

The documents lie in `ACC_SEEDS_DIR`, by default `../shared/seeds` relative to the repository.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from tests.helpers import ROOT

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class SeedError(Exception):
    """A document is not as these tests know it. The text says what was looked for."""


def folder() -> Path:
    """Where the documents lie, whether they are there or not."""
    chosen = os.environ.get("ACC_SEEDS_DIR", "")
    return Path(chosen) if chosen else ROOT.parent / "shared" / "seeds"


def document(number: str) -> str | None:
    """The text of the document whose file name begins with `number`; None when it is not there."""
    found = sorted(folder().glob(f"{number}*"))
    return found[0].read_text(encoding="utf-8") if found else None


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of one language, in order; those that name none have the language ""."""
    return [body for kind, body in _FENCE.findall(text) if kind == language]


def native_script(text: str) -> str:
    """The script that a document starts from: its first Python block."""
    found = blocks(text, "python")
    if not found:
        raise SeedError("the document has no Python block")
    return found[0]


def accelerated_script(text: str) -> str:
    """The script with the three changed lines: the first diff's new side."""
    for diff in blocks(text, "diff"):
        if re.search(r"^\+ import torchacc$", diff, re.MULTILINE):
            return new_side(diff)
    raise SeedError("the document has no diff that adds `import torchacc`")


def data_parallel_script(text: str) -> str:
    """The script that only the first process prints from: the first diff's that says so."""
    for diff in blocks(text, "diff"):
        if re.search(r"^\+ .*torch\.distributed\.get_rank\(\) == 0", diff, re.MULTILINE):
            return new_side(diff)
    raise SeedError("the document has no diff that adds `torch.distributed.get_rank() == 0`")


def fsdp_script(text: str) -> str:
    """The script whose configuration shards the model."""
    for diff in blocks(text, "diff"):
        if re.search(r"^\+ config\.dist\.fsdp\.size = 4$", diff, re.MULTILINE):
            return new_side(diff)
    raise SeedError("the document has no diff that adds `config.dist.fsdp.size = 4`")


def mixed_precision_script(text: str) -> str:
    """The script that trains in float16 under autocast, with a scaler."""
    for diff in blocks(text, "diff"):
        if re.search(r"^\+ config\.compute\.fp16 = True$", diff, re.MULTILINE):
            return new_side(diff)
    raise SeedError("the document has no diff that adds `config.compute.fp16 = True`")


def adaptive_precision_snippet(text: str) -> tuple[str, str]:
    """What a program does once, and in each step, for its precision to follow a policy.

    The block names no language, and is cut before the line that asks the policy.
    """
    for block in blocks(text, ""):
        once, found, step = block.partition("mixed_precision = ")
        if "MixedPrecision_TrainingPolicy" in once and found:
            return once, found + step
    raise SeedError("the document has no block that asks a MixedPrecision_TrainingPolicy")


def new_side(diff: str) -> str:
    """What a diff leads to: added and unchanged lines, without their two-character margin."""
    lines = []
    for number, line in enumerate(diff.splitlines(), 1):
        margin, rest = line[:2], line[2:]
        if margin in ("  ", "+ ", "+", ""):
            lines.append(rest)
        elif margin[0] != "-":
            raise SeedError(f"line {number} of the diff has the margin {margin!r}: {line!r}")
    return "\n".join(lines) + "\n"


def shrink(
    source: str, *, rows: int, side: int, epochs: int, batch: int = 64, every: int = 20
) -> str:
    """The script with less data and fewer epochs: sizes are replaced in its text, nothing else.

    `rows` images of `side` x `side` pixels, `batch` of them in a step, and a line printed `every`
    so many steps. Raises SeedError when a size is not where it was.
    """
    for pattern, text, times in (
        (r"(?<=^batch_size = )64$", str(batch), 1),
        (r"(?<=^log_steps = )20$", str(every), 1),
        (r"\b6400\b", str(rows), 2),
        (r"\b224, 224\b", f"{side}, {side}", 1),
        (r"(?<=for epoch in range\()\d+(?=\):)", str(epochs), 1),
    ):
        source, count = re.subn(pattern, text, source, flags=re.MULTILINE)
        if count != times:
            raise SeedError(f"{pattern} occurs {count} times in the script, not {times}")
    return source
