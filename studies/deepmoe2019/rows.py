"""The table of the study.

What the rows are made of: values of a network, and rows with and without a claim.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from studies.deepmoe2019.measures import Case, Measured
from studies.deepmoe2019.network import STRATEGIES, VGG, conv_parameters
from studies.report import Row

__all__ = [
    "CHOSEN",
    "HALF",
    "PLAIN",
    "THIN",
    "Found",
    "accuracy_of",
    "active_of",
    "all_rows",
    "at_least",
    "below",
    "checked",
    "differences",
    "gated_networks",
    "left_of",
    "patterns_of",
    "sweep_cases",
    "told",
]

MILLION = 1e6


def all_rows(found: Found) -> list[Row]:
    """The whole table.

    Args:
        found: By case.
    """
    return [
        *_sweep_rows(found),
        *_claim_rows(found),
        *_other_rows(found),
        *_gate_rows(found),
        *_stage_rows(found),
        *_flop_rows(found),
        *_widening_rows(found),
    ]


def _sweep_rows(found: Found) -> list[Row]:
    rows = [
        told("accuracy, %", f"plain, width {case[1]}", found[case], accuracy_of)
        for case in (PLAIN, HALF, THIN)
    ]
    for case in sweep_cases(found):
        label = f"lambda {case[1]}"
        rows += [
            told("accuracy, %", label, found[case], accuracy_of),
            told("active channels, %", label, found[case], active_of),
            told("distinct gate patterns", label, found[case], patterns_of, digits=0),
        ]
    falls = [
        min(active_of(few) - active_of(many) for few, many in pairwise(networks))
        for networks in zip(*(found[case] for case in sweep_cases(found)), strict=True)
    ]
    rows.append(
        Row(
            "least fall of active channels from one lambda to the next, points",
            "-",
            falls,
            "> 0 for all seeds",
            min(falls) > 0.0,
            digits=2,
        )
    )
    return rows


def _claim_rows(found: Found) -> list[Row]:
    chosen, label = found[CHOSEN], "lambda 0.001"
    loss = differences(found[PLAIN], chosen, accuracy_of)
    return [
        Row(
            "accuracy lost to the plain network of the same width, points",
            "-",
            loss,
            "mean <= 1",
            fmean(loss) <= 1.0,
            label,
            2,
        ),
        checked("active channels, %", label, chosen, active_of, "< 25", below(25.0)),
        checked(
            "distinct gate patterns of the 597 test images",
            label,
            chosen,
            patterns_of,
            ">= 100",
            at_least(100.0),
            published="not one (A.1)",
            digits=0,
        ),
        *_at_lower_compute(found, HALF, "half the width"),
        *_at_lower_compute(found, THIN, "width 5"),
    ]


def _at_lower_compute(found: Found, plain: Case, which: str) -> list[Row]:
    """The paper's claim: higher accuracy at lower compute than a plain network's."""
    chosen, label = found[CHOSEN], "width 32, lambda 0.001"
    gain = differences(chosen, found[plain], accuracy_of)
    share = [
        gated.flops / other.flops
        for gated, other in zip(chosen, found[plain], strict=True)
    ]
    return [
        Row(
            f"accuracy minus that of the plain network of {which}, points",
            "> 0",
            gain,
            "mean > 0",
            fmean(gain) > 0.0,
            label,
            2,
        ),
        Row(
            f"operations over those of the plain network of {which}",
            "< 1",
            share,
            "< 1 for all seeds",
            max(share) < 1.0,
            label,
            2,
        ),
    ]


def _other_rows(found: Found) -> list[Row]:
    """Whether another training changes what the gates cost."""
    rows = []
    for case in found:
        if case[0] != "other":
            continue
        gated, plain = found[case], found["plain", case[1]]
        label = f"{case[1]}, lambda 0.001"
        loss = differences(plain, gated, accuracy_of)
        name = "accuracy lost to the plain network of the same width, points"
        rows += [
            told("accuracy, %", f"{case[1]}, plain", plain, accuracy_of),
            told("accuracy, %", label, gated, accuracy_of),
            told("active channels, %", label, gated, active_of),
            Row(name, "-", loss, settings=label, digits=2),
        ]
    return rows


def _gate_rows(found: Found) -> list[Row]:
    chosen, label = found[CHOSEN], "lambda 0.001"
    weak, weak_label = found["weak embedding",], f"weak embedding, {label}"
    return [
        checked(
            "accuracy of the embedding network alone, %",
            "mu 1",
            chosen,
            lambda one: one.final.embedding_accuracy,
            ">= 85",
            at_least(85.0),
        ),
        told(
            "accuracy of the embedding network alone, %",
            "mu 0",
            found["mu 0",],
            lambda one: one.final.embedding_accuracy,
        ),
        told("accuracy, %", "mu 0, lambda 0.001", found["mu 0",], accuracy_of),
        told(
            "accuracy of the embedding network on training images, %",
            label,
            chosen,
            lambda one: one.final.embedding_train_accuracy,
        ),
        *_reliance_rows(chosen, label),
        told("accuracy, %", weak_label, weak, accuracy_of),
        told("active channels, %", weak_label, weak, active_of),
        told(
            "accuracy of the embedding network alone, %",
            weak_label,
            weak,
            lambda one: one.final.embedding_accuracy,
        ),
        *_reliance_rows(weak, weak_label),
    ]


def _reliance_rows(networks: Sequence[Measured], label: str) -> list[Row]:
    """How much of the answer is in the gates, and how much in the channels."""
    return [
        told(
            "answers that are the embedding's, %",
            label,
            networks,
            lambda one: one.final.copied,
        ),
        told(
            "accuracy with the gates of another image, %",
            label,
            networks,
            lambda one: one.final.borrowed_accuracy,
        ),
        told(
            "accuracy of a blank image with the real one's gates, %",
            label,
            networks,
            lambda one: one.final.blank_accuracy,
        ),
    ]


def _stage_rows(found: Found) -> list[Row]:
    gated = gated_networks(found)
    gain = [accuracy_of(one) - one.joint.accuracy for one in found[CHOSEN]]
    return [
        checked(
            "change of embedding, heads and batch-norm statistics in stage 2",
            "largest, each gated network",
            gated,
            lambda one: one.gating_moved,
            "0",
            lambda value: value == 0.0,
        ),
        Row("accuracy gained in stage 2, points", "-", gain, settings="lambda 0.001"),
    ]


def _flop_rows(found: Found) -> list[Row]:
    gated, chosen = gated_networks(found), found[CHOSEN]
    everything = [one for networks in found.values() for one in networks]
    rows = [
        checked(
            "logits with gates of 1 minus those without gates",
            "largest, each network",
            everything,
            lambda one: one.open_gate_gap,
            "0",
            lambda value: value == 0.0,
        ),
        checked(
            "logits with closed channels skipped minus those with them masked",
            "largest, each gated network",
            gated,
            lambda one: one.skip_gap,
            "< 0.001",
            below(1e-3),
            digits=7,
        ),
        checked(
            "operations executed over operations by hand, minus 1",
            "each network",
            everything,
            lambda one: abs(one.flops / one.flops_by_hand - 1.0),
            "< 1e-6",
            below(1e-6),
            digits=7,
        ),
        checked(
            "operations of the gating path over the convolutions', %",
            "width 32",
            chosen,
            lambda one: 100.0 * one.embedding_flops / one.dense_flops,
            "<= 5",
            lambda value: value <= 5.0,
            published="2",
        ),
    ]
    for case in sweep_cases(found):
        label = f"lambda {case[1]}, gating path included"
        rows.append(told("operations left by skipping, %", label, found[case], left_of))
    return rows


def _widening_rows(found: Found) -> list[Row]:
    plain = found["VGG", "plain"]
    rows = [told("accuracy, %", "VGG, plain", plain, accuracy_of)]
    for case in found:
        if case[0] != "VGG" or case[1] == "plain":
            continue
        networks, label = found[case], f"VGG, {case[1]}, gated"
        weights = conv_parameters(STRATEGIES.get(case[1], VGG)) / MILLION
        rows += [
            Row(
                "convolution weights at the paper's size, million",
                "-",
                [weights],
                settings=label,
                digits=1,
            ),
            told("accuracy, %", label, networks, accuracy_of),
            told("active channels, %", label, networks, active_of),
            Row(
                "operations over the plain VGG's",
                "-",
                [
                    one.flops / other.flops
                    for one, other in zip(networks, plain, strict=True)
                ],
                settings=label,
                digits=2,
            ),
        ]
    return rows


Found = Mapping[Case, Sequence[Measured]]
PLAIN: Case = ("plain", "32")
HALF: Case = ("plain", "16")
THIN: Case = ("plain", "5")
CHOSEN: Case = ("sweep", "0.001")


def accuracy_of(one: Measured) -> float:
    """Test accuracy after stage 2, in percent."""
    return one.final.accuracy


def active_of(one: Measured) -> float:
    """Open channels, in percent."""
    return one.final.active


def patterns_of(one: Measured) -> float:
    """Different sets of open channels among the test images."""
    return float(one.final.patterns)


def left_of(one: Measured) -> float:
    """Operations that skipping leaves, the gating path's included, in percent."""
    return 100.0 * one.flops / one.dense_flops


def sweep_cases(found: Found) -> list[Case]:
    """The cases that differ in lambda, in rising order."""
    return sorted(
        (case for case in found if case[0] == "sweep"), key=lambda case: float(case[1])
    )


def gated_networks(found: Found) -> list[Measured]:
    """All networks that have gates."""
    return [one for case in found if "plain" not in case for one in found[case]]


def told(
    name: str,
    label: str,
    networks: Sequence[Measured],
    value: Callable[[Measured], float],
    *,
    digits: int = 2,
) -> Row:
    """A row of which nothing is claimed.

    Args:
        name: What is measured.
        label: Of which networks.
        networks: One per seed.
        value: What is measured of a network.
        digits: Decimals to print.
    """
    values = [value(one) for one in networks]
    return Row(name, "-", values, settings=label, digits=digits)


def checked(
    name: str,
    label: str,
    networks: Sequence[Measured],
    value: Callable[[Measured], float],
    criterion: str,
    test: Callable[[float], bool],
    *,
    published: str = "-",
    digits: int = 2,
) -> Row:
    """A row whose criterion has to hold for each network.

    Args:
        name: What is measured.
        label: Of which networks.
        networks: One per seed.
        value: What is measured of a network.
        criterion: In words.
        test: The same for one value.
        published: The value of the paper.
        digits: Decimals to print.
    """
    values = [value(one) for one in networks]
    holds = all(test(one) for one in values)
    return Row(name, published, values, criterion, holds, label, digits)


def differences(
    first: Sequence[Measured],
    second: Sequence[Measured],
    value: Callable[[Measured], float],
) -> list[float]:
    """What the first networks have more than the second, seed by seed."""
    return [value(one) - value(other) for one, other in zip(first, second, strict=True)]


def below(limit: float) -> Callable[[float], bool]:
    """A test for `checked`."""
    return lambda value: value < limit


def at_least(limit: float) -> Callable[[float], bool]:
    """A test for `checked`."""
    return lambda value: value >= limit
