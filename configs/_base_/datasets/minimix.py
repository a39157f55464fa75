# The bundled mixture at its own size; made by: python -m damex.datasets.minimix
data_root = "data/minimix/"
# Equal weights: 60 images are seen as often as 900.
mixture = [
    dict(
        name="shapes",
        data_root=data_root + "shapes/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=1.0,
    ),
    dict(
        name="digits",
        data_root=data_root + "digits/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=1.0,
    ),
    dict(
        name="photos",
        data_root=data_root + "photos/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=1.0,
    ),
    dict(
        name="playroom",
        data_root=data_root + "playroom/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=1.0,
    ),
    dict(
        name="arcade",
        data_root=data_root + "arcade/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=1.0,
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
    num_workers=1,
    persistent_workers=True,
    sampler=dict(type="MixtureSampler", samples_per_epoch=2600),
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
