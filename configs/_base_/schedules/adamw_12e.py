# DINO's 12 epochs for a batch of 16 (8 GPUs x 2 images).
# max_epochs=24 on the command line (or train_cfg.max_epochs=24) moves the schedule too.
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=12, val_interval=1)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=0.0001, weight_decay=0.0001),
    clip_grad=dict(max_norm=0.1, norm_type=2),
    paramwise_cfg=dict(custom_keys={"backbone": dict(lr_mult=0.1)}),
)
# After 11 of 12 epochs; a milestone below 1 is a share of the training.
param_scheduler = [
    dict(type="MultiStepLR", by_epoch=False, milestones=[11 / 12], gamma=0.1)
]
auto_scale_lr = dict(base_batch_size=16, enable=False)
