"""Each column against errors planted by hand, and the command on a real detector."""

import json

import numpy as np
import pytest

from damex.evaluation import ImageResult
from tools.analysis.lost_ap import row_of

CLASSES = {0: "cat", 3: "dog"}
CAT, DOG = [10.0, 10.0, 30.0, 30.0], [50.0, 50.0, 90.0, 90.0]


def image(boxes, scores, labels):
    def truth(box, label):
        x, y, right, bottom = box
        bbox = [x, y, right - x, bottom - y]
        return dict(bbox=bbox, label=label, area=bbox[2] * bbox[3], iscrowd=0)

    return ImageResult(
        width=100,
        height=100,
        boxes=np.array(boxes),
        scores=np.array(scores),
        labels=np.array(labels),
        ground_truth=[truth(CAT, 0), truth(DOG, 3)],
    )


def row(*found):
    return row_of([image(*zip(*found, strict=True))], CLASSES, size=(50, 200))


def test_right_detections_lose_nothing_and_sides_are_in_resized_pixels():
    found = row((CAT, 0.9, 0), (DOG, 0.8, 3))
    assert found["AP"] == found["AP any class"] == found["AP after NMS"] == 1
    # Sides of 20 and 40 pixels, halved by the height.
    assert found["median side"] == pytest.approx(15)
    assert found["below 16 px"] == 0.5


def test_a_wrong_name_is_lost_only_by_name():
    found = row((CAT, 0.9, 0), (DOG, 0.8, 0))
    assert found["AP"] == pytest.approx(0.5)
    assert found["AP any class"] == found["AP50 any class"] == 1
    assert found["AP after NMS"] == found["AP"]


def test_duplicates_are_lost_until_nms():
    # The shifted copy overlaps its object by an IoU of 18 / 22: it is right up to 0.8,
    # and then the exact box is a duplicate; above that it is wrong.
    shifted = [box + 2 * (i % 2 == 0) for i, box in enumerate(CAT)]
    found = row((CAT, 0.9, 0), (shifted, 0.95, 0), (DOG, 0.8, 3))
    assert found["AP"] < 1
    # NMS keeps the shifted copy alone: right at 7 of 10 thresholds.
    assert found["AP after NMS"] == pytest.approx((0.7 + 1) / 2)


def test_classes_of_other_datasets_do_not_count():
    assert row((CAT, 0.9, 0), (DOG, 0.8, 3), (DOG, 0.99, 1))["AP any class"] == 1


@pytest.mark.slow
def test_command_scores_what_the_training_scored(config, run_python, tmp_path):
    work_dir, out = tmp_path / "run", tmp_path / "lost.json"
    trained = run_python("-m", "damex", "train", config, "--work-dir", work_dir)
    assert trained.returncode == 0, trained.stderr
    command = ("tools/analysis/lost_ap.py", config, work_dir / "epoch_1.pth")
    done = run_python(*command, "--out", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    summary = json.loads((work_dir / "summary.json").read_text())
    of_summary = {name: one["ap"] for name, one in summary["datasets"].items()}
    of_summary["mean"] = summary["mean_ap"]
    assert {name: row["AP"] for name, row in rows.items()} == pytest.approx(
        of_summary, abs=1e-6
    )
    assert "| AP after NMS |" in done.stdout
