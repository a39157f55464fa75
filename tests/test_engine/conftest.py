"""Small real runs: a config of two datasets for the shipped tiny detector."""

from pathlib import Path

import pytest
import torch
from mmengine.config import Config
from mmengine.runner import Runner

from damex.config_files import merge_options
from damex.engine.config import build_runner

ROOT = Path(__file__).parents[2]

CONFIG = """
_base_ = [
    "{configs}/_base_/models/moe-dino_tiny.py",
    "{configs}/_base_/moe/{moe}.py",
    "{configs}/_base_/datasets/detr_pipeline.py",
    "{configs}/_base_/schedules/adamw_tiny.py",
    "{configs}/_base_/runtime.py",
]
mixture = {mixture!r}
image_size = (64, 64)
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=image_size, keep_ratio=True),
    dict(type="RandomFlip", prob=0.5),
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=image_size, keep_ratio=True),
    dict(type="PackDetInputs"),
]
train_dataloader = dict(
    batch_size=2,
    num_workers=0,
    batch_sampler=None,
    sampler=dict(samples_per_epoch=12),
    dataset=dict(pipeline=train_pipeline),
)
val_dataloader = dict(
    num_workers=0, dataset=dict(pipeline=test_pipeline)
)
test_dataloader = val_dataloader
train_cfg = dict(max_epochs=2, val_interval=2)
work_dir = {work_dir!r}
# mmengine tells runs apart by name and second, and tests start several in one.
experiment_name = {experiment!r}
"""


@pytest.fixture(scope="session")
def write_config_to():
    """Write a config for small datasets; extra lines come last and win."""

    def make(folder, *, mixture, moe="damex", extra="", name="config"):
        path = folder / f"{name}.py"
        text = CONFIG.format(
            configs=ROOT / "configs",
            moe=moe,
            mixture=[dict(entry) for entry in mixture],
            work_dir=str(folder / "work"),
            experiment=f"{folder.name}_{name}",
        )
        path.write_text(text + extra + "\n", encoding="utf-8")
        return path

    return make


@pytest.fixture
def write_config(tmp_path, two_datasets, write_config_to):
    """Write a config for two small datasets; extra lines come last and win."""

    def make(*, mixture=None, extra="", name="config"):
        return write_config_to(
            tmp_path, mixture=mixture or two_datasets, extra=extra, name=name
        )

    return make


@pytest.fixture
def make_runner(write_config):
    """A runner of the tiny detector: two datasets, 6 iterations in an epoch."""

    def make(extra="", *, mixture=None, **options):
        cfg = Config.fromfile(write_config(mixture=mixture, extra=extra))
        merge_options(cfg, options)
        return build_runner(cfg)

    return make


@pytest.fixture
def run_tool(run_python):
    """Run a script of ``tools/`` in a process of its own, on one thread."""

    def run(tool, *arguments, **kwargs):
        return run_python(ROOT / "tools" / tool, *arguments, **kwargs)

    return run


class QuickRunner(Runner):
    """Does not look for compilers, which takes seconds."""

    def _log_env(self, env_cfg):
        pass


@pytest.fixture
def quick_runner(tmp_path):
    """A runner of mmengine that trains on one batch again and again."""

    def make(model, batch, optim_wrapper, *, name="work", **options):
        return QuickRunner(
            model,
            work_dir=str(tmp_path / name),
            train_dataloader=torch.utils.data.DataLoader(
                [batch], collate_fn=lambda items: items[0]
            ),
            optim_wrapper=optim_wrapper,
            default_scope="mmdet",
            default_hooks=dict(logger=None, param_scheduler=None, checkpoint=None),
            experiment_name=f"{tmp_path.name}_{name}",
            **options,
        )

    return make
