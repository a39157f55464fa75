"""Sizes and EXIF rotation of image files, read from their headers."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import NamedTuple, TypeVar

from PIL import Image
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile

_ORIENTATION = 0x0112
# Formats whose EXIF rotation OpenCV, the loader in training, applies; not WebP, AVIF...
ROTATED_WHEN_LOADED = frozenset({"JPEG", "MPO", "PNG", "TIFF"})
_HASHED_BYTES = 1 << 16
_OPENCV_PIXELS = 1 << 30  # OpenCV's limit
_ONE_THREAD = RLock()

T = TypeVar("T")


class Header(NamedTuple):
    """Size as stored, and EXIF orientation, 1 to 8 (1 if the loader ignores it)."""

    width: int
    height: int
    orientation: int = 1

    @property
    def stored(self) -> tuple[int, int]:
        """Width and height of the stored pixels."""
        return self.width, self.height

    @property
    def shown(self) -> tuple[int, int]:
        """Width and height after the EXIF rotation, as training loads the image."""
        turned = self.orientation >= 5
        return (self.height, self.width) if turned else (self.width, self.height)


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


def read_header(path: Path) -> Header:
    """Read size and rotation without decoding; OSError if missing or not an image."""
    try:
        with Image.open(path) as image:
            is_turned = image.format in ROTATED_WHEN_LOADED
            orientation = exif_orientation(image) if is_turned else 1
            return Header(*stored_size(image), orientation)
    except OSError:
        raise
    except Exception as error:  # Pillow's readers raise anything
        raise OSError(str(error)) from error


def stored_size(image: Image.Image) -> tuple[int, int]:
    """Stored width and height (newer Pillow rotates TIFFs); KeyError if missing."""
    if isinstance(image, TiffImageFile):
        return image.tag_v2[IMAGEWIDTH], image.tag_v2[IMAGELENGTH]
    return image.size


def exif_orientation(image: Image.Image) -> int:
    """EXIF orientation of an opened image, 1 to 8; 1 if missing.

    ``getexif`` would also search XMP, and decode a PNG for it.
    """
    if isinstance(image, TiffImageFile):
        found = image.tag_v2.get(_ORIENTATION)
    else:
        exif = Image.Exif()
        try:
            exif.load(image.info.get("exif") or b"")
        except Exception:  # Pillow raises anything on broken blocks
            return 1
        found = exif.get(_ORIENTATION)
    return found if isinstance(found, int) and 1 <= found <= 8 else 1


def turn_box(
    corners: tuple[float, float, float, float], header: Header
) -> tuple[float, float, float, float]:
    """Move x1, y1, x2, y2 from stored to shown pixels; swapped corners stay swapped."""
    x1, y1, x2, y2 = corners
    w, h = header.stored
    # EXIF 2.32, tag 0x0112: 5 to 8 swap rows and columns; 6 is shown turned clockwise.
    return {
        1: corners,
        2: (w - x2, y1, w - x1, y2),
        3: (w - x2, h - y2, w - x1, h - y1),
        4: (x1, h - y2, x2, h - y1),
        5: (y1, x1, y2, x2),
        6: (h - y2, x1, h - y1, x2),
        7: (h - y2, w - x2, h - y1, w - x1),
        8: (y1, w - x2, y2, w - x1),
    }[header.orientation]


def content_share(path: Path) -> float:
    """Hash a file's size and first and last 64 KB to [0, 1); OSError if unreadable."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(_HASHED_BYTES)
        file.seek(max(size - _HASHED_BYTES, 0))
        tail = file.read()
    digest = hashlib.blake2b(head + tail + str(size).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "big") / 2**64


def for_all(
    function: Callable[[Path], T], root: Path, images: Iterable[str]
) -> dict[str, T | OSError]:
    """Call a function for many image files in parallel; OSErrors become values."""

    def call(name: str) -> T | OSError:
        try:
            return function(root / name)
        except OSError as error:
            return error

    names = list(dict.fromkeys(images))
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(call, names), strict=True))
