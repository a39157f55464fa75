"""The complete check of a mixture, and the quick one before a training."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from damex.commandline.run import Bar
from damex.curation.classes import ClassCounts, check_classes
from damex.curation.images import check_existence, image_records, look_at
from damex.curation.leaks import find_leaks, same_files
from damex.curation.sources import Source, expectations, sources_of
from damex.datasets.coco_checks import check_coco
from damex.datasets.coco_records import Expectations, Records
from damex.datasets.findings import Finding, Place, capped
from damex.datasets.image_checks import ImageRecord, check_look, check_scales
from damex.datasets.label_space import LabelSpace
from damex.datasets.spec import SPLITS, DatasetSpec, parse_mixture
from damex.errors import ConfigError, DataError

# Seed of the order of images, as time may not suffice for all.
SEED = 0
# For opening images before a training; existence is always checked.
SECONDS = 20.0
# Findings in the log file of a training
MAX_LOGGED = 200


@dataclass
class Inspection:
    """Findings, with the images of all annotation files and the numbers checked.

    ``quick`` leaves images undecoded. ``counted`` are the files that were checked.
    """

    quick: bool = False
    findings: list[Finding] = field(default_factory=list)
    images: list[ImageRecord] = field(default_factory=list)
    num_boxes: int = 0
    num_datasets: int = 0
    counted: dict[Place, ClassCounts | None] = field(default_factory=dict)

    def add_dataset(
        self,
        sources: Iterable[Source | Finding],
        expected_of: Callable[[str], Expectations],
        rename: Mapping[str, str],
        progress: Bar,
    ) -> None:
        """Check the annotations of one dataset (sources or findings about them)."""
        self.num_datasets += 1
        counts: dict[str, list[ClassCounts]] = {}
        expected = Expectations()
        for source in sources:
            if isinstance(source, Finding):
                self.findings.append(source)
                continue
            progress.begin(f"read {source.place.file}", None)
            split = source.place.split
            expected = expected_of(split)
            found = self._add_source(source, expected)
            if found is not None:
                counts.setdefault(split, []).append(found)
        train = [_joined(counts.pop("train"))] if "train" in counts else []
        others = [_joined(found) for found in counts.values()]
        first = train[0] if train else None
        self.findings += check_classes(first, others, expected, rename)

    def _add_source(self, source: Source, expected: Expectations) -> ClassCounts | None:
        if source.place not in self.counted:
            document, findings = source.read()
            self.findings += findings
            if any(errors_of(findings)):
                return None
            self.add_document(document, source.place, expected, source.images)
        return self.counted[source.place]

    def add_document(
        self, document: Any, place: Place, expected: Expectations, folder: Path
    ) -> tuple[Records | None, list[Finding]]:
        """Check a COCO document with images in ``folder``; returns what that finds."""
        records, findings = check_coco(document, place, expected)
        self.findings += findings
        self.counted[place] = None if records is None else ClassCounts.of(records)
        if records is not None:
            images = image_records(records, folder, expected, with_boxes=not self.quick)
            self.findings += capped(check_scales(images, expected.kept_scales))
            self.num_boxes += len(records.annotations)
            self.images += images
        return records, findings

    def check_images(self, *, progress: Bar, seconds: float = float("inf")) -> None:
        """Check the image files, and compare the images of all datasets.

        ``quick`` only reads headers, and compares paths instead of content; images stop
        being opened after ``seconds``.
        """
        quick = self.quick
        progress.begin("look for files", None)
        there, found = check_existence(self.images)
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
    loaded: Inspection | None = None,
) -> Inspection:
    """Check the datasets of a config with a ``mixture``.

    ``quick`` does not decode images; images stop being opened after ``seconds``. Files
    that ``loaded`` has checked are not read again.

    Raises:
        ConfigError: If the mixture itself is invalid.
    """
    progress = progress or Bar()
    inspection = loaded or Inspection(quick=quick)
    specs = parse_mixture(cfg["mixture"])
    space, fault = _label_space(cfg, specs)
    required = ["train", *(s for s in splits if cfg.get(f"{s}_dataloader"))]
    for spec in specs:
        classes = None
        if space is not None:
            classes = tuple(space.dataset_classes[space.dataset_id(spec.name)])

        def expected_of(
            split: str, spec: Any = spec, classes: Any = classes
        ) -> Expectations:
            return expectations(cfg, spec, split, classes)

        sources = sources_of(spec, splits, required)
        inspection.add_dataset(sources, expected_of, spec.rename, progress)
    if fault and not any(errors_of(inspection.findings)):
        place = Place("all datasets", "label space")
        inspection.findings.append(place.finding("unknown-class", None, fault))
    inspection.check_images(progress=progress, seconds=seconds)
    return inspection


def checked_while_loading(
    cfg: Mapping[str, Any],
) -> tuple[Inspection, Callable[..., tuple[Records | None, list[Finding]]]]:
    """An inspection, and the ``check`` that adds to it what a dataset loads."""
    inspection = Inspection(quick=True)
    specs = {spec.name: spec for spec in parse_mixture(cfg["mixture"])}

    def check(
        document: Any, place: Place, expected: Expectations, folder: Path
    ) -> tuple[Records | None, list[Finding]]:
        used = expected.classes
        known = expectations(cfg, specs[place.dataset], place.split, used)
        known = replace(known, on_bad_box=expected.on_bad_box)
        return inspection.add_document(document, place, known, folder)

    return inspection, check


def _label_space(
    cfg: Mapping[str, Any], specs: Sequence[DatasetSpec]
) -> tuple[LabelSpace | None, str]:
    """The label space of the training, or why it cannot be built."""
    dataset = (cfg.get("train_dataloader") or {}).get("dataset") or {}
    mode = dataset.get("label_space") or cfg.get("label_space") or "union"
    try:
        return LabelSpace.of(specs, mode), ""
    except (ConfigError, DataError) as error:
        return None, str(error)


def errors_of(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Findings that prevent a training."""
    return (finding for finding in findings if finding.level == "error")


def _joined(found: Sequence[ClassCounts]) -> ClassCounts:
    """Counts of a split of several files, with the place of the first."""
    if len(found) == 1:
        return found[0]
    boxes: dict[str, int] = {}
    for counts in found:
        for name, count in counts.boxes.items():
            boxes[name] = boxes.get(name, 0) + count
    return ClassCounts(found[0].place, boxes)


def _not_all(looked: int, total: int, seconds: float) -> Finding:
    text = (
        f"{looked} of {total} image files were opened in {seconds:g} s, drawn at "
        "random; all were looked for. damex data check opens all."
    )
    return Place("all datasets", "image files").finding("not-checked", None, text)


def refusal(
    cfg: Mapping[str, Any], logger: logging.Logger, loaded: Inspection | None = None
) -> str | None:
    """Run the quick check on a config's training and validation data.

    Files that ``loaded`` has checked are not read again. The log gets warnings in one
    line, and all findings at level info. Returns why training is not possible, or None.
    """
    splits = ["train", *(["val"] if cfg.get("val_dataloader") else [])]
    findings = check_config(
        cfg, quick=True, splits=splits, seconds=SECONDS, loaded=loaded
    ).findings
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
