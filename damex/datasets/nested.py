"""Configs of mmdet datasets: unwrap nested ones, look up and check classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from damex.errors import ConfigError, did_you_mean


def leaves(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The plain datasets in a dataset config, unwrapped."""
    inner = _inner(config)
    return [leaf for c in inner for leaf in leaves(c)] if inner else [config]


def _inner(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
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
    """Classes that a (wrapped) dataset config or its class declares."""
    first = leaves(config)[0]
    declared = dict(first.get("metainfo") or {}).get("classes")
    return tuple(
        declared or getattr(_class_of(first), "METAINFO", {}).get("classes", ())
    )


def dataset_registry() -> Any:
    """Import mmdet's datasets (takes seconds) and return the registry."""
    import_module("damex.registry")
    return import_module("mmdet.registry").DATASETS


def _class_of(config: Mapping[str, Any]) -> Any:
    """The class of a dataset config; None if unknown."""
    kind = config.get("type")
    return dataset_registry().get(kind) if isinstance(kind, str) else kind


def check_class(config: Mapping[str, Any], dataset: str, *, has_choice: bool) -> None:
    """Reject dataset classes that are unknown or would mislabel.

    Subclasses of mmdet's CocoDataset number chosen classes in file order.

    Raises:
        ConfigError: If a class, possibly wrapped, is unusable.
    """
    inner = _inner(config)
    for inner_config in inner:
        check_class(inner_config, dataset, has_choice=has_choice)
    dataset_class = _class_of(config)
    if dataset_class is None:
        kind = config.get("type")
        raise ConfigError(
            f"dataset {dataset!r}: mmdet has no dataset class {kind!r}; "
            f"{did_you_mean(str(kind), sorted(dataset_registry().module_dict))}"
        )
    name = dataset_class.__name__
    if inner and "pipeline" in config:
        raise ConfigError(
            f"dataset {dataset!r}: a mixture does not run the pipeline of {name}; set "
            "pipeline=[...] of the dataset inside. CachedMosaic and CachedMixUp in it "
            "mix images of this dataset."
        )
    coco = dataset_registry().get("CocoDataset")
    by_name = name in ("CocoDataset", "NamedCocoDataset")
    if issubclass(dataset_class, coco) and not by_name and has_choice:
        raise ConfigError(
            f"dataset {dataset!r}: classes=[...] cannot be used with {name}, which "
            "numbers them in file order; give the annotation file itself "
            "(train='file.json'), or leave classes out."
        )
