"""Similarity of datasets by their images, boxes and class names.

Axes: M datasets, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from damex.datasets.coco_records import is_number, read_coco
from damex.datasets.pixels import read_pixels
from damex.datasets.spec import CocoSource, DatasetSpec
from damex.errors import ConfigError, DataError

SAMPLES = 32  # images read per dataset
SIDE = 160  # of these images, in pixels
BACKBONE = "tf_efficientnet_lite0"
PARTS = ("images", "boxes", "classes")

# Returns one feature vector for several images.
FeaturesOf = Callable[[Sequence[np.ndarray]], np.ndarray]


@dataclass(frozen=True)
class DatasetFeatures:
    """Features of a dataset, without training.

    Args:
        images: Number of training images.
        classes: Class names in the mixture.
        boxes_F: Output of `box_statistics`.
        looks_F: Mean features of some images.
    """

    name: str
    images: int
    classes: frozenset[str]
    boxes_F: np.ndarray
    looks_F: np.ndarray


def read_features(
    spec: DatasetSpec, classes: Sequence[str], features_of: FeaturesOf
) -> DatasetFeatures:
    """Compute features of a training set.

    ``features_of`` is :func:`color_features`, or from :func:`backbone_features`.

    Raises:
        ConfigError: If it is not a COCO file.
        DataError: If the file or an image cannot be read.
    """
    source = spec.coco_source("train")
    if source is None:
        raise ConfigError(
            f"dataset {spec.name!r} is not a COCO file, and plan reads only these; "
            "convert it, or set group='...' in its entry by hand."
        )
    document = read_coco(source.annotations, spec.name)
    files = sorted(str(image.get("file_name")) for image in document["images"])
    if not files:
        raise DataError(f"dataset {spec.name!r}: {source.annotations} lists no images.")
    step = max(1, len(files) // SAMPLES)
    pixels = [_load(source, file, spec.name) for file in files[::step][:SAMPLES]]
    return DatasetFeatures(
        name=spec.name,
        images=len(files),
        classes=frozenset(classes),
        boxes_F=box_statistics(document),
        looks_F=features_of(pixels),
    )


def _load(source: CocoSource, file: str, dataset: str) -> np.ndarray:
    path = Path(source.images, file)
    try:
        image = Image.fromarray(read_pixels(path).image[..., ::-1])
        return np.asarray(image.resize((SIDE, SIDE)))
    except OSError as error:
        message = f"dataset {dataset!r}: {path} cannot be read: {error}."
        raise DataError(message) from error


def scale_and_shape(box: Any, image: Mapping[str, Any]) -> tuple[float, float] | None:
    """Root of a box's share of the image, and width over height; None if invalid."""
    try:
        _, _, width, height = (float(value) for value in box)
        share = width * height / (image["width"] * image["height"])
    except (TypeError, ValueError, KeyError, ZeroDivisionError):
        return None
    if width > 0 and height > 0 and 0 < share < math.inf:
        return math.sqrt(share), width / height
    return None


def box_statistics(document: dict) -> np.ndarray:
    """Typical boxes of a COCO document, invalid ones skipped.

    Mean and spread of the log of scale (root of the share of the image) and of width
    over height; logs of boxes per image and of the images' size.
    """
    images = {image["id"]: image for image in document["images"]}
    found = [
        scale_and_shape(record.get("bbox"), images.get(record["image_id"], {}))
        for record in document["annotations"]
    ]
    known = [measures for measures in found if measures is not None]
    if not known:
        return np.zeros(6)
    scales, shapes = np.log(known).T
    sizes = [(image.get("width"), image.get("height")) for image in images.values()]
    pixels = [math.prod(size) for size in sizes if all(map(is_number, size))]
    boxes = [scales.mean(), scales.std(), shapes.mean(), shapes.std()]
    per_image = math.log(len(known) / len(images))
    return np.array([*boxes, per_image, 0.5 * math.log(np.mean(pixels))])


def color_features(pixels: Sequence[np.ndarray]) -> np.ndarray:
    """Color and edge features of uint8 images (height, width, 3), without a backbone.

    Histograms of each channel, in 16 bins, and of differences of adjacent brightness.
    """
    rows = []
    for image in pixels:
        values = image.astype(float)
        grey = values.mean(axis=2)
        edges = np.abs(np.diff(grey, axis=0))[:, :-1] + np.abs(np.diff(grey))[:-1]
        planes = [*np.moveaxis(values, 2, 0), np.minimum(4 * edges, 255.0)]
        counts = [np.histogram(plane, 16, (0, 256))[0] / plane.size for plane in planes]
        rows.append(np.sqrt(np.concatenate(counts)))
    return np.mean(rows, axis=0)


def can_use_backbone() -> bool:
    """Whether the backbone's pretrained weights are installed."""
    from damex.models.timm_backbone import packaged_weights

    return packaged_weights(BACKBONE) is not None


def backbone_features() -> FeaturesOf:
    """Return a function for mean features in a frozen ImageNet backbone."""
    import torch

    from damex.models.timm_backbone import TimmBackbone

    backbone = TimmBackbone(name=BACKBONE, out_indices=(3, 4), pretrained=True)
    backbone.init_weights()
    backbone.eval()

    def features_of(pixels: Sequence[np.ndarray]) -> np.ndarray:
        images_BHWC = torch.as_tensor(np.stack(pixels)).float()
        with torch.no_grad():
            maps = backbone((images_BHWC.permute(0, 3, 1, 2) - 127.0) / 128.0)
        return np.concatenate([one.mean(dim=(0, 2, 3)).numpy() for one in maps])

    return features_of


def affinities(found: Sequence[DatasetFeatures]) -> dict[str, np.ndarray]:
    """Similarity of two or more datasets, exp(-d), symmetric (M, M) with diagonal 1.

    Distances d of images and boxes are of features scaled to unit variance over
    datasets, with a mean of 1 over pairs; that of classes is 1 - IoU of the names.
    ``all`` uses the mean distance over ``PARTS``.
    """
    sets = [one.classes for one in found]
    distances = {
        "images": _distances(np.stack([one.looks_F for one in found])),
        "boxes": _distances(np.stack([one.boxes_F for one in found])),
        "classes": np.array(
            [[1.0 - len(a & b) / max(len(a | b), 1) for b in sets] for a in sets]
        ),
    }
    distances["all"] = np.mean([distances[part] for part in PARTS], axis=0)
    return {part: np.exp(-distance) for part, distance in distances.items()}


def _distances(features_MF: np.ndarray) -> np.ndarray:
    spread_F = features_MF.std(axis=0)
    scaled_MF = features_MF - features_MF.mean(axis=0)
    scaled_MF = scaled_MF / np.where(spread_F > 1e-12, spread_F, 1.0)
    distances_MM = np.linalg.norm(scaled_MF[:, None] - scaled_MF, axis=2)
    pairs = len(features_MF) * (len(features_MF) - 1)
    mean = distances_MM.sum() / pairs
    return distances_MM / mean if mean > 0 else distances_MM
