"""What is fitted to what, and what the theorems say of the slopes in each case.

A slope is that of log error against log n. Slopes between -0.6 and -0.4 count as
n^-1/2 for functions. Voronoi losses and cells of one atom get [-0.75, -0.4], cells of
several [-0.4, -0.15] for n^-1/4.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats
from torch import Tensor

from studies.softmax_gating2025.measures import Truth
from studies.softmax_gating2025.regression import Gating

TRUTH = Truth((2.0, 0.0), (0.3, 0.0), (2.0, -1.5), (0.5, -0.5))
# sigmoid(z) = (1 + tanh(z / 2)) / 2: the same function, halved.
SIGMOID_TRUTH = replace(TRUTH, expert_slope=(4.0, -3.0), expert_bias=(1.0, -1.0))
WARM_TRUTH = replace(TRUTH, temperature=0.7)
# The first group has two experts, the second one, which is fitted with two. Chosen
# among random truths for small variances of their estimates: a hierarchy of one input
# is hard to estimate.
GROUPED_TRUTH = Truth(
    (1.0, 0.0, 0.0),
    (0.0, 0.0, 0.0),
    (2.5, -4.0, 3.0),
    (1.5, 0.0, -1.5),
    group_slope=(-0.5, 0.0),
    group_bias=(0.0, 0.0),
    group_of=(0, 0, 1),
)
GROUPED_LINEAR_TRUTH = Truth(
    (4.5, 0.0, 0.0),
    (0.5, 0.0, 0.0),
    (3.0, -3.5, 3.5),
    (0.5, -1.5, -1.5),
    group_slope=(-3.0, 0.0),
    group_bias=(1.0, 0.0),
    group_of=(0, 0, 1),
)

EXACT = ((0, 1),)
# Least squares chooses which expert to split, so every choice is a start.
OVER = ((0, 0, 1), (0, 1, 1))

# Only noise / sqrt(n) matters. The more there is to estimate, the smaller it has to be
# for the rate of large n to show.
LOW_NOISE = 0.02
LOWEST_NOISE = 0.002


def median_curve(errors: Tensor) -> np.ndarray:
    """Median of (sizes, repetitions) over repetitions; NaN where all are NaN."""
    return errors.nanmedian(dim=1).values.numpy()


def slope(sizes: Sequence[int], errors: np.ndarray) -> float:
    """The r in n^r: slope of a straight line through log error against log n.

    Errors of NaN are left out; NaN with fewer than two.
    """
    known = np.isfinite(errors) & (errors > 0)
    if known.sum() < 2:
        return float("nan")
    log_size = np.log(np.asarray(sizes, dtype=float)[known])
    return float(np.polyfit(log_size, np.log(errors[known]), 1)[0])


def interval(values: Sequence[float], *, level: float = 0.95) -> tuple[float, float]:
    """Confidence interval of the mean from Student's t; infinite for one value."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return -float("inf"), float("inf")
    half = stats.t.ppf((1 + level) / 2, len(values) - 1) * stats.sem(values)
    return mean - float(half), mean + float(half)


@dataclass(frozen=True)
class Claim:
    """The theory's claim about the slope of one quantity, and its criterion.

    Attributes:
        quantity: Name as in `simulate`.
        label: For the report.
        published: The rate of the paper.
        low: Smallest mean slope that agrees; None where nothing is claimed of a fixed
            truth, so that the slope is only reported.
        high: Largest one.
        slower_than: The mean must lie above this instead: no such rate.
    """

    quantity: str
    label: str
    published: str
    low: float | None = None
    high: float | None = None
    slower_than: float | None = None

    def judge(self, slopes: Sequence[float]) -> tuple[str, bool | None]:
        """The criterion, with the interval of the slope, and whether it holds."""
        low, high = interval(slopes)
        found = f"95 % interval {low:.2f} to {high:.2f}" if len(slopes) > 1 else ""
        mean = float(np.mean(slopes))
        if self.slower_than is not None:
            text = f"mean above {self.slower_than}"
            return _join(text, found), mean > self.slower_than
        if self.low is None or self.high is None:
            return found, None
        text = f"mean in [{self.low}, {self.high}]"
        return _join(text, found), self.low <= mean <= self.high


def _join(*texts: str) -> str:
    return "; ".join(text for text in texts if text)


@dataclass(frozen=True)
class Case:
    """A truth and what is fitted to it.

    Attributes:
        name: For the report.
        gating: Form of the gate, as in `Family`.
        activation: Of the experts.
        truth: The true mixture.
        atom_of: Ways to write the truth with as many experts as are fitted; each is
            where descents start.
        loss: Name of the Voronoi loss in the paper.
        order: Its r, or None; see `voronoi_loss`.
        noise: Standard deviation of the observations.
        normalised: Whether experts see the normalised input.
        apart: How far copies of an expert stand apart in the starts.
        claims: What the theorems say of its slopes.
    """

    name: str
    gating: Gating
    activation: str
    truth: Truth
    atom_of: tuple[tuple[int, ...], ...]
    loss: str
    order: float | None = None
    noise: float = 0.05
    normalised: bool = False
    apart: float = 0.0
    claims: tuple[Claim, ...] = ()

    @property
    def num_experts(self) -> int:
        """K."""
        return len(self.atom_of[0])

    @property
    def over(self) -> bool:
        """Whether more experts are fitted than there are."""
        return self.num_experts > len(self.truth.gate_slope)

    @property
    def linear(self) -> bool:
        """Whether experts are linear."""
        return self.activation == "identity"


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


def _exact(function: Claim, theorem: str, loss: str) -> tuple[Claim, ...]:
    cells = _half("exact", "cells of one atom", theorem)
    return (function, _half("loss", loss, theorem), cells)


def _over(function: Claim, theorem: str, loss: str) -> tuple[Claim, ...]:
    return (*_exact(function, theorem, loss), _quarter(theorem))


def _flat(function: Claim, theorem: str, loss: str) -> tuple[Claim, ...]:
    """Linear experts, too many of them."""
    cells = _never("over", "cells of several atoms", theorem)
    return (function, _never("loss", loss, theorem), cells)


_SOFTMAX = _function("Prop. 1")
_DENSE_TO_SPARSE = _function("Prop. 2")
_HIERARCHY = _function("Prop. 3")
_FIRST_LEVEL = _half("first level", "first level", "Theorem 5")

_TANH = Case(
    "tanh, exact",
    "softmax",
    "tanh",
    TRUTH,
    EXACT,
    "D1",
    claims=_exact(_SOFTMAX, "Theorem 1", "D1"),
)
_TANH_OVER = replace(
    _TANH,
    name="tanh, over",
    atom_of=OVER,
    noise=LOW_NOISE,
    claims=_over(_SOFTMAX, "Theorem 1", "D1"),
)
_LINEAR = replace(
    _TANH,
    name="linear, exact",
    activation="identity",
    loss="D2,1",
    order=1.0,
    claims=(_SOFTMAX, _reported("loss", "D2,1", "Theorem 2")),
)
_LINEAR_OVER = replace(
    _LINEAR,
    name="linear, over",
    atom_of=OVER,
    noise=LOW_NOISE,
    claims=_flat(_SOFTMAX, "Theorem 2", "D2,1"),
)
_WARM = Case(
    "temperature, tanh router",
    "tanh_temperature",
    "gelu",
    WARM_TRUTH,
    EXACT,
    "D4",
    claims=(
        *_exact(_DENSE_TO_SPARSE, "Theorem 4", "D4"),
        _half("tau", "tau", "Theorem 4"),
        _half("slope", "b1", "Theorem 4"),
        _half("experts", "experts", "Theorem 4"),
    ),
)
_GROUPED = Case(
    "hierarchy, tanh, exact",
    "hierarchical",
    "tanh",
    GROUPED_TRUTH,
    ((0, 1, 2),),
    "D5",
    noise=LOWEST_NOISE,
    claims=(*_exact(_HIERARCHY, "Theorem 5", "D5"), _FIRST_LEVEL),
)
_GROUPED_OVER = replace(
    _GROUPED,
    name="hierarchy, tanh, over",
    atom_of=((0, 1, 2, 2),),
    claims=(*_over(_HIERARCHY, "Theorem 5", "D5"), _FIRST_LEVEL),
)
_ALL = (
    _TANH,
    replace(_TANH, name="GELU, exact", activation="gelu"),
    replace(
        _TANH,
        name="sigmoid, exact",
        activation="sigmoid",
        truth=SIGMOID_TRUTH,
        noise=0.025,
    ),
    _TANH_OVER,
    replace(_TANH_OVER, name="tanh of normalised input, over", normalised=True),
    replace(_TANH_OVER, name="GELU, over", activation="gelu"),
    _LINEAR,
    _LINEAR_OVER,
    replace(_LINEAR_OVER, name="linear, over, copies start apart", apart=2.0),
    replace(
        _WARM,
        name="temperature, linear router",
        gating="linear_temperature",
        loss="D3,1",
        order=1.0,
        claims=(
            _DENSE_TO_SPARSE,
            _never("tau", "tau", "Theorem 3"),
            _never("slope", "b1", "Theorem 3"),
            _half("ratio", "b1 / tau", "eq. 15: all that is identified"),
            _reported("experts", "experts", "Theorem 3"),
        ),
    ),
    _WARM,
    replace(
        _WARM,
        name="temperature, tanh router, over",
        atom_of=OVER,
        noise=LOW_NOISE,
        claims=_over(_DENSE_TO_SPARSE, "Theorem 4", "D4"),
    ),
    _GROUPED,
    _GROUPED_OVER,
    replace(
        _GROUPED_OVER,
        name="hierarchy, linear, over",
        activation="identity",
        truth=GROUPED_LINEAR_TRUTH,
        loss="D6,1",
        order=1.0,
        claims=(
            *_flat(_HIERARCHY, "Theorem 6", "D6,1"),
            _reported("first level", "first level", "Theorem 6"),
        ),
    ),
)
CASES = {case.name: case for case in _ALL}
