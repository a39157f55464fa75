# A small DINO for CPUs: ResNet-18 of half the width, 64 channels, 2 encoder and 3
# decoder layers, 50 queries. Trained from scratch, so batch norm is not frozen.
_base_ = ["./moe-dino-4scale_r50.py"]
model = dict(
    num_queries=50,
    num_feature_levels=3,
    data_preprocessor=dict(pad_size_divisor=32),
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
    neck=dict(
        in_channels=[64, 128, 256],
        out_channels=64,
        norm_cfg=dict(num_groups=16),
        num_outs=3,
    ),
    encoder=dict(
        num_layers=2,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=64, num_heads=4, num_levels=3),
            ffn_cfg=dict(embed_dims=64, feedforward_channels=256),
        ),
    ),
    decoder=dict(
        num_layers=3,
        layer_cfg=dict(
            self_attn_cfg=dict(embed_dims=64, num_heads=4),
            cross_attn_cfg=dict(embed_dims=64, num_heads=4, num_levels=3),
            ffn_cfg=dict(embed_dims=64, feedforward_channels=256),
        ),
    ),
    positional_encoding=dict(num_feats=32),
    bbox_head=dict(embed_dims=64),
    dn_cfg=dict(group_cfg=dict(num_dn_queries=50)),
    test_cfg=dict(max_per_img=100),
)
