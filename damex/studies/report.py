"""Files of a finished study: JSON, Markdown and the figure."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from damex.studies.result import Row, StudyResult

__all__ = ["markdown_report", "write_report"]

PACKAGES = ("damex", "torch", "numpy", "scikit-learn")
SIGNS: Mapping[bool | None, str] = {True: "yes", False: "**no**", None: "-"}


def write_report(
    result: StudyResult, folder: Path, name: str, *, run: Mapping[str, Any]
) -> list[Path]:
    """Write ``NAME.json``, ``NAME.md`` and ``NAME.png``.

    Args:
        result: The study.
        folder: Where to; made if it is missing.
        name: Name of the study.
        run: What is known about the run: command, date, seconds.

    Returns:
        The paths, in that order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}{suffix}" for suffix in (".json", ".md", ".png")]
    content = dict(
        title=result.title,
        conclusion=result.conclusion,
        settings=dict(result.settings),
        run=dict(run),
        versions=_versions(),
        rows=[row.to_dict() for row in result.rows],
    )
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    paths[0].write_text(text, encoding="utf-8")
    paths[1].write_text(markdown_report(result, name, run=run), encoding="utf-8")
    result.figure.savefig(paths[2], dpi=120, bbox_inches="tight")
    return paths


def markdown_report(result: StudyResult, name: str, *, run: Mapping[str, Any]) -> str:
    """The study as one section of a report.

    Args:
        result: The study.
        name: Name of the study, and of its figure.
        run: See :func:`write_report`.
    """
    table = [
        "| what | setting | published | ours | seeds | criterion | holds |",
        "|---|---|---|---|---:|---|---|",
        *(_line(row) for row in result.rows),
    ]
    settings = ", ".join(f"{key} {value}" for key, value in result.settings.items())
    facts = "; ".join(f"{key}: {value}" for key, value in run.items())
    versions = ", ".join(f"{key} {value}" for key, value in _versions().items())
    return "\n".join(
        [
            f"## {result.title}",
            "",
            result.conclusion,
            "",
            *table,
            "",
            f"![{name}]({name}.png)",
            "",
            *([f"Settings: {settings}.", ""] if settings else []),
            f"Run: {facts}; with {versions}.",
            "",
        ]
    )


def _line(row: Row) -> str:
    cells = (
        row.name,
        row.settings or "-",
        row.published,
        row.measured(),
        str(len(row.values)),
        row.criterion or "-",
        SIGNS[row.holds],
    )
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _versions() -> dict[str, str]:
    found = {package: version(package) for package in PACKAGES}
    return {"python": platform.python_version(), **found}
