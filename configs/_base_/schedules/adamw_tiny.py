# Four epochs from scratch. With 2,600 samples each and batch 8 that is 1,300
# iterations, about five minutes on two cores.
max_epochs = 4
train_cfg = dict(
    type="EpochBasedTrainLoop", max_epochs=max_epochs, val_interval=max_epochs
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
    dict(
        type="CosineAnnealingLR",
        eta_min_ratio=0.02,
        by_epoch=True,
        begin=0,
        end=max_epochs,
        T_max=max_epochs,
        convert_to_iter_based=True,
    ),
]
auto_scale_lr = dict(base_batch_size=8, enable=False)
