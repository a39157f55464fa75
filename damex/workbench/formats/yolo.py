"""YOLO: one text file per image, one line per object, in relative coordinates.

A line is the class index and center x, center y, width, height; or the index and the
corners of a polygon, reduced to its upright box. Keypoints after a box (``kpt_shape``
in ``data.yaml``) are left out. Names and splits come from a ``data.yaml`` (Ultralytics,
Roboflow) or from darknet's ``.data``, ``.names`` and list files. An image with a
missing or empty label file has no objects.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import yaml

from damex.datasets.entries import Options, Summary, problem_of_names
from damex.datasets.image_files import IMAGE_SUFFIXES
from damex.errors import ConfigError, DataError
from damex.workbench.formats.label_files import (
    first_problem,
    kind_of_file,
    kind_of_line,
    recognise_kind,
    why_no_image,
    yolo_boxes,
)
from damex.workbench.formats.records import Contents, Format, Sample, by_folder
from damex.workbench.formats.tree import (
    Tree,
    join,
    numbers,
    parent,
    replace_part,
    some,
    split_name,
    stem,
)

_NAME_FILES = (".names", "classes.txt", "labels.txt", "class_names.txt")
# Default lists of tools.
_DEFAULT_LISTS = ("predefined_classes.txt", "coco.names", "voc.names", "imagenet.names")
_LABELIMG = ("dog", "person", "cat", "tv", "car", "meatballs", "marinara sauce")
_NULLS = ("", "~", "null", "Null", "NULL")


@dataclass
class _Config:
    """Names, number of values per box for keypoints, and folders and lists by split."""

    source: str = ""
    names: tuple[str, ...] = ()
    keypoints: int = 0
    places: dict[str, list[str]] = field(default_factory=dict)
    lacking: tuple[str, ...] = ("test",)  # splits whose folders may be missing


def _recognise(tree: Tree) -> str | None:
    if paths := _yaml_files(tree):
        return paths[0]
    found = recognise_kind(tree, "yolo")
    names = _name_files(tree)
    return f"{names[0]} and {found}" if names and found else found


def _yaml_files(tree: Tree) -> list[str]:
    """YAML files with names and nc or images, ``data.yaml`` first."""
    files = tree.with_suffix(".yaml", ".yml")
    files.sort(key=lambda path: (path.count("/"), stem(path) != "data", path))
    found = []
    for path in files[:20]:
        with contextlib.suppress(DataError):
            content = _load_yaml(tree, path)
            is_yolo = "nc" in content or any(split_name(str(key)) for key in content)
            if "names" in content and is_yolo:
                found.append(path)
    return found


def _load_yaml(tree: Tree, path: str) -> Mapping[str, Any]:
    """Read a YAML mapping with scalars as written; DataError for anything else."""
    text = tree.text(path)
    try:  # other loaders make True of the class "yes", and 750 of "12:30"
        content = yaml.load(text, Loader=yaml.BaseLoader)
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{tree.root / path}" + (f":{mark.line + 1}" if mark else "")
        reason = getattr(error, "problem", None) or error
        raise DataError(f"{where}: not a YAML file ({reason}).") from error
    if not isinstance(content, dict):
        raise DataError(f"{tree.root / path} has no 'key: value' lines.")
    return content


def _read(tree: Tree, options: Options, summary: Summary) -> Contents:
    config = _read_config(tree)
    if (options.val or options.val_share) is not None:
        config.lacking = ("test", "val")
    names = config.names or options.classes
    if not names:
        raise ConfigError(
            f"{tree.root}: YOLO labels hold class numbers, and no file names the "
            "classes (looked for data.yaml with names: and train:, *.names, "
            "classes.txt); add classes=['...', ...] in the order of the numbers."
        )
    labels, unclear = _label_of_images(tree, summary)
    splits = _split_images(tree, config, labels, summary)
    listed = [image for images in splits.values() for image in images]
    samples = {}
    for image in dict.fromkeys([*listed, *labels]):
        if image in unclear:
            continue
        label = labels.get(image)
        sample = Sample(image, label or config.source or image, normalised=True)
        if label is None:
            summary.note("images without a label file: kept as without objects", image)
        else:
            sample.boxes = list(
                yolo_boxes(tree, label, names, config.keypoints, summary)
            )
        samples[image] = sample
    by_split = {
        split: [samples[image] for image in images if image in samples]
        for split, images in splits.items()
    }
    return Contents(list(samples.values()), by_split, tuple(names))


def _read_config(tree: Tree) -> _Config:
    """Read a ``data.yaml``, or darknet's files; DataError if two name other classes."""
    paths = _yaml_files(tree)
    if len({parent(path) for path in paths}) > 1 and parent(paths[0]):
        raise ConfigError(
            f"{tree.root} holds several datasets ({some(paths)}); give each its own "
            f"entry, such as root={str(tree.root / parent(paths[0]))!r}."
        )
    configs = [_from_yaml(tree, path) for path in paths]
    files = _name_files(tree)
    own = [path for path in files if not _is_default(tree, path)]
    files = own or ([] if configs else files[:1])
    lists = [_from_list(tree, path) for path in files]
    _check_agreement(tree, [*configs, *lists])
    if configs:
        return configs[0]
    for path in tree.with_suffix(".yaml", ".yml"):
        if not lists or "data" in stem(path).lower():
            _load_yaml(tree, path)  # raises if it is broken
    config = lists[0] if lists else _Config()
    for path in tree.with_suffix(".data"):
        for line in tree.lines(path):
            key, _, value = (part.strip() for part in line.partition("="))
            if (split := split_name(key)) and value:
                config.places.setdefault(split, []).append(value)
    return config


def _name_files(tree: Tree) -> list[str]:
    """Files with a class name per line; those that tools bring along are the last."""
    found = [path for path in tree.with_suffix(*_NAME_FILES) if _is_names(tree, path)]
    return sorted(found, key=lambda path: _is_default(tree, path))


def _is_names(tree: Tree, path: str) -> bool:
    """Whether a file has lines, and these are neither paths nor labels."""

    def is_file(word: str) -> bool:
        known = "/" in word and stem(word).lower() in tree.images_by_stem
        return known or word.lower().endswith((".txt", *IMAGE_SUFFIXES))

    lines = [re.split(r"[\s,;]+", line) for line in tree.glanced(path) if line]
    is_list = all(any(map(is_file, words)) for words in lines)
    return bool(lines) and not is_list and kind_of_line(" ".join(lines[0])) is None


def _is_default(tree: Tree, path: str) -> bool:
    """Whether a list of names is the default one of a tool."""
    begins = tuple(tree.glanced(path)[: len(_LABELIMG)]) == _LABELIMG
    return begins or path.lower().rpartition("/")[2] in _DEFAULT_LISTS


def _from_list(tree: Tree, path: str) -> _Config:
    """Read a file with a class name per line."""
    names = "\n".join(tree.lines(path)).rstrip().split("\n")
    if problem := problem_of_names(names, "line"):
        raise DataError(
            f"{tree.root / path}: {problem}; line 1 names class 0, line 2 class 1, and "
            "so on. Correct the file."
        )
    return _Config(path, tuple(names))


def _check_agreement(tree: Tree, found: Sequence[_Config]) -> None:
    """DataError if two files number the classes differently."""
    for other in found[1:]:
        first = found[0]
        if other.names == first.names:
            continue
        pairs = zip_longest(first.names, other.names)
        number, (a, b) = next((n, ab) for n, ab in enumerate(pairs) if ab[0] != ab[1])
        raise DataError(
            f"{tree.root}: class {number} is {a!r} in {first.source} and {b!r} in "
            f"{other.source}; remove the file that does not belong to these labels, or "
            "give each folder its own entry."
        )


def _from_yaml(tree: Tree, path: str) -> _Config:
    """Read the names, ``kpt_shape``, ``path`` and the locations of the splits."""
    content = _load_yaml(tree, path)
    try:
        config = _Config(path, _names_of(content))
    except (ValueError, TypeError) as error:  # TypeError: no key, as in "~: cat"
        raise DataError(
            f"{tree.root / path}: names: {error}. Correct the file."
        ) from error
    match content.get("kpt_shape", ""):
        case str(word) if word in _NULLS:
            pass
        case [str(points), "2" | "3" as values] if points.isdecimal():
            config.keypoints = int(points) * int(values)
        case shape:
            raise DataError(
                f"{tree.root / path}: kpt_shape must be [number of keypoints, 2 or 3], "
                f"got {shape!r}."
            )
    prefix = next(iter(_places(content.get("path", ""))), "")
    for key, value in content.items():
        split = split_name(str(key))
        if split is not None and (places := _places(value)):
            config.places.setdefault(split, []).extend(
                f"{prefix}/{place}" if prefix else place for place in places
            )
    return config


def _places(value: Any) -> list[str]:
    """One folder or list of images, or several."""
    values = value if isinstance(value, list) else [value]
    return [str(place) for place in values if place not in _NULLS]


def _names_of(content: Mapping[str, Any]) -> tuple[str, ...]:
    """The classes by number; ValueError or TypeError if ``names`` is faulty."""
    names = content["names"]
    if isinstance(names, dict):
        numbered = {int(key): name for key, name in names.items()}
        if numbered and set(numbered) != {*range(len(names))}:  # Ultralytics, too
            raise ValueError(f"expected numbers 0 to {len(names) - 1}, got {[*names]}")
        names = [name for _, name in sorted(numbered.items())]
    if not isinstance(names, list) or not names:
        raise ValueError(
            f"expected a list of class names, or a mapping from numbers, got {names!r}"
        )
    for name in names:
        if not isinstance(name, str):
            raise ValueError(f"expected texts, got {name!r}")
    names = tuple(name.strip() for name in names)
    count = content.get("nc", "")
    if count not in _NULLS and numbers([str(count)]) != (len(names),):
        raise ValueError(f"nc is {count}, and names lists {len(names)} classes")
    if (problem := problem_of_names(names)) is not None:
        raise ValueError(problem)
    return names


def _split_images(
    tree: Tree, config: _Config, labels: Mapping[str, str], summary: Summary
) -> dict[str, list[str]]:
    """Images by split: from the config, lists, or folders named like splits."""
    splits: dict[str, list[str]] = {}
    for split, places in config.places.items():
        for place in places:
            images = _images_at(tree, place, config, summary, split)
            splits.setdefault(split, []).extend(images)
    splits = splits or _found_lists(tree, summary)
    of_image = {image: tree.split_of_folder(parent(image)) for image in tree.images}
    if not splits:
        folders = {parent(image) for image in labels}
        found = [one for one in of_image if of_image[one] or parent(one) in folders]
        splits = by_folder(found, of_image.get)
    elif "test" not in splits:  # some exports have the folder, and do not name it
        used = {image for images in splits.values() for image in images}
        rest = [one for one in labels if of_image[one] == "test"]
        splits |= {"test": rest} if rest and not used & {*rest} else {}
    return {split: list(dict.fromkeys(images)) for split, images in splits.items()}


def _images_at(
    tree: Tree, place: str, config: _Config, summary: Summary, split: str
) -> list[str]:
    """Images in a folder, or in a list file."""
    near = (parent(config.source), "")
    is_list = place.endswith(".txt")
    path = tree.locate(place, near, tree.files if is_list else tree.folders)
    kind = "list" if is_list else "folder"
    if path is None and split in config.lacking and (split, kind) != ("test", "list"):
        # Often named in configs but not published.
        summary.note(f"no {kind} {place!r} for {split}", config.source)
        return []
    if path is None:
        raise DataError(
            f"{tree.root / config.source}: {split} is the {kind} {place!r}, which is "
            f"not in {tree.root}. Correct the file, or let root be the folder that "
            "holds it" + ("; or set val_share in its entry." if split == "val" else ".")
        )
    if is_list:
        return _listed(tree, path, summary)
    return [image for image in tree.images if not path or image.startswith(f"{path}/")]


def _found_lists(tree: Tree, summary: Summary) -> dict[str, list[str]]:
    """Images by list file without a config; lists of missing images are skipped."""
    splits: dict[str, list[str]] = {}
    losses = Summary("", "", "")
    for path in tree.with_suffix(".txt"):
        lines = [line for line in tree.glanced(path)[:20] if line]
        is_list = all(line.lower().endswith(tuple(IMAGE_SUFFIXES)) for line in lines)
        if split_name(stem(path)) is not None:
            is_list |= all(line.lower() in tree.images_by_stem for line in lines)
        if lines and is_list and stem(path).lower() not in tree.images_by_stem:
            split = split_name(stem(path)) or stem(path)
            splits.setdefault(split, []).extend(_listed(tree, path, losses))
    found = sum(map(len, splits.values()))
    lost = sum(count.times for count in losses.dropped.values())
    if found < lost:
        what = "images of list files are missing: the lists are ignored"
        example = next(iter(losses.dropped.values())).example
        summary.note(what, example, lost)
        return {}
    summary.dropped.update(losses.dropped)
    return splits


def _listed(tree: Tree, path: str, summary: Summary) -> list[str]:
    """The images of a list file."""
    find = tree.image_finder(path, (line for _, line in tree.numbered(path)))
    found = []
    for number, line in tree.numbered(path):
        if (image := find(line)) is not None:
            found.append(image)
        else:
            what = f"images of the list {path} that are missing"
            summary.drop(what, f"{path}:{number}: {line}")
    return found


def _label_of_images(tree: Tree, summary: Summary) -> tuple[dict[str, str], set[str]]:
    """Image -> label file: by YOLO's folder layout, else by name.

    Also returns the images that share one, such as a.jpg and a.png.
    """
    labels = {}
    images_of: dict[str, list[str]] = {}
    for image in tree.images:
        folder = parent(image)
        for where in (replace_part(folder, "images", "labels"), folder):
            path = join(where, f"{stem(image)}.txt")
            if path in tree.files:
                labels[image] = path
                images_of.setdefault(path, []).append(image)
                break
    unclear: set[str] = set()
    for path, images in images_of.items():
        if len(images) > 1:
            what = "label files of several images, all left out"
            summary.drop(what, f"{path}: {some(images)}")
            unclear.update(images)
    for path in tree.with_suffix(".txt"):
        if path in images_of or kind_of_file(tree, path) != "yolo":
            continue
        if (found := tree.image_of_label(path)) is None:
            summary.drop(why_no_image(tree, path), path)
        else:
            labels.setdefault(found, path)
    return labels, unclear


YOLO = Format(
    name="yolo",
    looks_for="data.yaml, or *.txt with a class number and 4 fractions per line",
    recognise=_recognise,
    read=_read,
    problem=first_problem,
)
