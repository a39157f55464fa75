# DETR's multi-scale training and single-scale testing, for any `mixture`.
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
    dict(type="Resize", scale=(1333, 800), keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="PackDetInputs"),
]
train_dataloader = dict(
    batch_size=2,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type="MixtureSampler"),
    batch_sampler=dict(type="AspectRatioBatchSampler"),
    dataset=dict(type="MixtureDataset", split="train", pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    drop_last=False,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="MixtureDataset", split="val", pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="MixtureMetric")
test_evaluator = val_evaluator
