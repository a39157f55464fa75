# Template for one detector on several datasets of your own. Name it in _base_ of
# configs/my_mixture.py, or copy it there; list your datasets, and run
#   damex train configs/my_mixture.py
# The detector is suited to a few hundred images per dataset and trains on a CPU. With a
# GPU and more images, use a full-size detector pretrained on COCO as base instead, for
# example "damex_dino/damex-dino-4scale_r50_1xb4-12e_finetune.py".
_base_ = ["damex_dino/damex-dino-tiny_efficientnet-lite0_1xb8-4e_coco-voc.py"]

# One entry per dataset. Formats: COCO, Roboflow, Pascal VOC, YOLO, KITTI, DOTA, WIDER
# FACE, CSV. Classes with the same name in several datasets become one class.
mixture = [
    dict(
        name="fish",
        root="data/fish",
        weight=1.0,  # sampling weight: here both are sampled equally often.
        # Default: the number of images. Set it for all datasets or for none.
    ),
    dict(
        name="boards",
        root="data/boards",
        weight=1.0,
        # format="voc",  # if it is not detected
        # val_share=0.2,  # if there is no validation split; default: 0.1
        # classes=["chip", "fuse"],  # use only these classes
        # rename=dict(chip="microcontroller"),  # name here -> name in the mixture
        # group="indoor",  # datasets of a group share an expert
    ),
    # Explicit COCO files, relative to data_root:
    # dict(name="cells", data_root="data/cells/", train="train.json", val="val.json",
    #      img="images/", weight=1.0),
    # Any dataset class of MMDetection:
    # dict(name="city", train=dict(type="CityscapesDataset", ...), val=dict(...)),
]
# image_size = 512  # default: 256; 512 is about four times slower
# max_epochs = 6  # one epoch is 2,400 images; more epochs improve AP
# moe = None  # no experts: the dense baseline
