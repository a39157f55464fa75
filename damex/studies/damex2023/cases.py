"""The lines of the table: which mixture, which method, how many experts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from damex.studies.damex2023.model import Method

__all__ = ["ALONE", "METHODS", "Case", "cases_with_more_experts", "growing_cases"]

METHODS: tuple[Method, ...] = ("vanilla", "damex")


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        shared: See `draw_mixture`.
        num_datasets: G.
        method: 'vanilla' or 'damex'.
        num_experts: E.
        longer: Factor on the steps of the plan.
    """

    shared: bool
    num_datasets: int
    method: Method
    num_experts: int
    longer: int = 1


# One expert with a data set to itself, and as many filters and samples as a mixture.
ALONE = Case(shared=False, num_datasets=1, method="damex", num_experts=1)


def growing_cases(cases: Iterable[Case], method: Method, *, shared: bool) -> list[Case]:
    """Those with more and more data sets and all else the same, in this order.

    Args:
        cases: All.
        method: 'vanilla' or 'damex'.
        shared: See `draw_mixture`.
    """
    mixed = [case for case in cases if case != ALONE]
    fewest = min(case.num_experts for case in mixed)
    wanted = (shared, method, fewest, 1)
    found = [
        case
        for case in mixed
        if (case.shared, case.method, case.num_experts, case.longer) == wanted
    ]
    return sorted(found, key=lambda case: case.num_datasets)


def cases_with_more_experts(cases: Iterable[Case], method: Method) -> list[Case]:
    """Those of the largest mixture with more experts than the other mixtures have.

    Args:
        cases: All.
        method: 'vanilla' or 'damex'.
    """
    mixed = [case for case in cases if case != ALONE]
    fewest = min(case.num_experts for case in mixed)
    found = [c for c in mixed if c.method == method and c.num_experts > fewest]
    return sorted(found, key=lambda case: case.num_experts)
