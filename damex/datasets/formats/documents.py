"""From samples to a COCO document per split, with boxes in pixels as training loads it.

Splits come from the folder, the entry, or a hash of the images. Invalid boxes are left
out and counted; those that cross the border stay (training clips them).
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from damex.datasets.formats.records import (
    Box,
    Contents,
    Corners,
    Options,
    Sample,
    SplitSummary,
    Summary,
)
from damex.datasets.formats.tree import SPLITS, Tree, some, stem
from damex.datasets.image_files import (
    SIZE_TOLERANCE,
    Header,
    images_of_any_size,
    read_header,
    same_size,
    turn_box,
)
from damex.errors import ConfigError, did_you_mean

DEFAULT_VAL_SHARE = 0.1
_HASHED_BYTES = 1 << 16
_DIGITS = 6  # decimals of a pixel
T = TypeVar("T")


def choose_splits(
    tree: Tree, contents: Contents, options: Options, summary: Summary
) -> dict[str, list[Sample]]:
    """Samples by split: from the entry, else from the folder.

    Without validation images, some of ``train`` are chosen by a hash of their content.

    Raises:
        ConfigError: If a named split is missing, or ``val_share`` contradicts.
    """
    found = contents.splits or {"train": contents.samples}
    chosen: dict[str, list[Sample]] = {}
    for split in SPLITS:
        names = getattr(options, split)
        if names is not None:
            chosen[split] = _selected(tree, contents, names, split, summary)
        elif found.get(split):
            chosen[split] = found[split]
    if "train" not in chosen and "trainval" in found:
        chosen["train"] = found["trainval"]
    # Evaluation images named by the entry are not trained on.
    named = ("val", "test") if options.train is None else ()
    held = {s.image for key in named if getattr(options, key) for s in chosen[key]}
    if held:
        chosen["train"] = [s for s in chosen.get("train", ()) if s.image not in held]
    if not chosen.get("train"):
        raise ConfigError(
            f"{tree.root} has no images for train, only the lists "
            f"{some([*found])}; name one with train='...'."
        )
    _count_unused(contents, chosen, summary)
    if "val" in chosen and options.val_share is not None:
        raise ConfigError(
            f"{tree.root}: val_share={options.val_share} cannot be used, since there "
            "is a val split already; leave it out."
        )
    if "val" not in chosen and options.val_share != 0.0:
        share = DEFAULT_VAL_SHARE if options.val_share is None else options.val_share
        chosen["train"], val = _by_content(tree, chosen["train"], share, summary)
        chosen["val"] = val
    return {split: chosen[split] for split in SPLITS if chosen.get(split)}


def _count_unused(
    contents: Contents, chosen: dict[str, list[Sample]], summary: Summary
) -> None:
    """Count images, and records of images annotated elsewhere, that are in no split."""
    used = {id(sample) for samples in chosen.values() for sample in samples}
    images = {sample.image for samples in chosen.values() for sample in samples}
    for sample in contents.samples:
        if sample.image not in images:
            summary.drop("annotated images in no split that is used", sample.image)
        elif id(sample) not in used:
            what = "annotations of used images in a file that no split uses"
            summary.drop(what, f"{sample.source}: {sample.image}")
    train = {sample.image for sample in chosen["train"]}
    for split in ("val", "test"):
        for sample in chosen.get(split, ()):
            if sample.image in train:
                what = f"WARNING: images of {split} are images of train, too"
                summary.note(what, sample.image)


def _selected(
    tree: Tree, contents: Contents, names: Iterable[str], split: str, summary: Summary
) -> list[Sample]:
    """Samples of a named list, an annotation file, a folder or a list of images."""
    found: dict[int, Sample] = {}
    for word in names:
        name = word.replace("\\", "/").rstrip("/")
        samples = contents.splits.get(name)
        if samples is None:
            samples = [s for s in contents.samples if s.source == name]
        if not samples and name in tree.files and name.endswith(".txt"):
            samples = _listed(tree, contents, name, summary)
        if not samples:
            folder = f"{name}/"
            samples = [
                sample
                for sample in contents.samples
                if sample.image.startswith(folder) or sample.source.startswith(folder)
            ]
        if not samples:
            known = [*contents.splits, *filter(None, tree.folders)]
            raise ConfigError(
                f"{tree.root}: {split}={word!r} is not a split, folder, list of images "
                f"or annotation file with images of it; {did_you_mean(word, known)}"
            )
        found.update((id(sample), sample) for sample in samples)
    return list(found.values())


def _listed(
    tree: Tree, contents: Contents, path: str, summary: Summary
) -> list[Sample]:
    """Samples of a list of images, possibly without folder and suffix."""
    images: dict[str, list[str]] = {}
    for sample in contents.samples:
        for key in {sample.image, stem(sample.image)}:
            images.setdefault(key, []).append(sample.image)
    found: set[str] = set()
    for number, line in tree.numbered(path):
        is_stem = "." not in line and "/" not in line
        matches = images.get(tree.locate_image(line) or "", ())
        matches = matches or (images.get(line, ()) if is_stem else ())
        found.update(matches)
        if not matches:
            what = f"lines of the list {path} that match no annotated image"
            summary.drop(what, f"{path}:{number}: {line}")
    return [sample for sample in contents.samples if sample.image in found]


def _by_content(
    tree: Tree, samples: list[Sample], share: float, summary: Summary
) -> tuple[list[Sample], list[Sample]]:
    """Split by file hash, stable when images are added; at least one for validation."""
    found = for_all(content_share, tree.root, (sample.image for sample in samples))
    shares = {k: 1.0 if isinstance(v, OSError) else v for k, v in found.items()}
    distinct = sorted(set(shares.values()))
    limit = share
    if len(distinct) > 1 and distinct[0] >= share:
        limit = distinct[1]
        summary.note(
            f"no image falls into the validation share of {share:g}: the nearest was "
            f"taken; val_share={distinct[0] + 0.005:.2f} makes that lasting",
            min(shares, key=lambda name: shares[name]),
        )
    elif distinct and distinct[-1] < share:
        limit = distinct[-1]
    val = [sample for sample in samples if shares[sample.image] < limit]
    train = [sample for sample in samples if shares[sample.image] >= limit]
    return train, val


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


def coco_document(
    root: Path, split: str, samples: Sequence[Sample], summary: Summary
) -> dict[str, Any]:
    """The COCO document of a split; samples of the same file are joined.

    Ids of images, annotations and categories (the classes of ``summary``) are 1, 2, ...
    ``source`` and ``place`` give the origin of a record. Sizes and drops are counted in
    ``summary``.
    """
    with images_of_any_size():
        headers = for_all(read_header, root, (sample.image for sample in samples))
    ids = {name: number for number, name in enumerate(summary.classes, start=1)}
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    counts, filled = dict.fromkeys(summary.classes, 0), 0
    for sample in _joined(samples, summary):
        header, lost = headers[sample.image], len(sample.boxes)
        if isinstance(header, OSError):
            summary.drop("images that cannot be read", sample.image)
            summary.drop("boxes of images that cannot be read", sample.image, lost)
            continue
        if (boxes := _valid_boxes(sample, header, summary)) is None:
            continue
        width, height = header.shown
        images.append(
            dict(
                id=len(images) + 1,
                file_name=sample.image,
                width=width,
                height=height,
                source=sample.source,
            )
        )
        filled += bool(boxes)
        for box in boxes:
            counts[box.label] += 1
            x1, y1, x2, y2 = box.corners
            sides = [round(value, _DIGITS) for value in (x1, y1, x2 - x1, y2 - y1)]
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=len(images),
                    category_id=ids[box.label],
                    bbox=sides,
                    area=sides[2] * sides[3] if box.area is None else box.area,
                    iscrowd=int(box.crowd),
                    place=box.place,
                )
            )
    summary.splits[split] = SplitSummary(len(images), len(images) - filled, counts)
    categories = [dict(id=number, name=name) for name, number in ids.items()]
    return dict(images=images, annotations=annotations, categories=categories)


def _joined(samples: Sequence[Sample], summary: Summary) -> list[Sample]:
    """Samples with those of one image merged."""
    found: dict[str, Sample] = {}
    for sample in samples:
        first = found.setdefault(sample.image, sample)
        if first is not sample:
            summary.note("images that two records annotate: joined", sample.source)
            found[sample.image] = replace(first, boxes=[*first.boxes, *sample.boxes])
    return list(found.values())


def _valid_boxes(sample: Sample, header: Header, summary: Summary) -> list[Box] | None:
    """Boxes in pixels as shown; None if the image is left out."""
    turned = _is_turned(sample, header, summary)
    if turned is None:
        width, height = sample.stated_size or (0, 0)
        where = (
            f"{sample.source}: {sample.image} is stated as {width} x {height} px, "
            f"the file has {header.shown[0]} x {header.shown[1]}"
        )
        summary.drop("images of another size than their annotation", where)
        summary.drop("boxes of images of another size", where, len(sample.boxes))
        return None
    width, height = header.shown if sample.normalised else (1, 1)
    valid: dict[tuple[str, Corners], Box] = {}
    for box in sample.boxes:
        x1, y1, x2, y2 = box.corners
        corners = (x1 * width, y1 * height, x2 * width, y2 * height)
        corners = turn_box(corners, header) if turned else corners
        fault = _fault(corners, header.shown)
        if fault is None and (box.label, corners) in valid:
            fault = "boxes that occur twice"
        if fault is None:
            valid[box.label, corners] = box._replace(corners=corners)
        else:
            colon = ":" if isinstance(box.place, int) else ": "
            summary.drop(fault, f"{sample.source}{colon}{box.place}")
    return list(valid.values())


def _is_turned(sample: Sample, header: Header, summary: Summary) -> bool | None:
    """Whether boxes fit the unrotated pixels; None if the stated size is wrong."""
    stated, shown, stored = sample.stated_size, header.shown, header.stored
    turned = False
    if sample.normalised:
        pass
    elif stated is not None:
        turned = not same_size(stated, shown)
        if turned and (header.orientation == 1 or not same_size(stated, stored)):
            return None
    elif header.orientation >= 5:
        # Without a size, boxes fit the image as shown unless only stored holds all.
        boxes = [box.corners for box in sample.boxes]
        turned = _hold(stored, boxes) and not _hold(shown, boxes)
    if turned:
        what = "images with EXIF rotation: boxes turned with them"
        summary.note(what, sample.image)
    elif header.orientation != 1 and sample.boxes:
        what = (
            "images with EXIF rotation: boxes taken for the image as it is shown, "
            "and not as it is stored"
        )
        summary.note(what, sample.image)
    return turned


def _fault(corners: Corners, size: tuple[int, int]) -> str | None:
    """Why a box is invalid; None if it is valid."""
    x1, y1, x2, y2 = corners
    if not all(map(math.isfinite, corners)):
        return "boxes with a coordinate that is NaN or infinite"
    if x2 < x1 or y2 < y1:
        return "boxes with a negative width or height"
    if x2 == x1 or y2 == y1:
        return "boxes with a width or height of 0"
    if x1 >= size[0] or y1 >= size[1] or x2 <= 0 or y2 <= 0:
        return "boxes outside of their image"
    return None


def _hold(size: tuple[int, int], boxes: Sequence[Corners]) -> bool:
    """Whether all boxes end within an image of this size."""
    right, bottom = (side + SIZE_TOLERANCE for side in size)
    return all(b[2] <= right and b[3] <= bottom for b in boxes)
