# DAMEX-DINO on COCO + VOC with a ResNet-50: 80 classes, two experts.
# Needs: data/coco and data/VOCdevkit (data/README.md), the torchvision ResNet-50.
#   tools/dist_train.sh configs/damex_dino/damex-dino-4scale_r50_8xb2-12e_coco-voc.py 8
# Not trained to the end by us yet: no result is claimed. Its forward, backward and
# prediction are tested.
_base_ = [
    "../_base_/models/moe-dino-4scale_r50.py",
    "../_base_/moe/damex.py",
    "../_base_/datasets/coco_voc.py",
    "../_base_/datasets/detr_pipeline.py",
    "../_base_/schedules/adamw_12e.py",
    "../_base_/runtime.py",
]
