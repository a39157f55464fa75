"""Open the image files of datasets, and find duplicates: in train and val, or twice.

Axes: N images, D differences of gray levels, P pairs.
"""

from __future__ import annotations

import hashlib
import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from damex.datasets.findings import Finding, Location
from damex.datasets.image_files import (
    ImageInfo,
    ImageRecord,
    NamedBox,
    images_of_any_size,
    is_remote,
    missing_file,
    probe_image,
    truncated,
)
from damex.datasets.pixels import decode

LOOK_SIDE = 16  # of the small picture used to compare images
PLAIN = 4.0  # norm of its differences, in gray levels, below which a picture is plain
# Cosine of two gradients: 0.99 and above if recompressed or resized, 0.95 and below
# for successive pictures of one scene.
NEAR = 0.98
NEAREST = 10  # maximum number of near images to compare box by box
# Minimum IoU of boxes of one object, and share of such boxes in duplicate images.
SAME_BOX, SAME_OBJECTS = 0.5, 0.75
BLOCK = 256  # rows per block of the matrix of all pairs
MAX_COMPARED = 100_000  # compare all pairs of up to so many images


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
        listing = {} if is_remote(folder) else _listing(folder)
        if is_remote(folder) or (listing is None and len(inside) > 1):
            missing.update(inside)
            findings.append(_without_folder(folder, inside))
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
        return {file.name.casefold(): file.name for file in folder.iterdir()}
    except OSError:
        return None


def _without_folder(folder: Path, images: Sequence[ImageRecord]) -> Finding:
    """One finding about images in remote storage, or in a missing folder."""
    used = [image for image in images if image.is_used]
    first = (used or images)[0]
    kind, level = "not-checked", None
    text = f"{len(images)} images of a remote storage are not opened."
    if not is_remote(folder):
        kind, level = "folder-missing", None if used else "warning"
        text = (
            f"the folder of images is missing (seen from {Path.cwd()}); "
            f"{len(images)} records of {first.location.file} need it, such as "
            f"{first.record} ({first.path.name}). Correct data_root or img in the "
            "mixture entry."
        )
    return first.location.finding(kind, None, text, file=str(folder), level=level)


def probe_images(
    images: Sequence[ImageRecord],
    *,
    decode: bool,
    advance: Callable[[], Any] = lambda: None,
    seconds: float = float("inf"),
) -> list[ImageInfo]:
    """Open existing images in threads; fewer results if ``seconds`` run out.

    ``decode`` reads and decodes them completely, not only their headers; ``advance`` is
    called after each.
    """
    started = time.monotonic()
    probe = _probe_whole if decode else probe_image
    infos: list[ImageInfo] = []
    workers = os.cpu_count() or 1
    size = 32 * workers  # in chunks, to stop in time
    with images_of_any_size(), ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(images), size):
            if time.monotonic() - started > seconds:
                break
            paths = [image.path for image in images[start : start + size]]
            for found in pool.map(probe, paths):
                infos.append(found)
                advance()
    return infos


def _probe_whole(path: Path) -> ImageInfo:
    """Read, decode and hash an image; JPEGs are decoded at reduced size for speed."""
    found = probe_image(path)
    if found.problem is not None:
        return found
    content = path.read_bytes()
    try:
        image: Image.Image = Image.open(io.BytesIO(content))
        if found.header.is_deep and (shown := decode(content)) is not None:
            found = found._replace(levels=shown.levels)
            image = Image.fromarray(shown.image)  # Pillow would cut it off at 255
        whole = image.size
        image.draft("RGB", (4 * LOOK_SIDE, 4 * LOOK_SIDE))
        gradient = gradient_of(image, whole)
    except Exception as error:  # PIL's readers raise anything
        # Some versions of OpenCV fill the rest with gray.
        is_decoded = decode(content) is not None
        return truncated(error, level="warning" if is_decoded else None)
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
    grey = image.convert("L").convert("F")
    small = grey.resize((LOOK_SIDE, LOOK_SIDE), Image.Resampling.BILINEAR, box=box)
    pixels = np.asarray(small, np.float32)
    across, down = np.diff(pixels, axis=1), np.diff(pixels, axis=0)
    differences = np.concatenate([across.ravel(), down.ravel()])
    norm = float(np.linalg.norm(differences))
    return differences / norm if norm > PLAIN else np.zeros_like(differences)


def same_files(images: Sequence[ImageRecord]) -> Iterator[Finding]:
    """Files listed by several splits, without reading them."""
    first: dict[str, ImageRecord] = {}
    for image in sorted(images, key=lambda image: image.split != "train"):
        known = first.setdefault(str(image.path), image)
        if known is not image and _is_leak(known, image):
            yield _identical(known, image)


def find_leaks(
    images: Sequence[ImageRecord], infos: Sequence[ImageInfo]
) -> Iterator[Finding]:
    """Findings about images of equal content or look; undecoded ones are skipped."""
    pairs = zip(images, infos, strict=True)
    decoded = [(image, info) for image, info in pairs if info.digest]
    # Training images first: the second of a pair is reported.
    decoded.sort(key=lambda pair: pair[0].split != "train")
    groups: dict[bytes, list[ImageRecord]] = {}
    gradients: dict[bytes, np.ndarray] = {}
    for image, info in decoded:
        if info.gradient is not None:
            gradients.setdefault(info.digest, info.gradient)
        groups.setdefault(info.digest, []).append(image)
    for first, *others in groups.values():
        for other in others:
            yield _identical(first, other)
    if len(gradients) > MAX_COMPARED:
        text = (
            f"{len(gradients)} images are more than {MAX_COMPARED}: only those of "
            "validation and test were compared with all others."
        )
        yield Location("all datasets", "image files").finding("not-checked", None, text)
    if gradients:
        gradients_ND = np.stack([*gradients.values()])
        yield from _near(gradients_ND, [groups[digest] for digest in gradients])


def near_duplicates(gradients_ND: np.ndarray, num_train: int = 0) -> np.ndarray:
    """Sorted pairs (P, 2) of rows, i < j, with a cosine of at least ``NEAR``.

    All pairs are compared, in blocks; of more than ``MAX_COMPARED`` rows, only those of
    any row and one behind the first ``num_train``. Rows have norm 1, or 0, which are
    near to nothing.
    """
    count = len(gradients_ND)
    behind = num_train if count > MAX_COMPARED else 0
    found = [np.empty((0, 2), np.int64)]
    for start in range(0, count, BLOCK):
        other = max(start, behind)
        cosine_BM = gradients_ND[start : start + BLOCK] @ gradients_ND[other:].T
        pairs_P2 = np.argwhere(cosine_BM >= NEAR) + np.array([start, other])
        found.append(pairs_P2[pairs_P2[:, 0] < pairs_P2[:, 1]])
    return np.concatenate(found)


def _near(
    gradients_ND: np.ndarray, groups: Sequence[list[ImageRecord]]
) -> Iterator[Finding]:
    """For each image one of the same info, train first; different boxes are counted."""
    alike: dict[str, list[tuple[ImageRecord, ImageRecord]]] = {}
    is_train_N = np.array([group[0].split == "train" for group in groups])
    boxes_N5 = np.stack([_sum_of_boxes(group[0]) for group in groups])
    pairs_P2 = near_duplicates(gradients_ND, int(is_train_N.sum()))
    pairs_P2 = pairs_P2[np.argsort(pairs_P2[:, 1], kind="stable")]
    highs, starts = np.unique(pairs_P2[:, 1], return_index=True)
    first_images = np.split(pairs_P2[:, 0], starts)[1:]
    for high, lows in zip(highs.tolist(), first_images, strict=True):
        firsts = lows[is_train_N[lows]] if is_train_N[lows].any() else lows
        for other in groups[high]:
            distances = np.abs(boxes_N5[firsts] - _sum_of_boxes(other)).sum(axis=1)
            nearest = firsts[np.argsort(distances, kind="stable")[:NEAREST]].tolist()
            same = [low for low in nearest if _show_the_same(groups[low][0], other)]
            first = groups[(same or nearest)[0]][0]
            if same:
                cosine = float(gradients_ND[same[0]] @ gradients_ND[high])
                yield _looks_like(first, other, cosine)
            else:
                alike.setdefault(other.location.dataset, []).append((first, other))
    for pairs in alike.values():
        first, other = pairs[0]
        text = (
            f"{len(pairs)} images look like another one of the dataset and show other "
            f"objects, or none, such as {other.path} and {first.path}: a fixed camera, "
            "or frames of a video? Then scores hold for this scene alone; split by "
            "time or place to know more."
        )
        yield other.location.finding("fixed-camera", None, text, count=len(pairs))


def _sum_of_boxes(image: ImageRecord) -> np.ndarray:
    """Number of boxes and sums of their corners, as a quick comparison."""
    return np.array([(1.0, *box[1:]) for box in image.boxes]).reshape(-1, 5).sum(axis=0)


def _show_the_same(first: ImageRecord, other: ImageRecord) -> bool:
    """Whether most boxes agree; datasets may differ in their classes."""
    if first.location.dataset != other.location.dataset:
        return True
    count = len(first.boxes) + len(other.boxes)
    found = sum(_is_among(box, other.boxes) for box in first.boxes)
    found += sum(_is_among(box, first.boxes) for box in other.boxes)
    return count > 0 and found >= SAME_OBJECTS * count


def _is_among(box: NamedBox, others: Sequence[NamedBox]) -> bool:
    name, x1, y1, x2, y2 = box
    for other, a1, b1, a2, b2 in others:
        shared = max(min(x2, a2) - max(x1, a1), 0) * max(min(y2, b2) - max(y1, b1), 0)
        whole = (x2 - x1) * (y2 - y1) + (a2 - a1) * (b2 - b1) - shared
        if other == name and shared >= SAME_BOX * whole:
            return True
    return False


def _looks_like(first: ImageRecord, other: ImageRecord, cosine: float) -> Finding:
    kind, advice = "near-duplicate-image", "Nothing to do if that is meant."
    if _is_leak(first, other):
        kind = "leak-near"
        advice = (
            "Look at both, and take one of them out: scores on training images are "
            "meaningless."
        )
    text = f"looks like {_name(first)}, similarity {cosine:.3f}. {advice}"
    return other.finding(kind, text)


def _identical(first: ImageRecord, other: ImageRecord) -> Finding:
    if _is_leak(first, other):
        text = (
            f"is the training image {_name(first)}: scores on training images are "
            f"meaningless. Take it out of {first.split} or {other.split}."
        )
        return other.finding("leak-identical", text)
    advice = "Nothing to do if the two datasets annotate different classes in it."
    if first.location.dataset == other.location.dataset:
        advice = "Take one of them out."
    text = f"has the same content as {_name(first)}. {advice}"
    return other.finding("duplicate-image", text)


def _name(image: ImageRecord) -> str:
    return f"{image.path} ({image.record} of {image.location.file})"


def _is_leak(first: ImageRecord, other: ImageRecord) -> bool:
    return first.split == "train" and other.split != "train"
