"""Files of TFRecord's format, and the index that lets their records be read in any order.

A record is its length (8 bytes, little endian), the checksum of these 8 bytes (4), its bytes, and
their checksum (4), as TensorFlow's documentation of the format has it. The checksum is CRC-32C (RFC
3720, appendix B.4), rotated and shifted by a constant.

The index is text. Its first line is `tfrecord`, the name of the record file, its size in bytes, and
what the records are; each other one is for a sample: its label, and offset and length (without
frame) of its record. What stands in a line is separated by tabs.
"""

from __future__ import annotations

import functools
import os
import struct
import weakref
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

# What the records of a file are: images; images, each with a record behind it that has what is on
# it as a COCO annotation file says, in JSON.
IMAGES, COCO = "ImageFold", "coco"
KINDS = (IMAGES, COCO)
# Length and checksum before a record's bytes, and the checksum behind.
HEAD, TAIL = 12, 4

_FIRST_WORD = "tfrecord"
_POLYNOMIAL = 0x82F63B78  # bits from the lowest on
_ALL = 0xFFFFFFFF
# Below so many bytes one after the other is faster.
_SHORT = 4096


# --- checksums ------------------------------------------------------------------------------------


def masked_crc32c(data: bytes) -> int:
    """The checksum that stands in a record file, 32 bits."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & _ALL


def crc32c(data: bytes) -> int:
    """CRC-32C of any number of bytes.

    Python has none. The checksum of two halves is that of the first one, moved on by the length of
    the second, xor that of the second, and to move on is a table for each byte. So words become one
    in pairs, all pairs at once.
    """
    if len(data) < _SHORT:
        crc = _ALL
        for byte in data:
            crc = _BYTES[(crc ^ byte) & 0xFF] ^ crc >> 8
        return crc ^ _ALL
    # Zeros before the first byte change nothing, if it begins at zero: then the first four are
    # inverted instead.
    gap = -len(data) % 4
    buffer = bytearray(gap) + data
    for place in range(gap, gap + 4):
        buffer[place] ^= 0xFF
    words = torch.frombuffer(buffer, dtype=torch.int32)
    level = 0
    while words.numel() > 1:
        if words.numel() % 2:
            words = torch.cat((words.new_zeros(1), words))
        words = _moved_on(words[::2], level) ^ words[1::2]
        level += 1
    return _moved_on(words, 0).item() & _ALL ^ _ALL


def _after_zero_byte(crc: int) -> int:
    for _ in range(8):
        crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc


_BYTES = tuple(_after_zero_byte(byte) for byte in range(256))


def _moved_on(words: Tensor, level: int) -> Tensor:
    """Each of these checksums after 4 * 2**level more bytes of zero."""
    tables = _tables(level)
    moved = [
        torch.index_select(table, 0, words >> 8 * place & 0xFF)
        for place, table in enumerate(tables)
    ]
    return moved[0] ^ moved[1] ^ moved[2] ^ moved[3]


@functools.cache
def _tables(level: int) -> tuple[Tensor, ...]:
    """What `_moved_on` makes of each value of each of the four bytes, the lowest first."""
    bits = _bits(level)
    tables = []
    for place in range(0, 32, 8):
        table = array("I", [0] * 256)
        for value in range(1, 256):
            lowest = (value & -value).bit_length() - 1
            table[value] = table[value & value - 1] ^ bits[place + lowest]
        tables.append(torch.frombuffer(table, dtype=torch.int32))
    return tuple(tables)


@functools.cache
def _bits(level: int) -> tuple[int, ...]:
    """What becomes of each single bit; the rest are sums of these."""
    if level == 0:
        found = [1 << bit for bit in range(32)]
        for _ in range(4):
            found = [_after_zero_byte(crc) for crc in found]
        return tuple(found)
    half = _bits(level - 1)
    return tuple(
        functools.reduce(int.__xor__, (half[bit] for bit in range(32) if once >> bit & 1), 0)
        for once in half
    )


# --- records --------------------------------------------------------------------------------------


def write_record(file: BinaryIO, data: bytes) -> None:
    """Writes `data` with its frame at the file's position."""
    length = struct.pack("<Q", len(data))
    file.write(length + struct.pack("<I", masked_crc32c(length)))
    file.write(data)
    file.write(struct.pack("<I", masked_crc32c(data)))


class RecordFile:
    """Reads records by their offsets, from any process and thread.

    The file is opened at the first read. No position in it is kept, which processes that were
    forked would share; one that gets it by pickle opens it itself.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self._descriptor: int | None = None

    def __getstate__(self) -> dict[str, object]:
        return {"path": self.path, "_descriptor": None}

    def _opened(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._descriptor)
        return self._descriptor

    def read(self, offset: int, what: str, length: int | None = None) -> tuple[bytes, int]:
        """The bytes of the record that begins at `offset`, and the offset behind it.

        Raises ValueError, with file, `what` (which record it is) and offset, if the record is cut
        off, its checksums are wrong, or it does not have the `length` that is asked for.
        """
        head = self._bytes(offset, HEAD, what, offset)
        (here,) = struct.unpack_from("<Q", head)
        if struct.unpack_from("<I", head, 8)[0] != masked_crc32c(head[:8]):
            raise self._wrong(what, offset, "no record begins there, or its length is damaged")
        if length is not None and here != length:
            raise self._wrong(what, offset, f"it has {here} bytes, and {length} in the index")
        data = self._bytes(offset + HEAD, here + TAIL, what, offset)
        data, tail = data[:here], data[here:]
        if struct.unpack("<I", tail)[0] != masked_crc32c(data):
            raise self._wrong(what, offset, "its bytes do not have its checksum: it is damaged")
        return data, offset + HEAD + here + TAIL

    def _bytes(self, begin: int, count: int, what: str, offset: int) -> bytes:
        descriptor = self._opened()
        size = os.fstat(descriptor).st_size
        # Before memory is asked for: a damaged length may be any number.
        if begin + count > size:
            raise self._wrong(what, offset, f"it is cut off, the file ends at byte {size}")
        parts: list[bytes] = []
        while count > 0:
            part = os.pread(descriptor, count, begin)
            if not part:
                raise self._wrong(what, offset, f"it is cut off, the file ends at byte {begin}")
            parts.append(part)
            begin, count = begin + len(part), count - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _wrong(self, what: str, offset: int, problem: str) -> ValueError:
        return ValueError(f"[TFRecord] {self.path}: {what} at offset {offset}: {problem}.")


# --- the index ------------------------------------------------------------------------------------


class Index:
    """Where the samples of a record file are.

    `labels`, `offsets` and `lengths` have a number for each sample.
    """

    def __init__(self, records: Path, kind: str, size: int) -> None:
        self.records, self.kind, self.size = records, kind, size
        self.labels, self.offsets, self.lengths = array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self.labels)

    def lines(self) -> Iterator[str]:
        """The text, by lines with their ends."""
        yield f"{_FIRST_WORD}\t{self.records.name}\t{self.size}\t{self.kind}\n"
        for sample in zip(self.labels, self.offsets, self.lengths, strict=True):
            yield "\t".join(map(str, sample)) + "\n"


def read_index(path: Path) -> Index:
    """The index in a file, whose record file lies beside it.

    Raises FileNotFoundError where one of them is missing, and ValueError, with file and line, for a
    text that is no index, and where it does not fit the record file.
    """
    with open(path, encoding="utf-8") as file:
        try:
            return _parsed(path, file)
        except UnicodeDecodeError:
            raise ValueError(
                f"[TFRecord] {path} is no text: name the index, not the records."
            ) from None


def _parsed(path: Path, lines: Iterable[str]) -> Index:
    numbered = enumerate(lines, 1)
    _, first = next(numbered, (1, ""))
    parts = first.rstrip("\n").split("\t")
    if len(parts) != 4 or parts[0] != _FIRST_WORD or not parts[2].isdecimal():
        raise ValueError(
            f"[TFRecord] {path}, line 1: {first[:80]!r} should be '{_FIRST_WORD}', a file, its "
            "bytes and what is in it, with tabs between: make it with img2tfrecord."
        )
    _, name, size, kind = parts
    if kind not in KINDS:
        raise ValueError(f"[TFRecord] {path}, line 1: {kind!r} is none of {', '.join(KINDS)}.")
    index = Index(path.parent / name, kind, int(size))
    there = index.records.stat().st_size
    if there != index.size:
        raise ValueError(
            f"[TFRecord] {path} is for a file of {size} bytes, and {index.records} has {there}: "
            "they were not written together, or it was cut off."
        )
    end = 0
    for number, line in numbered:
        try:
            label, offset, length = map(int, line.split("\t"))
        except ValueError:
            raise ValueError(
                f"[TFRecord] {path}, line {number}: {line[:80]!r} should be three numbers, label, "
                "offset and length, with tabs between."
            ) from None
        if offset < end or length < 0 or offset + HEAD + length + TAIL > index.size:
            raise ValueError(
                f"[TFRecord] {path}, line {number}: a record of {length} bytes at offset {offset} "
                f"does not lie behind the one before it (byte {end}) and in the {index.size} bytes "
                f"of {index.records}."
            )
        end = offset + HEAD + length + TAIL
        index.labels.append(label)
        index.offsets.append(offset)
        index.lengths.append(length)
    return index
