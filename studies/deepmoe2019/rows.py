"""The table of the study, and the values of a network that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from statistics import fmean

from studies.deepmoe2019.measures import Case, Measured
from studies.deepmoe2019.network import STRATEGIES, VGG, conv_parameters
from studies.report import Row, checked, differences

Found = Mapping[Case, Sequence[Measured]]
Value = Callable[[Measured], float]
PLAIN: Case = ("plain", "32")
HALF: Case = ("plain", "16")
THIN: Case = ("plain", "5")
CHOSEN: Case = ("sweep", "0.001")
LABEL = "lambda 0.001"  # of the chosen networks
MILLION = 1e6


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


def all_rows(found: Found) -> list[Row]:
    """The whole table."""
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
        _shown("accuracy, %", f"plain, width {case[1]}", found[case], accuracy_of)
        for case in (PLAIN, HALF, THIN)
    ]
    for case in _sweep_cases(found):
        label = f"lambda {case[1]}"
        rows += [
            _shown("accuracy, %", label, found[case], accuracy_of),
            _shown("active channels, %", label, found[case], active_of),
            _shown("distinct gate patterns", label, found[case], patterns_of, digits=0),
        ]
    falls = [
        min(active_of(few) - active_of(many) for few, many in pairwise(networks))
        for networks in zip(*(found[case] for case in _sweep_cases(found)), strict=True)
    ]
    name = "least fall of active channels from one lambda to the next, points"
    holds = min(falls) > 0.0
    return [*rows, Row(name, "-", falls, "> 0 for all seeds", holds, digits=2)]


def _claim_rows(found: Found) -> list[Row]:
    chosen = found[CHOSEN]
    loss = _accuracy_differences(found[PLAIN], chosen)
    return [
        Row(
            "accuracy lost to the plain network of the same width, points",
            "-",
            loss,
            "mean <= 1",
            fmean(loss) <= 1.0,
            LABEL,
            2,
        ),
        checked(
            "active channels, %",
            _of(chosen, active_of),
            "< 25",
            lambda x: x < 25.0,
            LABEL,
        ),
        checked(
            "distinct gate patterns of the 597 test images",
            _of(chosen, patterns_of),
            ">= 100",
            lambda x: x >= 100.0,
            LABEL,
            published="not one (A.1)",
            digits=0,
        ),
        *_at_lower_compute(chosen, found[HALF], "half the width"),
        *_at_lower_compute(chosen, found[THIN], "width 5"),
    ]


def _at_lower_compute(
    chosen: Sequence[Measured], plain: Sequence[Measured], which: str
) -> list[Row]:
    """The paper's claim: higher accuracy at lower compute than a plain network's."""
    gain = _accuracy_differences(chosen, plain)
    return [
        Row(
            f"accuracy minus that of the plain network of {which}, points",
            "> 0",
            gain,
            "mean > 0",
            fmean(gain) > 0.0,
            f"width 32, {LABEL}",
            2,
        ),
        checked(
            f"operations over those of the plain network of {which}",
            _flop_ratios(chosen, plain),
            "< 1 for all seeds",
            lambda x: x < 1.0,
            f"width 32, {LABEL}",
            published="< 1",
        ),
    ]


def _other_rows(found: Found) -> list[Row]:
    """Whether another training changes what the gates cost."""
    rows = []
    for case in found:
        if case[0] != "other":
            continue
        gated, plain = found[case], found["plain", case[1]]
        label = f"{case[1]}, {LABEL}"
        loss = _accuracy_differences(plain, gated)
        name = "accuracy lost to the plain network of the same width, points"
        rows += [
            _shown("accuracy, %", f"{case[1]}, plain", plain, accuracy_of),
            _shown("accuracy, %", label, gated, accuracy_of),
            _shown("active channels, %", label, gated, active_of),
            Row(name, "-", loss, settings=label, digits=2),
        ]
    return rows


def _gate_rows(found: Found) -> list[Row]:
    chosen, alone = found[CHOSEN], "accuracy of the embedding network alone, %"
    weak, weak_label = found["weak embedding",], f"weak embedding, {LABEL}"

    def embedding(one: Measured) -> float:
        return one.final.embedding_accuracy

    return [
        checked(alone, _of(chosen, embedding), ">= 85", lambda x: x >= 85.0, "mu 1"),
        _shown(alone, "mu 0", found["mu 0",], embedding),
        _shown("accuracy, %", f"mu 0, {LABEL}", found["mu 0",], accuracy_of),
        _shown(
            "accuracy of the embedding network on training images, %",
            LABEL,
            chosen,
            lambda one: one.final.embedding_train_accuracy,
        ),
        *_reliance_rows(chosen, LABEL),
        _shown("accuracy, %", weak_label, weak, accuracy_of),
        _shown("active channels, %", weak_label, weak, active_of),
        _shown(alone, weak_label, weak, embedding),
        *_reliance_rows(weak, weak_label),
    ]


def _reliance_rows(networks: Sequence[Measured], label: str) -> list[Row]:
    """How much of the answer is in the gates, and how much in the channels."""
    wanted: Mapping[str, Value] = {
        "answers that are the embedding's, %": lambda one: one.final.copied,
        "accuracy with the gates of another image, %": (
            lambda one: one.final.borrowed_accuracy
        ),
        "accuracy of a blank image with the real one's gates, %": (
            lambda one: one.final.blank_accuracy
        ),
    }
    return [_shown(name, label, networks, value) for name, value in wanted.items()]


def _stage_rows(found: Found) -> list[Row]:
    gain = [accuracy_of(one) - one.joint.accuracy for one in found[CHOSEN]]
    return [
        checked(
            "change of embedding, heads and batch-norm statistics in stage 2",
            [one.gating_moved for one in _gated(found)],
            "0",
            lambda x: x <= 0.0,
            "largest, each gated network",
        ),
        Row("accuracy gained in stage 2, points", "-", gain, settings=LABEL),
    ]


def _flop_rows(found: Found) -> list[Row]:
    everything = [one for networks in found.values() for one in networks]
    rows = [
        checked(
            "logits with gates of 1 minus those without gates",
            [one.open_gate_gap for one in everything],
            "0",
            lambda x: x <= 0.0,
            "largest, each network",
        ),
        checked(
            "logits with closed channels skipped minus those with them masked",
            [one.skip_gap for one in _gated(found)],
            "< 0.001",
            lambda x: x < 1e-3,
            "largest, each gated network",
            digits=7,
        ),
        checked(
            "operations executed over operations by hand, minus 1",
            [abs(one.flops / one.flops_by_hand - 1.0) for one in everything],
            "< 1e-6",
            lambda x: x < 1e-6,
            "each network",
            digits=7,
        ),
        checked(
            "operations of the gating path over the convolutions', %",
            [100.0 * one.embedding_flops / one.dense_flops for one in found[CHOSEN]],
            "<= 5",
            lambda x: x <= 5.0,
            "width 32",
            published="2",
        ),
    ]
    for case in _sweep_cases(found):
        label = f"lambda {case[1]}, gating path included"
        name = "operations left by skipping, %"
        rows.append(_shown(name, label, found[case], left_of))
    return rows


def _widening_rows(found: Found) -> list[Row]:
    plain = found["VGG", "plain"]
    rows = [_shown("accuracy, %", "VGG, plain", plain, accuracy_of)]
    weights = "convolution weights at the paper's size, million"
    for case in found:
        if case[0] != "VGG" or case[1] == "plain":
            continue
        networks, label = found[case], f"VGG, {case[1]}, gated"
        millions = conv_parameters(STRATEGIES.get(case[1], VGG)) / MILLION
        ratios = _flop_ratios(networks, plain)
        rows += [
            Row(weights, "-", [millions], settings=label, digits=1),
            _shown("accuracy, %", label, networks, accuracy_of),
            _shown("active channels, %", label, networks, active_of),
            Row("operations over the plain VGG's", "-", ratios, "", None, label, 2),
        ]
    return rows


def _sweep_cases(found: Found) -> list[Case]:
    """The cases that differ in lambda, in rising order."""
    return sorted(
        (case for case in found if case[0] == "sweep"), key=lambda case: float(case[1])
    )


def _gated(found: Found) -> list[Measured]:
    return [one for case in found if "plain" not in case for one in found[case]]


def _of(networks: Sequence[Measured], value: Value) -> list[float]:
    return [value(one) for one in networks]


def _accuracy_differences(
    first: Sequence[Measured], second: Sequence[Measured]
) -> list[float]:
    return differences(_of(first, accuracy_of), _of(second, accuracy_of))


def _flop_ratios(first: Sequence[Measured], second: Sequence[Measured]) -> list[float]:
    pairs = zip(first, second, strict=True)
    return [one.flops / other.flops for one, other in pairs]


def _shown(
    name: str,
    label: str,
    networks: Sequence[Measured],
    value: Value,
    *,
    digits: int = 2,
) -> Row:
    """A row of which nothing is claimed."""
    return Row(name, "-", _of(networks, value), settings=label, digits=digits)
