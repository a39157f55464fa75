"""Tiles: where windows lie, what they show, and what is found in several of them."""

import copy
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmdet.datasets import BaseDetDataset
from mmdet.engine.hooks import DetVisualizationHook
from mmdet.registry import TRANSFORMS
from mmdet.structures import DetDataSample
from mmdet.structures.bbox import HorizontalBoxes
from mmengine import fileio
from mmengine.config import Config
from mmengine.structures import InstanceData
from mmengine.visualization import Visualizer

import damex
from damex.__main__ import main
from damex.datasets.geometry import choose_tiles
from damex.datasets.mixture import MixtureDataset, SeededIndex
from damex.datasets.sampler import MixtureSampler
from damex.datasets.tiles import joined, tiled
from damex.datasets.windows import advice_for, windows_of
from damex.engine.console import MixtureVisualizationHook
from damex.errors import ConfigError, DataError
from damex.evaluation import MixtureMetric
from damex.workbench.cli.train import set_tiles
from tests.test_datasets.test_mixture import LOAD, file_truth

PACK = dict(type="PackDetInputs")
SMALLER = dict(type="Resize", scale=(16, 16), keep_ratio=True)
DOUBLE = dict(type="Resize", scale_factor=2.0, keep_ratio=True)
TEST = [LOAD[0], DOUBLE, LOAD[1], PACK]  # as of configs: boxes are not resized


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((320, 320), [(0, 0, 320, 320)]),
        ((200, 100), [(0, 0, 200, 100)]),  # smaller: not enlarged
        ((560, 100), [(0, 0, 320, 100), (240, 0, 560, 100)]),  # they share a quarter
        (
            (640, 480),
            [(x, y, x + 320, y + 320) for y in (0, 160) for x in (0, 160, 320)],
        ),
        ((561, 320), [(0, 0, 320, 320), (120, 0, 440, 320), (241, 0, 561, 320)]),
    ],
)
def test_windows_by_hand(size, expected):
    assert windows_of(*size, 320) == expected


@pytest.mark.parametrize(
    ("test_mode", "types"),
    [
        (False, "LoadImageFromFile LoadAnnotations RandomCrop IgnoreCutBoxes"),
        (True, "LoadImageFromFile CropToWindow LoadAnnotations"),
    ],
)
def test_windows_are_cut_behind_the_steps_that_load(test_mode, types):
    steps = tiled([*LOAD, PACK], 32, test_mode=test_mode, where="here")
    assert [step["type"] for step in steps] == [*types.split(), "PackDetInputs"]
    assert tiled(LOAD, None, test_mode=test_mode, where="here") is LOAD
    with pytest.raises(ConfigError, match=r"here: tile=32 .*LoadImageFromFile"):
        tiled([PACK], 32, test_mode=test_mode, where="here")


def boxes(*sides):
    """Boxes and sizes of their images, of 400 x 300 pixels."""
    box_N4 = np.array([[5.0, 5, side, side] for side in sides]).reshape(-1, 4)
    return box_N4, np.full((len(sides), 2), (400.0, 300.0))


@pytest.mark.parametrize(
    ("sides", "scale", "tile", "reason"),
    [
        # Scaled by 1/4: 15, 15.75, 16.25 and 20.
        ((60, 63, 65, 80), (100, 100), 200, "2 of 4 boxes are below 16 px"),
        ((60, 65, 66, 80), (100, 100), None, "1 of 4 boxes are below 16 px"),
        # As mmcv, by the shorter side: 300 becomes 50.
        ((95, 97, 98, 80), (100, 50), 200, "2 of 4 boxes are below 16 px"),
        # Scaled by 1/16: 1.5 becomes 12 in an eighth; 0.4 never 8 without enlarging.
        ((24, 24, 24, 80), (25, 25), 50, "4 of 4 boxes"),
        ((6, 6, 6, 80), (25, 25), 25, "4 of 4 boxes"),
        # Sides below a pixel are not trained, so they do not count.
        ((0.5, 0.5, 60, 80), (100, 100), 200, "1 of 2 boxes are below 16 px"),
        ((5, 6), (267, 267), None, "but images have only 400 px"),
        ((), (100, 100), None, "0 of 0 boxes"),
    ],
)
def test_windows_are_chosen_by_the_sizes_of_boxes(sides, scale, tile, reason):
    advice = advice_for(*boxes(*sides), scale)
    assert advice.tile == tile
    assert reason in advice.reason
    assert advice.views == {None: 1, 200: 3 * 2, 50: 11 * 8, 25: 21 * 16}[tile]


def test_auto_becomes_a_number_in_the_config(two_datasets, tmp_path):
    train = dict(dataset=dict(type="MixtureDataset", pipeline=[SMALLER]))
    broken = tmp_path / "broken.json"
    broken.write_text("[]")
    entries = [
        dict(two_datasets[0], tile="auto"),
        dict(two_datasets[1], tile=20),
        dict(two_datasets[0], name="broken", train=str(broken), tile="auto"),
        dict(name="folder", root=str(tmp_path / "no"), tile="auto"),
    ]
    train["dataset"]["datasets"] = copy.deepcopy(entries)  # as a config is written
    cfg = dict(mixture=entries, train_dataloader=train)
    notes = choose_tiles(cfg)
    for mixture in (entries, train["dataset"]["datasets"]):
        assert [entry["tile"] for entry in mixture] == [24, 20, None, None]
    assert notes[0].startswith(f"tile='auto' of {entries[0]['name']} is windows of 24")
    assert notes[0].endswith("; an image is 6 views in evaluation and prediction.")
    # The loader says what is wrong with the others.
    assert ["annotations cannot be read" in one for one in notes] == [False, True, True]
    assert choose_tiles(cfg) == []


def test_auto_needs_boxes_a_size_and_a_config(two_datasets):
    data = dict(type=Unsized, metainfo=dict(classes=("car",)))
    for entry, steps, text in (
        (dict(name="a", train=data, val=data), [SMALLER], "'a': .*is a dataset class"),
        (two_datasets[0], LOAD, "needs a Resize with a scale in the pipeline"),
    ):
        train = dict(dataset=dict(type="MixtureDataset", pipeline=steps))
        with pytest.raises(ConfigError, match=text):
            choose_tiles(
                dict(mixture=[{**entry, "tile": "auto"}], train_dataloader=train)
            )
    with pytest.raises(
        ConfigError, match="tile='auto' belongs into the mixture of a c"
    ):
        MixtureDataset(datasets=[dict(two_datasets[0], tile="auto")], pipeline=LOAD)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["auto"], ["auto", "auto"]),
        (["64", "b=c=32"], [64, 32]),
        (["a=auto"], ["auto", None]),
        (["c=32"], r"--tile c=32: the mixture has no dataset 'c'; .*a, b=c"),
        (
            ["a=big"],
            "--tile a=big: expected the side of a window in pixels .* got 'big'",
        ),
        (["a="], "got ''"),
        (["-1"], "got '-1'"),
    ],
)
def test_tile_of_the_command_line(words, expected):
    entries = [dict(name="a", root="a"), dict(name="b=c", root="c")]
    loader = dict(dataset=dict(type="MixtureDataset", datasets=entries))
    cfg = Config(dict(mixture=entries, train_dataloader=loader))  # as it is written
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            set_tiles(cfg, words)
        return
    set_tiles(cfg, words)
    with pytest.raises(ConfigError, match="the config has none"):
        set_tiles(Config(dict(mixture=None)), words)
    for mixture in (cfg.mixture, cfg.train_dataloader.dataset.datasets):
        assert [entry.get("tile") for entry in mixture] == expected


def test_boxes_cut_by_a_crop_are_ignored_below_a_share():
    boxes = [[-6.0, 5, 4, 10], [26.0, -61, 36, 39], [30.0, 20, 40, 30], [-5, 0, 3, 8]]
    results = dict(
        gt_bboxes=HorizontalBoxes(torch.tensor(boxes)),
        gt_ignore_flags=np.array([False, False, True, False]),
        img_shape=(40, 36),
    )
    step = TRANSFORMS.build(dict(type="IgnoreCutBoxes"))
    results = step(results)
    # Inside: 4 of 10, 39 of 100, 6 of 10 (ignored before), 3 of 8.
    assert results["gt_ignore_flags"].tolist() == [False, True, True, True]
    assert results["gt_bboxes"].tensor.tolist() == [
        [0.0, 5.0, 4.0, 10.0],
        [26.0, 0.0, 36.0, 39.0],
        [30.0, 20.0, 36.0, 30.0],
        [0.0, 0.0, 3.0, 8.0],
    ]


def load(entries, tile, split="val", pipeline=TEST):
    entries = [dict(entries[0], tile=tile), entries[1]]
    return MixtureDataset(datasets=entries, split=split, pipeline=pipeline)


def test_evaluation_shows_each_window_once_and_whole_images_of_the_other(two_datasets):
    plain, dataset = load(two_datasets, None), load(two_datasets, 20)
    # Images of 48 x 32 pixels: 3 by 2 windows.
    assert len(dataset) == 5 * 6 + 3
    assert dataset.sizes == plain.sizes == [5, 3]
    for index in (0, 7, 29):
        packed, image = dataset[index], index // 6
        sample, whole = packed["data_samples"], plain[image]
        left, top, right, bottom = sample.window
        assert sample.window == windows_of(48, 32, 20)[index % 6]
        part = whole["inputs"].numpy()[:, 2 * top : 2 * bottom, 2 * left : 2 * right]
        assert packed["inputs"].shape == (3, 40, 40)
        # Resizing the whole image reads pixels beyond the border of the window.
        inside = (slice(None), slice(2, -2), slice(2, -2))
        assert np.array_equal(packed["inputs"][inside], part[inside])
        assert sample.img_path == whole["data_samples"].img_path
        assert sample.ori_shape == (32, 48)
        assert sample.ground_truth == whole["data_samples"].ground_truth
        assert sample.sample_idx == index
    for place in range(3):
        packed, other = dataset[30 + place], plain[5 + place]
        assert torch.equal(packed["inputs"], other["inputs"])
        assert "window" not in packed["data_samples"]


def test_one_window_over_the_image_equals_no_tile_to_the_bit(two_datasets):
    plain, dataset = load(two_datasets, None), load(two_datasets, 48)
    assert len(plain) == len(dataset) == 8
    for one, other in zip(plain, dataset, strict=True):
        assert torch.equal(one["inputs"], other["inputs"])
    given = [found_in(one["data_samples"], keep_all=True) for one in plain]
    windows = [found_in(one["data_samples"], keep_all=True) for one in dataset]
    np.testing.assert_equal(scores_of(dataset, windows), scores_of(plain, given))


def found_in(sample, *, keep_all=False):
    """A prediction: the objects that lie in the window, in pixels of the window."""
    left, top, right, bottom = sample.metainfo.get("window", (0, 0, 48, 32))
    found = []
    for number, truth in enumerate(sample.ground_truth):
        x, y, w, h = truth["bbox"]
        if keep_all or (left <= x and top <= y and x + w <= right and y + h <= bottom):
            box = [x - left, y - top, x + w - left, y + h - top]
            found.append((box, 0.9 - 0.1 * number, truth["label"]))
    fields = dict(
        bboxes=torch.tensor([f[0] for f in found]).float().view(-1, 4),
        scores=torch.tensor([f[1] for f in found]),
        labels=torch.tensor([f[2] for f in found], dtype=torch.long),
    )
    for key in ("pred_instances", "dataset_instances"):
        sample.set_field(InstanceData(**{k: v.clone() for k, v in fields.items()}), key)
    return sample


def scores_of(dataset, samples):
    metric = MixtureMetric()
    metric.dataset_meta = dataset.metainfo
    metric.process({}, [one.to_dict() for one in samples])
    return metric.evaluate(len(samples))


def test_objects_in_several_windows_are_found_once_at_their_place(two_datasets):
    """Each object fits in a window, and most in two: a copy would lower AP."""
    dataset = load(two_datasets, 40)
    assert len(dataset) == 5 * 2 + 3
    samples = [found_in(packed["data_samples"]) for packed in dataset]
    found = sum(len(one.pred_instances) for one in samples[:10])
    objects = sum(len(one.ground_truth) for one in samples[:10:2])
    assert found > objects == 10
    scores = scores_of(dataset, samples)
    assert scores["mixture/street/AP"] == scores["mixture/park/AP"] == 1
    assert scores["mixture/pooled/AP"] == 1
    assert scores["mixture/street/images"] == 5
    assert scores["mixture/street/boxes"] == 10
    for first, second in zip(samples[:10:2], samples[1:10:2], strict=True):
        whole = joined([first, second]).pred_instances
        boxes = [[x, y, x + w, y + h] for x, y, w, h in boxes_of(first)]
        assert sorted(whole.bboxes.tolist()) == sorted(boxes)


def boxes_of(sample):
    return [truth["bbox"] for truth in sample.ground_truth]


def test_detections_of_other_classes_are_not_merged():
    def part(left, *labels):
        one = DetDataSample(metainfo=dict(window=(left, 0, left + 32, 32)))
        one.pred_instances = InstanceData(
            bboxes=torch.tensor([[40.0 - left, 4, 50 - left, 20]] * len(labels)),
            labels=torch.tensor(labels),
            scores=torch.linspace(0.5, 0.7, len(labels)) + left / 100,
        )
        return one

    whole = joined([part(20, 3), part(30, 3, 4)]).pred_instances
    assert whole.labels.tolist() == [4, 3]
    assert whole.scores.tolist() == pytest.approx([1.0, 0.8])
    assert whole.bboxes.tolist() == [[40, 4, 50, 20]] * 2
    (alone,) = [joined([part(20, 3, 3)]).pred_instances]
    assert len(alone) == 2  # a single window has nothing to be merged with


def test_windows_are_drawn_as_one_image(monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr(
        DetVisualizationHook,
        "after_test_iter",
        lambda hook, *call: drawn.append((hook.test_out_dir, *call[-1])),
    )
    monkeypatch.setattr(Visualizer, "get_current_instance", lambda: None)
    hook = MixtureVisualizationHook(draw=True, test_out_dir=str(tmp_path))
    run = SimpleNamespace(work_dir=tmp_path, timestamp="t", world_size=2)
    said: list[str] = []
    run.logger = SimpleNamespace(warning=said.append)
    hook.before_run(run)
    assert said == [
        "--show-dir: only the images (or windows) of the first of 2 processes are "
        "drawn; draw in one process."
    ]
    samples = []
    # One file in two datasets; one name in two folders.
    images = [("x", "a"), ("x", "b"), ("x", "c"), ("y", "c"), ("y", "cam/c")]
    shown = [(0, 8), (None,), (8,), (8,), (8,)]
    for (dataset, name), lefts in zip(images, shown, strict=True):
        for left in lefts:
            meta = {} if left is None else dict(window=(left, 0, left + 32, 32))
            sample = DetDataSample(
                metainfo=dict(img_path=name, dataset_name=dataset, **meta)
            )
            sample.pred_instances = InstanceData(
                bboxes=torch.tensor([[10.0, 0.0, 20.0, 9.0]]),
                scores=torch.tensor([0.5]),
                labels=torch.tensor([0]),
            )
            samples.append(sample)
    hook.after_test_iter(None, 0, None, samples[:1])
    hook.after_test_iter(None, 1, None, samples[1:])
    hook.after_test_epoch(None)
    folders = [tmp_path / folder for folder in ("x", "x", "x", "y", "y/cam")]
    assert [(Path(folder), one.img_path) for folder, one in drawn] == [
        (folder, name) for folder, (_, name) in zip(folders, images, strict=True)
    ]
    lefts = [one.pred_instances.bboxes[:, 0].tolist() for _, one in drawn]
    assert lefts == [[10.0, 18.0], [10.0], [18.0], [18.0], [18.0]]
    monkeypatch.setattr(  # in a training, the first of a batch
        DetVisualizationHook, "after_val_iter", lambda hook, *call: drawn.append(call)
    )
    hook.after_val_iter(None, 0, None, samples[3:])
    assert drawn[-1][-1][0].pred_instances.bboxes[:, 0].tolist() == [18.0]


def test_training_shows_random_windows_and_counts_images(two_datasets):
    dataset = load(two_datasets, 20, "train", [*LOAD, PACK])
    assert len(dataset) == 8
    sampler = MixtureSampler(dataset, seed=0, samples_per_epoch=16)
    shares = [sum(index < 5 for index in sampler.epoch_indices(0)), 16]
    assert shares == [10, 16]  # by images: 5 of 8
    shown, labels = set(), 0
    for seed in range(12):
        packed = dataset[SeededIndex(0, seed)]
        pixels, truth = packed["inputs"], packed["data_samples"].gt_instances
        assert pixels.shape == (3, 20, 20)
        shown.add(pixels.numpy().tobytes())
        boxes = truth.bboxes.tensor
        assert torch.equal(boxes.clamp(0, 20), boxes)
        labels += len(boxes)
    assert len(shown) > 6
    assert 0 < labels < 12 * len(file_truth(two_datasets[0], 0))
    assert dataset[5]["inputs"].shape == (3, 32, 48)


class Unsized(BaseDetDataset):
    def load_data_list(self):
        return [dict(img_path="0.png", img_id=0, instances=[])]


def test_images_without_a_size_are_named():
    data = dict(type=Unsized, metainfo=dict(classes=("car",)))
    entry = dict(name="a", train=data, val=data, tile=20)
    with pytest.raises(DataError, match=r"'a': 0.png has no width .* tile=20 needs"):
        MixtureDataset(datasets=[entry], split="val", pipeline=TEST)


def test_a_training_on_windows_is_scored_on_images(config, tmp_path, capfd):
    """In training, by ``damex test``, and from the checkpoint alone."""
    work = tmp_path / "work"
    options = ["--work-dir", str(work), "--tile", "park=auto", "street=24"]
    assert main(["train", str(config), *options]) == 0
    said = capfd.readouterr().out
    assert "trained on street (5, tile=24), park (3)" in said
    assert "tile='auto' of park is whole images: " in said
    files = [str(next(work.glob("*.py"))), str(work / "epoch_1.pth")]
    found = work / "found.pkl"
    assert main(["test", *files, "--work-dir", str(work), "--out", str(found)]) == 0
    rows = fileio.load(str(found))  # of images, not of windows
    names = {one["img_path"] for one in rows if "window" not in one}
    assert len(names) == len(rows) == 8
    assert 24 < max(one["pred_instances"]["bboxes"][:, 2].max() for one in rows) <= 48
    tested = json.loads((work / "test_summary.json").read_text())["datasets"]
    assert {name: row["images"] for name, row in tested.items()} == dict(
        street=5, park=3
    )
    assert tested == json.loads((work / "summary.json").read_text())["datasets"]
    alone = damex.load(files[1], device="cpu").evaluate().datasets
    assert {name: row["ap"] for name, row in alone.items()} == pytest.approx(
        {name: row["ap"] for name, row in tested.items()}
    )
    assert alone["street"]["images"] == 5
