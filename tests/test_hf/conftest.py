"""Small Transformers detectors of each family, for four classes and two datasets."""

import copy

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config, ConfigDict

from tests.conftest import CONFIGS

WIDTHS = [16, 32, 48, 64]
MAPS = dict(out_features=["stage2", "stage3", "stage4"])
BACKBONES = {
    "rt_detr_v2": dict(
        model_type="rt_detr_resnet",
        layer_type="basic",
        embedding_size=16,
        hidden_sizes=WIDTHS,
        depths=[1] * 4,
        **MAPS,
    ),
    "d_fine": dict(
        model_type="hgnet_v2",
        stem_channels=[3, 8, 8],
        stage_in_channels=[8, 16, 32, 48],
        stage_mid_channels=[8, 8, 16, 16],
        stage_out_channels=WIDTHS,
        hidden_sizes=WIDTHS,
        stage_num_blocks=[1] * 4,
        stage_numb_of_layers=[1] * 4,
        stage_kernel_size=[3] * 4,
        **MAPS,
    ),
}
BACKBONES["deimv2"] = BACKBONES["d_fine"]
BACKBONES["rf_detr"] = dict(
    model_type="rf_detr_dinov2",
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=2,
    mlp_ratio=2,
    image_size=64,
    patch_size=8,
    num_windows=2,
    out_features=["stage1", "stage3"],
)
BACKBONES["deformable_detr"] = dict(
    BACKBONES["rt_detr_v2"], model_type="resnet", out_features=["stage2", "stage3"]
)
BACKBONES["deformable_detr refined"] = dict(
    model_type="timm_backbone", backbone="test_resnet", out_indices=[2, 3]
)
TIMM = dict(type="TimmBackbone", name="test_efficientnet", out_indices=(2, 3, 4))
SMALL = dict(
    d_model=32,
    encoder_hidden_dim=32,
    decoder_in_channels=[32] * 3,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    num_queries=20,
    num_denoising=12,
)
SMALL_RF_DETR = dict(
    d_model=32,
    decoder_ffn_dim=64,
    decoder_layers=2,
    decoder_self_attention_heads=4,
    decoder_cross_attention_heads=4,
    num_queries=20,
    group_detr=3,
    dropout=0.0,
)
SMALL_DEFORMABLE = dict(
    d_model=32,
    encoder_ffn_dim=64,
    decoder_ffn_dim=64,
    encoder_layers=1,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    num_queries=20,
    num_feature_levels=3,
    dropout=0.0,
)
OF_FAMILY = dict(rf_detr=SMALL_RF_DETR, deformable_detr=SMALL_DEFORMABLE)
PREPROCESSOR = dict(
    type="DetDataPreprocessor",
    mean=[0.0] * 3,
    std=[255.0] * 3,
    bgr_to_rgb=True,
    pad_size_divisor=32,
)


WITH_TIMM = [f"{one} timm" for one in ("rt_detr_v2", "d_fine", "deformable_detr")]
FAMILIES = [*BACKBONES, *WITH_TIMM]


@pytest.fixture(params=FAMILIES)
def family(request):
    """Every supported family, one after the other, and some with backbones of timm."""
    return request.param


@pytest.fixture
def sizes(family):
    """Height and width of two images, of one size in a batch: 64 x 96, or squares."""
    return [(64, 64), (48, 64)] if family == "rf_detr" else [(64, 96), (64, 64)]


@pytest.fixture(scope="session")
def model_of():
    """Config of a small detector with `damex_best`; ``config`` changes its model."""
    best = Config.fromfile(CONFIGS / "_base_/moe/damex_best.py").moe

    def make(family, *, moe="damex_best", config=None, num_groups=2, **changes):
        moe = copy.deepcopy(best) if moe == "damex_best" else moe
        kind, *parts = family.split()
        timm = "timm" in parts
        backbone = None if timm else copy.deepcopy(BACKBONES[family])
        small = dict(OF_FAMILY.get(kind, SMALL), model_type=kind)
        if "refined" in parts:
            small |= dict(with_box_refine=True, auxiliary_loss=True)
        model = dict(
            type="MoETransformersDetector",
            config=dict(small, backbone_config=backbone) | (config or {}),
            bbox_head=dict(num_classes=4),
            test_cfg=dict(max_per_img=10),
            data_preprocessor=PREPROCESSOR,
            moe=moe,
            num_groups=num_groups,
        )
        if timm:
            model["backbone"] = TIMM
        return ConfigDict(model | changes)

    return make


@pytest.fixture
def build_hf(model_of):
    """Build such a detector under a fixed seed; ``moving`` experts are not zero."""

    def make(family, *, moving=False, **kwargs):
        torch.manual_seed(0)
        detector = MODELS.build(model_of(family, **kwargs))
        detector.init_weights()
        if moving:
            for name, parameter in detector.named_parameters():
                if name.endswith("up_ELD"):
                    torch.nn.init.normal_(parameter, std=0.5)
        return detector

    return make
