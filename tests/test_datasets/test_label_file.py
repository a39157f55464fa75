"""Label spaces that a person wrote into a file."""

from __future__ import annotations

import json

import pytest

from damex.datasets.label_space import LabelFile, LabelSpace, read_label_space
from damex.datasets.spec import DatasetSpec
from damex.errors import ConfigError

VOC = DatasetSpec("voc", classes=("motorbike", "car", "bird"))
COCO = DatasetSpec("coco", classes=("car", "motorcycle"))
ZOO = DatasetSpec("zoo", classes=("jaguar", "bird", "do not use"))
CARS = DatasetSpec("cars", classes=("jaguar",), rename=dict())
CONTENT = dict(
    version=1,
    datasets=dict(
        voc=dict(motorbike="motorcycle"),
        zoo={"jaguar": "zoo/jaguar", "do not use": None},
    ),
)


@pytest.fixture
def path(tmp_path):
    """A label file, as a config names it."""
    (tmp_path / "labels.json").write_text(json.dumps(CONTENT))
    return str(tmp_path / "labels.json")


def make(content=CONTENT, specs=(VOC, COCO, ZOO, CARS)):
    return LabelSpace.from_specs(specs, mode=LabelFile.from_content(content))


def test_a_file_merges_keeps_apart_and_drops(path):
    space = LabelSpace.from_specs([VOC, COCO, ZOO, CARS], mode=path)
    # bird is not listed, and merges by name; so does car.
    assert space.classes == ("motorcycle", "car", "bird", "zoo/jaguar", "jaguar")
    assert [space.valid_labels(i) for i in range(4)] == [
        [0, 1, 2],
        [0, 1],
        [2, 3],
        [4],
    ]
    assert space.local_to_global(0, ["bird", "motorbike"]) == [2, 0]
    with pytest.raises(ConfigError, match="'zoo': class 'do not use' is not in the"):
        space.local_to_global(2, ["do not use"])
    assert LabelSpace.from_metainfo(json.loads(json.dumps(space.to_metainfo()))) == (
        space
    )


def test_a_file_may_lie_in_the_home_folder(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert LabelFile.read("~/labels.json").datasets == LabelFile.read(path).datasets


@pytest.mark.parametrize(
    ("unlisted", "classes"),
    [
        ("union", ("motorcycle", "car", "bird")),
        ("partitioned", ("motorcycle", "voc/car", "voc/bird", "coco/car")),
        ("drop", ("motorcycle",)),
    ],
)
def test_the_rule_for_classes_that_are_not_listed(unlisted, classes):
    listed = dict(voc=dict(motorbike="motorcycle"), coco=dict(motorcycle="motorcycle"))
    content = dict(version=1, unlisted=unlisted, datasets=listed)
    assert make(content, [VOC, COCO]).classes == classes


def test_classes_that_must_be_listed():
    content = dict(version=1, unlisted="error", datasets=dict(voc=dict(car="car")))
    with pytest.raises(ConfigError, match="does not list the class 'motorbike' of dat"):
        make(content, [VOC])


def test_rename_goes_on_for_classes_that_are_not_listed():
    spec = DatasetSpec("voc", classes=("motorbike", "car"), rename=dict(car="auto"))
    assert make(specs=[spec, ZOO]).classes[:2] == ("motorcycle", "auto")
    spec = DatasetSpec("voc", classes=("motorbike",), rename=dict(motorbike="bike"))
    with pytest.raises(ConfigError, match="'motorbike' of dataset 'voc', which"):
        make(specs=[spec, ZOO])


@pytest.mark.parametrize("mode", ["union", "partitioned"])
def test_an_empty_file_says_what_its_rule_says(mode):
    content = dict(version=1, unlisted=mode, datasets={})
    specs = [VOC, DatasetSpec("c", classes=("bird", "x"), rename=dict(x="car"))]
    assert make(content, specs) == LabelSpace.from_specs(specs, mode=mode)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(version=2), "version must be 1, got 2"),
        (dict(version=None), "version must be 1, got None"),
        (dict(dataset={}), "unknown key 'dataset'; did you mean 'datasets'"),
        (dict(unlisted="join"), "unlisted must be one of .* got 'join'"),
        (dict(datasets=["voc"]), "datasets must be"),
        (dict(datasets=dict(voc=["car"])), r"datasets must be .* got .*'voc': \['car'"),
        (dict(datasets=dict(voc=dict(car=3))), "'car' must become a name, or null"),
        (dict(datasets=dict(voc=dict(car=" "))), "'car' must become a name, or null"),
        (dict(datasets=dict(vok={})), "lists the dataset 'vok'; did you mean 'voc'"),
        (
            dict(datasets=dict(voc=dict(motorbyke="x"))),
            "'voc' has no class 'motorbyke'; did you mean 'motorbike'",
        ),
        (dict(datasets=dict(cars=dict(jaguar=None))), "leaves no class of .*'cars'"),
    ],
)
def test_what_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        make({**CONTENT, **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"version": 1, "datasets": {"a": {"x": "y", "x": "z"}}}', "'x' stands twice"),
        ('{"version": 1,}', r"labels\.json: "),
        ("[1]", r"must hold \{\"version\": 1"),
    ],
)
def test_files_that_are_refused(tmp_path, text, message):
    (tmp_path / "labels.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_label_space(str(tmp_path / "labels.json"))


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "labels.json").write_bytes('{"é": 1}'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"labels\.json: .*codec can't decode"):
        read_label_space(str(tmp_path / "labels.json"))


def test_a_missing_file_says_how_to_get_one(tmp_path):
    with pytest.raises(ConfigError, match=r"No such file.*labels CONFIG --out"):
        read_label_space(str(tmp_path / "none.json"))


def test_the_written_text_is_read_back(tmp_path):
    file = LabelFile.from_content(CONTENT)
    (tmp_path / "labels.json").write_text(file.to_text())
    assert '      "do not use": null' in file.to_text().splitlines()
    again = LabelFile.read(tmp_path / "labels.json")
    assert again.to_content() == file.to_content()


def test_a_space_fits_the_file_that_it_was_made_of_and_no_other():
    file, specs = LabelFile.from_content(CONTENT), [VOC, COCO, ZOO, CARS]
    # A config from a work directory does not read the annotation files again.
    space = LabelSpace.from_specs(specs, mode=file)
    unread = [DatasetSpec(spec.name) for spec in specs]
    space.check(unread, mode=file)
    for other in ("union", LabelFile(dict(zoo=file.datasets["zoo"]))):
        with pytest.raises(ConfigError, match="does not lead to the label_space"):
            space.check(specs, mode=other)
