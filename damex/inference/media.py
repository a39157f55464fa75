"""Images and videos: read from files, and prepared for a detector."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from mmengine.dataset import Compose, pseudo_collate
from mmengine.logging import print_log
from PIL import Image, UnidentifiedImageError

from damex.datasets.pixels import Pixels, to_8_bits
from damex.datasets.windows import windows_of
from damex.errors import DataError, printable

Picture = str | os.PathLike | np.ndarray | Image.Image
VIDEO_SUFFIXES = (
    *(".mp4", ".m4v", ".avi", ".mov", ".mkv"),
    *(".webm", ".mpg", ".mpeg", ".wmv", ".flv"),
)


def problem_of(path: Path) -> str | None:
    """Why an image file is broken although OpenCV may read it; None if it is fine.

    OpenCV fills truncated files with gray, and decodes bombs of a gigabyte of pixels.
    """
    try:
        with Image.open(path) as image:
            image.draft(None, (1, 1))  # an eighth of a JPEG's size: faster
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


def is_video(path: Path) -> bool:
    """Whether a file has the suffix of a video."""
    return path.suffix.lower() in VIDEO_SUFFIXES


def open_video(path: Path) -> cv2.VideoCapture:
    """Open a video; DataError if OpenCV cannot read it."""
    if not path.is_file():
        raise DataError(f"{path} does not exist.")
    if printable(str(path)) != str(path):
        raise DataError(
            f"{path} has a name that is not UTF-8, which OpenCV cannot open; rename it."
        )
    video = cv2.VideoCapture(str(path))
    if not video.isOpened():
        raise DataError(f"{path} is not a video that OpenCV can read.")
    return video


def frame_count(video: cv2.VideoCapture) -> int:
    """The stated number of frames: <= 0 if unknown, often one too many."""
    return int(video.get(cv2.CAP_PROP_FRAME_COUNT))


def frames_of(path: Path) -> Iterator[np.ndarray]:
    """Iterate over the frames of a video, uint8 (height, width, 3) in BGR.

    DataError if it cannot be read, or ends early (known after the last frame).
    """
    video, read, reached = open_video(path), 0, 0
    fps = video.get(cv2.CAP_PROP_FPS)
    while (frame := video.read())[0]:
        read += 1
        yield frame[1]
        # Some formats only state a duration; the count is then estimated from the rate.
        seconds = video.get(cv2.CAP_PROP_POS_MSEC) / 1000
        reached = max(read, round(seconds * fps) + 1)
    if read == 0:
        raise DataError(f"{path} holds no frame that OpenCV can read.")
    stated = frame_count(video)
    if stated - reached > 1:
        raise DataError(f"{path} breaks off: {read} of {stated} frames could be read.")


class Inputs:
    """Test pipeline of a training for images; starts with ``LoadImageFromFile``."""

    def __init__(self, pipeline: Sequence[Mapping[str, Any]]) -> None:
        load, *rest = pipeline
        self._load, self._prepare = Compose([load]), Compose(rest)
        self._is_gray = str(load.get("color_type")).startswith("grayscale")
        self._is_float = bool(load.get("to_float32"))
        self._is_depth_said = False

    def each(self, image: Picture) -> Iterator[dict[str, Any]]:
        """Preprocess an image, or all frames of a video."""
        if isinstance(image, str | os.PathLike) and is_video(Path(image)):
            for number, bgr in enumerate(frames_of(Path(image))):
                pixels = self._as_of_files(bgr)
                yield self._prepared(_loaded(pixels, path=str(image), number=number))
        else:
            yield self(image)

    def __call__(self, image: Picture) -> dict[str, Any]:
        """Preprocess one image into mmdet's ``inputs`` and ``data_samples``.

        ``pixels`` is the loaded image, in BGR; `detect` leaves it out. DataError if it
        cannot be read, or the pipeline rejects it.
        """
        if not isinstance(image, str | os.PathLike):
            rgb, levels = _checked(image)
            bgr = self._as_of_files(np.ascontiguousarray(rgb[..., ::-1]))
            array = _loaded(bgr, path=None, number=0)
            return self._prepared(array | dict(levels=levels))
        loaded, problem = None, problem_of(Path(image))
        with suppress(Exception):  # readers raise anything
            if not problem:
                loaded = self._load(dict(img_path=str(image), img_id=0))
        if loaded is None:
            raise DataError(f"{image} {problem or 'is not an image that can be read'}.")
        return self._prepared(loaded)

    def windows(
        self, one: Mapping[str, Any], side: int, meta: Mapping[str, Any]
    ) -> Iterator[dict[str, Any]]:
        """Preprocess the windows of an image, which `each` has preprocessed whole.

        Their data samples have ``meta``, and ``window``, the place in the image.
        """
        pixels, whole = one["pixels"], one["data_samples"].metainfo
        height, width = pixels.shape[:2]
        for window in windows_of(width, height, side):
            left, top, right, bottom = window
            part = np.ascontiguousarray(pixels[top:bottom, left:right])
            packed = self._prepared(
                _loaded(part, path=whole.get("img_path"), number=whole["img_id"])
            )
            packed["data_samples"].set_metainfo(
                {**meta, "window": window, "ori_shape": (height, width)}
            )
            yield packed

    def _as_of_files(self, bgr: np.ndarray) -> np.ndarray:
        """Pixels as the first step loads them: gray or as floats, if it does so."""
        pixels = cv2.cvtColor(bgr, cv2.COLOR_BGR2GRAY) if self._is_gray else bgr
        return pixels.astype(np.float32) if self._is_float else pixels

    def _prepared(self, loaded: dict[str, Any]) -> dict[str, Any]:
        if (levels := loaded.pop("levels", None)) is not None:
            self._say_depth(loaded["img_path"] or "an image", levels)
        pixels, (height, width) = loaded["img"], loaded["img_shape"][:2]
        try:
            return dict(self._prepare(loaded), pixels=pixels)
        except Exception as error:  # steps raise anything
            reason = error.err if isinstance(error, cv2.error) else error
            raise DataError(
                f"{loaded['img_path'] or 'the array'} ({width} x {height} px) cannot "
                f"be resized as in the training ({reason}); crop or pad it."
            ) from error

    def _say_depth(self, name: str, levels: Sequence[float]) -> None:
        """Say once how values of more than 8 bits are shown to the detector."""
        if not self._is_depth_said:
            text = (
                f"{name} has more than 8 bits per channel: the range of its values, "
                "{:g} to {:g}, is shown to the detector as 0 to 255, as in training; "
                "the same holds for other such images."
            )
            text = printable(text.format(*levels))
            print_log(text, logger="current", level=logging.WARNING)
        self._is_depth_said = True


def as_several(images: Picture | Iterable[Picture]) -> Iterable[Picture]:
    """One image as a list of one; several images as they are."""
    one: Any = images
    is_one = isinstance(images, Picture | bytes) or hasattr(images, "shape")
    return [one] if is_one or not isinstance(images, Iterable) else images


def _checked(image: Any) -> Pixels:
    """Pixels of an array or PIL image, uint8 (height, width, 3) in RGB."""
    found = type(image).__name__
    if isinstance(image, Image.Image):
        return _pixels_of(image)
    if isinstance(image, np.ndarray):
        is_rgb = image.ndim == 3 and image.shape[2] == 3
        if image.dtype == np.uint8 and is_rgb and image.size > 0:
            return Pixels(image)
        found = f"{image.dtype} of shape {image.shape}"
    raise DataError(
        "an image must be a path, a PIL image, or a uint8 array (height, width, 3) in "
        f"RGB, got {found}."
    )


def _pixels_of(image: Image.Image) -> Pixels:
    """Pixels of a PIL image in RGB as they are: EXIF is not applied."""
    try:
        if image.mode[0] in "IF":  # more than 8 bits, which convert would cut off
            values, levels = to_8_bits(np.asarray(image))
            return Pixels(np.stack([values] * 3, axis=2), levels)
        return Pixels(np.asarray(image.convert("RGB")))
    except Exception as error:  # Pillow decodes late, and its readers raise anything
        raise DataError(f"the PIL image cannot be decoded ({error}).") from error


def as_rgb(pixels: np.ndarray) -> np.ndarray:
    """Output of ``LoadImageFromFile``, also gray or of floats, as uint8 RGB."""
    pixels_HWC = np.atleast_3d(pixels).clip(0, 255).astype(np.uint8)
    if pixels_HWC.shape[2] < 3:
        pixels_HWC = pixels_HWC[..., :1].repeat(3, 2)
    return pixels_HWC[..., 2::-1]


def _loaded(bgr: np.ndarray, *, path: str | None, number: int) -> dict[str, Any]:
    """Pixels in the output format of ``LoadImageFromFile``."""
    size = bgr.shape[:2]
    return dict(img=bgr, img_path=path, img_id=number, img_shape=size, ori_shape=size)


@torch.inference_mode()
def detect(detector: Any, batch: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Run a detector on outputs of `Inputs`; returns mmdet's data samples."""
    keys = ("inputs", "data_samples")
    images = [{key: one[key] for key in keys} for one in batch]
    return detector.test_step(pseudo_collate(images))
