"""A training looks at its data first: what it refuses, and what it only says."""

import logging
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.runner import BaseLoop

import damex.workbench.check.check
from damex.datasets import coco, coco_records
from damex.engine.config import resolve_config
from damex.engine.runner import MixtureRunner
from damex.errors import DataError
from damex.workbench.check import sources
from damex.workbench.check.check import refusal
from damex.workbench.check.hook import DataCheckHook
from damex.workbench.cli.train import add_data_check


@pytest.fixture
def logger():
    """A logger that remembers."""
    logger = logging.Logger("test")
    logger.records = []
    logger.addHandler(logging.Handler())
    logger.handlers[0].emit = logger.records.append
    return logger


def warnings_of(logger):
    records = [r for r in logger.records if r.levelno >= logging.WARNING]
    return [record.getMessage() for record in records]


def image(entry, name):
    return Path(entry["data_root"]) / "images" / name


def test_all_errors_are_counted_and_the_first_is_said(
    write_config, two_datasets, logger
):
    for number in range(3):
        image(two_datasets[0], f"{number}.png").unlink()
    said = refusal(Config.fromfile(write_config()), logger)
    assert "0.png does not exist" in said
    # Three images, each in train and in val.
    assert "There are 5 more errors in the data (5 image-missing)" in said


def test_small_objects_are_said_before_the_training(write_config, logger):
    """Windows would raise AP, and nobody looks for a setting without a reason."""
    cfg = Config.fromfile(write_config())
    resize = dict(type="Resize", scale=(16, 16), keep_ratio=True)
    cfg.train_dataloader.dataset.pipeline = [resize]
    assert refusal(cfg, logger) is None
    said = [text for text in warnings_of(logger) if "are below 16 px" in text]
    assert len(said) == len(cfg.mixture) == 2
    for entry, text in zip(cfg.mixture, said, strict=True):
        assert f"tile=24 in the mixture entry (damex train --tile {entry.name}=" in text


def test_train_and_val_of_the_same_images_are_a_warning(write_config, logger):
    assert refusal(Config.fromfile(write_config()), logger) is None
    [said] = warnings_of(logger)
    assert "8 leak-identical" in said
    details = [r.getMessage() for r in logger.records if r.levelno == logging.INFO]
    assert any("is the training image" in text for text in details)


def test_boxes_that_the_config_drops_are_no_error(
    write_config, two_datasets, edit_json, logger
):
    for split in ("train", "val"):
        edit_json(
            f"{two_datasets[1]['data_root']}{split}.json",
            lambda d: d["annotations"][0].update(bbox=[500, 2, 10, 10]),
        )
    config = write_config()
    assert "lies outside" in refusal(Config.fromfile(config), logger)
    dropping = Config.fromfile(config)
    for loader in ("train_dataloader", "val_dataloader"):
        dropping[loader].dataset.on_bad_box = "drop"
    assert refusal(dropping, logger) is None


def test_what_is_not_used_in_a_training_is_not_checked(
    write_config, two_datasets, logger
):
    two_datasets[0]["test"] = "none.json"
    cfg = Config.fromfile(write_config(mixture=two_datasets))
    assert refusal(cfg, logger) is None
    two_datasets[0]["val"] = "none.json"
    cfg = Config.fromfile(write_config(mixture=two_datasets))
    assert "none.json" in refusal(cfg, logger)
    cfg.val_dataloader = None
    assert refusal(cfg, logger) is None


def test_the_check_can_be_left_out(write_config, monkeypatch):
    def refuse(*_):
        return "no"

    monkeypatch.setattr(damex.workbench.check.check, "refusal", refuse)
    config = Config.fromfile(write_config(name="off", extra="data_check = 'off'"))
    MixtureRunner.from_cfg(config).check_start()
    config = Config.fromfile(write_config(name="quick"))
    with pytest.raises(DataError, match="no"):
        MixtureRunner.from_cfg(config).check_start()


def test_each_annotation_file_is_parsed_once(write_config, two_datasets, monkeypatch):
    """The check is that of the loader, and adds its warnings to the log."""
    read, seen = coco_records.read_json, []
    for module in (coco, sources):
        monkeypatch.setattr(
            module,
            "read_json",
            lambda path, place: seen.append(path) or read(path, place),
        )
    started = MixtureRunner.from_cfg(Config.fromfile(write_config()))
    started.check_start()
    files = [
        f"{e['data_root']}{s}.json" for e in two_datasets for s in ("train", "val")
    ]
    assert sorted(seen) == sorted(files)
    assert isinstance(started._train_loop, BaseLoop)
    assert "check" not in started._train_dataloader["dataset"]


@pytest.mark.parametrize(
    "hooks",
    [
        dict(default_hooks={}),
        dict(default_hooks=dict(logger=None), custom_hooks=[dict(type="EMAHook")]),
        dict(default_hooks=dict(data_check=dict(type="DataCheckHook"))),
        dict(custom_hooks=[dict(type="DataCheckHook")]),
    ],
)
def test_the_command_adds_the_check_to_a_config_without_it(hooks):
    """Such as one that an earlier version has written."""
    cfg = Config(hooks)
    add_data_check(cfg)
    found = [*(cfg.get("default_hooks") or {}).values(), *cfg.get("custom_hooks", [])]
    assert [hook.type for hook in found if hook].count("DataCheckHook") == 1


def test_another_runner_is_checked_after_it_has_loaded(
    write_config, two_datasets, logger
):
    """mmengine's runner knows no stage before that."""
    hook, cfg = DataCheckHook(), resolve_config(Config.fromfile(write_config()))
    runner = MixtureRunner.from_cfg(cfg)
    hook.before_run(runner)  # an evaluation: the training is not built
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    hook.before_run(runner)
    image(two_datasets[0], "0.png").unlink()
    hook.before_run(runner)  # once is enough
    with pytest.raises(DataError, match=r"0\.png does not exist"):
        DataCheckHook().before_run(runner)
