# A small RT-DETRv2 for CPUs with ImageNet weights from a pip package:
# EfficientNet-Lite0 at strides 8, 16 and 32, 128 channels, 1 encoder and 3 decoder
# layers, 100 queries. The stages up to stride 8 are frozen, as in
# moe-dino-tiny_efficientnet-lite0.py.
# Requires the extra `hf`.
_base_ = ["./moe-rt-detr-v2_tiny.py"]
model = dict(
    backbone=dict(
        type="TimmBackbone",
        name="tf_efficientnet_lite0",
        out_indices=(2, 3, 4),
        pretrained=True,  # from `pip install -e '.[pretrained]'`, else downloaded
        frozen_stages=2,
        norm_eval=True,
        channels_last=True,
    ),
    config=dict(backbone_config=None),
    data_preprocessor=dict(mean=[127.0, 127.0, 127.0], std=[128.0, 128.0, 128.0]),
)
