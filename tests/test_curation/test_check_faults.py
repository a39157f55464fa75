"""One fault in a clean dataset: the check names it, file and record, and no more."""

import contextlib
import json
import math
import random
import re
from pathlib import Path
from typing import ClassVar

import pytest
from mmdet.datasets import BaseDetDataset
from mmengine.config import Config
from mmengine.fileio import BaseStorageBackend, register_backend
from PIL import Image

from damex.curation.dataset_features import box_statistics
from damex.curation.labels import count_classes
from damex.curation.sources import expectations
from damex.datasets.coco import NamedCocoDataset
from damex.datasets.coco_checks import check_coco
from damex.datasets.coco_records import Expectations, read_coco
from damex.datasets.findings import KINDS, LEVELS, Place
from damex.datasets.image_checks import ImageRecord, check_image
from damex.datasets.mixture import MixtureDataset
from damex.datasets.mmdet_configs import image_scales
from damex.datasets.spec import DatasetSpec, parse_mixture
from damex.errors import ConfigError, DataError
from tests.test_curation.conftest import CLASSES, SIZE, document, picture

FAULTS = {}
LOAD = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations", with_bbox=True)]
PACK = dict(type="PackDetInputs")


def loader(*transforms, load=LOAD, **options):
    """A dataloader of a config, with transforms between loading and packing."""
    return dict(dataset=dict(pipeline=[*load, *transforms, PACK], **options))


def fault(kind, record, *, file="train.json", level=None, **check):
    """A function that plants a fault, with the finding that it must lead to."""

    def register(plant):
        expected = (level or KINDS[kind].level, kind, file, record)
        FAULTS[plant.__name__] = (plant, expected, check)
        return plant

    return register


# The file.
@fault("file-missing", None, file="trian.json", entry=dict(train="trian.json"))
def no_annotation_file(data):
    pass


@fault("not-json", None)
def half_a_json(data):
    data.text["train"] = '{"images": [], "annotations": ['


@fault("missing-list", "annotations")
def no_annotations(data):
    del data.train["annotations"]


@fault("wrong-type", None)
def a_list_for_a_document(data):
    data.text["train"] = "[]"


@fault("wrong-type", "categories")
def categories_are_an_object(data):
    data.train["categories"] = {"1": "car"}


@fault("wrong-type", "annotation number 43 of the list")
def annotation_is_a_text(data):
    data.train["annotations"].append("car")


@fault("wrong-type", "image 3")
def width_is_a_text(data):
    data.train["images"][2]["width"] = "96"


@fault("missing-field", "image 3")
def no_height(data):
    del data.train["images"][2]["height"]


@fault("missing-field", "annotation number 5 of the list")
def annotation_without_id(data):
    del data.train["annotations"][4]["id"]


@fault("missing-field", "annotation 7")
def annotation_without_class(data):
    del data.train["annotations"][4]["category_id"]


# Ids.
@fault("duplicate-image-id", "image 3")
def image_id_twice(data):
    data.train["images"][3]["id"] = 3
    for record in data.train["annotations"]:
        record["image_id"] = 3 if record["image_id"] == 4 else record["image_id"]


@fault("duplicate-annotation-id", "annotation 7")
def annotation_id_twice(data):
    data.train["annotations"][5]["id"] = 7


@fault("duplicate-category-id", "category 2")
def category_id_twice(data):
    data.train["categories"].append(dict(id=2, name="bush"))


@fault("duplicate-file-name", "image 99")
def file_name_twice(data):
    data.train["images"].append({**data.train["images"][4], "id": 99})
    again = {**data.train["annotations"][0], "id": 990, "image_id": 99}
    data.train["annotations"].append(again)


@fault("unknown-image-id", "annotation 7")
def annotation_of_no_image(data):
    data.train["annotations"][4]["image_id"] = 777


@fault("unknown-image-id", "annotation 7")
def image_id_as_text(data):
    data.train["annotations"][4]["image_id"] = "2"


@fault("unknown-category-id", "annotation 7")
def annotation_of_no_class(data):
    data.train["annotations"][4]["category_id"] = 0


# Boxes.
def set_box(data, box):
    record = data.train["annotations"][4]
    record["bbox"] = box
    record["area"] = abs(box[2] * box[3]) if len(box) == 4 else 1


BOXES = {
    "three_numbers": ("box-format", [1, 2, 3]),
    "a_text_in_a_box": ("box-format", [1, 2, "3", 4]),
    "a_null_in_a_box": ("box-format", [1, None, 3, 4]),
    "nan_in_a_box": ("box-not-finite", [1, math.nan, 3, 4]),
    "infinity_in_a_box": ("box-not-finite", [1, 2, math.inf, 4]),
    "box_right_of_image": ("box-outside", [96, 2, 20, 20]),
    "box_above_image": ("box-outside", [5, -30, 20, 20]),
    "box_over_the_border": ("box-partly-outside", [80, 2, 17.5, 20]),
    "box_over_the_corner": ("box-partly-outside", [-1.5, 2, 20, 20]),
    "box_without_width": ("box-zero-size", [5, 5, 0, 10]),
    "box_without_height": ("box-zero-size", [5, 5, 10, 0]),
    "box_with_negative_width": ("box-negative", [40, 5, -20, 10]),
    "box_with_negative_height": ("box-negative", [40, 30, 20, -10]),
    "box_below_a_pixel": ("box-thin", [5, 5, 0.5, 10]),
}
for _name, (_kind, _box) in BOXES.items():

    def _plant(data, box=_box):
        data.train["annotations"][4]["bbox"] = box
        finite = [v for v in box if isinstance(v, (int, float)) and math.isfinite(v)]
        data.train["annotations"][4]["area"] = (
            abs(box[2] * box[3]) if len(finite) == 4 else 1
        )

    _plant.__name__ = _name
    fault(_kind, "annotation 7")(_plant)


@fault(
    "box-outside",
    "annotation 7",
    level="warning",
    train_dataloader=loader(on_bad_box="drop"),
)
def box_outside_that_is_dropped(data):
    set_box(data, [96, 2, 20, 20])


@fault("box-xyxy", None)
def boxes_are_corners(data):
    for record in data.train["annotations"]:
        x, y, w, h = record["bbox"]
        record["bbox"] = [x, y, x + w, y + h]
        record["area"] = (x + w) * (y + h)


@fault("box-normalised", None)
def boxes_are_shares(data):
    for record in data.train["annotations"]:
        x, y, w, h = record["bbox"]
        record["bbox"] = [x / SIZE[0], y / SIZE[1], w / SIZE[0], h / SIZE[1]]


@fault("duplicate-box", "annotation 1000")
def same_box_twice(data):
    record = data.train["annotations"][4]
    data.train["annotations"].append({**record, "id": 1000})


@fault("area-missing", None)
def no_area(data):
    del data.train["annotations"][4]["area"]


@fault("area-zero", "annotation 7")
def area_of_nothing(data):
    data.train["annotations"][4]["area"] = 0


@fault("area-inconsistent", "annotation 7")
def area_above_that_of_the_box(data):
    data.train["annotations"][4]["area"] *= 4


@fault("area-inconsistent", "annotation 7", level="info")
def area_below_that_of_the_box(data):
    data.train["annotations"][4]["area"] /= 4


SCALE = loader(dict(type="Resize", scale=(48, 48), keep_ratio=True))


@fault("box-tiny", "class 'tree'", train_dataloader=SCALE)
def boxes_that_scaling_makes_tiny(data):
    for record in data.train["annotations"]:
        if record["category_id"] == 2:
            record["bbox"][2:], record["area"] = [6, 6], 36


# Classes.
@fault("duplicate-class-name", "class 'tree'")
def class_name_twice(data):
    data.train["categories"].append(dict(id=4, name="tree"))


@fault("unused-class", "class 'bus'")
def class_without_boxes(data):
    for split in (data.train, data.val):
        split["categories"].append(dict(id=4, name="bus"))


@fault("class-not-in-file", "class 'tree'", file="val.json")
def class_that_val_calls_otherwise(data):
    data.val["categories"][1]["id"] = 9
    data.val["categories"].pop(1)
    keep = [r for r in data.val["annotations"] if r["category_id"] != 2]
    data.val["annotations"] = keep


@fault("class-not-in-train", "class 'bus'", file="val.json")
def class_that_train_does_not_list(data):
    data.val["categories"].append(dict(id=4, name="bus"))


@fault("class-only-in-val", "class 'bus'", file="val.json")
def class_with_boxes_in_val_alone(data):
    for split in (data.train, data.val):
        split["categories"].append(dict(id=4, name="bus"))
    data.val["annotations"][4]["category_id"] = 4


@fault("class-only-in-train", "class 'tree'", file="val.json")
def class_without_boxes_in_val(data):
    keep = [r for r in data.val["annotations"] if r["category_id"] != 2]
    data.val["annotations"] = keep


@fault("few-boxes", "class 'tree'")
def class_with_nine_boxes(data):
    for record in data.train["annotations"][1::3][9:]:
        record["category_id"] = 1


@pytest.mark.parametrize("names", [("Tree", "tree"), ("trees", "tree"), ("a b", "a_b")])
def test_similar_names_are_pointed_out(dataset, names):
    for split in (dataset.train, dataset.val):
        split["categories"][0]["name"] = names[0]
        split["categories"][1]["name"] = names[1]
    [finding] = dataset.check()
    assert (finding.kind, finding.record) == (
        "similar-class-names",
        f"class {names[1]!r}",
    )
    merged = dataset.check(entry=dict(rename={names[1]: names[0]}))
    assert merged == []


@pytest.mark.parametrize("names", [("car", "cart"), ("glass", "glas"), ("c1", "c11")])
def test_other_names_are_not(dataset, names):
    for split in (dataset.train, dataset.val):
        split["categories"][0]["name"] = names[0]
        split["categories"][1]["name"] = names[1]
    assert dataset.check() == []


@fault("dummy-class", "class 'street'")
def category_of_an_exporter(data):
    for split in (data.train, data.val):
        for category in split["categories"]:
            category["supercategory"] = "street"
        none = dict(id=0, name="street", supercategory="none")
        split["categories"].insert(0, none)


@fault("dummy-class", "class '__background__'")
def background_as_a_class(data):
    for split in (data.train, data.val):
        split["categories"].append(dict(id=9, name="__background__"))


@fault("unknown-class", "class 'tre'", entry=dict(rename={"tre": "plant"}))
def rename_with_a_typo(data):
    pass


@fault("class-not-used", "class 'tree'", entry=dict(classes=["car", "person"]))
def class_that_the_entry_leaves_out(data):
    data.val["annotations"] = [
        record for record in data.val["annotations"] if record["category_id"] != 2
    ]
    data.train["annotations"][4]["bbox"] = "no box"


@fault("image-without-boxes", "image 2")
def image_without_boxes(data):
    keep = [r for r in data.train["annotations"] if r["image_id"] != 2]
    data.train["annotations"] = keep


@fault("many-boxes", "image 2", model=dict(num_queries=3))
def more_boxes_than_queries(data):
    record = {**data.train["annotations"][4], "id": 1000, "bbox": [1, 1, 9, 9]}
    data.train["annotations"].append({**record, "area": 81})


@fault("nothing-to-train", None)
def crowds_alone(data):
    for record in data.train["annotations"]:
        record["iscrowd"] = 1


@fault("box-ignored", "annotation 7")
def box_marked_ignore(data):
    data.train["annotations"][4]["ignore"] = 1


# The entry.
@fault(
    "split-missing",
    None,
    file="its mixture entry",
    entry=dict(val=None),
    val_dataloader=loader(),
)
def no_validation_split(data):
    pass


@fault(
    "not-loaded",
    None,
    file="its mixture entry",
    entry=dict(img={"train": "images"}),
)
def no_folder_of_validation_images(data):
    pass


# Image files.
@fault(
    "folder-missing",
    None,
    file="photos",
    entry=dict(img=dict(train="photos", val="images")),
)
def no_folder_of_images(data):
    pass


@fault("image-missing", "image 2", file="2.jpg")
def no_image_file(data):
    data.image(2).unlink()


@fault("image-missing", "image 16", file="16.jpg")
def no_validation_image(data):
    data.image(16).unlink()


@fault("image-missing", "image 2", file="2.JPG")
def file_name_in_another_case(data):
    data.train["images"][1]["file_name"] = "2.JPG"


@fault("image-empty", "image 2", file="2.jpg")
def image_of_no_bytes(data):
    data.image(2).write_bytes(b"")


@fault("image-unreadable", "image 2", file="2.jpg")
def web_page_in_place_of_an_image(data):
    data.image(2).write_text("<html>404 not found</html>")


@fault("image-truncated", "image 2", file="2.jpg")
def half_an_image(data):
    content = data.image(2).read_bytes()
    data.image(2).write_bytes(content[: len(content) // 2])


@fault("image-unreadable", "image 2", file="2.jpg")
def format_that_opencv_does_not_read(data):
    picture(2).save(data.image(2), "PCX")


@fault(
    "image-elongated",
    "image 2",
    file="2.jpg",
    train_dataloader=SCALE,
)
def image_that_scaling_makes_empty(data):
    elongated(data)


@fault("image-size", "image 2", file="2.jpg")
def image_of_another_size(data):
    data.save_image(2, picture(2, (192, 128)))


@fault("image-size", "image 2", file="2.jpg")
def width_and_height_exchanged(data):
    data.train["images"][1].update(width=SIZE[1], height=SIZE[0])
    for record in data.train["annotations"][3:6]:
        record.update(bbox=[1 + record["id"], 1, 10, 10], area=100)


@fault("image-suffix", "image 2", file="2.jpg")
def png_called_jpg(data):
    picture(2).convert("RGBA").save(data.image(2), "PNG")


def rotated(data, orientation, picture_size):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data.save_image(2, picture(2, picture_size), exif=exif)


@fault("image-rotated", "image 2", file="2.jpg")
def boxes_for_the_unrotated_image(data):
    rotated(data, 6, SIZE)


@fault("image-rotated", "image 2", file="2.jpg", level="info")
def boxes_for_the_rotated_image(data):
    rotated(data, 6, SIZE[::-1])


@fault("image-rotated", "image 2", file="2.jpg", level="warning")
def image_upside_down(data):
    rotated(data, 3, SIZE)


IGNORED = dict(type="LoadImageFromFile", color_type="color_ignore_orientation")


@fault(
    "image-rotated",
    "image 2",
    file="2.jpg",
    train_dataloader=loader(load=[IGNORED, LOAD[1]]),
)
def boxes_for_the_rotated_image_that_is_not_rotated(data):
    rotated(data, 6, SIZE[::-1])


# Across images.
@fault("leak-identical", "image 16", file="16.jpg")
def training_image_in_val(data):
    data.image(16).write_bytes(data.image(2).read_bytes())


@fault("duplicate-image", "image 5", file="5.jpg")
def same_content_twice(data):
    data.image(5).write_bytes(data.image(2).read_bytes())


def copy_boxes(data, source, target):
    records = [*data.train["annotations"], *data.val["annotations"]]
    boxes = [one["bbox"] for one in records if one["image_id"] == source]
    copies = [one for one in records if one["image_id"] == target]
    for record, bbox in zip(copies, boxes, strict=True):
        record.update(bbox=bbox, area=bbox[2] * bbox[3])


@fault("leak-near", "image 16", file="16.jpg")
def training_image_compressed_anew_in_val(data):
    Image.open(data.image(2)).save(data.image(16), quality=30)
    copy_boxes(data, 2, 16)


@fault("near-duplicate-image", "image 5", file="5.jpg")
def brighter_copy(data):
    picture(2).point(lambda value: 20 + 0.9 * value).save(data.image(5))
    copy_boxes(data, 2, 5)


@fault("fixed-camera", None, file="val.json")
def the_same_scene_with_other_objects(data):
    Image.open(data.image(2)).save(data.image(16), quality=30)


def found_in(findings, root):
    """Level, kind, file and record; of files their names."""
    return [(f.level, f.kind, f.file.split("/")[-1], f.record) for f in findings]


def test_a_clean_dataset_has_no_findings(dataset):
    assert dataset.check() == []
    assert dataset.check(quick=True) == []


@pytest.mark.parametrize("name", FAULTS)
def test_the_fault_is_found_and_nothing_else(dataset, name):
    plant, expected, check = FAULTS[name]
    plant(dataset)
    findings = dataset.check(**check)
    assert found_in(findings, dataset.root) == [expected]
    message = findings[0].message
    assert len(message.splitlines()) == 1
    assert message.startswith("dataset 'street': ")
    assert str(findings[0].file) in message
    assert findings[0].record is None or findings[0].record in message


def test_a_fixed_camera_is_one_finding(dataset):
    """All images look alike; their boxes share no place, but for a copy."""
    for number in range(1, 21):
        picture(99).save(dataset.image(number), quality=60 + number)
    for record in [*dataset.train["annotations"], *dataset.val["annotations"]]:
        row, column = divmod(record["image_id"] - 1, 5)
        record.update(bbox=[19 * column, 12 * row, 12, 11], area=132)
    [found] = dataset.check()
    assert (found.kind, found.count) == ("fixed-camera", 19)
    copy_boxes(dataset, 3, 16)
    findings = {finding.kind: finding for finding in dataset.check()}
    assert findings.keys() == {"fixed-camera", "leak-near"}
    assert findings["fixed-camera"].count == 18
    assert "3.jpg (image 3 of" in findings["leak-near"].message


DECODED = {
    "fixed-camera",
    "image-truncated",
    "leak-near",
    "near-duplicate-image",
    "duplicate-image",
    "leak-identical",
}


@pytest.mark.parametrize(
    "name", [n for n, f in FAULTS.items() if f[1][1] not in DECODED]
)
def test_the_quick_check_finds_all_that_needs_no_decoding(dataset, name):
    plant, expected, check = FAULTS[name]
    plant(dataset)
    findings = dataset.check(quick=True, **check)
    assert [finding.kind for finding in findings] == [expected[1]]


def refusal_of(cfg):
    """Load every sample of a config; the error that ends it, empty if none does."""
    try:
        for split in ("train", "val"):
            options = cfg.get(f"{split}_dataloader", loader())["dataset"]
            dataset = MixtureDataset(datasets=cfg["mixture"], split=split, **options)
            for index in range(len(dataset)):
                dataset[index]
    except (ConfigError, DataError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", FAULTS)
def test_an_error_of_the_check_is_what_the_loader_refuses(dataset, name):
    """One list of rules: the loader raises an error if and only if there is one."""
    plant, (level, *_), check = FAULTS[name]
    plant(dataset)
    findings = dataset.check(**check)
    options = {key: value for key, value in check.items() if key != "entry"}
    refused = refusal_of({**dataset.config(**check.get("entry", {})), **options})
    assert bool(refused) == (level == "error"), refused
    if findings[0].record is not None and "rename" not in name:
        assert findings[0].record in refused or level != "error"


ODD, WRONG = {}, {}


def odd(plant):
    """Register data that is odd and has no error; returns the mixture entry."""
    ODD[plant.__name__] = plant
    return plant


def wrong(plant):
    """Register data with errors; returns the mixture entry."""
    WRONG[plant.__name__] = plant
    return plant


@odd
def a_pixel_of_rounding(data):
    data.train["images"][1].update(width=SIZE[0] - 1, height=SIZE[1] + 1)
    data.train["images"][2]["height"] = SIZE[1] - 0.4
    exif = Image.Exif()
    exif[0x0112] = 6
    data.save_image(4, picture(4, (SIZE[1] - 1, SIZE[0])), exif=exif)


@odd
def large_boxes_that_look_like_corners(data):
    for record in data.train["annotations"]:
        record.update(bbox=[3, 3, 95, 63], area=95 * 63)


@odd
def unknown_fields(data):
    data.train.update(info=dict(source="a"), licenses=[], extra=None)
    for key in ("images", "annotations", "categories"):
        for record in data.train[key]:
            record.update(source=3, place=None, score=math.nan, segmentation=[])


@odd
def names_with_quotes_and_other_letters(data):
    for split in (data.train, data.val):
        names = ("driver's license", 'a "b"\\n', "\u8eca")
        for category, name in zip(split["categories"], names, strict=True):
            category["name"] = name


@odd
def crowds_among_other_boxes(data):
    for record in data.train["annotations"][::2]:
        record["iscrowd"] = 1


@odd
def heading_with_the_name_of_a_class(data):
    for split in (data.train, data.val):
        for category in split["categories"]:
            category["supercategory"] = "car"
        split["categories"].insert(0, dict(id=0, name="car", supercategory="none"))


@odd
def training_image_without_boxes_that_is_missing(data):
    data.train["annotations"] = data.train["annotations"][3:]
    data.image(1).unlink()


@odd
def malformed_boxes_that_are_left_out_anyway(data):
    data.train["annotations"][3].update(image_id=777, bbox=None)
    data.train["annotations"][4].update(category_id=777, bbox=[math.nan])


@odd
def train_and_val_alike(data):
    data.val = data.train


@odd
def boxes_of_another_dataset_class(data):
    """What another class of mmdet hands over is taken as it is."""
    return dict(train=dict(type=OddDataset, path=f"{data.root}/images"))


def elongated(data):
    data.save_image(2, picture(2, (9600, 64)))
    data.train["images"][1]["width"] = 9600


@odd
def elongated_image_that_nothing_resizes(data):
    elongated(data)


@odd
def images_of_a_remote_storage(data):
    folder = data.root / "images"
    backend = type("Backend", (OddBackend,), dict(folder=folder))
    register_backend("odd", backend, force=True, prefixes="odd")
    return dict(
        data_root="",
        train=f"{data.root}/train.json",
        val=f"{data.root}/val.json",
        img="odd://bucket/",
    )


@wrong
def rename_of_a_heading(data):
    for split in (data.train, data.val):
        for category in split["categories"]:
            category["supercategory"] = "bus"
        split["categories"].insert(0, dict(id=0, name="bus"))
    return dict(rename=dict(bus="coach"))


@wrong
def rename_of_a_class_that_is_left_out(data):
    return dict(classes=["car", "person"], rename=dict(tree="plant"))


@wrong
def classes_with_a_typo(data):
    return dict(classes=["car", "tre"])


@wrong
def boxes_below_a_pixel(data):
    for record in data.train["annotations"]:
        record.update(bbox=[5, 5, 0.5, 10], area=5)


@wrong
def no_validation_images(data):
    data.val.update(images=[], annotations=[])


@wrong
def no_boxes(data):
    data.train["annotations"] = []


@wrong
def no_folder(data):
    return dict(root="/lost", data_root=None, img=None, train=None, val=None)


class OddBackend(BaseStorageBackend):
    """Files of a folder under an address."""

    def get(self, filepath):
        return (self.folder / Path(filepath).name).read_bytes()

    get_text = get


class OddDataset(BaseDetDataset):
    """Boxes outside of the image, negative ones, and none."""

    METAINFO: ClassVar = dict(classes=CLASSES)

    def __init__(self, *, path, **kwargs):
        self.path = path
        super().__init__(**kwargs)

    def load_data_list(self):
        boxes = ([500, 5, 520, 30], [9, 9, 3, 3], [1, 1, 30, 30])
        instances = [dict(bbox=b, bbox_label=0, ignore_flag=0) for b in boxes]
        return [dict(img_path=f"{self.path}/1.jpg", img_id=1, instances=instances)]


@pytest.mark.parametrize("name", ODD)
def test_odd_data_is_loaded_and_has_no_error(dataset, name):
    entry = ODD[name](dataset) or {}
    errors = [f for f in dataset.check(entry=entry) if f.level == "error"]
    assert (errors, refusal_of(dataset.config(**entry))) == ([], "")


@pytest.mark.parametrize("name", WRONG)
def test_wrong_data_is_refused_by_both(dataset, name):
    entry = WRONG[name](dataset) or {}
    assert "error" in {finding.level for finding in dataset.check(entry=entry)}
    assert refusal_of(dataset.config(**entry))


def test_a_box_error_names_the_option_to_type(dataset):
    set_box(dataset, [96, 2, 20, 20])
    [found] = dataset.check()
    typed = re.search("--cfg-options (.*)[.]", found.message)[1]
    cfg = Config(dict(train_dataloader=loader(), val_dataloader=loader()))
    cfg.merge_from_dict(dict(option.split("=") for option in typed.split()))
    assert refusal_of({**dataset.config(), **cfg}) == ""
    assert refusal_of(dataset.config()) == found.message


def random_mutation(rng, mutated):
    """Put a value of JSON where another one belongs."""
    values = (None, True, -1, 0, 2.5, 1e308, math.nan, math.inf, "", "7", [], {}, [1])
    key = rng.choice(["images", "annotations", "categories"])
    position = rng.randrange(len(mutated[key]))
    record = mutated[key][position]
    if rng.random() < 0.1:
        mutated[key][position] = rng.choice(values)
    elif isinstance(record, dict):
        record[rng.choice([*record, "segmentation"])] = rng.choice(values)


@pytest.mark.parametrize("seed", range(200))
def test_no_value_stops_the_check(seed):
    rng = random.Random(seed)
    mutated = document(range(1, 5))
    for _ in range(3):
        random_mutation(rng, mutated)
    expected = Expectations(scales=((48, 48),), num_queries=2)
    _, findings = check_coco(mutated, Place("street", "train.json"), expected)
    assert all(f.level in LEVELS and f.kind in KINDS for f in findings)
    json.dumps([finding.to_json() for finding in findings], allow_nan=False)


@pytest.mark.parametrize("seed", range(40))
def test_no_value_stops_what_else_reads_the_file(seed, tmp_path):
    """The loader, the table of classes and the plan refuse in a sentence, if at all."""
    rng = random.Random(seed)
    mutated = document(range(1, 5))
    for _ in range(2):
        random_mutation(rng, mutated)
    file = tmp_path / "train.json"
    file.write_text(json.dumps(mutated))
    spec = DatasetSpec("street", train=str(file))
    readers = (
        lambda: NamedCocoDataset(
            name="street",
            ann_file=str(file),
            metainfo=dict(classes=CLASSES),
            on_bad_box="drop",
        ),
        lambda: count_classes(spec, {}),
        lambda: box_statistics(read_coco(file, "street")),
    )
    for reader in readers:
        with contextlib.suppress(DataError):
            reader()


def test_an_area_of_null_is_that_of_the_box(dataset):
    """The check says so, and the loader does so."""
    for record in dataset.train["annotations"]:
        record["area"] = None
    assert {f.kind for f in dataset.check() if f.level == "error"} == set()
    loaded = MixtureDataset(datasets=dataset.config()["mixture"])
    assert loaded.sizes == [14]


def test_a_class_named_by_the_number_0_is_a_class(dataset):
    for split in (dataset.train, dataset.val):
        split["categories"][0]["name"] = 0
    found = dataset.check(entry=dict(classes=["0", "tree"]))
    assert {(f.kind, f.record) for f in found} == {("class-not-used", "class 'person'")}


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        (["Resize"], 1),
        (["RandomCrop", "Resize"], 0),
        (["FixScaleResize", "RandomCrop", "Resize"], 1),
    ],
)
def test_sizes_of_parts_of_an_image_are_not_those_of_images(steps, found):
    pipeline = [dict(type=step, scale=(9, 9), keep_ratio=True) for step in steps]
    assert len(image_scales([[pipeline]], keep_ratio=True)) == found


@pytest.mark.parametrize("scale", [(48, 32), [(24, 16), (48, 32)], (), 2])
def test_sizes_to_draw_from_count_by_the_largest(dataset, scale):
    pipeline = [dict(type="RandomResize", scale=scale)]
    (spec,) = parse_mixture(dataset.config()["mixture"])
    cfg = dict(train_dataloader=dict(dataset=dict(pipeline=pipeline)))
    found = expectations(cfg, spec, "train").scales
    assert max(found, default=None) == ((48.0, 32.0) if scale not in ((), 2) else None)


def test_a_file_name_too_long_for_a_file_is_a_missing_image(dataset):
    dataset.train["images"][0]["file_name"] = "x" * 300
    kinds = [f.kind for f in dataset.check(quick=True) if f.level == "error"]
    assert kinds == ["image-missing"]
    place = Place("street", "train.json")
    [found] = check_image(ImageRecord(place, "image 1", Path("x" * 300), None))
    assert found.kind == "image-missing"


def test_a_file_with_a_byte_order_mark_is_checked_and_loaded(dataset):
    dataset.text["train"] = "\ufeff" + json.dumps(dataset.train)
    assert dataset.check() == []
    assert MixtureDataset(datasets=dataset.config()["mixture"]).sizes == [14]


def test_every_kind_has_its_fault():
    untested = {"not-checked", "similar-class-names", "left-out", "noted", "no-images"}
    assert {expected[1] for _, expected, _ in FAULTS.values()} == {*KINDS} - untested


def test_the_documentation_lists_all_kinds():
    page = Path(__file__).parents[2] / "docs" / "checking-data.md"
    rows = [
        f"| `{kind}` | {found.level} | {found.meaning} |"
        for kind, found in KINDS.items()
    ]
    listed = [
        row for row in page.read_text("utf-8").splitlines() if row.startswith("| `")
    ]
    assert listed == rows
