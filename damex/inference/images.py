"""Images: those that a command line names, and what a detector gets of them."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.dataset import Compose
from PIL import Image, UnidentifiedImageError

from damex.datasets.formats.images import images_of_any_size
from damex.errors import DataError

Picture = str | Path | np.ndarray
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")


def find_images(words: Sequence[str]) -> list[Path]:
    """Find the images that files, folders and patterns stand for, each once.

    Args:
        words: A file stands for itself, whatever its name; a folder for the image files
            in it and below; anything else is a pattern (``*``, ``**``, ``?``).

    Raises:
        DataError: If one of the words stands for nothing.
    """
    found: dict[Path, None] = {}
    for word in words:
        files = _files_of(word)
        if not files:
            what = "image in the folder" if Path(word).is_dir() else "file or folder"
            raise DataError(
                f"there is no {what} {word} (seen from {Path.cwd()}); images end in "
                f"{', '.join(SUFFIXES)}."
            )
        found |= dict.fromkeys(files)
    return list(found)


def _files_of(word: str) -> list[Path]:
    path = Path(word)
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = sorted(path.rglob("*"))
    else:
        names = glob.glob(word, recursive=True)  # noqa: PTH207 (absolute ones, too)
        inside = [Path(name) for name in sorted(names)]
    return [p for p in inside if p.suffix.lower() in SUFFIXES and p.is_file()]


def names_of(paths: Sequence[Path]) -> list[str]:
    """Names for images, each another: their paths below the folder of all of them.

    Args:
        paths: Files, each once.
    """
    parents = [str(path.absolute().parent) for path in paths]
    folder = os.path.commonpath(parents) if parents else ""
    return [Path(os.path.relpath(path.absolute(), folder)).as_posix() for path in paths]


def fault_of(path: Path) -> str | None:
    """What is wrong with an image file that a reader may pass over; None if nothing is.

    OpenCV fills what a file that was cut off does not hold with grey.
    """
    try:
        with images_of_any_size(), Image.open(path) as image:
            image.load()
    except FileNotFoundError:
        return "does not exist"
    except UnidentifiedImageError:
        return None  # other readers know more formats
    except Exception as error:  # PIL's readers raise whatever a file leads them to
        return f"cannot be decoded to its end ({error})"
    return None


class Inputs:
    """What the pipeline of a training makes of images.

    Args:
        pipeline: Steps without annotations, from ``LoadImageFromFile`` on.
    """

    def __init__(self, pipeline: Sequence[Mapping[str, Any]]) -> None:
        load, *rest = pipeline
        self._load, self._prepare = Compose([load]), Compose(rest)

    def __call__(self, image: Picture) -> dict[str, Any]:
        """Prepare one image.

        Returns:
            ``inputs`` and ``data_samples``, as mmdet packs them.

        Raises:
            DataError: If it cannot be read.
        """
        return self._prepare(self._read(image))

    def _read(self, image: Picture) -> dict[str, Any]:
        """An image as the first step of the pipeline hands it on.

        Raises:
            DataError: If it cannot be read.
        """
        if isinstance(image, np.ndarray):
            if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
                raise DataError(
                    "an image must be a uint8 array (height, width, 3) in RGB, got "
                    f"{image.dtype} of shape {image.shape}."
                )
            size = image.shape[:2]
            bgr = np.ascontiguousarray(image[..., ::-1])
            return dict(
                img=bgr, img_path=None, img_id=0, img_shape=size, ori_shape=size
            )
        fault, cause = fault_of(Path(image)), None
        if fault is None:
            try:
                return self._load(dict(img_path=str(image), img_id=0))
            except Exception as error:  # readers raise whatever a file leads them to
                fault, cause = "is no image that can be read", error
        raise DataError(f"{image} {fault}.") from cause
