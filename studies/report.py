"""What a study ends with: rows beside published values, a figure, one sentence.

Files of a finished study: JSON, Markdown and the figure.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

__all__ = ["Row", "StudyResult", "StudySettings", "markdown_report", "write_report"]


@dataclass(frozen=True)
class StudySettings:
    """How much of a study to run.

    Attributes:
        quick: Small data and few steps: two minutes or less on two cores, to see that
            everything works; its numbers are not compared with the paper's.
        seeds: Number of seeds; None for the study's own number.
    """

    quick: bool = False
    seeds: int | None = None


@dataclass(frozen=True)
class Row:
    """One quantity: published, measured, and whether the claim holds.

    Attributes:
        name: What was measured, with its unit.
        published: The value or bound as the paper has it; ``-`` where there is none.
        values: Our value for each seed.
        criterion: What has to be true of ``values`` for the claim to hold; empty
            where the row is only reported.
        holds: Whether it is; None where nothing is claimed.
        settings: What distinguishes this row, for instance the preset.
        digits: Decimals to print.
    """

    name: str
    published: str
    values: Sequence[float]
    criterion: str = ""
    holds: bool | None = None
    settings: str = ""
    digits: int = 3

    @property
    def mean(self) -> float:
        """Mean over seeds."""
        return statistics.fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Sample standard deviation over seeds; None for one seed."""
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    def measured(self) -> str:
        """Mean and spread as text."""
        mean = f"{self.mean:.{self.digits}f}"
        if self.spread is None:
            return mean
        return f"{mean} ± {self.spread:.{self.digits}f}"

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return dict(
            name=self.name,
            published=self.published,
            mean=self.mean,
            spread=self.spread,
            values=[float(value) for value in self.values],
            seeds=len(self.values),
            settings=self.settings,
            criterion=self.criterion,
            holds=self.holds,
        )


@dataclass(frozen=True)
class StudyResult:
    """A finished study.

    Attributes:
        title: The paper, with its number in arXiv.
        rows: In the order of the report.
        conclusion: What was confirmed and what was not, in a sentence or two.
        figure: Like the paper's.
        settings: What all rows share, for instance sizes and learning rates.
    """

    title: str
    rows: Sequence[Row]
    conclusion: str
    figure: Figure
    settings: Mapping[str, Any] = field(default_factory=dict)

    def failures(self) -> list[Row]:
        """Rows whose criterion is not met."""
        return [row for row in self.rows if row.holds is False]


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
