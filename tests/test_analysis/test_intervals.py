"""Spreads and paired t-intervals by hand."""

import math

import pytest

from damex.analysis.intervals import Difference, Spread, paired_difference, spread


def test_spread_is_mean_and_sample_deviation():
    assert spread([0.25, None, 0.75]) == pytest.approx((0.5, 0.125**0.5))
    assert spread([0.5]) == (0.5, None)
    assert spread([None]) is None


def test_the_interval_is_student_t_of_the_differences():
    # Differences 1, 2, 3: deviation 1. With two degrees of freedom the quantile is
    # (2p - 1) / sqrt(2p (1 - p)), for p = 0.975 about 4.3027.
    found = paired_difference([1.5, 2.5, 3.5], [0.5, 0.5, 0.5])
    reach = 0.95 / math.sqrt(2 * 0.975 * 0.025) / math.sqrt(3)
    assert found.mean == pytest.approx(2.0)
    assert found.ci95 == pytest.approx((2.0 - reach, 2.0 + reach))


def test_pairs_take_out_what_seeds_have_in_common():
    base = [0.1, 0.5, 0.9]
    found = paired_difference([value + 0.01 for value in base], base)
    assert found.ci95 == pytest.approx((0.01, 0.01))


def test_only_seeds_that_both_have_are_compared():
    assert paired_difference([0.5, None, 0.75], [None, 0.1, 0.5]) == (0.25, None)
    assert paired_difference([None], [0.5]) is None


def test_rows_of_different_seeds_are_refused():
    with pytest.raises(ValueError, match="zip"):
        paired_difference([0.5, 0.5], [0.5])


def test_words():
    assert str(Spread(0.5, None)) == "0.500"
    assert str(Spread(0.5, 0.25)) == "0.500 ± 0.250"
    assert str(Difference(-0.5, None)) == "-0.500"
    assert str(Difference(0.5, (-0.25, 1.25))) == "+0.500 [-0.250, +1.250]"
