"""Check image files: whether they are there, what they are, how they are turned."""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from damex.curation.findings import KINDS, Finding, Place
from damex.curation.records import Records, is_number
from damex.datasets.formats.images import (
    ROTATED_WHEN_LOADED,
    exif_orientation,
    images_of_any_size,
    stored_size,
)

# EXIF: how the rows and columns are stored that a viewer shows upright.
UPRIGHT, FIRST_WITH_SIDES_EXCHANGED = 1, 5
SUFFIXES = {
    "BMP": {".bmp", ".dib"},
    "GIF": {".gif"},
    "JPEG": {".jpg", ".jpeg", ".jpe", ".jfif"},
    "MPO": {".jpg", ".jpeg", ".mpo"},
    "PNG": {".png"},
    "PPM": {".ppm", ".pgm", ".pbm", ".pnm"},
    "TIFF": {".tif", ".tiff"},
    "WEBP": {".webp"},
}
# Sides of the small picture by which images are compared.
LOOK_SIDE = 16
# Norm of its differences, in levels of grey, below which a picture is plain.
PLAIN = 4.0


class ImageRecord(NamedTuple):
    """An image that an annotation file lists.

    Args:
        place: The annotation file.
        split: ``train``, ``val`` or ``test``.
        record: Its record, for messages.
        path: The file.
        size: Width and height that the record gives, or None.
        applies_exif: Whether training turns the image as EXIF says.
        boxes: Class name and x1, y1, x2, y2 as shares of the image, of each box.
    """

    place: Place
    split: str
    record: str
    path: Path
    size: tuple[float, float] | None
    applies_exif: bool = True
    boxes: tuple[tuple[str, float, float, float, float], ...] = ()

    def finding(self, kind: str, text: str, level: str | None = None) -> Finding:
        """A finding about the image file, which the text says something about."""
        return Finding(
            level=level or KINDS[kind].level,
            kind=kind,
            dataset=self.place.dataset,
            file=str(self.path),
            record=self.record,
            message=(
                f"dataset {self.place.dataset!r}: the {self.split} image {self.path} "
                f"{text} ({self.record} of {self.place.file})"
            ),
        )


class Look(NamedTuple):
    """What an image file turned out to be.

    Args:
        fault: Kind of finding and text; None for an image without fault.
        format: PIL's name of the format.
        size: Width and height as stored.
        orientation: As EXIF says, 1 to 8; 1 is upright.
        digest: Hash of the file's content; empty where it was not decoded.
        gradient: Differences of a small grey picture, of norm 1, for comparison.
    """

    fault: tuple[str, str] | None
    format: str = ""
    size: tuple[int, int] = (0, 0)
    orientation: int = UPRIGHT
    digest: bytes = b""
    gradient: np.ndarray | None = None


EMPTY = Look(("image-empty", "(0 bytes) cannot be decoded. Replace the file."))


def image_records(
    records: Records,
    place: Place,
    split: str,
    folder: Path,
    *,
    applies_exif: bool = True,
) -> list[ImageRecord]:
    """The images of an annotation file, each file once."""
    found = {}
    boxes = _boxes(records)
    for position, image in enumerate(records.images):
        size = records.size_M2[position].tolist()
        name = image.get("file_name")
        if isinstance(name, str) and name and name not in found:
            known = None if np.isnan(size).any() else (size[0], size[1])
            record = f"image {image['id']}"
            inside = tuple(boxes.get(position, ()))
            found[name] = ImageRecord(
                place, split, record, folder / name, known, applies_exif, inside
            )
    return list(found.values())


def _boxes(
    records: Records,
) -> dict[int, list[tuple[str, float, float, float, float]]]:
    """Boxes by the position of their image, as in :class:`ImageRecord`."""
    found: dict[int, list[tuple[str, float, float, float, float]]] = {}
    sizes = records.size_M2.tolist()
    for record, position in zip(
        records.annotations, records.image_N.tolist(), strict=True
    ):
        bbox = record.get("bbox")
        if position < 0 or not isinstance(bbox, list) or len(bbox) != 4:
            continue
        if all(map(is_number, bbox)):
            name = records.categories.get(record["category_id"], "")
            (x, y, w, h), (width, height) = bbox, sizes[position]
            corners = x / width, y / height, (x + w) / width, (y + h) / height
            found.setdefault(position, []).append((name, *corners))
    return found


def check_existence(
    images: Sequence[ImageRecord],
) -> tuple[list[ImageRecord], list[Finding]]:
    """Look for files, folder by folder: one listing is quicker than many questions.

    Returns:
        The images that are there, and a finding for each other one.
    """
    folders: dict[Path, list[ImageRecord]] = {}
    for image in images:
        folders.setdefault(image.path.parent, []).append(image)
    missing: set[ImageRecord] = set()
    findings = []
    for folder, inside in folders.items():
        listing = _listing(folder)
        if listing is None and len(inside) > 1:
            missing.update(inside)
            findings.append(_missing_folder(inside))
            continue
        for image in inside:
            name = image.path.name
            near = (listing or {}).get(name.casefold())
            if near != name and not os.path.isfile(image.path):  # noqa: PTH113 - a name too long
                missing.add(image)
                findings.append(_missing_file(image, near))
    return [image for image in images if image not in missing], findings


def _listing(folder: Path) -> dict[str, str] | None:
    """Names of a folder by their lower case; None if there is no such folder."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name.casefold(): entry.name for entry in entries}
    except OSError:
        return None


def _missing_folder(images: Sequence[ImageRecord]) -> Finding:
    first = images[0]
    text = (
        f"there is no such folder of images (seen from {Path.cwd()}); {len(images)} "
        f"records of {first.place.file} need it, such as {first.record} "
        f"({first.path.name}). Correct data_root or img in the mixture entry."
    )
    folder = str(first.path.parent)
    return first.place.finding("folder-missing", None, text, file=folder)


def _missing_file(image: ImageRecord, near: str | None) -> Finding:
    mend = (
        f"The folder has {near!r}: correct file_name"
        if near
        else "Correct file_name, data_root or img, or take it out"
    )
    text = f"does not exist (seen from {Path.cwd()}). {mend}."
    return image.finding("image-missing", text)


def look_at(
    images: Sequence[ImageRecord],
    *,
    decode: bool,
    advance: Callable[[], Any] = lambda: None,
    seconds: float = float("inf"),
) -> list[Look]:
    """Open images in threads.

    Args:
        images: Those that are there.
        decode: Whether to read and decode them whole, or their headers alone.
        advance: Called after each image.
        seconds: When to stop.

    Returns:
        What they are, in order; fewer than the images where time was over.
    """
    started = time.monotonic()
    look = _look_whole if decode else _look_at_header
    looks: list[Look] = []
    workers = os.cpu_count() or 1
    size = 32 * workers  # all of a list at once could not be stopped
    with images_of_any_size(), ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(images), size):
            if time.monotonic() - started > seconds:
                break
            paths = [image.path for image in images[start : start + size]]
            for found in pool.map(look, paths):
                looks.append(found)
                advance()
    return looks


def check_look(image: ImageRecord, look: Look) -> list[Finding]:
    """Compare a file with its record."""
    if look.fault is not None:
        kind, text = look.fault
        return [image.finding(kind, text)]
    if look.orientation == UPRIGHT:
        findings = [*_check_upright(image, look)]
    else:
        findings = [*_check_rotated(image, look)]
    suffix = image.path.suffix.lower()
    if suffix not in SUFFIXES.get(look.format, {suffix}):
        text = f"is a {look.format} file by its content. It is read all the same."
        findings.append(image.finding("image-suffix", text))
    return findings


def _check_upright(image: ImageRecord, look: Look) -> Iterator[Finding]:
    if image.size is None or image.size == look.size:
        return
    swapped = image.size == look.size[::-1]
    hint = "; width and height are exchanged" if swapped else ""
    text = (
        f"has {_words(look.size)} px, and its record says "
        f"{_words(image.size)}{hint}. Correct the record, and its boxes if they are "
        "for another size."
    )
    yield image.finding("image-size", text)


def _check_rotated(image: ImageRecord, look: Look) -> Iterator[Finding]:
    """Tell by the record's size whether its boxes are for the image as it is loaded."""
    if image.size is None:
        return
    turned = look.orientation >= FIRST_WITH_SIDES_EXCHANGED
    shown = look.size[::-1] if turned else look.size
    # OpenCV turns TIFF even where it is told not to.
    asked = image.applies_exif or look.format == "TIFF"
    applies = asked and look.format in ROTATED_WHEN_LOADED
    loaded, other = (shown, look.size) if applies else (look.size, shown)
    facts = (
        f"is turned by EXIF (orientation {look.orientation}): it is stored with "
        f"{_words(look.size)} and shown with {_words(shown)} px, training loads "
        f"{_words(loaded)}, and its record says {_words(image.size)}"
    )
    if image.size == loaded == other:
        text = (
            f"{facts}, so that sizes do not tell whether the boxes are for the stored "
            "or for the shown image. Look at it with damex data browse."
        )
        yield image.finding("image-rotated", text, "warning")
    elif image.size == loaded:
        text = f"{facts}, which fits. Other programs may show it otherwise."
        yield image.finding("image-rotated", text, "info")
    elif image.size == other:
        text = f"{facts}: its boxes lie elsewhere. Write it anew without EXIF."
        if applies:
            text += " Or load it with color_type='color_ignore_orientation'."
        yield image.finding("image-rotated", text, "error")
    else:
        yield image.finding("image-size", f"{facts}. Correct the record.")


def _words(size: tuple[float, float]) -> str:
    return f"{size[0]:g} x {size[1]:g}"


def _look_at_header(path: Path) -> Look:
    try:
        if path.stat().st_size == 0:
            return EMPTY
        with Image.open(path) as image:
            turned = exif_orientation(image)
            return Look(None, image.format or "", stored_size(image), turned)
    except Exception as error:  # PIL's readers raise whatever a file leads them to
        return _unreadable(path, error)


def _look_whole(path: Path) -> Look:
    """Read, decode and hash an image.

    JPEGs are decoded at a fraction of their size: it takes the same path through the
    file, and a third of the time.
    """
    try:
        content = path.read_bytes()
        if not content:
            return EMPTY
        image = Image.open(io.BytesIO(content))
        size, orientation = stored_size(image), exif_orientation(image)
    except Exception as error:  # as above
        return _unreadable(path, error)
    try:
        whole = image.size
        image.draft("RGB", (4 * LOOK_SIDE, 4 * LOOK_SIDE))
        gradient = gradient_of(image, whole)
    except Exception as error:  # as above
        text = f"cannot be decoded to its end ({error}). Replace the file."
        return Look(("image-truncated", text))
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return Look(None, image.format or "", size, orientation, digest, gradient)


def _unreadable(path: Path, error: Exception) -> Look:
    size = f" ({path.stat().st_size} bytes)" if path.is_file() else ""
    name = "UnidentifiedImageError"
    reason = "" if type(error).__name__ == name else f": {error}"
    text = (
        f"{size} cannot be decoded{reason}. Replace the file, or take it out of the "
        "annotation file."
    )
    return Look(("image-unreadable", text.strip()))


def gradient_of(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """Differences of neighbours in a small grey picture: a hash that is not rounded.

    This is dHash before it is cut to bits. The cosine of two of them is 0.995 or more
    after an image was compressed anew or resized; bits of plain areas would flip.

    Args:
        image: Opened, perhaps at a fraction of its size.
        size: Its whole width and height.

    Returns:
        Of norm 1, or 0 for a plain picture.
    """
    image.load()
    # Decoding at a fraction rounds up, by which a picture would be shifted.
    fraction = max(round(size[0] / image.width), 1)
    box = (0.0, 0.0, size[0] / fraction, size[1] / fraction)
    sides = (LOOK_SIDE, LOOK_SIDE)
    grey = image.convert("L").convert("F")
    small = grey.resize(sides, Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(small, np.float32)
    across, down = np.diff(pixels, axis=1), np.diff(pixels, axis=0)
    differences = np.concatenate([across.ravel(), down.ravel()])
    norm = float(np.linalg.norm(differences))
    return differences / norm if norm > PLAIN else np.zeros_like(differences)
