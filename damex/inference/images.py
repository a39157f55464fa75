"""Images and frames of videos: found, read, and as a detector gets them."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mmcv
import numpy as np
from mmengine.dataset import Compose
from PIL import Image, UnidentifiedImageError

from damex.datasets.formats.images import images_of_any_size
from damex.errors import DataError

Picture = str | Path | np.ndarray
SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".tif", ".tiff", ".webp")
VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm")


@dataclass(frozen=True, eq=False)
class Frame:
    """An image of a video.

    Attributes:
        video: The file.
        number: From 0.
        pixels: uint8 (height, width, 3) in BGR.
    """

    video: Path
    number: int
    pixels: np.ndarray


def find_images(words: Sequence[str], *, videos: bool = False) -> list[Path]:
    """Find the images that files, folders and patterns stand for, each once.

    Args:
        words: A file stands for itself, whatever its name; a folder for the image files
            in it and below; anything else is a pattern (``*``, ``**``, ``?``).
        videos: Whether folders and patterns stand for videos, too.

    Raises:
        DataError: If one of the words stands for nothing.
    """
    found: dict[Path, None] = {}
    suffixes = (*SUFFIXES, *VIDEO_SUFFIXES) if videos else SUFFIXES
    for word in words:
        files = _files_of(word, suffixes)
        if not files:
            what = "image in the folder" if Path(word).is_dir() else "file or folder"
            raise DataError(
                f"there is no {what} {word} (seen from {Path.cwd()}); images end in "
                f"{', '.join(suffixes)}."
            )
        found |= dict.fromkeys(files)
    return list(found)


def _files_of(word: str, suffixes: Sequence[str]) -> list[Path]:
    path = Path(word)
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = sorted(path.rglob("*"))
    else:
        names = glob.glob(word, recursive=True)  # noqa: PTH207 (absolute ones, too)
        inside = [Path(name) for name in sorted(names)]
    return [p for p in inside if p.suffix.lower() in suffixes and p.is_file()]


def names_of(paths: Sequence[Path]) -> list[str]:
    """Names for images, each another: their paths below the folder of all of them.

    Args:
        paths: Files, each once.
    """
    parents = [str(path.absolute().parent) for path in paths]
    folder = os.path.commonpath(parents) if parents else ""
    return [Path(os.path.relpath(path.absolute(), folder)).as_posix() for path in paths]


def is_video(path: Path) -> bool:
    """Whether a file is a video, by its name."""
    return path.suffix.lower() in VIDEO_SUFFIXES


def open_video(path: Path) -> mmcv.VideoReader:
    """Open a video.

    Raises:
        DataError: If OpenCV cannot read it.
    """
    if not path.is_file():
        raise DataError(f"{path} does not exist.")
    video = mmcv.VideoReader(str(path))
    if not video.opened:
        raise DataError(f"{path} is no video that OpenCV can read.")
    return video


def frames_of(path: Path) -> Iterator[Frame]:
    """One frame of a video after the other.

    Raises:
        DataError: If it cannot be read, or holds no frame.
    """
    number = -1
    for number, pixels in enumerate(open_video(path)):
        yield Frame(path, number, pixels)
    if number < 0:
        raise DataError(f"{path} holds no frame that OpenCV can read.")


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

    def each(self, image: Picture) -> Iterator[dict[str, Any]]:
        """Prepare an image, or all frames of a video.

        Raises:
            DataError: If it cannot be read.
        """
        if isinstance(image, str | Path) and is_video(Path(image)):
            yield from map(self, frames_of(Path(image)))
        else:
            yield self(image)

    def __call__(self, image: Picture | Frame) -> dict[str, Any]:
        """Prepare one image.

        Returns:
            ``inputs`` and ``data_samples``, as mmdet packs them.

        Raises:
            DataError: If it cannot be read.
        """
        return self._prepare(self._read(image))

    def _read(self, image: Picture | Frame) -> dict[str, Any]:
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
            bgr = np.ascontiguousarray(image[..., ::-1])
            return _loaded(bgr, path=None, number=0)
        if isinstance(image, Frame):
            return _loaded(image.pixels, path=str(image.video), number=image.number)
        fault, cause = fault_of(Path(image)), None
        if fault is None:
            try:
                return self._load(dict(img_path=str(image), img_id=0))
            except Exception as error:  # readers raise whatever a file leads them to
                fault, cause = "is no image that can be read", error
        raise DataError(f"{image} {fault}.") from cause


def _loaded(bgr: np.ndarray, *, path: str | None, number: int) -> dict[str, Any]:
    """Pixels as the first step of the pipeline hands them on."""
    size = bgr.shape[:2]
    return dict(img=bgr, img_path=path, img_id=number, img_shape=size, ori_shape=size)
