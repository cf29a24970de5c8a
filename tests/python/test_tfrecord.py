"""Record files: their checksums and frames, the tools that write them, and IndexTFRDataset."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import helpers
from tests.terminal import said_to
from tiacc_training.tfrecord import RecordFile, crc32c, masked_crc32c
from tiacc_training.tools import general_image_list, img2tfrecord
from tiacc_training.torch.tiacc_torch_warp import IndexTFRDataset

Image = pytest.importorskip("PIL.Image", reason="images are decoded by Pillow")


def slow_crc32c(data: bytes) -> int:
    """CRC-32C bit by bit, as it is defined."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def frames(path: Path) -> list[tuple[int, bytes]]:
    """Offset and bytes of each record of a file, read as the format says, without our reader."""
    data, found, place = path.read_bytes(), [], 0
    while place < len(data):
        (length,) = struct.unpack_from("<Q", data, place)
        record = data[place + 12 : place + 12 + length]
        for part, at in ((data[place : place + 8], place + 8), (record, place + 12 + length)):
            crc = slow_crc32c(part)
            masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32
            assert struct.unpack_from("<I", data, at)[0] == masked
        found.append((place, record))
        place += 16 + length
    return found


# --- checksums ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [  # the examples of RFC 3720, appendix B.4, and the usual check value
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (bytes(range(31, -1, -1)), 0x113FDB5C),
        (b"123456789", 0xE3069283),
        (b"", 0),
    ],
)
def test_checksums_are_those_of_the_standard(data: bytes, expected: int) -> None:
    assert crc32c(data) == slow_crc32c(data) == expected


def test_checksums_of_any_length() -> None:
    draw = random.Random(0)
    for length in (*range(20), *range(4090, 4190), 8191, 8192, 8193, 30001):
        data = draw.randbytes(length)
        assert crc32c(data) == slow_crc32c(data), length


def test_a_checksum_is_of_each_bit() -> None:
    data = bytearray(random.Random(1).randbytes(5000))
    expected = crc32c(bytes(data))
    for bit in range(0, 40000, 133):
        data[bit // 8] ^= 1 << bit % 8
        assert crc32c(bytes(data)) != expected
        data[bit // 8] ^= 1 << bit % 8
    assert crc32c(bytes(data)) == expected


def test_a_default_device_changes_no_checksum(device: str, clean_flags: None) -> None:
    data = bytes(range(200)) * 30
    torch.set_default_device(device)
    assert crc32c(data) == slow_crc32c(data)


# --- a folder of images, and the files made of it -------------------------------------------------

# By class and file: sizes, so that each image is another one.
SIZES = {
    "cat/a.png": (5, 4),
    "cat/b 2.jpg": (8, 8),
    "dog/c.png": (3, 7),
    "dog/deep/d.PNG": (9, 2),
    "owl/e.png": (4, 4),
}
LABELS = [0, 0, 1, 1, 2]


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    for number, (name, size) in enumerate(SIZES.items()):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = "L" if number == 4 else "RGB"
        pixels = random.Random(number).randbytes(size[0] * size[1] * len(mode))
        Image.frombytes(mode, size, pixels).save(path)
    (folder / "cat" / "notes.txt").write_text("no image")
    return folder


@pytest.fixture
def packed(images: Path, tmp_path: Path) -> Path:
    """The folder with `train.tfrecord` and `train.index`."""
    pack(images, tmp_path / "images.txt", tmp_path / "train")
    return tmp_path


def pack(images: Path, lines: Path, name: Path, *more: str) -> None:
    general_image_list.main(["--img_dir", str(images), "--img_list", str(lines)])
    img2tfrecord.main(
        [
            *("--img_dir", str(images), "--img_list", str(lines), "--tfrecords_name", str(name)),
            *("--dataset_type", "ImageFold", *more),
        ]
    )


def opened(path: Path) -> Any:
    return Image.open(path).convert("RGB")


def same_images(dataset: Any, images: Path) -> bool:
    return all(
        mine.mode == "RGB"
        and mine.size == size
        and mine.tobytes() == opened(images / name).tobytes()
        for (mine, _), (name, size) in zip(list(dataset), SIZES.items(), strict=True)
    )


def test_a_data_set_has_the_images_and_their_labels(images: Path, packed: Path) -> None:
    dataset = IndexTFRDataset(packed, "train.index")
    assert len(dataset) == 5 and list(dataset.labels) == LABELS
    assert [label for _, label in dataset] == LABELS
    assert all(type(label) is int for _, label in dataset)
    assert same_images(dataset, images)
    # In any order.
    assert dataset[3][0].size == (9, 2) and dataset[1][0].size == (8, 8)
    for place in (5, -1):
        with pytest.raises(IndexError, match=f"5 samples, and no {place}"):
            dataset[place]


def test_the_files_are_of_the_format(images: Path, packed: Path) -> None:
    """Any reader of TFRecords reads them: the records are the image files, byte by byte."""
    found = frames(packed / "train.tfrecord")
    assert [record for _, record in found] == [(images / name).read_bytes() for name in SIZES]
    first, *lines = (packed / "train.index").read_text().splitlines()
    size = (packed / "train.tfrecord").stat().st_size
    assert first == f"tfrecord\ttrain.tfrecord\t{size}\tImageFold"
    assert lines == [
        f"{label}\t{offset}\t{len(record)}"
        for label, (offset, record) in zip(LABELS, found, strict=True)
    ]
    assert sorted(os.listdir(packed)) == ["images", "images.txt", "train.index", "train.tfrecord"]


def test_a_transform_is_called_with_each_image(packed: Path) -> None:
    dataset = IndexTFRDataset(str(packed), "train.index", lambda image: image.size)
    assert [size for size, _ in dataset] == list(SIZES.values())


def size_of(image: Any) -> torch.Tensor:
    return torch.tensor([*image.size, sum(image.tobytes())])


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_read_the_same(packed: Path, start: str) -> None:
    """Also where this process has read before: workers that are forked have the open file."""
    dataset = IndexTFRDataset(packed, "train.index", size_of)
    expected = torch.stack([dataset[place][0] for place in range(5)]).repeat(20, 1)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=5,
        sampler=list(range(5)) * 20,
        num_workers=2,
        multiprocessing_context=start,
    )
    found = [(sizes, labels) for sizes, labels in loader]
    assert torch.cat([sizes for sizes, _ in found]).equal(expected)
    assert torch.cat([labels for _, labels in found]).tolist() == LABELS * 20
    assert torch.equal(dataset[4][0], expected[4])


def test_a_copy_by_pickle_opens_the_file_itself(packed: Path) -> None:
    dataset = IndexTFRDataset(packed, "train.index", size_of)
    before = dataset[2]
    copy = pickle.loads(pickle.dumps(dataset))
    del dataset  # which closes its file
    assert torch.equal(copy[2][0], before[0]) and copy[2][1] == before[1]


def test_the_tools_run_as_commands(images: Path, tmp_path: Path) -> None:
    for arguments in (
        ("general_image_list", "--img_dir", "images", "--img_list", "list.txt"),
        (
            *("img2tfrecord", "--img_dir", "images", "--img_list", "list.txt", "--workers", "2"),
            *("--tfrecords_name", "out.v1", "--dataset_type", "ImageFold"),
        ),
    ):
        done = subprocess.run(
            [sys.executable, "-m", f"tiacc_training.tools.{arguments[0]}", *arguments[1:]],
            cwd=tmp_path,
            env=helpers.child_env(),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("5 samples, ")
    assert same_images(IndexTFRDataset(tmp_path, "out.v1.index"), images)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_workers_of_the_tool_change_nothing(images: Path, tmp_path: Path, workers: int) -> None:
    pack(images, tmp_path / "images.txt", tmp_path / "a")
    pack(images, tmp_path / "images.txt", tmp_path / "b", "--workers", str(workers))
    assert (tmp_path / "a.tfrecord").read_bytes() == (tmp_path / "b.tfrecord").read_bytes()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_terminal_shows_how_far_it_is(
    images: Path, tmp_path: Path, workers: int, monkeypatch
) -> None:
    stream, written = said_to(monkeypatch, terminal=True), []

    def write_record(file: Any, data: bytes) -> None:
        written.append(data)
        stream.wait_for(f"[img2tfrecord] {len(written)} of 5 images, 0 MiB, ")
        record(file, data)

    record = img2tfrecord.write_record
    monkeypatch.setattr(img2tfrecord, "write_record", write_record)
    pack(images, tmp_path / "images.txt", tmp_path / "train", "--workers", str(workers))
    assert len(written) == 5 and stream.getvalue().endswith("\r\x1b[K")


def test_a_list_may_be_a_pipe(images: Path, packed: Path) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb"), open(writer, "wb") as file:
        file.write((packed / "images.txt").read_bytes().rstrip(b"\n").replace(b"\n", b"\r\n"))
        file.close()
        listing = Path(f"/dev/fd/{reader}")
        count, samples = img2tfrecord.listed(images, listing)
        index = img2tfrecord.write(count, samples, packed / "again", "ImageFold")
    assert count == len(index) == 5
    assert (packed / "again.tfrecord").read_bytes() == (packed / "train.tfrecord").read_bytes()


# --- coco -----------------------------------------------------------------------------------------

COCO: dict[str, Any] = {
    "images": [
        {"id": 42, "file_name": "dog/c.png", "width": 3, "height": 7},
        {"id": 7, "file_name": "cat/a.png"},
    ],
    "annotations": [
        {"id": 1, "image_id": 7, "bbox": [0, 0, 2, 2], "category_id": 3},
        {"id": 2, "image_id": 7, "bbox": [1, 1, 1, 1.5], "category_id": 4},
    ],
    "categories": [{"id": 3, "name": "Käse"}],
}


def pack_coco(images: Path, content: Any, folder: Path) -> None:
    path = folder / "instances.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    img2tfrecord.main(
        [
            *("--img_dir", str(images), "--img_list", str(path)),
            *("--tfrecords_name", str(folder / "coco"), "--dataset_type", "coco"),
        ]
    )


def test_a_coco_data_set_has_images_and_targets(images: Path, tmp_path: Path) -> None:
    pack_coco(images, COCO, tmp_path)
    dataset = IndexTFRDataset(tmp_path, "coco.index", lambda image: image.size)
    assert len(dataset) == 2 and list(dataset.labels) == [42, 7]
    assert dataset[0] == ((3, 7), {"image_id": 42, "annotations": []})
    assert dataset[1] == ((5, 4), {"image_id": 7, "annotations": COCO["annotations"]})
    assert len(frames(tmp_path / "coco.tfrecord")) == 4


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("{", "is no COCO annotation file"),
        ("[]", "is no COCO annotation file"),
        ({"images": [{"id": 1}]}, "is no COCO annotation file: KeyError.'file_name'"),
        ({"images": [{"id": "1", "file_name": "cat/a.png"}]}, "ids of images should be numbers"),
        ({"images": COCO["images"] * 2}, "each of another one"),
        ({**COCO, "images": COCO["images"][:1]}, "for the image 7, which is not there"),
        ({"images": []}, "no image"),
        ({"images": [{"id": 1, "file_name": "no.png"}]}, "image 1: .*no.png: No such file"),
    ],
)
def test_annotations_that_do_not_fit_are_told(
    images: Path, tmp_path: Path, content: Any, told: str, capsys
) -> None:
    refused(lambda: pack_coco(images, content, tmp_path), told, capsys)
    assert not list(tmp_path.glob("*coco*"))


# --- bad input ------------------------------------------------------------------------------------


def refused(call: Callable[[], object], told: str, capsys: Any) -> None:
    """A command ends with status 2 and says why."""
    with pytest.raises(SystemExit) as caught:
        call()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert re.search(told, said), said


def changed(path: Path, place: int, value: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[place] = data[place] ^ 1 if value is None else value
    path.write_bytes(data)


# Where in the frame of a record a byte is changed, from its offset or its end.
DAMAGES = {
    "length": (0, "its length is damaged"),
    "huge length": (7, "its length is damaged"),
    "checksum of the length": (9, "its length is damaged"),
    "first byte": (12, "it is damaged"),
    "last byte": (-5, "it is damaged"),
    "checksum": (-1, "it is damaged"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_told_with_its_place(packed: Path, damage: str) -> None:
    place, told = DAMAGES[damage]
    path = packed / "train.tfrecord"
    (offset, record), (behind, _) = frames(path)[2:4]
    changed(path, (offset if place >= 0 else behind) + place)
    dataset = IndexTFRDataset(packed, "train.index")
    with pytest.raises(ValueError, match="no record|damaged") as caught:
        dataset[2]
    assert str(caught.value).startswith(
        f"[TFRecord] {path}: record of sample 2 at offset {offset}: "
    )
    assert told in str(caught.value)
    assert dataset[1][1] == 0 and dataset[3][1] == 1  # the others are there


def test_a_file_that_was_cut_off_is_told(packed: Path) -> None:
    path = packed / "train.tfrecord"
    dataset = IndexTFRDataset(packed, "train.index")
    size = path.stat().st_size
    offset, _ = frames(path)[4]
    for end in (size - 1, offset + 13, offset + 3):
        os.truncate(path, end)
        with pytest.raises(
            ValueError,
            match=f"sample 4 at offset {offset}: it is cut off, the file ends at .*{end}",
        ):
            dataset[4]
    with pytest.raises(ValueError, match=f"for a file of {size} bytes, and .* has {end}"):
        IndexTFRDataset(packed, "train.index")


def test_a_length_beyond_the_file_asks_for_no_memory(tmp_path: Path) -> None:
    """Its checksum may be right: whoever wrote the file made it."""
    head = struct.pack("<Q", 1 << 60)
    path = tmp_path / "records"
    path.write_bytes(head + struct.pack("<I", masked_crc32c(head)) + bytes(40))
    with pytest.raises(
        ValueError, match="records: the first at offset 0: it is cut off, .* byte 52"
    ):
        RecordFile(path).read(0, "the first")


def test_a_record_that_is_no_image_is_told(images: Path, tmp_path: Path) -> None:
    (images / "owl" / "e.png").write_text("no image")
    pack(images, tmp_path / "images.txt", tmp_path / "train")
    dataset = IndexTFRDataset(tmp_path, "train.index")
    with pytest.raises(
        ValueError, match=r"train.tfrecord: record of sample 4 at offset \d+: .*no im"
    ):
        dataset[4]


def test_an_image_that_was_cut_off_before_is_told(images: Path, tmp_path: Path) -> None:
    path = images / "cat" / "b 2.jpg"
    path.write_bytes(path.read_bytes()[:-200])
    pack(images, tmp_path / "images.txt", tmp_path / "train")
    with pytest.raises(ValueError, match="sample 1 at offset .*Pillow reads no image"):
        IndexTFRDataset(tmp_path, "train.index")[1]


@pytest.mark.parametrize(
    ("line", "text", "told"),
    [
        (0, "", "line 1: '' should be 'tfrecord'"),
        (0, "0\t0\t10", "line 1: '0.t0.t10.n' should be 'tfrecord'"),
        (0, "tfrecord\ttrain.tfrecord\tmany\tImageFold", "line 1"),
        (0, "tfrecord\ttrain.tfrecord\t{size}\tvideo", "'video' is none of ImageFold, coco"),
        (0, "tfrecord\ttrain.tfrecord\t17\tImageFold", "for a file of 17 bytes, and"),
        (2, "cat\t0\t10", "line 3: 'cat.t0.t10.n' should be three numbers"),
        (2, "0\t10", "line 3"),
        (2, "0\t0\t10", r"line 3: a record of 10 bytes at offset 0 .*\(byte \d+\)"),
        (5, "2\t{size}\t10", "line 6: a record of 10 bytes at offset {size}"),
        (5, "2\t{last}\t-1", "line 6: a record of -1 bytes"),
    ],
)
def test_an_index_that_does_not_fit_is_told(packed: Path, line: int, text: str, told: str) -> None:
    path, records = packed / "train.index", packed / "train.tfrecord"
    known = {"size": str(records.stat().st_size), "last": str(frames(records)[4][0])}
    lines = path.read_text().splitlines()
    lines[line] = text.format(**known)
    path.write_text("\n".join(lines) + "\n" if any(lines) and lines[0] else "")
    with pytest.raises(ValueError, match=told.format(**known)) as caught:
        IndexTFRDataset(packed, "train.index")
    assert str(path) in str(caught.value)


def test_an_index_of_other_lengths_is_told(packed: Path) -> None:
    path = packed / "train.index"
    *lines, last = path.read_text().splitlines()
    label, offset, length = last.split("\t")
    path.write_text("\n".join((*lines, f"{label}\t{offset}\t{int(length) - 1}")))
    with pytest.raises(
        ValueError, match=f"it has {length} bytes, and {int(length) - 1} in the ind"
    ):
        IndexTFRDataset(packed, "train.index")[4]


def test_files_that_are_missing_are_named(packed: Path) -> None:
    with pytest.raises(FileNotFoundError, match="other.index"):
        IndexTFRDataset(packed, "other.index")
    with pytest.raises(ValueError, match="train.tfrecord is no text: name the index"):
        IndexTFRDataset(packed, "train.tfrecord")
    (packed / "train.tfrecord").unlink()
    with pytest.raises(FileNotFoundError, match="train.tfrecord"):
        IndexTFRDataset(packed, "train.index")


def test_missing_pillow_is_told(packed: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ImportError, match="Pillow, which is not installed: pip install pillow"):
        IndexTFRDataset(packed, "train.index")


# --- the tools ------------------------------------------------------------------------------------


def test_labels_come_from_a_dictionary(images: Path, tmp_path: Path) -> None:
    numbers, lines = tmp_path / "numbers.pkl", tmp_path / "images.txt"
    numbers.write_bytes(pickle.dumps({"cat": 9, "dog": 4, "owl": 0, "yak": 1}))
    general_image_list.main(
        [
            *("--img_dir", str(images), "--img_list", str(lines)),
            *("--label_str2int", str(numbers)),
        ]
    )
    assert lines.read_text().splitlines() == [
        f"{name} {label}" for name, label in zip(SIZES, (9, 9, 4, 4, 0), strict=True)
    ]


class Evil:
    """What a pickle may do where it is read without care."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("made-by-a-pickle",)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (pickle.dumps({"cat": 1}), "the class 'dog' of .* has no number"),
        (pickle.dumps([1]), "should be a pickled dictionary"),
        (pickle.dumps({"cat": "1"}), "should be a pickled dictionary"),
        (b"", "is no pickled dictionary"),
        (b"cat 1", "is no pickled dictionary"),
        (pickle.dumps(Evil()), "is no pickled dictionary .*mkdir"),
    ],
    ids=["a class less", "a list", "texts", "empty", "text", "a call"],
)
def test_other_pickles_are_refused(
    images: Path, tmp_path: Path, content: bytes, told: str, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("numbers.pkl").write_bytes(content)
    command = ["--img_dir", "images", "--img_list", "list.txt", "--label_str2int", "numbers.pkl"]
    refused(lambda: general_image_list.main(command), told, capsys)
    assert sorted(os.listdir()) == ["images", "numbers.pkl"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda folder: (folder / "loose.png").write_text(""), "loose.png is in no class"),
        (lambda folder: (folder / "yak").mkdir(), "yak has no image"),
        (lambda folder: (folder / "cat" / "x\ny.png").write_text(""), "line break in its name"),
        (lambda folder: folder.rename(folder.with_name("away")), "No such file"),
        (
            lambda folder: [path.rename(folder.parent / path.name) for path in folder.iterdir()],
            "has no folders",
        ),
    ],
)
def test_folders_that_are_no_classes_are_told(
    images: Path, tmp_path: Path, change: Callable[[Path], object], told: str, capsys
) -> None:
    change(images)
    lines = tmp_path / "list.txt"
    lines.write_text("as it was")
    command = ["--img_dir", str(images), "--img_list", str(lines)]
    refused(lambda: general_image_list.main(command), told, capsys)
    assert lines.read_text() == "as it was"


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("cat/none.png 1", "list.txt, line 3: .*none.png: No such file"),
        ("cat/a.png", "line 3: 'cat/a.png.n' should be `path label`"),
        ("cat/a.png cat", "line 3"),
        ("cat 1", "line 3: .*cat: Is a directory"),
        ("cat/empty.png 1", "line 3: .*empty.png is empty"),
    ],
)
def test_a_list_that_is_wrong_leaves_no_file(
    images: Path, tmp_path: Path, line: str, told: str, workers: str, capsys
) -> None:
    """And what was there before stays."""
    (images / "cat" / "empty.png").write_text("")
    lines = tmp_path / "list.txt"
    lines.write_text(f"cat/a.png 0\ndog/c.png 1\n{line}\n")
    (tmp_path / "train.index").write_text("as it was")
    command = [
        *("--img_dir", str(images), "--img_list", str(lines), "--workers", workers),
        *("--tfrecords_name", str(tmp_path / "train"), "--dataset_type", "ImageFold"),
    ]
    refused(lambda: img2tfrecord.main(command), told, capsys)
    assert sorted(os.listdir(tmp_path)) == ["images", "list.txt", "train.index"]
    assert (tmp_path / "train.index").read_text() == "as it was"


def test_a_list_of_another_encoding_is_told(images: Path, tmp_path: Path, capsys) -> None:
    lines = tmp_path / "list.txt"
    lines.write_bytes("cat/a.png 0\nKäse.png 1\n".encode("latin-1"))
    command = ["--img_dir", str(images), "--img_list", str(lines), "--dataset_type", "ImageFold"]
    command += ["--tfrecords_name", str(tmp_path / "train")]
    told = r"list.txt, line 2: b'K.*se.png 1.n' is no UTF-8: invalid"
    refused(lambda: img2tfrecord.main(command), told, capsys)


def test_an_empty_list_and_a_wrong_option_are_refused(images: Path, tmp_path: Path, capsys) -> None:
    lines = tmp_path / "list.txt"
    lines.write_text("")
    command = ["--img_dir", str(images), "--img_list", str(lines), "--tfrecords_name", "x"]
    refused(
        lambda: img2tfrecord.main([*command, "--dataset_type", "ImageFold"]), "no image", capsys
    )
    refused(lambda: img2tfrecord.main([*command, "--dataset_type", "video"]), "'video'", capsys)
    command += ["--dataset_type", "coco", "--workers", "-1"]
    refused(lambda: img2tfrecord.main(command), "'-1' should be a number of at least 0", capsys)


def test_large_records_are_read_whole(tmp_path: Path) -> None:
    """Longer than what one read of the system gives, as far as it may tell."""
    pixels = random.Random(0).randbytes(700 * 500 * 3)
    folder = tmp_path / "images" / "one"
    folder.mkdir(parents=True)
    Image.frombytes("RGB", (700, 500), pixels).save(folder / "a.bmp")
    pack(tmp_path / "images", tmp_path / "list.txt", tmp_path / "train")
    buffer = io.BytesIO()
    IndexTFRDataset(tmp_path, "train.index")[0][0].save(buffer, "bmp")
    assert buffer.getvalue() == (folder / "a.bmp").read_bytes()
