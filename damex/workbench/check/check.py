"""The command ``damex data check``, and the quick check before a training."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from damex.datasets.coco_checks import check_coco
from damex.datasets.coco_records import Records
from damex.datasets.coco_schema import Expectations
from damex.datasets.findings import LEVELS, RULES, Finding, Location, truncate_findings
from damex.datasets.geometry import choose_tiles
from damex.datasets.image_files import ImageRecord, check_image, check_scales
from damex.datasets.spec import SPLITS, Source, parse_mixture
from damex.errors import ConfigError, printable
from damex.files import check_file, write_json
from damex.progress import Bar
from damex.workbench.check.classes import ClassCounts, check_classes, count_boxes
from damex.workbench.check.domains import check_looks, has_experts
from damex.workbench.check.images import (
    check_existence,
    find_leaks,
    probe_images,
    same_files,
)
from damex.workbench.check.sources import (
    class_mappings,
    expectations,
    image_records,
    mixture_config_of,
    read_source,
    sources_of,
)

SEED = 0  # of the order of images, as time may not suffice for all
SECONDS = 20.0  # to open images before a training; existence is always checked
MAX_LOGGED = 200  # findings in the log file of a training


def check(
    data: Sequence[str],
    *,
    cfg_options: Sequence[str],
    coco: str | None,
    images: str | None,
    json: str | None,
    quick: bool,
    examples: int,
) -> int:
    """Check the datasets of a config or folders, or a COCO file; 1 if it has errors."""
    if bool(data) == (coco is not None):
        raise ConfigError(
            "check takes a config or folders of datasets, or --coco FILE --images DIR; "
            "see --help."
        )
    if (coco is None) != (images is None):
        raise ConfigError("--coco FILE and --images DIR belong together; see --help.")
    if json is not None:
        check_file(Path(json))  # before the work
    started = time.monotonic()
    with Bar() as progress:
        if not data:
            path, found = Path(str(coco)), Inspection(quick=quick)
            source = Source(Location(path.stem, str(path)), path, Path(str(images)))
            found.add_dataset([source], lambda _: Expectations(), {}, progress)
            found.check_images(progress=progress)
        else:
            cfg = mixture_config_of(data, cfg_options)
            found = check_config(cfg, quick=quick, progress=progress)
    _print_report(found.findings, examples)
    scope = "without decoding images" if quick else "images decoded and compared"
    print(
        f"\n{_count_levels(found.findings)} in {found.num_datasets} "
        f"dataset{'s' * (found.num_datasets > 1)} with {len(found.images):,} images "
        f"and {found.num_boxes:,} boxes ({time.monotonic() - started:.0f} s, {scope})."
    )
    if json is not None:
        report = dict(findings=[finding.to_json() for finding in found.findings])
        write_json(json, report, indent=1)
    return 1 if any(errors_of(found.findings)) else 0


def _print_report(findings: Sequence[Finding], examples: int) -> None:
    """Print findings by dataset and kind: dropped records come first, then errors."""
    groups: dict[str, dict[tuple[str, str], list[Finding]]] = {}
    for finding in findings:
        kinds = groups.setdefault(finding.dataset, {})
        kinds.setdefault((finding.level, finding.kind), []).append(finding)
    for dataset, kinds in groups.items():
        lines = [f"\n{dataset}: {_count_levels(chain(*kinds.values()))}"]
        order = sorted(kinds, key=lambda k: (k[1] != "left-out", LEVELS.index(k[0])))
        for level, kind in order:
            same = kinds[level, kind]
            total = sum(finding.count for finding in same)
            lines.append(f"  {level:7} {kind} ({total:,}): {RULES[kind].meaning}")
            shown = same if kind == "left-out" else same[:examples]
            messages = (f.message.removeprefix(f"dataset {dataset!r}: ") for f in shown)
            lines += [f"      {message}" for message in messages]
            if len(same) > len(shown):
                lines.append(f"      ... and {len(same) - len(shown)} more findings")
        print(printable("\n".join(lines)))


def _count_levels(findings: Iterable[Finding]) -> str:
    counts = Counter(finding.level for finding in findings)
    return ", ".join(f"{counts[x]:,} {x}{'s' * (counts[x] != 1)}" for x in LEVELS)


@dataclass
class Inspection:
    """Findings, with the images of all annotation files and the numbers checked."""

    quick: bool = False  # leaves images undecoded
    findings: list[Finding] = field(default_factory=list)
    images: list[ImageRecord] = field(default_factory=list)
    num_boxes: int = 0
    num_datasets: int = 0
    # Boxes by class of each checked file; None if it is unreadable.
    boxes_of: dict[Location, Counter[str] | None] = field(default_factory=dict)

    def add_dataset(
        self,
        sources: Iterable[Source | Finding],
        expected_of: Callable[[str], Expectations],
        rename: Mapping[str, str],
        progress: Bar,
    ) -> None:
        """Check the annotations of one dataset (sources or findings about them)."""
        self.num_datasets += 1
        counts: dict[str, ClassCounts] = {}
        expected = Expectations()
        for source in sources:
            if isinstance(source, Finding):
                self.findings.append(source)
                continue
            location = source.location
            progress.begin(f"read {location.file}", None)
            expected = expected_of(location.split)
            if location not in self.boxes_of:
                document, findings = read_source(source)
                self.findings += findings
                if any(errors_of(findings)):
                    continue
                self.add_document(document, location, expected, source.images)
            if (boxes := self.boxes_of[location]) is not None:
                whole = ClassCounts(location, Counter())
                counts.setdefault(location.split, whole).boxes.update(boxes)
        train = counts.pop("train", None)
        self.findings += check_classes(train, [*counts.values()], expected, rename)

    def add_document(
        self, document: Any, location: Location, expected: Expectations, folder: Path
    ) -> tuple[Records | None, list[Finding]]:
        """Check a COCO document with images in ``folder``; returns what that finds."""
        records, findings = check_coco(document, location, expected)
        self.findings += findings
        self.boxes_of[location] = None if records is None else count_boxes(records)
        if records is not None:
            images = image_records(records, folder, expected, with_boxes=not self.quick)
            scales = check_scales(images, expected.kept_scales)
            self.findings += truncate_findings(scales)
            self.num_boxes += len(records.annotations)
            self.images += images
        return records, findings

    def check_images(self, *, progress: Bar, seconds: float = float("inf")) -> None:
        """Check the image files, and compare the images of all datasets.

        ``quick`` reads headers and ends, and compares paths instead of content; images
        stop being opened after ``seconds``.
        """
        quick = self.quick
        progress.begin("look for files", None)
        there, found = check_existence(self.images)
        if seconds < float("inf"):
            random.Random(SEED).shuffle(there)
        progress.begin("read headers" if quick else "decode images", len(there))
        infos = probe_images(
            there, decode=not quick, advance=progress.step, seconds=seconds
        )
        for image, info in zip(there, infos, strict=False):
            found += check_image(image, info)
        if len(infos) < len(there):
            text = (
                f"{len(infos)} of {len(there)} image files were opened in {seconds:g} "
                "s, drawn at random; all were looked for. damex data check opens all."
            )
            location = Location("all datasets", "image files")
            found.append(location.finding("not-checked", None, text))
        progress.begin("compare images", None)
        found += same_files(there) if quick else find_leaks(there[: len(infos)], infos)
        self.findings += truncate_findings(found)


def check_config(
    cfg: Mapping[str, Any],
    *,
    quick: bool,
    splits: Sequence[str] = SPLITS,
    progress: Bar | None = None,
    seconds: float = float("inf"),
    loaded: Inspection | None = None,
) -> Inspection:
    """Check the datasets of a config with a ``mixture``; ``tile="auto"`` is chosen.

    ``quick`` does not decode images; images stop being opened after ``seconds``. Files
    that ``loaded`` has checked are not read again. ConfigError if the mixture itself is
    invalid.
    """
    progress = progress or Bar()
    inspection = loaded or Inspection(quick=quick)
    choose_tiles(cfg)
    specs = parse_mixture(cfg["mixture"])
    mappings, problem = class_mappings(cfg, specs)
    required = ["train", *(s for s in splits if cfg.get(f"{s}_dataloader"))]
    for spec, used in zip(specs, mappings, strict=True):
        expected_of = partial(expectations, cfg, spec, classes=used)
        sources = sources_of(spec, splits, required)
        inspection.add_dataset(sources, expected_of, spec.rename, progress)
    if problem and not any(errors_of(inspection.findings)):
        location = Location("all datasets", "label space")
        inspection.findings.append(location.finding("unknown-class", None, problem))
    inspection.check_images(progress=progress, seconds=seconds)
    is_mixture = has_experts(cfg)
    if len(specs) > 1 and (is_mixture or not quick):
        progress.begin("compare datasets", None)
        groups = {spec.name: spec.group_name for spec in specs}
        looks = check_looks(inspection.images, groups, is_mixture=is_mixture)
        inspection.findings += looks
    return inspection


def errors_of(findings: Iterable[Finding]) -> Iterator[Finding]:
    """Findings that prevent a training."""
    return (finding for finding in findings if finding.level == "error")


def checked_while_loading(
    cfg: Mapping[str, Any],
) -> tuple[Inspection, Callable[..., tuple[Records | None, list[Finding]]]]:
    """An inspection, and the ``check`` that adds to it what a dataset loads."""
    inspection = Inspection(quick=True)
    specs = {spec.name: spec for spec in parse_mixture(cfg["mixture"])}

    def check(
        document: Any, location: Location, expected: Expectations, folder: Path
    ) -> tuple[Records | None, list[Finding]]:
        used = expected.classes
        known = expectations(cfg, specs[location.dataset], location.split, used)
        known = replace(known, on_bad_box=expected.on_bad_box)
        return inspection.add_document(document, location, known, folder)

    return inspection, check


def refusal(
    cfg: Mapping[str, Any], logger: logging.Logger, loaded: Inspection | None = None
) -> str | None:
    """Run the quick check on a config's training and validation data.

    Files that ``loaded`` has checked are not read again. The log gets warnings in one
    line, small objects and alike datasets in their own, and all findings at level info.
    Returns why training is not possible, or None.
    """
    splits = ["train", *(["val"] if cfg.get("val_dataloader") else [])]
    found = check_config(cfg, quick=True, splits=splits, seconds=SECONDS, loaded=loaded)
    findings = found.findings
    for finding in findings[:MAX_LOGGED]:
        logger.info(f"data check: {finding.level}: {finding.message}")
    if errors := [*errors_of(findings)]:
        rest = sum(error.count for error in errors) - errors[0].count
        more = (
            f" There are {rest} more errors in the data ({_kinds(errors[1:])}); damex "
            "data check, with the same config or folders, lists them."
        )
        return errors[0].message + (more if rest else "")
    if kinds := _kinds(finding for finding in findings if finding.level == "warning"):
        logger.warning(f"data check: {kinds}; run damex data check.")
    for finding in findings:
        if finding.kind in ("not-checked", "boxes-small") or (
            finding.kind == "looks-alike" and finding.level == "warning"
        ):
            logger.warning(f"data check: {finding.message}")
    return None


def _kinds(findings: Iterable[Finding]) -> str:
    counts: Counter[str] = Counter()
    for finding in findings:
        counts[finding.kind] += finding.count
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
