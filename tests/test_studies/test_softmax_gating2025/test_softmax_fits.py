"""Tests of damex.studies.softmax_gating2025.{least_squares,rates}."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares

from damex.studies.softmax_gating2025.cases import CASES
from damex.studies.softmax_gating2025.least_squares import (
    fit_from_starts,
    levenberg_marquardt,
)
from damex.studies.softmax_gating2025.rates import (
    Claim,
    interval,
    median_curve,
    slope,
)
from damex.studies.softmax_gating2025.simulation import family_of


def line(theta_SP):
    """theta_0 + theta_1 x at x = 0, 1, 2."""
    x_N = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64)
    design_NP = torch.stack([torch.ones_like(x_N), x_N], 1)
    return theta_SP @ design_NP.T, design_NP.expand(len(theta_SP), 3, 2)


def fit(model, target, start, scale=None, **kwargs):
    target_SN = torch.tensor([target], dtype=torch.float64)
    scale_SN = torch.ones_like(target_SN) if scale is None else torch.tensor([scale])
    kwargs = dict(bound=100.0, steps=100) | kwargs
    start_SP = torch.tensor([start], dtype=torch.float64)
    return levenberg_marquardt(model, target_SN, scale_SN.double(), start_SP, **kwargs)


def test_a_line_by_hand():
    # (0, 1, 5): mean 2 at x = 1, slope (5 - 0) / 2; residuals 0.5, -1, 0.5
    found = fit(line, [0.0, 1.0, 5.0], [7.0, -3.0])
    assert found.theta_SP[0].tolist() == pytest.approx([-0.5, 2.5], abs=1e-6)
    assert found.cost_S.item() == pytest.approx(1.5)
    assert found.resting_S.item()
    # Without the last point the line goes through the others.
    found = fit(line, [0.0, 1.0, 5.0], [7.0, -3.0], [2.0, 1.0, 0.0])
    assert found.theta_SP[0].tolist() == pytest.approx([0.0, 1.0], abs=1e-5)


def test_the_box_is_kept():
    # With a slope of 2 at most the best intercept is 2 - 2 * 1 = 0.
    found = fit(line, [0.0, 1.0, 5.0], [0.3, 0.1], bound=2.0)
    assert found.theta_SP[0].tolist() == pytest.approx([0.0, 2.0], abs=1e-5)


def test_fits_agree_with_scipy():
    case = CASES["temperature, tanh router"]
    family = family_of(case, 21)
    generator = torch.Generator().manual_seed(0)
    truth_P = family.theta(case.truth)
    model = family.regression.values_and_jacobian
    noise_N = 0.01 * torch.randn(21, generator=generator, dtype=torch.float64)
    target_1N = model(truth_P.unsqueeze(0))[0] + noise_N
    found = levenberg_marquardt(
        model,
        target_1N,
        torch.full_like(target_1N, 100.0),
        truth_P.unsqueeze(0) + 0.1,
        bound=8.0,
        steps=300,
    )

    def residuals(theta):
        f_SN, _ = model(torch.from_numpy(theta).unsqueeze(0))
        return 100.0 * (f_SN - target_1N)[0].numpy()

    theirs = least_squares(residuals, truth_P.numpy() + 0.1, xtol=1e-12, ftol=1e-12)
    assert found.cost_S.item() == pytest.approx(2 * theirs.cost, abs=1e-3)
    ours_1N, _ = model(found.theta_SP)
    theirs_1N, _ = model(torch.from_numpy(theirs.x).unsqueeze(0))
    torch.testing.assert_close(ours_1N, theirs_1N, atol=1e-4, rtol=0)


def wave(theta_SP):
    """sin(theta): zero at 0, and a local minimum of (f - 2)^2 at pi / 2 + 2 pi k."""
    return torch.sin(theta_SP) + 0.1 * theta_SP, (torch.cos(theta_SP) + 0.1).unsqueeze(
        2
    )


def test_the_best_start_wins_for_each_problem_on_its_own():
    target_SN = torch.tensor([[2.0], [-2.0]], dtype=torch.float64)
    starts_SAP = torch.tensor([[[1.0], [7.5]], [[-7.5], [-1.0]]], dtype=torch.float64)
    found = fit_from_starts(
        wave, target_SN, torch.ones_like(target_SN), starts_SAP, bound=9.0, steps=100
    )
    # cos(t) = -0.1 near pi / 2 + 2 pi: t = 7.954, f = 0.995 + 0.795
    assert found.theta_SP[:, 0].tolist() == pytest.approx([7.954, -7.954], abs=1e-3)


def test_slopes_and_intervals_by_hand():
    sizes = [100, 1_000, 10_000]
    assert slope(sizes, np.array([1.0, 0.1, 0.01])) == pytest.approx(-1.0)
    assert slope(sizes, np.array([1.0, np.nan, 0.1])) == pytest.approx(-0.5)
    assert np.isnan(slope(sizes, np.array([1.0, np.nan, np.nan])))
    # mean 0.5, standard error 0.5, t(0.975, 1) = 12.706
    assert interval([0.0, 1.0]) == pytest.approx((-5.853, 6.853), abs=1e-3)
    assert interval([0.3]) == (-float("inf"), float("inf"))
    nan = float("nan")
    errors = torch.tensor([[1.0, nan, 3.0, 7.0], [nan, nan, nan, nan]])
    assert median_curve(errors).tolist() == pytest.approx([3.0, nan], nan_ok=True)


def test_claims_are_judged_by_the_mean():
    half = Claim("loss", "D1", "n^-1/2", -0.6, -0.4)
    assert half.judge([-0.7, -0.4])[1] is True
    assert half.judge([-0.7, -0.6])[1] is False
    assert half.judge([-0.3])[1] is False
    never = Claim("tau", "tau", "slower", slower_than=-0.15)
    assert never.judge([-0.1, 0.0])[1] is True
    assert never.judge([-0.2])[1] is False
    text, holds = Claim("tau", "tau", "reported").judge([-0.1, 0.1])
    assert holds is None
    assert text == "95 % interval -1.27 to 1.27"
