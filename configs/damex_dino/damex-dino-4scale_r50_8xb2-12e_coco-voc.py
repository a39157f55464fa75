# DAMEX-DINO with a ResNet-50 on COCO + VOC: 80 classes, two experts.
# Requires: data/coco and data/VOCdevkit (data/README.md), torchvision's ResNet-50.
#   tools/dist_train.sh configs/damex_dino/damex-dino-4scale_r50_8xb2-12e_coco-voc.py 8
# Not yet trained to completion; no results are reported. Tests run a forward and
# backward pass and inference.
_base_ = [
    "../_base_/models/moe-dino-4scale_r50.py",
    "../_base_/moe/damex.py",
    "../_base_/datasets/coco_voc.py",
    "../_base_/datasets/detr_pipeline.py",
    "../_base_/schedules/adamw_12e.py",
    "../_base_/runtime.py",
]
