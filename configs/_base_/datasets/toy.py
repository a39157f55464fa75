# The toy mixture at its original size. Generate it with: damex toydata
_base_ = ["./mixture.py"]
mixture = [
    dict(
        name=name,
        data_root=f"data/toy/{name}/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=1.0,  # all datasets are sampled equally often
    )
    for name in ("shapes", "digits", "photos", "playroom", "arcade")
]

image_size = 128  # longer side in pixels, in training, evaluation and inference
# Pads to a square with black pixels, which are not masked; in all pipelines or none.
letterbox = dict(type="Pad", size=(image_size, image_size))
train_pipeline = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="Resize", scale=(image_size, image_size), keep_ratio=True),
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
    sampler=dict(samples_per_epoch=2600),
    dataset=dict(pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=0,
    dataset=dict(pipeline=test_pipeline),
)
test_dataloader = val_dataloader
