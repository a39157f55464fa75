# A small DINO for CPUs with ImageNet weights from a pip package: EfficientNet-Lite0 at
# strides 8, 16 and 32, 128 channels, 2 encoder and 3 decoder layers, 100 queries. The
# stages up to stride 8 are frozen.
_base_ = ["./moe-dino-4scale_r50.py"]
model = dict(
    num_queries=100,
    num_feature_levels=3,
    data_preprocessor=dict(
        mean=[127.0, 127.0, 127.0], std=[128.0, 128.0, 128.0], pad_size_divisor=32
    ),
    backbone=dict(
        _delete_=True,
        type="TimmBackbone",
        name="tf_efficientnet_lite0",
        out_indices=(2, 3, 4),
        pretrained=True,  # from `pip install -e '.[pretrained]'`, else downloaded
        frozen_stages=2,
        norm_eval=True,
        channels_last=True,
    ),
    neck=dict(
        in_channels=[40, 112, 320],
        out_channels=128,
        norm_cfg=dict(num_groups=32),
        num_outs=3,
    ),
    encoder=dict(
        num_layers=2,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=128, num_heads=8, num_levels=3),
            ffn_cfg=dict(embed_dims=128, feedforward_channels=512),
        ),
    ),
    decoder=dict(
        num_layers=3,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=128, num_heads=8),
            cross_attn_cfg=dict(embed_dims=128, num_heads=8, num_levels=3),
            ffn_cfg=dict(embed_dims=128, feedforward_channels=512),
        ),
    ),
    positional_encoding=dict(num_feats=64),
    bbox_head=dict(embed_dims=128),
    dn_cfg=dict(group_cfg=dict(num_dn_queries=50)),
    test_cfg=dict(max_per_img=100),
)
