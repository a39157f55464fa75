# A small DINO for CPUs: ResNet-18 of half the width, 64 channels, 2 encoder and 3
# decoder layers, 50 queries. Trained from scratch, so batch norm is not frozen.
_base_ = ["./moe-dino-mini_efficientnet-lite0.py"]
model = dict(
    data_preprocessor=dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375]),
    backbone=dict(
        _delete_=True,
        type="ResNet",
        depth=18,
        base_channels=32,
        stem_channels=32,
        num_stages=4,
        out_indices=(1, 2, 3),
        frozen_stages=-1,
        norm_cfg=dict(type="BN", requires_grad=True),
        norm_eval=False,
        style="pytorch",
    ),
    neck=dict(in_channels=[64, 128, 256]),
)
