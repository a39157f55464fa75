# A small RT-DETRv2 of Hugging Face's Transformers with experts, on the toy mixture,
# from scratch on a CPU. For your own datasets, copy this file and set `mixture`, as in
# configs/own_datasets.py.
# Requires: damex toydata --out data/toy, and the extra `hf`.
_base_ = [
    "../_base_/models/moe-rt-detr-v2_tiny.py",
    "../_base_/moe/damex_best.py",
    "../_base_/datasets/toy_256.py",
    "../_base_/schedules/adamw_tiny.py",
    "../_base_/runtime.py",
]
