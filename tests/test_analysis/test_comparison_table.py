import pytest

from damex.analysis.comparison_table import comparison_row, markdown_table


def scored(ap50, share=None):
    summary = dict(mean_ap50=ap50, mean_ap=ap50 / 2, datasets=dict(a=dict(ap50=ap50)))
    if share is not None:
        summary["own_expert_share"] = dict(a=share, mean=share)
        summary["busiest_expert_share"] = share / 2
    return summary


def timed(seconds, memory):
    return dict(train_seconds=seconds, iterations=40, peak_memory_mib=memory)


@pytest.fixture
def rows():
    dense = comparison_row(
        "dense",
        [scored(0.25), scored(0.75)],
        [timed(40, 900), timed(8, 901), timed(10, 950)],
    )
    damex = comparison_row(
        "damex", [scored(0.5, 0.75), scored(0.5, 0.25)], [timed(12, 1000)]
    )
    return [dense, damex]


def test_rows_hold_mean_sample_deviation_and_medians(rows):
    dense, damex = rows
    # Deviations of 0.25 and 0.75 from 0.5: sqrt((1/16 + 1/16) / (2 - 1)).
    assert dense["ap50"] == pytest.approx((0.5, 0.125**0.5))
    assert dense["ap"] == pytest.approx((0.25, 0.125**0.5 / 2))
    assert dense["ap50_seeds"] == [0.25, 0.75]
    assert dense["datasets"]["a"] == dense["ap50"]
    assert dense["own_share"] is None
    assert damex["own_share"] == pytest.approx((0.5, 0.125**0.5))
    assert dense["seconds_per_iteration"] == pytest.approx(10 / 40)
    assert dense["peak_memory_mib"] == 901


def test_one_seed_has_no_spread():
    assert comparison_row("damex", [scored(0.5)])["ap50"] == (0.5, None)


def test_a_mixture_without_a_finished_run_has_no_numbers():
    row = comparison_row("damex", [])
    assert row["seeds"] == 0
    assert row["ap50"] is None
    assert markdown_table([row]).splitlines()[2].count("| -") == 7


def test_the_table_compares_times_with_the_first_row(rows):
    lines = markdown_table(rows).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    dense = ["dense", "0.500 ± 0.354", "0.250 ± 0.177", "-", "-", "0.250", "1.00"]
    damex = ["damex", "0.500 ± 0.000", "0.250 ± 0.000", "50.0%", "25.0%", "0.300"]
    assert cells[2] == [*dense, "901 MiB"]
    assert cells[3] == [*damex, "1.20", "1000 MiB"]
