"""``damex data labels``: the merge table, near misses and conflicts."""

import json
import re
import shlex

import pytest

from damex.datasets.label_space import LabelFile, LabelSpace
from damex.datasets.spec import parse_mixture
from damex.engine.config import label_space_of, load_config, resolve_config
from damex.workbench.check.labels import class_notes
from damex.workbench.cli.commands import app
from damex.workbench.cli.data import data
from damex.workbench.cli.run import run_command
from damex.workbench.zero_config import config_of_folders, named_folders


@pytest.fixture
def entries(make_coco_dataset, edit_json, tmp_path):
    """Street and voc share person; voc says motorbike; zoo's jaguar is an animal."""

    def make(name, *classes):
        return make_coco_dataset(
            tmp_path / name, classes=list(classes), num_images=12, boxes_per_image=3
        )

    street = make("street", "motorcycle", "jaguar", "person")
    voc = make("voc", "motorbike", "person", "dummy")
    zoo = make("zoo", "jaguar", "lion", "persons")

    def shrink(document):
        for record in document["annotations"]:
            record["bbox"][2:] = [1, 1]

    def name_animals(document):
        for category in document["categories"]:
            category["supercategory"] = "animal"
        document["annotations"][0]["iscrowd"] = 1  # no label

    edit_json(voc["data_root"] + "train.json", shrink)
    edit_json(zoo["data_root"] + "train.json", name_animals)
    edit_json(
        street["data_root"] + "train.json",
        lambda d: d["categories"][1].update(supercategory="vehicle"),
    )
    return [street, voc, zoo]


@pytest.fixture
def run(entries, tmp_path, capsys):
    """Run the command on the mixture; its status, lines and errors."""

    def call(*arguments, extra="", mixture=entries):
        config = tmp_path / "config.py"
        config.write_text(f"mixture = {mixture!r}\n{extra}\n")
        status = run_command(data, ["labels", str(config), *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.out.splitlines(), said.err

    return call


def section(lines, title):
    start = next(i for i, line in enumerate(lines) if line.startswith(title))
    rows = lines[start + 1 :]
    return rows[: rows.index("")] if "" in rows else rows


def test_the_table_names_words_and_boxes(run):
    status, lines, _ = run()
    assert status == 0
    assert lines[0] == "7 classes of 3 datasets; 2 in more than one"
    assert lines[2].split() == ["jaguar", "street:", "12;", "zoo:", "11"]
    assert lines[3].split() == ["person", "street:", "12;", "voc:", "12"]
    assert "motorbike   voc: 12" in lines


def test_near_misses_and_conflicts(run):
    _, lines, _ = run()
    assert section(lines, "near-miss") == [
        "  'person' and 'persons' (plural), of street, voc and zoo",
        "  'motorcycle' and 'motorbike' (synonym), of street and voc",
    ]
    jaguar, person = section(lines, "merged by name")
    assert jaguar == (
        "  'jaguar' of street and zoo: supercategories 'vehicle' and 'animal'"
    )
    assert person.startswith("  'person' of street and voc: side of a typical box ")
    assert person.endswith("3% of the image's")  # 1 of 32 x 48 pixels


def test_a_label_file_settles_them(run, tmp_path):
    datasets = dict(
        voc=dict(motorbike="motorcycle", person="voc/person", dummy=None),
        zoo=dict(jaguar="zoo/jaguar", persons="person"),
    )
    path = tmp_path / "labels.json"
    path.write_text(LabelFile(datasets).to_text())
    status, lines, _ = run(extra=f"label_space = {str(path)!r}")
    assert status == 0
    assert "motorcycle  street: 12; voc: 'motorbike', 12" in lines
    for title in ("near-miss", "merged by name"):
        assert section(lines, title) == ["  none"]
    assert section(lines, "left out") == ["  voc: 'dummy', 12"]


def test_the_written_file_says_what_was_so(run, entries, tmp_path):
    entries[0]["classes"] = ["person", "jaguar"]
    entries[1]["rename"] = dict(motorbike="motorcycle")
    path = tmp_path / "labels.json"
    status, lines, _ = run("--out", path, mixture=entries)
    assert status == 0
    assert lines[-1].endswith("and remove rename from the entries of voc.")
    union = LabelSpace.from_specs(parse_mixture(entries))
    del entries[1]["rename"]
    again = LabelSpace.from_specs(parse_mixture(entries), mode=str(path))
    assert again == union
    assert json.loads(path.read_text())["unlisted"] == "error"
    status, _, said = run("--out", path)
    assert status == 2
    assert "exists; remove it" in said


def test_an_mmdet_dataset_is_listed_without_counts(run, entries):
    entries[1] = dict(name="voc", train=dict(type="VOCDataset", ann_file="x.txt"))
    status, lines, _ = run(mixture=entries)
    assert status == 0
    assert "aeroplane    voc: not counted" in lines


def test_folders_and_a_training_with_the_file_they_wrote(entries, tmp_path, capsys):
    path = tmp_path / "my labels.json"
    words = [str(tmp_path / "street"), f"cars={tmp_path / 'voc'}"]
    options = ["mixture.1.rename.dummy=doll", "mixture.1.weight=2"]
    words += ["--cfg-options", *options, "--out", str(path)]
    assert run_command(data, ["labels", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "person      street: 12; cars: 12" in lines
    assert section(lines, "not annotated")[:2] == [
        "  street does not annotate: motorbike, doll",
        "  cars does not annotate: motorcycle, jaguar",
    ]

    edited = json.loads(path.read_text())
    edited["datasets"]["cars"] |= dict(motorbike="motorcycle", dummy=None)
    path.write_text(json.dumps(edited))
    hint = shlex.split(lines[-1])
    assert hint[:2] == ["damex", "train"]
    given = app.parse_args(hint[1:], exit_on_error=False)[1].arguments
    start = config_of_folders(named_folders(given["data"]))
    cfg = resolve_config(load_config(start, cfg_options=given["cfg_options"]))
    assert [entry.weight for entry in cfg.mixture] == [1, 2]
    space = label_space_of(cfg)
    assert space.classes == ("motorcycle", "jaguar", "person")
    assert dict(space.dataset_classes[1]) == dict(
        motorbike="motorcycle", person="person"
    )


@pytest.mark.parametrize("others", [["CONFIG"], ["quickstart"], ["a.py", "street"]])
def test_a_config_stands_alone(run, tmp_path, monkeypatch, others):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").touch()
    named = [str(tmp_path / "config.py") if w == "CONFIG" else w for w in others]
    status, lines, said = run(*named)
    assert (status, lines) == (2, [])
    assert "config.py is not a folder" in said
    assert "one config alone" in said


@pytest.mark.parametrize(
    ("option", "error"),
    [
        ("classes=[lyon]", "'zoo': classes names 'lyon'; did you mean 'lion'"),
        ("rename={7: seven}", "rename names the class '7'; it has: "),
    ],
)
def test_a_class_that_is_not_there(entries, tmp_path, capsys, option, error):
    words = [str(tmp_path / "zoo"), str(tmp_path / "voc")]
    words += ["--cfg-options", f"mixture.0.{option}"]
    assert run_command(data, ["labels", *words]) == 2
    assert re.search(error, " ".join(capsys.readouterr().err.split()))


def space_of(**datasets):
    """A label space; per dataset: its class names -> those of the mixture."""
    classes = dict.fromkeys(name for m in datasets.values() for name in m.values())
    names = tuple(datasets)
    return LabelSpace(tuple(classes), names, tuple(datasets.values()), names)


def test_notes_name_merged_and_missing_classes():
    merged, missing = class_notes(
        space_of(
            a=dict(car="car", dog="dog", van="van"),
            b=dict(car="car", hound="dog", puppy="dog", van="van"),
            c=dict(van="van", jet="jet", bus="c/bus"),  # c/bus is kept apart
        )
    )
    assert merged == [
        "'car', 'dog' (b: 'hound', 'puppy') are each one class of a and b",
        "'van' is one class of a, b and c",
    ]
    assert missing == [
        "a does not annotate: jet",
        "b does not annotate: jet",
        "c does not annotate: car, dog",
    ]


def test_notes_count_the_names_beyond_the_limit():
    both = {name: name for name in ("x", "y", "z")}
    space = space_of(a=both, b={**both, "p": "p", "q": "q", "r": "r"})
    (merged,), (missing,) = class_notes(space, limit=2)
    assert merged.startswith("'x', 'y', and 1 more are ")
    assert missing.endswith(": p, q, and 1 more")
    assert class_notes(space, limit=3)[1] == ["a does not annotate: p, q, r"]


def test_there_are_no_notes_on_equal_or_single_datasets():
    assert class_notes(space_of(a=dict(car="car", van="car"))) == ([], [])
    assert class_notes(space_of(a=dict(car="car"), b=dict(auto="car")))[1] == []


@pytest.mark.parametrize(
    ("arguments", "extra", "message"),
    [
        (["--out", "labels.yaml"], "", "--out must end in .json"),
        ([], "mixture = None", "sets no mixture="),
        ([], "label_space = 'unoin'", "label_space must be one of"),
        ([], "label_space = 'none.json'", "none.json cannot be read"),
    ],
)
def test_what_cannot_work(run, arguments, extra, message):
    status, _, said = run(*arguments, extra=extra)
    assert status == 2
    assert message in said
