"""The report of a study: measured and published values, as JSON, Markdown and PNG."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

PACKAGES = ("damex", "torch", "numpy")
NO_CLAIM = "The quick run makes no claim about what training shows."
SIGNS: Mapping[bool | None, str] = {True: "yes", False: "**no**", None: "-"}


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
        """Plain values for JSON."""
        values = [float(value) for value in self.values]
        more = dict(values=values, mean=self.mean, spread=self.spread)
        return {**asdict(self), **more}


def checked(
    name: str,
    values: Sequence[float],
    criterion: str,
    test: Callable[[float], bool],
    settings: str = "",
    *,
    published: str = "-",
    digits: int = 2,
) -> Row:
    """A row whose criterion has to hold for each value."""
    holds = all(test(value) for value in values)
    return Row(name, published, values, criterion, holds, settings, digits)


def near(expected: float, distance: float) -> Callable[[float], bool]:
    """A test for `checked`."""
    return lambda value: abs(value - expected) <= distance


def unjudged(rows: Iterable[Row]) -> list[Row]:
    """The same rows, of which nothing is claimed."""
    return [replace(row, criterion="", holds=None) for row in rows]


def differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """First minus second, seed by seed."""
    return [a - b for a, b in zip(first, second, strict=True)]


@dataclass(frozen=True)
class StudyResult:
    """A finished study.

    Attributes:
        title: The paper, with its number in arXiv.
        rows: In the order of the report.
        figure: Like the paper's.
        settings: What all rows share, for instance sizes and learning rates.
        remark: What the numbers mean, in a sentence or two.
    """

    title: str
    rows: Sequence[Row]
    figure: Figure
    settings: Mapping[str, Any] = field(default_factory=dict)
    remark: str = ""

    def failures(self) -> list[Row]:
        """Rows whose criterion is not met."""
        return [row for row in self.rows if row.holds is False]

    @property
    def conclusion(self) -> str:
        """How many criteria hold, which do not, and the remark."""
        judged = [row for row in self.rows if row.holds is not None]
        failed = [
            f"{row.name} ({row.settings})" if row.settings else row.name
            for row in self.failures()
        ]
        text = f"{len(judged) - len(failed)} of {len(judged)} criteria hold"
        if failed:
            text += f"; not confirmed: {'; '.join(failed)}"
        return f"{text}. {self.remark}".strip()


def draw_seeds(
    axes: Axes, x: Sequence[float], values: Sequence[Sequence[float]], **style: Any
) -> None:
    """A line through means; bars show one sample standard deviation over seeds."""
    means = [statistics.fmean(seeds) for seeds in values]
    spreads = [statistics.stdev(seeds) if len(seeds) > 1 else 0.0 for seeds in values]
    axes.errorbar(x, means, spreads, **style)


def write_report(
    result: StudyResult, folder: Path, name: str, *, run: Mapping[str, Any]
) -> list[Path]:
    """Write ``NAME.json``, ``NAME.md`` and ``NAME.png``; return their paths."""
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
    """The study as one section of a report."""
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
