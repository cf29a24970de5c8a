"""`python -m tiacc_training.tools.img2tfrecord`: puts images into one file, with an index.

NAME.tfrecord and NAME.index are written, for `IndexTFRDataset`. Images are copied as they are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tiacc_training.tfrecord import COCO, HEAD, IMAGES, KINDS, TAIL, Index, write_record


class Sample(NamedTuple):
    """An image, its label, what follows it in a record of its own, and where it was listed."""

    path: Path
    label: int
    more: bytes | None
    where: str


def listed(folder: Path, path: Path) -> Iterator[Sample]:
    """The samples of a list of lines `path label`. Raises ValueError with the line."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            name, _, label = line.rstrip("\n").rpartition(" ")
            if not name or not label.isdecimal():
                raise ValueError(f"{path}, line {number}: {line[:80]!r} should be `path label`.")
            yield Sample(folder / name, int(label), None, f"{path}, line {number}")


def annotated(folder: Path, path: Path) -> Iterator[Sample]:
    """The samples of a COCO annotation file, in the order of its images.

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
    for number, name in images:
        target = {"image_id": number, "annotations": annotations[number]}
        yield Sample(folder / name, number, json.dumps(target).encode(), f"{path}, image {number}")


def write(samples: Iterable[Sample], name: Path, kind: str, workers: int = 0) -> Index:
    """Writes NAME.tfrecord and NAME.index; they are there when both are whole.

    `workers` threads read images ahead. Raises ValueError with the place in the list for images
    that cannot be read, and if there is no sample.
    """
    from torchacc.files import replacing_all

    index = Index(name.with_name(f"{name.name}.tfrecord"), kind, 0)
    targets = [index.records, name.with_name(f"{name.name}.index")]
    with replacing_all(targets) as (records, text):
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
        samples = reads(options.img_dir, options.img_list)
        index = write(samples, options.tfrecords_name, options.dataset_type, options.workers)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{len(index)} samples, {index.size} bytes in {index.records}")


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} should be a number of at least 0")
    return int(text)


if __name__ == "__main__":
    main()
