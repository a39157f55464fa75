"""Find, read and preprocess images and video frames."""

from __future__ import annotations

import glob
import os
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import cv2
import mmcv
import numpy as np
from mmengine.dataset import Compose
from PIL import Image, UnidentifiedImageError

from damex.datasets.formats.tree import IMAGE_SUFFIXES
from damex.errors import DataError

Picture = str | Path | np.ndarray
# Videos that OpenCV cannot read are reported at the end.
SUFFIXES = (*sorted(IMAGE_SUFFIXES), ".avif", ".heic", ".heif")
VIDEO_SUFFIXES = (".mp4", ".avi", ".mov", ".mkv", ".webm")


@dataclass(frozen=True, eq=False)
class Frame:
    """Video frame ``number``, from 0; pixels are uint8 (height, width, 3) in BGR."""

    video: Path
    number: int
    pixels: np.ndarray


def find_images(words: Sequence[str], *, videos: bool = False) -> list[Path]:
    """Find the images (and ``videos``) of files, folders and patterns, each once.

    Files may have any name. Folders are searched recursively, images without a suffix
    included. Other words are patterns (``*``, ``**``, ``?``).

    Raises:
        DataError: If a word matches nothing.
    """
    found: dict[Path, Path] = {}
    suffixes = (*SUFFIXES, *VIDEO_SUFFIXES) if videos else SUFFIXES
    for word in words:
        files = _files_of(word, suffixes)
        if not files:
            what = "image in the folder" if Path(word).is_dir() else "file or folder"
            raise DataError(
                f"there is no {what} {word} (seen from {Path.cwd()}); images end in "
                f"{', '.join(suffixes)}."
            )
        for file in files:
            found.setdefault(_place(file), file)
    return list(found.values())


def _files_of(word: str, suffixes: Sequence[str]) -> list[Path]:
    path = Path(word)
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = sorted(path.rglob("*"))
    else:
        names = glob.glob(word, recursive=True)  # noqa: PTH207 (absolute ones, too)
        inside = [Path(name) for name in sorted(names)]
    return [p for p in inside if p.is_file() and _is_wanted(p, suffixes)]


def _is_wanted(path: Path, suffixes: Sequence[str]) -> bool:
    """Whether a file has one of the suffixes, or none and image content."""
    if path.suffix:
        return path.suffix.lower() in suffixes
    try:
        with Image.open(path):
            return True
    except Image.DecompressionBombError:
        return True  # reported when it is read
    except Exception:  # Pillow's readers raise anything
        return False


def _place(path: Path) -> Path:
    """Absolute path without ``..``; links are kept if possible."""
    path = path.absolute()
    return path.parent.resolve() / path.name if ".." in path.parts else path


def names_of(paths: Sequence[Path]) -> list[str]:
    """Unique relative names for files, without ``..``, from their common folder."""
    places = [_place(path) for path in paths]
    # Windows drive letters become folders.
    rooted = [
        PurePosixPath("/", place.anchor.strip(":\\/"), *place.parts[1:])
        for place in places
    ]
    shared = posixpath.commonpath([path.parent for path in rooted]) if rooted else ""
    return [printable(str(path.relative_to(shared))) for path in rooted]


def printable(name: str) -> str:
    """Replace bytes of a file name or message that are not UTF-8."""
    return os.fsencode(name).decode(errors="backslashreplace")


def is_video(path: Path) -> bool:
    """Whether a file has the suffix of a video."""
    return path.suffix.lower() in VIDEO_SUFFIXES


def open_video(path: Path) -> mmcv.VideoReader:
    """Open a video; DataError if OpenCV cannot read it."""
    if not path.is_file():
        raise DataError(f"{path} does not exist.")
    if printable(str(path)) != str(path):
        raise DataError(
            f"{path} has a name that is not UTF-8, which OpenCV cannot open; rename it."
        )
    video = mmcv.VideoReader(str(path))
    if not video.opened:
        raise DataError(f"{path} is no video that OpenCV can read.")
    return video


def frames_of(path: Path) -> Iterator[Frame]:
    """Iterate over the frames of a video.

    Raises:
        DataError: If it cannot be read, or ends early (known after the last frame).
    """
    video, read, reached = open_video(path), 0, 0
    for read, pixels in enumerate(video, start=1):
        yield Frame(path, read - 1, pixels)
        # Some formats only state a duration; the count is then estimated from the rate.
        seconds = video.vcap.get(cv2.CAP_PROP_POS_MSEC) / 1000
        reached = max(read, round(seconds * video.fps) + 1)
    if read == 0:
        raise DataError(f"{path} holds no frame that OpenCV can read.")
    stated = video.frame_cnt  # <= 0 if unknown, often one too many
    if stated - reached > 1:
        raise DataError(f"{path} breaks off: {read} of {stated} frames could be read.")


def fault_of(path: Path) -> str | None:
    """Why an image file is broken although OpenCV may read it; None if it is fine.

    OpenCV fills truncated files with gray, and decodes bombs of a gigabyte of pixels.
    """
    try:
        with Image.open(path) as image:
            image.load()
    except FileNotFoundError:
        return "does not exist"
    except IsADirectoryError:
        return "is a folder; give the files in it"
    except Image.DecompressionBombError as error:
        return f"is too large ({str(error).rstrip('.')}); cut it into tiles"
    except UnidentifiedImageError:
        return None  # other readers support more formats
    except Exception as error:  # PIL's readers raise anything
        return f"cannot be decoded to its end ({error})"
    return None


class Inputs:
    """Test pipeline of a training for images; starts with ``LoadImageFromFile``."""

    def __init__(self, pipeline: Sequence[Mapping[str, Any]]) -> None:
        load, *rest = pipeline
        self._load, self._prepare = Compose([load]), Compose(rest)

    def each(self, image: Picture) -> Iterator[dict[str, Any]]:
        """Preprocess an image, or all frames of a video.

        Raises:
            DataError: If it cannot be read.
        """
        if isinstance(image, str | Path) and is_video(Path(image)):
            yield from map(self, frames_of(Path(image)))
        else:
            yield self(image)

    def __call__(self, image: Picture | Frame) -> dict[str, Any]:
        """Preprocess one image into mmdet's ``inputs`` and ``data_samples``.

        Raises:
            DataError: If it cannot be read, or the pipeline rejects it.
        """
        loaded = self._read(image)
        height, width = loaded["img_shape"][:2]
        try:
            return self._prepare(loaded)
        except Exception as error:  # steps raise anything
            reason = error.err if isinstance(error, cv2.error) else error
            raise DataError(
                f"{loaded['img_path'] or 'the array'} ({width} x {height} px) cannot "
                f"be resized as in the training ({reason}); crop or pad it."
            ) from error

    def _read(self, image: Picture | Frame) -> dict[str, Any]:
        """Load an image like the first step of the pipeline."""
        if isinstance(image, Frame):
            return _loaded(image.pixels, path=str(image.video), number=image.number)
        if not isinstance(image, str | Path):
            bgr = np.ascontiguousarray(_checked(image)[..., ::-1])
            return _loaded(bgr, path=None, number=0)
        fault, cause = fault_of(Path(image)), None
        if fault is None:
            try:
                return self._load(dict(img_path=str(image), img_id=0))
            except Exception as error:  # readers raise anything
                fault, cause = "is no image that can be read", error
        raise DataError(f"{image} {fault}.") from cause


def _checked(image: Any) -> np.ndarray:
    """Check that an array can be an image."""
    found = type(image).__name__
    if isinstance(image, np.ndarray):
        is_rgb = image.ndim == 3 and image.shape[2] == 3
        if image.dtype == np.uint8 and is_rgb and image.size > 0:
            return image
        found = f"{image.dtype} of shape {image.shape}"
    raise DataError(
        "an image must be a path or a uint8 array (height, width, 3) in RGB, got "
        f"{found}."
    )


def _loaded(bgr: np.ndarray, *, path: str | None, number: int) -> dict[str, Any]:
    """Pixels in the output format of ``LoadImageFromFile``."""
    size = bgr.shape[:2]
    return dict(img=bgr, img_path=path, img_id=number, img_shape=size, ori_shape=size)
