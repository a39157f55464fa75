"""The configs of UODB on stand-ins: what they are made of."""

import pytest
from mmdet.registry import DATASETS, MODELS
from mmengine.config import Config

from damex.datasets.label_space import LabelSpace
from damex.engine.config import resolve_config
from damex.models.insertion import moe_blocks
from tests.conftest import CONFIGS

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
    return Config.fromfile(CONFIGS / f"uodb/{kind}-4scale_r50_8xb1-36e_uodb.py")


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
@pytest.mark.parametrize("kind", ["damex-dino", "dino", "moe-dino"])
def test_each_can_be_built(stand_ins, kind):
    """test_configs.py trains a detector of this size for a step."""
    cfg = resolve_config(config(kind))
    blocks = moe_blocks(MODELS.build(cfg.model))
    experts = [block.moe.num_experts for block in blocks]
    assert experts == ([] if kind == "dino" else [8] * 3)
    mixture = DATASETS.build(cfg.train_dataloader.dataset)
    assert mixture.sizes == [2] * 11
    names = [mixture[place]["data_samples"].dataset_name for place in (0, 16)]
    assert names == ["clipart", "kitti"]


def test_the_losses_of_vanilla_teach_the_router(build, make_batch, run_loss):
    losses = [
        dict(type=f"{kind}Loss", weight=0.05, tokens="foreground")
        for kind in ("Importance", "Load")
    ]
    gate = dict(type="TopKGate", k=1, noise="gaussian")
    moe = dict(layers=dict(decoder=[0]), gate=gate, losses=losses)
    detector = build(moe=moe)
    found = run_loss(detector, make_batch([0, 1, 2]))
    for kind in ("importance", "load"):
        detector.zero_grad()
        found[f"loss_moe_{kind}"].backward(retain_graph=True)
        for parameter in moe_blocks(detector)[0].moe.router.parameters():
            assert parameter.grad.isfinite().all()
            assert (parameter.grad != 0).any()
