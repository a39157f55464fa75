# COCO 2017 and Pascal VOC 2007+2012; data/README.md lists the files.
# The 20 VOC classes are merged into COCO's by name; six are renamed.
mixture = [
    dict(
        name="coco",
        data_root="data/coco/",
        train="annotations/instances_train2017.json",
        val="annotations/instances_val2017.json",
        img={"train": "train2017/", "val": "val2017/"},
    ),
    dict(
        name="voc",
        train=dict(
            type="ConcatDataset",
            ignore_keys=["dataset_type"],
            datasets=[
                dict(
                    type="VOCDataset",
                    data_root="data/VOCdevkit/",
                    ann_file=f"VOC{year}/ImageSets/Main/trainval.txt",
                    data_prefix=dict(sub_data_root=f"VOC{year}/"),
                )
                for year in (2007, 2012)
            ],
        ),
        val=dict(
            type="VOCDataset",
            data_root="data/VOCdevkit/",
            ann_file="VOC2007/ImageSets/Main/test.txt",
            data_prefix=dict(sub_data_root="VOC2007/"),
        ),
        rename=dict(
            aeroplane="airplane",
            diningtable="dining table",
            motorbike="motorcycle",
            pottedplant="potted plant",
            sofa="couch",
            tvmonitor="tv",
        ),
    ),
]
