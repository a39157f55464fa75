# A small RT-DETRv2 of Hugging Face's Transformers with experts, for CPUs and for
# datasets of a few hundred images: the pipelines of the DINO `tiny`, with a third more
# images per epoch in the same time.
# Requires: data/coco and data/VOCdevkit (data/README.md), and the extras `hf` and
# `pretrained`.
# Not trained on COCO and VOC; results: docs/guides/transformers.md.
_base_ = [
    "../_base_/models/moe-rt-detr-v2-tiny_efficientnet-lite0.py",
    "../_base_/moe/damex_best.py",
    "../_base_/datasets/coco_voc.py",
    "../_base_/datasets/letterbox_256.py",
    "../_base_/schedules/adamw_pretrained.py",
    "../_base_/runtime.py",
]
train_dataloader = dict(sampler=dict(samples_per_epoch=3200))
optim_wrapper = dict(optimizer=dict(lr=0.0004))
