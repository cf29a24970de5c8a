"""`python -m tiacc_training.tools.general_image_list`: lists images by the folders they are in.

The list has a line `path label` for each image, with the path below the folder of all images. The
folders right below that one are the classes, numbered from 0 in the order of their names.
"""

from __future__ import annotations

import argparse
import os
import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def image_list(folder: Path, numbers: Mapping[str, int] | None = None) -> list[tuple[str, int]]:
    """Path and label of each image below `folder`, in the order of their paths by class.

    `numbers` has the label of each class. Raises ValueError for an image in no class, a class that
    has no image or is not in `numbers`, and a path that no line can hold.
    """
    classes = sorted(entry.name for entry in folder.iterdir() if entry.is_dir())
    loose = sorted(entry.name for entry in folder.iterdir() if _is_image(entry.name))
    if loose:
        raise ValueError(f"{folder / loose[0]} is in no class: move it into a folder of its class.")
    if not classes:
        raise ValueError(f"{folder} has no folders: images belong into a folder for each class.")
    if numbers is None:
        numbers = {name: number for number, name in enumerate(classes)}
    found = []
    for name in classes:
        if name not in numbers:
            raise ValueError(f"the class {name!r} of {folder} has no number in the dictionary.")
        images = sorted(
            os.path.relpath(os.path.join(parent, file), folder)
            for parent, _, files in os.walk(folder / name)
            for file in files
            if _is_image(file)
        )
        if not images:
            raise ValueError(f"{folder / name} has no image ({' '.join(SUFFIXES)}).")
        odd = next((path for path in images if len(path.splitlines()) > 1), None)
        if odd is not None:
            raise ValueError(f"{odd!r} has a line break in its name: rename it.")
        found += [(path, numbers[name]) for path in images]
    return found


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


class _PlainUnpickler(pickle.Unpickler):
    """Reads dictionaries, texts and numbers. A pickle may call anything else that it names."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it has a {module}.{name}")


def read_numbers(path: Path) -> dict[str, int]:
    """A pickled dictionary of class names and labels. Raises ValueError if it is another thing."""
    try:
        with open(path, "rb") as file:
            found = _PlainUnpickler(file).load()
    except (pickle.UnpicklingError, EOFError, IndexError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is no pickled dictionary of names and numbers: {error}."
        ) from None
    if not isinstance(found, dict) or not all(
        isinstance(name, str) and type(number) is int for name, number in found.items()
    ):
        raise ValueError(f"{path} should be a pickled dictionary of class names and numbers.")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """The command. What is wrong with its input is an error of its arguments (status 2)."""
    parser = argparse.ArgumentParser(
        prog="python -m tiacc_training.tools.general_image_list",
        description="Lists images with the numbers of their classes, for img2tfrecord.",
    )
    parser.add_argument(
        "--img_dir", type=Path, required=True, help="a folder with a folder for each class"
    )
    parser.add_argument("--img_list", type=Path, required=True, help="the list to write")
    parser.add_argument(
        "--label_str2int",
        type=Path,
        help="a pickled dictionary of class names and numbers (default: by the names' order)",
    )
    options = parser.parse_args(arguments)
    try:
        numbers = read_numbers(options.label_str2int) if options.label_str2int else None
        found = image_list(options.img_dir, numbers)
        from torchacc.files import replacing

        with replacing(options.img_list) as part:
            text = "".join(f"{path} {label}\n" for path, label in found)
            part.write_text(text, encoding="utf-8")
    except (OSError, ValueError) as error:
        parser.error(str(error))
    print(f"{len(found)} images of {len({label for _, label in found})} classes")


if __name__ == "__main__":
    main()
