"""Trainings of Transformers detectors: scores, resuming, predictions, two processes."""

import itertools
import json
import shutil
from pathlib import Path

import pytest
import timm
import torch
from mmengine.config import Config

from damex.config_files import PlainConfig
from damex.engine.config import build_runner
from damex.errors import ConfigError
from damex.inference.predictor import Predictor
from damex.inference.stored import DetectorCheckpoint
from damex.workbench.export.specialist import extract
from tests.conftest import CONFIGS
from tests.test_hf.conftest import FAMILIES, TIMM
from tests.test_hf.two_processes import build, gradients

pytest.importorskip("transformers", reason="needs the extra hf")
pytestmark = pytest.mark.slow


@pytest.fixture
def train(tmp_path, two_datasets, model_of, family):
    """Train a small detector with a shipped config, in a folder."""

    start = tmp_path / "timm.pth"

    def run(name, **changes):
        cfg = Config.fromfile(CONFIGS / "hf" / "rt-detr-v2-tiny_1xb8-4e_toy.py")
        small = model_of(family)
        cfg.model.config, cfg.model.test_cfg = small.config, small.test_cfg
        if "backbone" in small:
            torch.save(timm.create_model(TIMM["name"]).state_dict(), start)
            cfg.model.backbone = dict(TIMM, pretrained=str(start))
        cfg.mixture = two_datasets
        cfg.work_dir, cfg.experiment_name = str(tmp_path / name), f"{tmp_path} {name}"
        cfg.image_size, cfg.max_epochs, cfg.train_cfg.val_interval = 64, 2, 1
        cfg.train_dataloader.update(batch_size=2, num_workers=0)
        cfg.train_dataloader.sampler.samples_per_epoch = 6
        cfg.update(changes)
        runner = build_runner(cfg)
        runner.train()
        start.unlink(missing_ok=True)  # a checkpoint does not need it
        return Path(cfg.work_dir), runner.model.state_dict()

    return run


def test_a_training_is_scored_resumed_and_used(train, tmp_path, two_datasets):
    work, weights = train("whole")
    summary = json.loads((work / "summary.json").read_text())
    assert set(summary["datasets"]) == {"street", "park"}
    assert set(summary["routing_accuracy"]) == {"street", "park", "mean"}
    assert summary["versions"]["transformers"].startswith("5.")

    # The optimizer steps of the second epoch are repeated.
    (tmp_path / "again").mkdir()
    shutil.copy(work / "epoch_1.pth", tmp_path / "again")
    start = str(tmp_path / "again" / "epoch_1.pth")
    _, resumed = train("again", resume=True, load_from=start)
    assert [n for n in weights if not torch.equal(weights[n], resumed[n])] == []

    # From the checkpoint alone, which needs no trust.
    predictor = Predictor(work / "epoch_2.pth")
    images = sorted(Path(two_datasets[1]["data_root"]).glob("images/*"))
    found = predictor(images, dataset="auto", min_score=0.0)
    assert [one.path for one in found] == images
    for one in found:
        assert set(one.probabilities) == {"street", "park"}
        assert {*one.names} <= {*predictor.datasets[one.dataset]}
        assert len(one.boxes) > 0
        # 48 x 32 pixels, shown with 64 x 43 in 64 x 64, of which 48 x 48 is the canvas.
        assert one.boxes.min() >= 0
        assert one.boxes.max() <= 48.5
    scores = predictor.evaluate()
    assert scores["mean_ap"] == pytest.approx(summary["mean_ap"], abs=1e-6)
    stored = DetectorCheckpoint.read(str(work / "epoch_2.pth"))
    with pytest.raises(ConfigError, match="has a Transformers model, which no dense"):
        extract(stored, "park")


BOXES = [[2, 2, 2, 2], [3, 2, 1, 0], [2, 1, 0, 0]]


@pytest.fixture(scope="module")
def halves(tmp_path_factory, model_of, make_batch, launch_processes):
    """A folder for each family and number of boxes, learned from in one launch.

    Where halves differ in their boxes, they differ by Transformers in the number of
    denoising groups, in D-FINE's distillation, and DEIMv2's matches of all layers.
    """
    place = tmp_path_factory.mktemp("halves")
    for family, boxes in itertools.product(FAMILIES, BOXES):
        options = dict(label_noise_ratio=0.0, box_noise_scale=0.0)
        if len({*boxes}) > 1:
            options["num_denoising"] = 0
            if not family.startswith("rt_detr_v2"):
                options["weight_loss_ddf"] = 0.0
        if family == "deimv2":
            options["use_dense_one_to_one"] = False
        if family.startswith(("rf_detr", "deformable_detr")):
            options = {}  # have neither noise nor distillation
        (folder := place / f"{family} {boxes}").mkdir()
        model = dict(model=model_of(family, config=options))
        PlainConfig(model).dump(folder / "model.py")
        size = (64, 64) if family == "rf_detr" else (64, 96)
        batch = make_batch([0, 1, 1, 0], sizes=[size] * 4, boxes=boxes)
        torch.save(batch, folder / "batch.pt")
    launch_processes(Path(__file__).with_name("two_processes.py"), place, count=2)
    return place


@pytest.mark.parametrize("boxes", BOXES)
def test_two_processes_learn_what_one_learns(halves, family, boxes):
    """Without noise, the mean of two halves is the whole."""
    folder = halves / f"{family} {boxes}"
    batch = torch.load(folder / "batch.pt", weights_only=False)
    found, whole = torch.load(folder / "gradients.pt"), gradients(build(folder), batch)
    assert found.keys() == whole.keys()
    assert any(".adapter.moe.experts.up_ELD" in name for name in found)
    for name, gradient in whole.items():
        scale = gradient.abs().max().clamp_min(1e-3)
        assert (found[name] - gradient).abs().max() < 1e-3 * scale, name
