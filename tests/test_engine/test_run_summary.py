import io

import pytest
from rich.console import Console

from damex.engine.run_summary import score_table, summarise

SCORES = {
    "fish/AP": 0.25,
    "fish/AP50": 0.5,
    "fish/AP75": 0.2,
    "fish/images": 3,
    "fish/boxes": 7,
    "fish/own_share": 0.875,
    "boards/AP": float("nan"),
    "boards/AP50": float("nan"),
    "boards/AP75": float("nan"),
    "boards/images": 2,
    "boards/boxes": 0,
    "boards/own_share": 1.0,
    "mean/AP": 0.25,
    "mean/AP50": 0.5,
    "mean/own_share": 0.9375,
    "mean/busiest_share": 0.625,
}


def test_summary_has_the_promised_keys():
    assert summarise(SCORES) == dict(
        mean_ap50=0.5,
        mean_ap=0.25,
        datasets=dict(
            fish=dict(ap=0.25, ap50=0.5, images=3, boxes=7),
            boards=dict(ap=None, ap50=None, images=2, boxes=0),
        ),
        own_expert_share=dict(fish=0.875, boards=1.0, mean=0.9375),
        busiest_expert_share=0.625,
    )


def test_a_dense_detector_has_no_share():
    dense = {k: v for k, v in SCORES.items() if not k.endswith("_share")}
    assert set(summarise(dense)) == {"mean_ap50", "mean_ap", "datasets"}


@pytest.mark.parametrize(
    ("dataset", "cells"),
    [
        ("fish", ["3", "7", "0.250", "0.500", "87.5%"]),
        ("boards", ["2", "0", "-", "-", "100.0%"]),
        ("mean", ["", "", "0.250", "0.500", "93.8%"]),
    ],
)
def test_table_shows_one_row_per_dataset_and_the_mean(dataset, cells):
    screen = io.StringIO()
    Console(file=screen, width=100).print(score_table(SCORES))
    row = next(line for line in screen.getvalue().splitlines() if dataset in line)
    shown = [cell.strip() for cell in row.replace("│", "|").split("|")[2:-1]]
    assert shown == cells
