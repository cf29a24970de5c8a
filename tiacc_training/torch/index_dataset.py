"""Images out of one large file instead of many small ones: TI-ACC's IndexTFRDataset."""

from __future__ import annotations

import io
import json
import os
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from tiacc_training.tfrecord import COCO, RecordFile, read_index


class IndexTFRDataset(Dataset):
    """The samples of a record file that `tiacc_training.tools.img2tfrecord` has written.

    A sample is an image, as Pillow has it in RGB or what `transform` makes of that, and its label,
    an int; of the type coco the label is a dictionary: `image_id`, and `annotations` as in the
    annotation file. Samples are in the order of the list from which the file was made.

    Records are checked against their checksums whenever they are read. Worker processes may be
    forked or spawned.

    Args:
        tfrecored_dir: the folder with both files (so spelled in the documents).
        tfrecord_file: the name of the index in it (the file name that ends in `.index`).
        transform: called with each image, in the worker.

    Raises:
        ImportError: Pillow is missing.
        FileNotFoundError: one of the files is.
        ValueError: the index is none, or does not fit; for a sample: its record is damaged or no
            image. The text names file, record and offset.
    """

    def __init__(
        self,
        tfrecored_dir: str | os.PathLike[str],
        tfrecord_file: str,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        _pillow()
        self.transform = transform
        self._index = read_index(Path(tfrecored_dir) / tfrecord_file)
        self._records = RecordFile(self._index.records)

    @property
    def labels(self) -> array[int]:
        """The label of each sample; of the type coco the number of its image."""
        return self._index.labels

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, place: int) -> tuple[Any, Any]:
        if not 0 <= place < len(self):
            raise IndexError(f"[IndexTFRDataset] there are {len(self)} samples, and no {place}.")
        offset, length = self._index.offsets[place], self._index.lengths[place]
        data, behind = self._records.read(offset, f"record of sample {place}", length)
        image = self._decoded(data, place, offset)
        target: Any = self._index.labels[place]
        if self._index.kind == COCO:
            text, _ = self._records.read(behind, f"annotations of sample {place}")
            target = json.loads(text)
        return image if self.transform is None else self.transform(image), target

    def _decoded(self, data: bytes, place: int, offset: int) -> Any:
        try:
            with _pillow().open(io.BytesIO(data)) as image:
                return image.convert("RGB")
        except (OSError, SyntaxError, ValueError) as error:  # what Pillow raises for bad images
            raise ValueError(
                f"[TFRecord] {self._records.path}: record of sample {place} at offset {offset}: "
                f"Pillow reads no image from it ({error})."
            ) from error


def _pillow() -> Any:
    """The module PIL.Image."""
    try:
        from PIL import Image
    except ImportError:
        raise ImportError(
            "[IndexTFRDataset] images are decoded by Pillow, which is not installed: pip install "
            "pillow."
        ) from None
    return Image
