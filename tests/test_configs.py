"""Every shipped config can be read, and the full-size one builds and trains a step."""

import copy
import shutil
from pathlib import Path

import pytest
import torch
from mmdet.datasets import CocoDataset
from mmdet.registry import DATASETS, MODELS
from mmengine.config import Config

from damex.engine.config import build_runner, resolve_config
from tests.conftest import CONFIGS, MMDET_CONFIGS, initialized, shipped_configs

COMPLETE = shipped_configs()


@pytest.mark.parametrize("path", COMPLETE, ids=lambda path: path.stem)
def test_complete_configs_name_a_mixture_a_runner_and_the_registration(path):
    cfg = Config.fromfile(path)
    assert cfg.runner_type == "MixtureRunner"
    assert cfg.custom_imports.imports == ["damex.registry"]
    alone = path.stem == "growing_alone"  # the control of growing has one dataset
    assert len(cfg.mixture) >= 2 or alone
    assert cfg.model.bbox_head.num_classes is None
    assert cfg.train_dataloader.dataset.type == "MixtureDataset"
    assert cfg.test_dataloader == cfg.val_dataloader


@pytest.fixture(scope="module")
def full_size():
    """DAMEX-DINO on a ResNet-50 as the config has it, with random weights."""
    path = CONFIGS / "damex_dino" / "damex-dino-4scale_r50_8xb2-12e_coco-voc.py"
    model = copy.deepcopy(Config.fromfile(path).model)
    model.backbone.init_cfg = None  # the pretrained weights are a download
    model.bbox_head.num_classes = 80
    model.update(moe=Config.fromfile(path).moe, num_groups=2)
    return initialized(model)


SIZES = [(256, 320), (320, 256)]  # 900 queries need as many features


def test_full_size_dino_has_experts_in_layers_0_2_and_4(
    full_size, make_batch, run_loss
):
    losses = run_loss(full_size, make_batch([0, 1], sizes=SIZES))
    losses = {k: v for k, v in losses.items() if "loss" in k}
    total = sum(losses.values())
    total.backward()
    assert torch.isfinite(total)
    # Untrained: -log(1/2) for two experts, times 0.1.
    assert losses["loss_moe_dataset_routing"].item() == pytest.approx(0.069, abs=0.02)
    frozen = ("backbone.conv1", "backbone.bn1", "backbone.layer1")
    for name, parameter in full_size.named_parameters():
        if not name.startswith(frozen) and ".bn" not in name and "downs" not in name:
            assert parameter.grad is not None, name


def test_full_size_dino_predicts(full_size, make_batch, run_predict):
    found = run_predict(full_size, make_batch([0, 1], sizes=SIZES))
    assert [len(s.pred_instances) for s in found] == [300, 300]
    assert set(found[0].routing_counts) == {"decoder.0", "decoder.2", "decoder.4"}
    assert sum(found[0].routing_counts["decoder.0"]) == 900


@pytest.fixture
def fake_coco_and_voc(make_coco_dataset, write_voc, tmp_path, monkeypatch):
    """The folders of data/README.md with a few images each."""
    entry = make_coco_dataset(
        tmp_path / "coco", classes=[*CocoDataset.METAINFO["classes"]], num_images=2
    )
    coco, source = tmp_path / "data" / "coco", Path(entry["data_root"])
    (coco / "annotations").mkdir(parents=True)
    for split in ("train", "val"):
        target = coco / "annotations" / f"instances_{split}2017.json"
        target.write_bytes((source / f"{split}.json").read_bytes())
        shutil.copytree(source / "images", coco / f"{split}2017")
    for year, image_set, name in (
        (2007, "trainval", "sofa"),
        (2012, "trainval", "cow"),
        (2007, "test", "aeroplane"),
    ):
        root, stem = tmp_path / f"data/VOCdevkit/VOC{year}", f"{year}_{image_set}"
        write_voc(root, {stem: [name]}, **{image_set: f"{stem}\n"})
    monkeypatch.chdir(tmp_path)


def test_coco_and_voc_merge_by_name(fake_coco_and_voc):
    path = CONFIGS / "damex_dino" / "damex-dino-4scale_r50_8xb2-12e_coco-voc.py"
    cfg = resolve_config(Config.fromfile(path))
    train = DATASETS.build(cfg.train_dataloader.dataset)
    assert train.sizes == [2, 2]  # VOC: one image of each year
    classes = train.metainfo["classes"]
    # VOC's twenty are all among COCO's.
    assert len(classes) == cfg.model.bbox_head.num_classes == 80
    assert len(train.label_space.valid_labels(1)) == 20
    assert cfg.model.num_groups == 2
    labels = [
        i["bbox_label"] for k in (2, 3) for i in train.get_data_info(k)["instances"]
    ]
    assert [classes[label] for label in labels] == ["couch", "cow"]
    val = DATASETS.build(cfg.val_dataloader.dataset)
    assert val.metainfo == train.metainfo
    assert classes[val.get_data_info(2)["instances"][0]["bbox_label"]] == "airplane"
    assert val[2]["data_samples"].dataset_name == "voc"


@pytest.mark.slow
def test_fine_tuning_takes_over_mmdets_classes_by_name(tmp_path, make_coco_dataset):
    """From a stand-in for mmdet's COCO checkpoint: its names, shapes and classes."""
    path = MMDET_CONFIGS / "dino" / "dino-4scale_r50_8xb2-12e_coco.py"
    coco = Config.fromfile(path).model
    coco.backbone.init_cfg = None
    dense = MODELS.build(coco)
    dense.init_weights()  # mmdet leaves level_embed as the memory was
    stand_in = dense.state_dict()
    meta = dict(dataset_meta=dict(classes=CocoDataset.METAINFO["classes"]))
    torch.save(dict(state_dict=stand_in, meta=meta), tmp_path / "coco.pth")

    path = CONFIGS / "damex_dino" / "damex-dino-4scale_r50_1xb4-12e_finetune.py"
    cfg = Config.fromfile(path)
    cfg.merge_from_dict(dict(load_from=str(tmp_path / "coco.pth"), max_epochs=1))
    cfg.mixture = [
        make_coco_dataset(tmp_path / name, classes=classes, num_images=4)
        for name, classes in (("street", ["gnome", "person"]), ("sky", ["kite"]))
    ]
    cfg.work_dir, cfg.pipeline_check = str(tmp_path / "work"), "off"
    cfg.optim_wrapper.optimizer.lr = 0.0  # so that the rows can be compared
    cfg.val_dataloader = cfg.val_cfg = cfg.val_evaluator = None
    cfg.train_dataloader.update(batch_size=2, num_workers=0)
    cfg.train_dataloader.sampler.samples_per_epoch = 2
    cfg.train_dataloader.dataset.pipeline = [
        dict(type="LoadImageFromFile"),
        dict(type="LoadAnnotations", with_bbox=True),
        dict(type="Resize", scale=(320, 320), keep_ratio=False),
        dict(type="PackDetInputs"),
    ]
    runner = build_runner(cfg)
    runner.train()

    classes = runner.train_dataloader.dataset.metainfo["classes"]
    known = meta["dataset_meta"]["classes"]
    for name, value in runner.model.bbox_head.named_parameters():
        if name.startswith("cls_branches") and name.endswith("weight"):
            rows = stand_in[f"bbox_head.{name}"]
            for one in ("person", "kite"):
                torch.testing.assert_close(
                    value[classes.index(one)].cpu(), rows[known.index(one)]
                )
    shared = runner.model.encoder.layers[0].ffn.moe.shared_expert.expert
    ffn = stand_in["encoder.layers.0.ffn.layers.0.0.weight"]
    torch.testing.assert_close(shared.w1_EDH[0].T.cpu(), ffn)
