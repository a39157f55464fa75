"""YOLO: one text file per image, one line per object, in relative coordinates.

A line is the class index and center x, center y, width, height; or the index and the
corners of a polygon, reduced to its upright box. Keypoints after a box (``kpt_shape``
in ``data.yaml``) are left out. Names and splits come from a ``data.yaml`` (Ultralytics,
Roboflow) or from darknet's ``.data``, ``.names`` and list files. An image with a
missing or empty label file has no objects.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from damex.datasets.formats.label_files import (
    fault_of_line,
    first_fault,
    image_of,
    kind_of_file,
    recognise_kind,
)
from damex.datasets.formats.records import (
    Box,
    Contents,
    Format,
    Ledger,
    Options,
    Sample,
    fault_of_names,
    numbers,
)
from damex.datasets.formats.tree import (
    IMAGE_SUFFIXES,
    Tree,
    join,
    parent,
    replace_part,
    some,
    split_name,
    split_of_folder,
    stem,
)
from damex.errors import ConfigError, DataError

_NAME_FILES = (".names", "classes.txt", "labels.txt", "class_names.txt")
# Rounding may move the border of a box this far out of the image.
_SLACK = 0.01


@dataclass
class _Config:
    """Names, number of values per box for keypoints, and folders and lists by split."""

    source: str = ""
    names: tuple[str, ...] | None = None
    keypoints: int = 0
    places: dict[str, list[str]] = field(default_factory=dict)


def _recognise(tree: Tree) -> str | None:
    if paths := _yaml_files(tree):
        return paths[0]
    if (found := recognise_kind(tree, "yolo")) is None:
        return None
    names = [path for path in tree.files if path.lower().endswith(_NAME_FILES)]
    return f"{names[0]} and {found}" if names else found


def _yaml_files(tree: Tree) -> list[str]:
    """YAML files that name classes and images, ``data.yaml`` first."""
    files = sorted(
        tree.with_suffix(".yaml", ".yml"),
        key=lambda path: (path.count("/"), stem(path) != "data", path),
    )
    found = []
    for path in files[:20]:
        with contextlib.suppress(DataError):
            content = _load_yaml(tree, path)
            if "names" in content and any(split_name(str(key)) for key in content):
                found.append(path)
    return found


def _load_yaml(tree: Tree, path: str) -> Mapping[str, Any]:
    """Read a YAML mapping; DataError for anything else."""
    try:
        content = yaml.safe_load(tree.text(path))
    except (yaml.YAMLError, ValueError) as error:  # ValueError: an invalid date
        mark = getattr(error, "problem_mark", None)
        where = f"{tree.root / path}" + (f":{mark.line + 1}" if mark else "")
        reason = getattr(error, "problem", None) or error
        raise DataError(f"{where}: not a YAML file ({reason}).") from error
    if not isinstance(content, dict):
        raise DataError(f"{tree.root / path} has no 'key: value' lines.")
    return content


def _read(tree: Tree, options: Options, ledger: Ledger) -> Contents:
    config = _read_config(tree)
    names = config.names or options.classes
    if not names:
        raise ConfigError(
            f"{tree.root}: YOLO labels hold class numbers, and no file names the "
            "classes (looked for data.yaml with names: and train:, *.names, "
            "classes.txt); add "
            "classes=['...', ...] in the order of the numbers."
        )
    splits = _split_images(tree, config, ledger)
    labels = _label_of_images(tree, ledger)
    listed = [image for images in splits.values() for image in images]
    if not splits:
        folders = {parent(image) for image in labels}
        listed = [image for image in tree.images if parent(image) in folders]
    samples = {}
    for image in dict.fromkeys([*listed, *labels]):
        label = labels.get(image)
        if label is None:
            ledger.note("images without a label file: kept as without objects", image)
        sample = Sample(image, label or config.source or image, normalised=True)
        if label is not None:
            sample.boxes = list(_boxes(tree, label, names, config.keypoints, ledger))
        samples[image] = sample
    by_split = {
        split: [samples[image] for image in images] for split, images in splits.items()
    }
    return Contents(list(samples.values()), by_split, tuple(names))


def _read_config(tree: Tree) -> _Config:
    paths = _yaml_files(tree)
    if len({parent(path) for path in paths}) > 1 and parent(paths[0]):
        raise ConfigError(
            f"{tree.root} holds several data sets ({some(paths)}); give each its own "
            f"entry, such as root={str(tree.root / parent(paths[0]))!r}."
        )
    if paths:
        return _from_yaml(tree, paths[0])
    for path in tree.with_suffix(".yaml", ".yml"):
        if stem(path) == "data":
            _load_yaml(tree, path)  # raises if it is broken
    config = _Config()
    for path in tree.with_suffix(*_NAME_FILES):
        names = "\n".join(tree.lines(path)).rstrip().split("\n")
        if names != [""] and (fault := fault_of_names(names, "line")):
            raise DataError(
                f"{tree.root / path}: {fault}; line 1 names class 0, line 2 class 1, "
                "and so on. Correct the file."
            )
        config.names, config.source = tuple(filter(None, names)), path
        break
    for path in tree.with_suffix(".data"):
        for line in tree.lines(path):
            key, _, value = (part.strip() for part in line.partition("="))
            if (split := split_name(key)) and value:
                config.places.setdefault(split, []).append(value)
    return config


def _from_yaml(tree: Tree, path: str) -> _Config:
    """Read ``names`` (list or mapping), ``path`` and the locations of the splits."""
    content = _load_yaml(tree, path)
    names = content["names"]
    if isinstance(names, dict):
        try:
            numbered = {int(key): str(name) for key, name in names.items()}
        except (ValueError, TypeError) as error:  # TypeError: no key, as in "~: cat"
            raise DataError(f"{tree.root / path}: names: {error}.") from error
        last = max(numbered, default=-1)
        names = [numbered.get(n, f"class {n}") for n in range(last + 1)]
    if not isinstance(names, list) or not names:
        raise DataError(
            f"{tree.root / path}: names must be a list of class names, or a mapping "
            f"from number to name, got {names!r}."
        )
    config = _Config(path, tuple(str(name) for name in names))
    count = content.get("nc", len(names))
    fault = fault_of_names(config.names or ())
    if count != len(names):
        fault = f"nc is {count!r}, and names lists {len(names)} classes"
    if fault is not None:
        raise DataError(f"{tree.root / path}: {fault}. Correct the file.")
    if (shape := content.get("kpt_shape")) is not None:
        config.keypoints = _count_keypoints(tree.root / path, shape)
    prefix = str(content.get("path") or "")
    for key, value in content.items():
        split = split_name(str(key))
        places = value if isinstance(value, list) else [value]
        if split is not None and value:
            config.places.setdefault(split, []).extend(
                f"{prefix}/{place}" if prefix else str(place) for place in places
            )
    return config


def _count_keypoints(source: Path, shape: object) -> int:
    """Number of values that ``kpt_shape: [keypoints, 2 or 3]`` appends to each box."""
    match shape:
        case [int(points), int(values)] if points > 0 and values in (2, 3):
            return points * values
    raise DataError(
        f"{source}: kpt_shape must be [number of keypoints, 2 or 3], got {shape!r}."
    )


def _found_lists(tree: Tree, ledger: Ledger) -> dict[str, list[str]]:
    """Images by list file without a config; lists of missing images are skipped."""
    splits: dict[str, list[str]] = {}
    losses = Ledger()
    names = 0
    for path in tree.with_suffix(".txt"):
        if _is_list(tree, path):
            names += sum(map(bool, tree.lines(path)))
            split = split_name(stem(path)) or stem(path)
            splits.setdefault(split, []).extend(_listed(tree, path, losses))
    found = sum(map(len, splits.values()))
    if found < 0.5 * names:
        what = "images of list files are not there: the lists are passed over"
        example = next(iter(losses.dropped.values())).example
        ledger.note(what, example, names - found)
        return {}
    ledger.dropped.update(losses.dropped)
    return splits


def _is_list(tree: Tree, path: str) -> bool:
    """Whether a text file is a list of image files."""
    if stem(path).lower() in tree.images_by_stem:
        return False
    lines = [line for line in tree.lines(path)[:20] if line]
    return bool(lines) and all(
        line.lower().endswith(tuple(IMAGE_SUFFIXES)) for line in lines
    )


def _split_images(tree: Tree, config: _Config, ledger: Ledger) -> dict[str, list[str]]:
    """Images by split: from the config, else by folders named like splits."""
    splits: dict[str, list[str]] = {}
    for split, places in config.places.items():
        for place in places:
            images = _images_at(tree, place, config, ledger, split)
            splits.setdefault(split, []).extend(images)
    splits = splits or _found_lists(tree, ledger)
    if not splits:
        for image in tree.images:
            if (by_folder := split_of_folder(parent(image))) is not None:
                splits.setdefault(by_folder, []).append(image)
    return {split: list(dict.fromkeys(images)) for split, images in splits.items()}


def _images_at(
    tree: Tree, place: str, config: _Config, ledger: Ledger, split: str
) -> list[str]:
    """Images in a folder, or in a list file."""
    base = parent(config.source)
    if not place.endswith(".txt"):
        folder = tree.locate_folder(place, near=(base, ""))
        if folder is not None:
            return tree.below(folder, tree.images)
        if split == "test":  # often named in configs but not published
            ledger.note(f"no folder {place!r} for test", config.source)
            return []
        raise DataError(
            f"{tree.root / config.source}: {split} is {place!r}, and there is no such "
            f"folder in {tree.root}. Correct the file, or let root be the folder that "
            "holds it."
        )
    parts = place.replace("\\", "/").split("/")
    trials = [
        join(near, "/".join(parts[n:]))
        for n in range(len(parts))
        for near in (base, "")
    ]
    path = next((trial for trial in trials if trial in tree.files), None)
    if path is None:
        raise DataError(
            f"{tree.root / config.source}: {split} is the list {place!r}, and there is "
            f"no such file in {tree.root}. Correct the file."
        )
    return list(_listed(tree, path, ledger))


def _listed(tree: Tree, path: str, ledger: Ledger) -> Iterator[str]:
    for number, line in enumerate(tree.lines(path), start=1):
        if not line:
            continue
        image = tree.locate_image(line, (parent(path),), split_name(stem(path)))
        if image is None:
            what = f"images of the list {path} that are not there"
            ledger.drop(what, f"{path}:{number}: {line}")
        else:
            yield image


def _label_of_images(tree: Tree, ledger: Ledger) -> dict[str, str]:
    """Image -> label file: by YOLO's folder layout, else by name."""
    labels = {}
    for image in tree.images:
        folder = parent(image)
        for where in (replace_part(folder, "images", "labels"), folder):
            path = join(where, f"{stem(image)}.txt") if where is not None else ""
            if path in tree.files:
                labels[image] = path
                break
    used = set(labels.values())
    for path in tree.with_suffix(".txt"):
        if path in used or kind_of_file(tree, path) != "yolo":
            continue
        if (found := image_of(tree, path)) is None:
            ledger.drop("annotation files without an image", path)
        else:
            labels.setdefault(found, path)
    return labels


def _boxes(
    tree: Tree, path: str, names: tuple[str, ...], keypoints: int, ledger: Ledger
) -> Iterator[Box]:
    for number, line in enumerate(tree.lines(path), start=1):
        words, place = line.split(), f"{path}:{number}"
        if not words:
            continue
        if keypoints and len(words) == 5 + keypoints:
            words = words[:5]
        values = numbers(words)
        is_shape = len(words) == 5 or (len(words) >= 7 and len(words) % 2 == 1)
        if values is None or not is_shape:
            what = "lines that are no box or polygon of a class"
            ledger.drop(what, f"{place}: {fault_of_line(line)}")
            continue
        if not values[0].is_integer() or not 0 <= values[0] < len(names):
            ledger.drop(
                "boxes of an unknown class number",
                f"{place}: {words[0]}; there are 0 to {len(names) - 1}",
            )
            continue
        shape = values[1:]
        if any(value > 1 + _SLACK for value in shape):
            what = "boxes that are no shares of the image (above 1)"
            ledger.drop(what, f"{place}: {fault_of_line(line)}")
            continue
        yield Box(_corners(shape), names[int(values[0])], number)


def _corners(shape: tuple[float, ...]) -> tuple[float, float, float, float]:
    if len(shape) == 4:
        x, y, w, h = shape
        return x - w / 2, y - h / 2, x + w / 2, y + h / 2
    xs, ys = shape[0::2], shape[1::2]
    return min(xs), min(ys), max(xs), max(ys)


YOLO = Format(
    name="yolo",
    looks_for="data.yaml, or *.txt with a class number and 4 shares per line",
    recognise=_recognise,
    read=_read,
    fault=first_fault,
)
