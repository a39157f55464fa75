"""Real detectors from the shipped configs, and batches of random images for them."""

from pathlib import Path

import pytest
import torch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import InstanceData

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture
def model_config():
    """Config of the tiny DINO with DAMEX, for three dataset groups and four classes."""

    def make(*, moe="damex", num_groups=3, base="moe-dino_tiny", **changes):
        import damex.registration  # noqa: F401 - registers the detectors

        init_default_scope("mmdet")
        cfg = Config.fromfile(CONFIGS / f"_base_/models/{base}.py").model
        cfg.bbox_head.num_classes = 4
        if isinstance(moe, str):
            moe = Config.fromfile(CONFIGS / f"_base_/moe/{moe}.py").moe
        cfg.update(moe=moe, num_groups=num_groups, **changes)
        return cfg

    return make


@pytest.fixture
def build(model_config):
    """Build and initialise a detector under a fixed seed."""

    def make(**kwargs):
        torch.manual_seed(0)
        detector = MODELS.build(model_config(**kwargs))
        detector.init_weights()
        return detector

    return make


@pytest.fixture
def make_batch():
    """Data as a loader hands it to ``data_preprocessor``: images with boxes."""

    def make(groups, *, sizes=None, boxes=None, seed=0):
        generator = torch.Generator().manual_seed(seed)
        sizes = sizes or [(64, 64)] * len(groups)
        boxes = boxes or [2] * len(groups)
        inputs, samples = [], []
        for group, (height, width), count in zip(groups, sizes, boxes, strict=True):
            inputs.append(
                torch.randint(0, 256, (3, height, width), generator=generator).to(
                    torch.uint8
                )
            )
            shape = dict(img_shape=(height, width), ori_shape=(height, width), img_id=1)
            sample = DetDataSample(metainfo=dict(scale_factor=(1.0, 1.0), **shape))
            if group is not None:
                sample.set_metainfo(dict(group_id=group, dataset_id=group))
            corner = torch.rand(count, 2, generator=generator) * 20
            sample.gt_instances = InstanceData(
                bboxes=torch.cat([corner, corner + 24], dim=1),
                labels=torch.randint(0, 4, (count,), generator=generator),
            )
            samples.append(sample)
        return dict(inputs=inputs, data_samples=samples)

    return make
