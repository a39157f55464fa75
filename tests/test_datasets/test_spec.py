from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from mmdet.datasets import CocoDataset, VOCDataset

from damex.datasets.coco_records import read_coco
from damex.datasets.spec import DatasetSpec, parse_mixture
from damex.errors import ConfigError, DataError


def entry(name: str = "a", **changes):
    return dict(name=name, data_root=f"data/{name}/", train="t.json", **changes)


def message(entries, error=ConfigError) -> str:
    with pytest.raises(error) as caught:
        parse_mixture(entries)
    return str(caught.value)


def test_parse_keeps_the_order_and_the_values():
    specs = parse_mixture([entry("b", weight=2, group="g"), entry("a", weight=0.5)])
    assert [spec.name for spec in specs] == ["b", "a"]
    assert [spec.weight for spec in specs] == [2, 0.5]
    assert [spec.group_name for spec in specs] == ["g", "a"]


def test_unknown_key_is_refused_with_a_suggestion():
    text = message([entry(), entry("b", wieght=1)])
    assert "mixture[1] has the unknown key 'wieght'" in text
    assert "did you mean 'weight'?" in text


@pytest.mark.parametrize("name", [None, "", "a/b", 3])
def test_name_must_be_usable_in_score_keys(name):
    text = message([dict(name=name, train="t.json")])
    assert "mixture[0].name must be a non-empty string without '/'" in text
    assert repr(name) in text


@pytest.mark.parametrize("weight", [0, -1.0, float("nan"), float("inf"), "2"])
def test_weight_must_be_a_positive_number(weight):
    text = message([entry("cars", weight=weight)])
    assert "mixture[0] ('cars'): weight must be a number above 0" in text
    assert f"got {weight!r}" in text


def test_weights_for_some_datasets_only_are_refused():
    text = message([entry("a", weight=2.0), entry("b"), entry("c")])
    assert "a=2.0" in text
    assert "but not for b, c" in text
    assert "give every dataset a weight, or none" in text


def test_an_entry_without_data_is_refused():
    text = message([dict(name="cars", img="images/", root=None)])
    assert "mixture[0] ('cars') names no data; add root='<folder>', or data_" in text


def test_empty_mixture_is_refused():
    assert "mixture is empty; add one dict(name=" in message([])


@pytest.mark.parametrize(
    ("entries", "fault"),
    [
        (dict(name="a", train="t.json"), "must be a list of dicts, .* got a dict; wr"),
        (["coco"], r"mixture\[0\] must be a dict\(name=.* got 'coco'"),
    ],
)
def test_mixture_is_a_list_of_dicts(entries, fault):
    with pytest.raises(ConfigError, match=fault):
        parse_mixture(entries)


@pytest.mark.parametrize(
    ("key", "value", "kind"),
    [
        ("data_root", 3, "a path"),
        ("root", ["a"], "a path"),
        ("img", ["images"], "a path, or a dict with one for each split"),
        ("rename", [("a", "b")], "a dict"),
        ("group", 2, "a text"),
        ("classes", 3, "a list of names"),
        ("classes", [1, 2], "a list of names"),
    ],
)
def test_values_are_of_the_kind_that_a_key_takes(key, value, kind):
    text = message([dict(name="a", train="t.json", **{key: value})])
    assert f"mixture[0] ('a'): {key} must be {kind}, got {value!r}" in text


def test_none_is_as_if_a_key_were_not_there():
    keys = ("data_root", "img", "rename", "classes", "root", "weight", "group", "val")
    given = dict(name="a", train="t.json")
    assert parse_mixture([{**given, **dict.fromkeys(keys)}]) == parse_mixture([given])


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        *((name, "a row of the table of results") for name in ("mean", "pooled")),
        *((name, "a choice of --dataset") for name in ("auto", "all", "none")),
    ],
)
def test_words_with_a_meaning_are_no_names(name, fault):
    assert f"mixture[0].name: {name!r} is {fault}" in message([entry(name)])


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (dict(classes=["a", "b", "a"]), "name 1 and name 3 are both 'a'"),
        (dict(classes=["a", " "]), "name 2 is empty"),
        (dict(rename=dict(a="")), "rename must give the class 'a' a name, got ''"),
        (dict(rename=dict(a=None)), "rename must give the class 'a' a name, got None"),
    ],
)
def test_class_names_are_given_once_and_not_empty(changes, fault):
    text = message([entry("cars", **changes)])
    assert "mixture[0] ('cars'): " in text
    assert fault in text


def test_a_path_may_begin_with_the_home_folder(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    img = dict(train="~/tr/", val="va/")
    (spec,) = parse_mixture([dict(name="a", data_root="~/a", train="t.json", img=img)])
    config = spec.dataset_config("train")
    assert config["data_root"] == "/home/me/a"
    assert spec.img == dict(train="/home/me/tr/", val="va/")
    voc = dict(type="VOCDataset", data_root="~/voc", ann_file="~/t.txt")
    config = DatasetSpec.from_config(dict(name="a", train=voc), 0).dataset_config(
        "train"
    )
    assert (config["data_root"], config["ann_file"]) == (
        "/home/me/voc",
        "/home/me/t.txt",
    )
    assert voc["data_root"] == "~/voc"
    entries = [dict(name="a", root="~/x"), dict(name="b", root="/home/me/x")]
    assert "trains on the same annotation file as mixture[0]" in message(entries)


def test_a_name_may_occur_once():
    text = message([entry("a"), entry("b"), dict(name="a", train="other.json")])
    assert "mixture[2] and mixture[0] are both called 'a'" in text


@pytest.mark.parametrize(
    "train",
    [
        "../a/t.json",
        dict(type="CocoDataset", data_root="data/a", ann_file="t.json"),
    ],
    ids=["other spelling of the path", "as a dataset config"],
)
def test_a_training_file_may_occur_once(train):
    text = message([entry("a"), dict(name="b", data_root="data/b/", train=train)])
    assert "mixture[1] ('b') trains on the same annotation file as mixture[0]" in text
    assert "set its weight" in text


def test_test_split_falls_back_to_val_with_its_image_folder():
    spec = DatasetSpec("a", "r/", val="v.json", img=dict(train="tr/", val="va/"))
    config = spec.dataset_config("test")
    assert config["ann_file"] == "v.json"
    assert config["data_prefix"] == dict(img="va/")


def test_image_folder_missing_for_a_split():
    spec = DatasetSpec("a", train="t.json", img=dict(val="va/"))
    with pytest.raises(ConfigError, match="'a': img names no folder for 'train', only"):
        spec.dataset_config("train")


def test_split_without_entry_says_what_to_add():
    with pytest.raises(ConfigError, match=r"'a' has no 'val' entry; add val='<ann"):
        DatasetSpec("a", train="t.json").dataset_config("val")


def test_unknown_split():
    with pytest.raises(ConfigError, match=r"split must be one of .* got 'valid'"):
        DatasetSpec("a", train="t.json").source("valid")


def test_dataset_config_without_type():
    with pytest.raises(ConfigError, match="'a': train is a dict without 'type'"):
        DatasetSpec("a", train=dict(ann_file="t.json")).dataset_config("train")


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


def test_own_classes_are_the_categories_in_file_order(two_datasets):
    specs = parse_mixture(two_datasets)
    assert specs[0].own_classes == ("car", "person", "bus")
    assert specs[1].own_classes == ("person", "dog", "car")


def test_own_classes_follow_the_entry_before_the_file(two_datasets):
    spec = DatasetSpec.from_config({**two_datasets[0], "classes": ["bus", "car"]}, 0)
    assert spec.own_classes == ("bus", "car")


@pytest.mark.parametrize(
    "train",
    [
        dict(type="VOCDataset"),
        dict(type=VOCDataset),
        dict(type="ConcatDataset", datasets=[dict(type="VOCDataset")]),
        dict(type="RepeatDataset", dataset=dict(type="VOCDataset")),
    ],
)
def test_own_classes_of_an_mmdet_class_are_its_metainfo(train):
    spec = DatasetSpec("voc", train=train)
    assert spec.own_classes == VOCDataset.METAINFO["classes"]


def test_metainfo_of_a_dataset_config_names_the_classes():
    train = dict(type="XMLDataset", metainfo=dict(classes=["x", "y"]))
    assert DatasetSpec("a", train=train).own_classes == ("x", "y")


def test_dataset_that_names_no_classes():
    with pytest.raises(ConfigError, match=r"'a' names no classes; add classes=\["):
        _ = DatasetSpec("a", train=dict(type="XMLDataset")).own_classes


def test_wrong_annotation_path_names_dataset_path_and_mend(tmp_path):
    spec = DatasetSpec("cars", f"{tmp_path}/", train="typo.json")
    with pytest.raises(DataError) as caught:
        _ = spec.own_classes
    text = str(caught.value)
    assert "dataset 'cars': " in text
    assert "there is no such annotation file" in text
    assert str(tmp_path / "typo.json") in text
    assert "Correct data_root or train" in text


def test_a_remote_folder_of_images_is_not_below_data_root():
    spec = DatasetSpec("a", "data/", train="t.json", img="s3://bucket/images")
    assert spec.coco_source("train") == (
        Path("data/t.json"),
        Path("s3://bucket/images"),
    )


@pytest.mark.parametrize("content", [b"images: []", b"\xff\xfe\x00"])
def test_file_that_is_not_json(tmp_path, content):
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(DataError, match=r"'cars': .*t\.json: it is not a JSON"):
        read_coco(tmp_path / "t.json", "cars")


@pytest.mark.parametrize("document", [dict(images=[], annotations=[]), [1, 2]])
def test_file_that_is_not_coco(tmp_path, document):
    (tmp_path / "t.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"'cars': .*t\.json: .*list.? '?(cat|im)"):
        read_coco(tmp_path / "t.json", "cars")


@pytest.mark.parametrize(
    "info",
    [
        {},
        dict(categories=[dict(name="not a class")]),
        dict(note='"categories": [{"name": "no"}]'),
    ],
    ids=["plain", "second key", "quoted"],
)
def test_own_classes_are_those_at_the_top_of_the_file(two_datasets, edit_json, info):
    path = two_datasets[0]["data_root"] + "train.json"
    edit_json(path, lambda d: d.update(info=info))
    assert parse_mixture(two_datasets)[0].own_classes == ("car", "person", "bus")


def test_category_name_given_twice(two_datasets, edit_json):
    path = two_datasets[0]["data_root"] + "train.json"
    edit_json(path, lambda d: d["categories"].append(dict(id=9, name="bus")))
    with pytest.raises(DataError, match=r"'street': .*'bus': 2 categories have this"):
        _ = parse_mixture(two_datasets)[0].own_classes


def test_an_unknown_dataset_class_is_named_with_the_nearest_one():
    spec = DatasetSpec(name="a", train=dict(type="VOCDatset", ann_file="x"))
    with pytest.raises(ConfigError, match=r"'VOCDatset'; did you mean 'VOCDataset'\?"):
        spec.dataset_config("train")


def test_a_choice_of_classes_that_mmdet_would_number_by_file_is_refused():
    source = dict(type="RepeatDataset", dataset=dict(type="LVISV1Dataset"))
    spec = DatasetSpec(name="lvis", train=source, classes=("car",))
    with pytest.raises(ConfigError, match="LVISV1Dataset, which numbers them in file"):
        spec.dataset_config("train")
