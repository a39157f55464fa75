"""Each format: a folder made by hand with boxes worked out by hand, and its faults."""

import pytest

from damex.errors import ConfigError, DataError

# In images of 40 x 20 px.
CAT, CAT_LINE = ("cat", (3.0, 2.0, 15.0, 8.0)), "0 0.225 0.25 0.3 0.3"
DOG, DOG_LINE = ("dog", (20.0, 5.0, 30.0, 19.0)), "1 0.625 0.6 0.25 0.7"
NAN = "boxes with a coordinate that is NaN or infinite"
ZERO = "boxes with a width or height of 0"


def xml(*objects, size=(40, 20), filename="x.jpg", extra=""):
    records = "".join(
        f"<object><name>{name}</name>{extra}<bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin>"
        f"<xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
        for name, (x1, y1, x2, y2) in objects
    )
    return (
        f"<annotation><filename>{filename}</filename><size><width>{size[0]}</width>"
        f"<height>{size[1]}</height></size>{records}</annotation>"
    )


def coco(images=("a.jpg",), boxes=((1, CAT),)):
    """A COCO document; boxes are (image id, (name, corners))."""
    ids = {"cat": 5, "dog": 6}
    return dict(
        images=[
            dict(id=i, file_name=name, width=40, height=20)
            for i, name in enumerate(images, start=1)
        ],
        annotations=[
            dict(
                id=n,
                image_id=image,
                category_id=ids[label],
                bbox=[x1, y1, x2 - x1, y2 - y1],
                area=12.5,
                iscrowd=0,
            )
            for n, (image, (label, (x1, y1, x2, y2))) in enumerate(boxes)
        ],
        categories=[dict(id=number, name=name) for name, number in ids.items()],
    )


def kitti(label, corners):
    box = " ".join(map(str, corners))
    return f"{label} 0.00 0 -1.58 {box} 1.6 1.7 3.9 1.8 1.5 8.4 0.01"


CSV = "filename,class,xmin,ymin,xmax,ymax\n"
CSV_CAT = f"{CSV}a.jpg,cat,3,2,15,8\n"
YAML = "train: train\nval: valid\nnames: [cat, dog]\n"
YOLO_IMAGES = "train/images/a.jpg valid/images/a.jpg"
YOLO_LABELS = {"train/labels/a.txt": CAT_LINE, "valid/labels/a.txt": DOG_LINE}
YOLO_SPLITS = {
    "train": {"train/images/a.jpg": [CAT]},
    "val": {"valid/images/a.jpg": [DOG]},
}
DARKNET = {
    "obj/a.txt": CAT_LINE,
    "obj/b.txt": DOG_LINE,
    "obj/c.txt": CAT_LINE,
    "obj.names": "cat\ndog\n",
    "obj.data": "classes = 2\ntrain = data/train.txt\nvalid = data/valid.txt\n"
    "names = data/obj.names\nbackup = backup/\n",
    "train.txt": "data/obj/a.JPG\n",
    "valid.txt": "data/obj/b.JPG\ndata/obj/gone.JPG\n",
}
HEADED = coco()
for one in HEADED["categories"]:
    one["supercategory"] = "pets-x1"
HEADED["categories"].insert(0, dict(id=0, name="pets-x1"))
CROWD = coco(boxes=[(1, CAT), (1, DOG)])
CROWD["annotations"][1]["iscrowd"] = 1
LABELLED = dict.fromkeys(("a.txt", "b.txt", "c.txt"), CAT_LINE) | {"x.names": "cat\nd"}


def layout(name, files, counts=None, more="", options=None, **splits):
    """Files, drops and notes, and images with the labels of their boxes by split."""
    rows = {k: [row.split() for row in text.split(",")] for k, text in splits.items()}
    boxes = dict(cat=CAT, dog=DOG, face=("face", CAT[1]), hand=("face", DOG[1]))
    expected = {
        split: {image: [boxes[k] for k in labels] for image, *labels in images}
        for split, images in rows.items()
    }
    images = {image for row in expected.values() for image in row} | {*more.split()}
    return pytest.param(images, files, counts or {}, options or {}, expected, id=name)


LAYOUTS = [
    layout(
        "voc devkit",
        {
            "Annotations/a.xml": xml(CAT, DOG),
            "Annotations/b.xml": xml(DOG),
            "Annotations/c.xml": xml(),
            "ImageSets/Main/train.txt": "a\nc\n",
            "ImageSets/Main/cat_train.txt": "a  1\nc -1\n",
            "ImageSets/Main/val.txt": "b\nmissing\n",
        },
        {"names in a list of images without an annotation": 1},
        more="SegmentationClass/a.png",
        train="JPEGImages/a.jpg cat dog, JPEGImages/c.jpg",
        val="JPEGImages/b.jpg dog",
    ),
    layout(
        "two years of voc",
        {
            f"VOC{year}/{file}": text
            for year, box in ((2007, CAT), (2012, DOG))
            for file, text in {
                "Annotations/1.xml": xml(box),
                "Annotations/2.xml": xml(box),
                "ImageSets/Main/train.txt": "1",
                "ImageSets/Main/val.txt": "2",
            }.items()
        },
        train="VOC2007/JPEGImages/1.jpg cat, VOC2012/JPEGImages/1.jpg dog",
        val="VOC2007/JPEGImages/2.jpg cat, VOC2012/JPEGImages/2.jpg dog",
    ),
    layout(
        "voc in one folder",
        {"a.xml": xml(CAT, filename="a.jpg"), "b.xml": xml(DOG, size=(0, 0))},
        options=dict(val_share=0.0),
        train="a.JPG cat, b.webp dog",
    ),
    layout(
        "a crowd of coco",
        {"x.json": CROWD},
        {"boxes marked iscrowd: kept as crowd": 1},
        options=dict(val_share=0.0),
        train="a.jpg cat dog",
    ),
    layout(
        "coco",
        {
            "annotations/instances_train2017.json": coco(["0.jpg"], [(1, DOG)]),
            "annotations/instances_val2017.json": coco(["0.jpg"]),
            "annotations/captions_train2017.json": coco((), ()),
        },
        train="train2017/0.jpg dog",
        val="val2017/0.jpg cat",
    ),
    layout(
        "coco with one folder of images",
        {"train.json": coco(), "val.json": coco(["b.jpg"]), "stats.json": "{}"},
        train="images/a.jpg cat",
        val="images/b.jpg cat",
    ),
    layout(
        "roboflow's coco",
        {f"{s}/_annotations.coco.json": HEADED for s in ("train", "valid", "test")},
        {"category 'pets-x1' left out: no box uses it, it heads others": 1},
        train="train/a.jpg cat",
        val="valid/a.jpg cat",
        test="test/a.jpg cat",
    ),
    layout(
        "an image of another split is not a missing one",
        {
            "train/_annotations.coco.json": coco(["0.jpg", "1.jpg"]),
            "val/_annotations.coco.json": coco(
                ["0.jpg", "1.jpg"], [(1, CAT), (2, DOG)]
            ),
        },
        {
            "annotated images that are missing or ambiguous": 1,
            "boxes of images that are missing or ambiguous": 1,
        },
        train="train/0.jpg cat, train/1.jpg",
        val="val/1.jpg dog",
    ),
    layout(
        "kitti devkit",
        {
            "training/label_2/0.txt": f"{kitti(*CAT)}\n{kitti('DontCare', DOG[1])}",
            "training/label_2/1.txt": f"{kitti(*DOG)}\n",
        },
        {"DontCare regions": 1},
        more="testing/image_2/0.png",
        options=dict(val_share=0.0),
        train="training/image_2/0.png cat, training/image_2/1.png dog",
    ),
    layout(
        "lists of kitti name the images of their own folder",
        {
            "1/training/label_2/0.txt": kitti(*CAT),
            "1/testing/label_2/0.txt": kitti(*DOG),
            "2/training/label_2/0.txt": kitti(*DOG),
            "1/ImageSets/train.txt": "0\n",
            "2/ImageSets/val.txt": "0\n",
        },
        {"annotated images in no split that is used": 1},
        more="1/testing/image_2/0.png",
        train="1/training/image_2/0.png cat",
        val="2/training/image_2/0.png dog",
    ),
    layout(
        "dota",
        {
            "train/labelTxt/P1.txt": "imagesource:GoogleEarth\ngsd:0.146\n"
            "9.0 2.0 15.0 5.0 9.0 8.0 3.0 5.0 cat 0\n"  # a rhombus
            "20 5 30 5 30 19 20 19 dog 1\n",
            "val/labelTxt/P2.txt": "20 5 30 5 30 19 20 19 dog\n",
        },
        {"objects marked difficult: kept as crowd": 1},
        train="train/images/P1.png cat dog",
        val="val/images/P2.png dog",
    ),
    layout(
        "trainval of voc",
        {
            **{f"Annotations/{name}.xml": xml(CAT) for name in "abc"},
            "ImageSets/Main/trainval.txt": "a\nb\n",
            "ImageSets/Main/test.txt": "c\n",
        },
        options=dict(val_share=0.0),
        train="JPEGImages/a.jpg cat, JPEGImages/b.jpg cat",
        test="JPEGImages/c.jpg cat",
    ),
    layout(
        "wider_face",
        {
            "wider_face_split/wider_face_train_bbx_gt.txt": "0--P/a.jpg\n0\n"
            "0 0 0 0 0 0 0 0 0 0 \n0--P/d.jpg\n0\n"  # a line of zeros, or none
            "0--P/b.jpg\n2\n3 2 12 6 0 0 0 0 0 0 \n20 5 10 14 0 0 0 1 0 0 \n"
            "1--H/a.jpg\n1\n3 2 0 6 0 0 0 0 0 0 \n"
            "1--H/gone.jpg\n1\n3 2 3 6 0 0 0 0 0 0 \n",
            "wider_face_split/wider_face_val_bbx_gt.txt": "0--P/a.jpg\n1\n3 2 12 6\n",
        },
        {
            ZERO: 1,
            "annotated images that are missing or ambiguous": 1,
            "boxes of images that are missing or ambiguous": 1,
            "faces marked invalid: kept as crowd": 1,
        },
        train="WIDER_train/images/0--P/a.jpg, WIDER_train/images/0--P/d.jpg, "
        "WIDER_train/images/0--P/b.jpg face hand, WIDER_train/images/1--H/a.jpg",
        val="WIDER_val/images/0--P/a.jpg face",
    ),
    layout(
        "csv of splits",
        {
            "train_labels.csv": CSV_CAT,
            "validation_labels.csv": f"{CSV}b.jpg,cat,3,2,15,8\n",
            "test_labels.csv": f"{CSV}c.jpg,dog,20,5,30,19\n",
            "masks.csv": f"rle,score\n{'1 2 ' * 50_000},1\n",
        },
        train="a.jpg cat",
        val="b.jpg cat",
        test="c.jpg dog",
    ),
    layout(
        "csv with a column of splits",
        {
            "x.csv": "set,filename,class,x1,y1,x2,y2\nTRAIN,a.jpg,cat,3,2,15,8\n"
            "VALIDATION,b.jpg,cat,3,2,15,8\nTRAIN,c.jpg,,,,,\n"
        },
        train="a.jpg cat, c.jpg",
        val="b.jpg cat",
    ),
    layout(
        "open images",
        {
            "train-annotations-bbox.csv": "ImageID,LabelName,XMin,XMax,YMin,YMax,"
            "IsGroupOf\na,/m/01yrx,0.075,0.375,0.1,0.4,1\n",
            "class-descriptions-boxable.csv": "/m/01yrx,cat\n",
        },
        {"boxes marked as group or difficult: kept as crowd": 1},
        train="train/a.jpg cat",
    ),
    layout(
        "yolo with lists of images",
        {
            **YOLO_LABELS,
            "lists/train.txt": "./train/images/a.jpg\n",
            "lists/val.txt": "/home/bob/pets/valid/images/a.jpg\n",
            "pets.yaml": YAML.replace("train\n", "lists/train.txt\n").replace(
                "valid", "lists/val.txt"
            ),
        },
        train="train/images/a.jpg cat",
        val="valid/images/a.jpg dog",
    ),
    layout(
        "other yaml files",
        {
            **YOLO_LABELS,
            "data.yaml": YAML,
            "export.yaml": "made: 2024-02-31\n",
            "other.yaml": "{",
        },
        train="train/images/a.jpg cat",
        val="valid/images/a.jpg dog",
    ),
    layout(
        "darknet",
        DARKNET,
        {
            "images of the list valid.txt that are missing": 1,
            "annotated images in no split that is used": 1,
        },
        more="obj/c.JPG",
        train="obj/a.JPG cat",
        val="obj/b.JPG dog",
    ),
    layout(
        "yolo lists without a config",
        {**LABELLED, "train.txt": "a.jpg\nc.jpg\n", "val.txt": "b.jpg\n"},
        train="a.jpg cat, c.jpg cat",
        val="b.jpg cat",
    ),
    layout(
        "yolo lists of another copy",
        {**LABELLED, "train.txt": "a.jpg\n" + "".join(f"{i}.jpg\n" for i in range(9))},
        {"images of list files are missing: the lists are ignored": 9},
        options=dict(val_share=0.0),
        train="a.jpg cat, b.jpg cat, c.jpg cat",
    ),
    layout(
        "folders images and labels",
        {
            "labels/train/a.txt": CAT_LINE,
            "labels/val/a.txt": DOG_LINE,
            "labels/classes.txt": "cat\ndog\n\n\n",
        },
        train="images/train/a.png cat",
        val="images/val/a.png dog",
    ),
    layout(
        "polygons, and names of the entry",
        {
            "a.txt": "0 0.075 0.25 0.225 0.1 0.375 0.25 0.225 0.4\n"  # a rhombus
            "1 0.5 0.25 0.75 0.25 0.5 0.95\n",  # a triangle
        },
        options=dict(classes=("cat", "dog")),
        train="a.jpg cat dog",
    ),
    layout(
        "keypoints",
        {
            "data.yaml": f"{YAML}kpt_shape: [2, 3]",
            # The box does not reach them.
            "train/labels/a.txt": f"{CAT_LINE} 0.9 0.9 2 0.01 0.01 0\n",
            "valid/labels/a.txt": f"{DOG_LINE} 0.9 0.9 2 0.01 0.01 0\n{DOG_LINE} 0.5",
        },
        {"lines that are not a box or polygon of a class": 1},
        train="train/images/a.jpg cat",
        val="valid/images/a.jpg dog",
    ),
    layout(
        "images without objects",
        {"a.txt": CAT_LINE, "empty.txt": "\n"},
        {"images without a label file: kept as without objects": 1},
        options=dict(classes=("cat",), val_share=0.0),
        train="a.jpg cat, empty.jpg, none.jpg",
    ),
    layout(
        "validation images that are training images",
        {"train/labels/a.txt": CAT_LINE, "data.yaml": YAML.replace("valid", "train")},
        {"WARNING: images of val are images of train, too": 1},
        train="train/images/a.jpg cat",
        val="train/images/a.jpg cat",
    ),
    layout(
        "masks with the names of the images",
        {f"annotations/{one}.json": coco() for one in ("train", "val")},
        more="annotations/train/a.jpg annotations/val/a.jpg depth/train/a.jpg",
        train="images/train/a.jpg cat",
        val="images/val/a.jpg cat",
    ),
    layout(
        "one of two cameras",
        {"x.csv": f"{CSV}cam1/a.jpg,dog,20,5,30,19\ncam2/a.jpg,cat,3,2,15,8\n"},
        {"boxes of images that are missing or ambiguous": 1},
        options=dict(val_share=0.0),
        train="cam2/a.jpg cat",
    ),
    layout(
        "images of train divided anew",
        {"train.json": coco(), "val.json": coco(["b.jpg"], [(1, DOG)])},
        train="images/train/a.jpg cat",
        val="images/train/b.jpg dog",
    ),
    layout(
        "val that was not unpacked, with names of train",
        {"train.json": coco(), "val.json": coco(["a.jpg"], [(1, DOG)])},
        {"annotated images of val that are missing": 1},
        options=dict(val_share=0.0),
        train="train/a.jpg cat",
    ),
    layout(
        "masks in a dataset of depth",
        {
            f"{kind}/annotations/train.json": coco(boxes=[(1, box)])
            for kind, box in (("rgb", CAT), ("depth", DOG))
        },
        options=dict(val_share=0.0, train=("rgb", "depth")),
        train="depth/train/a.jpg dog, rgb/train/a.jpg cat",
    ),
    layout(
        "spellings of one image",
        {
            "x.csv": f"{CSV}A.JPG,cat,3,2,15,8\n../images/a.jpg,dog,20,5,30,19\n"
            "C:\\x\\images\\a.jpg,cat,3,2,15,8\n"
        },
        {"boxes that occur twice": 1},
        options=dict(val_share=0.0),
        train="images/a.jpg cat dog",
    ),
    layout(
        "train and val of trainval images",
        {f"annotations/{one}/x.json": coco([f"{one}.jpg"]) for one in ("train", "val")},
        more="images/test/a.jpg",
        train="images/trainval/train.jpg cat",
        val="images/trainval/val.jpg cat",
    ),
    layout(
        "lists of folds, and folders beside lists",
        {
            f"{one}/labelTxt/{n}.txt": "3 2 15 2 15 8 3 8 cat 0"
            for one in ("train", "val")
            for n in "ab"
        }
        | {"train/train.txt": "a\n", "val/val.txt": "b\n"},
        train="train/images/a.jpg cat, train/images/b.jpg cat",
        val="val/images/a.jpg cat, val/images/b.jpg cat",
    ),
    layout(
        "trainval in coco",
        {"instances_trainval.json": coco(), "instances_test.json": coco(["b.jpg"])},
        options=dict(val_share=0.0),
        train="a.jpg cat",
        test="b.jpg cat",
    ),
    layout(
        "trainval without train in voc",
        {f"{one}.xml": xml(CAT) for one in "ab"}
        | {"ImageSets/Main/trainval.txt": "a\nb", "ImageSets/Main/val.txt": "b"},
        train="a.jpg cat",
        val="b.jpg cat",
    ),
    layout(
        "voc of cvat",
        {"Annotations/a.xml": xml(CAT), "ImageSets/Main/default.txt": "a"},
        options=dict(val_share=0.0),
        train="a.jpg cat",
    ),
    layout(
        "kitti with lists beside it",
        {f"label_2/{one}.txt": kitti(*CAT) for one in "ab"}
        | {"train.txt": "a\n", "val.txt": "b\n"},
        train="image_2/a.jpg cat",
        val="image_2/b.jpg cat",
    ),
    layout(
        "yolo with lists of names",
        {**LABELLED, "train.txt": "a\nc\n", "val.txt": "b\n"},
        train="a.jpg cat, c.jpg cat",
        val="b.jpg cat",
    ),
    layout(
        "roboflow without valid and with an unnamed test",
        {"data.yaml": YAML, **{f"{one}/a.txt": CAT_LINE for one in ("train", "test")}},
        {"no folder 'valid' for val": 1},
        options=dict(val_share=0.0),
        train="train/a.jpg cat",
        test="test/a.jpg cat",
    ),
]


@pytest.mark.parametrize(("images", "files", "counts", "options", "expected"), LAYOUTS)
def test_layout(folder, read, images, files, counts, options, expected):
    found = read(folder(images, files), **options)
    assert found.splits == expected
    assert found.dropped | found.noted == counts
    crowds = [r["iscrowd"] for d in found.documents.values() for r in d["annotations"]]
    assert sum(crowds) == sum(n for what, n in counts.items() if "crowd" in what)


@pytest.mark.parametrize(
    "yaml",
    [
        "train: ../train/images\nval: ../valid/images\nnc: 2\nnames: ['cat', 'dog']",
        "train: train/images\nval: valid\nnames: {0: cat, 1: dog}",
        "path: /home/bob/sets/pets\ntrain: train/images\nval: valid/images\n"
        "names:\n  1: dog\n  0: cat\n",
        "path: ../datasets/pets\ntrain: [train/images]\nvalid: valid/images\n"
        "test:\nnames: [cat, dog]",
        "train: /data/pets/train/images\nval: C:\\pets\\valid\\images\n"
        "test: test/images\nnames: [cat, dog]",
    ],
    ids=["roboflow", "mapping", "other machine", "lists", "absolute"],
)
def test_data_yaml(folder, read, yaml):
    found = read(folder(YOLO_IMAGES, {**YOLO_LABELS, "data.yaml": yaml}))
    assert found.splits == YOLO_SPLITS
    assert found.summary.classes == ("cat", "dog")
    assert found.dropped == {}


@pytest.mark.parametrize(
    "text",
    [
        "filename,width,height,class,xmin,ymin,xmax,ymax\n"
        "a.jpg,40,20,cat,3,2,15,8\nb.jpg,40,20,dog,20,5,30,19\n",
        "label;y2;x2;y1;x1;image_path\n"
        "cat;8;15;2;3;images/a.jpg\ndog;19;30;5;20;images/b.jpg\n",
        "Image Name,Class Name,x,y,w,h\na.jpg,cat,3,2,12,6\nb.jpg,dog,20,5,10,14\n",
        "image_id,name,left,top,width,height\na,cat,3,2,12,6\nb,dog,20,5,10,14\n",
        "ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsGroupOf\n"
        "a,x,cat,1,0.075,0.375,0.1,0.4,0\nb,x,dog,1,0.5,0.75,0.25,0.95,0\n",
        "/home/x/images/a.jpg,3,2,15,8,cat\n/home/x/images/b.jpg,20,5,30,19,dog\n",
    ],
    ids=["tf", "synonyms", "xywh", "size of the box", "open images", "retinanet"],
)
def test_columns_of_csv(folder, read, text):
    found = read(folder("images/a.jpg images/b.jpg images/c.jpg", {"boxes.csv": text}))
    assert found.boxes() == {"images/a.jpg": [CAT], "images/b.jpg": [DOG]}
    assert found.dropped == {"images without an annotation": 1}


# Folder -> drops and an example of each, without the one box that is kept.
FAULTY = {
    "voc": (
        "a.jpg unannotated.jpg",
        {
            "a.xml": xml(CAT, ("", (1, 1, 9, 9)), ("cat", ("x", 1, 9, 9))),
            "lost.xml": xml(CAT),
            "torn.xml": "<annotation><object>",
        },
        {
            "objects without a name or a box of four numbers": "a.xml: object 2: name "
            "'', box '1 1 9 9'",
            "annotation files without an image": "lost.xml",
            "XML files that are not VOC annotations": "torn.xml: not an XML file (no "
            "element found: line 1, column 20)",
            "images without an annotation": "unannotated.jpg",
        },
    ),
    "voc of another size": (
        "a.jpg small.jpg",
        {
            "a.xml": xml(CAT),
            "small.xml": xml(CAT, size=(400, 200)),
            "x.xml": "<note/>",
            "y.xml": f'<?xml version="1.0" encoding="nonsense"?>{xml(CAT)}',
        },
        {
            "images of another size than their annotation": "small.xml: small.jpg is "
            "stated as 400 x 200 px, the file has 40 x 20",
            "boxes of images of another size": "small.xml: small.jpg is stated as "
            "400 x 200 px, the file has 40 x 20",
            "XML files that are not VOC annotations": "x.xml: <note>",
        },
    ),
    "kitti": (
        "image_2/a.jpg",
        {
            "label_2/a.txt": f"{kitti(*CAT)}\ncar 1",
            "label_2/b.txt": kitti(*CAT),
        },
        {
            "lines that are not KITTI labels": "label_2/a.txt:2: 'car 1': 2 columns, ",
            "annotation files without an image": "label_2/b.txt",
        },
    ),
    "dota": (
        "a.jpg",
        {"a.txt": "3 2 15 2 15 8 3 8 cat 0\n3 2 cat\n3 2 15 2 15 8 3 nan cat 0"},
        {
            "lines that are not DOTA labels": "a.txt:2: '3 2 cat': 3 columns, but",
            NAN: "a.txt:3",
        },
    ),
    "wider_face": (
        "a.jpg b.jpg",
        {"x_bbx_gt.txt": "a.jpg\n2\n3 2 12 6\n3 x 4 4\nb.jpg\n3 2 4 4"},
        {
            "lines that are not a face of 4 or 10 numbers": "x_bbx_gt.txt:4: '3 x 4 4'",
            "lines below an image without a number of faces": "x_bbx_gt.txt:6: '3 2 4",
        },
    ),
    "csv": (
        "a.jpg",
        {"x.csv": f"{CSV_CAT}a.jpg,,1,1,5,5\ngone.jpg,cat,1,1,5,5\na.jpg,cat"},
        {
            "rows without four numbers and a class": "x.csv:3: ['a.jpg', '', '1', '1'",
            "boxes of images that are missing or ambiguous": "x.csv:4: gone.jpg",
        },
    ),
    "yolo": (
        "a.jpg",
        {
            "a.txt": f"{CAT_LINE}\n2 {CAT_LINE[2:]}\n0 9 5 12 6\ncat .2 .2 .3 .3",
            "lost.txt": CAT_LINE,
            "x.names": "cat\ndog",
        },
        {
            "boxes of an unknown class number": "a.txt:2: 2; there are 0 to 1",
            "boxes that are not fractions of the image": "a.txt:3: "
            "'0 9 5 12 6': YOLO coordinates are fractions of the image (0 to 1), not",
            "lines that are not a box or polygon of a class": "a.txt:4: 'cat .2 .2 .3 "
            ".3': a YOLO label begins with the number of its class",
            "annotation files without an image": "lost.txt",
        },
    ),
}


FAULTY_COCO = coco(["a.jpg", "a.jpg", "gone.jpg"], [(1, CAT), (9, CAT), (3, CAT)])
FAULTY_COCO["images"][1]["id"] = 1
FAULTY_COCO["annotations"] += [
    FAULTY_COCO["annotations"][0] | change
    for change in (
        dict(category_id=77),
        dict(id=9, bbox=["3", "2"]),
        dict(ignore=1, bbox=[1, 1, 5, 5]),
    )
]
FAULTY["coco"] = (
    "a.jpg",
    {"train.json": FAULTY_COCO},
    {
        "annotations without a bbox of four numbers": "train.json: annotation 9: bbox "
        "is ['3', '2']",
        "image records with the id of another": "train.json: image 1",
        "annotated images that are missing or ambiguous": "train.json: image 3: gone."
        "jpg",
        "boxes of images that are missing or ambiguous": "train.json: image 3",
        "boxes of images that the file does not list": "train.json: image_id 9",
        "boxes of an unknown category id": "train.json: annotation 0: 77",
        "boxes marked 'ignore'": "train.json: annotation 0",
    },
)


def test_a_quote_after_a_blank_quotes(folder, read):
    text = f'{CSV}"a.jpg", "cat, wet", 3, 2, 15, 8\nb.jpg, "dog", 3, 2, 15, 8\n'
    found = read(folder("a.jpg b.jpg", {"x.csv": text}), val_share=0.0).boxes()
    labels = {name: [label for label, _ in own] for name, own in found.items()}
    assert labels == {"a.jpg": ["cat, wet"], "b.jpg": ["dog"]}


@pytest.mark.parametrize("name", FAULTY)
def test_broken_records_are_counted_and_quoted(folder, read, name):
    images, files, examples = FAULTY[name]
    found = read(folder(images, files))
    assert [[c for _, c in boxes] for boxes in found.boxes().values() if boxes] == [
        [CAT[1]]
    ]
    assert found.dropped.keys() == examples.keys()
    for what, example in examples.items():
        assert found.summary.dropped[what].example.startswith(example)


@pytest.mark.parametrize("record", [7, None, [], dict(id=[1], image_id=[1])])
@pytest.mark.parametrize("key", ["images", "annotations"])
def test_unreadable_records_of_coco(folder, read, key, record):
    document = coco()
    document[key].append(record)
    found = read(folder("a.jpg", {"x.json": document}))
    assert found.boxes() == {"a.jpg": [CAT]}
    assert found.documents["train"]["annotations"][0]["area"] == 12.5
    assert found.dropped == {
        f"records of {key!r} that are not objects with valid ids": 1
    }


@pytest.mark.parametrize("side", [float("inf"), float("nan"), 0, "40", None])
def test_invalid_sizes_of_coco_do_not_count(folder, read, side):
    document = coco()
    document["images"][0]["width"] = side
    document["annotations"][0]["area"] = float("inf")
    found = read(folder("a.jpg", {"x.json": document}))
    assert found.boxes() == {"a.jpg": [CAT]}
    assert found.documents["train"]["annotations"][0]["area"] == 12 * 6


@pytest.mark.parametrize(
    ("category", "fault"),
    [
        (dict(id=5, name="cow"), r"x\.json: category 5: 2 records .* have the id 5"),
        (dict(id=7, name="cat"), r"x\.json: class 'cat': 2 categories have this name"),
        (dict(id=7, name=""), r"x\.json: category 7: name must be a text, got ''"),
        (None, r"x\.json: category number 3 of the list: expected an object"),
    ],
)
def test_invalid_categories_of_coco(folder, read, category, fault):
    document = coco()
    document["categories"].append(category)
    with pytest.raises(DataError, match=fault):
        read(folder("a.jpg", {"x.json": document}))


def test_headings_of_coco(folder, read):
    """A class may have the name of its heading, and an entry may name the heading."""
    root = folder("a.jpg", {"x.json": HEADED})
    assert read(root).summary.classes == ("cat", "dog")  # dog has no box, and stays
    kept = read(root, classes=("pets-x1", "cat"))
    assert kept.summary.classes == ("pets-x1", "cat", "dog")
    document = coco()
    document["categories"][0]["supercategory"] = "cat"
    document["categories"].insert(0, dict(id=0, name="cat", supercategory="none"))
    root = folder("", {"x.json": document})
    assert read(root).summary.classes == ("cat", "dog")


def test_two_coco_files_of_one_split_are_not_joined(folder, read):
    files = {
        f"annotations/instances_train{year}.json": coco([f"{year}.jpg"])
        for year in (2014, 2017)
    }
    root = folder("train2014/2014.jpg train2017/2017.jpg", files)
    with pytest.raises(ConfigError, match=r"only the lists .*train2014\.json.*train="):
        read(root)
    found = read(root, train=("annotations/instances_train2017.json",))
    assert found.boxes() == {"train2017/2017.jpg": [CAT]}


def test_image_of_voc_by_the_stated_name_and_lists_with_spaces(folder, read):
    files = {
        "labels/1.xml": xml(CAT, filename="C:\\data\\photo one.jpg"),
        "labels/it's 2.xml": xml(DOG, extra="<difficult>1</difficult>"),
        "ImageSets/Main/train.txt": "1\n",
        "ImageSets/Main/val.txt": "it's 2\n\nit's 3\n",
        "ImageSets/Main/cat_val.txt": "it's 2 -1\n",
    }
    found = read(folder(["images/photo one.jpg", "images/it's 2.jpg"], files))
    assert found.splits == {
        "train": {"images/photo one.jpg": [CAT]},
        "val": {"images/it's 2.jpg": [DOG]},
    }
    examples = [count.example for count in found.summary.dropped.values()]
    assert examples == ["ImageSets/Main/val.txt:3: it's 3"]
    assert found.documents["val"]["annotations"][0]["iscrowd"] == 1
    assert found.noted == {"objects marked difficult: kept as crowd": 1}


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "gb2312", "gbk"])
def test_encodings_of_voc(folder, read, encoding):
    root = folder("a.jpg")
    text = f'<?xml version="1.0" encoding="{encoding}"?>' + xml(("猫", CAT[1]))
    (root / "a.xml").write_bytes(text.encode(encoding))
    assert read(root).boxes() == {"a.jpg": [("猫", CAT[1])]}


def test_a_score_of_kitti_makes_a_detection(folder, read):
    text = f"{kitti(*CAT)}\n{kitti(*DOG)} -0.87\n"
    root = folder("image_2/0.png", {"label_2/0.txt": text})
    fault = r": 1 lines have a 16th .*label_2/0\.txt:2: -0\.87\): these are det"
    for name in (None, "kitti"):
        with pytest.raises(DataError, match=fault):
            read(root, format=name)
    found = read(root, format="kitti_detections")
    assert found.boxes() == {"image_2/0.png": [CAT, DOG]}
    assert found.noted == {"detections with a score taken as ground truth": 1}


NO_HEADER = r"x\.csv has no header, and .*Put a first line such as filename,xmin,ymin"
ROW = "a.jpg,3,2,15,8,cat\n"
UNCLOSED = 'a.jpg,3,2,15,8,"cat\n' + ROW * 9000
ALL_YOLO = {**YOLO_LABELS, "classes.txt": "cat\ndog"}


@pytest.mark.parametrize(
    ("files", "error", "fault"),
    [
        ({"x.csv": "a.jpg,20,5,10,14,cat\na.jpg,25,15,10,4,dog"}, DataError, NO_HEADER),
        ({"x.csv": "a.jpg,40,20,cat,3,2,15,8\n"}, DataError, NO_HEADER),
        ({"x.csv": "a.jpg,0,3,2,15,8\n"}, DataError, NO_HEADER),  # a class number
        ({"x.csv": "cat,a.jpg,3,2,15,8\n"}, DataError, NO_HEADER),
        # Everything behind the quote is one field, too long to be one.
        ({"x.csv": CSV + UNCLOSED}, DataError, r"x\.csv cannot be read beyond line \d"),
        ({"x.csv": ROW + UNCLOSED}, DataError, r"x\.csv cannot be read beyond line \d"),
        (
            {"x.csv": "filename,xmin,ymin,xmax,ymax\na.jpg,3,2,15,8"},
            ConfigError,
            r"no column with class names.*classes=\[",
        ),
        (
            {"x.json": '{"images": [], "annotations": [], "categories"'},
            DataError,
            r"x\.json: it is not a JSON file",
        ),
        ({"a.txt": CAT_LINE}, ConfigError, r"no file names the classes .*classes=\["),
        (
            {**ALL_YOLO, "classes.txt": "cat\n\ndog\n"},
            DataError,
            r"classes\.txt: line 2 is empty; line 1 names class 0",
        ),
        (
            {**ALL_YOLO, "classes.txt": "cat\ndog\ncat\n"},
            DataError,
            r"classes\.txt: line 1 and line 3 are both 'cat'",
        ),
        (
            {**YOLO_LABELS, "train/data.yaml": YAML, "valid/data.yaml": YAML},
            ConfigError,
            r"several datasets .*root='.*/train'",
        ),
        *(
            ({**YOLO_LABELS, "data.yaml": yaml}, DataError, fault)
            for yaml, fault in (
                ("train: no/such\nnames: [a, b]", "train is the folder 'no/such', wh"),
                ("train: x.txt\nnames: [a, b]", r"train is the list 'x\.txt', which"),
                ("train: train\nnames: 7", "names: expected a list of class names"),
                ("train: train\nnames: {a: b}", r"data\.yaml: names: invalid li"),
                ("train: train\nnames: {~: b}", r"data\.yaml: names: invalid li"),
                (
                    "train: train\nnames: {1: a, 2: b}",
                    r"numbers 0 to 1, got \['1', ",
                ),
                ("train: train\nnames: {0: a, 00: b}", "numbers 0 to 1, got .*00"),
                ("train: train\nnc: 3\nnames: [a, b]", "nc is 3, and names lists 2 cl"),
                ("train: train\nnames: [a, b, a]", "name 1 and name 3 are both"),
                ("train: train\nnames: [a, '']", "name 2 is empty"),
                (
                    "train: train\nkpt_shape: 17\nnames: [a]",
                    "kpt_shape must be .* '17'",
                ),
                ("train: a\nnames: [cat, dog\nx: 1", r"data\.yaml:3: not a YAML file"),
                ("- cat", r"data\.yaml has no 'key: value' lines"),
            )
        ),
        (
            {**YOLO_LABELS, "data.yaml": "nc: 2"},
            ConfigError,
            r"looked for data\.yaml with names: and train:",
        ),
    ],
)
def test_files_that_cannot_be_read(folder, read, files, error, fault):
    with pytest.raises(error, match=fault):
        read(folder(f"a.jpg {YOLO_IMAGES}", files))


def test_the_only_class_of_a_csv_file_is_given(folder, read):
    root = folder("a.jpg", {"x.csv": "filename,x1,y1,x2,y2\na.jpg,3,2,15,8\n"})
    assert read(root, classes=("cat",)).boxes() == {"a.jpg": [CAT]}
