"""The splits of a mixture, in any format, as COCO documents and lists of images."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from mmengine.config import Config

from damex.config_files import config_of, find_config, import_modules, merge_options
from damex.datasets.coco_checks import usable_boxes
from damex.datasets.coco_records import Records, read_json
from damex.datasets.coco_schema import Expectations
from damex.datasets.findings import Finding, Location
from damex.datasets.geometry import set_image_size
from damex.datasets.image_files import ImageRecord, NamedBox
from damex.datasets.label_space import LabelSpace
from damex.datasets.mmdet_configs import (
    applies_exif,
    dataset_registry,
    image_scales,
    leaves,
    map_leaves,
)
from damex.datasets.spec import SPLITS, DatasetSpec, Source, coco_paths
from damex.errors import ConfigError, DataError
from damex.options import parse_options
from damex.workbench.formats import conversion  # noqa: F401 - readers of root=
from damex.workbench.zero_config import config_of_folders, named_folders


def mixture_config_of(data: str | Sequence[str], options: Sequence[str] = ()) -> Config:
    """Read the config, or the dataset folders, of a command about data.

    Folders are words as of ``damex train --data``, and their config is the one that it
    would train, without a ``filename``. ConfigError if the config cannot be read, has
    no mixture or is not alone, or if a folder is missing.
    """
    config, *others = words = [data] if isinstance(data, str) else [*data]
    if others or _is_folder(config):
        for word in filter(_is_config, words):
            raise ConfigError(
                f"{word} is not a folder. Name folders only; or one config alone, with "
                "all datasets in its mixture."
            )
        folders = named_folders(words)
        cfg = Config(config_of_folders(folders, needs_model=False).to_dict())
        merge_options(cfg, parse_options(options))
        set_image_size(cfg)
        return cfg
    try:
        find_config(config)
    except ConfigError as error:
        raise ConfigError(f"{config!r} is not a folder, and {error}") from error
    cfg = config_of(config, options, needs_model=False)
    if cfg.get("mixture") is None:
        raise ConfigError(
            f"{config} sets no mixture=[dict(name=..., ...), ...]; see "
            "configs/own_datasets.py. In place of a config, name the folder of a "
            "dataset."
        )
    entries = [entry for entry in cfg["mixture"] if isinstance(entry, Mapping)]
    if any(isinstance(entry.get(s), Mapping) for entry in entries for s in SPLITS):
        import_modules(cfg)  # they may define the dataset class
    set_image_size(cfg)
    return cfg


def _is_folder(word: str) -> bool:
    """Whether a word is a folder, or ``NAME=FOLDER``, which may be missing."""
    path = Path(word).expanduser()
    return path.is_dir() or ("=" in word and not path.exists())


def _is_config(word: str) -> bool:
    """Whether a word is a file, or the name of a config of damex."""
    with suppress(ConfigError):
        return not _is_folder(word) and bool(find_config(word))
    return False


def sources_of(
    spec: DatasetSpec, splits: Iterable[str], required: Collection[str] = ()
) -> Iterator[Source | Finding]:
    """The annotation files of a mixture entry, and findings about the entry.

    ``required`` are the splits that the config uses.
    """
    said = set()
    for split in splits:
        named: Any = ""
        try:
            if split == "train" and spec.root is not None:
                yield from _conversion(spec)
            named = spec.source(split)
            if split == "test" and named == spec.source("val"):
                continue  # without a test split, validation is used
            if named is None and split in required:
                spec.dataset_config(split)  # raises
            if named is not None:
                yield from _sources_of(spec, split)
        except (ConfigError, DataError) as error:
            kind = "not-loaded" if named is not None else "split-missing"
            text = str(error).removeprefix(f"dataset {spec.name!r}").lstrip(": ")
            location = Location(spec.name, "its mixture entry", split)
            if text not in said:  # a folder that cannot be read has no split
                yield location.finding(kind, None, text)
            said.add(text)


def _conversion(spec: DatasetSpec) -> Iterator[Finding]:
    """Drops and changes in the conversion of a folder."""
    summary = spec.conversion.summary
    location = Location(spec.name, summary.root)
    for kind, entries in (("left-out", summary.dropped), ("noted", summary.noted)):
        for what, entry in entries.items():
            text = f"{entry.times} {what} (for instance {entry.example})"
            yield location.finding(kind, None, text, count=entry.times)


def _sources_of(spec: DatasetSpec, split: str) -> list[Source]:
    if (found := spec.coco_source(split)) is not None:
        return [found]
    config = spec.dataset_config(split)
    inner = leaves(config)
    if any(leaf["type"] != "NamedCocoDataset" for leaf in inner):
        return [Source(spec.location(split), config=config)]
    return [
        Source(Location.of(spec.name, file, split=split), file, folder)
        for file, folder in map(coco_paths, inner)
    ]


def read_source(source: Source) -> tuple[Any, list[Finding]]:
    """The annotations of a split as a COCO document, or None; and findings."""
    config, location = source.config, source.location
    if config is None:
        return read_json(source.annotations, location)
    whole = map_leaves(config, lambda leaf: {**leaf, "pipeline": [], "test_mode": True})
    try:
        dataset = dataset_registry().build(whole)
        dataset.full_init()
        names = dataset.metainfo["classes"]
        document = _as_coco(map(dataset.get_data_info, range(len(dataset))), names)
    except Exception as error:  # the user's dataset class may raise anything
        text = f"it cannot be loaded: {type(error).__name__}: {error}"
        return None, [location.finding("not-loaded", None, text, level="error")]
    text = (
        "its files were read by this dataset class: what the class leaves out, or "
        "changes, is not seen here."
    )
    return document, [location.finding("not-checked", None, text)]


def _as_coco(infos: Iterable[dict[str, Any]], names: Iterable[Any]) -> dict[str, Any]:
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, info in enumerate(infos):
        size = dict(width=info.get("width"), height=info.get("height"))
        images.append(dict(id=number, file_name=str(info["img_path"]), **size))
        for instance in info.get("instances", ()):
            x1, y1, x2, y2 = (float(value) for value in instance["bbox"])
            annotations.append(
                dict(
                    id=len(annotations),
                    image_id=number,
                    category_id=int(instance["bbox_label"]),
                    bbox=[x1, y1, x2 - x1, y2 - y1],
                    area=(x2 - x1) * (y2 - y1),
                )
            )
    categories = [dict(id=i, name=str(name)) for i, name in enumerate(names)]
    return dict(images=images, annotations=annotations, categories=categories)


def class_mappings(
    cfg: Mapping[str, Any], specs: Sequence[DatasetSpec]
) -> tuple[list[Mapping[str, str] | None], str]:
    """Per dataset: its classes -> those of the mixture; None and why, if faulty."""
    dataset = (cfg.get("train_dataloader") or {}).get("dataset") or {}
    mode = dataset.get("label_space") or cfg.get("label_space") or "union"
    try:
        return [*LabelSpace.from_specs(specs, mode=mode).dataset_classes], ""
    except (ConfigError, DataError) as error:
        return [None] * len(specs), str(error)


def expectations(
    cfg: Mapping[str, Any],
    spec: DatasetSpec,
    split: str,
    classes: Collection[str] | None = None,
) -> Expectations:
    """What a config expects of the data of a split.

    ``classes`` are the used ones; by default those that the entry names.
    """
    loader = cfg.get(f"{split}_dataloader") or {}
    dataset = loader.get("dataset") or {}
    pipeline = spec.pipeline(split) or dataset.get("pipeline") or ()
    queries = (cfg.get("model") or {}).get("num_queries")
    return Expectations(
        classes=spec.classes if classes is None else tuple(classes),
        is_choice=spec.classes is not None,
        on_bad_box=dataset.get("on_bad_box", "error"),
        filter_empty=dataset.get("filter_empty", True),
        scales=image_scales(pipeline),
        kept_scales=image_scales(pipeline, keep_ratio=True),
        tile=spec.tile if isinstance(spec.tile, int) else None,
        num_queries=queries if isinstance(queries, int) else None,
        applies_exif=applies_exif(pipeline),
    )


def image_records(
    records: Records, folder: Path, expected: Expectations, *, with_boxes: bool = True
) -> list[ImageRecord]:
    """The images of an annotation file, each file once."""
    is_used = np.ones(len(records.images), bool)
    if records.location.split == "train" and expected.filter_empty:
        is_used[:] = False
        is_used[records.image_N[usable_boxes(records, expected)]] = True
    found: dict[str, ImageRecord] = {}
    boxes = _boxes(records) if with_boxes else {}
    for position, size in enumerate(records.size_M2.tolist()):
        name = records.images[position].get("file_name")
        if not isinstance(name, str) or not name:
            continue
        image = ImageRecord(
            location=records.location,
            record=records.image_name(position),
            path=folder / name,
            size=None if np.isnan(size).any() else (size[0], size[1]),
            applies_exif=expected.applies_exif,
            is_used=bool(is_used[position]),
            boxes=tuple(boxes.get(position, ())),
        )
        if image.is_used > found.setdefault(name, image).is_used:
            found[name] = image
    return list(found.values())


def _boxes(records: Records) -> dict[int, list[NamedBox]]:
    """Boxes by the position of their image, as in :class:`ImageRecord`."""
    kept_N = (records.image_N >= 0) & records.is_box_N
    box_B4, size_B2 = records.box_N4[kept_N], records.size_N2[kept_N]
    ends_B2 = box_B4[:, :2] + box_B4[:, 2:]
    corners_B4 = np.hstack([box_B4[:, :2] / size_B2, ends_B2 / size_B2])
    columns = records.image_N, records.class_N
    images, classes = (column[kept_N].tolist() for column in columns)
    names = [*records.categories.values(), ""]
    found: dict[int, list[NamedBox]] = {}
    for image, label, corners in zip(images, classes, corners_B4.tolist(), strict=True):
        found.setdefault(image, []).append((names[label], *corners))
    return found
