"""Label spaces: by mode, by rename, and by a file that a person wrote."""

import json

import pytest

from damex.datasets.label_space import LabelFile, LabelSpace, read_label_space
from damex.datasets.spec import DatasetSpec
from damex.errors import ConfigError

STREET = DatasetSpec("street", classes=("car", "person", "bus"))
PARK = DatasetSpec("park", classes=("person", "dog", "car"))
VOC = DatasetSpec("voc", classes=("motorbike", "car", "bird"))
COCO = DatasetSpec("coco", classes=("car", "motorcycle"))
ZOO = DatasetSpec("zoo", classes=("jaguar", "bird", "do not use"))
CARS = DatasetSpec("cars", classes=("jaguar",))
CONTENT = dict(
    version=1,
    datasets=dict(
        voc=dict(motorbike="motorcycle"),
        zoo={"jaguar": "zoo/jaguar", "do not use": None},
    ),
)


def make(content=CONTENT, specs=(VOC, COCO, ZOO, CARS)):
    return LabelSpace.from_specs(specs, mode=LabelFile.from_content(content))


def renamed(name, **rename):
    """A dataset with the classes l, r and x."""
    return DatasetSpec(name, classes=("l", "r", "x"), rename=rename)


@pytest.mark.parametrize(
    ("specs", "mode", "classes", "labels"),
    [
        ([STREET, PARK], "union", "car person bus dog", [[0, 1, 2], [1, 3, 0]]),
        (
            [STREET, PARK],
            "partitioned",
            "street/car street/person street/bus park/person park/dog park/car",
            [[0, 1, 2], [3, 4, 5]],
        ),
        ([STREET, renamed("a", l="car")], "union", "car person bus r x", None),
        # Within a dataset, and swapped.
        ([renamed("a", l="r")], "union", "r x", [[0, 0, 1]]),
        ([renamed("a", l="r", r="l"), renamed("b")], "union", "r l x", [[0, 1, 2]]),
    ],
)
def test_names_decide_what_is_one_class(specs, mode, classes, labels):
    space = LabelSpace.from_specs(specs, mode=mode)
    assert space.classes == tuple(classes.split())
    assert space.num_classes == len(space.classes)
    for number, expected in enumerate(labels or ()):
        assert space.local_to_global(number, specs[number].classes) == expected
        assert space.valid_labels(number) == sorted({*expected})
    stored = json.loads(json.dumps(space.to_metainfo()))
    assert LabelSpace.from_metainfo(stored) == space


def test_groups_are_numbered_by_their_first_dataset():
    groups = dict(a="night", b=None, c="night")
    specs = [DatasetSpec(k, classes=("x",), group=g) for k, g in groups.items()]
    space = LabelSpace.from_specs(specs)
    assert space.group_names == ("night", "b")
    assert [space.group_id(i) for i in range(3)] == [0, 1, 0]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda _: LabelSpace.from_specs([STREET], mode="join"),
            "label_space must be one of .* got 'join'",
        ),
        (
            lambda _: LabelSpace.from_specs([renamed("a", ll="z")]),
            "'a': rename names the class 'll'; did you",
        ),
        (lambda space: space.dataset_id("prak"), "no dataset 'prak'; did you mean 'pa"),
        # dog is a class of the mixture but not of street.
        (
            lambda space: space.local_to_global(0, ["car", "dog"]),
            "'street': class 'dog' is not in the label",
        ),
    ],
)
def test_unknown_names_are_refused_with_a_suggestion(ask, message):
    with pytest.raises(ConfigError, match=message):
        ask(LabelSpace.from_specs([STREET, PARK]))


# --- label files ----------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    """A label file, as a config names it."""
    (tmp_path / "labels.json").write_text(json.dumps(CONTENT))
    return str(tmp_path / "labels.json")


def test_a_file_merges_keeps_apart_and_drops(path, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    space = LabelSpace.from_specs([VOC, COCO, ZOO, CARS], mode="~/labels.json")
    # bird is not listed, and merges by name; so does car.
    assert space.classes == ("motorcycle", "car", "bird", "zoo/jaguar", "jaguar")
    labels = [space.valid_labels(i) for i in range(4)]
    assert labels == [[0, 1, 2], [0, 1], [2, 3], [4]]
    assert space.local_to_global(0, ["bird", "motorbike"]) == [2, 0]
    with pytest.raises(ConfigError, match="'zoo': class 'do not use' is not in the"):
        space.local_to_global(2, ["do not use"])


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
    if unlisted != "drop":
        specs = [VOC, renamed("a", l="car")]
        empty = dict(version=1, unlisted=unlisted, datasets={})
        assert make(empty, specs) == LabelSpace.from_specs(specs, mode=unlisted)


def test_rename_holds_for_classes_that_are_not_listed():
    spec = DatasetSpec("voc", classes=("motorbike", "car"), rename=dict(car="auto"))
    assert make(specs=[spec, ZOO]).classes[:2] == ("motorcycle", "auto")
    spec = DatasetSpec("voc", classes=("motorbike",), rename=dict(motorbike="bike"))
    with pytest.raises(ConfigError, match="'motorbike' of dataset 'voc', which"):
        make(specs=[spec, ZOO])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(version=2), "version must be 1, got 2"),
        (dict(version=None), "version must be 1, got None"),
        (dict(dataset={}), "unknown key 'dataset'; did you mean 'datasets'"),
        (dict(unlisted="join"), "unlisted must be one of .* got 'join'"),
        (dict(unlisted="error"), "does not list the class 'car' of dataset 'voc'"),
        (dict(datasets=["voc"]), "datasets must be .* got"),
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
def test_impossible_content_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        make({**CONTENT, **change})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"version": 1, "datasets": {"a": {"x": 1, "x": 2}}}', "'x' stands twice"),
        (b'{"version": 1,}', r"labels\.json: "),
        (b"[1]", r"must hold \{\"version\": 1"),
        ('{"é": 1}'.encode("latin-1"), r"labels\.json:1: the bytes e9 22 3a 20 are"),
        (None, r"No such file.*labels CONFIG --out"),
    ],
)
def test_unreadable_files_are_refused(tmp_path, text, message):
    if text is not None:
        (tmp_path / "labels.json").write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        read_label_space(str(tmp_path / "labels.json"))


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
    space.check([DatasetSpec(spec.name) for spec in specs], mode=file)
    for other in ("union", LabelFile(dict(zoo=file.datasets["zoo"]))):
        with pytest.raises(ConfigError, match="does not lead to the label_space"):
            space.check(specs, mode=other)
