"""Configs of small mixtures, and checkpoints of their detectors without training."""

import pytest
import torch
from mmengine.config import Config

from damex.config_files import merge_options
from damex.engine.config import build_runner
from damex.models.insertion import moe_blocks
from tests.test_engine.conftest import write_config_to  # noqa: F401


@pytest.fixture
def mixture(two_datasets, make_coco_dataset, tmp_path):
    """Street and park, and sky with a class of its own."""
    sky = make_coco_dataset(
        tmp_path / "sky", classes=["kite", "car"], num_images=4, seed=3
    )
    return [*two_datasets, sky]


@pytest.fixture
def make_config(tmp_path, write_config_to):  # noqa: F811
    """``make_config(entries, **options)``: path of a config."""

    def make(entries, *, moe="damex_best", name="config", extra=""):
        return write_config_to(
            tmp_path, mixture=entries, moe=moe, name=name, extra=extra
        )

    return make


@pytest.fixture
def make_runner(make_config):
    def make(entries, options=None, **changes):
        cfg = Config.fromfile(make_config(entries, **changes))
        merge_options(cfg, options or {})
        return build_runner(cfg)

    return make


@pytest.fixture
def save(make_runner, tmp_path):
    """Save a detector as a training does, with experts and routers far apart."""

    def make(entries, name="old.pth", **changes):
        runner = make_runner(entries, name=name.removesuffix(".pth"), **changes)
        runner.model.init_weights()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for branch in runner.model.bbox_head.cls_branches:
                noise = torch.randn(branch.weight.shape, generator=generator)
                branch.weight.copy_(noise * 0.2)
                branch.bias.zero_()
            for block in moe_blocks(runner.model):
                for parameter in block.moe.experts.parameters():
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter.copy_(noise * 0.2)
                for parameter in block.moe.router.parameters():
                    parameter.mul_(30.0)
        save = dict(save_optimizer=False, save_param_scheduler=False)
        runner.save_checkpoint(str(tmp_path), name, **save)
        return tmp_path / name

    return make
