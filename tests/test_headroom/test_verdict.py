"""Paired differences by hand, and the rule on scores made by hand."""

import math

import pytest

from damex.workbench.headroom.verdict import (
    Difference,
    Spread,
    best_head,
    decide,
    paired_difference,
    spread,
)

DENSE = [0.40, 0.42, 0.41]


def plus(*gains, base=DENSE):
    return [value + gain for value, gain in zip(base, gains, strict=True)]


def test_nothing_above_dense_means_no():
    verdict = decide(
        dict(
            dense=DENSE,
            wide_decoder=plus(0.01, -0.01, 0.0),
            single=plus(-0.02, -0.03, -0.02),
        )
    )
    assert (verdict.answer, verdict.above, verdict.open) == ("no", (), ())
    assert str(verdict).startswith(
        "Experts are not shown to help: nothing that they could draw on is above dense "
        "in mean AP (family-wise level 5%: Holm, 2 comparisons): wide_decoder"
    )
    assert "single -0.023" in str(verdict)


@pytest.mark.parametrize(
    ("baseline", "cause"),
    [
        ("wide_decoder", "capacity"),
        ("wide_encoder", "capacity"),
        ("single", "interference"),
        ("oracle", "routing"),
    ],
)
def test_a_baseline_whose_interval_is_above_0_means_yes_and_names_the_cause(
    baseline, cause
):
    verdict = decide({"dense": DENSE, baseline: plus(0.03, 0.031, 0.029)})
    assert (verdict.answer, verdict.above) == ("yes", (baseline,))
    assert not verdict.is_guess
    assert "Experts can help: above dense in mean AP by" in str(verdict)
    assert cause in str(verdict)


def test_a_large_difference_with_a_larger_interval_is_undecided():
    verdict = decide(dict(dense=DENSE, single=plus(0.0, 0.05, 0.1)))
    assert (verdict.answer, verdict.above, verdict.open) == (
        "undecided",
        (),
        ("single",),
    )
    assert "more seeds would tell" in str(verdict)


# The interval of 95% begins at 0.004, that of 97.5% below 0.
LUCKY = plus(0.010, 0.014, 0.018)
SURE, NOTHING = plus(0.03, 0.0301, 0.0299), plus(0.002, -0.01, 0.005)


@pytest.mark.parametrize(
    ("baselines", "above", "answer"),
    [
        (dict(oracle=LUCKY), ("oracle",), "yes"),
        (dict(oracle=LUCKY, single=NOTHING), (), "undecided"),
        # What is sure makes room for the next one.
        (dict(oracle=LUCKY, single=SURE), ("single", "oracle"), "yes"),
        (dict(oracle=LUCKY, single=SURE, wide_encoder=NOTHING), ("single",), "yes"),
        (dict(oracle=NOTHING, single=NOTHING), (), "no"),
    ],
)
def test_a_lucky_baseline_of_several_is_not_enough(baselines, above, answer):
    verdict = decide(dict(dense=DENSE, **baselines))
    assert (verdict.above, verdict.answer) == (above, answer)
    correction = f"(family-wise level 5%: Holm, {len(baselines)} comparisons)"
    assert (correction in str(verdict)) == (len(baselines) > 1)


def test_what_a_higher_learning_rate_wins_too_is_no_headroom():
    faster, wide = plus(0.03, 0.03, 0.03), plus(0.03, 0.031, 0.029)
    alone = decide(dict(dense=DENSE, wide_encoder=wide))
    controlled = decide(dict(dense=DENSE, dense_lr2=faster, wide_encoder=wide))
    assert alone.answer == "yes"
    assert controlled.answer == "no"
    assert controlled.reference == "dense_lr2"
    assert "Twice the learning rate alone gives +0.030" in str(controlled)
    assert str(controlled).endswith("would be learning speed.")


def test_a_learning_rate_that_may_win_nothing_is_not_said_to_win():
    faster = plus(0.03, -0.03, 0.02)
    verdict = decide(dict(dense=DENSE, dense_lr2=faster, single=DENSE))
    assert verdict.reference == "dense_lr2"
    ending = "gives +0.007 [-0.073, +0.087] over dense, which is within the noise."
    assert str(verdict).endswith(ending)


def test_a_learning_rate_that_is_too_high_does_not_lower_the_bar():
    slower = plus(-0.1, -0.1, -0.1)
    verdict = decide(dict(dense=DENSE, dense_lr2=slower, single=plus(-0.01, 0.0, 0.0)))
    assert (verdict.answer, verdict.reference) == ("no", "dense")
    assert "learning rate" not in str(verdict)


@pytest.mark.parametrize(("gain", "answer"), [(0.019, "no"), (0.021, "yes")])
def test_one_seed_needs_0_02_and_is_called_a_guess(gain, answer):
    verdict = decide(dict(dense=[0.4], wide_decoder=[0.4 + gain]))
    assert (verdict.answer, verdict.is_guess) == (answer, True)
    assert "(a guess from a single seed)" in str(verdict)


@pytest.mark.parametrize(
    "rows",
    [
        dict(dense=DENSE, dense_lr2=plus(0.1, 0.1, 0.1)),
        dict(single=DENSE),
        dict(dense=[None] * 3, single=DENSE),
    ],
)
def test_controls_alone_or_a_missing_dense_detector_have_no_verdict(rows):
    assert decide(rows) is None


def test_the_best_head_of_one_seed_is_called_a_guess():
    text = best_head(dict(dense=[0.25], partitioned=[0.5]))
    words = "A head per dataset is best (a guess from a single seed): partitioned"
    assert text == f"{words} +0.250 over dense in mean AP. "
    assert best_head(dict(dense=[0.25], partitioned=[0.265])) == ""


@pytest.mark.parametrize(("of_single", "is_best"), [(0.375, True), (0.625, False)])
def test_the_best_head_is_that_over_common_seeds(of_single, is_best):
    rows = dict(
        dense=[0.25, 0.25, 0.25],
        partitioned=[0.5, None, 0.5],
        single=[of_single, 0.875, None],
        oracle=[None, 0.875, None],
    )
    assert (best_head(rows) != "") == is_best


@pytest.mark.parametrize(
    "rows",
    [
        dict(dense=[0.25]),
        dict(partitioned=[0.5]),
        dict(dense=[0.25, None], partitioned=[None, 0.5]),
    ],
)
def test_without_a_pair_of_seeds_no_head_is_best(rows):
    assert best_head(rows) == ""


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


def test_seeds_that_both_have_are_compared_and_what_they_share_cancels():
    base = [0.1, 0.5, 0.9]
    found = paired_difference([value + 0.01 for value in base], base)
    assert found.ci95 == pytest.approx((0.01, 0.01))
    assert paired_difference([0.5, None, 0.75], [None, 0.1, 0.5]) == (0.25, None)
    assert paired_difference([None], [0.5]) is None


def test_words():
    assert str(Spread(0.5, None)) == "0.500"
    assert str(Spread(0.5, 0.25)) == "0.500 ± 0.250"
    assert str(Difference(-0.5, None)) == "-0.500"
    assert str(Difference(0.5, (-0.25, 1.25))) == "+0.500 [-0.250, +1.250]"
