"""Tests of damex.studies.softmax_gating2025.{regression,families,truth}."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.autograd.functional import jacobian

from damex.studies.softmax_gating2025.cases import CASES, GROUPED_TRUTH, TRUTH
from damex.studies.softmax_gating2025.families import Family
from damex.studies.softmax_gating2025.truth import Truth

POINTS = torch.tensor([-1.0, 0.5, 2.0], dtype=torch.float64)
GIVEN = Truth((2.0, 0.0), (0.3, 0.0), (2.0, -1.5), (0.5, -0.5), temperature=0.7)


def expected(x, gating, normalised):
    """The formulas of eq. 2, 12 and 17, with math alone."""
    slope = math.tanh(2 * x) if gating == "tanh_temperature" else 2 * x
    tau = 1.0 if gating == "softmax" else 0.7
    weight = 1 / (1 + math.exp(-(slope + 0.3) / tau))
    t = x / math.sqrt(1 + x * x) if normalised else x
    first, second = math.tanh(2 * t + 0.5), math.tanh(-1.5 * t - 0.5)
    return weight * first + (1 - weight) * second


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize(
    "gating", ["softmax", "linear_temperature", "tanh_temperature"]
)
def test_layers_compute_the_papers_formulas(gating, normalised):
    family = Family(
        gating, 2, activation="tanh", points_N=POINTS, normalised=normalised
    )
    f_SN = family.regression.values(family.theta(GIVEN).unsqueeze(0))
    assert f_SN[0].tolist() == pytest.approx(
        [expected(x, gating, normalised) for x in POINTS.tolist()], abs=1e-12
    )


def test_a_hierarchy_multiplies_its_levels():
    truth = replace(GROUPED_TRUTH, group_bias=(0.5, 0.0), gate_bias=(0.2, 0.0, 0.0))
    family = Family("hierarchical", 3, activation="tanh", points_N=POINTS)
    f_SN = family.regression.values(family.theta(truth).unsqueeze(0))
    wanted = []
    for x in POINTS.tolist():
        group = 1 / (1 + math.exp(0.5 * x - 0.5))
        inner = 1 / (1 + math.exp(-x - 0.2))
        experts = [math.tanh(2.5 * x + 1.5), math.tanh(-4 * x), math.tanh(3 * x - 1.5)]
        inside = inner * experts[0] + (1 - inner) * experts[1]
        wanted.append(group * inside + (1 - group) * experts[2])
    assert f_SN[0].tolist() == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_every_way_to_write_a_truth_is_the_same_function(case):
    family = Family(
        case.gating,
        case.num_experts,
        activation=case.activation,
        points_N=POINTS,
        normalised=case.normalised,
    )
    ways = [family.theta(case.truth.split(way)) for way in case.atom_of]
    f_SN = family.regression.values(torch.stack(ways))
    exact = Family(
        case.gating,
        len(case.truth.gate_slope),
        activation=case.activation,
        points_N=POINTS,
        normalised=case.normalised,
    )
    truth_1N = exact.regression.values(exact.theta(case.truth).unsqueeze(0))
    torch.testing.assert_close(f_SN, truth_1N.expand_as(f_SN))


def test_jacobians_and_positions_agree_with_autograd():
    family = Family("tanh_temperature", 2, activation="gelu", points_N=POINTS)
    regression = family.regression
    theta_P = family.theta(GIVEN)
    # b1 of both, b0 of the first, a and b of both, tau
    assert regression.num_parameters == 2 + 1 + 4 + 1
    f_SN, jacobian_SNP = regression.values_and_jacobian(theta_P.unsqueeze(0))
    by_hand = jacobian(lambda p: regression.values(p.unsqueeze(0))[0], theta_P)
    torch.testing.assert_close(jacobian_SNP[0], by_hand)
    torch.testing.assert_close(f_SN, regression.values(theta_P.unsqueeze(0)))
    assert theta_P[regression.position("gate.log_scale")].item() == pytest.approx(
        math.log(0.7)
    )
    assert theta_P[regression.position("experts.b1_EH")].item() == 0.5
    with pytest.raises(ValueError, match=r"no element of 'router\.b1_H' is free"):
        regression.position("router.b1_H")


def test_measures_are_read_back_from_parameters():
    family = Family("linear_temperature", 2, activation="gelu", points_N=POINTS)
    found = family.measure(family.theta(GIVEN).unsqueeze(0))
    assert found.log_weight_SK[0].tolist() == pytest.approx([0.3 / 0.7, 0.0])
    assert found.gate_SKA[0].tolist() == [[2.0], [0.0]]
    assert found.expert_SKQ[0].tolist() == [[2.0, 0.5], [-1.5, -0.5]]
    assert found.temperature_S.item() == pytest.approx(0.7)


def test_a_split_moves_copies_apart_around_their_mean():
    split = TRUTH.split((0, 0, 1), apart=0.25)
    assert split.expert_slope == (2.25, 1.75, -1.5)
    assert split.expert_bias == (0.75, 0.25, -0.5)
    assert split.gate_slope == (2.0, 2.0, 0.0)
    # half of exp(0.3) each
    assert split.gate_bias == pytest.approx((0.3 - math.log(2),) * 2 + (0.0,))
