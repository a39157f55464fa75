# The positive control: eight worlds that call the same things by other words, and FFNs
# too narrow to hold who says what. See docs/experts-results.md.
#   python -m damex.toydata --worlds 8 --out data/worlds
_base_ = [
    "../_base_/models/moe-dino-tiny_efficientnet-lite0.py",
    "../_base_/moe/dense.py",
    "../_base_/datasets/toy.py",
    "../_base_/schedules/adamw_tiny.py",
    "../_base_/runtime.py",
]
mixture = [
    dict(
        name=name,
        data_root=f"data/worlds/{name}/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=1.0,
    )
    for name in ["ruby", "amber", "olive", "mint", "teal", "azure", "indigo", "plum"]
]
width, hidden = 64, 16
attention = dict(embed_dims=width, num_heads=4)
layer_cfg = dict(
    self_attn_cfg=attention,
    ffn_cfg=dict(embed_dims=width, feedforward_channels=hidden),
)
model = dict(
    num_queries=40,
    backbone=dict(frozen_stages=4),  # all of it: what is to learn are the names
    neck=dict(out_channels=width, norm_cfg=dict(num_groups=16)),
    encoder=dict(layer_cfg=layer_cfg),
    decoder=dict(layer_cfg=dict(**layer_cfg, cross_attn_cfg=attention)),
    positional_encoding=dict(num_feats=width // 2),
    bbox_head=dict(embed_dims=width),
    dn_cfg=dict(group_cfg=dict(num_dn_queries=40)),
)
# Two epochs of 2,400 samples in batches of 8: 600 iterations.
max_epochs = 2
train_dataloader = dict(sampler=dict(samples_per_epoch=2400))
optim_wrapper = dict(optimizer=dict(lr=0.002))
