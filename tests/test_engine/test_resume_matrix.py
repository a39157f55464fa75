"""Resuming from each file that a training leaves: the same end, or a refusal."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.hooks import Hook

from damex.__main__ import main
from damex.config_files import merge_options
from damex.engine.config import build_runner
from damex.errors import ConfigError

pytestmark = pytest.mark.slow

SMALL = """
model = dict(num_queries=10, dn_cfg=dict(group_cfg=dict(num_dn_queries=10)))
model["test_cfg"] = dict(max_per_img=10)
data_check = "off"
param_scheduler = [dict(type="CosineAnnealingLR", eta_min_ratio=0.02, by_epoch=False)]
"""
TRAININGS = {
    # Six steps an epoch, three epochs.
    "by epoch": "train_cfg = dict(max_epochs=3, val_interval=1)\n"
    "optim_wrapper = dict(constructor='MuonOptimWrapperConstructor')\n"
    "default_hooks = dict(checkpoint=dict(max_keep_ckpts=-1))",
    "in mid-epoch": "train_cfg = dict(max_epochs=2, val_interval=1)\n"
    "default_hooks = dict(checkpoint=dict(by_epoch=False, interval=4))\n"
    "optim_wrapper = dict(constructor='ExpertOptimWrapperConstructor', "
    "experts=dict(type='NormalizedGD', lr=0.05))",
    "through the switch to experts": "train_cfg = dict(max_epochs=2, val_interval=1)\n"
    "default_hooks = dict(checkpoint=dict(max_keep_ckpts=-1))\n"
    "moe = dict(upcycling=dict(share=0.5), gate=dict(renormalize=True))",
    "between two optimizer steps": "train_cfg = dict(max_epochs=2, val_interval=1)\n"
    "optim_wrapper = dict(accumulative_counts=4)\n"
    "default_hooks = dict(checkpoint=dict(max_keep_ckpts=-1))",
    # As on the page about training, with a hook of the base that counts epochs.
    "by iteration": "train_cfg = dict(_delete_=True, type='IterBasedTrainLoop', "
    "max_iters=8, val_interval=3)\n"
    "train_dataloader['sampler'] = dict(type='MixtureSampler', infinite=True)",
    "by iteration, in epochs": "train_cfg = dict(_delete_=True, "
    "type='IterBasedTrainLoop', max_iters=8, val_interval=3)\n"
    "train_dataloader['sampler'] = dict(type='MixtureSampler', samples_per_epoch=5)",
}


class Stop(Hook):
    """Kill the training before an iteration."""

    def __init__(self, iteration):
        self.iteration = iteration

    def before_train_iter(self, runner, *_, **__):
        if runner.iter == self.iteration:
            raise KeyboardInterrupt


def train(config, work, *, stop=None, **options):
    cfg = Config.fromfile(config)
    cfg.work_dir, cfg.experiment_name = str(work), str(work)
    merge_options(cfg, options)
    runner = build_runner(cfg)
    if stop is not None:
        runner.register_hook(Stop(stop))
        with pytest.raises(KeyboardInterrupt):
            runner.train()
    else:
        runner.train()
    return {name: value.clone() for name, value in runner.model.state_dict().items()}


def differing(weights, others):
    assert weights.keys() == others.keys()
    return [name for name in weights if not torch.equal(weights[name], others[name])]


def scores_of(work):
    """Iteration and best score of the best checkpoints of a folder."""
    found = {}
    for path in work.glob("best_*.pth"):
        content = torch.load(path, weights_only=False)
        info = content["message_hub"]["runtime_info"]
        found[path.name] = content["meta"]["iter"], info["best_score"]
    return found


@pytest.mark.parametrize("kind", TRAININGS)
def test_each_file_of_a_training(kind, write_config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config, whole = write_config(extra=SMALL + TRAININGS[kind]), tmp_path / "whole"
    weights, best = train(config, whole), scores_of(whole)
    assert len(best) == 1
    files = sorted(path.name for path in whole.glob("*.pth"))
    assert any(re.match("(epoch|iter)_", name) for name in files)
    resumed = 0
    for name in files:
        copy = tmp_path / f"copy_{name}"
        shutil.copytree(whole, copy)
        if name.startswith("best_"):
            with pytest.raises(ConfigError, match="holds no optimizer and no param_s"):
                train(config, copy, resume=True, load_from=str(copy / name))
            continue
        work = copy if resumed % 2 else tmp_path / f"elsewhere_{name}"
        found = train(config, work, resume=True, load_from=str(copy / name))
        assert differing(found, weights) == [], work
        assert scores_of(work) == best, work
        resumed += 1
    assert resumed > 1
    killed = tmp_path / "killed"
    train(config, killed, stop=7)
    assert differing(train(config, killed, resume=True), weights) == []
    assert scores_of(killed) == best


def test_the_best_score_of_an_interrupted_evaluation_is_kept(write_config, tmp_path):
    """Killed after the best checkpoint; the weights to resume from score less."""
    extra = SMALL + TRAININGS["by epoch"] + "\nload_from = None"
    config, work = write_config(extra=extra), tmp_path / "work"
    train(config, work, max_epochs=1)
    (name,) = scores_of(work)
    for path in (work / name, work / "epoch_1.pth"):
        content = torch.load(path, weights_only=False)
        info = content["message_hub"]["runtime_info"]
        if path.name == name:
            info["best_score"] = 0.9
        else:  # as it was before its evaluation
            del info["best_score"], info["best_ckpt"], info["evaluated"]
        torch.save(content, path)
    train(config, work, resume=True, max_epochs=2)
    assert scores_of(work) == {name: (6, 0.9)}


def test_a_copied_work_directory_is_resumed_by_its_own_config(
    write_config, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = write_config(extra=SMALL + TRAININGS["by epoch"])
    work, copy = tmp_path / "work", tmp_path / "copy"
    train(config, work, max_epochs=1)
    shutil.copytree(work, copy)
    before = {path: path.stat().st_mtime_ns for path in work.iterdir()}
    inside = copy / config.name
    options = ["--resume", "--cfg-options", "max_epochs=2"]
    assert main(["train", str(inside), *options]) == 0
    assert {path: path.stat().st_mtime_ns for path in work.iterdir()} == before
    assert (copy / "epoch_2.pth").is_file()
    assert Path(Config.fromfile(inside).work_dir) == copy  # and so from now on
