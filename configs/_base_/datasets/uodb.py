# UODB, the eleven datasets of the DAMEX paper, and its map from datasets to experts: 12
# image sets (VOC's two years apart) on 8 experts. KITTI shares LISA's; VOC and Comic
# share COCO's. data/README.md lists the folders, and
#   damex data prepare uodb
# missing files. Splits: those of UODB; Wang et al. 2019, arXiv 1904.04402.
shared = dict(kitti="lisa", voc="coco", comic="coco")
mixture = [
    dict(
        name=name,
        data_root=f"data/uodb/{name}/",
        train="train.json",
        val="val.json",
        group=shared.get(name, name),
    )
    for name in (
        *("clipart", "coco", "deeplesion", "dota", "kitchen", "lisa"),
        *("watercolor", "widerface", "kitti", "voc", "comic"),
    )
]
# Each dataset keeps its classes, 167 in all: a ship from above is not COCO's boat, and
# KITTI's pedestrian not all of COCO's person. "union", or a label file, merges them.
label_space = "partitioned"
