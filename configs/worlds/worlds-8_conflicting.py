# The positive control: eight worlds use the same class names for different objects. The
# FFNs are narrow (their width does not matter). See docs/research/results.md.
#   python -m studies.worlds --val 40 --out data/worlds
_base_ = [
    "../_base_/models/moe-dino-mini_efficientnet-lite0.py",
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
narrow = dict(layer_cfg=dict(ffn_cfg=dict(feedforward_channels=16)))
model = dict(
    num_queries=40,
    backbone=dict(frozen_stages=4),  # the whole backbone
    encoder=narrow,
    decoder=narrow,
    dn_cfg=dict(group_cfg=dict(num_dn_queries=40)),
)
# Two epochs of 2,400 samples in batches of 8: 600 iterations.
max_epochs = 2
train_dataloader = dict(sampler=dict(samples_per_epoch=2400))
# The LR whose doubling does not improve the dense detector (seed 0).
optim_wrapper = dict(optimizer=dict(lr=0.004))
