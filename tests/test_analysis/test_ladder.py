"""Rows of a ladder from summaries made by hand, and their table."""

import pytest

from damex.analysis.ladder import (
    ladder_table,
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
    assert cells[0][:4] == ["rung", "mean AP50", "mean AP", "minus dense [95 %]"]
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
