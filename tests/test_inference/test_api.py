"""``damex.train``, ``damex.load``, and configs from dataset folders alone."""

import json
import logging
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from mmdet.registry import MODELS as DETECTORS
from mmengine.logging import MMLogger
from PIL import Image

import damex
from damex.errors import ConfigError, DataError
from damex.workbench import api
from damex.workbench.check.sources import mixture_config_of
from damex.workbench.zero_config import (
    MODELS,
    config_of_folders,
    named_folders,
    run_name,
)


def test_mixtures_of_many_datasets_have_a_folder_each():
    names = [f"a_rather_long_name_{i}" for i in range(7)]
    runs = {run_name(names[:count]) for count in range(1, 8)}
    assert len(runs) == 7
    assert max(map(len, runs)) == 60


def test_folders_have_given_names_or_their_own(tmp_path, monkeypatch):
    for name in ("fish", "a=b", "deep/fish"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert named_folders(["sea=fish", "a=b", "deep/fish"]) == {
        "sea": "fish",
        "a=b": "a=b",
        "fish": "deep/fish",
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fish", "deep/fish"], "two datasets are called 'fish', fish and deep/fish"),
        (["sea=nowhere"], "nowhere does not exist"),
        (["notes.txt"], "notes.txt is a file"),
        (["big/sea=fish"], "'big/sea' cannot be the NAME of NAME=FOLDER"),
        (["=fish"], "'' cannot be the NAME"),
    ],
)
def test_folders_that_cannot_be_used(tmp_path, monkeypatch, words, message):
    for name in ("fish", "deep/fish"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        named_folders(words)


def test_a_linked_folder_keeps_its_name(tmp_path, monkeypatch):
    (tmp_path / "disk/v2/inner").mkdir(parents=True)
    (tmp_path / "fish").symlink_to(tmp_path / "disk/v2")
    assert named_folders([f"{tmp_path}/fish"]).keys() == {"fish"}
    assert mixture_config_of(f"{tmp_path}/fish").mixture[0].name == "fish"
    monkeypatch.chdir(tmp_path / "disk/v2/inner")
    assert named_folders([".."]).keys() == {"v2"}


@pytest.mark.parametrize("name", ["a=b", "a/b", ""])
def test_names_that_no_dataset_can_have(tmp_path, name):
    with pytest.raises(ConfigError, match=f"'{name}' cannot be the name of a dataset"):
        damex.train({name: tmp_path}, verbose=False)


@pytest.mark.parametrize("work_dir", [None, "work"])
def test_a_path_that_does_not_exist_may_be_meant_as_a_folder(work_dir):
    said = r"data/nowhere is neither a folder nor a config.* damex.train\({'fish': "
    with pytest.raises(ConfigError, match=said):
        damex.train("data/nowhere", work_dir=work_dir, verbose=False)


@pytest.mark.parametrize("model", MODELS)
def test_a_config_of_folders_is_the_shipped_detector_on_these_datasets(model):
    cfg = config_of_folders({"fish": "data/fish", "boards": "~/boards"}, model)
    assert [entry["name"] for entry in cfg.mixture] == ["fish", "boards"]
    assert cfg.mixture[0] == dict(name="fish", root="data/fish", weight=1.0)
    assert not cfg.mixture[1]["root"].startswith("~")
    shipped = MODELS[model]
    of_transformers = shipped.config.startswith("hf/")
    kind = "MoETransformersDetector" if of_transformers else "MoEDINO"
    assert (cfg.model.type, cfg.model.get("name")) == (kind, shipped.name)
    assert cfg.filename == "fish-boards.py"


@pytest.mark.parametrize(
    "model", [k for k, m in MODELS.items() if not m.config.startswith("hf/")]
)
def test_the_help_shows_the_parameters_of_a_model(model):
    cfg = config_of_folders({"fish": "data/fish"}, model)
    cfg.model.bbox_head.num_classes = 80
    cfg.model.backbone.pop("init_cfg", None)
    cfg.model.backbone.pop("pretrained", None)
    detector = DETECTORS.build(cfg.model)
    millions = sum(p.numel() for p in detector.parameters()) / 1e6
    assert millions == pytest.approx(MODELS[model].parameters, rel=0.02)


def test_an_unknown_model_gets_a_suggestion():
    with pytest.raises(ConfigError, match=r"no model 'tinny'; did you mean 'tiny'\?"):
        config_of_folders({"fish": "data/fish"}, "tinny")


def test_every_mention_of_an_image_has_its_prediction_in_order(
    save, predictor, photos, monkeypatch
):
    monkeypatch.chdir(photos)
    detector = damex.load(save(), device="cpu")
    assert detector.datasets == predictor.datasets
    array = np.zeros((64, 96, 3), np.uint8)
    mentions = ["a.png", array, Path("b.jpg"), "a.png", "deep", Image.open("a.png")]
    found = [one.path and one.path.as_posix() for one in detector.predict(mentions)]
    expected = ["a.png", None, "b.jpg", "a.png", "deep/a.png", None]
    assert found == expected
    lazily = detector.predict(one for one in mentions)
    assert [one.path and one.path.as_posix() for one in lazily] == expected
    (one,) = detector.predict(Image.open("a.png"))
    assert (one.path, one.width, one.height) == (None, 96, 64)
    found = [*detector.predict(".", min_score=0.0)]
    assert [one.path.as_posix() for one in found] == ["a.png", "b.jpg", "deep/a.png"]
    for one, same in zip(
        found, predictor([one.path for one in found], min_score=0.0), strict=True
    ):
        np.testing.assert_array_equal(one.boxes, same.boxes)
    assert [*detector.predict([])] == []


def test_frames_are_read_a_batch_at_a_time(save):
    read = []

    def camera():
        while True:  # it never ends
            read.append(np.zeros((64, 96, 3), np.uint8))
            yield read[-1]

    found = damex.load(save(), device="cpu").predict(camera(), batch_size=1)
    assert read == []
    next(found), next(found)
    assert len(read) == 2


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (b"a.png", "got bytes"),
        ([["a.png"]], "got list"),
        (["a.png", "none.png"], "no file or folder none.png"),
    ],
)
def test_what_is_no_image_is_named(save, photos, monkeypatch, images, message):
    monkeypatch.chdir(photos)
    with pytest.raises(DataError, match=message):
        [*damex.load(save(), device="cpu").predict(images)]


def test_supervision_gets_boxes_scores_and_class_names(make_prediction):
    pytest.importorskip("supervision", reason="supervision is optional")
    found = make_prediction().to_supervision()
    np.testing.assert_array_equal(found.xyxy, [[8, 10, 28, 40], [1, 2, 3.5, 4]])
    assert found.data["class_name"].tolist() == ["dog", "car"]


def test_the_host_program_keeps_its_log_and_its_warnings(
    save, photos, make_coco_dataset, tmp_path, capfd
):
    path = save()
    make_coco_dataset(tmp_path / "street", classes=["car", "person"], num_images=3)
    logger = MMLogger.get_current_instance()
    before = [(handler.level, [*handler.filters]) for handler in logger.handlers]
    filters = [*warnings.filters]
    capfd.readouterr()
    detector = damex.load(path, device="cpu")
    [*detector.predict(photos)]
    detector.evaluate(tmp_path / "street", split="train")
    detector.export(tmp_path / "park.pth", dataset="park")
    assert [(one.level, one.filters) for one in logger.handlers] == before
    assert warnings.filters == filters
    assert capfd.readouterr().out == ""


def test_a_folder_is_evaluated_as_the_dataset_of_its_name(
    save, make_coco_dataset, tmp_path
):
    make_coco_dataset(tmp_path / "v2", classes=["car", "person"], num_images=3)
    (tmp_path / "street").symlink_to(tmp_path / "v2")
    detector = damex.load(save(), device="cpu")
    found = detector.evaluate(tmp_path / "street", split="train")
    assert found.datasets["street"]["images"] == 3
    assert found.mean_ap == found.datasets["street"]["ap"]
    assert "street" in str(found)
    with pytest.raises(ConfigError, match="name the folder, too"):
        detector.evaluate(dataset="street")
    # A folder may lack objects of a class; another name may be a misspelling.
    for name, classes in (("cars", ["car"]), ("people", ["car", "people"])):
        make_coco_dataset(tmp_path / name, classes=classes, num_images=3)
    found = detector.evaluate(tmp_path / "cars", dataset="street", split="train")
    assert found.datasets["street"]["images"] == 3
    with pytest.raises(DataError, match="'person'"):
        detector.evaluate(tmp_path / "people", dataset="street", split="train")


@pytest.mark.parametrize(
    ("data", "message"),
    [("nowhere", "not the folder"), (".", "knows no dataset .*street, park, sky")],
)
def test_evaluation_of_what_the_detector_does_not_know(
    save, tmp_path, monkeypatch, data, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        damex.load(save(), device="cpu").evaluate(data)


@pytest.mark.slow
def test_a_training_from_folders_leaves_the_program_as_it_was(
    make_coco_dataset, tmp_path, monkeypatch, capfd
):
    for name, classes in (("fish", ["cod", "eel"]), ("boards", ["chip"])):
        make_coco_dataset(tmp_path / name, classes=classes, num_images=4)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as in a notebook
    torch.manual_seed(0)
    before = torch.get_rng_state(), logging.root.handlers[:], warnings.filters[:]
    options = {"train_dataloader.sampler.samples_per_epoch": 8}
    run = damex.train(
        {"sea": "fish", "boards": "boards"}, epochs=1, options=options, device="cpu"
    )
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (logging.root.handlers[:], warnings.filters[:]) == before[1:]
    printed = capfd.readouterr().out
    assert "train 1/1" in printed
    assert not {"\r", "\x1b"} & {*printed}
    assert run.evaluation.datasets.keys() == {"sea", "boards"}
    assert run.config.name == "sea-boards.py"
    assert run.checkpoint.is_file()
    detector = damex.load(run.checkpoint)
    scores = detector.evaluate()
    assert scores.summary["mean_ap"] == run.evaluation.mean_ap
    with pytest.raises(ConfigError, match="ep0chs"):
        damex.train("quickstart", options={"ep0chs": 1}, verbose=False)


@pytest.mark.slow
def test_a_config_trains_into_the_folder_of_the_command_line(
    make_coco_dataset, tmp_path, monkeypatch
):
    make_coco_dataset(tmp_path / "fish", classes=["cod"], num_images=4)
    monkeypatch.chdir(tmp_path)
    base = config_of_folders({"fish": "fish"})
    base.train_dataloader.sampler.samples_per_epoch = 8
    base.dump("base.py")
    content = "_base_ = ['base.py']\nwork_dir = 'mine'\nmax_epochs = 1\n"
    Path("short.py").write_text(content)
    with monkeypatch.context() as patch:
        patch.setattr(api, "run_damex", lambda words, **_: None)
        patch.setattr(api, "_finished", lambda folder: folder)
        found = [damex.train(f"{name}.py") for name in ("short", "base")]
    assert found == [Path("mine"), Path("work_dirs/base")]
    other = {"work_dir": "other"}
    run = damex.train("short.py", options=other, device="cpu", verbose=False)
    assert run.work_dir == Path("other")
    assert run.config.is_file()


def test_an_interrupted_command_says_how_to_continue(tmp_path, monkeypatch):
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, lambda *_: sys.exit(print('go on')))\n"
        "time.sleep(1), os.kill(os.getppid(), signal.SIGINT), time.sleep(9)\n"
    )
    script.chmod(0o700)
    monkeypatch.setattr(api.sys, "executable", str(script))
    with pytest.raises(KeyboardInterrupt, match="go on"):
        api.run_damex(["train"], verbose=False)


def test_a_finished_training_names_its_own_checkpoint(tmp_path):
    """Of an earlier training in the same folder a newer best checkpoint is left."""
    for name in ("best_AP_epoch_9.pth", "epoch_2.pth", "old.py", "mine.py"):
        (tmp_path / name).touch()
    summary = dict(config="mine.py", checkpoint="epoch_2.pth")
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    run = api._finished(tmp_path)
    assert (run.checkpoint, run.config) == (
        tmp_path / "epoch_2.pth",
        tmp_path / "mine.py",
    )
    summary |= dict(checkpoint=None, datasets={"a": dict(ap=0.5, ap50=0.75)})
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    run = api._finished(tmp_path)
    assert run.checkpoint is None
    header, row, _ = str(run.evaluation).splitlines()
    assert [header.index("AP") + 2, len(header)] == [row.index(".500") + 4, len(row)]
