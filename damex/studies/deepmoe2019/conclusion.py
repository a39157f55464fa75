"""What the study says in the end."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from damex.studies.deepmoe2019.row_parts import (
    CHOSEN,
    PLAIN,
    Found,
    accuracy_of,
    active_of,
    left_of,
    patterns_of,
)
from damex.studies.result import Row

__all__ = ["conclusion"]


def conclusion(rows: Sequence[Row], found: Found) -> str:
    """Says what was confirmed and what was not.

    Args:
        rows: The table.
        found: By case.
    """
    chosen = found[CHOSEN]
    failed = [f"{row.name} ({row.criterion})" for row in rows if row.holds is False]
    tested = sum(row.holds is not None for row in rows)
    text = (
        f"At lambda 0.001 {fmean([active_of(one) for one in chosen]):.0f} % of the "
        f"channels are open, in {fmean([patterns_of(one) for one in chosen]):.0f} "
        f"patterns, and skipping the others leaves "
        f"{fmean([left_of(one) for one in chosen]):.0f} % of the operations at "
        f"{fmean([accuracy_of(one) for one in chosen]):.1f} % accuracy against "
        f"{fmean([accuracy_of(one) for one in found[PLAIN]]):.1f} % of the plain "
        f"network; {tested - len(failed)} of {tested} criteria hold"
    )
    text += f", but not: {'; '.join(failed)}." if failed else "."
    blank = fmean([one.final.blank_accuracy for one in chosen])
    known = fmean([accuracy_of(one) for one in chosen]) - blank < 5.0
    verdict = "nearly all" if known else "not all"
    return (
        f"{text} The gates alone, with a blank image, reach {blank:.1f} %: {verdict} "
        "that the network knows is in them."
    )
