"""Pixels of image files: the same in training, checks of data, and predictions."""

from __future__ import annotations

import io
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import cv2
import mmcv
import mmengine.fileio as fileio
import numpy as np
from mmcv.transforms import LoadImageFromFile as MMCVLoader
from mmengine.registry import TRANSFORMS
from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, TiffImageFile

ORIENTATION = 0x0112  # of EXIF
# Percentiles of an image of more than 8 bits that become black and white.
DARK, BRIGHT = 0.1, 99.9


class ImageHeader(NamedTuple):
    """Header of an image file; format and mode have Pillow's names.

    Args:
        size: Width and height as stored.
        orientation: EXIF orientation, 1 to 8; 1 is upright.
        is_deep: Whether channels have more than 8 bits.
    """

    format: str = ""
    size: tuple[int, int] = (0, 0)
    orientation: int = 1
    is_deep: bool = False
    mode: str = ""

    @property
    def shown(self) -> tuple[int, int]:
        """Width and height after the EXIF rotation, as training loads the image."""
        return (self.size[1], self.size[0]) if self.orientation >= 5 else self.size


def read_header(file: Path | BinaryIO) -> ImageHeader:
    """Read the header of an image without decoding; OSError if that is impossible."""
    try:
        with Image.open(file) as image:
            return _header_of(image)
    except UnidentifiedImageError:
        pixels = _unchanged(file)
        if pixels is None:
            raise
        height, width = pixels.shape[:2]
        return ImageHeader("", (width, height), is_deep=pixels.dtype != np.uint8)
    except OSError:
        raise
    except Exception as error:  # Pillow's readers raise anything
        raise OSError(str(error)) from error


def _unchanged(file: Path | BinaryIO) -> np.ndarray | None:
    """The pixels of a file that Pillow does not know, such as TIFF of floats in RGB."""
    if not isinstance(file, Path):
        file.seek(0)
    raw = file.read_bytes() if isinstance(file, Path) else file.read()
    encoded = np.frombuffer(raw, np.uint8)
    return cv2.imdecode(encoded, cv2.IMREAD_UNCHANGED) if len(encoded) else None


def _header_of(image: ImageFile) -> ImageHeader:
    size = image.size
    if isinstance(image, TiffImageFile):  # newer Pillow rotates these
        size = image.tag_v2[IMAGEWIDTH], image.tag_v2[IMAGELENGTH]
        found: Any = image.tag_v2.get(ORIENTATION)
    else:
        found = _exif_orientation(image)
    is_valid = isinstance(found, int) and 1 <= found <= 8
    # Pillow's raw modes of 16 bits per channel end in ;16B and so on.
    is_deep = image.mode[0] in "IF" or ";16" in str(image.tile)
    kind = image.format or ""
    return ImageHeader(kind, size, found if is_valid else 1, is_deep, image.mode)


def _exif_orientation(image: ImageFile) -> Any:
    """EXIF orientation of an image that is not TIFF, if it is valid."""
    content = image.info.get("exif")
    if image.format == "PNG":  # Pillow reads a block after the pixels when decoding
        content = content or _png_exif(image.fp)
    exif = Image.Exif()  # getexif would also decode a PNG to search XMP
    with suppress(Exception):  # Pillow raises anything on broken blocks
        exif.load(content or b"")
    return exif.get(ORIENTATION)


def _png_exif(file: Any) -> bytes:
    """The EXIF block of a PNG file, wherever it is."""
    position = file.tell()
    try:
        file.seek(8)
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            if kind == b"eXIf":
                return file.read(length)
            file.seek(length + 4, io.SEEK_CUR)
        return b""
    finally:
        file.seek(position)


class Pixels(NamedTuple):
    """A decoded image, uint8.

    ``levels`` are the stored values shown as 0 and 255, of an image of more than 8 bits
    per channel; None for any other.
    """

    image: np.ndarray
    levels: tuple[float, float] | None = None


def read_pixels(path: str | Path, flag: str = "color") -> Pixels:
    """Decode a file as `decode` does; OSError if it is missing or OpenCV refuses it."""
    found = decode(fileio.get(str(path)), flag)
    if found is None:
        raise OSError(f"{path} cannot be decoded")
    return found


def decode(content: bytes, flag: str = "color") -> Pixels | None:
    """Decode an image file into (height, width, 3) in BGR, upright; None if it fails.

    Flags are those of ``mmcv.imfrombytes``: ``grayscale`` gives (height, width), and
    ``..._ignore_orientation`` leaves the EXIF rotation out (OpenCV rotates TIFF all the
    same). ``unchanged`` is left to mmcv.
    """
    if flag == "unchanged" or not content:
        found = mmcv.imfrombytes(content, flag=flag)
        return None if found is None else Pixels(found)
    stored = ImageHeader()
    with suppress(Exception):  # Pillow reads fewer files than OpenCV
        stored = read_header(io.BytesIO(content))
    raw = _decoded(content, is_gray=stored.mode[:1] in ("I", "F"))
    if raw is None:
        return None
    image, levels = (raw, None) if raw.dtype == np.uint8 else to_8_bits(raw)
    if not flag.endswith("ignore_orientation") and stored.format != "TIFF":
        image = _turned(image, stored.orientation)
    if flag.startswith("grayscale"):
        image = cv2.cvtColor(image, cv2.COLOR_BGR2GRAY)
    return Pixels(image, levels)


def _decoded(content: bytes, *, is_gray: bool) -> np.ndarray | None:
    """Pixels as stored, (height, width, 3), or None; ``is_gray``: of one deep channel.

    OpenCV reads 32-bit gray images only unchanged.
    """
    deep = cv2.IMREAD_COLOR | cv2.IMREAD_ANYDEPTH | cv2.IMREAD_IGNORE_ORIENTATION
    buffer = np.frombuffer(content, np.uint8)
    for flag in [cv2.IMREAD_UNCHANGED] if is_gray else [deep, cv2.IMREAD_UNCHANGED]:
        found = cv2.imdecode(buffer, flag)
        if found is not None:
            found = np.atleast_3d(found)
            is_color = found.shape[2] >= 3
            return found[..., :3] if is_color else found[..., :1].repeat(3, axis=2)
    return None


def to_8_bits(values: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Map the range of values that an image holds to 0 to 255; return it, too.

    Sensors of 10 to 16 bits, and maps of temperatures, fill a small part of their
    range, so the image itself decides: its 0.1 % darkest values become 0, its 0.1 %
    brightest 255, in all channels alike. NaN becomes 0.
    """
    known = values[np.isfinite(values)]
    if known.size == 0:
        return np.zeros(values.shape, np.uint8), (0.0, 0.0)
    low, high = np.percentile(known, (DARK, BRIGHT)).tolist()
    if low == high:  # a plain image, except for a few pixels
        low, high = float(known.min()), float(known.max())
    share = (values.astype(np.float64) - low) / max(high - low, np.finfo(float).tiny)
    image = np.nan_to_num(share.clip(0.0, 1.0)) * 255
    return image.round().astype(np.uint8), (low, high)


def _turned(image: np.ndarray, orientation: int) -> np.ndarray:
    """Apply an EXIF orientation (EXIF 2.32, tag 0x0112) to stored pixels."""
    if orientation >= 5:
        image = image.swapaxes(0, 1)
    if orientation in (2, 3, 6, 7):
        image = image[:, ::-1]
    if orientation in (3, 4, 7, 8):
        image = image[::-1]
    return np.ascontiguousarray(image)


@TRANSFORMS.register_module(force=True)
class LoadImageFromFile(MMCVLoader):
    """mmcv's loader, with two differences; it takes the place of mmcv's in configs.

    Images of all formats are rotated by EXIF (OpenCV leaves WebP out), and images of
    more than 8 bits per channel are mapped by `to_8_bits` (OpenCV divides 16 bits by
    256, which leaves 16 gray levels of 12 bits, and fails on 32). Only with
    ``imdecode_backend="cv2"``, the default. ``levels`` of such an image are added to
    the results.
    """

    def transform(self, results: dict) -> dict | None:
        """Load ``img`` of ``img_path``."""
        if self.imdecode_backend != "cv2" or self.file_client_args is not None:
            return super().transform(results)
        path = results["img_path"]
        try:
            content = fileio.get(path, backend_args=self.backend_args)
            found = decode(content, self.color_type)
            if found is None:
                raise OSError(f"failed to load image: {path}")
        except Exception:
            if self.ignore_empty:
                return None
            raise
        image = found.image.astype(np.float32) if self.to_float32 else found.image
        size = image.shape[:2]
        results.update(img=image, img_shape=size, ori_shape=size)
        if found.levels is not None:
            results["levels"] = found.levels
        return results
