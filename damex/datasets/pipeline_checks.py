"""Transforms of a pipeline: misspelled names, image sizes and EXIF rotation."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from damex.errors import ConfigError, did_you_mean


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


def image_scales(
    pipeline: Any, *, keep_ratio: bool = False
) -> tuple[tuple[float, float], ...]:
    """Sizes a pipeline may resize to; ``keep_ratio``: of whole, undistorted images."""
    found: list[Any] = []
    for step in _steps(pipeline):
        if keep_ratio and "Crop" in str(step.get("type")):
            break  # what follows resizes a part of the image
        is_resize = "Resize" in str(step.get("type"))
        if not is_resize or (keep_ratio and not step.get("keep_ratio")):
            continue
        scale: Any = step.get("scale", step.get("scales")) or ()
        is_list = isinstance(scale, (list, tuple)) and scale
        found += scale if is_list and isinstance(scale[0], (list, tuple)) else [scale]
    return tuple(
        (float(scale[0]), float(scale[1]))
        for scale in found
        if isinstance(scale, (list, tuple)) and len(scale) == 2
    )


def applies_exif(pipeline: Any) -> bool:
    """Whether a pipeline rotates images by their EXIF orientation."""
    colors = [str(step.get("color_type", "")) for step in _steps(pipeline)]
    return not any(
        "ignore_orientation" in color or color == "unchanged" for color in colors
    )


def _steps(pipeline: Any) -> Iterator[Mapping[str, Any]]:
    """All transforms of a pipeline, including nested ones."""
    if isinstance(pipeline, Mapping):
        yield pipeline
        pipeline = pipeline.get("transforms")
    if isinstance(pipeline, (list, tuple)):
        for step in pipeline:
            yield from _steps(step)
