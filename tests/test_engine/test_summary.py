"""The table, the numbers and the picture that a run ends with."""

import io
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmdet.structures import DetDataSample
from mmengine.device import get_max_cuda_memory
from mmengine.structures import InstanceData
from PIL import Image
from rich.console import Console

from damex.engine import summary
from damex.engine.hooks import routing_warnings
from damex.engine.summary import RunSummaryHook, draw_detections, score_table, summarise

SCORES = {
    "fish/AP": 0.25,
    "fish/AP50": 0.5,
    "fish/AP75": 0.2,
    "fish/AP_small": 0.125,
    "fish/AP_medium": 0.5,
    "fish/AP_large": float("nan"),
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
    fish_by_size = dict(ap_small=0.125, ap_medium=0.5, ap_large=None)
    nothing = dict.fromkeys(["ap", "ap50", "ap75", *fish_by_size])
    assert summarise(SCORES) == dict(
        mean_ap50=0.5,
        mean_ap=0.25,
        pooled_ap50=0.375,
        pooled_ap=0.125,
        datasets=dict(
            fish=dict(ap=0.25, ap50=0.5, ap75=0.2, **fish_by_size, images=3, boxes=7),
            boards=dict(nothing, images=2, boxes=0),
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
    ("moe", "is_warned"),
    [("damex_best", True), ("damex", True), ("vanilla", False), (None, False)],
)
def test_a_dataset_that_is_routed_to_others_is_named(build, moe, is_warned):
    """Only where a loss teaches the routers the datasets."""
    scores = {**SCORES, "fish/routing_accuracy": 0.25, "mean/routing_accuracy": 0.625}
    detector = build(moe=moe)
    found = routing_warnings(detector, scores)
    assert [one.partition(" of its tokens")[0] for one in found] == (
        ["fish: 25%"] if is_warned else []
    )
    assert routing_warnings(detector, SCORES) == []


def test_table_shows_one_row_per_dataset_the_mean_and_the_pooled_scores():
    screen = io.StringIO()
    Console(file=screen, width=100).print(score_table(SCORES))
    rows = {}
    for line in screen.getvalue().splitlines():
        name, *cells = (cell.strip() for cell in line.strip("│").split("│"))
        rows[name] = cells
    assert rows["fish"] == ["3", "7", "0.250", "0.500", "87.5%"]
    assert rows["boards"] == ["2", "0", "-", "-", "100.0%"]
    assert rows["mean"] == ["", "", "0.250", "0.500", "93.8%"]
    assert rows["pooled"] == ["", "", "0.125", "0.375", ""]


GREY = (120, 120, 120)


@pytest.fixture
def sample(tmp_path):
    """An image of the given width and height with an annotation and a detection."""

    def make(width, height, *, truth=(), score=0.9):
        path = tmp_path / f"{width}x{height}.png"
        Image.new("RGB", (width, height), GREY).save(path)
        records = [dict(bbox=box, label=0) for box in truth]
        return DetDataSample(
            metainfo=dict(img_path=str(path), ground_truth=records),
            pred_instances=InstanceData(
                bboxes=torch.tensor([[50.0, 60.0, 90.0, 80.0]]),
                scores=torch.tensor([score]),
                labels=torch.tensor([1]),
            ),
        )

    return make


META = dict(classes=("cat", "dog"), palette=[(255, 0, 0), (0, 0, 255)])


def images(samples):
    """The drawn pictures by dataset."""
    figure = draw_detections(samples, META, size=200)
    columns = max(len(row) for row in samples.values())
    found = {name: [] for name in samples}
    for number, axes in enumerate(figure.axes):
        name = list(samples)[number // columns]
        found[name] += [image.get_array() for image in axes.images]
    return found


def painted(image):
    """Rows and columns of the pixels that are not the image's."""
    return np.nonzero((np.asarray(image) != GREY).any(axis=2))


def test_a_very_flat_image_is_drawn(sample):
    ((height, width, _),) = [one.shape for one in images({"a": [sample(900, 2)]})["a"]]
    assert (height, width) == (1, 2 * 200)


def test_truth_is_left_and_detections_are_right(sample):
    # x, y, w, h: 10..30 x 40..60, and 20..60 x 80..120 at twice the size.
    found = images({"a": [sample(100, 100, truth=[(10, 40, 20, 20)])]})
    (image,) = found["a"]
    assert image.shape == (200, 400, 3)
    rows, columns = painted(image[:, :200])
    assert (columns.min(), rows.max()) == pytest.approx((20, 120), abs=4)
    rows, columns = painted(image[:, 200:])
    # 100..180 x 120..160
    assert (columns.min(), rows.max()) == pytest.approx((100, 160), abs=4)


def test_a_detection_that_reaches_into_the_padding_shrinks_no_image(sample):
    # 70 rows, of which the detection covers 60..80, far from the first columns.
    (image,) = images({"a": [sample(100, 70)]})["a"]
    assert len(painted(image[:, 200:220])[0]) == 0
    assert painted(image[:, 200:])[0].max() == 139


def test_every_annotation_is_drawn_and_no_weak_detection(sample):
    boxes = [(10, 40, 20, 20), (50, 40, 20, 20)]
    weak, strong = (sample(100, 100, truth=boxes, score=one) for one in (0.2, 0.4))
    (image,) = images({"a": [weak]})["a"]
    for x in (40, 120):  # the middle of each box's lower side
        assert tuple(image[120, x]) != GREY
    assert len(painted(image[:, 200:])[0]) == 0
    assert len(painted(images({"a": [strong]})["a"][0][:, 200:])[0]) > 0


def test_a_row_for_each_dataset_whatever_its_images_are(sample):
    tall, wide = sample(100, 200), sample(200, 100)
    found = images({"a": [tall], "b": [wide, tall, wide]})
    assert [[image.shape for image in row] for row in found.values()] == [
        [(200, 200, 3)],
        [(100, 400, 3), (200, 200, 3), (100, 400, 3)],
    ]


def test_seconds_are_of_what_was_trained_and_not_of_evaluations(tmp_path, monkeypatch):
    """Resumed at iteration 30 of 40; a second for every step, five for an epoch."""
    clock = [100.0]
    monkeypatch.setattr(summary.time, "monotonic", lambda: clock[0])
    logger = SimpleNamespace(log_file=None)
    runner = SimpleNamespace(
        model=torch.nn.Linear(1, 1), rank=0, iter=30, epoch=3, max_epochs=4,
        work_dir=tmp_path, logger=logger, val_loop=None,
        written_config=tmp_path / "a.py",
        message_hub=SimpleNamespace(runtime_info=dict(best_ckpt=None)),
    )  # fmt: skip
    hook = RunSummaryHook()
    hook.before_train(runner)
    clock[0] += 10.0
    runner.iter = 40
    hook.before_val_epoch(runner)
    clock[0] += 5.0
    hook.after_val_epoch(runner, {})
    hook.after_train(runner)
    found = json.loads((tmp_path / "summary.json").read_text())
    assert (found["iterations"], found["trained_iterations"]) == (40, 10)
    assert found["train_seconds"] == 10.0
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    hook.before_save_checkpoint(runner, {})  # resumed: not another training
    assert (tmp_path / "summary.json").exists()
    runner.iter = 0
    hook.before_train(runner)
    assert (tmp_path / "summary.json").exists()
    hook.before_save_checkpoint(runner, {})
    assert not [*tmp_path.iterdir()]


def test_logging_does_not_lower_the_peak_memory_of_a_gpu(monkeypatch):
    """LoggerHook resets the peaks, which starts again from what is in use now."""
    peaks = {"allocated": 2**30, "reserved": 2**31}
    fake = SimpleNamespace(
        is_available=lambda: True,
        max_memory_allocated=lambda device=None: peaks["allocated"],
        max_memory_reserved=lambda: peaks["reserved"],
        reset_peak_memory_stats=lambda: peaks.update(allocated=2**27),
    )
    monkeypatch.setattr(torch, "cuda", fake)
    assert get_max_cuda_memory(torch.device("cpu")) == 1024
    assert summary._peak_memory_mib() == 2048


def test_the_printed_command_can_be_typed(build, tmp_path, capsys):
    logger = SimpleNamespace(log_file=None)
    runner = SimpleNamespace(rank=0, work_dir=tmp_path, logger=logger, model=build())
    capsys.readouterr()
    RunSummaryHook()._write(runner, prefix="", checkpoint="my runs/epoch_1.pth")
    assert "experts: damex experts 'my runs/epoch_1.pth'\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        (dict(best_ckpt="/original/best_a.pth", lr=1), "best_a.pth"),
        (dict(best_ckpt_b=None, best_ckpt_c="/x/best_c.pth"), "best_c.pth"),
        (dict(best_ckpt="/x/gone.pth"), "epoch_2.pth"),
        ({}, "epoch_2.pth"),
    ],
)
def test_the_checkpoint_to_use_is_that_of_the_run(known, expected, tmp_path):
    for name in ("best_a.pth", "best_c.pth", "epoch_2.pth"):
        (tmp_path / name).touch()
    (tmp_path / "last_checkpoint").write_text("/original/epoch_2.pth")
    hub = SimpleNamespace(runtime_info=known)
    runner = SimpleNamespace(message_hub=hub, work_dir=str(tmp_path))
    assert summary._best_or_last(runner) == expected


def test_outputs_of_another_kind_are_not_drawn():
    hook = RunSummaryHook()
    hook.after_val_iter(None, outputs=[torch.ones(2), dict(a=1)])
    assert not hook._samples
