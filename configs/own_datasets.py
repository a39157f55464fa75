# Template: your own datasets in one detector. Copy this file inside of configs/, list
# your datasets, and run
#   damex train configs/<your file>.py
# This detector suits a few hundred images per dataset and trains without a GPU. With a
# GPU and more images, name a full-size detector that starts from COCO weights in its
# place, for instance "damex_dino/damex-dino-4scale_r50_1xb4-12e_finetune.py".
_base_ = ["damex_dino/damex-dino-tiny_efficientnet-lite0_1xb8-4e_coco-voc.py"]

# One entry per dataset: its folder, in COCO, Roboflow, Pascal VOC, YOLO, KITTI, DOTA,
# WIDER FACE or CSV format. Equal class names of two datasets become one class.
mixture = [
    dict(
        name="fish",
        root="data/fish",
        weight=1.0,  # share of the samples: here both are seen equally often.
        # Number of images where left out. Give it to all datasets or to none.
    ),
    dict(
        name="boards",
        root="data/boards",
        weight=1.0,
        # format="voc",  # if it cannot be detected
        # val_share=0.2,  # validation images, where the folder has none: 0.1 by default
        # classes=["chip", "fuse"],  # only these classes
        # rename=dict(chip="microcontroller"),  # its word -> the mixture's word
        # group="indoor",  # datasets of one group share an expert
    ),
    # COCO files named by hand, relative to data_root:
    # dict(name="cells", data_root="data/cells/", train="train.json", val="val.json",
    #      img="images/", weight=1.0),
    # Any dataset class of mmdet works too:
    # dict(name="city", train=dict(type="CityscapesDataset", ...), val=dict(...)),
]
# image_size = 512  # 256 by default; four times the pixels, about as many times slower
# max_epochs = 6  # of 2,400 images each; more of them make it better, and take longer
# moe = None  # no experts: the plain joint detector
