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

from damex.datasets.coco import NamedCocoDataset
from damex.datasets.coco_checks import check_coco
from damex.datasets.coco_schema import Expectations
from damex.datasets.findings import LEVELS, RULES, Location
from damex.datasets.image_files import ImageRecord, check_image_file
from damex.datasets.mixture import MixtureDataset
from damex.datasets.mmdet_configs import image_scales
from damex.datasets.spec import DatasetSpec
from damex.errors import ConfigError, DataError
from damex.workbench.check.labels import count_classes
from tests.test_check.conftest import CLASSES, SIZE, document, picture
from tests.test_datasets.test_coco import set_record

LOAD = [dict(type="LoadImageFromFile"), dict(type="LoadAnnotations", with_bbox=True)]
PACK = dict(type="PackDetInputs")
IGNORED = dict(type="LoadImageFromFile", color_type="color_ignore_orientation")


def loader(*transforms, load=LOAD, **options):
    """A dataloader of a config, with transforms between loading and packing."""
    return dict(dataset=dict(pipeline=[*load, *transforms, PACK], **options))


SCALE = loader(dict(type="Resize", scale=(72, 72), keep_ratio=True))
HALF = loader(dict(type="Resize", scale=(48, 48), keep_ratio=True))


def edit(key, position, **fields):
    """Change, or remove, fields of a training record."""
    change = set_record(key, position, **fields)
    return lambda data: change(data.train)


def add(splits, **category):
    """List another category, first if its id is 0."""

    def plant(data):
        for split in splits.split():
            categories = getattr(data, split)["categories"]
            categories.insert(0 if category["id"] == 0 else 99, category)

    return plant


def each(key, change, split="train"):
    """Change all records of a list."""
    return lambda data: (
        [change(record) for record in getattr(data, split)[key]] and None
    )


def keep(test, *splits):
    """Leave out the annotations that fail a test."""

    def plant(data):
        for split in splits:
            document = getattr(data, split)
            document["annotations"] = [*filter(test, document["annotations"])]

    return plant


def text(content):
    return lambda data: data.text.update(train=content)


def box(*values):
    """Set the box of annotation 7, and its area."""
    finite = [v for v in values if isinstance(v, (int, float)) and math.isfinite(v)]
    area = abs(values[2] * values[3]) if len(finite) == 4 else 1
    return edit("annotations", 4, bbox=[*values], area=area)


def both(*plants):
    return lambda data: [plant(data) for plant in plants] and None


def nothing(data):
    """The entry is the fault."""


def corners(record):
    x, y, w, h = record["bbox"]
    record.update(bbox=[x, y, x + w, y + h], area=(x + w) * (y + h))


def to_the_left(record):
    """As corners, only 12 of 42 boxes then end far below the image."""
    record["bbox"][0] = 0


def shares(record):
    x, y, w, h = record["bbox"]
    record["bbox"] = [x / SIZE[0], y / SIZE[1], w / SIZE[0], h / SIZE[1]]


def one_image_id_twice(data):
    data.train["images"][3]["id"] = 3
    for record in data.train["annotations"]:
        record["image_id"] = 3 if record["image_id"] == 4 else record["image_id"]


def one_file_twice(data):
    data.train["images"].append({**data.train["images"][4], "id": 99})
    again = {**data.train["annotations"][0], "id": 990, "image_id": 99}
    data.train["annotations"].append(again)


def another_box(**fields):
    def plant(data):
        record = data.train["annotations"][4]
        data.train["annotations"].append({**record, "id": 1000, **fields})

    return plant


def tiny_trees(record):
    if record["category_id"] == 2:
        record["bbox"][2:], record["area"] = [5, 5], 25


def nine_trees(data):
    crowd, *rest = data.train["annotations"][1::3][9:]
    crowd["iscrowd"] = 1
    for record in rest:
        record["category_id"] = 1


def a_bus_in_val(data):
    data.val["annotations"][4]["category_id"] = 4


def heading(name):
    """A first category without boxes, which all others have as supercategory."""

    def plant(data):
        for split in ("train", "val"):
            each("categories", lambda c: c.update(supercategory=name), split)(data)
        add("train val", id=0, name=name, supercategory="none")(data)

    return plant


def half_an_image(data):
    content = data.image(2).read_bytes()
    data.image(2).write_bytes(content[: len(content) // 2])


def elongated(data):
    data.save_image(2, picture(2, (9600, 64)))
    data.train["images"][1]["width"] = 9600


def exchanged_sides(data):
    data.train["images"][1].update(width=SIZE[1], height=SIZE[0])
    for record in data.train["annotations"][3:6]:
        record.update(bbox=[1 + record["id"], 1, 10, 10], area=100)


def rotated(orientation, size):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return lambda data: data.save_image(2, picture(2, size), exif=exif)


def copy_file(source, target):
    return lambda data: data.image(target).write_bytes(data.image(source).read_bytes())


def compress(source, target):
    return lambda data: Image.open(data.image(source)).save(
        data.image(target), quality=30
    )


def brighten(data):
    picture(2).point(lambda value: 20 + 0.9 * value).save(data.image(5))


def copy_boxes(source, target):
    def plant(data):
        records = [*data.train["annotations"], *data.val["annotations"]]
        boxes = [one["bbox"] for one in records if one["image_id"] == source]
        copies = [one for one in records if one["image_id"] == target]
        for record, bbox in zip(copies, boxes, strict=True):
            record.update(bbox=bbox, area=bbox[2] * bbox[3])

    return plant


def no_tree(record):
    return record["category_id"] != 2


SEVEN, ENTRY = "annotation 7", "its mixture entry"
IMAGE = ("image 2", "2.jpg")
# Kind of the finding; its record, or record and file; the fault; other options: level
# and file of the finding, mixture entry and config.
FAULTS = [
    (
        "file-missing",
        (None, "trian.json"),
        nothing,
        dict(entry=dict(train="trian.json")),
    ),
    ("not-json", None, text('{"images": [], "annotations": [')),
    ("missing-list", "annotations", lambda data: data.train.pop("annotations")),
    ("wrong-type", None, text("[]")),
    (
        "wrong-type",
        "categories",
        lambda data: data.train.update(categories={"1": "car"}),
    ),
    (
        "wrong-type",
        "annotation number 43 of the list",
        lambda data: data.train["annotations"].append("car"),
    ),
    ("wrong-type", "image 3", edit("images", 2, width="96")),
    ("missing-field", "image 3", edit("images", 2, height=None)),
    (
        "missing-field",
        "annotation number 5 of the list",
        edit("annotations", 4, id=None),
    ),
    ("missing-field", SEVEN, edit("annotations", 4, category_id=None)),
    # Ids.
    ("duplicate-image-id", "image 3", one_image_id_twice),
    ("duplicate-annotation-id", SEVEN, edit("annotations", 5, id=7)),
    ("duplicate-category-id", "category 2", add("train", id=2, name="bush")),
    ("duplicate-file-name", "image 99", one_file_twice),
    ("unknown-image-id", SEVEN, edit("annotations", 4, image_id=777)),
    ("unknown-image-id", SEVEN, edit("annotations", 4, image_id="2")),
    ("unknown-category-id", SEVEN, edit("annotations", 4, category_id=0)),
    # Boxes.
    ("box-format", SEVEN, box(1, 2, 3)),
    ("box-format", SEVEN, box(1, 2, "3", 4)),
    ("box-format", SEVEN, box(1, None, 3, 4)),
    ("box-not-finite", SEVEN, box(1, math.nan, 3, 4)),
    ("box-not-finite", SEVEN, box(1, 2, math.inf, 4)),
    ("box-outside", SEVEN, box(96, 2, 20, 20)),
    ("box-outside", SEVEN, box(5, -30, 20, 20)),
    (
        "box-outside",
        SEVEN,
        box(96, 2, 20, 20),
        dict(level="warning", train_dataloader=loader(on_bad_box="drop")),
    ),
    ("box-partly-outside", SEVEN, box(80, 2, 17.5, 20)),
    ("box-partly-outside", SEVEN, box(-1.5, 2, 20, 20)),
    ("box-zero-size", SEVEN, box(5, 5, 0, 10)),
    ("box-zero-size", SEVEN, box(5, 5, 10, 0)),
    ("box-negative", SEVEN, box(40, 5, -20, 10)),
    ("box-negative", SEVEN, box(40, 30, 20, -10)),
    ("box-thin", SEVEN, box(5, 5, 0.5, 10)),
    ("box-xyxy", None, each("annotations", corners)),
    (
        "box-xyxy",
        None,
        both(each("annotations", to_the_left), each("annotations", corners)),
        dict(level="warning"),
    ),
    ("wrong-type", SEVEN, edit("annotations", 4, iscrowd="maybe")),
    ("wrong-type", SEVEN, edit("annotations", 4, iscrowd=-1)),
    ("wrong-type", SEVEN, edit("annotations", 4, ignore=[])),
    ("box-normalised", None, each("annotations", shares)),
    (
        "box-normalised",
        None,
        both(each("annotations", shares), box(-0.1, 0.7, 0.4, 0.4)),
    ),
    ("duplicate-box", "annotation 1000", another_box()),
    ("area-missing", None, edit("annotations", 4, area=None)),
    ("area-zero", SEVEN, edit("annotations", 4, area=0)),
    ("area-inconsistent", SEVEN, edit("annotations", 4, area=9999)),
    ("area-inconsistent", SEVEN, edit("annotations", 4, area=30), dict(level="info")),
    (
        "box-tiny",
        "class 'tree'",
        each("annotations", tiny_trees),
        dict(train_dataloader=SCALE),
    ),
    ("boxes-small", None, nothing, dict(train_dataloader=HALF)),
    ("box-ignored", SEVEN, edit("annotations", 4, ignore=1)),
    # Classes.
    ("duplicate-class-name", "class 'tree'", add("train", id=4, name="tree")),
    ("unused-class", "class 'bus'", add("train val", id=4, name="bus")),
    (
        "class-not-in-file",
        ("class 'tree'", "val.json"),
        both(lambda data: data.val["categories"].pop(1), keep(no_tree, "val")),
    ),
    ("class-not-in-train", ("class 'bus'", "val.json"), add("val", id=4, name="bus")),
    (
        "class-only-in-val",
        ("class 'bus'", "val.json"),
        both(add("train val", id=4, name="bus"), a_bus_in_val),
    ),
    ("class-only-in-train", ("class 'tree'", "val.json"), keep(no_tree, "val")),
    ("few-boxes", "class 'tree'", nine_trees),
    ("dummy-class", "class 'street'", heading("street")),
    (
        "dummy-class",
        "class '__background__'",
        add("train val", id=9, name="__background__"),
    ),
    (
        "unknown-class",
        "class 'tre'",
        nothing,
        dict(entry=dict(rename={"tre": "plant"})),
    ),
    (
        "class-not-used",
        "class 'tree'",
        both(keep(no_tree, "val"), edit("annotations", 4, bbox="no box")),
        dict(entry=dict(classes=["car", "person"])),
    ),
    # Images and their boxes.
    ("image-without-boxes", "image 2", keep(lambda r: r["image_id"] != 2, "train")),
    (
        "many-boxes",
        "image 2",
        another_box(bbox=[1, 1, 9, 9], area=81),
        dict(model=dict(num_queries=3)),
    ),
    ("nothing-to-train", None, each("annotations", lambda r: r.update(iscrowd=1))),
    # The entry.
    (
        "split-missing",
        (None, ENTRY),
        nothing,
        dict(entry=dict(val=None), val_dataloader=loader()),
    ),
    ("not-loaded", (None, ENTRY), nothing, dict(entry=dict(img={"train": "images"}))),
    # Image files.
    (
        "folder-missing",
        (None, "photos"),
        nothing,
        dict(entry=dict(img=dict(train="photos", val="images"))),
    ),
    ("image-missing", IMAGE, lambda data: data.image(2).unlink()),
    ("image-missing", ("image 16", "16.jpg"), lambda data: data.image(16).unlink()),
    ("image-missing", ("image 2", "2.JPG"), edit("images", 1, file_name="2.JPG")),
    ("image-empty", IMAGE, lambda data: data.image(2).write_bytes(b"")),
    ("image-unreadable", IMAGE, lambda data: data.image(2).write_text("<html>404")),
    ("image-unreadable", IMAGE, lambda data: picture(2).save(data.image(2), "PCX")),
    ("image-truncated", IMAGE, half_an_image),
    ("image-elongated", IMAGE, elongated, dict(train_dataloader=SCALE)),
    ("image-size", IMAGE, lambda data: data.save_image(2, picture(2, (192, 128)))),
    ("image-size", IMAGE, exchanged_sides),
    (
        "image-suffix",
        IMAGE,
        lambda data: picture(2).convert("RGBA").save(data.image(2), "PNG"),
    ),
    ("image-rotated", IMAGE, rotated(6, SIZE)),
    ("image-rotated", IMAGE, rotated(6, SIZE[::-1]), dict(level="info")),
    ("image-rotated", IMAGE, rotated(3, SIZE), dict(level="warning")),
    (
        "image-rotated",
        IMAGE,
        rotated(6, SIZE[::-1]),
        dict(train_dataloader=loader(load=[IGNORED, LOAD[1]])),
    ),
    # Across images.
    ("leak-identical", ("image 16", "16.jpg"), copy_file(2, 16)),
    ("duplicate-image", ("image 5", "5.jpg"), copy_file(2, 5)),
    ("leak-near", ("image 16", "16.jpg"), both(compress(2, 16), copy_boxes(2, 16))),
    ("near-duplicate-image", ("image 5", "5.jpg"), both(brighten, copy_boxes(2, 5))),
    ("fixed-camera", (None, "val.json"), compress(2, 16)),
]
DECODED = {"fixed-camera", "leak-near", "near-duplicate-image"}
DECODED |= {"duplicate-image", "leak-identical"}


def test_a_clean_dataset_has_no_findings(dataset):
    assert dataset.check() == []
    assert dataset.check(quick=True) == []


@pytest.mark.parametrize(
    ("scale", "tile", "found"),
    [(48, None, 1), (48, 48, 0), (48, "auto", 0), (72, None, 0)],
)
def test_windows_are_recommended_where_they_show_more_pixels(
    dataset, scale, tile, found
):
    """In windows of 48 of 96 pixels, boxes are as large as they are: 11 to 14."""
    resize = dict(type="Resize", scale=(scale, scale), keep_ratio=True)
    entry = {} if tile is None else dict(tile=tile)
    findings = dataset.check(train_dataloader=loader(resize), entry=entry)
    assert [one.kind for one in findings] == ["boxes-small"] * found
    assert all("42 of 42 boxes are below 16 px" in one.message for one in findings)
    text = (
        "=48) shows windows of 48 px, in which objects look larger; an image is then 6"
    )
    assert all(text in one.message for one in findings)


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


@pytest.mark.parametrize("fault", FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_fault_is_found_alone_and_refused_if_it_is_an_error(dataset, fault):
    """The loader raises an error if and only if the check has one."""
    kind, place, plant, *options = fault
    check = dict(*options)
    level = check.pop("level", RULES[kind].level)
    record, file = place if isinstance(place, tuple) else (place, "train.json")
    plant(dataset)
    [found] = dataset.check(**check)
    place = found.file.split("/")[-1]
    assert (found.level, found.kind, place, found.record) == (level, kind, file, record)
    assert len(found.message.splitlines()) == 1
    assert found.message.startswith("dataset 'street': ")
    assert str(found.file) in found.message
    assert record is None or record in found.message
    if kind not in DECODED:
        quick = dataset.check(quick=True, **check)
        assert [finding.kind for finding in quick] == [kind]
    entry = check.pop("entry", {})
    refused = refusal_of({**dataset.config(**entry), **check})
    assert bool(refused) == (level == "error"), refused
    if record is not None and "rename" not in entry:
        assert record in refused or level != "error"


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


def test_a_fixed_camera_is_one_finding(dataset):
    """All images look alike; their boxes share no place, but for a copy."""
    for number in range(1, 21):
        picture(99).save(dataset.image(number), quality=60 + number)
    for record in [*dataset.train["annotations"], *dataset.val["annotations"]]:
        row, column = divmod(record["image_id"] - 1, 5)
        record.update(bbox=[19 * column, 12 * row, 12, 11], area=132)
    [found] = dataset.check()
    assert (found.kind, found.count) == ("fixed-camera", 19)
    copy_boxes(3, 16)(dataset)
    findings = {finding.kind: finding for finding in dataset.check()}
    assert findings.keys() == {"fixed-camera", "leak-near"}
    assert findings["fixed-camera"].count == 18
    assert "3.jpg (image 3 of" in findings["leak-near"].message


def a_pixel_of_rounding(data):
    data.train["images"][1].update(width=SIZE[0] - 1, height=SIZE[1] + 1)
    data.train["images"][2]["height"] = SIZE[1] - 0.4
    exif = Image.Exif()
    exif[0x0112] = 6
    data.save_image(4, picture(4, (SIZE[1] - 1, SIZE[0])), exif=exif)


def unknown_fields(data):
    data.train.update(info=dict(source="a"), licenses=[], extra=None)
    for key in ("images", "annotations", "categories"):
        for record in data.train[key]:
            record.update(source=3, place=None, score=math.nan, segmentation=[])


def names_with_quotes_and_other_letters(data):
    for split in (data.train, data.val):
        names = ("driver's license", 'a "b"\\n', "\u8eca")
        for category, name in zip(split["categories"], names, strict=True):
            category["name"] = name


def training_image_without_boxes_that_is_missing(data):
    data.train["annotations"] = data.train["annotations"][3:]
    data.image(1).unlink()


def malformed_boxes_that_are_left_out_anyway(data):
    data.train["annotations"][3].update(image_id=777, bbox=None)
    data.train["annotations"][4].update(category_id=777, bbox=[math.nan])


def flags_as_text(data):
    for record in data.train["annotations"]:
        record.update(iscrowd="0", ignore="false")


def every_second_is_a_crowd(data):
    for record in data.train["annotations"][::2]:
        record["iscrowd"] = 1


def boxes_of_another_dataset_class(data):
    """What another class of mmdet returns is taken as it is."""
    return dict(train=dict(type=OddDataset, path=f"{data.root}/images"))


def images_of_a_remote_storage(data):
    backend = type("Backend", (OddBackend,), dict(folder=data.root / "images"))
    register_backend("odd", backend, force=True, prefixes="odd")
    splits = {split: f"{data.root}/{split}.json" for split in ("train", "val")}
    return dict(data_root="", **splits, img="odd://bucket/")


# Data without an error; some return the mixture entry.
ODD = [
    a_pixel_of_rounding,
    each("annotations", lambda r: r.update(bbox=[3, 3, 95, 63], area=95 * 63)),
    unknown_fields,
    names_with_quotes_and_other_letters,
    every_second_is_a_crowd,
    flags_as_text,
    heading("car"),
    training_image_without_boxes_that_is_missing,
    malformed_boxes_that_are_left_out_anyway,
    lambda data: setattr(data, "val", data.train),
    boxes_of_another_dataset_class,
    elongated,  # and nothing resizes it
    images_of_a_remote_storage,
]
# Changes of the data, and mixture entries, that are errors.
WRONG = [
    (heading("bus"), dict(rename=dict(bus="coach"))),
    (nothing, dict(classes=["car", "person"], rename=dict(tree="plant"))),
    (nothing, dict(classes=["car", "tre"])),
    (each("annotations", lambda r: r.update(bbox=[5, 5, 0.5, 10], area=5)), {}),
    (lambda data: data.val.update(images=[], annotations=[]), {}),
    (lambda data: data.train.update(annotations=[]), {}),
    (nothing, dict(root="/lost", data_root=None, img=None, train=None, val=None)),
]


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


@pytest.mark.parametrize("plant", ODD)
def test_odd_data_is_loaded_and_has_no_error(dataset, plant):
    entry = plant(dataset) or {}
    errors = [f for f in dataset.check(entry=entry) if f.level == "error"]
    assert (errors, refusal_of(dataset.config(**entry))) == ([], "")


@pytest.mark.parametrize(("plant", "entry"), WRONG)
def test_wrong_data_is_refused_by_both(dataset, plant, entry):
    plant(dataset)
    assert "error" in {finding.level for finding in dataset.check(entry=entry)}
    assert refusal_of(dataset.config(**entry))


def test_a_box_error_names_the_option_to_type(dataset):
    box(96, 2, 20, 20)(dataset)
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
    _, findings = check_coco(mutated, Location("street", "train.json"), expected)
    assert all(f.level in LEVELS and f.kind in RULES for f in findings)
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


@pytest.mark.parametrize(
    ("step", "found"),
    [
        (dict(type="Resize", scale=640), ((640, 640),)),
        (dict(type="Resize", scale=[48, 32]), ((48, 32),)),
        (dict(type="RandomChoiceResize", scales=[480, 512]), ((480, 480), (512, 512))),
        (dict(type="RandomChoiceResize", scales=[(48, 32)]), ((48, 32),)),
        (dict(type="RandomResize", scale=[(24, 16), (48, 32)]), ((24, 16), (48, 32))),
        (dict(type="ResizeShortestEdge", scale=480, max_size=600), ((600, 480),)),
        (dict(type="RandomResize", scale=()), ()),
        (dict(type="RandomResize", scale=0.5), ()),
    ],
)
def test_one_side_is_that_of_a_square_or_the_shorter(step, found):
    assert image_scales([step]) == found
    is_kept = "Shortest" in step["type"]  # without keep_ratio
    assert image_scales([step], keep_ratio=True) == (found if is_kept else ())


def test_a_file_name_too_long_for_a_file_is_a_missing_image(dataset):
    dataset.train["images"][0]["file_name"] = "x" * 300
    kinds = [f.kind for f in dataset.check(quick=True) if f.level == "error"]
    assert kinds == ["image-missing"]
    place = Location("street", "train.json")
    [found] = check_image_file(ImageRecord(place, "image 1", Path("x" * 300), None))
    assert found.kind == "image-missing"


def test_a_file_with_a_byte_order_mark_is_checked_and_loaded(dataset):
    dataset.text["train"] = "\ufeff" + json.dumps(dataset.train)
    assert dataset.check() == []
    assert MixtureDataset(datasets=dataset.config()["mixture"]).sizes == [14]


def test_every_kind_has_its_fault():
    untested = {"not-checked", "similar-class-names", "left-out", "noted", "no-images"}
    # In test_pixels.py and test_domains.py.
    untested |= {"image-depth", "looks-alike"}
    assert {kind for kind, *_ in FAULTS} == {*RULES} - untested


def test_the_documentation_lists_all_kinds():
    page = Path(__file__).parents[2] / "docs" / "guides" / "checking-data.md"
    table = page.read_text("utf-8").partition("\n## Kinds of findings\n")[2]
    rows = [
        f"| `{kind}` | {found.level} | {found.meaning} |"
        for kind, found in RULES.items()
    ]
    assert [row for row in table.splitlines() if row.startswith("| `")] == rows
