"""Whether an ONNX graph answers as the detector that it was made of, and how fast.

Axes: B images, H and W rows and columns of an image, K answers per image.
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
# What is less sure than this share of the surest answer is not compared: among many
# queries that are as unsure, rounding chooses.
LEAST_SHARE = 0.1
ROUNDS = 5
# Width and height of images, as shares of the longer side that they are resized to.
SHAPES = ((0.6, 0.6), (1.6, 1.2), (0.6, 0.8), (2.1, 0.9), (0.3, 0.9))


@dataclass(frozen=True)
class Answers:
    """What was found in one image.

    Attributes:
        boxes: x1, y1, x2, y2 in pixels, float (K, 4).
        scores: float (K,).
        labels: int (K,).
    """

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray


Run = Callable[[np.ndarray], Answers]  # of an image, uint8 (H, W, 3) in RGB


@dataclass(frozen=True)
class Parity:
    """How far a graph is from mmdet on some images.

    Attributes:
        images: How many were compared.
        detections: Answers of mmdet that were compared.
        least_score: What they reach at least.
        scores: Largest difference of a score.
        boxes: Largest difference of a corner's x or y, in pixels.
    """

    images: int
    detections: int
    least_score: float
    scores: float
    boxes: float

    @property
    def is_close(self) -> bool:
        """Whether nothing differs by more than the tolerances."""
        return self.scores <= SCORE_TOLERANCE and self.boxes <= BOX_TOLERANCE


def stretched(image: np.ndarray, longest: int) -> list[np.ndarray]:
    """Bring an image to all `SHAPES`."""
    sizes = [(ceil(longest * x), ceil(longest * y)) for x, y in SHAPES]
    return [cv2.resize(image, size) for size in sizes]


def runs_of(graph: DetectorGraph, content: bytes, detector: Any) -> tuple[Run, Run]:
    """What mmdet finds in an image, and what onnxruntime does.

    Args:
        graph: What was written down.
        content: How `to_onnx` wrote it.
        detector: Whose answers the graph should give; of damex, where it has experts.

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

    Images with fewer tokens than the detector has queries are left out, as neither has
    an answer.

    Raises:
        ConfigError: If that leaves none, or onnxruntime fails on one.
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
    """Let onnxruntime load a graph, for one thread of the CPU.

    Raises:
        ConfigError: If it cannot run the graph.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4  # none: they are raised
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
    """What onnxruntime finds in images of one size, uint8 (B, H, W, 3) in RGB.

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
    """What mmdet finds in an image, as `Predictor` runs it.

    Args:
        inputs: Made of the pipeline.
        image: A file, or uint8 (H, W, 3) in RGB.
        detector: Of mmdet; of damex with ``labels``.
        labels: The classes of each dataset group, one of which is to be chosen.
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
    """How far apart the answers in one image are, whatever their order.

    Where scores are equal but for rounding, either may come first. So each answer is
    held to the nearest of its class.

    Args:
        one: Answers.
        other: The same of another.
        least: Score that an answer has to have.

    Returns:
        Largest difference of a score, and of a corner's x or y in pixels; infinite
        where a class is missing.
    """
    pairs = [*_distances(one, other, least), *_distances(other, one, least)]
    scores, boxes = np.max(pairs, axis=0).tolist()
    return scores, boxes


def _distances(one: Answers, other: Answers, least: float) -> Iterator[np.ndarray]:
    """Differences of score and box to the nearest of the same class."""
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
    """Median times for an image on one thread, in turns as the machine may be busy."""
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
