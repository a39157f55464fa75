"""Rows of a ladder from summaries made by hand, and their table."""

import json

import pytest
from rich.console import Console

from damex.headroom.command import _write
from damex.headroom.report import (
    dot_plot,
    ladder_table,
    report,
    rung_row,
    single_row,
    with_differences,
    zeroed_rows,
)


def summary(pooled=0.1, **ap):
    return dict(
        mean_ap50=2 * sum(ap.values()) / len(ap),
        mean_ap=sum(ap.values()) / len(ap),
        pooled_ap=pooled,
        datasets={name: dict(ap=v, ap50=2 * v) for name, v in ap.items()},
    )


@pytest.fixture
def rows():
    dense = rung_row([summary(a=0.25, b=0.5), summary(a=0.125, b=0.25)])
    single = single_row(
        {
            "a": rung_row([summary(a=0.5), None]),
            "b": rung_row([summary(b=0.25), summary(b=0.375)]),
        }
    )
    return with_differences(dict(dense=dense, single=single), base="dense")


def test_a_row_has_a_number_per_seed(rows):
    assert rows["dense"]["mean_ap"] == [0.375, 0.1875]
    assert rows["dense"]["mean_ap50"] == [0.75, 0.375]
    assert rows["dense"]["pooled_ap"] == [0.1, 0.1]
    assert rows["dense"]["datasets"]["a"] == dict(ap=[0.25, 0.125], ap50=[0.5, 0.25])
    assert rows["dense"]["minus_dense"] is None


def test_single_is_the_mean_over_the_detectors_of_one_dataset_each(rows):
    single = rows["single"]
    assert single["mean_ap"] == [0.375, None]  # a is missing in the second seed
    assert single["pooled_ap"] == [None, None]
    assert single["datasets"]["a"]["ap"] == [0.5, None]
    assert single["datasets"]["b"]["ap"] == [0.25, 0.375]
    assert single["minus_dense"] == dict(mean=0.0, ci95=None)


def test_a_rung_without_a_run_has_no_numbers():
    row = rung_row([None, None])
    assert row["mean_ap"] == [None, None]
    compared = with_differences(
        dict(dense=rung_row([summary(a=0.5)] * 2), wide_decoder=row), base="dense"
    )
    assert ladder_table(compared, kind="rung").splitlines()[3].count("| -") == 5


def test_the_table_has_a_column_per_dataset(rows):
    lines = ladder_table(rows, kind="rung").splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0][:4] == ["rung", "mean AP50", "mean AP", "minus dense [95%]"]
    assert cells[0][4:] == ["pooled AP", "a AP", "b AP"]
    assert cells[2][2:5] == ["0.281 ± 0.133", "-", "0.100 ± 0.000"]
    assert cells[3][2:] == ["0.375", "+0.000", "-", "0.500", "0.312 ± 0.088"]


def test_zeroed_rows_are_compared_with_the_detector_as_it_is():
    scores = dict(mean_ap50=0.25, mean_ap=0.125, pooled_ap=0.0625)
    runs = [{**summary(a=0.5), "zeroed": {"encoder.0": scores}}, None]
    rows = with_differences(zeroed_rows(runs), base="none")
    assert list(rows) == ["none", "encoder.0"]
    assert rows["none"]["mean_ap"] == [0.5, None]
    assert rows["encoder.0"]["pooled_ap"] == [0.0625, None]
    assert rows["encoder.0"]["minus_none"] == dict(mean=-0.375, ci95=None)
    assert "-0.375" in ladder_table(rows, kind="zeroed FFN")
    assert zeroed_rows([None]) == {}


def test_the_report_joins_the_singles_and_can_be_json():
    found = report(
        {
            "dense": [summary(a=0.25, b=0.25), summary(a=0.25, b=0.375)],
            "single_a": [summary(a=0.5), summary(a=0.5)],
            "single_b": [summary(b=0.5), summary(b=0.625)],
        },
        datasets=["a", "b"],
        seeds=[4, 5],
    )
    found = json.loads(json.dumps(found))
    assert list(found["rungs"]) == ["dense", "single"]
    assert found["rungs"]["single"]["minus_dense"] == dict(mean=0.25, ci95=[0.25, 0.25])
    verdict = found["verdict"]
    assert (verdict["answer"], verdict["above"]) == ("yes", ["single"])
    assert verdict["differences"]["single"]["mean"] == 0.25
    assert "interference" in verdict["text"]
    assert found["zeroed"] == {}


@pytest.mark.parametrize(
    ("scores", "helps"), [((0.5, 0.625), True), ((0.5, 0.25), False)]
)
def test_experts_are_scored_against_the_better_dense_detector(scores, helps):
    found = report(
        {
            "dense": [summary(a=0.125), summary(a=0.25)],
            "dense_lr2": [summary(a=0.25), summary(a=0.375)],
            "wide_decoder": [summary(a=0.25), summary(a=0.375)],
            "mine": [summary(a=score) for score in scores],
            "failed": [None, None],
        },
        datasets=["a"],
        seeds=[0, 1],
        experts=["mine", "failed"],
    )
    assert list(found["experts"]) == ["mine"]
    one = json.loads(json.dumps(found["experts"]["mine"]))
    # Seed by seed: 0.5 - 0.25 and the other one - 0.375.
    assert one["minus_best_dense"]["mean"] == (0.25 + scores[1] - 0.375) / 2
    assert one["helps"] is helps
    assert found["verdict"]["answer"] == "no"  # the experts are no part of the verdict


def test_without_a_verdict_experts_are_still_compared_and_gaps_are_named(tmp_path):
    found = report(
        {
            "dense": [summary(a=0.125), summary(a=0.25)],
            "dense_lr2": [summary(a=0.25), None],
            "partitioned": [None, None],
            "mine": [summary(a=0.5), summary(a=0.5)],
        },
        datasets=["a"],
        seeds=[4, 7],
        experts=["mine"],
    )
    _write(tmp_path, found, Console(quiet=True))
    paragraphs = (tmp_path / "headroom.md").read_text().split("\n\n")
    assert paragraphs[1:] == [
        "Not included: wide_decoder, wide_encoder, single, oracle.",
        "Missing: seed 7 of dense_lr2, seed 4 of partitioned, seed 7 of partitioned. "
        "Differences are over common seeds.",
        "No verdict: it needs a seed of dense and of one of wide_decoder, "
        "wide_encoder, single, oracle.",
        "mine helps: +0.250 over dense_lr2 in mean AP.\n",
    ]


def test_every_seed_is_a_dot_beside_its_name():
    rows = dict(dense=[0.2, 0.4], failed=[None], damex=[0.6, None])
    axes = dot_plot(rows, score="mean AP50").axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["dense", "damex"]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [list(line.get_xdata()) for line in dots] == [[0.2, 0.4], [0.6]]
    assert [list(line.get_ydata()) for line in dots] == [[0, 0], [1]]
    assert axes.get_ylim() == (1.5, -0.5)  # both rows are inside, the first on top
    band = axes.patches[0]
    deviation = 0.02**0.5  # of 0.2 and 0.4 from 0.3, by one degree of freedom
    assert band.get_x() == pytest.approx(0.3 - deviation)
    assert band.get_width() == pytest.approx(2 * deviation)


def test_nothing_finished_is_an_empty_picture():
    axes = dot_plot(dict(failed=[]), score="mean AP50").axes[0]
    assert not axes.lines
