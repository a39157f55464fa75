"""What a study ends with: rows beside published values, a figure, one sentence."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from matplotlib.figure import Figure

__all__ = ["Row", "StudyResult", "StudySettings"]


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
