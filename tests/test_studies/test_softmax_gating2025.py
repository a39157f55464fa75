from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.optimize import least_squares

from studies.softmax_gating2025 import identities
from studies.softmax_gating2025.cases import (
    CASES,
    interval,
    median_curve,
    slope,
)
from studies.softmax_gating2025.simulation import (
    Plan,
    family_of,
    fit_from_starts,
    levenberg_marquardt,
    simulate,
)
from studies.softmax_gating2025.study import (
    QUICK_CASES,
)

pytestmark = pytest.mark.studies


def test_every_criterion_holds_in_the_quick_run(result):
    assert [(row.name, row.settings) for row in result.failures()] == []
    judged = [row for row in result.rows if row.holds is not None]
    assert result.conclusion.startswith(f"{len(judged)} of {len(judged)} criteria")
    assert len(judged) >= 20


def test_slopes_tell_the_routers_apart(mean):
    linear, tanh = "temperature, linear router", "temperature, tanh router"
    for what in ("tau", "b1"):
        assert mean(f"exponent of n, {what}", linear) > -0.15
        assert mean(f"exponent of n, {what}", tanh) < -0.4
    for name in QUICK_CASES:
        assert -0.55 < mean("exponent of n, function", name) < -0.45


def test_rescaling_and_merging_by_hand():
    change, loss = identities.rescaling("linear_temperature", factor=2.0)
    assert change < 1e-12
    # masses exp(0.3 / 0.7) and 1 stay; each counts |2 b1 - b1| + |1.4 - 0.7|
    assert loss == pytest.approx(2.718281828 ** (3 / 7) * (2.0 + 0.7) + 0.7)
    change, loss = identities.merge("identity", apart=0.5)
    assert change < 1e-12
    # both copies are 0.5 off in slope and in intercept, their masses sum to exp(0.3)
    assert loss == pytest.approx(2.718281828**0.3)
    # |(0.5, 0.5)|^2 = 0.5 in D1
    change, loss = identities.merge("tanh", apart=0.5)
    assert change > 1e-2
    assert loss == pytest.approx(0.5 * 2.718281828**0.3)


def test_an_over_specified_cell_shrinks_and_a_merged_one_need_not():
    plan = Plan((3_000, 3_000_000), repetitions=4, steps=150, points=21)
    gelu = simulate(replace(CASES["GELU, over"], noise=0.01), plan, seed=0)
    small, large = gelu["over"].nanmedian(1).values.tolist()
    # n^-1/4 makes 1000^(-1/4) = 0.18 of it
    assert large < 0.5 * small
    small, large = gelu["function"].median(1).values.tolist()
    # n^-1/2 makes 1000^(-1/2) = 0.03 of it
    assert 0.01 * small < large < 0.1 * small
    # Linear experts fit as well merged, wherever their copies start: error 2 sqrt(2).
    apart = replace(plan, apart=2.0)
    linear = simulate(replace(CASES["linear, over"], noise=0.01), apart, seed=0)
    assert linear["over"].nanmedian(1).values[1] > 0.5
    assert linear["function"].median(1).values[1] < large * 10


def test_fits_repeat_and_seeds_differ():
    plan = Plan((1_000,), repetitions=2, starts=1, steps=20, points=21)
    case = CASES["tanh, exact"]
    first, again = (simulate(case, plan, seed=0) for _ in range(2))
    assert torch.equal(first["loss"], again["loss"])
    assert not torch.equal(first["loss"], simulate(case, plan, seed=1)["loss"])


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
