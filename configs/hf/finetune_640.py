# Fine-tunes a published detector of Hugging Face's Transformers on your datasets, with
# experts, at 640 pixels. Classes that the published model names as you do keep their
# classifier weights.
#   damex train --data data/fish data/boards --model d-fine-s
# `--model` sets `model.name`; other names on the hub, or a folder that save_pretrained
# wrote: --cfg-options model.name=FOLDER
# Requires: a GPU, and the extra `hf`; config and weights are downloaded once.
# Not run with published weights. Tests train from folders with random weights.
_base_ = [
    "../_base_/models/pixels_in_0_1.py",
    "../_base_/moe/damex_best.py",
    "../_base_/datasets/toy_256.py",
    "../_base_/schedules/adamw_12e.py",
    "../_base_/runtime.py",
]
mixture = [
    dict(name="fish", root="data/fish", weight=1.0),
    dict(name="boards", root="data/boards", weight=1.0),
]
image_size = 640  # the sides of the published models
train_pipeline = [*_base_.train_pipeline]
train_pipeline.insert(-2, dict(type="RandomFlip", prob=0.5))
train_dataloader = dict(
    num_workers=4,
    sampler=dict(samples_per_epoch=None),  # the images of all datasets
    dataset=dict(pipeline=train_pipeline),
)
val_dataloader = dict(num_workers=4)
test_dataloader = val_dataloader
# "backbone" has a tenth already; this is that of DEIMv2.
optim_wrapper = dict(
    paramwise_cfg=dict(custom_keys={"conv_encoder.model": dict(lr_mult=0.1)})
)
auto_scale_lr = dict(base_batch_size=8)
