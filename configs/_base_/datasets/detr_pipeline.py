# DETR's multi-scale training and single-scale test pipelines, for any `mixture`.
_base_ = ["./mixture.py"]
image_size = (1333, 800)  # maximum of the longer and the shorter side in evaluation
short_sides = [480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800]
scales = [(side, 1333) for side in short_sides]
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="RandomFlip", prob=0.5),
    dict(
        type="RandomChoice",
        transforms=[
            [dict(type="RandomChoiceResize", scales=scales, keep_ratio=True)],
            [
                dict(
                    type="RandomChoiceResize",
                    scales=[(400, 4200), (500, 4200), (600, 4200)],
                    keep_ratio=True,
                ),
                dict(
                    type="RandomCrop",
                    crop_type="absolute_range",
                    crop_size=(384, 600),
                    allow_negative_crop=True,
                ),
                dict(type="RandomChoiceResize", scales=scales, keep_ratio=True),
            ],
        ],
    ),
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=image_size, keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="PackDetInputs"),
]
train_dataloader = dict(
    batch_sampler=dict(type="AspectRatioBatchSampler"),
    dataset=dict(pipeline=train_pipeline),
)
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
