# Four epochs from scratch. With 2,600 samples each and batch 8 that is 1,300
# iterations, six to nine minutes on two cores.
# max_epochs=7 on the command line (or train_cfg.max_epochs=7) moves the schedule too.
train_cfg = dict(
    type="EpochBasedTrainLoop",
    max_epochs=4,
    val_interval=1000,  # and always after the last epoch
)
val_cfg = dict(type="ValLoop")
test_cfg = dict(type="TestLoop")
optim_wrapper = dict(
    type="OptimWrapper",
    optimizer=dict(type="AdamW", lr=0.0012, weight_decay=0.0001, fused=True),
    clip_grad=dict(max_norm=0.1, norm_type=2),
)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.05, by_epoch=False, begin=0, end=50),
    # Without an end: that of the training.
    dict(type="CosineAnnealingLR", eta_min_ratio=0.02, by_epoch=False),
]
auto_scale_lr = dict(base_batch_size=8, enable=False)
