"""The configs of UODB on stand-ins: what they are made of, and a step of each."""

import copy
from pathlib import Path

import pytest
import torch
from mmdet.registry import DATASETS, MODELS
from mmengine.config import Config
from mmengine.dataset import pseudo_collate

from damex.datasets.label_space import LabelSpace
from damex.engine.config import resolve_config
from damex.models.insertion import moe_blocks

CONFIGS = Path(__file__).parents[1] / "configs" / "uodb"
# Numbers of classes, as in the benchmark; 167 in all.
CLASSES = dict(clipart=20, coco=80, deeplesion=1, dota=15, kitchen=11, lisa=4)
CLASSES |= dict(watercolor=6, widerface=1, kitti=3, voc=20, comic=6)


@pytest.fixture
def stand_ins(make_coco_dataset, edit_json, tmp_path, monkeypatch):
    """data/uodb with a handful of small images per dataset, and all its classes."""

    def into_folder(document):
        for image in document["images"]:
            image["file_name"] = f"images/{image['file_name']}"

    for name, count in CLASSES.items():
        make_coco_dataset(
            tmp_path / "data" / "uodb" / name,
            classes=[f"class {number}" for number in range(count)],
            num_images=2,
            size=(64, 48),
        )
        for split in ("train", "val"):
            edit_json(tmp_path / "data" / "uodb" / name / f"{split}.json", into_folder)
    monkeypatch.chdir(tmp_path)


def config(kind):
    return Config.fromfile(CONFIGS / f"{kind}-4scale_r50_8xb1-36e_uodb.py")


def test_the_papers_map_from_datasets_to_experts(stand_ins):
    cfg = resolve_config(config("damex-dino"))
    space = LabelSpace.from_metainfo(cfg.val_dataloader.dataset.label_space)
    experts = {
        name: space.group_id(number) for number, name in enumerate(space.dataset_names)
    }
    # In the order of the released code: itself for 0 to 7, LISA's, and COCO's twice.
    papers = dict(clipart=0, coco=1, deeplesion=2, dota=3, kitchen=4, lisa=5)
    papers |= dict(watercolor=6, widerface=7, kitti=5, voc=1, comic=1)
    assert experts == papers
    assert cfg.model.num_groups == 8
    assert cfg.model.bbox_head.num_classes == sum(CLASSES.values()) == 167
    assert [len(space.valid_labels(i)) for i in range(11)] == [*CLASSES.values()]


def test_the_three_differ_in_their_experts_alone():
    damex, dense, vanilla = map(config, ("damex-dino", "dino", "moe-dino"))
    assert dense.moe is None
    assert vanilla.moe.layers == damex.moe.layers
    assert sum(loss.weight for loss in vanilla.moe.losses) == pytest.approx(0.1)
    assert {loss.type for loss in vanilla.moe.losses} == {"ImportanceLoss", "LoadLoss"}
    for cfg in (damex, dense, vanilla):
        cfg.pop("moe")
    assert damex.to_dict() == dense.to_dict() == vanilla.to_dict()
    (steps,) = damex.param_scheduler
    assert [stone * damex.max_epochs for stone in steps.milestones] == [11, 22, 33]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "losses"),
    [
        ("damex-dino", {"loss_moe_dataset_routing"}),
        ("dino", set()),
        ("moe-dino", {"loss_moe_importance", "loss_moe_load"}),
    ],
)
def test_a_step_of_each(stand_ins, kind, losses):
    """Of the config, but for small images, a short encoder and random weights."""
    cfg = resolve_config(config(kind))
    model = copy.deepcopy(cfg.model)
    model.backbone.init_cfg = None  # the pretrained weights are a download
    model.num_queries = 60
    model.encoder.num_layers = 1
    torch.manual_seed(0)
    detector = MODELS.build(model)
    detector.init_weights()
    blocks = moe_blocks(detector)
    assert [block.moe.num_experts for block in blocks] == ([8] * 3 if losses else [])
    dataset = copy.deepcopy(cfg.train_dataloader.dataset)
    dataset.pipeline = [
        dict(type="LoadImageFromFile"),
        dict(type="LoadAnnotations", with_bbox=True),
        dict(type="Resize", scale=(96, 96), keep_ratio=True),
        dict(type="PackDetInputs"),
    ]
    mixture = DATASETS.build(dataset)
    assert mixture.sizes == [2] * 11
    detector.train()
    detector.begin_step(iteration=0, max_iters=10)
    # One image each of Clipart and KITTI.
    data = detector.data_preprocessor(pseudo_collate([mixture[0], mixture[16]]), True)
    assert [s.dataset_name for s in data["data_samples"]] == ["clipart", "kitti"]
    found = detector(**data, mode="loss")
    assert {key for key in found if key.startswith("loss_moe")} == losses
    total = sum(value for key, value in found.items() if "loss" in key)
    total.backward()
    assert torch.isfinite(total)
    assert (detector.bbox_head.cls_branches[0].weight.grad != 0).any()
