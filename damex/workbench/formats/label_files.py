"""One annotation file per image: Pascal VOC (XML), KITTI and DOTA (text).

Text files are recognized by their lines; the image is found by the name of the file.
The names and splits of YOLO's text files are elsewhere: see ``yolo.py``.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from xml.etree import ElementTree

from damex.datasets.entries import Options, Summary
from damex.datasets.image_files import IMAGE_SUFFIXES
from damex.errors import DataError
from damex.files import decode
from damex.workbench.formats.records import (
    Box,
    Contents,
    Format,
    Sample,
    by_folder,
    enclosing_box,
    is_set,
    is_share,
)
from damex.workbench.formats.tree import (
    Tree,
    numbers,
    parent,
    size_of,
    split_name,
    stem,
)

_LOOKED_AT = 40
_HEADERS = ("imagesource:", "gsd:")  # of DOTA
_SCORED = "detections with a score taken as ground truth"
_DIFFICULT = "objects marked difficult: kept as crowd"
_ENCODING = re.compile(rb"<\?xml[^>]*encoding=[\"']([\w.-]+)")


def _recognise_voc(tree: Tree) -> str | None:
    files = tree.with_suffix(".xml")
    for path in files[:_LOOKED_AT]:
        if not isinstance(_parse_voc(tree, path), str):
            return f"{len(files)} XML files such as {path}"
    return None


def _problem_of_voc(tree: Tree) -> str | None:
    for path in tree.with_suffix(".xml")[:_LOOKED_AT]:
        problem = _parse_voc(tree, path)
        if isinstance(problem, str) and not problem.startswith("<"):
            return f"{path} is {problem}"
    return None


def _parse_voc(tree: Tree, path: str) -> ElementTree.Element | str:
    """The root element of a VOC file, or why it is not one."""
    raw = (tree.root / path).read_bytes()
    content: str | bytes = raw
    # Python supports encodings that the parser does not, such as GBK.
    if (found := _ENCODING.match(raw)) is not None:
        with contextlib.suppress(ValueError, LookupError):
            content = raw.decode(found[1].decode())
    try:
        root = ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        try:
            decode(raw, tree.root / path)
        except DataError as cause:
            return f"not an XML file in its encoding ({cause})"
        return f"not an XML file ({error})"
    tags = ("filename", "size", "object")  # other tools have an <annotation>, too
    if root.tag != "annotation" or all(root.find(tag) is None for tag in tags):
        return f"<{root.tag}>"
    return root


def _read_voc(tree: Tree, options: Options, summary: Summary) -> Contents:
    """Read XML files next to their images or in ``Annotations``.

    Coordinates are used unchanged, with 0 as the first pixel. The VOC devkit counts
    from 1, but current tools do not.
    """
    samples = []
    for path in tree.with_suffix(".xml"):
        root = _parse_voc(tree, path)
        if isinstance(root, str):
            summary.drop("XML files that are not VOC annotations", f"{path}: {root}")
            continue
        stated = root.findtext("filename") or root.findtext("path") or ""
        image = tree.image_of_label(path, stated)
        if image is None:
            summary.drop(why_no_image(tree, path), path)
            continue
        boxes = list(_boxes_of_voc(root, path, summary))
        sides = [root.findtext(f"size/{key}") or "" for key in ("width", "height")]
        samples.append(Sample(image, path, boxes, size_of(numbers(sides))))
    return Contents(samples, _splits(tree, samples, summary))


def _boxes_of_voc(
    root: ElementTree.Element, path: str, summary: Summary
) -> Iterator[Box]:
    for number, record in enumerate(root.findall("object"), start=1):
        place = f"{path}: object {number}"
        names = {(tag.text or "").strip() for tag in record.findall("name")}
        name = names.pop() if len(names) == 1 else ""
        difficult = is_set(record.findtext("difficult"), "difficult", place, summary)
        # An object is one box, but some tools group those of a class.
        for box in record.findall("bndbox") or [ElementTree.Element("bndbox")]:
            keys = ("xmin", "ymin", "xmax", "ymax")
            words = [tag.text or "" for key in keys for tag in box.findall(key)]
            corners = numbers(words)
            if not name or corners is None or len(corners) != 4:
                what = "objects without a name or a box of four numbers"
                quoted = f"name {name!r}, box {' '.join(words)!r:.80}"
                summary.drop(what, f"{place}: {quoted}")
                continue
            if difficult:
                summary.note(_DIFFICULT, place)
            x1, y1, x2, y2 = corners
            yield Box((x1, y1, x2, y2), name, f"object {number}", crowd=difficult)


def is_yolo_shape(words: list[str]) -> bool:
    """Whether the number of words fits a box, or a polygon of 3 or more points."""
    return len(words) == 5 or (len(words) >= 7 and len(words) % 2 == 1)


def kind_of_line(line: str) -> str | None:
    """``yolo``, ``kitti`` or ``dota`` by the form of a line; None for others."""
    words = line.split()
    if len(words) in (15, 16) and numbers(words[1:]) and not numbers(words[:1]):
        return "kitti"
    if len(words) in (9, 10) and numbers(words[:8]) and not numbers(words[8:9]):
        return "dota"
    if re.fullmatch(r"\d+(\.0+)?", words[0]) and is_yolo_shape(words):
        values = numbers(words[1:])
        if values and all(map(is_share, values)):
            return "yolo"
    return None


def problem_of_line(line: str) -> str:
    """Quote a line and name the rule of the nearest format that it breaks."""
    words = line.split()
    no_numbers = [word for word in words if not numbers([word])]
    spaced = re.sub("[,;]", " ", line)
    if spaced != line and spaced.strip() and kind_of_line(spaced):
        problem = "columns are separated by spaces, not by commas"
    elif kind_of_line(line.replace(",", ".")):
        problem = "decimals have a point, not a comma"
    elif len(words) in (15, 16):
        wrong = no_numbers[-1] if no_numbers else words[0]
        problem = f"KITTI has a class and then numbers, not {wrong!r}"
    elif len(words) == 5 and no_numbers == words[:1]:
        problem = "a YOLO label begins with the number of its class"
    elif len(words) == 6 and not no_numbers:
        problem = (
            "a YOLO label has 5 numbers; a 6th is the confidence of a detection, which "
            "is not ground truth, or the angle of a rotated box (write its 4 corners)"
        )
    elif (
        len(words) >= 5
        and not no_numbers
        and max(map(abs, numbers(words[1:]) or ())) > 1
    ):
        problem = "YOLO coordinates are fractions of the image (0 to 1), not pixels"
    else:
        problem = (
            f"{len(words)} columns, but YOLO has 5 (class number, centre x, centre y, "
            "width, height), DOTA 9 or 10 (8 numbers, class, difficult), KITTI 15"
        )
    return f"{line[:80]!r}: {problem}"


def _named_like_images(tree: Tree) -> list[str]:
    files = tree.with_suffix(".txt")
    return [path for path in files if stem(path).lower() in tree.images_by_stem]


def why_no_image(tree: Tree, path: str) -> str:
    """Why a label file has no image, for a count."""
    several = len(tree.images_by_stem.get(stem(path).lower(), ())) > 1
    return f"annotation files {'of several images' if several else 'without an image'}"


def first_problem(tree: Tree) -> str | None:
    """The first line, in a file named like an image, that is a label of no format.

    Without such files, that label files have other names.
    """
    for path in _named_like_images(tree):
        for number, line in enumerate(tree.glanced(path), start=1):
            if line and kind_of_line(line) is None:
                return f"{path}:{number}: {problem_of_line(line)}"
    labels = [path for path in tree.with_suffix(".txt") if kind_of_file(tree, path)]
    if labels and tree.images:
        return (
            f"{len(labels)} label files such as {labels[0]}, but none is named like an "
            f"image, such as {tree.images[0]}; give both the same name"
        )
    return None


def kind_of_file(tree: Tree, path: str) -> str | None:
    """The format of a label file by its first recognizable line."""
    for line in filter(None, tree.glanced(path)):
        if not line.lower().startswith(_HEADERS):
            return kind_of_line(line)
    return None


def recognise_kind(tree: Tree, kind: str) -> str | None:
    """Evidence that the text files named like images are mostly of a kind, or None."""
    named = _named_like_images(tree)
    step = max(len(named) // _LOOKED_AT, 1)
    kinds = Counter(kind_of_file(tree, path) for path in named[::step])
    kinds.pop(None, None)
    if kinds and kinds.most_common(1)[0][0] == kind:
        return f"{len(named)} label files such as {named[0]}"
    return None


def _read_labels(tree: Tree, kind: str, summary: Summary) -> Contents:
    """Read all text files of a kind, and empty ones in their folders."""
    kinds = {path: kind_of_file(tree, path) for path in tree.with_suffix(".txt")}
    folders = {parent(path) for path, found in kinds.items() if found == kind}
    samples = []
    for path, found in kinds.items():
        if found != kind and (found is not None or parent(path) not in folders):
            continue
        if (image := tree.image_of_label(path)) is not None:
            boxes = list(_boxes_of_text(tree, path, kind, summary))
            samples.append(Sample(image, path, boxes))
        elif found == kind:
            summary.drop(why_no_image(tree, path), path)
    return Contents(samples, _splits(tree, samples, summary))


def _boxes_of_text(tree: Tree, path: str, kind: str, summary: Summary) -> Iterator[Box]:
    for number, line in tree.numbered(path):
        place, words = f"{path}:{number}", line.split()
        if line.lower().startswith(_HEADERS):
            continue
        if kind_of_line(line) != kind:
            what = f"lines that are not {kind.upper()} labels"
            summary.drop(what, f"{place}: {problem_of_line(line)}")
            continue
        if kind == "dota":  # four corners, class, difficult (Xia et al. 2018)
            corners = enclosing_box([float(word) for word in words[:8]])
            crowd = is_set("".join(words[9:]), "difficult", place, summary)
            if crowd:
                summary.note(_DIFFICULT, place)
            yield Box(corners, words[8], number, crowd)
        elif words[0] == "DontCare":
            summary.drop("DontCare regions", place)
        else:  # class, truncated, occluded, alpha, box, 7 of the 3D box, score
            if len(words) == 16:
                summary.note(_SCORED, f"{place}: {words[15]}")
            x1, y1, x2, y2 = map(float, words[4:8])
            yield Box((x1, y1, x2, y2), words[0], number)


def _read_kitti(tree: Tree, options: Options, summary: Summary) -> Contents:
    contents = _read_labels(tree, "kitti", summary)
    scored = summary.noted.get(_SCORED)
    if scored is not None and options.format != "kitti_detections":
        raise DataError(
            f"{tree.root}: {scored.times} lines have a 16th column, which is a score "
            f"(for instance {scored.example}): these are detections of a model, not "
            "ground truth. Use the labels with 15 columns, or train on the detections "
            "with format='kitti_detections'."
        )
    return contents


def yolo_boxes(
    tree: Tree, path: str, names: tuple[str, ...], keypoints: int, summary: Summary
) -> Iterator[Box]:
    """The boxes of a YOLO label file, relative to the image; keypoints are left out."""
    for number, line in tree.numbered(path):
        words, place = line.split(), f"{path}:{number}"
        if keypoints and len(words) == 5 + keypoints:
            words = words[:5]
        values = numbers(words)
        if values is None or not is_yolo_shape(words):
            what = "lines that are not a box or polygon of a class"
            summary.drop(what, f"{place}: {problem_of_line(line)}")
        elif not values[0].is_integer() or not 0 <= values[0] < len(names):
            what = f"{place}: {words[0]}; there are 0 to {len(names) - 1}"
            summary.drop("boxes of an unknown class number", what)
        elif not all(map(is_share, values[1:])):
            what = "boxes that are not fractions of the image"
            summary.drop(what, f"{place}: {problem_of_line(line)}")
        else:
            shape = values[1:]
            if len(shape) == 4:
                x, y, w, h = shape
                shape = (x - w / 2, y - h / 2, x + w / 2, y + h / 2)
            else:
                shape = enclosing_box(shape)
            yield Box(shape, names[int(values[0])], number)


def _splits(
    tree: Tree, samples: Sequence[Sample], summary: Summary
) -> dict[str, list[Sample]]:
    """Splits by ``ImageSets/train.txt``, ``ImageSets/Main/train.txt`` etc.

    Without these lists, by folders named like splits, or by other lists. Lists of one
    name in several folders (VOC2007, VOC2012) are joined; those per class are skipped.
    """
    splits: dict[str, list[Sample]] = {}
    by_stem: dict[str, list[Sample]] = {}
    of_source = {id(s): tree.split_of_folder(parent(s.source)) for s in samples}
    # KITTI has equal names in training/ and testing/.
    for sample in sorted(samples, key=lambda s: of_source[id(s)] != "train"):
        for name in {stem(sample.source), stem(sample.image)}:
            by_stem.setdefault(name, []).append(sample)
    for path, base in _lists(tree, by_stem).items():
        names = list(tree.numbered(path))
        if all(re.search(r"\s(-1|0|1)$", n) and n not in by_stem for _, n in names):
            continue  # also an empty one
        split = split_name(stem(path)) or stem(path)
        for number, name in names:
            if (found := _listed(name, by_stem, base)) is not None:
                splits.setdefault(split, []).append(found)
            else:
                what = "names in a list of images without an annotation"
                summary.drop(what, f"{path}:{number}: {name}")
    return splits or by_folder(
        samples,
        lambda one: of_source[id(one)] or tree.split_of_folder(parent(one.image)),
    )


def _lists(tree: Tree, by_stem: Mapping[str, list[Sample]]) -> dict[str, str]:
    """Lists of images, and the folder that each speaks of: those in ``ImageSets``.

    Without any, and without folders of splits, a file ``train`` and one of each other
    split whose lines are names of images.
    """
    found: dict[str, str] = {}
    others: dict[str, str] = {}  # by split
    is_clear = len({*map(tree.split_of_folder, tree.folders)} - {None}) < 2
    for path in tree.with_suffix(".txt"):
        parts, split = parent(path).split("/"), split_name(stem(path))
        if "ImageSets" in parts:
            is_clear = False
            if parts[-1] in ("ImageSets", "Main"):
                parts = parts[: parts.index("ImageSets")]
                found[path] = "".join(f"{part}/" for part in parts)
        elif split is not None:
            lines = [line for line in tree.glanced(path) if line]
            known = sum(_listed(line, by_stem, "") is not None for line in lines)
            if 2 * known > len(lines):
                is_clear &= others.setdefault(split, path) == path
    is_clear &= len(others) > 1 and bool({"train", "trainval"} & {*others})
    return found or (dict.fromkeys(others.values(), "") if is_clear else {})


def _listed(line: str, by_stem: Mapping[str, list[Sample]], base: str) -> Sample | None:
    """The sample below ``base`` that a line of a list names.

    The name may be a path and have a suffix, and other columns behind it.
    """
    for name in (line, line.split()[0]):
        path = name.replace("\\", "/")
        suffix = PurePosixPath(path).suffix.lower()
        is_file = suffix in IMAGE_SUFFIXES or suffix in (".xml", ".txt")
        key = stem(path) if is_file else path.rpartition("/")[2]
        near = [s for s in by_stem.get(key, ()) if s.source.startswith(base)]
        # Among equal names, the folder of the line decides.
        near.sort(key=lambda s: not parent(s.image).endswith(parent(path)))
        if near:
            return near[0]
    return None


VOC = Format(
    name="voc",
    looks_for="Annotations/*.xml with images in JPEGImages/, or *.xml next to them",
    recognise=_recognise_voc,
    read=_read_voc,
    problem=_problem_of_voc,
)
KITTI = Format(
    name="kitti",
    looks_for="label_2/*.txt with 15 columns, with images in image_2/",
    recognise=lambda tree: recognise_kind(tree, "kitti"),
    read=_read_kitti,
    problem=first_problem,
)
KITTI_DETECTIONS = replace(KITTI, name="kitti_detections", guessed=False)
DOTA = Format(
    name="dota",
    looks_for="labelTxt/*.txt with 8 coordinates and a class, with images in images/",
    recognise=lambda tree: recognise_kind(tree, "dota"),
    read=lambda tree, _, summary: _read_labels(tree, "dota", summary),
    problem=first_problem,
)
