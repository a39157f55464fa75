"""WIDER FACE: blocks of an image, a number of faces, and a line per face.

Columns of a line: x, y, width, height (pixels), blur, expression, illumination,
invalid, occlusion, pose (Yang et al. 2016, readme.txt of wider_face_split).
"""

from __future__ import annotations

from collections.abc import Iterator

from damex.datasets.formats.records import (
    Box,
    Contents,
    Format,
    Ledger,
    Options,
    Sample,
    numbers,
)
from damex.datasets.formats.tree import IMAGE_SUFFIXES, Tree, split_of_file

_INVALID = 7


def _files(tree: Tree) -> list[str]:
    return tree.with_suffix("_bbx_gt.txt")


def _recognise(tree: Tree) -> str | None:
    files = _files(tree)
    return files[0] if files else None


def _read(tree: Tree, options: Options, ledger: Ledger) -> Contents:
    contents = Contents([], classes=("face",))
    for path in _files(tree):
        split = split_of_file(path)
        near = [f for f in sorted(tree.folders) if f.endswith(f"WIDER_{split}/images")]
        samples = list(_samples(tree, path, near, ledger))
        contents.samples += samples
        if split is not None:
            contents.splits.setdefault(split, []).extend(samples)
    return contents


def _samples(
    tree: Tree, path: str, near: list[str], ledger: Ledger
) -> Iterator[Sample]:
    """The blocks of a file; an empty one has a line of zeros, or none."""
    sample: Sample | None = None
    announced = 0
    for number, line in enumerate(tree.lines(path), start=1):
        place, words = f"{path}:{number}", line.split()
        if line.lower().endswith(tuple(IMAGE_SUFFIXES)):
            image = tree.locate_image(line, near, split_of_file(path))
            if image is None:
                ledger.drop("annotated images that are not there", f"{place}: {line}")
            sample, announced = Sample(image or "", path), 0
            if image is not None:
                yield sample
        elif sample is None or not words or (len(words) == 1 and words[0].isdigit()):
            announced = int(words[0]) if len(words) == 1 and sample else announced
        elif announced:
            box = _face(words, place, ledger)
            if box is not None and sample.image:
                sample.boxes.append(box._replace(place=number))
            elif box is not None:
                ledger.drop("boxes of images that are not there", place)
        elif {*words} != {"0"}:
            what = "lines below an image without a number of faces"
            ledger.drop(what, f"{place}: {line!r:.80}")


def _face(words: list[str], place: str, ledger: Ledger) -> Box | None:
    values = numbers(words)
    if values is None or len(values) < 4:
        what = "lines that are no face of 4 or 10 numbers"
        ledger.drop(what, f"{place}: {' '.join(words)!r:.80}")
        return None
    x, y, width, height = values[:4]
    invalid = len(values) > _INVALID and values[_INVALID] == 1
    if invalid:
        ledger.note("faces marked invalid: kept as crowd", place)
    return Box((x, y, x + width, y + height), "face", 0, crowd=invalid)


WIDER_FACE = Format(
    name="wider_face",
    looks_for="wider_face_train_bbx_gt.txt beside WIDER_train/images/",
    recognise=_recognise,
    read=_read,
)
