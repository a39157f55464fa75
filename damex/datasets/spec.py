"""DatasetSpec: one entry of a mixture, checked before anything is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeGuard

from mmengine.utils import is_abs

from damex.datasets.coco_records import read_class_names
from damex.datasets.entries import (
    SPLITS,
    Conversion,
    as_words,
    problem_of_format,
    problem_of_names,
    read_folder,
)
from damex.datasets.findings import Location
from damex.datasets.mmdet_configs import (
    check_class,
    declared_classes,
    leaves,
    map_leaves,
)
from damex.errors import ConfigError, did_you_mean

# Reserved names of datasets, and their meaning.
RESERVED: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(("mean", "pooled"), "a row of the table of results")
    | dict.fromkeys(("auto", "all", "none"), "a choice of --dataset and --like")
)
# Types of values, and words for them; numbers have bounds, too.
TYPES: Mapping[str, tuple[Any, str]] = MappingProxyType(
    {
        "root": ((str, Path), "a path"),
        "data_root": ((str, Path), "a path"),
        "img": ((str, Mapping), "a path, or a dict with one for each split"),
        "rename": (Mapping, "a dict"),
        "group": (str, "a text"),
        "classes": ((list, tuple), "a list of names"),
        "weight": ((int, float), "a number above 0 (remove the entry to leave it out)"),
        "val_share": ((int, float), "a number from 0 to below 1"),
        "tile": (int, "the side of a window in pixels, 16 or more, or 'auto'"),
    }
)
# At least the first number, and below the second.
BOUNDS: Mapping[str, tuple[float, float]] = MappingProxyType(
    dict(weight=(math.ulp(0.0), math.inf), val_share=(0, 1), tile=(16, math.inf))
)


class Source(NamedTuple):
    """Annotations of a split: a COCO file and its image folder, or a dataset class.

    ``config`` is that of an mmdet dataset class, which has no such paths.
    """

    location: Location
    annotations: Path = Path()
    images: Path = Path()
    config: Mapping[str, Any] | None = None


def coco_paths(config: Mapping[str, Any]) -> tuple[Path, Path]:
    """Annotation file and image folder of the config of a COCO dataset."""
    root = Path(config.get("data_root") or "")
    images = (config.get("data_prefix") or {}).get("img") or ""
    folder = Path(images) if is_abs(images) else root / images
    return root / config.get("ann_file", ""), folder


@dataclass(frozen=True)
class DatasetSpec:
    """One dataset of a mixture.

    Args:
        name: Short unique name; it appears in tables, losses and checkpoints.
        root: Folder in a format of ``damex.workbench.formats``; ``train``, ``val`` and
            ``test`` may override its splits: by a split, folder, list of images or
            annotation file in it, or several.
        format: Format of ``root``, if it cannot be recognized.
        tile: Side of the windows, in pixels of the images, through which the dataset is
            seen (:mod:`damex.datasets.tiles`); whole images by default. ``auto`` in a
            config chooses.
        val_share: Share of ``root`` for validation, if it has none; 0.1 by default.
        data_root: Folder that the other paths are relative to.
        train: COCO file, or the config of any mmdet dataset, whose ``pipeline`` (if
            any) replaces that of the mixture.
        val: Same for evaluation.
        test: Same for ``tools/test.py``; ``val`` by default.
        img: Image folder, relative to ``data_root``; or one per split.
        classes: Class names to use; all classes of the training set by default.
        rename: Dataset's class name -> name in the mixture, to merge classes.
        weight: Relative share of the training samples, for all datasets of the mixture
            or for none. By default the number of images: every image is seen equally
            often.
        group: Datasets of one group share their experts; the name by default.
    """

    name: str
    data_root: str = ""
    train: str | Sequence[str] | Mapping[str, Any] | None = None
    val: str | Sequence[str] | Mapping[str, Any] | None = None
    test: str | Sequence[str] | Mapping[str, Any] | None = None
    img: str | Mapping[str, str] = ""
    classes: tuple[str, ...] | None = None
    rename: Mapping[str, str] = field(default_factory=dict)
    weight: float | None = None
    group: str | None = None
    root: str | None = None
    format: str | None = None
    val_share: float | None = None
    tile: int | Literal["auto"] | None = None

    @classmethod
    def from_config(cls, entry: Mapping[str, Any], position: int) -> DatasetSpec:
        """Read one entry of ``mixture``.

        ConfigError if a key is unknown, or a value is invalid.
        """
        if not isinstance(entry, Mapping):
            raise ConfigError(
                f"mixture[{position}] must be a dict(name=..., data_root=..., "
                f"train=..., val=..., img=...), got {entry!r}."
            )
        given = {key: value for key, value in entry.items() if value is not None}
        for problem in _problems(given):
            raise ConfigError(f"mixture[{position}]{problem}")
        if "classes" in given:
            given["classes"] = tuple(given["classes"])
        if "rename" in given:  # a command line reads the class 7 as a number
            given["rename"] = {str(k): name for k, name in given["rename"].items()}
        if isinstance(img := given.get("img"), Mapping):
            given["img"] = _with_home(img, *img)
        return cls(**_with_home(given, "root", "data_root", "img", *SPLITS))

    @property
    def group_name(self) -> str:
        """Name of the group of datasets that share experts with this one."""
        return self.group or self.name

    def source(self, split: str) -> str | Mapping[str, Any] | None:
        """Annotation file or dataset config of a split; ``test`` may be ``val``."""
        if split not in SPLITS:
            raise ConfigError(f"split must be one of {SPLITS}, got {split!r}.")
        if self.root is not None:
            file = self.conversion.file(split)
            return None if file is None else str(file)
        source = self.train if split == "train" else self.val
        if split == "test":
            source = self.test or self.val
        if source is not None and not isinstance(source, (str, Mapping)):
            raise ConfigError(
                f"dataset {self.name!r}: {split} is {source!r}, which only an entry "
                "with root=... can have; name one annotation file."
            )
        return source

    @cached_property
    def conversion(self) -> Conversion:
        """Result of converting ``root`` (see ``read_folder``), if given."""
        return read_folder(vars(self))

    @property
    def converted_root(self) -> str:
        """The folder that was converted; empty for COCO files."""
        return self.conversion.summary.root if self.root is not None else ""

    def location(self, split: str) -> Location:
        """The location of a split: its annotation file or dataset class."""
        config = self.dataset_config(split)
        if isinstance(self.source(split), str):
            file, root = coco_paths(config)[0], self.converted_root
            return Location.of(self.name, file, split=split, root=root)
        kind = leaves(config)[0]["type"]
        kind = kind if isinstance(kind, str) else kind.__name__
        return Location(self.name, f"{kind} ({split})", split, is_file=False)

    def coco_source(self, split: str) -> Source | None:
        """COCO file and image folder of a split; None if not given or not COCO."""
        if not isinstance(self.source(split), str):
            return None
        return Source(self.location(split), *coco_paths(self.dataset_config(split)))

    def dataset_config(self, split: str) -> dict[str, Any]:
        """Config of the mmdet dataset of a split; ConfigError if it is missing."""
        source = self.source(split)
        if source is None:
            raise ConfigError(
                f"dataset {self.name!r}: {self.root} has no images for {split!r}; name "
                f"some with {split}='<split, folder or list>'"
                + (", or give val_share=0.2." if split == "val" else ".")
                if self.root is not None
                else f"dataset {self.name!r} has no {split!r} entry; add "
                f"{split}='<annotation file>' (COCO format, relative to data_root) or "
                f"{split}=dict(type='<mmdet dataset>', ...)."
            )
        if isinstance(source, str):
            return dict(
                type="NamedCocoDataset",
                data_root=self.data_root,
                ann_file=source,
                data_prefix=dict(img=self._image_folder(split)),
            )
        if "type" not in source:
            raise ConfigError(
                f"dataset {self.name!r}: {split} is a dict without 'type'; name the "
                f"mmdet dataset class, as in {split}=dict(type='VOCDataset', ...)."
            )
        check_class(source, self.name, has_choice=self.classes is not None)
        return map_leaves(source, lambda leaf: self._completed(leaf, split))

    def pipeline(self, split: str) -> Sequence[Any] | None:
        """The source's own pipeline, which replaces the mixture's; None by default.

        ConfigError if the datasets in a wrapper have different ones.
        """
        source = self.source(split)
        if not isinstance(source, Mapping):
            return None
        first, *others = (leaf.get("pipeline") or None for leaf in leaves(source))
        if any(pipeline != first for pipeline in others):
            raise ConfigError(
                f"dataset {self.name!r}: the datasets inside of {split} have different "
                "pipelines; give all of them the same one, or make them entries of the "
                "mixture, with one group."
            )
        return first

    def _completed(self, leaf: Mapping[str, Any], split: str) -> dict[str, Any]:
        """A dataset config with absolute paths and NamedCocoDataset for CocoDataset."""
        config = _with_home(leaf, "data_root", "ann_file")
        kind = config["type"]
        name = kind if isinstance(kind, str) else kind.__name__
        if name.removeprefix("mmdet.") == "CocoDataset":
            config["type"] = "NamedCocoDataset"
        if self.data_root:
            config.setdefault("data_root", self.data_root)
        if self.img:
            config.setdefault("data_prefix", dict(img=self._image_folder(split)))
        return config

    def _image_folder(self, split: str) -> str:
        if self.root is not None:
            return self.conversion.summary.root
        if isinstance(self.img, str):
            return self.img
        if split == "test" and not self.test:
            split = "val"
        if split not in self.img:
            raise ConfigError(
                f"dataset {self.name!r}: img names no folder for {split!r}, only for "
                f"{', '.join(self.img)}."
            )
        return self.img[split]

    @cached_property
    def own_classes(self) -> tuple[str, ...]:
        """The dataset's names of its training classes.

        From ``classes``, else the COCO file, else the metainfo of the mmdet dataset
        class. ConfigError if none of these names any class.
        """
        if self.classes is not None:
            return self.classes
        if self.root is not None:
            return self.conversion.summary.classes
        source = self.source("train") or self.source("val")
        if isinstance(source, str):
            return read_class_names(Path(self.data_root) / source, self.name)
        classes = declared_classes(source or {})
        if not classes:
            raise ConfigError(
                f"dataset {self.name!r} names no classes; add classes=['...'] to its "
                "mixture entry."
            )
        return classes


def is_tile(value: Any) -> TypeGuard[int]:
    """Whether a value is the side of a window in pixels."""
    return type(value) is int and value >= BOUNDS["tile"][0]


def parse_mixture(entries: Sequence[Mapping[str, Any]]) -> tuple[DatasetSpec, ...]:
    """Read and cross-check the entries of ``mixture``.

    ConfigError if it is not a list, is empty, repeats a dataset, or has only some
    weights.
    """
    if not isinstance(entries, (list, tuple)) or not entries:
        raise ConfigError(
            "mixture must be a list of dicts, one per dataset, got "
            f"{entries!r:.80}; write mixture=[dict(name=..., data_root=..., train=..., "
            "val=..., img=...), ...]."
        )
    specs = tuple(DatasetSpec.from_config(e, i) for i, e in enumerate(entries))
    without = [spec.name for spec in specs if spec.weight is None]
    if without and len(without) < len(specs):
        given = ", ".join(f"{s.name}={s.weight}" for s in specs if s.weight is not None)
        raise ConfigError(
            f"mixture: weight is given for some datasets ({given}) but not for "
            f"{', '.join(without)}; give every dataset a weight, or none (then every "
            "image is seen equally often)."
        )
    names = [spec.name for spec in specs]
    files = [_source_file(spec) for spec in specs]
    for position, (name, file) in enumerate(zip(names, files, strict=True)):
        if (first := names.index(name)) < position:
            raise ConfigError(
                f"mixture[{position}] and mixture[{first}] are both called {name!r}; "
                "remove one entry, or give it another name."
            )
        if file is not None and (first := files.index(file)) < position:
            raise ConfigError(
                f"mixture[{position}] ({name!r}) trains on the same annotation file as "
                f"mixture[{first}]: {file}. Remove one entry; to see a dataset more "
                "often, set its weight."
            )
    return specs


def _with_home(values: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    """A copy with ``~`` expanded in the paths at some keys."""
    found = dict(values)
    for key in keys:
        if isinstance(path := values.get(key), (str, Path)):
            found[key] = os.path.expanduser(path)  # noqa: PTH111 - keeps ""
    return found


def _problems(entry: Mapping[str, Any]) -> Iterator[str]:
    """Problems of an entry without its None values, to follow its place."""
    known = tuple(DatasetSpec.__dataclass_fields__)
    for key in entry:
        if key not in known:
            yield f" has the unknown key {key!r}; {did_you_mean(key, known)}"
    name: Any = entry.get("name")
    if not isinstance(name, str) or name in ("", ".", "..") or {"/", "\\"} & {*name}:
        yield f".name must be a text without '/', and not '.' or '..', got {name!r}."
    if name in RESERVED:
        yield f".name: {name!r} is {RESERVED[name]}; choose another name."
    for problem in (*_problems_of_values(entry), *_problems_of_sources(entry)):
        yield f" ({name!r}): {problem}"


def _problems_of_values(entry: Mapping[str, Any]) -> Iterator[str]:
    for key, (kinds, words) in TYPES.items():
        value = entry.get(key)
        if key == "tile" and value == "auto":
            continue
        fits = value is None or isinstance(value, kinds)
        if key == "img" and isinstance(value, Mapping):
            fits = all(isinstance(one, str) for one in value.values())
        if fits and value is not None and key in BOUNDS:
            least, most = BOUNDS[key]
            fits = least <= value < most and not isinstance(value, bool)
        if not fits or (key == "classes" and {*map(type, value or ())} - {str}):
            yield f"{key} must be {words}, got {value!r}."
            return
    if (problem := problem_of_names(entry.get("classes", ()))) is not None:
        yield f"classes={entry['classes']!r}: {problem}."
    for own, new in entry.get("rename", {}).items():
        if not isinstance(new, str) or not new.strip():
            yield f"rename must give the class {own!r} a name, got {new!r}."


def _problems_of_sources(entry: Mapping[str, Any]) -> Iterator[str]:
    has_root = "root" in entry
    for key in ("data_root", "img") if has_root else ("format", "val_share"):
        if entry.get(key, "") != "":
            words = "cannot be combined with" if has_root else "needs"
            yield (
                f"{key} {words} root='<folder>', which finds annotations and images "
                f"itself; {'remove one' if has_root else f'add it, or remove {key}'}."
            )
    for split in SPLITS if has_root else ():
        if split in entry and not as_words(entry[split]):
            yield (
                f"with root, {split} is a split, folder, list of images or annotation "
                f"file inside of it, got {entry[split]!r}."
            )
    if "format" in entry and (problem := problem_of_format(entry["format"])):
        yield problem
    if not {"root", *SPLITS} & entry.keys():
        yield (
            "no data; add root='<folder>', or data_root, train, val and img (see "
            "docs/guides/datasets.md)."
        )


def _source_file(spec: DatasetSpec) -> str | None:
    """Resolved path of the training annotations if they are one file."""
    if spec.root is not None:
        folder = str(Path(spec.root).resolve())
        return folder if spec.train is None else f"{folder}: {spec.train}"
    source = spec.source("train")
    source = source if isinstance(source, Mapping) else dict(ann_file=source)
    if not isinstance(source.get("ann_file"), str):
        return None
    return str(coco_paths({"data_root": spec.data_root, **source})[0].resolve())
