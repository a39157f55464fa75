"""The config of a stranger's checkpoint: read as values, and built by an allow-list."""

import copy
import inspect
import math

import mmdet.registry
import pytest
from mmengine.config import Config

import damex.registry  # noqa: F401  (first: it keeps mmdet silent)
from damex.config_files import CONFIGS, KEYS, PlainConfig, moe_of_file
from damex.errors import DataError
from damex.inference.stored import _test_pipeline
from damex.inference.trust import (
    OF_TIMM,
    PARTS_OF_LAYERS,
    TEXTS,
    TYPES,
    check_parts,
    forget_pretrained,
    read_literals,
)
from damex.models.timm_backbone import TimmBackbone
from damex.workbench.growth.prune import NOT_KEPT
from tests.conftest import shipped_configs


@pytest.mark.parametrize("kind", [Config, PlainConfig])
def test_what_a_training_writes_is_read_as_it_was(kind):
    values = dict(
        model=dict(type="DINO", size=(1, 2), rate=-1e-4, none=None, flag=True),
        steps=[dict(type="Resize", scale=(1333, 800)), dict(type="Pad")],
        names={"two words": 1, "class": [1, [2]]},
        note="a 'quoted' \\ text\nof two lines",
        empty=dict(),
    )
    assert read_literals(kind(values).pretty_text, where="a.pth") == values


def test_numbers_without_end_are_read():
    found = read_literals("a = [inf, -inf, nan]", where="a.pth")["a"]
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "a = __import__('os').system('true')",
        "a = open('x')",
        "a = dict(b=print())",
        "a = dict([('b', 1)])",
        "a = dict(**{'b': 1})",
        "a = {**{'b': 1}}",
        "a = dict({'b': print()})",
        "a = b",
        "a = [x for x in (1, 2)]",
        "a = f'{1}'",
        "a = 1 + 1",
        "a = -'b'",
        "a.b = 1",
        "a, b = 1, 2",
        "print(1)",
        "a: int = 1",
        "a = lambda: 1",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(DataError, match=r"x\.pth is more than values.*line 2"):
        read_literals(f"ok = 1\n{text}", where="x.pth")


@pytest.mark.parametrize("text", ["a = (", "a = " + "[" * 5000, "a = 1\0"])
def test_text_that_is_no_program_is_refused(text):
    with pytest.raises(DataError, match=r"x\.pth cannot be read"):
        read_literals(text, where="x.pth")


DINO = dict(type="MoEDINO")


def refused(parts):
    with pytest.raises(DataError) as caught:
        check_parts(parts, where="x.pth")
    text = str(caught.value)
    assert text.startswith("the config in x.pth has ")
    assert "could run code" in text
    assert "--trust" in text
    assert text.isprintable()
    return text


@pytest.mark.parametrize("path", shipped_configs(), ids=lambda path: path.stem)
def test_checkpoints_of_shipped_configs_need_no_trust(path):
    cfg = Config.fromfile(path).to_dict()
    cfg["model"].update(moe=cfg.get("moe"), num_groups=2)
    config = read_literals(PlainConfig(cfg).pretty_text, where="")
    assert [*forget_pretrained(config["model"], keep_published=True)] == []
    parts = dict(model=config["model"], pipeline=_test_pipeline(config, ""))
    check_parts(parts, where="")
    written = {key: config[key] for key in KEYS & config.keys()}  # by prune and merge
    assert written.keys() >= {"model", "mixture", "optim_wrapper", "train_dataloader"}
    left_out = {*NOT_KEPT, "custom_imports"}
    check_parts({k: v for k, v in written.items() if k not in left_out}, where="")


@pytest.mark.parametrize(
    "path", sorted((CONFIGS / "_base_/moe").glob("*.py")), ids=lambda path: path.stem
)
def test_checkpoints_of_all_variants_need_no_trust(path):
    check_parts(dict(model=dict(DINO, moe=moe_of_file(path.stem))), where="")


@pytest.mark.parametrize("slot", TYPES)
def test_allowed_types_are_registered(slot):
    """mmengine imports a name that its registry lacks from the current folder."""
    registry, names = TYPES[slot]
    if registry:
        found = getattr(mmdet.registry, registry)
        found.import_from_location()
        known = {*found.module_dict, *found.parent.module_dict}
        assert names <= known


def test_damex_takes_texts_of_moe_as_choices():
    """No part of a layer has an argument that is a path."""
    for kind in mmdet.registry.MODELS.module_dict.values():
        if kind.__module__.startswith(PARTS_OF_LAYERS):
            for one in inspect.signature(kind).parameters.values():
                assert "Path" not in str(one.annotation)
    options = {*inspect.signature(TimmBackbone).parameters} - {"options"}
    assert options <= OF_TIMM
    assert "pretrained" not in TEXTS["TimmBackbone"]


@pytest.mark.parametrize(
    ("part", "words"),
    [
        # types by slot
        (dict(type="subprocess.Popen"), "model.type='subprocess.Popen'"),
        (dict(type=["MoEDINO"]), "model.type=['MoEDINO']"),
        (dict(DINO, backbone=dict(type="antigravity")), "slot backbone"),
        (dict(DINO, backbone=dict(type="FocalLoss")), "slot backbone"),
        (dict(DINO, backbone=dict(type="mmdet.ResNet")), "slot backbone"),
        (dict(DINO, backbone=dict(type="timm.create_model")), "slot backbone"),
        (dict(DINO, neck=dict(type="RPN")), "model.neck.type='RPN'"),
        (dict(DINO, neck=dict(type="Detectron2Wrapper")), "model.neck.type"),
        (dict(DINO, encoder=dict(type="ResNet")), "slot encoder"),
        (dict(DINO, moe=dict(gate=dict(type="my.Gate"))), "slot gate"),
        (dict(DINO, moe=dict(layers=[[dict(type="ResNet")]])), "slot layers"),
        (dict(DINO, test_cfg=dict(nms=dict(type="exec('1')"))), "slot nms"),
        # arguments
        (dict(DINO, neck=dict(type="FPN", detector="evil.py")), "neck.detector"),
        (dict(DINO, neck=dict(type="FPN", _scope_="evil")), "model.neck._scope_"),
        (dict(DINO, encoder=dict(teacher_config="evil.py")), "teacher_config"),
        (dict(DINO, encoder=[[dict(a=["evil.py"])]]), "encoder[0][0].a[0]='evil.py'"),
        (dict(DINO, **{"\x1b]0;x": "y"}), "model['\\x1b]0;x']='y'"),
        (dict(DINO, moe=dict(layers="http://a/b")), "model.moe.layers"),
        (dict(DINO, moe=dict(layers="\x1b[2J")), "model.moe.layers='\\x1b[2J'"),
        (dict(DINO, encoder=b"bytes"), "model.encoder=b'bytes'"),
        *(
            (
                dict(DINO, backbone=dict(type="TimmBackbone", name="a", **{key: 1})),
                f"model.backbone.{key}=1",
            )
            for key in (
                *("checkpoint_path", "cache_dir", "pretrained_cfg"),
                *("pretrained_cfg_overlay", "features_cls", "hf_hub"),
            )
        ),
    ],
)
def test_parts_of_a_detector_that_are_refused(part, words):
    assert words in refused(dict(model=part))


@pytest.mark.parametrize(
    "step",
    [
        dict(type="os.system", command="true"),
        dict(type="Albu", transforms=[dict(type="HorizontalFlip")]),
        dict(type="CameraMotionCompensation", warp_mode="1"),
        dict(type="LoadImageFromFile", backend_args=dict(backend="petrel")),
        dict(type="LoadImageFromFile", file_client_args=dict(backend="http")),
        dict(type="RandomChoice", transforms=[[dict(type="evil.Step")]]),
        dict(type="RandomChoiceResize", resize_type="evil"),
        dict(type="Resize", backend="http://a"),
        dict(type="MoEDINO"),  # which is no transform: mmengine would import it
    ],
)
def test_steps_that_are_refused(step):
    refused(dict(pipeline=[dict(type="LoadImageFromFile"), step]))


@pytest.mark.parametrize(
    "part",
    [
        dict(custom_hooks=[dict(type="os.mkdir")]),
        dict(custom_hooks=[dict(type="RFSearchHook")]),
        dict(default_hooks=dict(any=dict(type="EMAHook", ema_type="os.system"))),
        dict(default_hooks=dict(any=dict(type="CheckpointHook", out_dir="/home"))),
        dict(default_hooks=dict(a=dict(type="CheckpointHook", filename_tmpl="../a"))),
        dict(default_hooks=dict(a=dict(type="DetVisualizationHook", test_out_dir="/"))),
        dict(optim_wrapper=dict(type="OptimWrapper", constructor="os.system")),
        dict(train_dataloader=dict(collate_fn=dict(type="a.b"))),
        dict(train_dataloader=dict(worker_init_fn=dict(type="a.b"))),
        dict(train_dataloader=dict(dataset=dict(type="OpenImagesDataset"))),
        dict(val_evaluator=dict(type="MOTChallengeMetric", outfile_prefix="/home")),
        dict(test_evaluator=[dict(type="DumpResults", out_file_path="a.pkl")]),
        dict(mixture=[dict(name="a", train=dict(type="BaseDetDataset"))]),
        dict(mixture=[dict(name="a", train="http://a/train.json")]),
        dict(
            mixture=[dict(name="a", train=dict(type="CocoDataset", ann_file="s3://a"))]
        ),
        dict(mixture=[dict(name="a", other="b")]),
        dict(label_space=dict(classes=["a\x1b[2J"])),
        dict(visualizer=dict(type="DetLocalVisualizer", save_dir="/")),
        dict(vis_backends=[dict(type="WandbVisBackend")]),
        dict(env_cfg=dict(dist_cfg=dict(init_method="tcp://a"))),
        dict(model_wrapper_cfg=dict(type="a.b")),
        dict(default_scope="antigravity"),
        dict(runner_type="Runner"),
        dict(_base_="other.py"),
    ],
)
def test_other_parts_of_a_config_that_are_refused(part):
    refused(part)


def test_names_are_no_types():
    """A class may be called 'type', and a folder 'data.yaml'."""
    entry = dict(name="a", root="data/data.yaml", rename={"type": "evil.py"})
    check_parts(dict(mixture=[entry], max_epochs=3, resume=None), where="x.pth")


EVIL = dict(type="Pretrained", checkpoint="http://127.0.0.1/a")
LEARNT = dict(type="Kaiming", layer="Conv2d")
KNOWN = dict(type="Pretrained", checkpoint="torchvision://resnet50")


@pytest.mark.parametrize(
    ("model", "keep", "left", "places"),
    [
        (dict(neck=dict(init_cfg=EVIL)), True, dict(neck={}), ["model.neck.init_cfg"]),
        (dict(a=[dict(init_cfg=[EVIL])]), True, dict(a=[{}]), ["model.a[0].init_cfg"]),
        (
            dict(init_cfg=dict(type="Kaiming", override=[dict(EVIL, name="a")])),
            *(True, {}, ["model.init_cfg"]),
        ),
        (dict(init_cfg=LEARNT), False, dict(init_cfg=LEARNT), []),
        (dict(init_cfg=KNOWN), True, dict(init_cfg=KNOWN), []),
        (dict(init_cfg=KNOWN), False, {}, ["model.init_cfg"]),
        (
            dict(a=dict(type="ResNet", pretrained="a.pth")),
            *(True, dict(a=dict(type="ResNet", pretrained=None))),
            ["model.a.pretrained"],
        ),
        (
            dict(type="TimmBackbone", pretrained=True),
            *(True, dict(type="TimmBackbone", pretrained=True), []),
        ),
        (
            dict(type="TimmBackbone", pretrained=True),
            *(False, dict(type="TimmBackbone", pretrained=False)),
            ["model.pretrained"],
        ),
    ],
)
def test_initial_weights_are_forgotten(model, keep, left, places):
    model = copy.deepcopy(model)
    assert [*forget_pretrained(model, keep_published=keep)] == places
    assert model == left
