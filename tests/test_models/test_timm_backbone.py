from pathlib import Path

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from damex.errors import ConfigError
from damex.models.timm_backbone import TimmBackbone

CONVNEXT = dict(type="TimmBackbone", name="test_convnext", out_indices=(1, 2, 3))
SWIN = dict(
    type="TimmBackbone",
    name="swin_tiny_patch4_window7_224",
    embed_dim=8,
    depths=(1, 1, 1, 1),
    num_heads=(1, 1, 1, 1),
)


@pytest.mark.parametrize(
    ("config", "channels", "reductions"),
    [
        (CONVNEXT, [32, 48, 64], [8, 16, 32]),
        (SWIN, [16, 32, 64], [8, 16, 32]),
        (dict(name="test_resnet", out_indices=(2, 4)), [48, 96], [8, 32]),
        (dict(name="test_efficientnet", out_indices=(1, 2)), [24, 32], [4, 8]),
        (dict(name="test_vit", out_indices=(1, 3)), [64, 64], [16, 16]),
        (dict(name="test_vit", patch_size=14, out_indices=(3,)), [64], [14]),
    ],
    ids=lambda value: value.get("name") if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("size", [(64, 96), (70, 45)])
def test_maps_of_any_image_size(config, channels, reductions, size):
    backbone = MODELS.build({"type": "TimmBackbone", **config}).eval()
    assert (backbone.channels, backbone.reductions) == (channels, reductions)
    height, width = size
    images = torch.rand(2, 3, *size)
    with torch.no_grad():
        maps = backbone(images)
        # Whole strides: timm's own maps, channels first.
        if not any(side % stride for side in size for stride in reductions):
            for ours, theirs in zip(maps, backbone.net(images), strict=True):
                turned = theirs.movedim(-1, 1) if config is SWIN else theirs
                assert torch.equal(ours, turned)
    assert [tuple(one.shape) for one in maps] == [
        (2, c, -(-height // r), -(-width // r))
        for c, r in zip(channels, reductions, strict=True)
    ]


@pytest.mark.parametrize("name", ["test_efficientnet", "test_resnet", "test_convnext"])
def test_channels_last_changes_the_speed_alone(name):
    torch.manual_seed(0)
    plain = TimmBackbone(name).eval()
    other = TimmBackbone(name, channels_last=True).eval()
    state = other.state_dict()
    assert list(state) == list(plain.state_dict())
    other.load_state_dict(plain.state_dict())
    kernels = [one for one in state.values() if one.ndim == 4 and one.shape[1] > 1]
    last = dict(memory_format=torch.channels_last)
    assert all(one.is_contiguous(**last) for one in kernels)
    images = torch.rand(2, 3, 70, 45)
    for ours, theirs in zip(plain(images), other(images), strict=True):
        torch.testing.assert_close(ours, theirs)
        assert theirs.is_contiguous()


def with_backbone(config, backbone, channels):
    config.backbone = dict(backbone)  # an update would keep options of the ResNet
    config.neck.in_channels = channels
    torch.manual_seed(0)
    return MODELS.build(config)


@pytest.mark.parametrize(
    ("backbone", "channels"),
    [(CONVNEXT, [32, 48, 64]), (SWIN, [16, 32, 64])],
    ids=["convnext", "swin"],
)
def test_a_detector_trains_and_predicts(
    backbone, channels, model_config, make_batch, run_loss, run_predict, total
):
    detector = with_backbone(model_config(), backbone, channels)
    before = next(detector.backbone.parameters()).detach().clone()
    detector.init_weights()  # leaves timm's weights as they are
    assert torch.equal(next(detector.backbone.parameters()), before)
    batch = make_batch([0, 2], sizes=[(64, 64), (50, 40)])
    optimizer = torch.optim.SGD(detector.parameters(), lr=1e-3)
    loss = total(run_loss(detector, batch))
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    assert not torch.equal(next(detector.backbone.parameters()), before)
    assert len(run_predict(detector, batch)) == 2


def test_timm_loads_no_file_by_itself():
    with pytest.raises(ConfigError, match=r"checkpoint_path .* with pretrained="):
        TimmBackbone("test_resnet", checkpoint_path="payload.bin")


def test_a_neck_of_other_channels_is_refused_with_the_right_ones(model_config):
    with pytest.raises(ConfigError, match=r"\[64, 128\].*in_channels=\[32, 48, 64\]"):
        with_backbone(model_config(), CONVNEXT, [64, 128])


@pytest.mark.parametrize(
    ("name", "last", "frozen"),
    [
        ("test_resnet", 1, {"conv1", "bn1", "layer1"}),
        ("test_convnext", 0, {"stem_0", "stem_1", "stages_0"}),
        (
            "test_vit",
            1,
            {"model.cls_token", "model.pos_embed", "model.patch_embed"}
            | {"model.blocks.0", "model.blocks.1"},
        ),
    ],
)
def test_frozen_stages(name, last, frozen):
    backbone = TimmBackbone(name, out_indices=(1, 2, 3), frozen_stages=last)
    for parameter, tensor in backbone.net.named_parameters():
        is_inside = any(f"{parameter}.".startswith(f"{one}.") for one in frozen)
        assert tensor.requires_grad != is_inside, parameter


def test_blocks_behind_the_last_map_are_frozen():
    backbone = TimmBackbone("tf_efficientnet_lite0", out_indices=(1, 2, 3))
    sum(one.sum() for one in backbone(torch.randn(1, 3, 64, 64))).backward()
    for name, parameter in backbone.net.named_parameters():
        assert (parameter.grad is not None) == parameter.requires_grad, name
    frozen = {n for n, p in backbone.net.named_parameters() if not p.requires_grad}
    assert {name.split(".")[1] for name in frozen} == {"5", "6"}


@pytest.mark.parametrize(
    "convert", [lambda net: net, nn.SyncBatchNorm.convert_sync_batchnorm]
)
def test_frozen_norms(convert):
    backbone = convert(TimmBackbone("test_resnet", frozen_stages=1)).train()
    norms = {
        name.split(".")[1]: module.training
        for name, module in backbone.named_modules()
        if isinstance(module, _BatchNorm)
    }
    assert norms == {name: name in ("layer2", "layer3") for name in norms}
    assert {"bn1", "layer1", "layer3"} <= norms.keys()
    backbone = TimmBackbone("test_resnet", norm_eval=True).train()
    assert not backbone.net.layer3[0].bn1.training
    assert all(parameter.requires_grad for parameter in backbone.parameters())


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (dict(name="resnet18x"), ("'resnet18x'", "did you mean 'resnet18'?")),
        (dict(name="resnet18.nowhere"), ("'resnet18.nowhere'", "nowhere")),
        (
            dict(name="test_convnext", out_indices=(1, 4)),
            ("out_indices is (1, 4)", "0 to 3, of strides [4, 8, 16, 32]"),
        ),
        (dict(name="test_resnet", out_indices=(2, 1)), ("(2, 1)", "rising order")),
        (dict(name="test_resnet", out_indices=(-1,)), ("(-1,)", "from 0 up")),
        (dict(name="test_resnet", depth=3), ("'depth'", "_delete_=True")),
        (dict(name="test_resnet", cache_mib=9), ("'cache_mib'",)),
        (dict(name="test_resnet", frozen_stages=5), ("frozen_stages", "0 to 4", "5")),
        (dict(name="test_resnet", frozen_stages=4), ("frozen_stages=4", "lower it")),
    ],
)
def test_mistakes_name_what_there_is(config, words):
    with pytest.raises(ConfigError) as caught:
        TimmBackbone(**config)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_the_shipped_config_builds():
    name = "damex-dino-4scale_convnext-t_8xb2-12e_coco-voc.py"
    cfg = Config.fromfile(Path(__file__).parents[2] / "configs" / "damex_dino" / name)
    cfg.model.backbone.pretrained = False  # a download
    cfg.model.bbox_head.num_classes = 80
    detector = MODELS.build({**cfg.model, "moe": cfg.moe, "num_groups": 2})
    assert detector.backbone.reductions == [8, 16, 32]
    assert detector.backbone.channels == list(cfg.model.neck.in_channels)
