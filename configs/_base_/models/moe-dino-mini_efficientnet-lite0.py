# moe-dino-tiny_efficientnet-lite0 at half the width, for images of 128 pixels: 64
# channels, 50 queries.
_base_ = ["./moe-dino-tiny_efficientnet-lite0.py"]
width = 64
attention = dict(embed_dims=width, num_heads=4)
layer_cfg = dict(
    self_attn_cfg=attention,
    ffn_cfg=dict(embed_dims=width, feedforward_channels=256),
)
model = dict(
    num_queries=50,
    neck=dict(out_channels=width, norm_cfg=dict(num_groups=16)),
    encoder=dict(layer_cfg=layer_cfg),
    decoder=dict(layer_cfg=dict(**layer_cfg, cross_attn_cfg=attention)),
    positional_encoding=dict(num_feats=width // 2),
    bbox_head=dict(embed_dims=width),
)
