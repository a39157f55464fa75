# A tiny DAMEX-DINO on the toy mixture, from random weights: for comparisons that no
# pretrained backbone may rule, and for experts inside of a ResNet (pmoe_conv, deepmoe).
# Needs: python -m damex.toydata --out data/toy. Six to nine minutes on two cores.
_base_ = [
    "../_base_/models/moe-dino_tiny.py",
    "../_base_/moe/damex.py",
    "../_base_/datasets/toy.py",
    "../_base_/schedules/adamw_tiny.py",
    "../_base_/runtime.py",
]
