"""Convert a folder of images and annotations to one COCO file per split."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from damex.datasets.formats.coco import COCO
from damex.datasets.formats.csv_boxes import CSV
from damex.datasets.formats.documents import DocumentWriter
from damex.datasets.formats.label_files import DOTA, KITTI, KITTI_DETECTIONS
from damex.datasets.formats.records import Contents, Format, Ledger, Options
from damex.datasets.formats.splits import choose_splits
from damex.datasets.formats.summary import SplitSummary, Summary
from damex.datasets.formats.tree import Tree, parent
from damex.datasets.formats.voc import VOC
from damex.datasets.formats.wider_face import WIDER_FACE
from damex.datasets.formats.yolo import YOLO
from damex.errors import ConfigError, DataError, did_you_mean
from damex.files import write_json

FORMATS: tuple[Format, ...] = (
    *(COCO, VOC, YOLO, KITTI, DOTA, WIDER_FACE, CSV),
    KITTI_DETECTIONS,
)
SUMMARY_FILE = "summary.json"


class Conversion(NamedTuple):
    """Folder of a dataset's COCO files (``train.json`` etc.), and their summary."""

    folder: Path
    summary: Summary

    def file(self, split: str) -> Path | None:
        """The COCO file of a split, or None; ``test`` falls back to ``val``."""
        if split == "test" and split not in self.summary.splits:
            split = "val"
        return self.folder / f"{split}.json" if split in self.summary.splits else None


def open_root(root: str | Path) -> Tree:
    """List the files of a dataset; ConfigError if the folder is missing."""
    path = Path(os.path.expanduser(root))  # noqa: PTH111 - expanduser of Path may raise
    if path.is_file():
        raise ConfigError(
            f"root={str(root)!r} is a file; give the folder: root={str(path.parent)!r}."
        )
    if not path.is_dir():
        raise ConfigError(
            f"root={str(root)!r}: there is no such folder (seen from {Path.cwd()})."
        )
    try:
        return Tree(path.resolve())
    except OSError as error:
        raise ConfigError(f"root={str(root)!r} cannot be listed: {error}.") from error


def recognise(tree: Tree, told: str | None) -> tuple[Format, str]:
    """Return the format of a folder and the evidence; a given name is not guessed.

    Raises:
        ConfigError: If the name is unknown, nothing fits, or several formats do.
    """
    names = {fmt.name: fmt for fmt in FORMATS}
    if told is not None:
        if told not in names:
            raise ConfigError(
                f"format={told!r} is unknown; {did_you_mean(told, names)}"
            )
        evidence = names[told].recognise(tree)
        if evidence is None:
            raise ConfigError(
                f"{tree.root} does not look like {told}: there is no "
                f"{names[told].looks_for}. It holds {tree.describe()}. "
                f"{names[told].fault(tree) or ''}".strip()
            )
        return names[told], evidence
    found = [
        (fmt, evidence)
        for fmt in FORMATS
        if fmt.guessed and (evidence := fmt.recognise(tree)) is not None
    ]
    if len(found) > 1:
        seen = "; ".join(f"{fmt.name}: {evidence}" for fmt, evidence in found)
        raise ConfigError(
            f"{tree.root} holds annotations in {len(found)} formats ({seen}); choose "
            f"one with format={found[0][0].name!r}, or let root be a folder inside."
        )
    if not found:
        known = [fmt for fmt in FORMATS if fmt.guessed]
        wanted = "; ".join(f"{fmt.name}: {fmt.looks_for}" for fmt in known)
        fault = next(filter(None, (fmt.fault(tree) for fmt in known)), None)
        raise ConfigError(
            f"{tree.root} holds annotations in no format that damex knows: it has "
            f"{tree.describe()}. {fault or f'Looked for {wanted}'}."
        )
    return found[0]


def convert_tree(tree: Tree, options: Options, folder: Path) -> Conversion:
    """Read a dataset and write its COCO files and summary into an existing folder.

    Raises:
        ConfigError: If an option is invalid, or the format is ambiguous.
        DataError: If a file is broken, or no box is left.
    """
    fmt, evidence = recognise(tree, options.format)
    ledger = Ledger()
    if not tree.images:
        raise ConfigError(f"{tree.root} holds no images, only {tree.describe()}.")
    contents = fmt.read(tree, options, ledger)
    summary = Summary(str(tree.root), fmt.name, evidence, _classes(contents))
    summary.dropped, summary.noted = ledger.dropped, ledger.noted
    if contents.samples:
        splits = choose_splits(tree, contents, options, ledger)
        writer = DocumentWriter(tree.root, summary.classes, ledger)
        for split, samples in splits.items():
            document = writer.write(samples)
            summary.splits[split] = SplitSummary.of(document)
            document = {
                "info": dict(source=str(tree.root), format=fmt.name),
                **document,
            }
            write_json(folder / f"{split}.json", document)
    _note_unannotated(tree, contents, ledger)
    if not any(sum(split.boxes.values()) for split in summary.splits.values()):
        lost = "; ".join(
            f"{entry.times} {what}, for instance {entry.example}"
            for what, entry in ledger.dropped.items()
        )
        raise DataError(
            f"{tree.root} ({fmt.name}: {evidence}): no box is left. Left out: "
            f"{lost or 'nothing; the annotations are empty'}."
        )
    write_json(folder / SUMMARY_FILE, summary.to_dict(), indent=1)
    return Conversion(folder, summary)


def _classes(contents: Contents) -> tuple[str, ...]:
    if contents.classes is not None:
        return contents.classes
    return tuple(sorted({b.label for s in contents.samples for b in s.boxes}))


def _note_unannotated(tree: Tree, contents: Contents, ledger: Ledger) -> None:
    """Count unannotated images, only in folders with annotated ones."""
    used = {sample.image for sample in contents.samples}
    folders = {parent(image) for image in used}
    rest = [i for i in tree.images if i not in used and parent(i) in folders]
    if rest:
        ledger.drop("images without an annotation", rest[0], len(rest))
