"""`python -m tiacc_training.tools.img2tfrecord`: puts images into one file, with an index.

NAME.tfrecord and NAME.index are written, for `IndexTFRDataset`. Images are copied as they are.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, starmap
from pathlib import Path
from typing import NamedTuple

from tiacc_training.tfrecord import COCO, HEAD, IMAGES, KINDS, TAIL, Index, write_record


class Sample(NamedTuple):
    """An image, its label, what follows it in a record of its own, and where it was listed."""

    path: Path
    label: int
    more: bytes | None
    where: str


def listed(folder: Path, path: Path) -> tuple[int, Iterator[Sample]]:
    """How many lines `path label` a list has, and their samples, which raise ValueError."""

    def sample(number: int, line: bytes) -> Sample:
        where = f"{path}, line {number}"
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: {line[:80]!r} is no UTF-8: {error.reason}.") from None
        name, _, label = text.rstrip("\r\n").rpartition(" ")
        if not name or not label.isdecimal():
            raise ValueError(f"{where}: {text[:80]!r} should be `path label`.")
        return Sample(folder / name, int(label), None, where)

    content = path.read_bytes()  # once: it may be a pipe
    count = content.count(b"\n") + (content[-1:] not in (b"", b"\n"))
    return count, starmap(sample, enumerate(io.BytesIO(content), 1))


def annotated(folder: Path, path: Path) -> tuple[int, Iterator[Sample]]:
    """How many images a COCO annotation file has, and their samples, in its order.

    Raises ValueError for a file that is none, and annotations of images that it does not have.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        images = [(image["id"], image["file_name"]) for image in content["images"]]
        annotations: dict[int, list[dict]] = {number: [] for number, _ in images}
        given = [(each["image_id"], each) for each in content.get("annotations", ())]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no COCO annotation file: {error!r}.") from None
    if len(annotations) < len(images) or not all(type(number) is int for number, _ in images):
        raise ValueError(f"{path}: the ids of images should be numbers, each of another one.")
    for number, annotation in given:
        if number not in annotations:
            raise ValueError(
                f"{path}: an annotation is for the image {number}, which is not there."
            )
        annotations[number].append(annotation)

    def sample(number: int, name: str) -> Sample:
        target = {"image_id": number, "annotations": annotations[number]}
        return Sample(folder / name, number, json.dumps(target).encode(), f"{path}, image {number}")

    return len(images), starmap(sample, images)


def write(count: int, samples: Iterable[Sample], name: Path, kind: str, workers: int = 0) -> Index:
    """Writes NAME.tfrecord and NAME.index; they are there when both are whole.

    A terminal is told how many of the `count` samples are written. `workers` threads read images
    ahead. Raises ValueError with the place in the list for images that cannot be read, and if there
    is no sample.
    """
    from torchacc.files import replacing_all
    from torchacc.progress import Progress

    index = Index(name.with_name(f"{name.name}.tfrecord"), kind, 0)
    targets = [index.records, name.with_name(f"{name.name}.index")]
    progress = Progress(
        "img2tfrecord", lambda: f"{len(index)} of {count} images, {index.size >> 20} MiB"
    )
    with progress, replacing_all(targets) as (records, text):
        with open(records, "wb") as file:
            for sample, data in _ahead(_with_bytes, samples, workers):
                index.labels.append(sample.label)
                index.offsets.append(index.size)
                index.lengths.append(len(data))
                for part in (data,) if sample.more is None else (data, sample.more):
                    write_record(file, part)
                    index.size += HEAD + len(part) + TAIL
        if not len(index):
            raise ValueError("the list has no image.")
        with open(text, "w", encoding="utf-8") as file:
            file.writelines(index.lines())
    return index


def _with_bytes(sample: Sample) -> tuple[Sample, bytes]:
    try:
        data = sample.path.read_bytes()
    except OSError as error:
        raise ValueError(f"{sample.where}: {sample.path}: {error.strerror}.") from error
    if not data:
        raise ValueError(f"{sample.where}: {sample.path} is empty.")
    return sample, data


def _ahead(
    call: Callable[[Sample], tuple[Sample, bytes]], samples: Iterable[Sample], workers: int
) -> Iterator[tuple[Sample, bytes]]:
    """`map`, with as many calls at once as there are workers, and no more results than that."""
    if workers == 0:
        yield from map(call, samples)
        return
    rest = iter(samples)
    with ThreadPoolExecutor(workers) as pool:
        while together := list(islice(rest, workers)):
            yield from pool.map(call, together)


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. What is wrong with its input is an error of its arguments (status 2)."""
    parser = argparse.ArgumentParser(
        prog="python -m tiacc_training.tools.img2tfrecord",
        description="Puts images into one file that is read in any order (IndexTFRDataset).",
    )
    parser.add_argument("--img_dir", type=Path, required=True, help="what paths are relative to")
    parser.add_argument(
        "--img_list",
        type=Path,
        required=True,
        help="lines `path label` (general_image_list); of the type coco the annotation file",
    )
    parser.add_argument(
        "--tfrecords_name",
        type=Path,
        required=True,
        help="the files to write, without .tfrecord and .index",
    )
    parser.add_argument("--dataset_type", choices=KINDS, required=True)
    parser.add_argument(
        "--workers", type=_count, default=0, help="threads that read images (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    reads = {IMAGES: listed, COCO: annotated}[options.dataset_type]
    try:
        count, samples = reads(options.img_dir, options.img_list)
        index = write(count, samples, options.tfrecords_name, options.dataset_type, options.workers)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{len(index)} samples, {index.size} bytes in {index.records}")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} should be a number of at least 0")
    return int(text)


if __name__ == "__main__":
    main()
