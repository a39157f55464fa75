"""Weights of Transformers folders; no hub is reached, the tests write the folders."""

import json
import sys

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config, ConfigDict
from mmengine.runner import CheckpointLoader
from safetensors.torch import load_file, save_file

from damex.__main__ import main
from damex.config_files import PlainConfig
from damex.datasets.label_space import LabelSpace
from damex.datasets.spec import parse_mixture
from damex.engine.config import complete_config
from damex.engine.rows import remap_checkpoint
from damex.errors import ConfigError, DataError
from damex.hf.families import read_config
from damex.inference.trust import check_parts
from damex.workbench.zero_config import MODELS as SHIPPED
from damex.workbench.zero_config import config_of_folders
from tests.conftest import CONFIGS
from tests.test_hf.conftest import BACKBONES


@pytest.fixture(params=BACKBONES)
def family(request):
    """Families that Transformers can save with their backbones."""
    return request.param


@pytest.fixture
def folder(tmp_path, model_of, family):
    """A Transformers folder: a detector of three classes."""
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    from damex.hf.families import full_config

    torch.manual_seed(3)
    config = full_config(model_of(family).config, 3)
    model = transformers.AutoModelForObjectDetection.from_config(config)
    model.config.id2label = {0: "dog", 1: "car", 2: "kite"}
    model.save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


@pytest.fixture
def completed(folder, model_of, family, two_datasets):
    """A config that names the folder, completed as a runner does."""
    cfg = Config.fromfile(CONFIGS / "hf" / "rt-detr-v2-tiny_1xb8-4e_toy.py")
    cfg.mixture, cfg.work_dir = two_datasets, "work"
    cfg.model.test_cfg.max_per_img = 10
    cfg.model.name = str(folder)
    found, _ = complete_config(cfg)
    return found


def test_a_name_becomes_the_config_and_the_weights(completed, folder, family):
    """Plain values: a checkpoint needs the folder no more."""
    model = completed.model
    assert "name" not in model
    assert completed.load_from == f"hf://{folder}"
    assert model.config.model_type == family.split()[0]
    assert model.config.decoder_layers == 2
    assert "id2label" not in model.config
    resumed = dict(model=dict(name=str(folder)), resume=True)
    MODELS.get("MoETransformersDetector").complete(resumed)
    assert "load_from" not in resumed  # its own last checkpoint
    text = PlainConfig.of(completed).pretty_text
    again = Config.fromstring(text, ".py")
    assert again.model.config == model.config
    check_parts(dict(model=again.model.to_dict()), where="a checkpoint")
    detector = MODELS.build(ConfigDict(model))
    assert detector.bbox_head.num_classes == 4


def test_a_model_of_the_hub_trains_from_a_folder(folder, two_datasets, tmp_path):
    """As of ``damex train --data A B --model d-fine-n --cfg-options model.name=...``"""
    roots = {entry["name"]: entry["data_root"] for entry in two_datasets}
    start = config_of_folders(roots, "d-fine-n")
    assert start.model.name == "ustc-community/dfine-nano-coco"
    settings = [f"model.name={folder}", "image_size=64"]
    settings += [f"{split}_dataloader.num_workers=0" for split in ("train", "val")]
    work = ["--work-dir", str(tmp_path / "work"), "--device", "cpu"]
    words = ["train", "--data", *roots.values(), "--model", "d-fine-n", "--epochs", "1"]
    assert main([*words, *work, "--cfg-options", *settings]) == 0
    assert (tmp_path / "work" / "summary.json").is_file()


def test_classes_load_by_name(completed, folder, two_datasets, family):
    """The mixture has car, person, bus and dog, the folder dog, car and kite."""
    checkpoint = CheckpointLoader.load_checkpoint(completed.load_from, "cpu")
    state = dict(checkpoint["state_dict"])
    torch.manual_seed(0)
    detector = MODELS.build(ConfigDict(completed.model))
    fresh = {name: value.clone() for name, value in detector.state_dict().items()}
    assert {n for n in fresh if ".adapter." not in n} == set(state)
    space = LabelSpace.from_specs(parse_mixture(two_datasets), mode="union")
    assert space.classes == ("car", "person", "bus", "dog")
    moved, notes = remap_checkpoint(state, checkpoint["meta"], detector, space)
    assert "loaded by name: car, dog" in notes[0]
    given = checkpoint["state_dict"]
    embedding = "detr.model.denoising_class_embed.weight"
    heads = ["decoder.class_embed.0", "decoder.class_embed.1", "enc_score_head"]
    names = [f"detr.model.{head}.weight" for head in heads] + [embedding]
    if family == "rf_detr":
        groups = [f"detr.model.enc_out_class_embed.{n}.weight" for n in range(3)]
        names = ["detr.class_embed.weight", *groups]
    if family.startswith("deformable_detr"):
        names = ["detr.class_embed.1.weight"]
    for name in names:
        assert name in moved
        assert torch.equal(state[name][0], given[name][1])  # car
        assert torch.equal(state[name][3], given[name][0])  # dog
        assert torch.equal(state[name][1:3], fresh[name][1:3])
    # The last row stands for no class.
    if embedding in names:
        assert torch.equal(state[embedding][4], given[embedding][3])
    detector.load_state_dict(state)  # the experts are new, and nothing is missing
    new = [name for name in fresh if ".adapter." in name]
    after = detector.state_dict()
    assert all(torch.equal(after[name], fresh[name]) for name in new)


def test_a_folder_without_a_detector_is_named(tmp_path):
    pytest.importorskip("transformers", reason="needs the extra hf")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty is not a folder with a Transform"):
        CheckpointLoader.load_checkpoint(f"hf://{tmp_path}/empty", "cpu")


@pytest.mark.parametrize("family", ["rt_detr_v2"])
@pytest.mark.parametrize(
    ("change", "error"),
    [
        (dict(attn_implementation="some/kernel", auto_map={"": "x.py"}), None),
        (dict(backbone_config=None, backbone="some/model"), "is 'some/model', a name"),
        (dict(backbone_config="x"), "has model_type=None"),
        (dict(num_queries="x"), "is damaged"),
        (dict(id2label={"1": "dog", "7": "car"}), "is damaged"),  # heads of three
        ({}, "weights are missing, such as bbox_embed"),
        (b"", "is damaged"),
    ],
)
def test_of_a_folder_only_plain_values_and_whole_weights_are_used(
    folder, change, error
):
    config, weights = folder / "config.json", folder / "model.safetensors"
    if isinstance(change, bytes):
        weights.write_bytes(change)
    elif change:
        config.write_text(json.dumps(json.loads(config.read_text()) | change))
    else:
        save_file(dict([*load_file(weights).items()][:50]), weights)
    if error is None:
        assert not {*change} & {*read_config(str(folder))}
        CheckpointLoader.load_checkpoint(f"hf://{folder}", "cpu")
    else:
        with pytest.raises((ConfigError, DataError), match=error):
            CheckpointLoader.load_checkpoint(f"hf://{folder}", "cpu")


@pytest.mark.parametrize("family", ["deformable_detr refined"])
def test_a_backbone_that_older_versions_name(folder):
    """As the published Deformable DETRs do."""
    config = folder / "config.json"
    old = dict(backbone="resnet50", backbone_config=None, use_timm_backbone=True)
    config.write_text(json.dumps(json.loads(config.read_text()) | old))
    known = dict(model_type="timm_backbone", backbone="resnet50", out_indices=[2, 3, 4])
    assert read_config(str(folder))["backbone_config"] == known


def test_without_transformers_one_line_says_what_to_install(model_of, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'damex\[hf\]'"):
        MODELS.build(model_of("d_fine"))


@pytest.mark.parametrize(
    "change",
    [
        dict(name="evil/model"),
        dict(config=dict(model_type="d_fine", auto_map=dict(AutoModel="evil.py"))),
        dict(config=dict(backbone_config=dict(weights="https://evil"))),
        dict(init_cfg=dict(type="Pretrained", checkpoint="evil.pth")),
    ],
)
def test_the_config_of_a_checkpoint_reads_and_fetches_nothing(model_of, change):
    model = {**model_of("rt_detr_v2").to_dict(), **change}
    with pytest.raises(DataError, match="add --trust"):
        check_parts(dict(model=model), where="a checkpoint")


@pytest.mark.parametrize(
    ("backbone", "error"),
    [
        (dict(model_type="timm_backbone", backbone="hf-hub:evil/model"), "no model"),
        (dict(model_type="dinov3_vit"), "dinov3_vit.*supports rt_detr_resnet, hgnet"),
        (dict(model_type="hgnet_v2", pretrained="evil"), "pretrained is unknown"),
    ],
)
def test_a_backbone_is_never_fetched(build_hf, backbone, error):
    pytest.importorskip("transformers", reason="needs the extra hf")
    with pytest.raises(ConfigError, match=error):
        build_hf("d_fine", config=dict(backbone_config=backbone))


def test_the_help_shows_the_parameters_of_the_model_for_cpus():
    pytest.importorskip("transformers", reason="needs the extra hf")
    cfg = config_of_folders({"fish": "data/fish"}, "rtdetr-v2-tiny")
    cfg.model.bbox_head.num_classes = 24
    cfg.model.backbone.pretrained = False
    detector = MODELS.build(cfg.model)
    millions = sum(p.numel() for p in detector.parameters()) / 1e6
    assert millions == pytest.approx(SHIPPED["rtdetr-v2-tiny"].parameters, rel=0.02)
