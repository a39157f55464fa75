"""Tests of damex.studies.softmax_gating2025.{measure,voronoi}."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from damex.studies.softmax_gating2025.measure import Measure, align, voronoi_cells
from damex.studies.softmax_gating2025.voronoi import (
    Hierarchy,
    cell_errors,
    hierarchical_loss,
    voronoi_loss,
)


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


def test_losses_by_hand():
    # masses: |1.5 - 2| + |0.8 - 1| = 0.7
    # first atom: gate 0.1; second: gate 0.2, expert |(0.3, 0.4)| = 0.5; third: 0.3
    # D1: squares in the first cell: 1 * 0.01 + 0.5 * (0.04 + 0.25) + 0.8 * 0.3
    assert voronoi_loss(FITTED, TRUE).item() == pytest.approx(0.7 + 0.395)
    # D3,1 without a temperature: 0.1 + 0.5 * 0.7 + 0.8 * 0.3
    assert voronoi_loss(FITTED, TRUE, order=1).item() == pytest.approx(0.7 + 0.69)
    # D2,1 takes 0.3 + 0.4 for the second atom; D2,2 has squares in every cell
    linear = voronoi_loss(FITTED, TRUE, order=1, linear=True)
    assert linear.item() == pytest.approx(0.7 + 0.1 + 0.5 * 0.9 + 0.24)
    squares = voronoi_loss(FITTED, TRUE, order=2, linear=True)
    assert squares.item() == pytest.approx(0.7 + 0.01 + 0.5 * 0.29 + 0.8 * 0.09)


def test_a_temperature_counts_for_every_atom():
    warm = replace(FITTED, temperature_S=torch.tensor([1.2]).double())
    true = replace(TRUE, temperature_S=torch.ones(1).double())
    # D4: squares in the first cell: 1.5 * 0.04 more, and 0.8 * 0.2 in the second
    assert voronoi_loss(warm, true).item() == pytest.approx(1.095 + 0.06 + 0.16)


def test_the_loss_is_zero_at_the_truth_only_and_blind_to_order():
    assert voronoi_loss(TRUE, TRUE).item() == 0
    order = [2, 0, 1]
    shuffled = Measure(
        FITTED.log_weight_SK[:, order],
        FITTED.gate_SKA[:, order],
        FITTED.expert_SKQ[:, order],
    )
    torch.testing.assert_close(voronoi_loss(shuffled, TRUE), voronoi_loss(FITTED, TRUE))


def test_an_empty_cell_costs_its_mass():
    alone = measure([2.0, 0.0001], [3.0, 3.0], [[1.0, 1.0], [1.0, 1.0]])
    assert voronoi_loss(alone, TRUE).item() == pytest.approx(1.0001)


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


def test_a_split_reference_is_aligned_by_its_mean():
    split = measure(
        [2.0, 0.75, 0.25], [3.0, 0.2, -0.6], [[1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]]
    )
    # 0.75 * 0.2 - 0.25 * 0.6 = 0: nothing moves, whatever atom the fit had pinned
    moved = Measure(split.log_weight_SK, split.gate_SKA + 0.6, split.expert_SKQ)
    torch.testing.assert_close(align(moved, TRUE).gate_SKA, split.gate_SKA)


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
