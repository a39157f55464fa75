# The toy mixture at 256 pixels, letterboxed: for detectors without a padding mask.
# Generate it with: damex toydata
_base_ = ["./toy.py"]
image_size = 256  # longer side in pixels, in training, evaluation and inference
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
train_dataloader = dict(dataset=dict(pipeline=train_pipeline))
val_dataloader = dict(dataset=dict(pipeline=test_pipeline))
test_dataloader = val_dataloader
