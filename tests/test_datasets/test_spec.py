"""Entries of a mixture: what they may hold, and what follows from them."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from mmdet.datasets import CocoDataset, VOCDataset

from damex.datasets.coco_records import read_coco
from damex.datasets.entries import entry_of_folder
from damex.datasets.spec import DatasetSpec, parse_mixture
from damex.errors import ConfigError, DataError


def entry(name: str = "a", **changes):
    return {**dict(name=name, data_root=f"data/{name}/", train="t.json"), **changes}


def message(entries, error=ConfigError) -> str:
    with pytest.raises(error) as caught:
        parse_mixture(entries)
    return str(caught.value)


def test_parse_keeps_the_order_and_the_values():
    specs = parse_mixture([entry("b", weight=2, group="g"), entry("a", weight=0.5)])
    assert [spec.name for spec in specs] == ["b", "a"]
    assert [spec.weight for spec in specs] == [2, 0.5]
    assert [spec.group_name for spec in specs] == ["g", "a"]
    keys = ("data_root", "img", "rename", "classes", "root", "weight", "group", "val")
    given = dict(name="a", train="t.json")
    assert parse_mixture([{**given, **dict.fromkeys(keys)}]) == parse_mixture([given])


NAME = "[0].name must be a text without '/', and not '.' or '..', got "
LIST = "classes must be a list of names, got "
WEIGHT = "weight must be a number above 0 (remove the entry to leave it out), got "
TILE = "tile must be the side of a window in pixels, 16 or more, or 'auto', got "
ROOT = dict(root="r", data_root=None, train=None)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (dict(wieght=1), "[0] has the unknown key 'wieght'; did you mean 'weight'?"),
        *(
            (dict(name=name), f"{NAME}{name!r}")
            for name in (None, "", "a/b", "..", "a\\b", 3)
        ),
        *((dict(name=n), f"{n!r} is a row of the table") for n in ("mean", "pooled")),
        *((dict(name=n), f"{n!r} is a choice of --d") for n in ("auto", "all", "none")),
        *((dict(weight=w), f"{WEIGHT}{w!r}") for w in (0, -1.0, float("nan"), "2")),
        (dict(weight=float("inf")), f"{WEIGHT}inf"),
        (dict(weight=True), f"{WEIGHT}True"),
        *((dict(tile=t), f"{TILE}{t!r}") for t in (0, 15, True, "20", 32.0)),
        (dict(train=None), "('a'): no data; add root='<folder>', or data_"),
        (dict(data_root=3), "data_root must be a path, got 3"),
        (dict(root=["a"]), "root must be a path, got ['a']"),
        (dict(img=["i"]), "img must be a path, or a dict with one for each split, got"),
        (dict(img=dict(train=5)), "img must be a path, or a dict with one for each sp"),
        (dict(rename=[("a", "b")]), "rename must be a dict, got [('a', 'b')]"),
        (dict(group=2), "('a'): group must be a text, got 2"),
        *((dict(classes=value), f"{LIST}{value!r}") for value in (3, [1, 2], "car")),
        (dict(classes=["a", "b", "a"]), "name 1 and name 3 are both 'a'"),
        (dict(classes=["a", " "]), "name 2 is empty"),
        (dict(rename=dict(a="")), "rename must give the class 'a' a name, got ''"),
        (dict(rename=dict(a=None)), "rename must give the class 'a' a name, got None"),
        (dict(root="r"), "('a'): data_root cannot be combined with root="),
        (ROOT | dict(img="x/"), "img cannot be combined with root="),
        (ROOT | dict(train={}), "with root, train is a split, folder"),
        (ROOT | dict(format="vocc"), "format='vocc' is unknown; did you mean 'voc'?"),
        (ROOT | dict(val_share=1.0), "val_share must be a number from 0 to below 1"),
        (ROOT | dict(val_share="x"), "val_share must be a number"),
        (dict(format="voc"), "format needs root="),
        (dict(val_share=0.2), "val_share needs root="),
    ],
)
def test_an_entry_that_cannot_be_is_refused(changes, fault):
    text = message([entry(**changes)])
    assert text.startswith("mixture[0]")
    assert fault in text


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        ([], "one per dataset, got []; write mixture=[dict(name="),
        (
            dict(name="a", train="t.json"),
            "must be a list of dicts, one per dataset",
        ),
        (["coco"], "mixture[0] must be a dict(name="),
        (
            [entry("a", weight=2.0), entry("b"), entry("c")],
            "(a=2.0) but not for b, c; give every dataset a weight, or none",
        ),
        (
            [entry("a"), entry("b"), entry("a", train="other.json")],
            "mixture[2] and mixture[0] are both called 'a'",
        ),
        *(
            (
                [entry("a"), entry("b", train=train)],
                "mixture[1] ('b') trains on the same annotation file as mixture[0]",
            )
            for train in (
                "../a/t.json",
                dict(type="CocoDataset", data_root="data/a", ann_file="t.json"),
            )
        ),
        (
            [dict(name="a", root="r"), dict(name="b", root="./r/")],
            "mixture[1] ('b') trains on the same annotation file as mixture[0]",
        ),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(entries, fault):
    assert fault in message(entries)


def test_a_path_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    img = dict(train="~/tr/", val="va/")
    (spec,) = parse_mixture([entry(data_root="~/a", img=img)])
    assert spec.dataset_config("train")["data_root"] == "/home/me/a"
    assert spec.img == dict(train="/home/me/tr/", val="va/")
    voc = dict(type="VOCDataset", data_root="~/voc", ann_file="~/t.txt")
    (spec,) = parse_mixture([dict(name="a", train=voc)])
    config = spec.dataset_config("train")
    assert config["data_root"] == "/home/me/voc"
    assert config["ann_file"] == "/home/me/t.txt"
    assert voc["data_root"] == "~/voc"
    entries = [dict(name="a", root="~/x"), dict(name="b", root="/home/me/x")]
    assert "trains on the same annotation file as mixture[0]" in message(entries)


def test_test_split_falls_back_to_val_with_its_image_folder():
    spec = DatasetSpec("a", "r/", val="v.json", img=dict(train="tr/", val="va/"))
    config = spec.dataset_config("test")
    assert config["ann_file"] == "v.json"
    assert config["data_prefix"] == dict(img="va/")


def test_a_remote_folder_of_images_is_not_below_data_root():
    spec = DatasetSpec("a", "data/", train="t.json", img="s3://bucket/images")
    found = spec.coco_source("train")
    assert found[1:3] == (Path("data/t.json"), Path("s3://bucket/images"))


LVIS = dict(type="RepeatDataset", dataset=dict(type="LVISV1Dataset"))


@pytest.mark.parametrize(
    ("values", "split", "fault"),
    [
        (dict(img=dict(val="va/")), "train", "img names no folder for 'train', only f"),
        ({}, "val", "'a' has no 'val' entry; add val='<annotation file>'"),
        (dict(train=["a", "b"]), "train", "only an entry with root=... can have"),
        ({}, "valid", "split must be one of ('train', 'val', 'test'), got 'valid'"),
        (dict(train=dict(ann_file="x")), "train", "train is a dict without 'type'"),
        (
            dict(train=dict(type="VOCDatset", ann_file="x")),
            "train",
            "'VOCDatset'; did you mean 'VOCDataset'?",
        ),
        # Classes that mmdet would number in file order.
        (
            dict(train=LVIS, classes=("car",)),
            "train",
            "LVISV1Dataset, which numbers them in file",
        ),
    ],
)
def test_splits_that_cannot_be_loaded_are_refused(values, split, fault):
    with pytest.raises(ConfigError) as caught:
        DatasetSpec(**{**dict(name="a", train="t.json"), **values}).dataset_config(
            split
        )
    assert fault in str(caught.value)


@pytest.mark.parametrize("kind", ["CocoDataset", "mmdet.CocoDataset", CocoDataset])
def test_mmdets_coco_class_is_replaced_also_inside_wrappers(kind):
    part = dict(type=kind, ann_file="t.json")
    concat = dict(type="ConcatDataset", datasets=[part, dict(type="VOCDataset")])
    train = dict(type="RepeatDataset", times=2, dataset=concat)
    before = copy.deepcopy(train)
    config = DatasetSpec("a", train=train).dataset_config("train")
    inner = config["dataset"]["datasets"]
    assert [c["type"] for c in inner] == ["NamedCocoDataset", "VOCDataset"]
    assert train == before


VOC = VOCDataset.METAINFO["classes"]


@pytest.mark.parametrize(
    ("train", "classes"),
    [
        (dict(type="VOCDataset"), VOC),
        (dict(type=VOCDataset), VOC),
        (dict(type="ConcatDataset", datasets=[dict(type="VOCDataset")]), VOC),
        (dict(type="RepeatDataset", dataset=dict(type="VOCDataset")), VOC),
        (dict(type="XMLDataset", metainfo=dict(classes=["x", "y"])), ("x", "y")),
    ],
)
def test_own_classes_of_an_mmdet_class_are_its_metainfo(train, classes):
    assert DatasetSpec("voc", train=train).own_classes == classes


def test_dataset_that_names_no_classes():
    with pytest.raises(ConfigError, match=r"'a' names no classes; add classes=\["):
        _ = DatasetSpec("a", train=dict(type="XMLDataset")).own_classes


@pytest.mark.parametrize(
    "info",
    [
        {},
        dict(categories=[dict(name="not a class")]),
        dict(note='"categories": [{"name": "no"}]'),
    ],
    ids=["plain", "second key", "quoted"],
)
def test_own_classes_are_those_of_the_entry_or_the_file(two_datasets, edit_json, info):
    path = two_datasets[0]["data_root"] + "train.json"
    edit_json(path, lambda d: d.update(info=info))
    assert parse_mixture(two_datasets)[0].own_classes == ("car", "person", "bus")
    two_datasets[0]["classes"] = ["bus", "car"]
    assert parse_mixture(two_datasets)[0].own_classes == ("bus", "car")
    edit_json(path, lambda d: d["categories"].append(dict(id=9, name="bus")))
    del two_datasets[0]["classes"]
    with pytest.raises(DataError, match=r"'street': .*'bus': 2 categories have this"):
        _ = parse_mixture(two_datasets)[0].own_classes


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, r"the annotation file does not exist .*Correct data_root or train"),
        (b"images: []", "it is not a JSON"),
        (b"\xff\xfe\x00", "it is not a JSON"),
        (
            json.dumps(dict(images=[], annotations=[])).encode(),
            "the list 'categories' is missing",
        ),
        (b"[1, 2]", "with the lists images"),
    ],
)
def test_files_that_are_not_coco(tmp_path, content, fault):
    file = tmp_path / "t.json"
    if content is not None:
        file.write_bytes(content)
    spec = DatasetSpec("cars", f"{tmp_path}/", train="t.json")
    for read in (lambda: read_coco(file, "cars"), lambda: spec.own_classes):
        with pytest.raises(DataError, match=f"dataset 'cars': {file}: .*{fault}"):
            read()


def test_a_command_line_may_rename_a_number():
    spec = DatasetSpec.from_config(dict(ROOT, name="digits", rename={7: "seven"}), 0)
    assert spec.rename == {"7": "seven"}


def test_a_folder_of_the_training_is_read_as_it_was(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    trained = dict(name="a", root="one", val="test.json", classes=["x"])
    assert entry_of_folder("a", tmp_path / "one", [trained | {"weight": 1}]) == trained
    other = dict(name="a", root="two", classes=["x"])
    assert entry_of_folder("a", "two", [trained]) == other
    assert entry_of_folder("b", "one", [trained]) == dict(name="b", root="one")
