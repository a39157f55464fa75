# Fine-tunes MMDetection's DINO, trained on COCO, on your datasets with one GPU. Classes
# with a COCO name keep their classifier weights, the FFNs become the shared experts,
# and the experts of the datasets are initialized to zero: at the first step the
# detector equals the dense one.
# Requires: a GPU; the checkpoint is downloaded once.
#   damex train --data data/fish data/boards --model dino-r50
# Not yet run on a GPU; memory and time are unknown, and no results are reported. Tests
# train a step from a substitute checkpoint.
_base_ = [
    "../_base_/models/moe-dino-4scale_r50.py",
    "../_base_/moe/damex_best.py",
    "../_base_/datasets/detr_pipeline.py",
    "../_base_/schedules/adamw_12e.py",
    "../_base_/runtime.py",
]
mixture = [
    dict(name="fish", root="data/fish", weight=1.0),
    dict(name="boards", root="data/boards", weight=1.0),
]
load_from = (
    "https://download.openmmlab.com/mmdetection/v3.0/dino/"
    "dino-4scale_r50_8xb2-12e_coco/"
    "dino-4scale_r50_8xb2-12e_coco_20221202_182705-55b2bba2.pth"
)
model = dict(backbone=dict(init_cfg=None))  # the checkpoint contains the backbone
train_dataloader = dict(batch_size=4, num_workers=4)
# Half the LR for batch size 16, by square-root scaling: sqrt(4 / 16).
optim_wrapper = dict(optimizer=dict(lr=0.00005))
auto_scale_lr = dict(base_batch_size=4)
