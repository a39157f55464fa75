"""None"""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from damex.engine.summary import (
    FOUND_COLOUR,
    GAP,
    HEADER,
    TRUTH_COLOUR,
    Panel,
    draw_panels,
    score_table,
    summarise,
)

SCORES = {
    "fish/AP": 0.25,
    "fish/AP50": 0.5,
    "fish/AP75": 0.2,
    "fish/images": 3,
    "fish/boxes": 7,
    "fish/routing_accuracy": 0.875,
    "boards/AP": float("nan"),
    "boards/AP50": float("nan"),
    "boards/AP75": float("nan"),
    "boards/images": 2,
    "boards/boxes": 0,
    "boards/routing_accuracy": 1.0,
    "mean/AP": 0.25,
    "mean/AP50": 0.5,
    "mean/routing_accuracy": 0.9375,
    "mean/max_load": 0.625,
    "pooled/AP": 0.125,
    "pooled/AP50": 0.375,
    "pooled/images": 5,
}


def test_summary_has_the_promised_keys():
    assert summarise(SCORES) == dict(
        mean_ap50=0.5,
        mean_ap=0.25,
        pooled_ap50=0.375,
        pooled_ap=0.125,
        datasets=dict(
            fish=dict(ap=0.25, ap50=0.5, images=3, boxes=7),
            boards=dict(ap=None, ap50=None, images=2, boxes=0),
        ),
        routing_accuracy=dict(fish=0.875, boards=1.0, mean=0.9375),
        max_load=0.625,
    )


def test_a_dense_detector_has_no_share():
    routing = ("routing_accuracy", "max_load")
    dense = {k: v for k, v in SCORES.items() if not k.endswith(routing)}
    shares = {"routing_accuracy", "max_load"}
    assert set(summarise(dense)) == set(summarise(SCORES)) - shares


@pytest.mark.parametrize(
    ("dataset", "cells"),
    [
        ("fish", ["3", "7", "0.250", "0.500", "87.5%"]),
        ("boards", ["2", "0", "-", "-", "100.0%"]),
        ("mean", ["", "", "0.250", "0.500", "93.8%"]),
        ("pooled", ["", "", "0.125", "0.375", ""]),
    ],
)
def test_table_shows_one_row_per_dataset_the_mean_and_the_pooled_scores(dataset, cells):
    screen = io.StringIO()
    Console(file=screen, width=100).print(score_table(SCORES))
    row = next(line for line in screen.getvalue().splitlines() if dataset in line)
    shown = [cell.strip() for cell in row.replace("│", "|").split("|")[2:-1]]
    assert shown == cells


GREY = (120, 120, 120)


@pytest.fixture
def picture(tmp_path):
    """Writes a grey image of the given width and height and returns its path."""

    def write(width, height, mode="RGB"):
        path = tmp_path / f"{width}x{height}{mode}.png"
        Image.new("RGB", (width, height), GREY).convert(mode).save(path)
        return str(path)

    return write


def where(sheet, colour):
    """Rows and columns of the pixels that have exactly this colour."""
    return np.nonzero((np.asarray(sheet) == colour).all(axis=2))


def halves(sheet, size):
    """The two images of the first panel."""
    x, y = GAP, GAP + HEADER
    right = x + size + GAP // 2
    return (
        sheet.crop((x, y, x + size, y + size)),
        sheet.crop((right, y, right + size, y + size)),
    )


def test_sheet_has_a_row_per_dataset_and_room_for_the_longest_row(picture):
    panel = Panel(picture(40, 40), [], [])
    sheet = draw_panels({"a": [panel], "b": [panel, panel, panel]}, panel_size=64)
    # Three pairs of 2 * 64 + GAP with a gap around each; two rows with headers.
    assert sheet.width == 3 * (2 * 64 + GAP + GAP) + GAP
    assert sheet.height == 2 * (64 + HEADER + GAP) + GAP
    assert sheet.mode == "RGB"


def test_truth_is_left_and_detections_are_right(picture):
    panel = Panel(
        picture(100, 100),
        truth=[("cat", (10, 40, 30, 60))],
        found=[("dog", 0.5, (50, 60, 90, 80))],
    )
    left, right = halves(draw_panels({"a": [panel]}, panel_size=200), 200)
    assert len(where(left, FOUND_COLOUR)[0]) == 0
    assert len(where(right, TRUTH_COLOUR)[0]) == 0
    # Scale 2: the truth spans 20..60 x 80..120, its name stands above of it.
    rows, columns = where(left, TRUTH_COLOUR)
    assert (columns.min(), rows.max()) == (20, 120)
    assert left.getpixel((60, 110)) == TRUTH_COLOUR
    assert left.getpixel((40, 100)) == GREY
    # 100..180 x 120..160
    rows, columns = where(right, FOUND_COLOUR)
    assert (columns.min(), columns.max(), rows.max()) == (100, 180, 160)


def test_every_box_is_drawn(picture):
    boxes = [("a", (10, 40, 30, 60)), ("b", (50, 40, 70, 60))]
    panel = Panel(picture(100, 100), boxes, [])
    left, _ = halves(draw_panels({"a": [panel]}, panel_size=100), 100)
    assert left.getpixel((20, 60)) == left.getpixel((60, 60)) == TRUTH_COLOUR


@pytest.mark.parametrize("size", [(100, 200), (200, 100)])
def test_aspect_ratio_is_kept(picture, size):
    panel = Panel(picture(*size), [], [])
    left, _ = halves(draw_panels({"a": [panel]}, panel_size=64), 64)
    rows, columns = where(left, GREY)
    assert (columns.max() + 1, rows.max() + 1) == (
        64 * size[0] // 200,
        64 * size[1] // 200,
    )


@pytest.mark.parametrize("box", [(60, 50, 98, 90), (60, 0, 98, 30)])
@pytest.mark.parametrize("size", [(100, 100), (100, 200)])
def test_name_at_the_border_stays_inside(picture, box, size):
    # The name is longer than the way to the right border; it has to move left of the
    # box and must not be cut off, in portrait images too (half as wide as the panel).
    panel = Panel(picture(*size), [("elephant", box)], [])
    left, _ = halves(draw_panels({"a": [panel]}, panel_size=size[1]), size[1])
    rows, columns = where(left, TRUTH_COLOUR)
    assert columns.min() < 58
    assert rows.min() >= 0
    # The last letter has room: white ink, then the background up to the border.
    inked = where(left.crop((0, 0, *size)), (255, 255, 255))[1]
    assert 60 < inked.max() < 99


def test_grey_images_are_read(picture):
    panel = Panel(picture(40, 40, "L"), [("a", (10, 20, 30, 30))], [])
    left, _ = halves(draw_panels({"a": [panel]}, panel_size=64), 64)
    assert len(where(left, TRUTH_COLOUR)[0]) > 0


def test_numpy_boxes_are_taken(picture):
    box = np.array([10, 20, 30, 30], dtype=np.float32)
    panel = Panel(picture(40, 40), [], [("a", 0.5, box)])
    _, right = halves(draw_panels({"a": [panel]}, panel_size=64), 64)
    assert len(where(right, FOUND_COLOUR)[0]) > 0
    assert box.tolist() == [10, 20, 30, 30]


def test_score_is_written_beside_the_name(picture):
    box = (5, 60, 95, 90)
    plain = Panel(picture(100, 100), [("cat", box)], [])
    scored = Panel(picture(100, 100), [], [("cat", 0.5, box)])
    left, _ = halves(draw_panels({"a": [plain]}, panel_size=200), 200)
    _, right = halves(draw_panels({"a": [scored]}, panel_size=200), 200)
    # The name's plate lies above of the box, which begins at row 120 - 1; "cat 0.50" is
    # more than twice as long as "cat".
    widths = [
        np.ptp(where(half.crop((0, 0, 200, 118)), colour)[1])
        for half, colour in ((left, TRUTH_COLOUR), (right, FOUND_COLOUR))
    ]
    assert widths[1] > 2 * widths[0] > 0
