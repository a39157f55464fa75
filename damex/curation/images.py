"""Open the image files of datasets: existence and content."""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from damex.datasets.coco_checks import usable_boxes
from damex.datasets.coco_records import Expectations, Records, is_number
from damex.datasets.findings import Finding
from damex.datasets.formats.images import images_of_any_size
from damex.datasets.image_checks import (
    ImageRecord,
    Look,
    NamedBox,
    is_decoded,
    is_remote,
    look_at_header,
    missing_file,
    truncated,
)

# Sides of the small picture used to compare images.
LOOK_SIDE = 16
# Norm of its differences, in gray levels, below which a picture is plain.
PLAIN = 4.0


def image_records(
    records: Records, folder: Path, expected: Expectations, *, with_boxes: bool = True
) -> list[ImageRecord]:
    """The images of an annotation file, each file once."""
    is_used = np.ones(len(records.images), bool)
    if records.place.split == "train" and expected.filter_empty:
        is_used[:] = False
        is_used[records.image_N[usable_boxes(records, expected).position_B]] = True
    found: dict[str, ImageRecord] = {}
    boxes = _boxes(records) if with_boxes else {}
    for position, size in enumerate(records.size_M2.tolist()):
        name = records.images[position].get("file_name")
        if isinstance(name, str) and name:
            known = None if np.isnan(size).any() else (size[0], size[1])
            image = ImageRecord(
                place=records.place,
                record=records.image_name(position),
                path=folder / name,
                size=known,
                applies_exif=expected.applies_exif,
                is_used=bool(is_used[position]),
                boxes=tuple(boxes.get(position, ())),
            )
            first = found.setdefault(name, image)
            if image.is_used and not first.is_used:
                found[name] = image
    return list(found.values())


def _boxes(records: Records) -> dict[int, list[NamedBox]]:
    """Boxes by the position of their image, as in :class:`ImageRecord`."""
    found: dict[int, list[NamedBox]] = {}
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
    """Find existing images, and findings about missing and remote ones.

    One listing per folder is faster than a query per file.
    """
    folders: dict[Path, list[ImageRecord]] = {}
    for image in images:
        folders.setdefault(image.path.parent, []).append(image)
    missing: set[ImageRecord] = set()
    findings = []
    for folder, inside in folders.items():
        if is_remote(folder):
            missing.update(inside)
            findings.append(_not_opened(inside))
            continue
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
                findings.append(missing_file(image, near))
    return [image for image in images if image not in missing], findings


def _listing(folder: Path) -> dict[str, str] | None:
    """Names in a folder by their lower case; None if it does not exist."""
    try:
        with os.scandir(folder) as entries:
            return {entry.name.casefold(): entry.name for entry in entries}
    except OSError:
        return None


def _not_opened(images: Sequence[ImageRecord]) -> Finding:
    text = f"{len(images)} images of a remote storage are not opened."
    folder = str(images[0].path.parent)
    return images[0].place.finding("not-checked", None, text, file=folder)


def _missing_folder(images: Sequence[ImageRecord]) -> Finding:
    used = [image for image in images if image.is_used]
    first = (used or images)[0]
    text = (
        f"there is no such folder of images (seen from {Path.cwd()}); {len(images)} "
        f"records of {first.place.file} need it, such as {first.record} "
        f"({first.path.name}). Correct data_root or img in the mixture entry."
    )
    folder, level = str(first.path.parent), None if used else "warning"
    return first.place.finding("folder-missing", None, text, file=folder, level=level)


def look_at(
    images: Sequence[ImageRecord],
    *,
    decode: bool,
    advance: Callable[[], Any] = lambda: None,
    seconds: float = float("inf"),
) -> list[Look]:
    """Open existing images in threads; fewer results if ``seconds`` run out.

    ``decode`` reads and decodes them completely, not only their headers; ``advance`` is
    called after each.
    """
    started = time.monotonic()
    look = _look_whole if decode else look_at_header
    looks: list[Look] = []
    workers = os.cpu_count() or 1
    size = 32 * workers  # in chunks, to stop in time
    with images_of_any_size(), ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(images), size):
            if time.monotonic() - started > seconds:
                break
            paths = [image.path for image in images[start : start + size]]
            for found in pool.map(look, paths):
                looks.append(found)
                advance()
    return looks


def _look_whole(path: Path) -> Look:
    """Read, decode and hash an image; JPEGs are decoded at reduced size for speed."""
    found = look_at_header(path)
    if found.fault is not None:
        return found
    content = path.read_bytes()
    try:
        image = Image.open(io.BytesIO(content))
        whole = image.size
        image.draft("RGB", (4 * LOOK_SIDE, 4 * LOOK_SIDE))
        gradient = gradient_of(image, whole)
    except Exception as error:  # PIL's readers raise anything
        # Some versions of OpenCV fill the rest with gray.
        return truncated(error, level="warning" if is_decoded(content) else None)
    digest = hashlib.blake2b(content, digest_size=16).digest()
    return found._replace(digest=digest, gradient=gradient)


def gradient_of(image: Image.Image, size: tuple[int, int]) -> np.ndarray:
    """Normalized differences of neighbors in a small gray picture; 0 if plain.

    This is dHash without binarization: the cosine of a recompressed or resized image is
    0.995 or more, while bits in plain areas would flip. ``image`` may be decoded at
    reduced size; ``size`` is its full width and height.
    """
    image.load()
    # Reduced decoding rounds up, which would shift the picture.
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
