"""Whether an ONNX graph answers as the detector that it was made of, and how fast.

Axes: B images, H and W rows and columns of the canvas, K answers per image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from mmdet.structures import DetDataSample
from PIL import Image
from torch.nn import functional

from damex.errors import ConfigError
from damex.inference.onnx_graph import OUTPUTS, Canvas, DetectorGraph

SCORE_TOLERANCE, BOX_TOLERANCE = 1e-3, 0.1  # of a probability, of a pixel
# What is less sure than this share of the surest answer is not compared: among many
# queries that are as unsure, rounding chooses.
LEAST_SHARE = 0.1
ROUNDS = 5


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


@dataclass(frozen=True)
class Parity:
    """How far a graph is from mmdet on one image.

    Attributes:
        detections: Answers of mmdet that were compared.
        least_score: What they reach at least.
        scores: Largest difference of a score.
        boxes: Largest difference of a corner's x or y, in pixels.
        onnx_ms: Median time of the graph for the image on one thread, milliseconds.
        torch_ms: The same of mmdet.
    """

    detections: int
    least_score: float
    scores: float
    boxes: float
    onnx_ms: float
    torch_ms: float

    @property
    def is_close(self) -> bool:
        """Whether nothing differs by more than the tolerances."""
        return self.scores <= SCORE_TOLERANCE and self.boxes <= BOX_TOLERANCE


def letterbox(image: Image.Image, canvas: Canvas) -> tuple[np.ndarray, np.ndarray]:
    """Lay an image into the upper left of a canvas, as large as it fits.

    Returns:
        Input of a graph: the canvas, uint8 (1, 3, H, W), and height and width of the
        image in it, int64 (1, 2).
    """
    ratio = min(canvas.width / image.width, canvas.height / image.height)
    width, height = (max(round(side * ratio), 1) for side in image.size)
    if not canvas.keep_ratio:
        width, height = canvas.width, canvas.height
    pixels = np.asarray(image.convert("RGB").resize((width, height)))
    images = np.zeros((1, 3, canvas.height, canvas.width), np.uint8)
    images[0, :, :height, :width] = pixels.transpose(2, 0, 1)
    return images, np.array([[height, width]], np.int64)


def compare(
    graph: DetectorGraph, content: bytes, image: Image.Image, *, detector: Any
) -> Parity:
    """Run a graph and its detector on one image, on one thread.

    Args:
        graph: What was written down.
        content: How `to_onnx` wrote it.
        image: Of any size.
        detector: Whose answers the graph should give.

    Raises:
        ConfigError: If onnxruntime cannot run the graph.
    """
    session = start_session(content)
    images, sizes = letterbox(image, graph.canvas)
    with _one_thread():
        (told,) = answers_of_mmdet(graph, images, sizes, detector=detector)
        (found,) = answers_of_graph(session, images, sizes)
        onnx_ms, torch_ms = _milliseconds(
            lambda: answers_of_graph(session, images, sizes),
            lambda: answers_of_mmdet(graph, images, sizes, detector=detector),
        )
    least = LEAST_SHARE * float(max(told.scores[0], found.scores[0]))
    scores, boxes = difference(told, found, least=least)
    number = int((told.scores >= least).sum())
    return Parity(number, least, scores, boxes, onnx_ms, torch_ms)


def start_session(content: bytes) -> Any:
    """Let onnxruntime load a graph, for one thread of the CPU.

    Raises:
        ConfigError: If it cannot run the graph.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors
    try:
        return onnxruntime.InferenceSession(
            content, options, providers=["CPUExecutionProvider"]
        )
    except Exception as error:  # its classes derive from nothing else
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"onnxruntime {onnxruntime.__version__} cannot run the graph: {reason}"
        ) from error


def answers_of_graph(
    session: Any, images: np.ndarray, sizes: np.ndarray
) -> list[Answers]:
    """What onnxruntime finds; see `letterbox` for the arguments."""
    outputs = session.run(OUTPUTS, dict(images=images, sizes=sizes))
    return [Answers(*one) for one in zip(*outputs, strict=True)]


def answers_of_mmdet(
    graph: DetectorGraph, images: np.ndarray, sizes: np.ndarray, *, detector: Any
) -> list[Answers]:
    """What mmdet finds with its own preprocessing, masks and postprocessing.

    Args:
        graph: Of which only the canvas and the classes of each dataset are used.
        images: See `letterbox`.
        sizes: The same.
        detector: Of mmdet; of damex, where the graph has experts.
    """
    canvas, known = graph.canvas, {}
    if graph.routing is not None:
        known["labels_by_group"] = graph.routing.labels
    preprocessor = detector.data_preprocessor
    # mmdet turns the channels over that its pipeline loaded the other way round.
    is_loaded_rgb = canvas.is_rgb != preprocessor._channel_conversion
    found = []
    for canvas_3HW, (height, width) in zip(images, sizes.tolist(), strict=True):
        pixels = torch.from_numpy(canvas_3HW[:, :height, :width])
        sample = DetDataSample(metainfo=dict(img_shape=(height, width), **known))
        data = preprocessor(
            dict(
                inputs=[pixels if is_loaded_rgb else pixels.flip(0)],
                data_samples=[sample],
            )
        )
        inputs = data["inputs"]
        rest = (canvas.width - inputs.shape[3], canvas.height - inputs.shape[2])
        padding = (0, rest[0], 0, rest[1])
        inputs = functional.pad(inputs, padding, value=preprocessor.pad_value)
        sample.set_metainfo(dict(batch_input_shape=(canvas.height, canvas.width)))
        with torch.inference_mode():
            (sample,) = detector.predict(inputs, [sample], rescale=False)
        one = sample.dataset_instances if known else sample.pred_instances
        one = one.numpy()
        found.append(Answers(one.bboxes, one.scores, one.labels))
    return found


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


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch compute on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _milliseconds(*runs: Callable[[], Any]) -> list[float]:
    """Median times of calls that take turns, so that all share a busy machine."""
    times: list[list[float]] = [[] for _ in runs]
    for _ in range(ROUNDS):
        for run, taken in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [1e3 * median(taken) for taken in times]
