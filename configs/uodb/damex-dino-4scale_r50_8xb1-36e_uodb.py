# DAMEX-DINO on UODB, as in the paper: eight experts in decoder layers 0, 2 and 4, and
# the recipe of its released code: 8 GPUs with 1 image each, 36 epochs, the learning
# rate of its command, a tenth of it after 11, 22 and 33 epochs.
# Needs: data/uodb (data/README.md), the torchvision ResNet-50.
#   tools/dist_train.sh configs/uodb/damex-dino-4scale_r50_8xb1-36e_uodb.py 8
# Untested on GPUs; no result is claimed. Tests train a step on stand-in images.
_base_ = [
    "../_base_/models/moe-dino-4scale_r50.py",
    "../_base_/moe/damex.py",
    "../_base_/datasets/uodb.py",
    "../_base_/datasets/detr_pipeline.py",
    "../_base_/schedules/adamw_12e.py",
    "../_base_/runtime.py",
]
max_epochs = 36
train_dataloader = dict(batch_size=1)
optim_wrapper = dict(optimizer=dict(lr=0.00014))
param_scheduler = [
    dict(
        type="MultiStepLR",
        by_epoch=False,
        milestones=[11 / 36, 22 / 36, 33 / 36],
        gamma=0.1,
    )
]
auto_scale_lr = dict(base_batch_size=8)
