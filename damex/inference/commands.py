"""The commands ``damex predict`` and ``damex export``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from damex.commandline.bar import Bar
from damex.commandline.commands import export_parser, predict_parser
from damex.errors import DataError
from damex.inference.images import find_images, names_of
from damex.inference.prediction import Prediction
from damex.inference.predictor import Predictor
from damex.inference.specialist import take_out
from damex.inference.stored import StoredDetector
from damex.inference.writing import draw, make_folder, write_csv, write_json


def predict(arguments: Sequence[str]) -> int:
    """Detect objects in images, and write down what was found.

    Args:
        arguments: Command line without the program's name.

    Returns:
        1 if an image could not be read, else 0.

    Raises:
        ConfigError: If an option or the checkpoint cannot work.
        DataError: If there are no images, or the checkpoint cannot be read.
    """
    args = predict_parser().parse_args(arguments)
    paths = find_images(args.images)
    for target in (args.json, args.csv):
        if target is not None:
            make_folder(Path(target).parent)
    predictor = Predictor(args.checkpoint, device=args.device)
    names = dict(zip(paths, names_of(paths), strict=True))
    # On a terminal the bar takes over the standard output, to stay below the lines; a
    # file or a pipe shall get them all the same.
    file = None if sys.stdout.isatty() else sys.stdout
    console = Console(file=file, highlight=False, soft_wrap=True, markup=False)
    predictions: list[Prediction] = []
    faults: list[DataError] = []
    settings = (args.dataset, args.min_score, args.batch_size)
    with Bar() as bar:
        bar.begin("images", len(paths))
        for one in predictor.stream(paths, *settings, skip=faults.append):
            bar.advance()
            predictions.append(one)
            console.print(line_of(one, name_of(one, names), args.min_probability))
            if args.draw is not None and one.path is not None:
                target = Path(args.draw) / names[one.path]
                draw(one, target, classes=predictor.classes)
    found = [name_of(one, names) for one in predictions]
    if args.json is not None:
        write_json(Path(args.json), predictions, found, predictor.classes)
    if args.csv is not None:
        write_csv(Path(args.csv), predictions, found)
    console.print(_summary(predictions, faults, args.min_probability))
    return 1 if faults else 0


def name_of(one: Prediction, names: Mapping[Path, str]) -> str:
    """What an image is called in the output."""
    return "" if one.path is None else names[one.path]


def line_of(one: Prediction, name: str, least: float) -> str:
    """An image in one line: its dataset and what was found in it.

    Args:
        one: What was found.
        name: Of the image.
        least: Below this probability no dataset of the training fits.
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
    """Whether no dataset of the training is as probable as it has to be."""
    return one.likeness is not None and one.likeness < least


def _summary(
    predictions: Sequence[Prediction], faults: Sequence[DataError], least: float
) -> str:
    """What was done, and what could not be."""
    objects = sum(len(one.scores) for one in predictions)
    lines = [f"{len(predictions)} images, {objects} objects"]
    foreign = sum(is_foreign(one, least) for one in predictions)
    if foreign:
        lines.append(
            f"warning: {foreign} of them look like no dataset of the training (the "
            f"most probable is below {least:g}); do not rely on what was found there"
        )
    if faults:
        number = len(predictions) + len(faults)
        lines.append(f"error: {len(faults)} of {number} images could not be read:")
        lines += [f"  {fault}" for fault in faults]
    return "\n".join(lines)


def export(arguments: Sequence[str]) -> None:
    """Write a dense detector of one dataset that mmdet runs without damex.

    Args:
        arguments: Command line without the program's name.

    Raises:
        ConfigError: If there is no such dataset, or the detector has no dense equal.
        DataError: If the checkpoint cannot be read.
    """
    args = export_parser().parse_args(arguments)
    stored = StoredDetector.read(args.checkpoint)
    specialist = take_out(stored, args.dataset)
    config = specialist.write(Path(args.out))
    classes, parameters = specialist.classes, specialist.parameters
    words = "1 class" if len(classes) == 1 else f"{len(classes)} classes"
    print(
        f"written: {args.out} and {config}\n{args.dataset}: {words}, "
        f"{parameters / 1e6:.2f} million parameters of {stored.parameters / 1e6:.2f}; "
        f"for mmdet, without damex{specialist.needs}"
    )
