"""Parity and speed of an ONNX graph and the detector it was exported from.

Axes: B images, H and W rows and columns of an image, K detections per image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median
from typing import Any

import cv2
import numpy as np
import torch
from mmengine.dataset import pseudo_collate

from damex.errors import ConfigError
from damex.inference.images import Inputs, Picture
from damex.inference.onnx_graph import INPUT, OUTPUTS, DetectorGraph

SCORE_TOLERANCE, BOX_TOLERANCE = 1e-3, 0.1  # of a probability, of a pixel
# Detections below this share of the best score are not compared: rounding ranks them.
LEAST_SHARE = 0.1
ROUNDS = 5
# Width and height of images, as shares of the longer side after resizing.
SHAPES = ((0.6, 0.6), (1.6, 1.2), (0.6, 0.8), (2.1, 0.9), (0.3, 0.9))


@dataclass(frozen=True)
class Answers:
    """Detections in an image; boxes (K, 4) are x1, y1, x2, y2 in pixels."""

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray


Run = Callable[[np.ndarray], Answers]  # takes an image, uint8 (H, W, 3) in RGB


@dataclass(frozen=True)
class Parity:
    """Differences between a graph and mmdet on some images.

    Attributes:
        images: Number of compared images.
        detections: Number of compared mmdet detections.
        least_score: Minimum score of the compared detections.
        scores: Largest difference of a score.
        boxes: Largest difference of a box coordinate, in pixels.
    """

    images: int
    detections: int
    least_score: float
    scores: float
    boxes: float

    @property
    def is_close(self) -> bool:
        """Whether all differences are within the tolerances."""
        return self.scores <= SCORE_TOLERANCE and self.boxes <= BOX_TOLERANCE


def stretched(image: np.ndarray, longest: int) -> list[np.ndarray]:
    """Resize an image to all `SHAPES`."""
    sizes = [(ceil(longest * x), ceil(longest * y)) for x, y in SHAPES]
    return [cv2.resize(image, size) for size in sizes]


def runs_of(graph: DetectorGraph, content: bytes, detector: Any) -> tuple[Run, Run]:
    """Functions that detect with mmdet and with onnxruntime (output of `to_onnx`).

    ``detector`` is the reference: mmdet's, or damex's if the graph has experts.

    Raises:
        ConfigError: If onnxruntime cannot run the graph.
    """
    session, inputs = start_session(content), Inputs(graph.pipeline)
    labels = None if graph.routing is None else graph.routing.labels
    return (
        lambda image: answers_of_mmdet(inputs, image, detector=detector, labels=labels),
        lambda image: answers_of_graph(session, image[None])[0],
    )


def compare(of_mmdet: Run, of_graph: Run, images: Sequence[np.ndarray]) -> Parity:
    """Compare a graph with its detector, see `runs_of`.

    Images with fewer tokens than queries are left out, as neither detects anything.

    Raises:
        ConfigError: If no image is left, or onnxruntime fails on one.
    """
    parities = []
    for image in images:
        try:
            expected = of_mmdet(image)
        except RuntimeError as error:
            fault = str(error).splitlines()[0]
            continue
        found = of_graph(image)
        least = LEAST_SHARE * float(max(expected.scores[0], found.scores[0]))
        number = int((expected.scores >= least).sum())
        parities.append((number, least, *difference(expected, found, least=least)))
    if not parities:
        raise ConfigError(
            f"mmdet itself fails on images of this size ({fault}); say a larger "
            "--image-size."
        )
    numbers, leasts, *differences = zip(*parities, strict=True)
    scores, boxes = np.max(differences, axis=1).tolist()  # of NaN, which max may hide
    return Parity(len(parities), sum(numbers), min(leasts), scores, boxes)


def start_session(content: bytes) -> Any:
    """Load a graph into onnxruntime, for one CPU thread; ConfigError if it cannot."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # silent: errors are raised
    try:
        return onnxruntime.InferenceSession(
            content, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # its classes derive from nothing else
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"onnxruntime {onnxruntime.__version__} cannot run the graph: {reason}"
        ) from error


def answers_of_graph(session: Any, images: np.ndarray) -> list[Answers]:
    """Detect with onnxruntime in images of one size, uint8 (B, H, W, 3) in RGB.

    Raises:
        ConfigError: If the graph fails on images of this size.
    """
    try:
        outputs = session.run(OUTPUTS, {INPUT: images})
    except Exception as error:  # its classes derive from nothing else
        height, width = images.shape[1:3]
        raise ConfigError(
            f"the graph fails on an image of {width} x {height} pixels, so that a part "
            "of the detector cannot be written for images of any size: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
    return [Answers(*one) for one in zip(*outputs, strict=True)]


def answers_of_mmdet(
    inputs: Inputs, image: Picture, *, detector: Any, labels: Any = None
) -> Answers:
    """Detect with mmdet in a file or uint8 RGB image (H, W, 3), as `Predictor` runs it.

    With ``labels``, the classes of each dataset group, a damex detector detects those
    of the predicted group.
    """
    packed = inputs(image)
    if labels is not None:
        packed["data_samples"].set_metainfo(dict(labels_by_group=labels))
    with torch.inference_mode():
        (sample,) = detector.test_step(pseudo_collate([packed]))
    found = sample.pred_instances if labels is None else sample.dataset_instances
    found = found.numpy()
    return Answers(found.bboxes, found.scores, found.labels)


def difference(one: Answers, other: Answers, *, least: float) -> tuple[float, float]:
    """Largest differences of a score and of a box coordinate (pixels) in one image.

    Rounding may swap detections of equal score, so each one scoring ``least`` or more
    is matched to the nearest of its class. Infinite if a class is missing.
    """
    pairs = [*_distances(one, other, least), *_distances(other, one, least)]
    scores, boxes = np.max(pairs, axis=0).tolist()
    return scores, boxes


def _distances(one: Answers, other: Answers, least: float) -> Iterator[np.ndarray]:
    """Differences of score and box to the nearest detection of the same class."""
    for box, score, label in zip(one.boxes, one.scores, one.labels, strict=True):
        if score < least:
            continue
        rivals = other.labels == label
        if not rivals.any():
            yield np.array([np.inf, np.inf])
            continue
        scores = np.abs(other.scores[rivals] - score)
        boxes = np.abs(other.boxes[rivals] - box).max(-1)
        nearest = np.maximum(scores / SCORE_TOLERANCE, boxes / BOX_TOLERANCE).argmin()
        yield np.array([scores[nearest], boxes[nearest]])


def milliseconds(*runs: Run, image: np.ndarray) -> list[float]:
    """Median milliseconds per image on one thread; runs alternate for a fair share."""
    times: list[list[float]] = [[] for _ in runs]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for run, taken in [*zip(runs, times, strict=True)] * ROUNDS:
            start = time.perf_counter()
            run(image)
            taken.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(threads)
    return [1e3 * median(taken) for taken in times]
