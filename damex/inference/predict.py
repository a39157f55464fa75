"""``damex predict``: detections as lines, COCO document, CSV table and pictures."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

import damex.registry  # noqa: F401  (first: it keeps mmdet silent)
from damex.commandline.run import Bar
from damex.engine.console import filter_console
from damex.errors import ConfigError, DataError
from damex.files import atomic_write, check_file, write_json
from damex.inference.drawing import Drawings, check_draw_folder
from damex.inference.media import (
    find_images,
    frame_count,
    is_video,
    names_of,
    open_video,
    printable,
)
from damex.inference.predictor import Prediction, Predictor

Add = Callable[[Prediction, str], Any]
COLUMNS = (
    *("file", "width", "height", "dataset", "probability"),
    *("class", "score", "x1", "y1", "x2", "y2"),
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
    faults: list[DataError] = []
    found = predictor.stream(
        *(paths, dataset, min_score, batch_size),
        keep_images=draw is not None,
        skip=faults.append,
    )
    total = sum(map(_images_in, paths))
    with Bar() as bar:
        bar.begin("images", total)

        def show(one: Prediction, name: str) -> None:
            console.print(line_of(one, name, min_probability))
            bar.advance()

        outputs = _outputs(json, csv, draw, names, predictor.classes)
        counts, stopped = _write_all(found, names, show, outputs, min_probability)
    console.print(_summary(counts, faults, len(paths), min_probability))
    if stopped is None:
        return 1 if faults else 0
    console.print(f"partial: stopped after {counts['images']} of {total} images")
    if isinstance(stopped, KeyboardInterrupt):
        return 130
    raise stopped


def _write_all(
    found: Iterator[Prediction],
    names: Mapping[Path, str],
    show: Add,
    outputs: AbstractContextManager[Add],
    least: float,
) -> tuple[Counter[str], BaseException | None]:
    """Show and write all predictions; return counts and what stopped it, if anything.

    An error before the first prediction is raised.
    """
    counts = Counter[str]()
    try:
        with outputs as write:
            for one in found:
                name = name_of(one, names)
                show(one, name)
                foreign = int(_is_foreign(one, least))
                counts.update(images=1, objects=len(one.scores), foreign=foreign)
                write(one, name)
    except BaseException as error:  # Ctrl-C, too
        if not counts:
            raise
        return counts, error
    return counts, None


def check_outputs(targets: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Create output folders; ConfigError if an input or output would be replaced."""
    taken = {path.resolve() for path in inputs}
    for target in targets:
        check_file(target)
        if target.resolve() in taken:
            raise ConfigError(
                f"{target} would be replaced, which is an input or another output; "
                "name another file."
            )
        taken.add(target.resolve())


@contextmanager
def _outputs(
    json: str | None,
    csv: str | None,
    draw: str | None,
    names: Mapping[Path, str],
    classes: Sequence[str],
) -> Iterator[Add]:
    """Open all requested outputs and yield a function that writes to them."""
    with ExitStack() as stack:
        adders: list[Add] = []
        if json is not None:
            document = coco_document(Path(json), classes)
            adders.append(stack.enter_context(document))
        if csv is not None:
            adders.append(stack.enter_context(csv_table(Path(csv))))
        if draw is not None:
            drawings = Drawings(Path(draw), names, classes)
            adders.append(stack.enter_context(drawings).add)
        yield lambda one, name: [add(one, name) for add in adders]


def _images_in(path: Path) -> int:
    """Estimated number of images in a file, before it is decoded."""
    try:
        return max(frame_count(open_video(path)), 1) if is_video(path) else 1
    except DataError:
        return 1  # reported when it is read


def name_of(one: Prediction, names: Mapping[Path, str]) -> str:
    """Name of an image in the output; frames get their number appended."""
    name = "" if one.path is None else names[one.path]
    return name if one.frame is None else f"{name}:{one.frame}"


def line_of(one: Prediction, name: str, least: float) -> str:
    """Summary line of an image: its dataset and detections.

    Below the probability ``least`` an image fits no dataset of the training.
    """
    parts = [name]
    if one.confidence is not None:
        best = max(one.probabilities, key=one.probabilities.__getitem__)
        parts.append(f"{best} {one.confidence:.2f}")
    counts = Counter(one.names)
    parts.append(", ".join(f"{n} {name}" for name, n in counts.items()) or "nothing")
    if _is_foreign(one, least):
        parts.append("looks like no dataset of the training")
    return " ".join("  ".join(parts).splitlines())  # names may hold line breaks


def _is_foreign(one: Prediction, least: float) -> bool:
    """Whether no dataset of the training reaches the probability ``least``."""
    return one.confidence is not None and one.confidence < least


def _summary(
    counts: Mapping[str, int], faults: Sequence[DataError], files: int, least: float
) -> str:
    """Closing report with counts and faults."""
    lines = [f"{counts['images']} images, {counts['objects']} objects"]
    if counts["foreign"]:
        lines.append(
            f"warning: {counts['foreign']} of them look like no dataset of the "
            f"training (the most probable is below {least:g}); do not rely on their "
            "detections"
        )
    if faults:
        lines.append(f"error: {len(faults)} of {files} files could not be read:")
        lines += [f"  {printable(str(fault))}" for fault in faults]
    return "\n".join(lines)


@contextmanager
def coco_document(path: Path, classes: Sequence[str]) -> Iterator[Add]:
    """Yield a function that adds a prediction and image name to a COCO document.

    Annotations have a ``score``; category ids count from 1. Images carry ``dataset``
    and its ``probability`` if predicted. Written at the end, also after an error or
    Ctrl-C.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    categories = [dict(id=i, name=name) for i, name in enumerate(classes, 1)]

    def add(one: Prediction, name: str) -> None:
        size = dict(width=one.width, height=one.height)
        images.append(dict(id=len(images) + 1, file_name=name, **size, **_about(one)))
        rows = zip(one.boxes.tolist(), one.scores, one.labels, strict=True)
        for (x1, y1, x2, y2), score, label in rows:
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=len(images),
                    category_id=int(label) + 1,
                    bbox=[round(v, 2) for v in (x1, y1, x2 - x1, y2 - y1)],
                    area=round((x2 - x1) * (y2 - y1), 2),
                    score=round(float(score), 4),
                    iscrowd=0,
                )
            )

    def write() -> None:
        lists = dict(images=images, annotations=annotations, categories=categories)
        write_json(path, lists)

    with _written(images, write):
        yield add


@contextmanager
def csv_table(path: Path) -> Iterator[Add]:
    """Yield a function that adds a prediction and image name to a CSV table.

    One row per detection (`COLUMNS`), boxes in pixels. Written at the end, also after
    an error or Ctrl-C.
    """
    rows: list[list[Any]] = []

    def add(one: Prediction, name: str) -> None:
        about = _about(one)
        image = [name, one.width, one.height]
        image += [about.get("dataset", ""), about.get("probability", "")]
        found = zip(one.names, one.scores, one.boxes.tolist(), strict=True)
        for label, score, box in found:
            numbers = (round(float(score), 4), *(round(value, 2) for value in box))
            rows.append([*image, label, *numbers])

    def write() -> None:
        with (
            atomic_write(path) as part,
            part.open("w", encoding="utf-8", newline="") as file,
        ):
            csv.writer(file).writerows([COLUMNS, *rows])

    with _written(rows, write):
        yield add


@contextmanager
def _written(rows: Sequence[Any], write: Callable[[], None]) -> Iterator[None]:
    """Call ``write`` at the end; after an error only if there are ``rows``."""
    try:
        yield
    except BaseException:
        if rows:  # keep an earlier file rather than empty it
            write()
        raise
    write()


def _about(one: Prediction) -> dict[str, Any]:
    """The dataset of an image and its probability, if known."""
    known: dict[str, Any] = {} if one.dataset is None else dict(dataset=one.dataset)
    if one.confidence is not None:
        known["probability"] = round(one.confidence, 4)
    return known
