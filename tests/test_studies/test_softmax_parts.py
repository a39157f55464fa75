import math
from dataclasses import replace

import pytest
import torch
from torch.autograd.functional import jacobian

from studies.softmax_gating2025.cases import CASES, GROUPED_TRUTH, TRUTH
from studies.softmax_gating2025.measures import (
    Hierarchy,
    Measure,
    Truth,
    align,
    cell_errors,
    hierarchical_loss,
    voronoi_cells,
    voronoi_loss,
)
from studies.softmax_gating2025.regression import Family

pytestmark = pytest.mark.studies


def measure(weights, gates, experts, temperature=None):
    return Measure(
        torch.tensor([weights], dtype=torch.float64).log(),
        torch.tensor([gates], dtype=torch.float64).unsqueeze(2),
        torch.tensor([experts], dtype=torch.float64),
        None if temperature is None else torch.tensor([temperature]).double(),
    )


TRUE = measure([2.0, 1.0], [3.0, 0.0], [[1.0, 1.0], [-1.0, -1.0]])
# Two atoms near the first true one, one near the second.
FITTED = measure(
    [1.0, 0.5, 0.8], [3.1, 2.8, 0.0], [[1.0, 1.0], [1.3, 1.4], [-1.0, -0.7]]
)


def test_atoms_belong_to_the_nearest_true_one():
    assert voronoi_cells(FITTED, TRUE)[0].tolist() == [[1, 0], [1, 0], [0, 1]]


# Masses: |1.5 - 2| + |0.8 - 1| = 0.7. First atom: gate 0.1; second: gate 0.2, expert
# |(0.3, 0.4)| = 0.5; third: 0.3.
WARM = replace(FITTED, temperature_S=torch.tensor([1.2]).double())
ALONE = measure([2.0, 0.0001], [3.0, 3.0], [[1.0, 1.0], [1.0, 1.0]])


@pytest.mark.parametrize(
    ("fitted", "options", "expected"),
    [
        # D1: squares in the first cell: 1 * 0.01 + 0.5 * (0.04 + 0.25) + 0.8 * 0.3
        (FITTED, {}, 0.7 + 0.395),
        # D3,1 without a temperature: 0.1 + 0.5 * 0.7 + 0.8 * 0.3
        (FITTED, dict(order=1), 0.7 + 0.69),
        # D2,1 takes 0.3 + 0.4 for the second atom; D2,2 has squares in every cell
        (FITTED, dict(order=1, linear=True), 0.7 + 0.1 + 0.5 * 0.9 + 0.24),
        (FITTED, dict(order=2, linear=True), 0.7 + 0.01 + 0.5 * 0.29 + 0.8 * 0.09),
        # D4: squares in the first cell: 1.5 * 0.04 more, and 0.8 * 0.2 in the second
        (WARM, {}, 1.095 + 0.06 + 0.16),
        (ALONE, {}, 1.0001),  # an empty cell costs its mass
        (TRUE, {}, 0.0),
    ],
)
def test_losses_by_hand(fitted, options, expected):
    warmth = None if fitted.temperature_S is None else torch.ones(1).double()
    true = replace(TRUE, temperature_S=warmth)
    assert voronoi_loss(fitted, true, **options).item() == pytest.approx(expected)


def test_cell_errors_by_hand():
    errors = cell_errors(FITTED, TRUE)
    # first cell: sqrt((1 * 0.01 + 0.5 * 0.29) / 1.5); second: 0.3
    assert errors.over_S.item() == pytest.approx(math.sqrt(0.155 / 1.5))
    assert errors.exact_S.item() == pytest.approx(0.3)
    assert math.isnan(cell_errors(TRUE, TRUE).over_S.item())


def test_translations_of_the_softmax_are_taken_back():
    shifted = Measure(
        FITTED.log_weight_SK + 0.4, FITTED.gate_SKA - 0.6, FITTED.expert_SKQ
    )
    found = align(shifted, TRUE)
    # The reference cell holds the third atom alone: mass 1 and slope 0, as the truth.
    assert found.weight_SK[0].tolist() == pytest.approx([1 / 0.8, 0.5 / 0.8, 1.0])
    assert found.gate_SKA[0, :, 0].tolist() == pytest.approx([3.1, 2.8, 0.0])
    kept = align(shifted, TRUE, slopes=False)
    assert kept.gate_SKA[0, :, 0].tolist() == pytest.approx([2.5, 2.2, -0.6])
    torch.testing.assert_close(kept.log_weight_SK, found.log_weight_SK)


def test_hierarchical_losses_by_hand():
    one = measure([1.0], [0.0], [[0.0, 0.0]])
    true = Hierarchy(
        torch.zeros(1, 2).double(), torch.zeros(1, 2, 1).double(), [TRUE, one]
    )
    fitted = Hierarchy(
        torch.tensor([[2.0, 1.0]]).double().log(),
        torch.tensor([[[0.3], [0.0]]]).double(),
        [FITTED, one],
    )
    # D5: |2 - 1| + 2 * (0.3 + D1 of the first group); the second group is exact
    assert hierarchical_loss(fitted, true).item() == pytest.approx(
        1 + 2 * (0.3 + 1.095)
    )
    # D6,2: 1 + 2 * (0.09 + D2,2)
    squares = hierarchical_loss(fitted, true, order=2, linear=True)
    assert squares.item() == pytest.approx(1 + 2 * (0.09 + 0.927))
    assert hierarchical_loss(true, true).item() == 0


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
