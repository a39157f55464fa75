"""Image files: size, EXIF rotation, and findings about missing or damaged ones.

`damex data check` looks at all images, the loader at one that fails to load.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from types import MappingProxyType
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, UnidentifiedImageError

from damex.datasets.findings import RULES, Finding, Location
from damex.datasets.pixels import ImageHeader, decode, read_header
from damex.errors import printable

IMAGE_SUFFIXES = frozenset(
    {
        *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".bmp", ".tif", ".tiff", ".webp"),
        *(".gif", ".ppm", ".pgm", ".jp2"),
    }
)
_SKIPPED_FOLDERS = frozenset({"__MACOSX", "__pycache__"})
_OPENCV_PIXELS = 1 << 30  # OpenCV's limit
_ONE_THREAD = RLock()
# Tolerated difference of a stated size in pixels, due to rounding.
SIZE_TOLERANCE = 1
# Formats that share suffixes with another.
SAME = MappingProxyType({"MPO": "JPEG", "DIB": "BMP"})
# Marks of the end of a file.
ENDS = MappingProxyType({"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"})
Size = tuple[float, float]
# Class name, and x1, y1, x2, y2 as shares of the image.
NamedBox = tuple[str, float, float, float, float]


def list_files(
    root: str, folder: str = "", entered: frozenset[str] = frozenset()
) -> Iterator[tuple[str, tuple[int, int]]]:
    """Relative path, size and time of the visible files below a folder.

    Links are followed, and their cycles cut.
    """
    real = os.path.realpath(f"{root}/{folder}")
    if real in entered:
        return
    with os.scandir(real) as entries:
        shown = [entry for entry in entries if not entry.name.startswith(".")]
    for entry in shown:
        path = f"{folder}/{entry.name}" if folder else entry.name
        if entry.is_file():
            stat = entry.stat()
            yield path, (stat.st_size, stat.st_mtime_ns)
        elif entry.is_dir() and entry.name not in _SKIPPED_FOLDERS:
            yield from list_files(root, path, entered | {real})


@contextmanager
def images_of_any_size() -> Iterator[None]:
    """Lift Pillow's limit of 179 MP, for trusted datasets.

    The limit is global to the process: one thread at a time changes it.
    """
    with _ONE_THREAD:
        limit = Image.MAX_IMAGE_PIXELS
        Image.MAX_IMAGE_PIXELS = _OPENCV_PIXELS
        try:
            yield
        finally:
            Image.MAX_IMAGE_PIXELS = limit


def turn_box(
    corners: tuple[float, float, float, float], header: ImageHeader
) -> tuple[float, float, float, float]:
    """Move x1, y1, x2, y2 from stored to shown pixels; swapped corners stay swapped."""
    x1, y1, x2, y2 = corners
    w, h = header.shown
    # EXIF 2.32, tag 0x0112, as pixels are turned.
    if header.orientation >= 5:
        x1, y1, x2, y2 = y1, x1, y2, x2
    if header.orientation in (2, 3, 6, 7):
        x1, x2 = w - x2, w - x1
    if header.orientation in (3, 4, 7, 8):
        y1, y2 = h - y2, h - y1
    return x1, y1, x2, y2


def same_size(one: Size, other: Size) -> bool:
    """Whether two sizes differ by rounding at most."""
    return all(abs(a - b) <= SIZE_TOLERANCE for a, b in zip(one, other, strict=True))


def fits_stored(
    header: ImageHeader, stated: Size | None, boxes: Sequence[tuple[float, ...]]
) -> bool | None:
    """Whether boxes (x1, y1, x2, y2) are for the stored, not for the shown pixels.

    ``stated`` is the size in the annotation; None is returned if it is wrong.
    """
    if stated is not None:
        if same_size(stated, header.shown):
            return False
        is_turned = header.orientation != 1 and same_size(stated, header.size)
        return is_turned or None
    # Without a size, boxes fit the image as shown unless only stored holds all.
    stored, shown = (all_fit(boxes, size) for size in (header.size, header.shown))
    return header.orientation >= 5 and stored and not shown


def all_fit(boxes: Sequence[tuple[float, ...]], size: Size) -> bool:
    """Whether boxes (x1, y1, x2, y2) end within an image, but for rounding."""
    right, bottom = (side + SIZE_TOLERANCE for side in size)
    return all(box[2] <= right and box[3] <= bottom for box in boxes)


def is_remote(path: str | Path) -> bool:
    """Whether a path is on a storage such as ``s3://`` (``Path`` keeps one slash)."""
    return re.match(r"[A-Za-z][\w+.-]+:/", str(path)) is not None


class ImageRecord(NamedTuple):
    """An image that an annotation file lists; ``size`` is the stated one.

    ``is_used``: the split loads it (training may skip images without boxes).
    """

    location: Location
    record: str
    path: Path
    size: Size | None
    applies_exif: bool = True
    is_used: bool = True
    boxes: tuple[NamedBox, ...] = ()

    @property
    def split(self) -> str:
        """``train``, ``val`` or ``test``."""
        return self.location.split

    def finding(self, kind: str, text: str, level: str | None = None) -> Finding:
        """A finding about the image file; not an error if the file is never loaded."""
        level = level or RULES[kind].level
        level = "warning" if level == "error" and not self.is_used else level
        source = f"{self.record} of {self.location.file}"
        message = f"the {self.split} image {self.path} {text} ({source})"
        dataset, file = self.location.dataset, str(self.path)
        message = f"dataset {dataset!r}: {message}"
        return Finding(level, kind, dataset, file, self.record, message)


class ImageInfo(NamedTuple):
    """The content of an image file.

    Args:
        problem: Kind, text and optional level of a finding; None for a valid image.
        header: Its format, size, rotation and depth.
        levels: Values shown as 0 and 255, if it is deep and was decoded.
        digest: Hash of the file's content; empty unless it was decoded.
        gradient: See ``gradient_of``; to find near-duplicates.
    """

    problem: tuple[str, str] | tuple[str, str, str | None] | None
    header: ImageHeader = ImageHeader()
    levels: tuple[float, float] | None = None
    digest: bytes = b""
    gradient: np.ndarray | None = None


def check_image_file(image: ImageRecord) -> Iterator[Finding]:
    """All findings about one image file on its own."""
    if is_remote(image.path):
        return
    if not os.path.isfile(image.path):  # noqa: PTH113 - False for a name too long
        yield missing_file(image, None)
        return
    with images_of_any_size():
        info = probe_image(image.path)
    if info.problem is None and decode(image.path.read_bytes()) is None:
        info = truncated("OpenCV refuses it")
    yield from check_image(image, info)


def truncated(reason: object, *, level: str | None = None) -> ImageInfo:
    """Result for a file that can only be read in part."""
    text = f"cannot be decoded to its end ({reason}). Replace the file."
    return ImageInfo(("image-truncated", text, level))


def missing_file(image: ImageRecord, near: str | None) -> Finding:
    """Finding about a missing file; ``near`` is a similar name in its folder."""
    advice = (
        f"The folder has {near!r}: correct file_name"
        if near
        else "Correct data_root or img in the mixture entry, or file_name in the record"
    )
    text = f"does not exist (seen from {Path.cwd()}). {advice}."
    return image.finding("image-missing", text)


def probe_image(path: Path) -> ImageInfo:
    """Read size, format and orientation; decode only a file that may be cut off."""
    advice = "Replace the file, or remove it from the annotation file."
    try:
        size = path.stat().st_size
        if size == 0:
            return ImageInfo(("image-empty", f"(0 bytes) cannot be decoded. {advice}"))
        found = read_header(path)
        if _lacks_end(path, found.format, size) and decode(path.read_bytes()) is None:
            return truncated("OpenCV refuses it")
    except Exception as error:  # PIL's readers raise anything
        known = f"({path.stat().st_size} bytes) " if path.is_file() else ""
        is_plain = isinstance(error, UnidentifiedImageError)
        text = f"{known}cannot be decoded{'' if is_plain else f': {error}'}. {advice}"
        return ImageInfo(("image-unreadable", text))
    # OpenCV crashes on names that are not valid text.
    if printable(str(path)) == str(path) and not cv2.haveImageReader(str(path)):
        kind = found.format
        text = f"is a {kind} file, which OpenCV does not read. Convert it to PNG."
        return ImageInfo(("image-unreadable", text))
    return ImageInfo(None, found)


def _lacks_end(path: Path, kind: str, size: int) -> bool:
    """Whether no mark of the end is in the last kilobyte; cameras may append more."""
    if (end := ENDS.get(SAME.get(kind, kind))) is None:
        return False
    with path.open("rb") as file:
        file.seek(max(size - 1024, 0))
        return end not in file.read()


def check_image(image: ImageRecord, info: ImageInfo) -> Iterator[Finding]:
    """Compare a file with its record."""
    header = info.header
    if info.problem is not None:
        yield image.finding(*info.problem)
        return
    if image.size is not None:
        yield from _check_size(image, header, image.size)
    if header.is_deep:
        shown = "" if info.levels is None else " {:g} to {:g}".format(*info.levels)
        text = (
            f"has more than 8 bits per channel: the range of its values{shown} is "
            "shown as 0 to 255, in training and predictions alike."
        )
        yield image.finding("image-depth", text)
    stated = Image.registered_extensions().get(image.path.suffix.lower())
    found = SAME.get(header.format, header.format)  # empty if Pillow does not know it
    if stated and found and SAME.get(stated, stated) != found:
        text = f"is a {header.format} file by its content. It is read all the same."
        yield image.finding("image-suffix", text)


def _check_size(
    image: ImageRecord, header: ImageHeader, stated: Size
) -> Iterator[Finding]:
    """Infer from the record's size whether its boxes fit the image as loaded."""
    shown = header.shown
    # OpenCV also rotates TIFF when asked not to.
    applies = image.applies_exif or header.format == "TIFF"
    loaded, other = (shown, header.size) if applies else (header.size, shown)
    fits, fits_other = (same_size(stated, size) for size in (loaded, other))
    if header.orientation == 1 and not fits:
        hint = "; width and height are exchanged"
        hint = hint if same_size(stated, header.size[::-1]) else ""
        text = (
            f"has {_words(header.size)} px, and its record states {_words(stated)}"
            f"{hint}. Correct the record, and its boxes if they are for another size."
        )
        yield image.finding("image-size", text)
    if header.orientation == 1:
        return
    rewrite = ": its boxes lie elsewhere. Write it again without EXIF." + applies * (
        " Or name the dataset by root='<folder>', which rotates its boxes, or load it "
        "with color_type='color_ignore_orientation'."
    )
    unclear = (
        ", so that sizes do not tell whether the boxes are for the stored or for the "
        "shown image. Look at it with damex data browse."
    )
    level, advice = {
        (True, True): ("warning", unclear),
        (True, False): ("info", ", which fits. Other programs may show it otherwise."),
        (False, True): ("error", rewrite),
        (False, False): ("error", ". Correct the record."),
    }[fits, fits_other]
    text = (
        f"is rotated by EXIF (orientation {header.orientation}): it is stored with "
        f"{_words(header.size)} and shown with {_words(shown)} px, training loads "
        f"{_words(loaded)}, and its record states {_words(stated)}{advice}"
    )
    kind = "image-rotated" if fits or fits_other else "image-size"
    yield image.finding(kind, text, level)


def _words(size: Size) -> str:
    return f"{size[0]:g} x {size[1]:g}"


def check_scales(
    images: Iterable[ImageRecord], scales: Sequence[Size]
) -> Iterator[Finding]:
    """Images that an aspect-preserving resize would shrink to a side of 0 px."""
    for image in images:
        if image.size is None:
            continue
        long, short = max(image.size), min(image.size)
        for scale in scales:
            # As in mmcv, each side has its own bound.
            factor = min(max(scale) / long, min(scale) / short)
            if int(short * factor + 0.5) < 1:
                text = (
                    f"has {_words(image.size)} px, and resizing to {_words(scale)} px "
                    "leaves a side of 0. Cut it into tiles, or remove it from the "
                    "annotation file."
                )
                yield image.finding("image-elongated", text)
                break
