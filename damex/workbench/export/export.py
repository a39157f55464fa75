"""``damex export``: detectors for mmdet, Transformers or ONNX, equal to damex's.

Axes: H and W rows and columns of an image, K detections per image.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import cv2
import numpy as np
import torch

from damex import __version__
from damex.datasets.pixels import read_pixels
from damex.engine.console import filter_console
from damex.errors import ConfigError, DataError, printable
from damex.files import atomic_write
from damex.hf.detector import MoETransformersDetector
from damex.inference.media import Inputs, Picture, detect
from damex.inference.stored import DetectorCheckpoint, check_target, millions
from damex.workbench.export.dense_experts import voted_detector
from damex.workbench.export.onnx_graph import (
    INPUT,
    OUTPUTS,
    DetectorGraph,
    check_packages,
    check_steps,
    to_onnx,
)
from damex.workbench.export.plain_transformers import (
    PlainTransformers,
    TransformersGraph,
    extract_plain,
    extract_shared,
)
from damex.workbench.export.specialist import Specialist, extract

FOLDER = "/"
FORMS = (".pth", ".onnx", FOLDER)  # of --out
SCORE_TOLERANCE, BOX_TOLERANCE = 1e-3, 0.1  # of a probability, of a pixel
# Detections below this share of the best score are not compared: rounding ranks them.
LEAST_SHARE = 0.1
ROUNDS = 5
# Width and height of images, as shares of the longer side after resizing.
SHAPES = ((0.6, 0.6), (1.6, 1.2), (0.6, 0.8), (2.1, 0.9), (0.3, 0.9))


def export(checkpoint: str, *, out: str, trust: bool, **options: Any) -> None:
    """Write a dense detector of one dataset, or a whole mixture."""
    filter_console()
    _check_request(out, **options)
    stored = DetectorCheckpoint.read(checkpoint, trust=trust)
    print(printable("\n".join(write_export(stored, out, **options))))


def write_export(
    stored: DetectorCheckpoint,
    out: str,
    *,
    dataset: str | None,
    image_size: tuple[int, int] | None,
) -> list[str]:
    """Write the file, and return lines about it; see `damex.Detector.export`."""
    path, form = _check_request(out, dataset, image_size)
    is_plain = stored.model.get("type") == MoETransformersDetector.__name__
    if form == (".pth" if is_plain else FOLDER):
        of, other = ("Transformers", "folder/") if is_plain else ("mmdet", "file.pth")
        raise ConfigError(
            f"the detector in {stored.path} is of {of}, which {out} is not for; "
            f"name --out {other} or file.onnx."
        )
    if form != ".pth":
        check_steps(stored.pipeline)
    if image_size is not None:
        stored = stored.resized(image_size)
    specialist, whole = None, millions(stored.state)
    datasets, classes = len(stored.space.dataset_names), stored.space.num_classes
    start = f"{datasets} dataset{'s' * (datasets != 1)},"
    parameters = f"{whole} million parameters"
    if dataset is not None:
        specialist = (extract_plain if is_plain else extract)(stored, dataset)
        start, classes = f"{dataset}:", len(specialist.classes)
        parameters = f"{millions(specialist.state)} million parameters of {whole}"
    elif form == FOLDER:
        specialist = extract_shared(stored)
    about = f"{start} {classes} class{'es' * (classes != 1)}, {parameters}"
    if specialist is None or form == ".onnx":
        first, *lines = _export_onnx(stored, specialist, dataset, path)
        needs = "onnxruntime alone"
    else:
        files = dict.fromkeys([path, specialist.write(path)])
        first, lines = f"written: {' and '.join(map(str, files))}", []
        needs = f"{specialist.library}, without damex{specialist.needs}"
    return [first, f"{about}; for {needs}", *lines]


def _check_request(
    out: str, dataset: str | None, image_size: tuple[int, int] | None
) -> tuple[Path, str]:
    """Return the path and what to write: the suffix of a file, or a folder.

    ConfigError for options that do not go together, or a taken path.
    """
    path = Path(out)
    form = FOLDER if out.endswith(("/", os.sep)) else path.suffix or FOLDER
    suffixes = (path.suffix,) if form == FOLDER else FORMS
    check_target(path, suffixes=suffixes, with_config=form == ".pth")
    if form == ".onnx":
        check_packages()
    elif image_size is not None and form == ".pth":
        raise ConfigError(
            "--image-size is for a .onnx file or a folder; a .pth takes images of any "
            "size."
        )
    elif dataset is None and form == ".pth":
        raise ConfigError(
            "a .pth file is of one dataset: add --dataset NAME. The whole mixture can "
            "be a .onnx file or, of a detector of Transformers, a folder: --out NAME/."
        )
    return path, form


def _export_onnx(
    stored: DetectorCheckpoint,
    specialist: Specialist | PlainTransformers | None,
    dataset: str | None,
    out: Path,
) -> list[str]:
    """Write a specialist or a mixture as ONNX, if both detect the same."""
    space, labels, votes = stored.space, None, None
    is_plain = stored.model["type"] == MoETransformersDetector.__name__
    library = "Transformers" if is_plain else "mmdet"
    about: dict[str, Any] = dict(damex=__version__)
    if specialist is None:
        names, labels = space.dataset_names, space.labels_by_group()
        detector, votes = voted_detector(stored.build(), labels, stored.path)
        reference: Any = stored.build()
        about |= dict(classes=space.classes, datasets=space.group_names)
        about["labels"] = dict(zip(space.group_names, labels, strict=True))
    else:
        names = (str(dataset),)
        detector, reference = specialist.build(), specialist.build()
        about |= dict(classes=specialist.classes, dataset=dataset)
    kind = TransformersGraph if is_plain else DetectorGraph
    graph = kind(detector, stored.pipeline, votes).eval()
    content = to_onnx(graph, about)
    session, inputs = start_session(content), Inputs(stored.pipeline)
    run_mmdet = partial(detections_of_mmdet, inputs, detector=reference, labels=labels)

    def run_graph(image: np.ndarray) -> Detections:
        return detections_of_graph(session, image[None])[0]

    images = dict(_image_of(stored, name, graph.scale) for name in names)
    first, lines = next(iter(images.values())), []
    # The first image in all shapes.
    more = [
        cv2.resize(first, [ceil(max(graph.scale) * share) for share in shape])
        for shape in SHAPES
    ]
    for name, image in images.items():
        parity = compare(run_mmdet, run_graph, [image, *more])
        where = f"{name}, in {parity.images} shapes" if more else name
        lines.append(parity.line(where, out, library))
        more = []
    with atomic_write(out) as part:
        part.write_bytes(content)
    torch_ms, onnx_ms = milliseconds(run_mmdet, run_graph, image=first)
    size = " x ".join(map(str, graph.scale)) + " pixels"
    size += " at most" if graph.keep_ratio else ""
    return [
        f"written: {out} ({len(content) / 1e6:.1f} MB), for images of any size, which "
        f"it resizes to {size}",
        *lines,
        f"milliseconds per image on one thread: {onnx_ms:.1f} in onnxruntime, "
        f"{torch_ms:.1f} in {library}",
    ]


def _image_of(
    stored: DetectorCheckpoint, dataset: str, size: tuple[int, int]
) -> tuple[str, np.ndarray]:
    """A validation image of a dataset and its path; noise if none is available."""
    try:
        (path,) = stored.validation_images(dataset, count=1)
        return str(path), read_pixels(path).image[..., ::-1]
    except (ConfigError, DataError, OSError):
        rng = np.random.default_rng(0)
        noise = rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)
        return "noise (no validation image is here)", noise


class Detections(NamedTuple):
    """Detections in an image; boxes (K, 4) are x1, y1, x2, y2 in pixels."""

    boxes: np.ndarray
    scores: np.ndarray
    labels: np.ndarray


Run = Callable[[np.ndarray], Detections]  # takes an image, uint8 (H, W, 3) in RGB


class Parity(NamedTuple):
    """Largest differences (boxes in pixels) of ``detections`` in ``images`` images."""

    images: int
    detections: int
    least_score: float
    scores: float
    boxes: float

    @property
    def is_close(self) -> bool:
        """Whether all differences are within the tolerances."""
        return self.scores <= SCORE_TOLERANCE and self.boxes <= BOX_TOLERANCE

    def line(self, where: str, out: Path, library: str) -> str:
        """The comparison in words; ConfigError if the differences are too large."""
        differences = (
            f"scores differ by {self.scores:.1e} at most, boxes by "
            f"{self.boxes:.1e} pixels"
        )
        if not self.is_close:
            raise ConfigError(
                f"{out} was not written: on {where}, the graph does not detect what "
                f"{library} does ({differences}; allowed are {SCORE_TOLERANCE:g} and "
                f"{BOX_TOLERANCE:g})."
            )
        return (
            f"compared with {library} on {where}: {differences} ({self.detections} "
            f"detections of {self.least_score:.2f} or more)"
        )


def compare(of_mmdet: Run, of_graph: Run, images: Sequence[np.ndarray]) -> Parity:
    """Compare a graph with its detector; ConfigError if one fails on all images.

    Images with fewer tokens than queries are left out, as neither detects anything.
    """
    parities = []
    for image in images:
        try:
            expected = of_mmdet(image)
        except (DataError, RuntimeError) as error:
            problem = str(error).splitlines()[0]
            continue
        found = of_graph(image)
        least = LEAST_SHARE * float(max(expected.scores[0], found.scores[0]))
        number = int((expected.scores >= least).sum())
        parities.append((number, least, *difference(expected, found, least=least)))
    if not parities:
        raise ConfigError(
            f"the detector fails on images of this size ({problem}); try a larger "
            "--image-size."
        )
    numbers, leasts, *differences = zip(*parities, strict=True)
    scores, boxes = np.max(differences, axis=1).tolist()  # of NaN, which max may hide
    return Parity(len(parities), sum(numbers), min(leasts), scores, boxes)


def difference(
    one: Detections, other: Detections, *, least: float
) -> tuple[float, float]:
    """Largest differences of a score and of a box coordinate (pixels) in one image.

    Rounding may swap detections of equal score, so each one scoring ``least`` or more
    is matched to the nearest of its class. Infinite if a class is missing.
    """
    worst = np.zeros(2)
    for these, those in ((one, other), (other, one)):
        kept_N = ~(these.scores < least)  # keeps NaN
        scores_NK = np.abs(these.scores[kept_N, None] - those.scores)
        boxes_NK = np.abs(these.boxes[kept_N, None] - those.boxes).max(-1)
        other_class_NK = these.labels[kept_N, None] != those.labels
        pairs_2NK = np.stack([scores_NK, boxes_NK])
        pairs_2NK[:, other_class_NK] = np.inf
        tolerances = np.array([SCORE_TOLERANCE, BOX_TOLERANCE])[:, None, None]
        nearest_N = (pairs_2NK / tolerances).max(0).argmin(1)
        pairs_2N = pairs_2NK[:, np.arange(len(nearest_N)), nearest_N]
        worst = np.maximum(worst, pairs_2N.max(1, initial=0.0))
    return float(worst[0]), float(worst[1])


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


def detections_of_graph(session: Any, images: np.ndarray) -> list[Detections]:
    """Detect with onnxruntime in images of one size, uint8 (B, H, W, 3) in RGB."""
    try:
        outputs = session.run(OUTPUTS, {INPUT: images})
    except Exception as error:  # its classes derive from nothing else
        height, width = images.shape[1:3]
        raise ConfigError(
            f"the graph fails on an image of {width} x {height} pixels, so that a part "
            "of the detector cannot be written for images of any size: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
    return [Detections(*one) for one in zip(*outputs, strict=True)]


def detections_of_mmdet(
    inputs: Inputs, image: Picture, *, detector: Any, labels: Any = None
) -> Detections:
    """Detect with mmdet in a file or uint8 RGB image (H, W, 3), as `Predictor` runs it.

    With ``labels``, the classes of each dataset group, a damex detector detects those
    of the predicted group.
    """
    packed = inputs(image)
    if labels is not None:
        packed["data_samples"].set_metainfo(dict(labels_by_group=labels))
    (sample,) = detect(detector, [packed])
    found = sample.pred_instances if labels is None else sample.dataset_instances
    found = found.numpy()
    # The graph ends boxes at the image, mmdet at its padding.
    boxes_K4 = found.bboxes.clip(0, [*sample.ori_shape[1::-1]] * 2)
    return Detections(boxes_K4, found.scores, found.labels)


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
