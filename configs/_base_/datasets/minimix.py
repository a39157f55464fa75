# The bundled mixture at its own size; made by: python -m damex.datasets.minimix
data_root = "data/minimix/"
# Weights are square roots of the sizes, so that 60 images are not drowned by 900.
mixture = [
    dict(
        name="shapes",
        data_root=data_root + "shapes/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=30.0,
    ),
    dict(
        name="digits",
        data_root=data_root + "digits/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=22.0,
    ),
    dict(
        name="playroom",
        data_root=data_root + "playroom/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=16.0,
    ),
    dict(
        name="photos",
        data_root=data_root + "photos/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=11.0,
    ),
    dict(
        name="arcade",
        data_root=data_root + "arcade/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=8.0,
    ),
]

train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=(128, 128), keep_ratio=True),
    dict(type="PackDetInputs"),
]
test_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="Resize", scale=(128, 128), keep_ratio=True),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="PackDetInputs"),
]

train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    sampler=dict(type="MixtureSampler", samples_per_epoch=2400),
    dataset=dict(type="MixtureDataset", split="train", pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=0,
    drop_last=False,
    sampler=dict(type="DefaultSampler", shuffle=False),
    dataset=dict(type="MixtureDataset", split="val", pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = dict(type="MixtureMetric")
test_evaluator = val_evaluator
