"""Faults of a pipeline and of the images that it loads, said in the user's terms."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mmcv
from mmdet.registry import TRANSFORMS
from mmengine.registry import TRANSFORMS as SHARED_TRANSFORMS
from mmengine.structures import BaseDataElement

from damex.errors import ConfigError, DataError, did_you_mean


def check_transforms(transforms: Any, where: str) -> None:
    """Look at the names and settings of transforms, nested ones too.

    Args:
        transforms: Configs of transforms or callables, in lists.
        where: Dataset and split, for the message.
    """
    if isinstance(transforms, (list, tuple)):
        for transform in transforms:
            check_transforms(transform, where)
    if not isinstance(transforms, Mapping):
        return
    settings = {k: v for k, v in transforms.items() if k not in ("type", "_scope_")}
    kind = transforms.get("type")
    transform_class = TRANSFORMS.get(kind) if isinstance(kind, str) else kind
    if transform_class is None:
        known = sorted({**TRANSFORMS.module_dict, **SHARED_TRANSFORMS.module_dict})
        raise ConfigError(
            f"{where}: there is no transform {kind!r}; "
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


def check_size(sample: BaseDataElement, stated: tuple[Any, Any], where: str) -> None:
    """Refuse an image that has another size than its annotation says.

    Args:
        sample: As packed; an ``ori_shape`` in its metainfo is the size of the image as
            it was loaded. One pixel of difference is rounding.
        stated: Width and height by the annotation; None where it does not say.
        where: Dataset and file, for the message.

    Raises:
        DataError: If they differ: the boxes would lie somewhere else.
    """
    shape = sample.metainfo.get("ori_shape")
    if shape is None or None in stated:
        return
    loaded = (shape[1], shape[0])
    if all(abs(a - b) <= 1 for a, b in zip(loaded, stated, strict=True)):
        return
    reason = "The boxes are for an image of another size; correct width and height."
    if all(abs(a - b) <= 1 for a, b in zip(loaded, reversed(stated), strict=True)):
        reason = (
            "The file is probably stored rotated, with an EXIF orientation that its "
            "boxes know nothing of: name the dataset by root='<folder>', which turns "
            "them, or load it with color_type='color_ignore_orientation'."
        )
    raise DataError(
        f"{where} is {loaded[0]} x {loaded[1]} px as loaded, and {stated[0]} x "
        f"{stated[1]} px by its annotation. {reason}"
    )


def check_image(path: str, dataset: str, split: str) -> None:
    """Name the fault of an image file that could not be read."""
    if "://" in path:
        return
    file = Path(path)
    if not os.path.isfile(path):  # noqa: PTH113 - False for a name too long
        raise DataError(
            f"dataset {dataset!r}: the {split} image {file} does not exist (seen from "
            f"{Path.cwd()}). Correct data_root or img in its mixture entry, or "
            "'file_name' in the annotation file."
        )
    content = file.read_bytes()  # OpenCV refuses to look at no bytes at all
    if not content or mmcv.imfrombytes(content) is None:
        raise DataError(
            f"dataset {dataset!r}: the {split} image {file} ({len(content)} "
            "bytes) cannot be decoded. Replace the file, or take it out of the "
            "annotation file."
        )
