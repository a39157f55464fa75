"""``damex predict``: detections as lines, COCO document, CSV table and pictures."""

from __future__ import annotations

import csv
import glob
import os
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console

from damex.datasets.image_files import IMAGE_SUFFIXES, list_files
from damex.engine.console import filter_console
from damex.errors import ConfigError, DataError, printable
from damex.files import atomic_write, check_file, make_folder, write_json
from damex.inference.drawing import Drawings
from damex.inference.media import VIDEO_SUFFIXES, frame_count, is_video, open_video
from damex.inference.predictor import Prediction, Predictor
from damex.progress import Bar

Found = Sequence[tuple[Prediction, str]]  # with image names
COLUMNS = (
    *("file", "width", "height", "dataset", "probability"),
    *("class", "score", "x1", "y1", "x2", "y2"),
)
# Videos that OpenCV cannot read are reported at the end.
SUFFIXES = (*sorted(IMAGE_SUFFIXES), ".avif", ".heic", ".heif")
# Cameras (also by number), streams and URLs; Path leaves one slash of two.
_NO_FILE = re.compile(r"\d+|/dev/.+|[A-Za-z][\w+.-]+:/.*")


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
    tile: int | None,
    no_tile: bool,
    device: str | None,
    trust: bool,
) -> int:
    """Detect objects in images and videos, and write the detections.

    Return 1 if a file could not be read, 130 after Ctrl-C, else 0.
    """
    if no_tile and tile is not None:
        raise ConfigError("--tile and --no-tile contradict each other; give one.")
    paths = find_images(images, videos=True)
    files = [Path(file) for file in (json, csv) if file is not None]
    check_outputs(files, [*paths, Path(checkpoint)])
    if draw is not None:
        check_draw_folder(Path(draw), paths)
    filter_console()
    predictor = Predictor(checkpoint, device=device, trust=trust)
    # On a terminal the bar redirects stdout to stay below the lines; a file or pipe
    # must get the lines, too.
    file = None if sys.stdout.isatty() else sys.stdout
    console = Console(
        file=file, highlight=False, soft_wrap=True, markup=False, emoji=False
    )
    if dataset == "auto" and predictor.auto_note is not None:
        console.print(f"note: {predictor.auto_note}")
    problems: list[DataError] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the note is printed
        found = predictor.stream(
            *(paths, dataset, min_score, batch_size),
            tile=None if no_tile else "auto" if tile is None else tile,
            keep_images=draw is not None,
            skip=problems.append,
        )
    names = dict(zip(paths, names_of(paths), strict=True))
    total = sum(map(_images_in, paths))
    with Bar() as bar:
        bar.begin("images", total)

        def show(one: Prediction, name: str) -> None:
            console.print(line_of(one, name, min_probability))
            bar.step()

        outputs = json, csv, draw, predictor.classes
        counts, stopped = _write_all(found, names, show, outputs, min_probability)
    console.print(_summary(counts, problems, len(paths), min_probability))
    if stopped is None:
        return 1 if problems else 0
    console.print(f"partial: stopped after {counts['images']} of {total} images")
    if isinstance(stopped, KeyboardInterrupt):
        return 130
    raise stopped


def _write_all(
    stream: Iterator[Prediction],
    names: Mapping[Path, str],
    show: Callable[[Prediction, str], Any],
    outputs: tuple[str | None, str | None, str | None, Sequence[str]],
    least: float,
) -> tuple[Counter[str], BaseException | None]:
    """Show, draw and write all predictions, including those before an error.

    Returns counts and what stopped it, if anything. An error before the first
    prediction is raised, and earlier files are kept.
    """
    json, csv, draw, classes = outputs
    counts, found = Counter[str](), list[tuple[Prediction, str]]()
    stopped: BaseException | None = None
    try:
        drawings = None if draw is None else Drawings(Path(draw), names, classes)
        with drawings or nullcontext():
            for one in stream:
                name = name_of(one, names)
                show(one, name)
                foreign = int(_is_foreign(one, least))
                counts.update(images=1, objects=len(one.scores), foreign=foreign)
                if (json, csv) != (None, None):
                    found.append((replace(one, image=None), name))
                if drawings is not None:
                    drawings.add(one)
    except BaseException as error:  # Ctrl-C, too
        if not counts:
            raise
        stopped = error
    try:
        _write_files(found, json, csv, classes)
    except BaseException as error:
        if not counts:
            raise
        stopped = error
    return counts, stopped


def _write_files(
    found: Found, json: str | None, csv: str | None, classes: Sequence[str]
) -> None:
    """Write the files that the user named; one is written although another fails."""
    with ExitStack() as files:
        if csv is not None:
            files.callback(write_csv, csv, found)
        if json is not None:
            files.callback(write_json, json, coco_document(found, classes))


def find_images(words: Sequence[str], *, videos: bool = False) -> list[Path]:
    """Find the images (and ``videos``) of files, folders and patterns, each once.

    Files may have any name. Folders are searched recursively, through links, too;
    images without a suffix are included, hidden files and folders are not. Other words
    are patterns (``*``, ``**``, ``?``). DataError if a word matches nothing.
    """
    found: dict[Path, Path] = {}
    suffixes = (*SUFFIXES, *VIDEO_SUFFIXES) if videos else SUFFIXES
    for word in map(os.path.expanduser, words):  # a word that no shell has seen
        files = _files_of(word, suffixes)
        if not files:
            raise DataError(_no_image(word, suffixes))
        for file in files:
            found.setdefault(_place(file), file)
    return list(found.values())


def _no_image(word: str, suffixes: Sequence[str]) -> str:
    """Explain why a word names no image."""
    if _NO_FILE.fullmatch(word) and not Path(word).is_dir():
        return (
            f"{word} is not a file: cameras, streams and URLs are not read. Save what "
            "they show, or read it in Python, for instance with cv2.VideoCapture, and "
            "pass the frames as RGB arrays: "
            "damex.load(CHECKPOINT).predict(frames, batch_size=1)."
        )
    what = "image in the folder" if Path(word).is_dir() else "file or folder"
    return (
        f"there is no {what} {word} (seen from {Path.cwd()}); images end in "
        f"{', '.join(suffixes)}."
    )


def _files_of(word: str, suffixes: Sequence[str]) -> list[Path]:
    path = Path(word)
    if path.is_file():
        return [path]
    if path.is_dir():
        inside = [path / name for name, _ in sorted(list_files(str(path)))]
    else:
        names = glob.glob(word, recursive=True)  # noqa: PTH207 (absolute ones, too)
        inside = [Path(name) for name in sorted(names) if not _is_loop(Path(name))]
    return [p for p in inside if p.is_file() and _is_wanted(p, suffixes)]


def _is_loop(path: Path) -> bool:
    """Whether a path enters one folder twice, through a link; ``**`` follows these."""
    folders = [os.path.realpath(folder) for folder in _place(path).parents]
    return len({*folders}) < len(folders)


def _is_wanted(path: Path, suffixes: Sequence[str]) -> bool:
    """Whether a file has one of the suffixes, or none and image content."""
    if path.suffix:
        return path.suffix.lower() in suffixes
    try:
        with Image.open(path):
            return True
    except Image.DecompressionBombError:
        return True  # reported when it is read
    except Exception:  # Pillow's readers raise anything
        return False


def _place(path: Path) -> Path:
    """Absolute path without ``..``; links are kept if possible."""
    path = path.absolute()
    return path.parent.resolve() / path.name if ".." in path.parts else path


def names_of(paths: Sequence[Path]) -> list[str]:
    """Unique relative names for files, without ``..``, from their common folder."""
    places = [_place(path) for path in paths]
    shared = os.path.commonpath([path.parent for path in places]) if places else ""
    return [printable(os.path.relpath(path, shared)) for path in places]


def check_outputs(targets: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Create output folders; ConfigError if an input or output would be replaced.

    A checkpoint among the inputs may be a folder.
    """
    taken = {path.resolve() for path in inputs}
    for target in targets:
        check_file(target)
        if {target.resolve(), target.resolve().parent} & taken:
            raise ConfigError(
                f"{target} would be replaced, which is an input or another output; "
                "name another file."
            )
        taken.add(target.resolve())


def check_draw_folder(folder: Path, images: Sequence[Path]) -> None:
    """Reject a folder with images to draw: drawings keep their names (ConfigError)."""
    make_folder(folder)
    for image in images:
        places = image.resolve().parent, image.parent.resolve()
        if any(place.is_relative_to(folder.resolve()) for place in places):
            raise ConfigError(
                f"--draw would write to {folder}, where {image} lies, and could "
                "replace images; name another folder."
            )


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
    counts: Mapping[str, int], problems: Sequence[DataError], files: int, least: float
) -> str:
    numbers = [(counts[f"{one}s"], one) for one in ("image", "object")]
    lines = [", ".join(f"{n} {one}{'s' * (n != 1)}" for n, one in numbers)]
    if strange := counts["foreign"]:
        lines.append(
            f"warning: {strange} of them look{'s' * (strange == 1)} like no dataset of "
            f"the training (the most probable is below {least:g}); do not rely on "
            "such detections"
        )
    if problems:
        lines.append(f"error: {len(problems)} of {files} files could not be read:")
        lines += [f"  {printable(str(problem))}" for problem in problems]
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
            image += [_cell(about.get("dataset", "")), about.get("probability", "")]
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
