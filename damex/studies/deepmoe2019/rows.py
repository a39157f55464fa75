"""The table of the study and what it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from damex.studies.deepmoe2019.measurements import Case, Measured
from damex.studies.deepmoe2019.widening import STRATEGIES, VGG, conv_parameters
from damex.studies.result import Row

__all__ = ["all_rows", "conclusion"]

Found = Mapping[Case, Sequence[Measured]]
PLAIN: Case = ("plain", "32")
HALF: Case = ("plain", "16")
THIN: Case = ("plain", "5")
CHOSEN: Case = ("sweep", "0.001")
MILLION = 1e6


def all_rows(found: Found) -> list[Row]:
    """The whole table.

    Args:
        found: By case.
    """
    return [
        *_sweep_rows(found),
        *_claim_rows(found),
        *_gate_rows(found),
        *_stage_rows(found),
        *_flop_rows(found),
        *_widening_rows(found),
    ]


def _sweep_rows(found: Found) -> list[Row]:
    rows = [
        _told("accuracy, %", f"plain, width {case[1]}", found[case], _accuracy)
        for case in (PLAIN, HALF, THIN)
    ]
    for case in _sweep(found):
        label = f"lambda {case[1]}"
        rows += [
            _told("accuracy, %", label, found[case], _accuracy),
            _told("active channels, %", label, found[case], _active),
            _told("distinct gate patterns", label, found[case], _patterns, digits=0),
        ]
    falls = [
        min(_active(few) - _active(many) for few, many in pairwise(networks))
        for networks in zip(*(found[case] for case in _sweep(found)), strict=True)
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
    loss = _differences(found[PLAIN], chosen, _accuracy)
    return [
        Row(
            "accuracy lost to the plain network of the same width, points",
            "-",
            loss,
            "mean <= 1",
            _mean(loss) <= 1.0,
            label,
            2,
        ),
        _checked("active channels, %", label, chosen, _active, "< 25", _below(25.0)),
        _checked(
            "distinct gate patterns of the 597 test images",
            label,
            chosen,
            _patterns,
            ">= 100",
            _from(100.0),
            published="not one (A.1)",
            digits=0,
        ),
        *_at_lower_compute(found, HALF, "half the width"),
        *_at_lower_compute(found, THIN, "width 5"),
    ]


def _at_lower_compute(found: Found, plain: Case, which: str) -> list[Row]:
    """The paper's claim: higher accuracy at lower compute than a plain network's."""
    chosen, label = found[CHOSEN], "width 32, lambda 0.001"
    gain = _differences(chosen, found[plain], _accuracy)
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
            _mean(gain) > 0.0,
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


def _gate_rows(found: Found) -> list[Row]:
    chosen, label = found[CHOSEN], "lambda 0.001"
    weak, weak_label = found["weak embedding",], f"weak embedding, {label}"
    return [
        _checked(
            "accuracy of the embedding network alone, %",
            "mu 1",
            chosen,
            lambda one: one.final.embedding_accuracy,
            ">= 85",
            _from(85.0),
        ),
        _told(
            "accuracy of the embedding network alone, %",
            "mu 0",
            found["mu 0",],
            lambda one: one.final.embedding_accuracy,
        ),
        _told("accuracy, %", "mu 0, lambda 0.001", found["mu 0",], _accuracy),
        *_reliance_rows(chosen, label),
        _told("accuracy, %", weak_label, weak, _accuracy),
        _told("active channels, %", weak_label, weak, _active),
        _told(
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
        _told(
            "accuracy with the gates of another image, %",
            label,
            networks,
            lambda one: one.final.borrowed_accuracy,
        ),
        _told(
            "accuracy of a blank image with the real one's gates, %",
            label,
            networks,
            lambda one: one.final.blank_accuracy,
        ),
    ]


def _stage_rows(found: Found) -> list[Row]:
    gated = _gated(found)
    gain = [_accuracy(one) - one.joint.accuracy for one in found[CHOSEN]]
    return [
        _checked(
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
    gated, chosen = _gated(found), found[CHOSEN]
    everything = [one for networks in found.values() for one in networks]
    rows = [
        _checked(
            "logits with gates of 1 minus those without gates",
            "largest, each network",
            everything,
            lambda one: one.open_gate_gap,
            "0",
            lambda value: value == 0.0,
        ),
        _checked(
            "logits with closed channels skipped minus those with them masked",
            "largest, each gated network",
            gated,
            lambda one: one.skip_gap,
            "< 0.001",
            _below(1e-3),
            digits=7,
        ),
        _checked(
            "operations executed over operations by hand, minus 1",
            "each network",
            everything,
            lambda one: abs(one.flops / one.flops_by_hand - 1.0),
            "< 1e-6",
            _below(1e-6),
            digits=7,
        ),
        _checked(
            "operations of the gating path over the convolutions', %",
            "width 32",
            chosen,
            lambda one: 100.0 * one.embedding_flops / one.dense_flops,
            "<= 5",
            lambda value: value <= 5.0,
            published="2",
        ),
    ]
    for case in _sweep(found):
        label = f"lambda {case[1]}, gating path included"
        rows.append(_told("operations left by skipping, %", label, found[case], _left))
    return rows


def _widening_rows(found: Found) -> list[Row]:
    plain = found["VGG", "plain"]
    rows = [_told("accuracy, %", "VGG, plain", plain, _accuracy)]
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
            _told("accuracy, %", label, networks, _accuracy),
            _told("active channels, %", label, networks, _active),
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


def conclusion(rows: Sequence[Row], found: Found) -> str:
    """Says what was confirmed and what was not.

    Args:
        rows: The table.
        found: By case.
    """
    chosen = found[CHOSEN]
    failed = [f"{row.name} ({row.criterion})" for row in rows if row.holds is False]
    tested = sum(row.holds is not None for row in rows)
    text = (
        f"At lambda 0.001 {_mean([_active(one) for one in chosen]):.0f} % of the "
        f"channels are open, in {_mean([_patterns(one) for one in chosen]):.0f} "
        f"patterns, and skipping the others leaves "
        f"{_mean([_left(one) for one in chosen]):.0f} % of the operations at "
        f"{_mean([_accuracy(one) for one in chosen]):.1f} % accuracy against "
        f"{_mean([_accuracy(one) for one in found[PLAIN]]):.1f} % of the plain "
        f"network; {tested - len(failed)} of {tested} criteria hold"
    )
    text += f", but not: {'; '.join(failed)}." if failed else "."
    blank = _mean([one.final.blank_accuracy for one in chosen])
    known = _mean([_accuracy(one) for one in chosen]) - blank < 5.0
    verdict = "nearly all" if known else "not all"
    return (
        f"{text} The gates alone, with a blank image, reach {blank:.1f} %: {verdict} "
        "that the network knows is in them."
    )


def _accuracy(one: Measured) -> float:
    return one.final.accuracy


def _active(one: Measured) -> float:
    return one.final.active


def _patterns(one: Measured) -> float:
    return float(one.final.patterns)


def _left(one: Measured) -> float:
    return 100.0 * one.flops / one.dense_flops


def _sweep(found: Found) -> list[Case]:
    return sorted(
        (case for case in found if case[0] == "sweep"), key=lambda case: float(case[1])
    )


def _gated(found: Found) -> list[Measured]:
    plain = (PLAIN, HALF, THIN, ("VGG", "plain"))
    return [one for case in found if case not in plain for one in found[case]]


def _told(
    name: str,
    label: str,
    networks: Sequence[Measured],
    value: Callable[[Measured], float],
    *,
    digits: int = 2,
) -> Row:
    values = [value(one) for one in networks]
    return Row(name, "-", values, settings=label, digits=digits)


def _checked(
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
    """A row whose criterion has to hold for each network."""
    values = [value(one) for one in networks]
    holds = all(test(one) for one in values)
    return Row(name, published, values, criterion, holds, label, digits)


def _differences(
    first: Sequence[Measured],
    second: Sequence[Measured],
    value: Callable[[Measured], float],
) -> list[float]:
    return [value(one) - value(other) for one, other in zip(first, second, strict=True)]


def _below(limit: float) -> Callable[[float], bool]:
    return lambda value: value < limit


def _from(limit: float) -> Callable[[float], bool]:
    return lambda value: value >= limit


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
