"""What the theorems say of the slopes in each case.

Slopes between -0.6 and -0.4 count as n^-1/2 for functions. Voronoi losses and cells
of one atom get [-0.75, -0.4], cells of several [-0.4, -0.15] for n^-1/4.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from damex.studies.softmax_gating2025.rates import Claim

__all__ = ["CLAIMS", "WORST"]

HALF = "n^-1/2"
QUARTER = "n^-1/4"
NEVER = "slower than any power of n"
WORST = "worst truth"


def _function(theorem: str) -> Claim:
    return Claim("function", "function", f"{HALF} ({theorem})", -0.6, -0.4)


def _half(quantity: str, label: str, theorem: str) -> Claim:
    return Claim(quantity, label, f"{HALF} ({theorem})", -0.75, -0.4)


def _quarter(theorem: str) -> Claim:
    return Claim(
        "over", "cells of several atoms", f"{QUARTER} ({theorem})", -0.4, -0.15
    )


def _never(quantity: str, label: str, theorem: str) -> Claim:
    return Claim(quantity, label, f"{NEVER} ({theorem})", slower_than=-0.15)


def _reported(quantity: str, label: str, theorem: str) -> Claim:
    return Claim(quantity, label, f"{NEVER} for the {WORST} ({theorem})")


def _exact(theorem: str, loss: str) -> tuple[Claim, ...]:
    return (
        _half("loss", loss, theorem),
        _half("exact", "cells of one atom", theorem),
    )


def _over(theorem: str, loss: str) -> tuple[Claim, ...]:
    return (*_exact(theorem, loss), _quarter(theorem))


_SOFTMAX = _function("Prop. 1")
_DENSE_TO_SPARSE = _function("Prop. 2")
_HIERARCHY = _function("Prop. 3")
_FIRST_LEVEL = _half("first level", "first level", "Theorem 5")
_TAU = ("tau", "tau")
_SLOPE = ("slope", "b1")
_RATIO = _half("ratio", "b1 / tau", "eq. 15: all that is identified")

CLAIMS: Mapping[str, tuple[Claim, ...]] = MappingProxyType(
    {
        "tanh, exact": (_SOFTMAX, *_exact("Theorem 1", "D1")),
        "GELU, exact": (_SOFTMAX, *_exact("Theorem 1", "D1")),
        "sigmoid, exact": (_SOFTMAX, *_exact("Theorem 1", "D1")),
        "tanh, over": (_SOFTMAX, *_over("Theorem 1", "D1")),
        "tanh of normalised input, over": (_SOFTMAX, *_over("Theorem 1", "D1")),
        "GELU, over": (_SOFTMAX, *_over("Theorem 1", "D1")),
        "linear, exact": (_SOFTMAX, _reported("loss", "D2,1", "Theorem 2")),
        "linear, over": (
            _SOFTMAX,
            _never("loss", "D2,1", "Theorem 2"),
            _never("over", "cells of several atoms", "Theorem 2"),
        ),
        "linear, over, copies start apart": (
            _SOFTMAX,
            _never("loss", "D2,1", "Theorem 2"),
            _never("over", "cells of several atoms", "Theorem 2"),
        ),
        "temperature, linear router": (
            _DENSE_TO_SPARSE,
            _never(*_TAU, "Theorem 3"),
            _never(*_SLOPE, "Theorem 3"),
            _RATIO,
            _reported("experts", "experts", "Theorem 3"),
        ),
        "temperature, tanh router": (
            _DENSE_TO_SPARSE,
            *_exact("Theorem 4", "D4"),
            _half(*_TAU, "Theorem 4"),
            _half(*_SLOPE, "Theorem 4"),
            _half("experts", "experts", "Theorem 4"),
        ),
        "temperature, tanh router, over": (
            _DENSE_TO_SPARSE,
            *_over("Theorem 4", "D4"),
        ),
        "hierarchy, tanh, exact": (
            _HIERARCHY,
            *_exact("Theorem 5", "D5"),
            _FIRST_LEVEL,
        ),
        "hierarchy, tanh, over": (_HIERARCHY, *_over("Theorem 5", "D5"), _FIRST_LEVEL),
        "hierarchy, linear, over": (
            _HIERARCHY,
            _never("loss", "D6,1", "Theorem 6"),
            _never("over", "cells of several atoms", "Theorem 6"),
            _reported("first level", "first level", "Theorem 6"),
        ),
    }
)
