# DINO's 12-epoch schedule for a total batch size of 16 (8 GPUs x 2 images).
# Setting max_epochs=24 (or train_cfg.max_epochs=24) also scales the LR schedule.
train_cfg = dict(type="EpochBasedTrainLoop", max_epochs=12, val_interval=1)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=0.0001, weight_decay=0.0001),
    clip_grad=dict(max_norm=0.1, norm_type=2),
    paramwise_cfg=dict(custom_keys={"backbone": dict(lr_mult=0.1)}),
)
# After 11 of 12 epochs; milestones below 1 are fractions of the training.
param_scheduler = [
    dict(type="MultiStepLR", by_epoch=False, milestones=[11 / 12], gamma=0.1)
]
auto_scale_lr = dict(base_batch_size=16, enable=False)
