from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path

import pytest
from mmdet.datasets import CocoDataset

from damex.datasets.coco import NamedCocoDataset
from damex.datasets.coco_records import read_class_names
from damex.errors import DataError

UNION = ("car", "person", "bus", "dog")


@pytest.fixture
def park(two_datasets):
    """Path of a file with the categories person, dog, car and 48 x 32 px images."""
    return Path(two_datasets[1]["data_root"]) / "train.json"


@pytest.fixture
def warnings(monkeypatch):
    """Warnings that the module logs."""
    seen: list[str] = []

    def log(text, *, level, **_):
        if level >= logging.WARNING:
            seen.append(text)

    monkeypatch.setattr("damex.datasets.coco.print_log", log)
    return seen


def load(path, classes=("person", "dog", "car"), **options):
    return NamedCocoDataset(
        name="park",
        ann_file=str(path),
        data_prefix=dict(img="images/"),
        metainfo=dict(classes=tuple(classes)),
        pipeline=[],
        **options,
    )


def names_in_file(path):
    """Class names per image, read without any COCO library."""
    document = json.loads(path.read_text())
    category = {c["id"]: c["name"] for c in document["categories"]}
    return [
        [
            category[a["category_id"]]
            for a in document["annotations"]
            if a["image_id"] == image["id"]
        ]
        for image in document["images"]
    ]


def names_in_dataset(dataset):
    classes = dataset.metainfo["classes"]
    return [
        [classes[k["bbox_label"]] for k in dataset.get_data_info(i)["instances"]]
        for i in range(len(dataset))
    ]


def set_record(key, number, **values):
    """An edit that overwrites fields of one record; None removes the field."""

    def change(document):
        record = document[key][number]
        record.update(values)
        for name in [name for name, value in values.items() if value is None]:
            del record[name]

    return change


def test_mmdet_mislabels_with_a_union_class_list_and_we_do_not(park):
    # mmdet numbers the categories that the file has, in file order (person, dog, car),
    # so that label 0 is person; UNION[0] is car.
    theirs = CocoDataset(
        ann_file=str(park),
        data_prefix=dict(img="images/"),
        metainfo=dict(classes=UNION),
        pipeline=[],
    )
    assert names_in_file(park)[0] == ["person", "dog"]
    assert names_in_dataset(theirs)[0] == ["car", "person"]
    with pytest.raises(DataError, match=r"'park': .* class 'bus': the file does not"):
        load(park, UNION)  # a class that the file lacks is never passed over
    ours = load(park, ["car", "person", "dog"])
    assert names_in_dataset(ours) == names_in_file(park)


@pytest.mark.parametrize("wanted", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("in_file", list(itertools.permutations(range(3))))
def test_labels_are_right_for_any_order_in_file_and_config(
    park, edit_json, in_file, wanted
):
    edit_json(
        park, lambda d: d.update(categories=[d["categories"][i] for i in in_file])
    )
    names = ("person", "dog", "car")
    dataset = load(park, [names[i] for i in wanted])
    assert names_in_dataset(dataset) == names_in_file(park)


def test_class_subset_leaves_out_other_boxes_and_other_images(park):
    # Classes of the three images: person dog | dog car | car person.
    dataset = load(park, ["dog"], filter_cfg=dict(filter_empty_gt=True))
    assert names_in_dataset(dataset) == [["dog"], ["dog"]]


def test_typo_in_a_class_name_is_refused_with_a_suggestion(park):
    with pytest.raises(DataError) as caught:
        load(park, ["persn"])
    text = str(caught.value)
    assert f"dataset 'park': {park}: class 'persn': the file does not list it" in text
    assert "did you mean 'person'? It has: person, dog, car." in text
    assert "Correct 'classes' in the mixture entry, or add it" in text


def test_missing_file(tmp_path):
    with pytest.raises(
        DataError, match=r"'park': .*no\.json: there is no such annotation file"
    ):
        load(tmp_path / "no.json")


@pytest.mark.parametrize(
    "box",
    [
        [48, 0, 5, 5],  # right
        [0, 32, 5, 5],  # below
        [-9, 0, 5, 5],  # left
        [-5, 0, 5, 5],  # left, touching the border
        [0, -5, 5, 5],  # above, touching the border
    ],
)
def test_box_outside_of_its_image(park, edit_json, warnings, box):
    edit_json(park, set_record("annotations", 3, bbox=box))
    with pytest.raises(DataError) as caught:
        load(park)
    text = str(caught.value)
    # Record 3 has id 4 and is the second box of the second image.
    assert f"dataset 'park': {park}: annotation 4 of image '1.png'" in text
    assert f"[x, y, width, height] = {box} lies outside of the image (48 x 32" in text
    assert "--cfg-options train_dataloader.dataset.on_bad_box=drop" in text
    dataset = load(park, on_bad_box="drop")
    assert names_in_dataset(dataset)[1] == ["dog"]
    assert warnings == [
        f"dataset 'park': {park}: 1 box-outside (a box wholly outside of its image) "
        "dropped."
    ]


def test_boxes_over_the_border_are_clipped_and_counted(park, edit_json, warnings):
    edit_json(park, set_record("annotations", 0, bbox=[-4, 20, 60, 20]))
    dataset = load(park)
    # x: -4..56 -> 0..48; y: 20..40 -> 20..32
    assert dataset.get_data_info(0)["instances"][0]["bbox"] == [0, 20, 48, 32]
    what = "1 box-partly-outside (clipped at the border by over 1 px)"
    assert warnings == [f"dataset 'park': {park}: {what}."]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (
            dict(bbox=[5, 5, 0.5, 9]),
            "box-thin (thinner than 1 px",
        ),
        (
            dict(bbox=[0, 0, 0, 0]),
            "box-zero-size (a side of 0 px",
        ),
        (dict(area=0), "area-zero (`area` is 0 or less"),
        (dict(ignore=1), "box-ignored (marked `ignore`"),
    ],
)
def test_every_box_left_out_is_counted(park, edit_json, warnings, values, reason):
    edit_json(park, set_record("annotations", 0, **values))
    assert names_in_dataset(load(park))[0] == ["dog"]
    left = f"{reason}: left out of training)"
    assert warnings == [f"dataset 'park': {park}: 1 {left}."]


@pytest.mark.parametrize("test_mode", [False, True])
@pytest.mark.parametrize("box", [[20, 5, -9, 9], [20, 25, 9, -9]])
def test_negative_side_is_said_as_such(park, edit_json, warnings, box, test_mode):
    edit_json(park, set_record("annotations", 0, bbox=box))
    with pytest.raises(DataError, match=r"annotation 1 .* negative width"):
        load(park, test_mode=test_mode)
    dataset = load(park, test_mode=test_mode, on_bad_box="drop")
    assert names_in_dataset(dataset)[0] == ["dog"]
    assert len(dataset.get_data_info(0).get("ground_truth", ["dog"])) == 1
    what = "1 box-negative (a negative width or height) dropped"
    assert warnings == [f"dataset 'park': {park}: {what}."]


def roboflow(document):
    """Put the dummy category of Roboflow's exports first."""
    for category in document["categories"]:
        category["supercategory"] = "animals"
    document["categories"].insert(0, dict(id=0, name="animals", supercategory="none"))


def test_heading_without_boxes_is_no_class(park, edit_json, warnings):
    edit_json(park, roboflow)
    names = read_class_names(park, "park")
    assert names == ("person", "dog", "car")
    assert names_in_dataset(load(park, names)) == names_in_file(park)
    what = "1 dummy-class (a category that is not a class of objects)"
    assert warnings == [f"dataset 'park': {park}: {what}."]


def test_heading_stays_where_the_classes_name_it(park, edit_json, warnings):
    edit_json(park, roboflow)
    dataset = load(park, ["animals", "person", "dog", "car"])
    assert dataset.metainfo["classes"][0] == "animals"
    assert names_in_dataset(dataset) == names_in_file(park)
    assert warnings == []


def test_heading_with_a_box_is_a_class(park, edit_json):
    edit_json(park, roboflow)
    edit_json(park, set_record("annotations", 0, category_id=0))
    names = read_class_names(park, "park")
    assert names == ("animals", "person", "dog", "car")
    assert names_in_dataset(load(park, names))[0] == ["animals", "dog"]


def test_heading_with_the_name_of_a_class(park, edit_json):
    def change(document):
        roboflow(document)
        document["categories"][0]["name"] = "dog"
        for category in document["categories"][1:]:
            category["supercategory"] = "dog"

    edit_json(park, change)
    names = read_class_names(park, "park")
    assert names == ("person", "dog", "car")
    assert names_in_dataset(load(park, names))[0] == ["person", "dog"]


def test_class_that_no_box_uses_stays(park, edit_json):
    edit_json(park, lambda d: d["categories"].append(dict(id=9, name="owl")))
    assert read_class_names(park, "park") == ("person", "dog", "car", "owl")


def test_clean_file_is_not_mentioned(park, warnings):
    load(park)
    assert warnings == []


def test_annotation_of_an_unknown_image_is_counted(park, edit_json, warnings):
    edit_json(park, set_record("annotations", 0, image_id=77))
    load(park)
    assert "1 unknown-image-id (an annotation of an image not listed)" in warnings[0]


def test_missing_area_follows_from_the_box(park, edit_json):
    edit_json(park, set_record("annotations", 0, bbox=[1, 2, 6, 7], area=None))
    info = load(park, test_mode=True).get_data_info(0)
    assert info["ground_truth"][0]["area"] == 42
    assert len(info["instances"]) == 2


@pytest.mark.parametrize("bbox", [None, [1, 2, 3], dict(x=1)])
def test_malformed_box(park, edit_json, bbox):
    edit_json(park, set_record("annotations", 0, bbox=bbox))
    with pytest.raises(
        DataError, match=r"annotation 1 of image '0\.png': bbox must be"
    ):
        load(park)


@pytest.mark.parametrize("key", ["file_name", "width", "height"])
def test_incomplete_image_record(park, edit_json, key):
    edit_json(park, set_record("images", 1, **{key: None}))
    with pytest.raises(DataError, match=f"'park': .*: image 2: there is no '{key}'"):
        load(park)


@pytest.mark.parametrize("key", ["images", "annotations", "categories"])
def test_id_given_twice(park, edit_json, key):
    edit_json(park, set_record(key, 1, id=1))
    with pytest.raises(DataError, match=f"'park': .*2 records of '{key}' have the id"):
        load(park)


def test_record_without_id(park, edit_json):
    edit_json(park, set_record("annotations", 1, id=None))
    with pytest.raises(DataError, match=r"annotation number 2 .*: there is no 'id'"):
        load(park)


@pytest.mark.parametrize("key", ["image_id", "category_id"])
def test_annotation_that_names_no_image_or_category(park, edit_json, key):
    edit_json(park, set_record("annotations", 2, **{key: None}))
    with pytest.raises(DataError, match=f"annotation 3: there is no '{key}'"):
        load(park)


def test_category_name_given_twice_would_lose_the_boxes_of_one(park, edit_json):
    edit_json(park, set_record("categories", 1, name="person"))
    with pytest.raises(DataError, match="class 'person': 2 categories have this name"):
        load(park, ["person"], test_mode=True)


def test_unknown_policy():
    with pytest.raises(ValueError, match=r"on_bad_box must be one of .* got 'skip'"):
        NamedCocoDataset(name="a", on_bad_box="skip", ann_file="t.json")


def test_ground_truth_is_the_file_with_crowds_areas_and_thin_boxes(park, edit_json):
    edit_json(park, set_record("annotations", 0, iscrowd=1, area=7.5))
    edit_json(park, set_record("annotations", 1, bbox=[40.5, 2, 20, 0.5], area=10))
    info = load(park, ["car", "dog", "person"], test_mode=True).get_data_info(0)
    records = json.loads(park.read_text())["annotations"][:2]
    assert info["ground_truth"] == [
        dict(bbox=records[0]["bbox"], label=2, area=7.5, iscrowd=1),
        dict(bbox=[40.5, 2, 20, 0.5], label=1, area=10, iscrowd=0),
    ]
    assert [k["ignore_flag"] for k in info["instances"]] == [1]


def test_ground_truth_is_only_for_evaluation(park):
    assert "ground_truth" not in load(park).get_data_info(0)
