"""Convert a folder of images and annotations to one COCO file per split.

Boxes are in pixels as training loads the image. Invalid ones are left out and counted;
those that cross the border stay (training clips them).
Conversions of mixture entries are kept in the user's cache until the files change.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from damex.datasets.entries import READERS, Conversion, Options, SplitSummary, Summary
from damex.datasets.image_files import (
    all_fit,
    fits_stored,
    images_of_any_size,
    same_size,
    turn_box,
)
from damex.datasets.pixels import ImageHeader, read_header
from damex.errors import ConfigError, DataError
from damex.files import glance, write_json
from damex.workbench.formats.coco import COCO
from damex.workbench.formats.label_files import DOTA, KITTI, KITTI_DETECTIONS, VOC
from damex.workbench.formats.records import (
    Box,
    Corners,
    Format,
    Sample,
    choose_splits,
    for_all,
)
from damex.workbench.formats.tables import CSV, WIDER_FACE
from damex.workbench.formats.tree import Tree, numbers, parent
from damex.workbench.formats.yolo import YOLO

FORMATS = (COCO, VOC, YOLO, KITTI, DOTA, WIDER_FACE, CSV, KITTI_DETECTIONS)
# Part of the names of conversions: a new version repeats all of them.
CONVERTER_VERSION = 5
_SUMMARY_FILE = "summary.json"
_DIGITS = 6  # decimals of a pixel
# Of formats that are not read, and named in messages.
_LOOKED_AT = 10
_MAX_BYTES = 50_000_000  # of a JSON file that is parsed
# Keys of an object in JSON, and the tool or dataset that writes them.
_KEYS = (
    ({"shapes", "imagePath"}, "LabelMe"),
    ({"imgHeight", "imgWidth", "objects"}, "Cityscapes"),
    ({"size", "objects", "tags"}, "Supervisely"),
    ({"regions", "filename"}, "VGG Image Annotator"),
    ({"_via_img_metadata"}, "VGG Image Annotator"),
    ({"data_row"}, "Labelbox"),
    ({"asset", "regions"}, "VoTT"),
    ({"data", "annotations"}, "Label Studio"),
    ({"image", "label"}, "Label Studio"),
    ({"image", "annotations"}, "CreateML"),
    ({"name", "labels"}, "BDD100K"),
)
_SUFFIXES = {".tfrecord": "TFRecord", ".tfrecords": "TFRecord", ".ndjson": "NDJSON"}


def open_root(root: str | Path) -> Tree:
    """List the files of a dataset; ConfigError if the folder is missing."""
    path = Path(os.path.expanduser(root))  # noqa: PTH111 - expanduser of Path may raise
    if path.is_file():
        raise ConfigError(
            f"root={str(root)!r} is a file; give the folder: root={str(path.parent)!r}."
        )
    if not path.is_dir():
        raise ConfigError(
            f"root={str(root)!r}: the folder does not exist (seen from {Path.cwd()})."
        )
    try:
        return Tree(path.resolve())
    except OSError as error:
        raise ConfigError(f"root={str(root)!r} cannot be listed: {error}.") from error


def recognise(tree: Tree, name: str | None) -> tuple[Format, str]:
    """Return the format of a folder and the evidence; a given name is not guessed.

    ConfigError if nothing fits, or several formats do.
    """
    if not tree.files:
        raise ConfigError(f"{tree.root} is empty; name the folder of a dataset.")
    known = [f for f in FORMATS if (f.guessed if name is None else f.name == name)]
    found = [(f, evidence) for f in known if (evidence := f.recognise(tree))]
    if len(found) > 1:
        seen = "; ".join(f"{fmt.name}: {evidence}" for fmt, evidence in found)
        raise ConfigError(
            f"{tree.root} holds annotations in {len(found)} formats ({seen}); choose "
            f"one with format={found[0][0].name!r}, or let root be a folder inside."
        )
    if not found:
        what = "in a format that damex knows" if name is None else f"of format {name!r}"
        wanted = "; ".join(f"{fmt.name}: {fmt.looks_for}" for fmt in known)
        explain = (problem_of_unread, *(fmt.problem for fmt in known))
        problem = next(filter(None, (function(tree) for function in explain)), None)
        raise ConfigError(
            f"{tree.root} holds no annotations {what}, but {tree.describe()}. "
            f"{problem or f'Looked for {wanted}'}."
        )
    return found[0]


def problem_of_unread(tree: Tree) -> str | None:
    """A sentence that names the format of a folder and what to do; None if unknown."""
    for path, name in _found(tree):
        return (
            f"{path} is in the format of {name}, which damex does not read. Convert "
            "it to COCO, Pascal VOC or YOLO, for instance with FiftyOne or Datumaro"
        )
    return None


def _found(tree: Tree) -> Iterable[tuple[str, str]]:
    """Files of formats that are not read, and the names of these."""
    for path in tree.with_suffix(".txt")[:_LOOKED_AT]:
        line = next(filter(None, tree.glanced(path, 4000)), "")
        if name := _name_of_line(line, is_whole_video=path.endswith("gt/gt.txt")):
            yield path, name
    for path in tree.with_suffix(".json")[:_LOOKED_AT]:
        if name := _name_of_json(tree, path):
            yield path, name
    for path in tree.with_suffix(".xml")[:_LOOKED_AT]:
        text = "".join(tree.glanced(path, 4000))
        if "<annotations" in text and ("<image " in text or "<meta>" in text):
            yield path, "CVAT (<annotations> with an <image> each)"
    for suffix, name in _SUFFIXES.items():
        for path in tree.with_suffix(suffix)[:1]:
            yield path, name
    if masks := [path for path in tree.images if "segmentation" in path.lower()]:
        yield masks[0], "masks (an image of class colours), without boxes"


def _name_of_line(line: str, *, is_whole_video: bool) -> str | None:
    words, fields = line.split(), [part.strip() for part in line.strip(",").split(",")]
    if len(words) in (17, 18) and numbers(words[:2]) and not numbers(words[2:3]):
        return "KITTI tracking (a file per video; frame and track come first)"
    if len(fields) >= 7 and numbers(fields):
        if len(fields) == 8 and not is_whole_video:
            return "VisDrone (x, y, width, height, score, class, truncation, occlusion)"
        if len(fields) in (7, 8, 9, 10):
            return "MOT (a file per video; frame and track come first)"
    corners = numbers(words[1:]) if len(words) == 5 else None
    if corners and not numbers(words[:1]) and max(corners) > 2:  # beyond YOLO's
        return "OIDv4 (class name, x1, y1, x2, y2)"
    return None


def _name_of_json(tree: Tree, path: str) -> str | None:
    if tree.files[path][0] > _MAX_BYTES:
        return None
    try:
        document = json.loads(glance(tree.raw(path)))
    except ValueError:
        return None
    for record in _records(document):
        for keys, name in _KEYS:
            if keys <= record.keys():
                return name
    return None


def _records(document: Any) -> Iterable[dict[str, Any]]:
    """The object itself, or the first one in a list or a mapping from names."""
    if isinstance(document, list):
        yield from (row for row in document[:1] if isinstance(row, dict))
    elif isinstance(document, dict) and "categories" not in document:
        yield document
        first = next(iter(document.values()), None)
        yield from [first] if isinstance(first, dict) else []


def convert_tree(tree: Tree, options: Options, folder: Path) -> Conversion:
    """Read a dataset and write its COCO files and summary into an existing folder.

    ConfigError if an option is invalid, or the format is ambiguous; DataError if a file
    is broken, or no box is left.
    """
    fmt, evidence = recognise(tree, options.format)
    summary = Summary(str(tree.root), fmt.name, evidence)
    if not tree.images:
        raise ConfigError(f"{tree.root} holds no images, only {tree.describe()}.")
    contents = fmt.read(tree, options, summary)
    labels = {box.label for sample in contents.samples for box in sample.boxes}
    summary.classes = contents.classes or tuple(sorted(labels))
    if contents.samples:
        info = dict(source=str(tree.root), format=fmt.name)
        with images_of_any_size():
            headers = for_all(read_header, tree.root, contents.samples)
        _settle_rotations(contents.samples, headers, summary)
        for split, samples in choose_splits(tree, contents, options, summary).items():
            document = coco_document(headers, split, samples, summary)
            for category in document["categories"]:
                if category["name"] in contents.predicted:
                    category["predicted"] = True
            write_json(folder / f"{split}.json", {"info": info, **document})
    # Unannotated images are counted only in folders with annotated ones.
    used = {sample.image for sample in contents.samples}
    folders = {parent(image) for image in used}
    for image in tree.images:
        if image not in used and parent(image) in folders:
            summary.drop("images without an annotation", image)
    if not any(sum(split.boxes.values()) for split in summary.splits.values()):
        lost = "; ".join(
            f"{count.times} {what}, for instance {count.example}"
            for what, count in summary.dropped.items()
        )
        raise DataError(
            f"{tree.root} ({fmt.name}: {evidence}): no box is left. Left out: "
            f"{lost or 'nothing; the annotations are empty'}."
        )
    write_json(folder / _SUMMARY_FILE, asdict(summary), indent=1)
    return Conversion(folder, summary)


def _settle_rotations(
    samples: Sequence[Sample],
    headers: Mapping[str, ImageHeader | OSError],
    summary: Summary,
) -> None:
    """Drop stated sizes that the boxes of a dataset contradict.

    Some tools state the size of the stored image, and boxes of the image as shown. The
    images whose boxes fit only one of the two decide for all, as a single box may
    reach over the border.
    """
    votes: Counter[bool] = Counter()
    stored = []
    for sample in samples:
        header, size = headers[sample.image], sample.stated_size
        if isinstance(header, OSError) or size is None or header.orientation < 5:
            continue
        if same_size(size, header.size) and not same_size(size, header.shown):
            stored.append((sample, header.shown))
            boxes = [box.corners for box in sample.boxes]
            in_shown = all_fit(boxes, header.shown)
            votes[in_shown] += in_shown != all_fit(boxes, header.size)
    if not votes[True]:
        return
    what = "images with EXIF rotation: stated as stored, but boxes fit the image shown"
    if votes[True] > votes[False]:
        for sample, shown in stored:
            sample.stated_size = shown
    else:
        what = f"WARNING: {what}, in others not; look at them with damex data browse"
    summary.note(what, stored[0][0].image, votes[True])


def coco_document(
    headers: Mapping[str, ImageHeader | OSError],
    split: str,
    samples: Sequence[Sample],
    summary: Summary,
) -> dict[str, Any]:
    """The COCO document of a split; samples of the same file are joined.

    Ids of images, annotations and categories (the classes of ``summary``) are 1, 2, ...
    ``source`` and ``place`` give the origin of a record. Sizes and drops are counted in
    ``summary``.
    """
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
        source = dict(file_name=sample.image, source=sample.source)
        width, height = header.shown
        images.append(dict(id=len(images) + 1, width=width, height=height, **source))
        filled += bool(boxes)
        for box in boxes:
            counts[box.label] += 1
            x1, y1, x2, y2 = box.corners
            sides = [round(value, _DIGITS) for value in (x1, y1, x2 - x1, y2 - y1)]
            found = dict(score=box.score, predicted=True)  # as damex data complete does
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=len(images),
                    category_id=ids[box.label],
                    bbox=sides,
                    area=sides[2] * sides[3] if box.area is None else box.area,
                    iscrowd=int(box.crowd),
                    place=box.place,
                    **({} if box.score is None else found),
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


def _valid_boxes(
    sample: Sample, header: ImageHeader, summary: Summary
) -> list[Box] | None:
    """Boxes in pixels as shown; None if the image is left out."""
    boxes = [box.corners for box in sample.boxes]
    turned = not sample.normalised and fits_stored(header, sample.stated_size, boxes)
    if turned is None:
        width, height = sample.stated_size or (0, 0)
        where = (
            f"{sample.source}: {sample.image} is stated as {width} x {height} px, "
            f"the file has {header.shown[0]} x {header.shown[1]}"
        )
        summary.drop("images of another size than their annotation", where)
        summary.drop("boxes of images of another size", where, len(sample.boxes))
        return None
    if turned or (header.orientation != 1 and sample.boxes):
        fate = "taken for the image as it is shown, and not as it is stored"
        fate = "turned with them" if turned else fate
        summary.note(f"images with EXIF rotation: boxes {fate}", sample.image)
    width, height = header.shown if sample.normalised else (1, 1)
    valid: dict[tuple[str, Corners], Box] = {}
    for box in sample.boxes:
        x1, y1, x2, y2 = box.corners
        corners = (x1 * width, y1 * height, x2 * width, y2 * height)
        corners = turn_box(corners, header) if turned else corners
        problem = _problem(corners, header.shown)
        if problem is None and (box.label, corners) in valid:
            problem = "boxes that occur twice"
        if problem is None:
            valid[box.label, corners] = box._replace(corners=corners)
        else:
            colon = ":" if isinstance(box.place, int) else ": "
            summary.drop(problem, f"{sample.source}{colon}{box.place}")
    return list(valid.values())


def _problem(corners: Corners, size: tuple[int, int]) -> str | None:
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


def convert_cached(root: str | Path, options: Options) -> Conversion:
    """Convert a dataset, or reuse one of the same files, options and version.

    Files are the same if names, sizes and times are. Conversions are kept in
    ``$XDG_CACHE_HOME/damex/datasets`` or below ``~/.cache``, and are safe to delete. A
    new folder is renamed when complete, so that concurrent processes share the first.
    ConfigError if an option is invalid, or the cache cannot be written; DataError if
    the data cannot be read.
    """
    tree = open_root(root)
    parts = [str(tree.root), asdict(options), tree.digest(), CONVERTER_VERSION]
    key = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
    name = f"{tree.root.name}-{key}"
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(home) / "damex" / "datasets" / name
    existed = folder.exists()
    if (found := _read(folder)) is not None:
        return found
    if existed:  # incomplete: files were deleted
        shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(
            prefix=f".{name}-", dir=folder.parent, ignore_cleanup_errors=True
        ) as draft:
            conversion = convert_tree(tree, options, Path(draft))
            Path(draft).rename(folder)
            return conversion._replace(folder=folder)
    except OSError as error:
        if (found := _read(folder)) is not None:
            return found  # another process was first
        raise ConfigError(
            f"{tree.root} cannot be converted to {folder} ({error}); make both "
            "accessible, or set XDG_CACHE_HOME to a folder that can be written."
        ) from error


def _read(folder: Path) -> Conversion | None:
    """A complete conversion in a folder, or None."""
    try:
        text = (folder / _SUMMARY_FILE).read_text(encoding="utf-8")
        conversion = Conversion(folder, Summary.from_dict(json.loads(text)))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    files = [folder / f"{split}.json" for split in conversion.summary.splits]
    return conversion if all(file.is_file() for file in files) else None


# The formats that are recognized without a name, and each by its name.
READERS.update(dict.fromkeys((None, *(fmt.name for fmt in FORMATS)), convert_cached))
