# Template: your own datasets in one detector. Copy this file inside of configs/, list
# your datasets, and run
#   python tools/train.py configs/<your file>.py
# What stands here makes a useful detector of a few hundred images per dataset without a
# GPU. With a GPU and more images name a full-size detector in its place, for instance
# "damex_dino/damex-dino-4scale_r50_8xb2-12e_coco-voc.py".
_base_ = ["damex_dino/damex-dino-tiny_efficientnet-lite0_1xb8-4e_coco-voc.py"]

# One entry per dataset. Paths are relative to data_root; annotations are COCO json. The
# class names are read from train; equal names of two datasets become one class.
mixture = [
    dict(
        name="fish",
        data_root="data/fish/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=1.0,  # share of the samples: here both are seen equally often.
        # Number of images where left out. Give it to all datasets or to none.
    ),
    dict(
        name="boards",
        data_root="data/boards/",
        train="train.json",
        val="val.json",
        img="images/",
        weight=1.0,
        # classes=["chip", "fuse"],  # only these classes
        # rename=dict(chip="microcontroller"),  # its word -> the mixture's word
        # group="indoor",  # datasets of one group share an expert
    ),
    # Any dataset class of mmdet works too:
    # dict(name="voc", train=dict(type="VOCDataset", ...), val=dict(...)),
]
# max_epochs = 6  # of 2,400 images each; more of them make it better, and take longer
# moe = None  # no experts: the plain joint detector
