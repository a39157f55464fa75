from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path

import pytest

from damex.datasets.coco import NamedCocoDataset
from damex.datasets.coco_records import read_class_names
from damex.errors import DataError


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


@pytest.mark.parametrize("test_mode", [False, True])
@pytest.mark.parametrize(
    ("kind", "box"),
    [
        ("box-outside", [48, 0, 5, 5]),  # right
        ("box-outside", [0, 32, 5, 5]),  # below
        ("box-outside", [-9, 0, 5, 5]),  # left
        ("box-outside", [-5, 0, 5, 5]),  # left, touching the border
        ("box-outside", [0, -5, 5, 5]),  # above, touching the border
        ("box-negative", [20, 5, -9, 9]),
        ("box-negative", [20, 25, 9, -9]),
    ],
)
def test_boxes_that_are_refused_or_dropped(
    park, edit_json, warnings, kind, box, test_mode
):
    edit_json(park, set_record("annotations", 0, bbox=box))
    with pytest.raises(DataError) as caught:
        load(park, test_mode=test_mode)
    text = str(caught.value)
    assert f"dataset 'park': {park}: annotation 1 of image '0.png'" in text
    assert f"[x, y, width, height] = {box}" in text
    assert "--cfg-options train_dataloader.dataset.on_bad_box=drop" in text
    dataset = load(park, test_mode=test_mode, on_bad_box="drop")
    assert names_in_dataset(dataset)[0] == ["dog"]
    assert len(dataset.get_data_info(0).get("ground_truth", ["dog"])) == 1
    [warning] = warnings
    assert f"dataset 'park': {park}: 1 {kind}" in warning
    assert warning.endswith(" dropped.")


@pytest.mark.parametrize(
    ("values", "kind", "left"),
    [
        (dict(bbox=[5, 5, 0.5, 9]), "box-thin", ["dog"]),
        (dict(bbox=[0, 0, 0, 0]), "box-zero-size", ["dog"]),
        (dict(area=0), "area-zero", ["dog"]),
        (dict(ignore=1), "box-ignored", ["dog"]),
        (dict(image_id=77), "unknown-image-id", ["dog"]),
        (dict(bbox=[-4, 20, 60, 20]), "box-partly-outside", ["person", "dog"]),
        ({}, None, ["person", "dog"]),
    ],
)
def test_boxes_left_out_or_clipped_are_counted(
    park, edit_json, warnings, values, kind, left
):
    edit_json(park, set_record("annotations", 0, **values))
    dataset = load(park)
    assert names_in_dataset(dataset)[0] == left
    if kind == "box-partly-outside":  # x: -4..56 -> 0..48; y: 20..40 -> 20..32
        assert dataset.get_data_info(0)["instances"][0]["bbox"] == [0, 20, 48, 32]
    assert [f" 1 {kind} (" in warning for warning in warnings] == [True] * bool(kind)


def roboflow(document):
    """Put the dummy category of Roboflow's exports first."""
    for category in document["categories"]:
        category["supercategory"] = "animals"
    document["categories"].insert(0, dict(id=0, name="animals", supercategory="none"))


def rename_heading(document):
    document["categories"][0]["name"] = "dog"
    for category in document["categories"][1:]:
        category["supercategory"] = "dog"


@pytest.mark.parametrize(
    ("change", "names", "classes", "is_logged"),
    [
        (lambda d: None, ("person", "dog", "car"), None, True),
        # The classes name the heading.
        (
            lambda d: None,
            ("person", "dog", "car"),
            ("animals", "person", "dog", "car"),
            False,
        ),
        # It has a box.
        (
            set_record("annotations", 0, category_id=0),
            ("animals", "person", "dog", "car"),
            None,
            False,
        ),
        # It has the name of a class.
        (rename_heading, ("person", "dog", "car"), None, True),
    ],
)
def test_headings_are_classes_if_used(
    park, edit_json, warnings, change, names, classes, is_logged
):
    edit_json(park, roboflow)
    edit_json(park, change)
    assert read_class_names(park, "park") == names
    dataset = load(park, classes or names)
    assert dataset.metainfo["classes"] == (classes or names)
    assert names_in_dataset(dataset) == names_in_file(park)
    found = ["1 dummy-class" in warning for warning in warnings]
    assert found == [True] * is_logged


@pytest.mark.parametrize(
    ("key", "used"), [("a", "a"), ("tiér", "tiér"), (1.5, 1.5), (1, 1.0), (1.0, 1)]
)
@pytest.mark.parametrize("is_ascii", [True, False])
def test_an_id_of_any_kind_counts_as_used(tmp_path, key, used, is_ascii):
    names = [dict(id=key, name="animal"), dict(id=2, name="x", supercategory="animal")]
    file = tmp_path / "train.json"
    content = dict(categories=names, annotations=[dict(id=1, category_id=used)])
    file.write_text(json.dumps(content, ensure_ascii=is_ascii), "utf-8")
    assert read_class_names(file, "park") == ("animal", "x")


def test_a_predicted_class_may_be_left_out(park, edit_json):
    edit_json(park, set_record("categories", 1, predicted=True))
    names = [one["name"] for one in json.loads(park.read_text())["categories"]]
    assert load(park, names).get_data_info(0)["predicted_labels"] == [1]
    others = [names[0], *names[2:]]
    assert load(park, others).get_data_info(0)["predicted_labels"] == []


def test_missing_area_follows_from_the_box(park, edit_json):
    edit_json(park, set_record("annotations", 0, bbox=[1, 2, 6, 7], area=None))
    info = load(park, test_mode=True).get_data_info(0)
    assert info["ground_truth"][0]["area"] == 42
    assert "ground_truth" not in load(park).get_data_info(0)
    assert len(info["instances"]) == 2


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
