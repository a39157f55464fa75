"""The identities behind the theorems, on the layers that are fitted.

Axes: N points, P parameters, E experts, S parameter vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.func import functional_call, jacfwd

from damex.moe import expert_groups
from studies.report import Row, checked
from studies.softmax_gating2025.cases import GROUPED_LINEAR_TRUTH, TRUTH, WARM_TRUTH
from studies.softmax_gating2025.measures import Truth, align, voronoi_loss
from studies.softmax_gating2025.regression import NUM_GROUPS, Family, Gating
from studies.softmax_gating2025.simulation import support

POINTS = 21
ROUNDING = 1e-12
APART = 1.0  # how far the halves of a split expert are from it
FACTOR = 1.7  # on slopes, biases and temperature
# The linear router first.
TEMPERATURE_GATINGS: tuple[Gating, Gating] = ("linear_temperature", "tanh_temperature")


def identity_rows(seeds: Sequence[int]) -> list[Row]:
    """The equations behind the theorems, by autograd in float64."""
    linear, plain, normalised = (
        [linear_residual(name, seed=seed, normalised=moved) for seed in seeds]
        for name, moved in (("identity", False), ("tanh", False), ("tanh", True))
    )
    rows = [
        _zero("eq. 9, linear experts", linear),
        _broken("eq. 9, tanh experts of the normalised input", normalised),
        Row(
            "eq. 9, tanh experts of the plain input, residual",
            "x dh/db = dh/da, so Definition 1 fails",
            plain,
            settings="not in the paper, which takes a transformed input",
            digits=16,
        ),
    ]
    for level in ("first", "second"):
        residuals = [group_residual(level, seed=seed) for seed in seeds]
        rows.append(_zero(f"eq. 28, {level} level", residuals))
    linear, tanh = (
        [temperature_residual(gating, seed=seed) for seed in seeds]
        for gating in TEMPERATURE_GATINGS
    )
    rows.append(_zero("eq. 15, linear router", linear))
    rows.append(_broken("eq. 15, tanh router", tanh))
    return [*rows, *_rescaling_rows(), *_merge_rows()]


def linear_residual(activation: str, *, seed: int, normalised: bool = False) -> float:
    """Largest |d2F/(db1 db) - dF/da| for F = exp(b1 x) h(x, a, b) (eq. 9).

    At a random place near the truth, relative to the largest |dF/da|.
    """
    family = _family("softmax", 2, activation, normalised=normalised)
    theta_P = _near(family, TRUTH, seed)
    return _mixed_residual(family, theta_P, "router.weight_ED")


def group_residual(level: str, *, seed: int) -> float:
    """As `linear_residual`, for the slope at a level of a linear hierarchy (eq. 28)."""
    family = _family("hierarchical", 3, "identity")
    theta_P = _near(family, GROUPED_LINEAR_TRUTH, seed)
    slope = {"first": "router.group_weight_GD", "second": "router.weight_ED"}[level]
    return _mixed_residual(family, theta_P, slope)


def temperature_residual(gating: Gating, *, seed: int) -> float:
    """Largest |dF/dtau + (b1/tau) dF/db1| for the first expert (eq. 15).

    At a random place near the truth, relative to the largest |dF/dtau|.
    """
    # Without b0: the paper puts exp(b0 / tau) into the weights of the measure.
    truth = replace(WARM_TRUTH, gate_bias=(0.0, 0.0))
    family = _family(gating, 2, "gelu")
    theta_P = family.theta(truth)
    slope = {"linear_temperature": "router.weight_ED"}.get(gating, "router.w1_HD")
    at_slope = family.regression.position(slope)
    at_scale = family.regression.position("gate.log_scale")
    theta_P[at_slope] += torch.rand(1, generator=_generator(seed)).item()
    slope_P = jacfwd(lambda theta: _term(family, theta))(theta_P)
    tau = theta_P[at_scale].exp()
    by_tau_N = slope_P[:, at_scale] / tau
    residual_N = by_tau_N + theta_P[at_slope] / tau * slope_P[:, at_slope]
    return (residual_N.abs().max() / by_tau_N.abs().max()).item()


def rescaling(gating: Gating, *, factor: float) -> tuple[float, float]:
    """Multiply slopes, biases and temperature of the gate.

    Returns the largest change of the function, and D3,1 between the two measures.
    """
    family = _family(gating, 2, "gelu")
    moved = replace(
        WARM_TRUTH,
        gate_slope=tuple(factor * slope for slope in WARM_TRUTH.gate_slope),
        gate_bias=tuple(factor * bias for bias in WARM_TRUTH.gate_bias),
        temperature=factor * WARM_TRUTH.temperature,
    )
    loss_S = voronoi_loss(
        moved.measure(temperature=True), WARM_TRUTH.measure(temperature=True), order=1.0
    )
    return _change(family, moved, WARM_TRUTH), loss_S.item()


def merge(activation: str, *, apart: float) -> tuple[float, float]:
    """Write one expert as two whose mean it is (the proof of Theorem 2).

    Returns the largest change of the function, and the Voronoi loss: D2,1 for linear
    experts, D1 for others.
    """
    family = _family("softmax", 3, activation)
    moved = TRUTH.split((0, 0, 1), apart=apart)
    linear = activation == "identity"
    truth = TRUTH.measure()
    loss_S = voronoi_loss(
        align(moved.measure(), truth),
        truth,
        order=1.0 if linear else None,
        linear=linear,
    )
    return _change(family, moved, TRUTH.split((0, 0, 1))), loss_S.item()


def _family(
    gating: Gating, num_experts: int, activation: str, *, normalised: bool = False
) -> Family:
    return Family(
        gating,
        num_experts,
        activation=activation,
        points_N=support(POINTS),
        normalised=normalised,
    )


def _change(family: Family, moved: Truth, truth: Truth) -> float:
    f_SN = family.regression.values(
        torch.stack([family.theta(moved), family.theta(truth)])
    )
    return (f_SN[0] - f_SN[1]).abs().max().item()


def _near(family: Family, truth: Truth, seed: int) -> Tensor:
    theta_P = family.theta(truth)
    move_P = torch.rand(theta_P.shape, generator=_generator(seed), dtype=torch.float64)
    return theta_P + 0.5 * move_P


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _mixed_residual(family: Family, theta_P: Tensor, gate_slope: str) -> float:
    first_NP = jacfwd(lambda theta: _term(family, theta))
    second_NPP = jacfwd(first_NP)(theta_P)
    position = family.regression.position
    by_slope_N = first_NP(theta_P)[:, position("experts.w1_EDH")]
    mixed_N = second_NPP[:, position(gate_slope), position("experts.b1_EH")]
    return ((mixed_N - by_slope_N).abs().max() / by_slope_N.abs().max()).item()


def _term(family: Family, theta_P: Tensor) -> Tensor:
    """F of the first expert: numerator of its softmax weight times its output.

    Weights come from the gate. The numerator is the ratio to the weight of the pinned
    expert, in a hierarchy that of its group, times the ratio of the groups' weights.
    """
    regression, layer = family.regression, family.regression.layer
    parameters = regression.parameters(theta_P)
    record = functional_call(layer, parameters, (regression.tokens_1ND,))[1]
    assignment, E = record.assignment, family.num_experts
    # Dense gates: the routes of an expert are all tokens, in order.
    weight_EN = assignment.weight_R.view(E, -1)
    groups = [tuple(range(E))]
    if family.gating == "hierarchical":
        groups = [*expert_groups(NUM_GROUPS, E)]
    numerator_N = weight_EN[0] / weight_EN[groups[0][-1]]
    if len(groups) > 1:
        numerator_N = numerator_N * weight_EN[list(groups[0])].sum(0)
        numerator_N = numerator_N / weight_EN[list(groups[-1])].sum(0)
    experts = {
        name.removeprefix("experts."): value
        for name, value in parameters.items()
        if name.startswith("experts.")
    }
    rows_RD = assignment.dispatch(regression.tokens_1ND[0])
    bank = layer.get_submodule("experts")
    out_RD = functional_call(bank, experts, (rows_RD, assignment.counts_E))
    return numerator_N * out_RD.view(E, len(numerator_N), -1)[0, :, 0]


def _rescaling_rows() -> list[Row]:
    linear, lost = rescaling("linear_temperature", factor=FACTOR)
    tanh, _ = rescaling("tanh_temperature", factor=FACTOR)
    settings = f"b1, b0 and tau times {FACTOR}, D3,1 = {lost:.2f}"
    return [
        _zero("change of f, linear router", [linear], "0 (eq. 15)", settings),
        _broken("change of f, tanh router", [tanh], "not 0 (Theorem 4)", settings),
    ]


def _merge_rows() -> list[Row]:
    rows = []
    for activation in ("identity", "tanh"):
        linear = activation == "identity"
        change, loss = merge(activation, apart=APART)
        settings = f"one expert as two, {APART} apart: {'D2,1' if linear else 'D1'}"
        settings += f" = {loss:.2f}"
        name = f"change of f, {'linear' if linear else activation} experts"
        make = _zero if linear else _broken
        published = "o(D2,r) (eq. 48)" if linear else "at least c D1 (eq. 7)"
        rows.append(make(name, [change], published, settings))
    return rows


def _zero(
    name: str, values: Sequence[float], published: str = "0", where: str = ""
) -> Row:
    criterion, test = f"<= {ROUNDING}", lambda x: x <= ROUNDING
    return checked(name, values, criterion, test, where, published=published, digits=16)


def _broken(
    name: str, values: Sequence[float], published: str = "not 0", where: str = ""
) -> Row:
    criterion, test = ">= 0.001", lambda x: x >= 1e-3
    return checked(name, values, criterion, test, where, published=published, digits=3)
