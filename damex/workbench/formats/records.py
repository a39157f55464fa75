"""Output of the readers: images with boxes as in their files, by split; drop counts.

Splits come from the folder, the entry, or a hash of the images.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from damex.datasets.coco_schema import flag_of
from damex.datasets.entries import SPLITS, Options, Summary
from damex.errors import ConfigError, did_you_mean
from damex.workbench.formats.tree import Tree, parent, some, stem

DEFAULT_VAL_SHARE = 0.1
_HASHED_BYTES = 1 << 16

T = TypeVar("T")
Corners = tuple[float, float, float, float]


class Box(NamedTuple):
    """One object as in an annotation file, unchecked."""

    corners: Corners  # x1, y1, x2, y2 in pixels, or relative in a `normalised` sample
    label: str
    place: int | str  # origin: a line number, or words such as "object 2"
    crowd: bool = False  # ignored in evaluation: COCO's iscrowd, VOC's difficult
    area: float | None = None  # as stated, in square pixels; None for that of the box
    score: float | None = None  # of the detector that wrote the label, if one did


@dataclass
class Sample:
    """One image and its boxes; paths are relative to the root."""

    image: str
    source: str
    boxes: list[Box] = field(default_factory=list)
    stated_size: tuple[int, int] | None = None  # width and height
    normalised: bool = False  # boxes are relative to the size


@dataclass
class Contents:
    """Everything that a reader found."""

    samples: list[Sample]
    # By train, val, test or the name of another list; may overlap and be incomplete.
    splits: dict[str, list[Sample]] = field(default_factory=dict)
    classes: tuple[str, ...] | None = None  # in the format's order; None to sort them
    # Classes labeled by a detector, which may have missed objects.
    predicted: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Format:
    """A supported format."""

    name: str
    looks_for: str  # required contents of the folder, for messages
    recognise: Callable[[Tree], str | None]  # the evidence in a folder, or None
    read: Callable[[Tree, Options, Summary], Contents]  # it counts drops
    # Why a folder that is nearly of the format is not recognized.
    problem: Callable[[Tree], str | None] = lambda _: None
    guessed: bool = True  # whether it is recognized without ``format=``


def is_set(value: Any, flag: str, place: str, summary: Summary) -> bool:
    """The truth of a flag; one that is neither true nor false is noted, and false."""
    found = flag_of(value)
    if found is None:
        what = f"{flag!r} is neither true nor false: taken as false"
        summary.note(what, f"{place}: {value!r:.80}")
    return bool(found)


def enclosing_box(points: Sequence[float]) -> Corners:
    """The upright box around points x1, y1, x2, y2, ...; NaN if one is."""
    if any(map(math.isnan, points)):
        return (math.nan,) * 4
    return min(points[::2]), min(points[1::2]), max(points[::2]), max(points[1::2])


def is_share(value: float) -> bool:
    """Whether a coordinate can be relative to the image; boxes may reach beyond it."""
    return -1 <= value <= 2 or math.isnan(value)


def choose_splits(
    tree: Tree, contents: Contents, options: Options, summary: Summary
) -> dict[str, list[Sample]]:
    """Samples by split: from the entry, else from the folder.

    Without validation images, some of ``train`` are chosen by a hash of their content.
    ConfigError if a named split is missing, or ``val_share`` contradicts.
    """
    found = contents.splits or {"train": contents.samples}
    if not contents.splits and not any(getattr(options, one) for one in SPLITS):
        found = by_folder(
            contents.samples, lambda one: tree.split_of_folder(parent(one.image))
        )
    chosen: dict[str, list[Sample]] = {}
    for split in SPLITS:
        names = getattr(options, split)
        if names is not None:
            chosen[split] = _selected(tree, contents, names, split, summary)
        elif found.get(split):
            chosen[split] = found[split]
    whole = next((found[key] for key in ("trainval", "default") if key in found), None)
    if is_whole := "train" not in chosen and whole is not None:
        chosen["train"] = whole  # "default": CVAT's only list
    # Evaluation images named by the entry, or of trainval, are not trained on.
    named = [key for key in ("val", "test") if is_whole or getattr(options, key)]
    named = named if options.train is None else []
    held = {sample.image for key in named for sample in chosen.get(key, ())}
    if held:
        chosen["train"] = [s for s in chosen.get("train", ()) if s.image not in held]
    if not chosen or chosen.get("train") == []:
        raise ConfigError(
            f"{tree.root} has no images for train, only the lists {some([*found])}; "
            f"name one or several in its entry, such as train={[*found][:2]}."
        )
    _count_unused(tree, contents, chosen, summary)
    if "val" in chosen and options.val_share is not None:
        raise ConfigError(
            f"{tree.root}: val_share={options.val_share} cannot be used, since there "
            "is a val split already; leave it out."
        )
    if "val" not in chosen and "train" in chosen and options.val_share != 0.0:
        share = DEFAULT_VAL_SHARE if options.val_share is None else options.val_share
        chosen["train"], val = _by_content(tree, chosen["train"], share, summary)
        chosen["val"] = val
    return {split: chosen[split] for split in SPLITS if chosen.get(split)}


def by_folder(
    items: Sequence[T], split_of: Callable[[T], str | None]
) -> dict[str, list[T]]:
    """Items by the split that their folder is named like; the rest is for training.

    The rest is left out if ``train`` and another such folder have most items. If they
    have few, or there is ``train`` alone, the folders are those of classes.
    """
    named: dict[str, list[T]] = {}
    rest: list[T] = []
    for item in items:
        split = split_of(item)
        (rest if split is None else named.setdefault(split, [])).append(item)
    if "trainval" in named:
        named["train"] = [*named.get("train", ()), *named.pop("trainval")]
    if rest and "train" not in named:
        named["train"] = rest
    elif rest and (len(named) == 1 or 2 * len(rest) >= len(items)):
        named = {"train": [*items]}
    return named


def drop_namesakes(tree: Tree, contents: Contents, summary: Summary) -> None:
    """Leave images of a split without a folder out that are in another's, and its own.

    They have the names of images that are missing.
    """
    folders = {*map(tree.split_of_folder, tree.folders)}
    images = {key: {s.image for s in rows} for key, rows in contents.splits.items()}
    gone = set()
    for split in sorted({*SPLITS} & {*contents.splits} - folders):
        for sample in contents.splits[split]:
            other = tree.split_of_folder(parent(sample.image))
            if sample.image in images.get(other or "", ()):
                gone.add(id(sample))
                what = f"annotated images of {split} that are missing"
                summary.drop(what, f"{sample.source}: {sample.image} is of {other}")
    for rows in (contents.samples, *contents.splits.values()):
        rows[:] = [sample for sample in rows if id(sample) not in gone]


def _count_unused(
    tree: Tree,
    contents: Contents,
    chosen: Mapping[str, Sequence[Sample]],
    summary: Summary,
) -> None:
    """Count images, and records of images annotated elsewhere, that are in no split.

    And images of train that may be for evaluation.
    """
    used = {id(sample) for samples in chosen.values() for sample in samples}
    images = {sample.image for samples in chosen.values() for sample in samples}
    for sample in contents.samples:
        if sample.image not in images:
            summary.drop("annotated images in no split that is used", sample.image)
        elif id(sample) not in used:
            what = "annotations of used images in a file that no split uses"
            summary.drop(what, f"{sample.source}: {sample.image}")
    train = {sample.image for sample in chosen.get("train", ())}
    for image in sorted(train):
        if tree.split_of_folder(parent(image)) in ("val", "test"):
            what = "WARNING: images of train in folders named like val or test"
            summary.note(what, image)
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
    """Split by a hash, stable when images are added; at least one for validation."""
    found = for_all(_share, tree.root, samples)
    if len({*found.values()}) == 1:  # all are copies of one name
        found = for_all(content_share, tree.root, samples)
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


def _share(path: Path) -> float:
    """The share of a file: of its content, or of the image that Roboflow augmented.

    Its copies are named ``NAME.rf.HASH.jpg``.
    """
    source, is_copy, _ = path.stem.rpartition(".rf.")
    return _as_share(source.encode()) if is_copy else content_share(path)


def content_share(path: Path) -> float:
    """Hash a file's size and first and last 64 KB to [0, 1); OSError if unreadable."""
    # Whole, as borders of many are equal.
    is_raw = path.suffix.lower() in {".bmp", ".tif", ".tiff", ".ppm", ".pgm"}
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = file.read(-1 if is_raw else _HASHED_BYTES)
        file.seek(max(size - _HASHED_BYTES, 0))
        tail = file.read()
    return _as_share(head + tail + str(size).encode())


def _as_share(content: bytes) -> float:
    digest = hashlib.blake2b(content, digest_size=8)
    return int.from_bytes(digest.digest(), "big") / 2**64


def for_all(
    function: Callable[[Path], Any], root: Path, samples: Iterable[Sample]
) -> dict[str, Any]:
    """Call a function for the image files in parallel; OSErrors become values."""

    def call(name: str) -> Any:
        try:
            return function(root / name)
        except OSError as error:
            return error

    names = list(dict.fromkeys(sample.image for sample in samples))
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(call, names), strict=True))
