# Fine-tuning on one GPU: mmdet's DINO, trained on COCO, becomes a detector of your
# datasets. Classes with COCO's names keep their classifier rows, the FFNs become the
# shared experts, and the experts of the datasets start at zero: the first step is that
# of the dense detector.
# Needs: a GPU; the checkpoint is downloaded once.
#   damex train --data data/fish data/boards --model dino-r50
# Not run on a GPU by us: memory and time are unknown, and no result is claimed. A step
# from a stand-in for the checkpoint is tested.
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
model = dict(backbone=dict(init_cfg=None))  # its weights are in the checkpoint
train_dataloader = dict(batch_size=4, num_workers=4)
# Half of the rate of a batch of 16: the square root of 4 / 16.
optim_wrapper = dict(optimizer=dict(lr=0.00005))
auto_scale_lr = dict(base_batch_size=4)
