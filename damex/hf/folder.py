"""Folders that Transformers loads without damex: model, class names, image processor.

Axes: P probes, H and W rows and columns of an image.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from damex.datasets.geometry import image_size_of
from damex.engine.model_folder import write_weights
from damex.errors import ConfigError
from damex.files import atomic_folder, write_json
from damex.hf.families import transformers
from damex.inference.media import Inputs

COLOR = (200, 100, 50)  # of probes: tells channels and their scales apart
Pipeline = Sequence[Mapping[str, Any]]


ADAPTERS = "adapters.json", "adapters.safetensors"
Adapters = tuple[Mapping[str, Any], Mapping[str, Tensor]]  # contents of these files


def write_folder(
    folder: Path,
    detector: Any,
    *,
    classes: Sequence[str],
    processor: Any,
    adapters: Adapters | None = None,
) -> None:
    """Write a plain detector of these classes for ``from_pretrained``.

    The experts of a mixture get files of their own, which Transformers does not read.

    Raises:
        ConfigError: If the folder holds something, or cannot be written.
    """
    model = detector.detr
    config = copy.deepcopy(model.config)
    config.id2label = dict(enumerate(classes))
    config.label2id = {name: label for label, name in enumerate(classes)}
    config.architectures = [type(model).__name__]
    with atomic_folder(folder) as draft:
        config.save_pretrained(draft)
        processor.save_pretrained(draft)
        write_weights(draft, model.state_dict())
        if adapters is not None:
            write_json(draft / ADAPTERS[0], adapters[0], indent=1)
            write_weights(draft, adapters[1], ADAPTERS[1])


def image_processor(detector: Any, pipeline: Pipeline) -> Any:
    """Build an image processor that prepares images as evaluation does.

    It resizes with antialiasing, OpenCV without, and rounds sides down. ``pipeline``
    is the test pipeline, with a `Resize`.

    Raises:
        ConfigError: If none does.
    """
    pictures, shown_P3HW = probes(detector, pipeline)
    width, height = _size_of(pipeline)
    size = dict(height=height, width=width)
    if any(step.get("keep_ratio", False) for step in pipeline):
        size = dict(max_height=height, max_width=width)
    rows, columns = shown_P3HW.shape[2:]
    pad = dict(do_pad=True, pad_size=dict(height=rows, width=columns))
    mean, std = _normalization(detector.data_preprocessor)
    if (mean, std) != ([0.0] * 3, [1.0] * 3):
        pad |= dict(do_normalize=True, image_mean=mean, image_std=std)
    processor = transformers().RTDetrImageProcessor(size=size, **pad)
    if not _agree(processor, pictures, shown_P3HW):
        raise ConfigError(
            "Transformers' image processor scales pixels to [0, 1] and pads with "
            "black (of normalized pixels, with their mean), at the right and bottom, "
            "and the evaluation of the training shows images otherwise; export a .onnx "
            "file, which prepares images itself."
        )
    return processor


def _normalization(of: Any) -> tuple[list[float], list[float]]:
    """Mean and deviation of pixels in [0, 1]."""
    if not of._enable_normalize:
        return [0.0] * 3, [1 / 255] * 3
    mean, std = ((one.double().flatten() / 255).tolist() for one in (of.mean, of.std))
    return mean, std


def _agree(processor: Any, pictures: Sequence[np.ndarray], shown_P3HW: Tensor) -> bool:
    try:
        found = processor(images=[*pictures], return_tensors="pt").pixel_values
    except ValueError:  # an image is larger than the canvas
        return False
    return torch.allclose(found, shown_P3HW, atol=1e-6)


def probes(detector: Any, pipeline: Pipeline) -> tuple[list[np.ndarray], Tensor]:
    """A wide and a tall image in RGB that need no resizing, and what a detector sees.

    Raises:
        ConfigError: If images do not get one canvas, on which Transformers' models
            without a padding mask depend.
    """
    width, height = _size_of(pipeline)
    sizes = (height // 2 or 1, width), (height, width // 2 or 1)
    pictures = [np.full((*size, 3), COLOR, np.uint8) for size in sizes]
    inputs, shown = Inputs(pipeline), []
    for picture in pictures:
        packed = inputs(picture)
        data = {key: [packed[key]] for key in ("inputs", "data_samples")}
        shown.append(detector.data_preprocessor(data)["inputs"][0])
    if shown[0].shape != shown[1].shape:
        raise ConfigError(
            "the evaluation of the training does not show all images in one size, "
            "which this export needs; pad them, in all pipelines: dict(type='Pad', "
            f"size=({max(width, height)}, {max(width, height)}))."
        )
    return pictures, torch.stack(shown)


def _size_of(pipeline: Pipeline) -> tuple[int, int]:
    """Width and height of the `Resize` of a pipeline."""
    return image_size_of(dict(test_dataloader=dict(dataset=dict(pipeline=pipeline))))
