# Template: your own datasets in one detector. Copy this file inside of configs/, change
# the lines marked with (1) to (4), and run
#   python tools/train.py configs/<your file>.py
# What stands here trains a useful detector of a few hundred images per dataset without a
# GPU, in half an hour to an hour. With a GPU and more images take the full-size model as
# shown in (3), and delete what stands from (2) on.
_base_ = [
    # (3) _base_/models/moe-dino-4scale_r50.py
    "_base_/models/moe-dino-tiny_efficientnet-lite0.py",
    "_base_/moe/damex.py",  # (4) any file of _base_/moe; dense.py for no experts
    "_base_/datasets/mixture.py",  # (3) _base_/datasets/detr_pipeline.py
    "_base_/schedules/adamw_pretrained.py",  # (3) _base_/schedules/adamw_12e.py
    "_base_/runtime.py",
]

# (1) One entry per dataset. Paths are relative to data_root; annotations are COCO json.
# The class names are read from train; equal names of two datasets become one class.
mixture = [
    dict(
        name="fish",
        data_root="data/fish/",
        train="train.json",
        val="val.json",
        img="images/",
    ),
    dict(
        name="boards",
        data_root="data/boards/",
        train="train.json",
        val="val.json",
        img="images/",
        # weight=1.0,  # share of the samples; number of images where left out.
        #              # Give it to all datasets or to none.
        # classes=["chip", "fuse"],  # only these classes
        # rename=dict(chip="microcontroller"),  # its word -> the mixture's word
        # group="indoor",  # datasets of one group share an expert
    ),
    # Any dataset class of mmdet works too:
    # dict(name="voc", train=dict(type="VOCDataset", ...), val=dict(...)),
]

# (2) Size of the longer image side in pixels, images per batch, samples per epoch.
image_size = 256
batch_size = 8
samples_per_epoch = 2400

train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=(image_size, image_size), keep_ratio=True),
    dict(type="RandomFlip", prob=0.5),
    # One size for all: what the frozen stages make of an image can be kept.
    dict(type="Pad", size=(image_size, image_size)),
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(image_size, image_size), keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="PackDetInputs"),
]
train_dataloader = dict(
    batch_size=batch_size,
    num_workers=1,
    sampler=dict(samples_per_epoch=samples_per_epoch),
    dataset=dict(pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=batch_size, num_workers=1, dataset=dict(pipeline=test_pipeline)
)
test_dataloader = val_dataloader
