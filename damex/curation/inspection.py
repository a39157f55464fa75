"""The whole check of a mixture, and what of it a training does before it begins."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from damex.commandline.bar import Bar
from damex.curation.annotations import check_records
from damex.curation.boxes import Expectations
from damex.curation.classes import ClassCounts, check_class_names, check_classes
from damex.curation.findings import Finding, Place, capped
from damex.curation.images import (
    ImageRecord,
    check_existence,
    check_look,
    image_records,
    look_at,
)
from damex.curation.leaks import find_leaks, same_files
from damex.curation.records import parse_records
from damex.curation.sources import Source, expectations, sources_of
from damex.datasets.spec import SPLITS, parse_mixture

# Of the order in which images are opened where time may not suffice for all.
SEED = 0
# Of a training, for opening images; it always looks whether all of them are there.
SECONDS = 20.0
# Findings in the log file of a training.
MAX_LOGGED = 200


@dataclass
class Inspection:
    """What was checked and found.

    Args:
        findings: In the order of datasets and files.
        images: All images that annotation files list.
        num_boxes: How many annotations were read.
        num_datasets: How many datasets were looked at.
    """

    findings: list[Finding] = field(default_factory=list)
    images: list[ImageRecord] = field(default_factory=list)
    num_boxes: int = 0
    num_datasets: int = 0

    def add_dataset(
        self,
        sources: Iterable[Source | Finding],
        expected_of: Callable[[str], Expectations],
        rename: Mapping[str, str],
        progress: Bar,
    ) -> None:
        """Check the annotations of one dataset.

        Args:
            sources: Its splits, or what is wrong with them.
            expected_of: What the config says about a split.
            rename: As in the mixture entry.
            progress: Hears which file is read.
        """
        self.num_datasets += 1
        counts: dict[str, list[ClassCounts]] = {}
        expected = Expectations()
        for source in sources:
            if isinstance(source, Finding):
                self.findings.append(source)
                continue
            progress.begin(f"read {source.place.file}", None)
            expected = expected_of(source.split)
            found = self._add_source(source, expected)
            if found is not None:
                counts.setdefault(source.split, []).append(found)
        train = [_joined(counts.pop("train"))] if "train" in counts else []
        others = [_joined(found) for found in counts.values()]
        first = train[0] if train else None
        self.findings += check_classes(first, others, expected, rename)

    def _add_source(self, source: Source, expected: Expectations) -> ClassCounts | None:
        document, findings = source.read()
        self.findings += findings
        if document is None:
            return None
        records, findings = parse_records(document, source.place)
        self.findings += findings
        if records is None:
            return None
        self.findings += check_class_names(document["categories"], source.place)
        self.findings += check_records(records, source.place, expected)
        self.num_boxes += len(records.annotations)
        self.images += image_records(
            records,
            source.place,
            source.split,
            source.images,
            applies_exif=expected.applies_exif,
        )
        return ClassCounts.of(records, source.place, document["categories"])

    def check_images(
        self, *, quick: bool, progress: Bar, seconds: float = float("inf")
    ) -> None:
        """Check the image files, and compare the images of all datasets.

        Args:
            quick: Look at headers alone, and compare paths in place of content.
            progress: Hears of each image.
            seconds: When to stop opening images.
        """
        progress.begin("look for files", None)
        there, missing = check_existence(self.images)
        found = missing
        if seconds < float("inf"):
            random.Random(SEED).shuffle(there)
        progress.begin("read headers" if quick else "decode images", len(there))
        looks = look_at(
            there, decode=not quick, advance=progress.advance, seconds=seconds
        )
        for image, look in zip(there, looks, strict=False):
            found += check_look(image, look)
        if len(looks) < len(there):
            found.append(_not_all(len(looks), len(there), seconds))
        progress.begin("compare images", None)
        seen = there[: len(looks)]
        found += same_files(there) if quick else find_leaks(seen, looks)
        self.findings += capped(found)


def check_config(
    cfg: Mapping[str, Any],
    *,
    quick: bool,
    splits: Sequence[str] = SPLITS,
    progress: Bar | None = None,
    seconds: float = float("inf"),
) -> Inspection:
    """Check the datasets of a config.

    Args:
        cfg: A config with a ``mixture``.
        quick: Do what needs no decoding of images.
        splits: Those to check.
        progress: Hears what is done.
        seconds: When to stop opening images.

    Raises:
        ConfigError: If the mixture itself cannot work.
    """
    progress = progress or Bar()
    inspection = Inspection()
    for spec in parse_mixture(cfg["mixture"]):

        def expected_of(split: str, spec: Any = spec) -> Expectations:
            return expectations(cfg, spec, split)

        sources = sources_of(spec, splits)
        inspection.add_dataset(sources, expected_of, spec.rename, progress)
    inspection.check_images(quick=quick, progress=progress, seconds=seconds)
    return inspection


def errors_of(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Those that a dataset cannot be used with."""
    return (finding for finding in findings if finding.level == "error")


def _joined(found: Sequence[ClassCounts]) -> ClassCounts:
    """Counts of a split that is several files; the first one stands for them."""
    if len(found) == 1:
        return found[0]
    boxes: dict[str, int] = {}
    for counts in found:
        for name, count in counts.boxes.items():
            boxes[name] = boxes.get(name, 0) + count
    parents = frozenset().union(*(counts.parents for counts in found))
    return ClassCounts(found[0].place, boxes, parents)


def _not_all(looked: int, total: int, seconds: float) -> Finding:
    text = (
        f"{looked} of {total} image files were opened in {seconds:g} s, drawn at "
        "random; all were looked for. damex data check opens all."
    )
    return Place("all datasets", "image files").finding("not-checked", None, text)


def refusal(cfg: Mapping[str, Any], logger: logging.Logger) -> str | None:
    """Do the quick check of what a config trains and validates on.

    Args:
        cfg: A config with a ``mixture``.
        logger: Hears of warnings in one line, and of all findings as information.

    Returns:
        Why there can be no training; None if there can.
    """
    splits = ["train", *(["val"] if cfg.get("val_dataloader") else [])]
    found = check_config(cfg, quick=True, splits=splits, seconds=SECONDS).findings
    findings = [_of_training(finding) for finding in found]
    for finding in findings[:MAX_LOGGED]:
        logger.info(f"data check: {finding.level}: {finding.message}")
    errors = [*errors_of(findings)]
    if errors:
        return _refuse(errors)
    kinds = _kinds(finding for finding in findings if finding.level == "warning")
    if kinds:
        logger.warning(f"data check: {kinds}; damex data check CONFIG says more.")
    for finding in findings:
        if finding.kind == "not-checked":
            logger.warning(f"data check: {finding.message}")
    return None


def _of_training(finding: Finding) -> Finding:
    """An image in train and in val spoils a score, but may be there for a trial."""
    is_leak = finding.kind == "leak-identical"
    return replace(finding, level="warning") if is_leak else finding


def _refuse(errors: Sequence[Finding]) -> str:
    rest = sum(error.count for error in errors) - errors[0].count
    if not rest:
        return errors[0].message
    return (
        f"{errors[0].message} There are {rest} more errors in the data "
        f"({_kinds(errors)}); damex data check CONFIG lists them."
    )


def _kinds(findings: Any) -> str:
    counts: Counter[str] = Counter()
    for finding in findings:
        counts[finding.kind] += finding.count
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
