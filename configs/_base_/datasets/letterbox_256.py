# Images of 256 pixels, letterboxed, and batches of eight, for any `mixture`.
_base_ = ["./mixture.py"]
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
