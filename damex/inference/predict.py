"""``damex predict``: detections as lines, COCO document, CSV table and pictures."""

from __future__ import annotations

import csv
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

import damex.registry  # noqa: F401  (first: it keeps mmdet silent)
from damex.engine.console import filter_console
from damex.errors import ConfigError, DataError, printable
from damex.files import atomic_write, check_file, write_json
from damex.inference.media import (
    Drawings,
    check_draw_folder,
    find_images,
    frame_count,
    is_video,
    names_of,
    open_video,
)
from damex.inference.predictor import Prediction, Predictor
from damex.progress import Bar

Add = Callable[[Prediction, str], Any]
Found = Sequence[tuple[Prediction, str]]  # with image names
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
    trust: bool,
) -> int:
    """Detect objects in images and videos, and write the detections.

    Return 1 if a file could not be read, 130 after Ctrl-C, else 0.
    """
    paths = find_images(images, videos=True)
    files = [Path(file) for file in (json, csv) if file is not None]
    check_outputs(files, [*paths, Path(checkpoint)])
    if draw is not None:
        check_draw_folder(Path(draw), paths)
    filter_console()
    predictor = Predictor(checkpoint, device=device, trust=trust)
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
            bar.step()

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
    """Yield a function that draws a prediction and keeps it for the files.

    These are written at the end, also after an error or Ctrl-C.
    """
    found: list[tuple[Prediction, str]] = []
    ended = False
    with ExitStack() as stack:
        add = None
        if draw is not None:
            add = stack.enter_context(Drawings(Path(draw), names, classes)).add

        def write(one: Prediction, name: str) -> None:
            if (json, csv) != (None, None):
                found.append((replace(one, image=None), name))
            if add is not None:
                add(one)

        try:
            yield write
            ended = True
        finally:
            if ended or found:  # keep an earlier file rather than empty it
                with ExitStack() as files:  # one is written although another fails
                    if csv is not None:
                        files.callback(write_csv, csv, found)
                    if json is not None:
                        document = coco_document(found, classes)
                        files.callback(write_json, json, document)


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
        most = max(one.probabilities, key=one.probabilities.__getitem__)
        best = one.dataset if one.dataset in one.probabilities else most
        parts.append(f"{best} {one.confidence:.2f}")
    counts = Counter(one.names)
    parts.append(", ".join(f"{n} {name}" for name, n in counts.items()) or "nothing")
    if _is_foreign(one, least):
        parts.append("looks like no dataset of the training")
    # Names may hold line breaks, and controls of the terminal.
    return printable(" ".join("  ".join(parts).splitlines()))


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


def coco_document(found: Found, classes: Sequence[str]) -> dict[str, Any]:
    """Build COCO annotations with a ``score`` from predictions and image names.

    Category ids count from 1. Images carry ``dataset`` and its ``probability`` if
    predicted.
    """
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, (one, name) in enumerate(found, 1):
        image = dict(id=number, file_name=name, width=one.width, height=one.height)
        images.append({**image, **_about(one)})
        rows = zip(one.boxes.tolist(), one.scores, one.labels, strict=True)
        for (x1, y1, x2, y2), score, label in rows:
            annotations.append(
                dict(
                    id=len(annotations) + 1,
                    image_id=number,
                    category_id=int(label) + 1,
                    bbox=[round(v, 2) for v in (x1, y1, x2 - x1, y2 - y1)],
                    area=round((x2 - x1) * (y2 - y1), 2),
                    score=round(float(score), 4),
                    iscrowd=0,
                )
            )
    categories = [dict(id=i, name=name) for i, name in enumerate(classes, 1)]
    return dict(images=images, annotations=annotations, categories=categories)


def write_csv(path: str | Path, found: Found) -> None:
    """Write a CSV table with a row (`COLUMNS`) per detection, boxes in pixels."""
    with (
        atomic_write(path) as part,
        part.open("w", encoding="utf-8", newline="") as file,
    ):
        table = csv.writer(file)
        table.writerow(COLUMNS)
        for one, name in found:
            about = _about(one)
            image = [_cell(name), one.width, one.height]
            dataset = _cell(about.get("dataset", ""))
            image += [dataset, about.get("probability", "")]
            rows = zip(one.names, one.scores, one.boxes.tolist(), strict=True)
            for label, score, box in rows:
                numbers = (round(float(score), 4), *(round(value, 2) for value in box))
                table.writerow([*image, _cell(label), *numbers])


def _cell(text: str) -> str:
    """A name that a spreadsheet does not take for a formula, nor a terminal obeys."""
    text = printable(text)
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\n")) else text


def _about(one: Prediction) -> dict[str, Any]:
    """The dataset of an image and its probability, if known."""
    known: dict[str, Any] = {} if one.dataset is None else dict(dataset=one.dataset)
    if one.confidence is not None:
        known["probability"] = round(one.confidence, 4)
    return known
