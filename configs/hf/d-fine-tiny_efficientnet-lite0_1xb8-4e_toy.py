# A small D-FINE of Hugging Face's Transformers with experts, on the toy mixture, with
# ImageNet weights from a pip package. For your own datasets, copy this file and set
# `mixture`, as in configs/own_datasets.py.
# Requires: damex toydata --out data/toy, and the extras `hf` and `pretrained`.
_base_ = [
    "../_base_/models/moe-d-fine-tiny_efficientnet-lite0.py",
    "../_base_/moe/damex_best.py",
    "../_base_/datasets/toy_256.py",
    "../_base_/schedules/adamw_pretrained.py",
    "../_base_/runtime.py",
]
