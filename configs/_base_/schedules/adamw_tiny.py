# Four epochs from scratch: with 2,600 samples per epoch and batch size 8, 1,300
# iterations (six to nine minutes on two cores).
# Setting max_epochs=7 (or train_cfg.max_epochs=7) also scales the LR schedule.
train_cfg = dict(
    type="EpochBasedTrainLoop",
    max_epochs=4,
    val_interval=1000,  # the last epoch is always evaluated
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
    # Without `end`: until the end of the training.
    dict(type="CosineAnnealingLR", eta_min_ratio=0.02, by_epoch=False),
]
auto_scale_lr = dict(base_batch_size=8, enable=False)
