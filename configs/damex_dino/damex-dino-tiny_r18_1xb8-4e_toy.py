# A small DAMEX-DINO on the toy mixture, trained from scratch: for comparisons
# independent of pretraining, and for experts inside a ResNet (pmoe_conv, deepmoe).
# Requires: damex toydata --out data/toy. Six to nine minutes on two cores.
_base_ = [
    "../_base_/models/moe-dino_tiny.py",
    "../_base_/moe/damex.py",
    "../_base_/datasets/toy.py",
    "../_base_/schedules/adamw_tiny.py",
    "../_base_/runtime.py",
]
