"""What a training checks of its data before it begins."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from damex.curation.findings import Finding
from damex.curation.inspection import check_config, errors_of

# For opening images; there is no limit for looking whether they are there.
SECONDS = 20.0
# Findings in the log file.
MAX_LOGGED = 200


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
        logger.warning(f"data check: {kinds}; tools/data.py check CONFIG says more.")
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
        f"({_kinds(errors)}); tools/data.py check CONFIG lists them."
    )


def _kinds(findings: Any) -> str:
    counts: Counter[str] = Counter()
    for finding in findings:
        counts[finding.kind] += finding.count
    return ", ".join(f"{count} {kind}" for kind, count in counts.items())
