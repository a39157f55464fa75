"""The splits of a mixture as COCO documents, whatever they were written as."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from damex.curation.boxes import Expectations
from damex.curation.findings import Finding, Place
from damex.curation.records import read_document
from damex.datasets.nested import dataset_registry, leaves, map_leaves
from damex.datasets.spec import CocoSource, DatasetSpec
from damex.errors import ConfigError, DataError

Reading = tuple[Any, list[Finding]]


class Source(NamedTuple):
    """A split of a dataset.

    Args:
        split: ``train``, ``val`` or ``test``.
        place: Name of the dataset, and the file.
        images: Folder that file names are relative to.
        read: Reads the document: what it holds, or None, and what hindered it.
    """

    split: str
    place: Place
    images: Path
    read: Callable[[], Reading]


def sources_of(spec: DatasetSpec, splits: Iterable[str]) -> Iterator[Source | Finding]:
    """What the entry of a mixture names; a finding for what cannot be found."""
    for split in splits:
        try:
            named = spec.source(split)
            if named is None or (split == "test" and named == spec.source("val")):
                continue  # no test split: validation images stand for it
            yield from _sources_of(spec, split)
        except (ConfigError, DataError) as error:
            place = Place(spec.name, f"the {split} entry of the config")
            yield place.finding("not-loaded", None, str(error))


def coco_file(name: str, split: str, found: CocoSource) -> Source:
    """The source that is a COCO file and a folder of images."""
    place = Place(name, str(found.annotations))
    return Source(split, place, found.images, partial(read_document, place))


def _sources_of(spec: DatasetSpec, split: str) -> Iterator[Source]:
    found = spec.coco_source(split)
    if found is not None:
        yield coco_file(spec.name, split, found)
        return
    config = spec.dataset_config(split)
    inner = leaves(config)
    if all(leaf["type"] == "NamedCocoDataset" for leaf in inner):
        for leaf in inner:
            root = Path(leaf.get("data_root") or "")
            folder = (leaf.get("data_prefix") or {}).get("img") or ""
            paths = CocoSource(root / leaf.get("ann_file", ""), root / folder)
            yield coco_file(spec.name, split, paths)
        return
    kind = inner[0]["type"]
    kind = kind if isinstance(kind, str) else kind.__name__
    place = Place(spec.name, f"{kind} ({split})")
    yield Source(split, place, Path(), partial(_read_dataset, config, place))


def _read_dataset(config: Mapping[str, Any], place: Place) -> Reading:
    """What a dataset class of mmdet says about its images, as a COCO document."""
    whole = map_leaves(config, lambda leaf: {**leaf, "pipeline": [], "test_mode": True})
    try:
        dataset = dataset_registry().build(whole)
        dataset.full_init()
        names = dataset.metainfo["classes"]
        infos = [dataset.get_data_info(i) for i in range(len(dataset))]
        document = _as_coco(infos, names)
    except Exception as error:  # a dataset class may be the user's, and raise anything
        text = f"it cannot be loaded: {type(error).__name__}: {error}"
        return None, [place.finding("not-loaded", None, text)]
    text = (
        "its files were read by this dataset class: what the class leaves out, or "
        "changes, is not seen here."
    )
    return document, [place.finding("not-checked", None, text)]


def _as_coco(infos: list[dict[str, Any]], names: Any) -> dict[str, Any]:
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, info in enumerate(infos):
        images.append(
            dict(
                id=number,
                file_name=str(info["img_path"]),
                width=info.get("width"),
                height=info.get("height"),
            )
        )
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


def expectations(cfg: Mapping[str, Any], spec: DatasetSpec, split: str) -> Expectations:
    """What a config says about the data of one split.

    Args:
        cfg: A config of a detector.
        spec: One of its datasets.
        split: ``train``, ``val`` or ``test``.
    """
    loader = cfg.get(f"{split}_dataloader") or {}
    dataset = loader.get("dataset") or {}
    pipeline = spec.pipeline(split) or dataset.get("pipeline") or ()
    steps = [step for step in _steps(pipeline) if isinstance(step.get("type"), str)]
    scales = [
        step.get("scale")
        for step in steps
        if "Resize" in step["type"] and step["type"] != "RandomChoiceResize"
    ]
    scale = next((s for s in scales if isinstance(s, (tuple, list)) and s), None)
    if scale is not None and isinstance(scale[0], (tuple, list)):
        scale = max(scale, key=math.prod)  # the largest of those to draw from
    colors = [str(step.get("color_type", "")) for step in steps]
    queries = (cfg.get("model") or {}).get("num_queries")
    return Expectations(
        classes=spec.classes,
        on_bad_box=dataset.get("on_bad_box", "error"),
        image_scale=None if scale is None else (float(scale[0]), float(scale[1])),
        num_queries=queries if isinstance(queries, int) else None,
        applies_exif=not any(
            "ignore_orientation" in color or color == "unchanged" for color in colors
        ),
    )


def _steps(pipeline: Any) -> Iterator[Mapping[str, Any]]:
    """All transforms of a pipeline, those inside of others too."""
    if isinstance(pipeline, Mapping):
        yield pipeline
        pipeline = pipeline.get("transforms")
    if isinstance(pipeline, (list, tuple)):
        for step in pipeline:
            yield from _steps(step)
