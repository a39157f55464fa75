"""The commands ``damex predict`` and ``damex export``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console

from damex import __version__
from damex.commandline.run import Bar
from damex.engine.console import filter_console
from damex.errors import ConfigError, DataError
from damex.files import atomic_write
from damex.inference.drawing import Drawings, check_draw_folder
from damex.inference.images import (
    find_images,
    is_video,
    names_of,
    open_video,
    printable,
)
from damex.inference.look.samples import validation_images
from damex.inference.onnx_graph import (
    DetectorGraph,
    Routing,
    check_packages,
    resizing_to,
    to_onnx,
)
from damex.inference.onnx_parity import (
    BOX_TOLERANCE,
    SCORE_TOLERANCE,
    compare,
    milliseconds,
    runs_of,
    stretched,
)
from damex.inference.onnx_routing import voted_detector
from damex.inference.predictor import Prediction, Predictor, labels_by_group
from damex.inference.specialist import Specialist, take_out
from damex.inference.stored import StoredDetector, millions
from damex.inference.writing import (
    Add,
    check_outputs,
    check_target,
    csv_table,
    json_document,
)


def predict(
    checkpoint: str,
    images: Sequence[str],
    *,
    dataset: str,
    json: str | None,
    csv: str | None,
    draw: str | None,
    min_score: float,
    min_probability: float,
    batch_size: int,
    device: str | None,
) -> int:
    """Detect objects in images and videos, and write the detections.

    Returns:
        1 if a file could not be read, 130 after Ctrl-C, else 0.

    Raises:
        ConfigError: If an option or the checkpoint is unusable.
        DataError: If images are missing, or the checkpoint cannot be read.
    """
    paths = find_images(images, videos=True)
    files = [Path(file) for file in (json, csv) if file is not None]
    check_outputs(files, [*paths, Path(checkpoint)])
    if draw is not None:
        check_draw_folder(Path(draw), paths)
    filter_console()
    predictor = Predictor(checkpoint, device=device)
    names = dict(zip(paths, names_of(paths), strict=True))
    # On a terminal the bar redirects stdout to stay below the lines; a file or pipe
    # must get the lines, too.
    file = None if sys.stdout.isatty() else sys.stdout
    console = Console(
        file=file, highlight=False, soft_wrap=True, markup=False, emoji=False
    )
    if dataset == "auto" and predictor.auto_note is not None:
        console.print(f"note: {predictor.auto_note}")
        dataset = "all"
    predictions: list[Prediction] = []
    faults: list[DataError] = []
    settings = (dataset, min_score, batch_size)
    found = predictor.stream(paths, *settings, skip=faults.append)
    total = sum(map(_images_in, paths))
    stopped: BaseException | None = None
    try:
        outputs = _outputs(json, csv, draw, names, predictor.classes)
        with Bar() as bar, outputs as write:
            bar.begin("images", total)
            for one in found:
                console.print(line_of(one, name_of(one, names), min_probability))
                predictions.append(one)
                write(one)
                bar.advance()
    except BaseException as error:  # Ctrl-C, too
        if not predictions:
            raise
        stopped = error
    console.print(_summary(predictions, faults, len(paths), min_probability))
    if stopped is None:
        return 1 if faults else 0
    console.print(f"partial: stopped after {len(predictions)} of {total} images")
    if isinstance(stopped, KeyboardInterrupt):
        return 130
    raise stopped


@contextmanager
def _outputs(
    json: str | None,
    csv: str | None,
    draw: str | None,
    names: Mapping[Path, str],
    classes: Sequence[str],
) -> Iterator[Callable[[Prediction], None]]:
    """Open all requested outputs and yield their write functions."""
    with ExitStack() as stack:
        adders: list[Add] = []
        if json is not None:
            document = json_document(Path(json), classes)
            adders.append(stack.enter_context(document))
        if csv is not None:
            adders.append(stack.enter_context(csv_table(Path(csv))))
        if draw is not None:
            drawings = Drawings(Path(draw), names, classes)
            stack.enter_context(drawings)
            adders.append(lambda one, _: drawings.add(one))

        def write(one: Prediction) -> None:
            for add in adders:
                add(one, name_of(one, names))

        yield write


def _images_in(path: Path) -> int:
    """Estimated number of images in a file, before it is decoded."""
    try:
        return max(open_video(path).frame_cnt, 1) if is_video(path) else 1
    except DataError:
        return 1  # reported when it is read


def name_of(one: Prediction, names: Mapping[Path, str]) -> str:
    """Name of an image in the output; frames get their number appended."""
    if one.path is None:
        return ""
    frame = "" if one.frame is None else f":{one.frame}"
    return names[one.path] + frame


def line_of(one: Prediction, name: str, least: float) -> str:
    """Summary line of an image: its dataset and detections.

    Below the probability ``least`` an image fits no dataset of the training.
    """
    parts = [name]
    if one.likeness is not None:
        best = max(one.probabilities, key=one.probabilities.__getitem__)
        parts.append(f"{best} {one.likeness:.2f}")
    counts = Counter(one.names)
    parts.append(", ".join(f"{n} {name}" for name, n in counts.items()) or "nothing")
    if is_foreign(one, least):
        parts.append("looks like no dataset of the training")
    return "  ".join(parts)


def is_foreign(one: Prediction, least: float) -> bool:
    """Whether no dataset of the training reaches the probability ``least``."""
    return one.likeness is not None and one.likeness < least


def _summary(
    predictions: Sequence[Prediction],
    faults: Sequence[DataError],
    files: int,
    least: float,
) -> str:
    """Closing report with counts and faults."""
    objects = sum(len(one.scores) for one in predictions)
    lines = [f"{len(predictions)} images, {objects} objects"]
    foreign = sum(is_foreign(one, least) for one in predictions)
    if foreign:
        lines.append(
            f"warning: {foreign} of them look like no dataset of the training (the "
            f"most probable is below {least:g}); do not rely on what was found there"
        )
    if faults:
        lines.append(f"error: {len(faults)} of {files} files could not be read:")
        lines += [f"  {printable(str(fault))}" for fault in faults]
    return "\n".join(lines)


def export(
    checkpoint: str,
    *,
    out: str,
    dataset: str | None,
    image_size: tuple[int, int] | None,
) -> None:
    """Write a dense detector of one dataset, or a whole mixture for onnxruntime.

    Raises:
        ConfigError: If the dataset is unknown, or the detector has no dense or ONNX
            equivalent.
        DataError: If the checkpoint cannot be read.
    """
    filter_console()
    path = Path(out)
    as_onnx = path.suffix == ".onnx"
    check_target(path, suffixes=(".pth", ".onnx"), with_config=not as_onnx)
    if as_onnx:
        check_packages()
    elif image_size is not None:
        raise ConfigError(
            "--image-size is for a .onnx file; a .pth takes images of any size."
        )
    elif dataset is None:
        raise ConfigError(
            "a .pth file is of one dataset: add --dataset NAME. The whole mixture can "
            "be a .onnx file."
        )
    stored = StoredDetector.read(checkpoint)
    if dataset is None:
        print("\n".join(_export_mixture(stored, path, image_size)))
        return
    specialist = take_out(stored, dataset)
    if as_onnx:
        first, *lines = _export_specialist(
            stored, specialist, dataset, path, image_size
        )
        needs = "onnxruntime alone"
    else:
        first, lines = f"written: {path} and {specialist.write(path)}", []
        needs = f"mmdet, without damex{specialist.needs}"
    classes = specialist.classes
    words = "1 class" if len(classes) == 1 else f"{len(classes)} classes"
    about = (
        f"{dataset}: {words}, {millions(specialist.state)} million parameters of "
        f"{millions(stored.state)}; for {needs}"
    )
    print("\n".join([first, about, *lines]))


def _export_specialist(
    stored: StoredDetector,
    specialist: Specialist,
    dataset: str,
    out: Path,
    image_size: tuple[int, int] | None,
) -> list[str]:
    """Write a specialist as an ONNX graph, if their detections agree."""
    pipeline = resizing_to(stored.pipeline, image_size)
    detector = specialist.build()
    graph = DetectorGraph(detector, pipeline).eval()
    about = dict(classes=specialist.classes, dataset=dataset)
    images = [_image_of(stored, dataset, graph.scale)]
    return _write_onnx(graph, about, detector, images, out)


def _export_mixture(
    stored: StoredDetector, out: Path, image_size: tuple[int, int] | None
) -> list[str]:
    """Write a mixture of experts as an ONNX graph, if their detections agree."""
    space = stored.space
    pipeline = resizing_to(stored.pipeline, image_size)
    detector, votes = voted_detector(stored.build(), stored.path)
    labels = labels_by_group(space)
    graph = DetectorGraph(detector, pipeline, Routing(votes, labels)).eval()
    about = dict(
        classes=space.classes,
        datasets=space.group_names,
        labels=dict(zip(space.group_names, labels, strict=True)),
    )
    images = [_image_of(stored, one, graph.scale) for one in space.dataset_names]
    lines = _write_onnx(graph, about, stored.build(), images, out)
    known = (
        f"{len(space.dataset_names)} datasets, {space.num_classes} classes, "
        f"{millions(stored.state)} million parameters; for onnxruntime alone"
    )
    return [lines[0], known, *lines[1:]]


def _write_onnx(
    graph: DetectorGraph,
    about: Mapping[str, Any],
    detector: Any,
    images: Sequence[tuple[str, np.ndarray]],
    out: Path,
) -> list[str]:
    """Write a graph if it agrees with ``detector``; the first image has all shapes."""
    content = to_onnx(graph, dict(**about, damex=__version__))
    runs, lines = runs_of(graph, content, detector), []
    more = stretched(images[0][1], max(graph.scale))
    for name, image in dict(images).items():
        parity = compare(*runs, [image, *more])
        where = f"{name}, in {parity.images} shapes" if more else name
        more = []
        differences = (
            f"scores differ by {parity.scores:.1e} at most, boxes by "
            f"{parity.boxes:.1e} pixels"
        )
        if not parity.is_close:
            raise ConfigError(
                f"{out} was not written: on {where}, the graph does not answer as "
                f"mmdet does ({differences}; allowed are {SCORE_TOLERANCE:g} and "
                f"{BOX_TOLERANCE:g})."
            )
        lines.append(
            f"compared with mmdet on {where}: {differences} ({parity.detections} "
            f"detections of {parity.least_score:.2f} or more)"
        )
    with atomic_write(out) as part:
        part.write_bytes(content)
    torch_ms, onnx_ms = milliseconds(*runs, image=images[0][1])
    size = " x ".join(map(str, graph.scale)) + " pixels"
    size += " at most" if graph.keep_ratio else ""
    return [
        f"written: {out} ({len(content) / 1e6:.1f} MB), for images of any size, which "
        f"it resizes to {size}",
        *lines,
        f"milliseconds per image on one thread: {onnx_ms:.1f} in onnxruntime, "
        f"{torch_ms:.1f} in mmdet",
    ]


def _image_of(
    stored: StoredDetector, dataset: str, size: tuple[int, int]
) -> tuple[str, np.ndarray]:
    """A validation image of a dataset and its path; noise if none is available."""
    try:
        (path,) = validation_images(stored, dataset, count=1)
        with Image.open(path) as image:
            return str(path), np.asarray(image.convert("RGB"))
    except (ConfigError, DataError, OSError):
        shape = (size[1], size[0], 3)
        noise = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        return "noise (no validation image is here)", noise
