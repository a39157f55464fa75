"""What is fitted to what: truths, mixtures and the loss of each theorem."""

from __future__ import annotations

from dataclasses import dataclass, replace

from damex.studies.softmax_gating2025.families import Gating
from damex.studies.softmax_gating2025.truth import Truth

__all__ = ["CASES", "TRUTH", "Case"]

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


@dataclass(frozen=True)
class Case:
    """A truth and what is fitted to it.

    Attributes:
        name: For the report.
        gating: See `Family`.
        activation: Of the experts.
        truth: The true mixture.
        atom_of: Ways to write the truth with as many experts as are fitted; each is
            where descents start.
        loss: Name of the Voronoi loss in the paper.
        order: Its r, or None; see `voronoi_loss`.
        noise: Standard deviation of the observations.
        normalised: Whether experts see the normalised input.
        apart: How far copies of an expert stand apart in the starts.
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


_ALL = (
    Case("tanh, exact", "softmax", "tanh", TRUTH, EXACT, "D1"),
    Case("GELU, exact", "softmax", "gelu", TRUTH, EXACT, "D1"),
    Case(
        "sigmoid, exact", "softmax", "sigmoid", SIGMOID_TRUTH, EXACT, "D1", noise=0.025
    ),
    Case("tanh, over", "softmax", "tanh", TRUTH, OVER, "D1", noise=LOW_NOISE),
    Case(
        "tanh of normalised input, over",
        "softmax",
        "tanh",
        TRUTH,
        OVER,
        "D1",
        noise=LOW_NOISE,
        normalised=True,
    ),
    Case("GELU, over", "softmax", "gelu", TRUTH, OVER, "D1", noise=LOW_NOISE),
    Case("linear, exact", "softmax", "identity", TRUTH, EXACT, "D2,1", 1.0),
    Case(
        "linear, over", "softmax", "identity", TRUTH, OVER, "D2,1", 1.0, noise=LOW_NOISE
    ),
    Case(
        "linear, over, copies start apart",
        "softmax",
        "identity",
        TRUTH,
        OVER,
        "D2,1",
        1.0,
        noise=LOW_NOISE,
        apart=2.0,
    ),
    Case(
        "temperature, linear router",
        "linear_temperature",
        "gelu",
        WARM_TRUTH,
        EXACT,
        "D3,1",
        1.0,
    ),
    Case(
        "temperature, tanh router", "tanh_temperature", "gelu", WARM_TRUTH, EXACT, "D4"
    ),
    Case(
        "temperature, tanh router, over",
        "tanh_temperature",
        "gelu",
        WARM_TRUTH,
        OVER,
        "D4",
        noise=LOW_NOISE,
    ),
    Case(
        "hierarchy, tanh, exact",
        "hierarchical",
        "tanh",
        GROUPED_TRUTH,
        ((0, 1, 2),),
        "D5",
        noise=LOWEST_NOISE,
    ),
    Case(
        "hierarchy, tanh, over",
        "hierarchical",
        "tanh",
        GROUPED_TRUTH,
        ((0, 1, 2, 2),),
        "D5",
        noise=LOWEST_NOISE,
    ),
    Case(
        "hierarchy, linear, over",
        "hierarchical",
        "identity",
        GROUPED_LINEAR_TRUTH,
        ((0, 1, 2, 2),),
        "D6,1",
        1.0,
        noise=LOWEST_NOISE,
    ),
)
CASES = {case.name: case for case in _ALL}
