"""Each format: a folder made by hand with boxes worked out by hand, and its faults."""

from __future__ import annotations

import json

import pytest

from damex.errors import ConfigError, DataError

CAT = ("cat", (3.0, 2.0, 15.0, 8.0))
DOG = ("dog", (20.0, 5.0, 30.0, 19.0))
BAD = {
    "nan": "boxes with a coordinate that is NaN or infinite",
    "negative": "boxes with a negative width or height",
    "zero": "boxes with a width or height of 0",
    "outside": "boxes outside of their image",
    "twice": "boxes that stand there twice",
}
# Corners of bad boxes in a 40 x 20 px image, after CAT.
BAD_CORNERS = [
    ("nan", ("nan", 2, 15, 8)),
    ("negative", (15, 2, 3, 8)),
    ("zero", (3, 2, 3, 8)),
    ("outside", (41, 2, 50, 8)),
    ("twice", (3, 2, 15, 8)),
]


def xml(*objects, size=(40, 20), filename="x.jpg", extra=""):
    records = "".join(
        f"<object><name>{name}</name>{extra}<bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin>"
        f"<xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
        for name, (x1, y1, x2, y2) in objects
    )
    stated = f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"
    return (
        f"<annotation><filename>{filename}</filename>{stated if size else ''}{records}"
        "</annotation>"
    )


class TestVoc:
    def test_devkit(self, tmp_path, write_image, write, read):
        for name in "abc":
            write_image(tmp_path / f"JPEGImages/{name}.jpg")
        write_image(tmp_path / "SegmentationClass/a.png")
        write(tmp_path / "Annotations/a.xml", xml(CAT, DOG))
        write(tmp_path / "Annotations/b.xml", xml(DOG))
        write(tmp_path / "Annotations/c.xml", xml())
        write(tmp_path / "ImageSets/Main/train.txt", "a\nc\n")
        write(tmp_path / "ImageSets/Main/cat_train.txt", "a  1\nc -1\n")
        write(tmp_path / "ImageSets/Main/val.txt", "b\nmissing\n")
        found = read(tmp_path)
        assert found.splits == {
            "train": {"JPEGImages/a.jpg": [CAT, DOG], "JPEGImages/c.jpg": []},
            "val": {"JPEGImages/b.jpg": [DOG]},
        }
        assert found.summary.classes == ("cat", "dog")
        what = "names in a list of images without an annotation"
        assert found.dropped == {what: 1}
        example = "ImageSets/Main/val.txt:2: missing"
        assert found.summary.dropped[what].example == example

    def test_lists_of_names_with_spaces(self, tmp_path, write_image, write, read):
        for name in ("my photo", "it's 2"):
            write_image(tmp_path / f"JPEGImages/{name}.jpg")
            write(tmp_path / f"Annotations/{name}.xml", xml(CAT))
        write(tmp_path / "ImageSets/Main/train.txt", "my photo\n")
        write(tmp_path / "ImageSets/Main/val.txt", "it's 2\n\nit's 3\n")
        write(tmp_path / "ImageSets/Main/cat_val.txt", "it's 2 -1\n")
        found = read(tmp_path)
        assert {split: [*images] for split, images in found.splits.items()} == {
            "train": ["JPEGImages/my photo.jpg"],
            "val": ["JPEGImages/it's 2.jpg"],
        }
        example = "ImageSets/Main/val.txt:3: it's 3"
        assert [one.example for one in found.summary.dropped.values()] == [example]

    def test_trainval_and_test(self, tmp_path, write_image, write, read):
        for name in "abcd":
            write_image(tmp_path / f"JPEGImages/{name}.jpg")
            write(tmp_path / f"Annotations/{name}.xml", xml(CAT))
        write(tmp_path / "ImageSets/Main/trainval.txt", "a\nb\nd\n")
        write(tmp_path / "ImageSets/Main/test.txt", "c\n")
        found = read(tmp_path, val_share=0.5)
        assert list(found.splits["test"]) == ["JPEGImages/c.jpg"]
        assert len(found.splits["train"]) + len(found.splits["val"]) == 3

    def test_two_years_are_joined(self, tmp_path, write_image, write, read):
        for year in ("VOC2007", "VOC2012"):
            for name in ("000001", "000002"):  # ids of one year occur in the other
                write_image(tmp_path / year / f"JPEGImages/{name}.jpg")
                write(tmp_path / year / f"Annotations/{name}.xml", xml(CAT))
            write(tmp_path / year / "ImageSets/Main/train.txt", "000001\n")
            write(tmp_path / year / "ImageSets/Main/val.txt", "000002\n")
        found = read(tmp_path)
        assert list(found.splits["train"]) == [
            f"VOC{year}/JPEGImages/000001.jpg" for year in (2007, 2012)
        ]

    @pytest.mark.parametrize("suffix", [".JPG", ".png", ".jpeg", ".webp"])
    def test_flat_folder_with_any_suffix(
        self, tmp_path, write_image, write, read, suffix
    ):
        write_image(tmp_path / f"a{suffix}")
        write_image(tmp_path / "b.jpg")
        write(tmp_path / "a.xml", xml(CAT, filename="a.jpg"))
        write(tmp_path / "b.xml", xml(DOG))
        assert read(tmp_path).boxes() == {f"a{suffix}": [CAT], "b.jpg": [DOG]}

    def test_image_by_the_stated_name(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "images/photo one.jpg")
        write(tmp_path / "labels/1.xml", xml(CAT, filename="C:\\data\\photo one.jpg"))
        found = read(tmp_path, val_share=0.0)
        assert found.boxes() == {"images/photo one.jpg": [CAT]}

    def test_rgba_named_jpg(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "a.jpg", mode="RGBA", kind="PNG")
        write(tmp_path / "a.xml", xml(CAT))
        assert read(tmp_path).boxes() == {"a.jpg": [CAT]}

    def test_difficult_is_crowd(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "a.jpg")
        write(tmp_path / "a.xml", xml(CAT, extra="<difficult>1</difficult>"))
        found = read(tmp_path)
        assert found.documents["train"]["annotations"][0]["iscrowd"] == 1
        assert found.noted == {"objects marked difficult: kept as crowd": 1}

    @pytest.mark.parametrize(("kind", "corners"), BAD_CORNERS)
    def test_bad_box(self, tmp_path, write_image, write, read, kind, corners):
        write_image(tmp_path / "a.jpg")
        write(tmp_path / "a.xml", xml(CAT, ("cat", corners)))
        found = read(tmp_path)
        assert found.boxes() == {"a.jpg": [CAT]}
        assert found.dropped == {BAD[kind]: 1}
        assert found.summary.dropped[BAD[kind]].example == "a.xml: object 2"

    def test_other_faults(self, tmp_path, write_image, write, read):
        for name in ("a", "unannotated", "broken", "small"):
            write_image(tmp_path / f"{name}.jpg")
        (tmp_path / "broken.jpg").write_bytes(b"no image")
        write(tmp_path / "a.xml", xml(CAT, ("", (1, 1, 9, 9)), ("cat", ("x", 1, 9, 9))))
        write(tmp_path / "lost.xml", xml(CAT))
        write(tmp_path / "broken.xml", xml(CAT))
        write(tmp_path / "small.xml", xml(CAT, size=(400, 200)))
        write(tmp_path / "torn.xml", "<annotation><object>")
        found = read(tmp_path)
        assert found.boxes() == {"a.jpg": [CAT]}
        assert found.dropped == {
            "objects without a name or a box of four numbers": 2,
            "annotation files without an image": 1,
            "images that cannot be read": 1,
            "boxes of images that cannot be read": 1,
            "images of another size than their annotation": 1,
            "boxes of images of another size": 1,
            "XML files that are no VOC annotation": 1,
            "images without an annotation": 1,
        }
        assert "400 x 200 px, the file has 40 x 20" in str(found.summary.dropped)

    def test_size_of_zero_is_no_size(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "a.jpg")
        write(tmp_path / "a.xml", xml(CAT, size=(0, 0)))
        assert read(tmp_path).boxes() == {"a.jpg": [CAT]}

    @pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "gb2312", "gbk"])
    def test_encodings(self, tmp_path, write_image, read, encoding):
        write_image(tmp_path / "a.jpg")
        declared = f'<?xml version="1.0" encoding="{encoding}"?>'
        text = declared + xml(("猫", CAT[1]))
        (tmp_path / "a.xml").write_bytes(text.encode(encoding))
        assert read(tmp_path).boxes() == {"a.jpg": [("猫", CAT[1])]}

    def test_an_encoding_that_cannot_be_read_is_counted(
        self, tmp_path, write_image, write, read
    ):
        for name in "ab":
            write_image(tmp_path / f"JPEGImages/{name}.jpg")
        write(tmp_path / "Annotations/a.xml", xml(CAT))
        declared = '<?xml version="1.0" encoding="nonsense"?>'
        write(tmp_path / "Annotations/b.xml", declared + xml(CAT))
        found = read(tmp_path)
        assert found.dropped["XML files that are no VOC annotation"] == 1


def coco(images=("a.jpg",), boxes=((1, CAT),), **changes):
    """A COCO document; boxes are (image id, (name, corners))."""
    categories = [dict(id=i, name=n) for i, n in enumerate(("cat", "dog"), start=5)]
    ids = {category["name"]: category["id"] for category in categories}
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
        categories=categories,
        **changes,
    )


class TestCoco:
    @pytest.mark.parametrize(
        "record",
        [7, None, [], dict(id=[1], image_id=1, category_id=1)],
        ids=["number", "null", "list", "id that is a list"],
    )
    @pytest.mark.parametrize("key", ["images", "annotations", "categories"])
    def test_what_is_no_record(self, tmp_path, write_image, write, read, key, record):
        write_image(tmp_path / "a.jpg")
        document = coco()
        document[key].append(record)
        write(tmp_path / "x.json", json.dumps(document))
        found = read(tmp_path)
        assert found.boxes() == {"a.jpg": [CAT]}
        what = f"records of {key!r} that are no objects, or have a list for an id"
        assert found.dropped == {what: 1}

    @pytest.mark.parametrize("side", [float("inf"), float("nan"), 0, "40", None])
    def test_a_size_that_is_none_does_not_count(
        self, tmp_path, write_image, write, read, side
    ):
        write_image(tmp_path / "a.jpg")
        document = coco()
        document["images"][0]["width"] = side
        document["annotations"][0]["area"] = float("inf")
        write(tmp_path / "x.json", json.dumps(document))
        found = read(tmp_path)
        assert found.boxes() == {"a.jpg": [CAT]}
        assert found.documents["train"]["annotations"][0]["area"] == 12 * 6

    def test_two_classes_with_one_id(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "a.jpg")
        document = coco()
        document["categories"][1]["id"] = document["categories"][0]["id"]
        write(tmp_path / "x.json", json.dumps(document))
        with pytest.raises(DataError, match="'cat' and 'dog' have one id, 5;"):
            read(tmp_path)

    @pytest.mark.parametrize(
        ("name", "fault"),
        [
            ("cat", r"x\.json: category 1 and category 2 are both 'cat'\. Give each"),
            ("", r"x\.json: category 2 is empty"),
        ],
    )
    def test_names_that_are_no_names(
        self, tmp_path, write_image, write, read, name, fault
    ):
        write_image(tmp_path / "a.jpg")
        document = coco()
        document["categories"][1]["name"] = name
        write(tmp_path / "x.json", json.dumps(document))
        with pytest.raises(DataError, match=fault):
            read(tmp_path)

    def test_a_heading_may_be_called_as_a_class_below_it(
        self, tmp_path, write_image, write, read
    ):
        write_image(tmp_path / "a.jpg")
        document = coco()
        document["categories"][0]["supercategory"] = "cat"
        document["categories"].insert(0, dict(id=0, name="cat", supercategory="none"))
        write(tmp_path / "x.json", json.dumps(document))
        assert read(tmp_path).summary.classes == ("cat", "dog")

    def test_roboflow_with_its_dummy_category(self, tmp_path, write_image, write, read):
        for split in ("train", "valid", "test"):
            write_image(tmp_path / split / "a.jpg")
            document = coco()
            document["categories"][0]["supercategory"] = "pets-x1"
            document["categories"][1]["supercategory"] = "pets-x1"
            document["categories"].insert(0, dict(id=0, name="pets-x1"))
            name = "_annotations.coco.json"
            write(tmp_path / split / name, json.dumps(document))
        found = read(tmp_path)
        assert found.splits == {
            "train": {"train/a.jpg": [CAT]},
            "val": {"valid/a.jpg": [CAT]},
            "test": {"test/a.jpg": [CAT]},
        }
        assert found.summary.classes == ("cat", "dog")  # dog has no box, and stays
        assert list(found.noted) == [
            "category 'pets-x1' left out: no box uses it, others stand below it"
        ]
        kept = read(tmp_path, classes=("pets-x1", "cat"))
        assert kept.summary.classes == ("pets-x1", "cat", "dog")

    def test_layout_of_coco(self, tmp_path, write_image, write, read):
        for split in ("train", "val"):
            write_image(tmp_path / f"{split}2017/0.jpg")
            file = tmp_path / f"annotations/instances_{split}2017.json"
            write(
                file, json.dumps(coco(["0.jpg"], [(1, CAT if split == "val" else DOG)]))
            )
        captions = dict(images=[], annotations=[], categories=[])
        write(tmp_path / "annotations/captions_train2017.json", json.dumps(captions))
        assert read(tmp_path).splits == {
            "train": {"train2017/0.jpg": [DOG]},
            "val": {"val2017/0.jpg": [CAT]},
        }

    def test_one_folder_of_images(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "images/a.jpg")
        write_image(tmp_path / "images/b.jpg")
        write(tmp_path / "train.json", json.dumps(coco(["a.jpg"])))
        write(tmp_path / "val.json", json.dumps(coco(["b.jpg"])))
        write(tmp_path / "stats.json", "{}")
        found = read(tmp_path)
        assert found.splits == {
            "train": {"images/a.jpg": [CAT]},
            "val": {"images/b.jpg": [CAT]},
        }
        assert found.documents["train"]["annotations"][0]["area"] == 12.5

    def test_image_of_another_split_is_not_taken_for_a_missing_one(
        self, tmp_path, write_image, write, read
    ):
        write_image(tmp_path / "train/0.jpg")
        write_image(tmp_path / "train/1.jpg")
        write_image(tmp_path / "val/1.jpg")
        write(
            tmp_path / "train/_annotations.coco.json",
            json.dumps(coco(["0.jpg", "1.jpg"])),
        )
        boxes = [(1, CAT), (2, DOG)]
        document = coco(["0.jpg", "1.jpg"], boxes)
        write(tmp_path / "val/_annotations.coco.json", json.dumps(document))
        found = read(tmp_path)
        assert found.splits["val"] == {"val/1.jpg": [DOG]}
        assert found.dropped["annotated images that are not there"] == 1
        assert found.dropped["boxes of images that are not there"] == 1

    def test_faults(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "a.jpg")
        bad = [(1, ("cat", tuple(map(float, corners)))) for _, corners in BAD_CORNERS]
        document = coco(
            ["a.jpg", "a.jpg", "gone.jpg"], [(1, CAT), *bad, (9, CAT), (3, CAT)]
        )
        document["images"][1]["id"] = 1
        extra = document["annotations"]
        base = dict(extra[0])
        extra.append(base | dict(category_id=77))
        extra.append(base | dict(bbox=[1, 2, 3]))
        extra.append(base | dict(ignore=1, bbox=[1, 1, 5, 5]))
        extra.append(base | dict(iscrowd=1, bbox=[1, 1, 6, 6]))
        write(tmp_path / "train.json", json.dumps(document))
        found = read(tmp_path)
        assert found.boxes() == {"a.jpg": [CAT, ("cat", (1, 1, 7, 7))]}
        assert found.dropped == {
            **{reason: 1 for reason in BAD.values()},
            "image records without an id of their own": 1,
            "annotated images that are not there": 1,
            "boxes of images that are not there": 1,
            "boxes of images that the file does not list": 1,
            "boxes of an unknown category id": 1,
            "annotations without a bbox of four numbers": 1,
            "boxes marked 'ignore'": 1,
        }
        assert found.noted == {"boxes marked iscrowd: kept as crowd": 1}

    def test_broken_file(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "a.jpg")
        write(tmp_path / "train.json", '{"images": [], "annotations": [], "categories"')
        with pytest.raises(DataError, match=r"train\.json is not a JSON file"):
            read(tmp_path)

    def test_two_files_of_one_split_are_not_joined(
        self, tmp_path, write_image, write, read
    ):
        for year in (2014, 2017):
            write_image(tmp_path / f"train{year}/{year}.jpg")
            file = tmp_path / f"annotations/instances_train{year}.json"
            write(file, json.dumps(coco([f"{year}.jpg"])))
        with pytest.raises(
            ConfigError, match=r"only the lists .*train2014\.json.*train="
        ):
            read(tmp_path)
        file = "annotations/instances_train2017.json"
        found = read(tmp_path, train=(file,))
        assert found.boxes() == {"train2017/2017.jpg": [CAT]}


KITTI = "{} 0.00 0 -1.58 {} {} {} {} 1.6 1.7 3.9 1.8 1.5 8.4 0.01"


def kitti(label, corners):
    return KITTI.format(label, *corners)


class TestKitti:
    def test_devkit(self, tmp_path, write_image, write, read):
        for name in ("000000", "000001"):
            write_image(tmp_path / f"training/image_2/{name}.png")
            write_image(tmp_path / f"testing/image_2/{name}.png")
        labels = tmp_path / "training/label_2"
        write(
            labels / "000000.txt", f"{kitti(*CAT)}\n{kitti('DontCare', (0, 0, 9, 9))}"
        )
        write(labels / "000001.txt", f"{kitti(*DOG)}\n")
        found = read(tmp_path, val_share=0.0)
        assert found.splits == {
            "train": {
                "training/image_2/000000.png": [CAT],
                "training/image_2/000001.png": [DOG],
            }
        }
        assert found.dropped == {"DontCare regions": 1}
        example = found.summary.dropped["DontCare regions"].example
        assert example == "training/label_2/000000.txt:2"

    def test_a_score_makes_a_detection(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "image_2/0.png")
        write(tmp_path / "label_2/0.txt", f"{kitti(*CAT)}\n{kitti(*DOG)} -0.87\n")
        fault = r": 1 lines have a 16th .*label_2/0\.txt:2: -0\.87\): these are det"
        for told in (None, "kitti"):
            with pytest.raises(DataError, match=fault):
                read(tmp_path, format=told)
        found = read(tmp_path, format="kitti_detections")
        assert found.boxes() == {"image_2/0.png": [CAT, DOG]}
        assert found.noted == {"detections with a score taken as ground truth": 1}

    def test_lists(self, tmp_path, write_image, write, read):
        for name, box in (("0", CAT), ("1", DOG)):
            write_image(tmp_path / f"image_2/{name}.png")
            write(tmp_path / f"label_2/{name}.txt", kitti(*box))
        write(tmp_path / "ImageSets/train.txt", "1\n")
        write(tmp_path / "ImageSets/val.txt", "0\n")
        found = read(tmp_path)
        assert found.splits["train"] == {"image_2/1.png": [DOG]}
        assert found.splits["val"] == {"image_2/0.png": [CAT]}

    def test_lists_name_the_images_of_their_own_folder(
        self, tmp_path, write_image, write, read
    ):
        places = {"one/training": CAT, "one/testing": DOG, "two/training": DOG}
        for place, box in places.items():
            write_image(tmp_path / f"{place}/image_2/0.png")
            write(tmp_path / f"{place}/label_2/0.txt", kitti(*box))
        for folder in ("one", "two"):
            write(tmp_path / f"{folder}/ImageSets/train.txt", "0\n")
        assert read(tmp_path, val_share=0.0).splits["train"] == {
            "one/training/image_2/0.png": [CAT],
            "two/training/image_2/0.png": [DOG],
        }

    def test_faults(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "image_2/0.png")
        bad = [kitti("cat", corners) for _, corners in BAD_CORNERS]
        short = kitti(*DOG).rsplit(" ", 1)[0]
        write(tmp_path / "label_2/0.txt", "\n".join([kitti(*CAT), *bad, short]))
        write(tmp_path / "label_2/1.txt", kitti(*CAT))
        found = read(tmp_path)
        assert found.boxes() == {"image_2/0.png": [CAT]}
        assert found.dropped == {
            **{reason: 1 for reason in BAD.values()},
            "lines that are no KITTI label of 15 or 16 columns": 1,
            "annotation files without an image": 1,
        }


class TestDota:
    def test_enclosing_boxes(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "train/images/P1.png")
        write_image(tmp_path / "val/images/P2.png")
        write(
            tmp_path / "train/labelTxt/P1.txt",
            "imagesource:GoogleEarth\ngsd:0.146\n"
            "9.0 2.0 15.0 5.0 9.0 8.0 3.0 5.0 plane 0\n"  # a rhombus
            "1 1 5 1 5 5 1 5 small-vehicle 1\n",
        )
        write(tmp_path / "val/labelTxt/P2.txt", "1 1 5 1 5 5 1 5 plane\n")
        found = read(tmp_path)
        assert found.splits == {
            "train": {
                "train/images/P1.png": [
                    ("plane", (3, 2, 15, 8)),
                    ("small-vehicle", (1, 1, 5, 5)),
                ]
            },
            "val": {"val/images/P2.png": [("plane", (1, 1, 5, 5))]},
        }
        crowds = [a["iscrowd"] for a in found.documents["train"]["annotations"]]
        assert crowds == [0, 1]

    def test_faults(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "images/P1.png")
        lines = [
            "3 2 15 2 15 8 3 8 cat 0",
            "3 2 15 2 15 8 3 nan cat 0",
            "3 2 15 2 15 8 3 cat 0",
            "50 2 60 2 60 8 50 8 cat 0",
            "3 2 3 2 3 8 3 8 cat 0",
        ]
        write(tmp_path / "labelTxt/P1.txt", "\n".join(lines))
        found = read(tmp_path)
        assert found.boxes() == {"images/P1.png": [CAT]}
        assert found.dropped == {
            BAD["nan"]: 1,
            BAD["outside"]: 1,
            BAD["zero"]: 1,
            "lines that are no DOTA label (8 numbers, class, difficult)": 1,
        }


class TestWiderFace:
    @pytest.mark.parametrize("zeros", ["0 0 0 0 0 0 0 0 0 0 \n", ""])
    def test_blocks(self, tmp_path, write_image, write, read, zeros):
        for name in ("0--Parade/a", "0--Parade/b", "1--Hand/a"):
            write_image(tmp_path / f"WIDER_train/images/{name}.jpg")
        write_image(tmp_path / "WIDER_val/images/0--Parade/a.jpg")
        write(
            tmp_path / "wider_face_split/wider_face_train_bbx_gt.txt",
            f"0--Parade/a.jpg\n0\n{zeros}"
            "0--Parade/b.jpg\n2\n3 2 12 6 0 0 0 0 0 0 \n20 5 10 14 0 0 0 1 0 0 \n"
            "1--Hand/a.jpg\n1\n3 2 0 6 0 0 0 0 0 0 \n"
            "1--Hand/gone.jpg\n1\n3 2 3 6 0 0 0 0 0 0 \n",
        )
        text = "0--Parade/a.jpg\n1\n1 2 3 4 0 0 0 0 0 0\n"
        write(tmp_path / "wider_face_split/wider_face_val_bbx_gt.txt", text)
        found = read(tmp_path)
        face = ("face", CAT[1])
        assert found.splits["train"] == {
            "WIDER_train/images/0--Parade/a.jpg": [],
            "WIDER_train/images/0--Parade/b.jpg": [face, ("face", DOG[1])],
            "WIDER_train/images/1--Hand/a.jpg": [],
        }
        val = {"WIDER_val/images/0--Parade/a.jpg": [("face", (1, 2, 4, 6))]}
        assert found.splits["val"] == val
        crowds = [a["iscrowd"] for a in found.documents["train"]["annotations"]]
        assert crowds == [0, 1]
        assert found.dropped == {
            BAD["zero"]: 1,
            "annotated images that are not there": 1,
            "boxes of images that are not there": 1,
        }
        example = found.summary.dropped[BAD["zero"]].example
        assert example.startswith("wider_face_split/wider_face_train_bbx_gt.txt:")


CSV = "filename,class,xmin,ymin,xmax,ymax\na.jpg,cat,3,2,15,8\n"
NO_BOX = dict(id=9, image_id=1, category_id=5, bbox=["3", "2"])


@pytest.mark.parametrize(
    ("files", "quoted"),
    [
        ({"a.xml": xml(CAT, ("cat", ("x", 1, 9, 9)))}, "2: name 'cat', box 'x 1 9 9'"),
        ({"a.xml": xml(CAT), "b.xml": "<annotation><"}, "b.xml: unclosed token: line"),
        ({"a.xml": xml(CAT), "b.xml": "<note/>"}, "b.xml: <note>"),
        (
            {
                "a.json": json.dumps(
                    coco() | dict(annotations=[*coco()["annotations"], NO_BOX])
                )
            },
            "annotation 9: bbox is ['3', '2']",
        ),
        (
            {"label_2/a.txt": f"{kitti(*CAT)}\ncar 1"},
            "a.txt:2: 'car 1': 2 columns, but",
        ),
        (
            {"a.txt": "3 2 15 2 15 8 3 8 cat 0\n3 2 cat"},
            "a.txt:2: '3 2 cat': 3 columns",
        ),
        ({"x_bbx_gt.txt": "a.jpg\n2\n3 2 12 6\n3 x 4 4"}, "gt.txt:4: '3 x 4 4'"),
        ({"x_bbx_gt.txt": "a.jpg\n1\n3 2 12 6\nb.jpg\n3 2 4 4"}, "gt.txt:5: '3 2 4 4'"),
        ({"x.csv": f"{CSV}a.jpg,cat,3,x,15,8"}, "x.csv:3: 'a.jpg,cat,3,x,15,8'"),
    ],
)
def test_a_broken_record_is_quoted(tmp_path, write_image, write, read, files, quoted):
    write_image(tmp_path / "a.jpg")
    write_image(tmp_path / "b.jpg")
    for name, text in files.items():
        write(tmp_path / name, text)
    found = read(tmp_path)
    assert [corners for [(_, corners)] in filter(None, found.boxes().values())] == [
        CAT[1]
    ]
    assert quoted in str(found.summary.dropped).replace("\\'", "'")


class TestCsv:
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
    def test_columns(self, tmp_path, write_image, write, read, text):
        for name in "abc":
            write_image(tmp_path / f"images/{name}.jpg")
        write(tmp_path / "boxes.csv", text)
        found = read(tmp_path)
        assert found.boxes() == {"images/a.jpg": [CAT], "images/b.jpg": [DOG]}
        assert found.dropped == {"images without an annotation": 1}

    def test_files_of_splits(self, tmp_path, write_image, write, read):
        for name in "abc":
            write_image(tmp_path / f"{name}.jpg")
        header = "filename,class,xmin,ymin,xmax,ymax\n"
        for split, name in (("train", "a"), ("validation", "b"), ("test", "c")):
            write(
                tmp_path / f"{split}_labels.csv", f"{header}{name}.jpg,cat,3,2,15,8\n"
            )
        assert {k: list(v) for k, v in read(tmp_path).splits.items()} == {
            "train": ["a.jpg"],
            "val": ["b.jpg"],
            "test": ["c.jpg"],
        }

    def test_column_of_splits(self, tmp_path, write_image, write, read):
        for name in "ab":
            write_image(tmp_path / f"{name}.jpg")
        rows = "a.jpg,cat,3,2,15,8,TRAIN\nb.jpg,cat,3,2,15,8,VALIDATION\n"
        write(tmp_path / "x.csv", f"filename,class,xmin,ymin,xmax,ymax,set\n{rows}")
        found = read(tmp_path)
        assert list(found.splits["train"]) == ["a.jpg"]
        assert list(found.splits["val"]) == ["b.jpg"]

    def test_open_images_codes_and_groups(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "train/a.jpg")
        write(
            tmp_path / "train-annotations-bbox.csv",
            "ImageID,LabelName,XMin,XMax,YMin,YMax,IsGroupOf\n"
            "a,/m/01yrx,0.075,0.375,0.1,0.4,1\n",
        )
        write(tmp_path / "class-descriptions-boxable.csv", "/m/01yrx,cat\n")
        found = read(tmp_path)
        assert found.boxes() == {"train/a.jpg": [CAT]}
        assert found.documents["train"]["annotations"][0]["iscrowd"] == 1

    def test_image_without_objects(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "a.jpg")
        write_image(tmp_path / "b.jpg")
        write(tmp_path / "x.csv", "a.jpg,3,2,15,8,cat\nb.jpg,,,,,\n")
        found = read(tmp_path)
        assert found.boxes() == {"a.jpg": [CAT], "b.jpg": []}
        assert found.dropped == {}

    def test_faults(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "a.jpg")
        rows = [("cat", corners) for _, corners in BAD_CORNERS]
        rows = [CAT, *rows, ("", (1, 1, 5, 5)), ("cat", ("x", 1, 5, 5))]
        lines = [",".join(["a.jpg", k, *map(str, c)]) for k, c in rows]
        lines += ["gone.jpg,cat,1,1,5,5", "a.jpg,cat"]
        header = "filename,class,xmin,ymin,xmax,ymax"
        write(tmp_path / "x.csv", "\n".join([header, *lines]))
        found = read(tmp_path)
        assert found.boxes() == {"a.jpg": [CAT]}
        assert found.dropped == {
            **{reason: 1 for reason in BAD.values()},
            "rows without four numbers and a class": 3,
            "boxes of images that are not there": 1,
        }
        assert found.summary.dropped[BAD["outside"]].example == "x.csv:6"

    @pytest.mark.parametrize(
        "text",
        [
            "a.jpg,20,5,10,14,cat\na.jpg,25,15,10,4,dog\n",  # x, y, width, height
            "a.jpg,40,20,cat,3,2,15,8\n",
            "a.jpg,0,3,2,15,8\n",  # a class number first
            "cat,a.jpg,3,2,15,8\n",
        ],
    )
    def test_ambiguous_without_a_header(self, tmp_path, write_image, write, read, text):
        write_image(tmp_path / "a.jpg")
        write(tmp_path / "x.csv", text)
        with pytest.raises(DataError) as caught:
            read(tmp_path)
        assert "x.csv has no header, and " in str(caught.value)
        assert "Put a first line such as filename,xmin,ymin" in str(caught.value)

    def test_no_column_of_classes(self, tmp_path, write_image, write, read):
        write_image(tmp_path / "a.jpg")
        write(tmp_path / "x.csv", "filename,xmin,ymin,xmax,ymax\na.jpg,3,2,15,8\n")
        with pytest.raises(
            ConfigError, match=r"no column with class names.*classes=\["
        ):
            read(tmp_path)
        assert read(tmp_path, classes=("cat",)).boxes() == {"a.jpg": [CAT]}

    @pytest.mark.parametrize("header", ["filename,xmin,ymin,xmax,ymax,class\n", ""])
    def test_a_quote_that_is_not_closed(
        self, tmp_path, write_image, write, read, header
    ):
        """Everything behind it is one field, too long to be one."""
        write_image(tmp_path / "a.jpg")
        lines = ["a.jpg,3,2,15,8,cat"] * 9000
        text = header + "\n".join([lines[0], 'a.jpg,3,2,15,8,"cat', *lines])
        write(tmp_path / "x.csv", text)
        with pytest.raises(DataError, match=r"x\.csv cannot be read beyond line \d+"):
            read(tmp_path)

    def test_a_table_of_other_things_does_not_matter(
        self, tmp_path, write_image, write, read
    ):
        write_image(tmp_path / "a.jpg")
        write(tmp_path / "boxes.csv", "a.jpg,3,2,15,8,cat\n")
        write(tmp_path / "masks.csv", f"rle,score\n{'1 2 ' * 50_000},1\n")
        assert read(tmp_path).boxes() == {"a.jpg": [CAT]}
