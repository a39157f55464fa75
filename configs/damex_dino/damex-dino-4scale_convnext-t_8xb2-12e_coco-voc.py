# DAMEX-DINO with a ConvNeXt-T of timm (29 M parameters; weights are downloaded).
# Requires: the data of data/README.md.
_base_ = ["./damex-dino-4scale_r50_8xb2-12e_coco-voc.py"]
model = dict(
    backbone=dict(
        _delete_=True,
        type="TimmBackbone",
        name="convnext_tiny",
        out_indices=(1, 2, 3),  # strides 8, 16, 32
        pretrained=True,  # or a file with timm weights
        drop_path_rate=0.1,
    ),
    neck=dict(in_channels=[192, 384, 768]),
)
