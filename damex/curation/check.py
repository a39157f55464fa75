"""The command ``damex data check``: find faults in data before training."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console

from damex.commandline.run import Bar
from damex.curation.inspection import Inspection, check_config, errors_of
from damex.curation.sources import coco_file
from damex.datasets.coco_records import Expectations
from damex.datasets.findings import KINDS, LEVELS, Finding, Place
from damex.datasets.spec import CocoSource
from damex.engine.config_files import mixture_config_of
from damex.errors import ConfigError
from damex.files import check_file, write_json


def check(
    config: str | None,
    *,
    cfg_options: Sequence[str],
    coco: str | None,
    images: str | None,
    json: str | None,
    quick: bool,
    examples: int,
) -> int:
    """Check the datasets of a config, or one COCO file; 1 if there is an error, else 0.

    Raises:
        ConfigError: If the command line or the mixture is invalid.
    """
    if (config is None) == (coco is None):
        raise ConfigError(
            "check takes a config or the folder of a dataset, or --coco FILE --images "
            "DIR; see --help."
        )
    if (coco is None) != (images is None):
        raise ConfigError("--coco FILE and --images DIR belong together; see --help.")
    if json is not None:
        check_file(Path(json))  # before the work
    started = time.monotonic()
    with Bar() as progress:
        if config is None:
            found = check_coco(str(coco), str(images), quick, progress)
        else:
            cfg = mixture_config_of(config, cfg_options)
            found = check_config(cfg, quick=quick, progress=progress)
    print_report(found.findings, Console(), examples=examples)
    _print_end(found, time.monotonic() - started, quick=quick)
    if json is not None:
        report = dict(findings=[finding.to_json() for finding in found.findings])
        write_json(json, report, indent=1)
    return 1 if any(errors_of(found.findings)) else 0


def check_coco(file: str, images: str, quick: bool, progress: Bar) -> Inspection:
    """Check a COCO file and its image folder; ``quick`` does not decode images."""
    path = Path(file)
    place = Place(path.stem, str(path))
    source = coco_file(place, CocoSource(path, Path(images)))
    inspection = Inspection(quick=quick)
    inspection.add_dataset([source], lambda _: Expectations(), {}, progress)
    inspection.check_images(progress=progress)
    return inspection


def print_report(
    findings: Sequence[Finding], console: Console, *, examples: int = 3
) -> None:
    """Print findings by dataset and kind, each with examples.

    Dropped records of converted folders come first, then errors.
    """
    for dataset in dict.fromkeys(finding.dataset for finding in findings):
        own = [finding for finding in findings if finding.dataset == dataset]
        lines = [f"\n{dataset}: {count_levels(own)}"]
        kinds = {(f.level, f.kind): None for f in own}
        order = sorted(kinds, key=lambda k: (k[1] != "left-out", LEVELS.index(k[0])))
        for level, kind in order:
            same = [f for f in own if (f.level, f.kind) == (level, kind)]
            shown = len(same) if kind == "left-out" else examples
            lines += _kind_lines(level, kind, same, shown)
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def _kind_lines(
    level: str, kind: str, findings: Sequence[Finding], examples: int
) -> list[str]:
    total = sum(finding.count for finding in findings)
    lines = [f"  {level:7} {kind} ({total:,}): {KINDS[kind].meaning}"]
    for finding in findings[:examples]:
        message = finding.message.removeprefix(f"dataset {finding.dataset!r}: ")
        lines.append(f"      {message}")
    if len(findings) > examples:
        lines.append(f"      ... and {len(findings) - examples} more findings")
    return lines


def count_levels(findings: Iterable[Finding]) -> str:
    """Number of findings of each level, in words."""
    counts = Counter(finding.level for finding in findings)
    plural = {"error": "errors", "warning": "warnings", "info": "infos"}
    return ", ".join(
        f"{counts[level]:,} {level if counts[level] == 1 else plural[level]}"
        for level in LEVELS
    )


def _print_end(found: Inspection, seconds: float, *, quick: bool) -> None:
    scope = "without decoding images" if quick else "images decoded and compared"
    print(
        f"\n{count_levels(found.findings)} in {found.num_datasets} "
        f"dataset{'s' * (found.num_datasets > 1)} with "
        f"{len(found.images):,} images and {found.num_boxes:,} boxes "
        f"({seconds:.0f} s, {scope})."
    )
