"""Configs of mmdet's datasets and pipelines: nested ones, names, sizes and EXIF."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from mmengine.fileio import list_from_file

from damex.compat import import_mmdet
from damex.errors import ConfigError, did_you_mean


def dataset_registry() -> Any:
    """The registry of mmdet's datasets, and damex's; the first call takes seconds."""
    import_mmdet()
    from mmdet.registry import DATASETS

    from damex.datasets import coco  # noqa: F401 - registers NamedCocoDataset

    return DATASETS


def leaves(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The plain datasets in a dataset config, unwrapped."""
    inner = wrapped(config)
    return [leaf for c in inner for leaf in leaves(c)] if inner else [config]


def wrapped(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Configs of the datasets in a wrapper; empty for a plain dataset."""
    return [*config.get("datasets", ()), *filter(None, [config.get("dataset")])]


def map_leaves(
    config: Mapping[str, Any], change: Callable[[Mapping[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """A copy of a dataset config with its plain datasets changed."""
    if "datasets" in config:
        inner = [map_leaves(c, change) for c in config["datasets"]]
        return {**config, "datasets": inner}
    if "dataset" in config:
        return {**config, "dataset": map_leaves(config["dataset"], change)}
    return change(config)


def declared_classes(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Classes that a (wrapped) dataset config or its class declares.

    ConfigError if they are in a file, as mmengine allows, and it is missing.
    """
    first = leaves(config)[0]
    declared = dict(first.get("metainfo") or {}).get("classes")
    if isinstance(declared, str):  # a file with a class in each line
        try:
            declared = list_from_file(declared)
        except FileNotFoundError as error:
            raise ConfigError(
                f"metainfo: classes={declared!r} names no file; write a list of class "
                "names, or the path of a file with one in each line."
            ) from error
    by_class = getattr(_class_of(first), "METAINFO", {}).get("classes", ())
    return tuple(declared or by_class)


def _class_of(config: Mapping[str, Any]) -> Any:
    """The class of a dataset config; None if unknown."""
    kind = config.get("type")
    return dataset_registry().get(kind) if isinstance(kind, str) else kind


def check_class(config: Mapping[str, Any], dataset: str, *, has_choice: bool) -> None:
    """Reject dataset classes that are unknown or would mislabel.

    Subclasses of mmdet's CocoDataset number chosen classes in file order. ConfigError
    if a class, possibly wrapped, is unusable.
    """
    inner = wrapped(config)
    for inner_config in inner:
        check_class(inner_config, dataset, has_choice=has_choice)
    registry, dataset_class = dataset_registry(), _class_of(config)
    if dataset_class is None:
        kind = config.get("type")
        raise ConfigError(
            f"dataset {dataset!r}: mmdet has no dataset class {kind!r}; "
            f"{did_you_mean(str(kind), sorted(registry.module_dict))}"
        )
    name = dataset_class.__name__
    if inner and "pipeline" in config:
        raise ConfigError(
            f"dataset {dataset!r}: a mixture does not run the pipeline of {name}; set "
            "pipeline=[...] of the dataset inside. CachedMosaic and CachedMixUp in it "
            "mix images of this dataset."
        )
    by_name = name in ("CocoDataset", "NamedCocoDataset")
    by_file = issubclass(dataset_class, registry.get("CocoDataset")) and not by_name
    if by_file and has_choice:
        raise ConfigError(
            f"dataset {dataset!r}: classes=[...] cannot be used with {name}, which "
            "numbers them in file order; give the annotation file itself "
            "(train='file.json'), or leave classes out."
        )


def check_transforms(transforms: Any, where: str) -> None:
    """Check names and settings of (nested) transforms; ``where`` is for the message."""
    if isinstance(transforms, (list, tuple)):
        for transform in transforms:
            check_transforms(transform, where)
    if not isinstance(transforms, Mapping):
        return
    # Importing mmdet takes seconds, and only this function needs it.
    from mmdet.registry import TRANSFORMS
    from mmengine.registry import TRANSFORMS as SHARED_TRANSFORMS

    settings = {k: v for k, v in transforms.items() if k not in ("type", "_scope_")}
    kind = transforms.get("type")
    transform_class = TRANSFORMS.get(kind) if isinstance(kind, str) else kind
    if transform_class is None:
        known = sorted({**TRANSFORMS.module_dict, **SHARED_TRANSFORMS.module_dict})
        raise ConfigError(
            f"{where}: unknown transform {kind!r}; "
            f"{did_you_mean(str(kind), known, limit=5)}"
        )
    signature = inspect.signature(transform_class)
    try:
        signature.bind(**settings)
    except TypeError as error:
        unknown = [key for key in settings if key not in signature.parameters]
        hint = did_you_mean((unknown or [""])[0], signature.parameters)
        raise ConfigError(f"{where}: transform {kind}: {error}; {hint}") from error
    check_transforms(settings.get("transforms"), where)


def image_scales(
    pipeline: Any, *, keep_ratio: bool = False
) -> tuple[tuple[float, float], ...]:
    """Sizes a pipeline may resize to; ``keep_ratio``: of whole, undistorted images."""
    found: list[list[float]] = []
    for step in _steps(pipeline):
        if keep_ratio and "Crop" in str(step.get("type")):
            break  # what follows resizes a part of the image
        kind = f"{step.get('type')} {step.get('resize_type')}"
        is_resize, is_shortest = "Resize" in kind, "ShortestEdge" in kind
        scale = step.get("scale", step.get("scales"))
        sides = scale if "scales" in step and isinstance(scale, list) else [scale]
        if all(isinstance(side, int) for side in sides):  # of squares, as in mmcv
            longest = step.get("max_size") if is_shortest else None
            scale = [(longest or side, side) for side in sides]
        is_size = np.size(scale) % 2 == 0  # and not a factor, or missing
        is_kept = step.get("keep_ratio") or is_shortest
        if is_resize and is_size and (is_kept or not keep_ratio):
            found += np.reshape(scale, (-1, 2)).astype(float).tolist()
    return tuple((width, height) for width, height in found)


def applies_exif(pipeline: Any) -> bool:
    """Whether a pipeline rotates images by their EXIF orientation."""
    colors = [str(step.get("color_type", "")) for step in _steps(pipeline)]
    return not any("ignore_orientation" in c or c == "unchanged" for c in colors)


def _steps(pipeline: Any) -> Iterator[Mapping[str, Any]]:
    """All transforms of a pipeline, including nested ones."""
    if isinstance(pipeline, Mapping):
        yield pipeline
        pipeline = pipeline.get("transforms")
    for step in pipeline if isinstance(pipeline, (list, tuple)) else ():
        yield from _steps(step)
