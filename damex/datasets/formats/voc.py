"""Pascal VOC: one XML file per image, next to it or in ``Annotations``.

Coordinates are used unchanged, with 0 as the first pixel. The VOC devkit counts from 1,
but current tools do not.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TypeGuard
from xml.etree import ElementTree

from damex.datasets.formats.records import (
    Box,
    Contents,
    Format,
    Ledger,
    Options,
    Sample,
    numbers,
    size_of,
)
from damex.datasets.formats.splits import splits_by_folder, splits_by_image_sets
from damex.datasets.formats.tree import (
    Tree,
    parent,
    replace_part,
    split_of_folder,
    stem,
)

_CORNERS = ("xmin", "ymin", "xmax", "ymax")
_LOOKED_AT = 20
_ENCODING = re.compile(rb"<\?xml[^>]*encoding=[\"']([\w.-]+)")


def _recognise(tree: Tree) -> str | None:
    files = tree.with_suffix(".xml")
    for path in files[:_LOOKED_AT]:
        if _is_annotation(_parse(tree, path)):
            return f"{len(files)} XML files such as {path}"
    return None


def _fault(tree: Tree) -> str | None:
    for path in tree.with_suffix(".xml")[:_LOOKED_AT]:
        if isinstance(root := _parse(tree, path), Exception):
            return f"{path} is not an XML file ({root})"
    return None


def _is_annotation(
    root: ElementTree.Element | Exception,
) -> TypeGuard[ElementTree.Element]:
    """Whether it is VOC's, not another ``<annotation>``, and of an image."""
    if isinstance(root, Exception) or root.tag != "annotation":
        return False
    return any(root.find(tag) is not None for tag in ("filename", "size", "object"))


def _parse(tree: Tree, path: str) -> ElementTree.Element | Exception:
    """The root element of a file, or the parse error."""
    raw = (tree.root / path).read_bytes()
    content: str | bytes = raw
    # Python supports encodings that the parser does not, such as GBK.
    if (found := _ENCODING.match(raw)) is not None:
        with contextlib.suppress(ValueError, LookupError):
            content = raw.decode(found[1].decode())
    try:
        return ElementTree.fromstring(content)
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        return error


def _read(tree: Tree, options: Options, ledger: Ledger) -> Contents:
    samples = {}
    for path in tree.with_suffix(".xml"):
        root = _parse(tree, path)
        if not _is_annotation(root):
            reason = root if isinstance(root, Exception) else f"<{root.tag}>"
            what = "XML files that are no VOC annotation"
            ledger.drop(what, f"{path}: {reason}")
            continue
        image = _image(tree, path, root)
        if image is None:
            ledger.drop("annotation files without an image", path)
            continue
        boxes = list(_boxes(root, path, ledger))
        sides = [root.findtext(f"size/{key}") or "" for key in ("width", "height")]
        samples[path] = Sample(image, path, boxes, size_of(numbers(sides)))
    index = {(_base(path), stem(path)): sample for path, sample in samples.items()}

    def find(base: str, name: str) -> Sample | None:
        return index.get((base, name))

    listed = splits_by_image_sets(tree, find, ledger)
    found = list(samples.values())
    return Contents(found, listed or splits_by_folder(found))


def _base(path: str) -> str:
    """The parent folder of ``Annotations``, which image sets refer to."""
    folder = parent(path)
    return parent(folder) if folder.split("/")[-1] == "Annotations" else folder


def _image(tree: Tree, path: str, root: ElementTree.Element) -> str | None:
    """The image of an annotation: by its file name, else by the stated one."""
    folder = parent(path)
    near = [
        found
        for name in ("JPEGImages", "images", "Images", "")
        if (found := replace_part(folder, "Annotations", name)) is not None
    ]
    near.append(folder)
    stated = root.findtext("filename") or root.findtext("path") or ""
    split = split_of_folder(folder)
    return tree.locate_image(stem(path), near, split) or (
        tree.locate_image(stated, near, split) if stated.strip() else None
    )


def _boxes(root: ElementTree.Element, path: str, ledger: Ledger) -> Iterator[Box]:
    for number, record in enumerate(root.findall("object"), start=1):
        place = f"{path}: object {number}"
        name = (record.findtext("name") or "").strip()
        words = [record.findtext(f"bndbox/{key}") or "" for key in _CORNERS]
        corners = numbers(words)
        if not name or corners is None:
            what = "objects without a name or a box of four numbers"
            ledger.drop(what, f"{place}: name {name!r}, box {' '.join(words)!r:.80}")
            continue
        difficult = (record.findtext("difficult") or "").strip() == "1"
        if difficult:
            ledger.note("objects marked difficult: kept as crowd", place)
        x1, y1, x2, y2 = corners
        yield Box((x1, y1, x2, y2), name, f"object {number}", crowd=difficult)


VOC = Format(
    name="voc",
    looks_for="Annotations/*.xml beside JPEGImages/, or *.xml beside the images",
    recognise=_recognise,
    read=_read,
    fault=_fault,
)
