"""Labels that another dataset of a mixture has: found, doubted, written, deleted."""

import json
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import damex
from damex.__main__ import main
from damex.config_files import merge_options
from damex.datasets.mixture import MixtureDataset
from damex.errors import ConfigError, DataError
from damex.models.dataset_awareness import DatasetAwareness, DatasetAwarenessConfig
from damex.options import option_of, parse_options
from damex.workbench.api import Detector
from damex.workbench.cli.train import set_tiles, train_completed
from damex.workbench.complete.complete import write_completed
from damex.workbench.complete.datasets import Objects, read_datasets
from damex.workbench.complete.teacher import (
    Curve,
    DetectorTeacher,
    FileTeacher,
    Found,
    Threshold,
    find_thresholds,
    judge,
)
from damex.workbench.zero_config import config_of_folders, named_folders
from tests.test_datasets.test_mixture import PIPELINE

WIDE, HIGH = 48, 32


class FakeTeacher:
    """Gives every image the same detections, of the wanted classes."""

    mixture = ()

    def __init__(self, *rows):
        self.rows, self.known = rows, {}
        self.classes = tuple(dict.fromkeys(name for name, _, _ in rows))
        self.asked = []

    def find(self, images, wanted, bar, *, own):
        self.asked.append((len(images), tuple(wanted)))
        one = self.found([row for row in self.rows if row[0] in wanted])
        return [one.without_doubles() for _ in images]

    @staticmethod
    def found(rows):
        return Found(
            np.array([box for _, _, box in rows], float).reshape(-1, 4),
            np.array([score for _, score, _ in rows]),
            tuple(name for name, _, _ in rows),
        )


@pytest.fixture
def folders(tmp_path):
    """Two datasets of one image and its copy: cats has no dog, dogs no cat."""
    boxes = dict(cats=("cat", [2, 2, 10, 8]), dogs=("dog", [24, 10, 20, 16]))
    found = {}
    for name, (label, box) in boxes.items():
        root = tmp_path / name
        (root / "pictures").mkdir(parents=True)
        for split, number in (("train", 2), ("val", 6)):
            images, rows = [], []
            for i in range(1, number + 1):
                file = f"pictures/{split}{i}.png"
                pixels = np.random.default_rng(i).integers(0, 255, (HIGH, WIDE, 3))
                Image.fromarray(pixels.astype(np.uint8)).save(root / file)
                images.append(dict(id=i, file_name=file, width=WIDE, height=HIGH))
                size = dict(area=box[2] * box[3], iscrowd=0)
                rows.append(dict(id=i, image_id=i, category_id=4, bbox=box, **size))
            document = dict(
                images=images, annotations=rows, categories=[dict(id=4, name=label)]
            )
            (root / f"{split}.json").write_text(json.dumps(document))
        found[name] = str(root)
    return found


CAT = ("cat", 0.9, [2, 2, 12, 10])
DOG = ("dog", 0.8, [24, 10, 44, 26])
NO_DOG = ("dog", 0.4, [4, 20, 14, 30])


def complete(teacher, folders, out, **options):
    settings = dict(source="a teacher", samples=4)
    return write_completed(teacher, folders, out, **{**settings, **options})


def read(folders, wanted=("cat", "dog"), known=None):
    entries = [dict(name=name, root=root) for name, root in folders.items()]
    return read_datasets(entries, known or {}, wanted)


def change(folder, split, **lists):
    """Change lists of a COCO file."""
    file = Path(folder) / f"{split}.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **lists}))


def test_the_best_score_is_that_of_the_best_f_score():
    """Of 4 objects: right, right, right, five wrong, right."""
    score_N = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.2])
    right_N = np.array([1, 1, 1, 0, 0, 0, 0, 0, 1], bool)
    curve = Curve.of(score_N[::-1], right_N[::-1], 4)
    assert curve.precision_N[[2, 8]] == pytest.approx([1, 4 / 9])
    assert curve.recall_N[[2, 8]] == pytest.approx([0.75, 1])
    assert curve.best(1.0) == 0.7  # F1 0.86 against 0.62
    assert curve.best(2.0) == 0.2  # F2 0.789 against 0.800
    assert curve.best(2.0, least=0.5) == 0.7


def test_a_threshold_takes_all_detections_of_a_score():
    """One of ten is right, wherever it stands."""
    for place in (0, 9):
        curve = Curve.of(np.ones(10), np.eye(10, dtype=bool)[place], 1)
        assert curve.precision_N.tolist() == [0.1]
        assert curve.best(1.0, least=0.5) == float("inf")
    assert Curve.of(np.zeros(0), np.zeros(0, bool), 3).best(1.0) == float("inf")


def test_detections_are_judged_as_in_coco():
    """An object counts once, and what lies in a crowd does not count."""
    objects = Objects(
        np.array([[0, 0, 10, 10], [20, 0, 30, 10], [0, 20, 40, 30.0]]),
        ("dog", "cat", "dog"),
        np.array([False, False, True]),
    )
    rows = [
        ("dog", 0.5, [0, 0, 10, 9]),
        ("dog", 0.9, [0, 0, 10, 8]),
        ("dog", 0.8, [20, 0, 30, 10]),
        ("dog", 0.7, [5, 22, 9, 28]),
        ("cat", 0.6, [20, 0, 30, 10]),
    ]
    found = FakeTeacher(*rows).found(rows)
    score_N, is_right_N, count = judge(found, objects, "dog")
    assert (score_N.tolist(), count) == ([0.9, 0.8, 0.5], 1)
    assert is_right_N.tolist() == [True, False, False]


def test_thresholds_come_from_images_that_label_the_class(folders):
    """At .8 all dogs are found, and nothing else; at .4 there is a wrong one each."""
    teacher = FakeTeacher(CAT, DOG, NO_DOG)
    found = find_thresholds(teacher, read(folders), ["dog", "cat"], None, None)
    assert teacher.asked == [(6, ("cat",)), (6, ("dog",))]
    assert found["dog"] == Threshold(0.8, 0.8, 1.0, 1.0, 6)
    found = find_thresholds(teacher, read(folders), ["dog"], 0.3, None)
    assert found["dog"] == Threshold(0.3, 0.15, 0.5, 1.0, 6)


def test_a_dataset_may_have_the_name_of_its_class(folders, tmp_path):
    folders = {"cat": folders["cats"], "dog": folders["dogs"]}
    said = complete(FakeTeacher(CAT, DOG), folders, tmp_path / "done", min_score=0.5)
    assert "| cat | dog | 2 |" in said


def test_detections_become_labels_or_are_ignored(folders, tmp_path):
    """Labels of people stay as they are, and the folder trains like any other."""
    over_a_cat = ("dog", 0.99, [2, 2, 12, 9])  # IoU with the cat: 70 of 80
    twice = ("dog", 0.7, [24, 10, 44, 25])
    doubtful = ("dog", 0.3, [30, 0, 40, 6])
    teacher = FakeTeacher(CAT, DOG, twice, NO_DOG, over_a_cat, doubtful)
    out = tmp_path / "done"
    said = complete(teacher, folders, out, min_score=0.5)
    assert "| cats | dog | 2 | 4 |" in said
    assert "| dogs | cat | 2 | 0 |" in said
    after = json.loads((out / "cats" / "train.json").read_text())
    own = [(row["id"], row["image_id"], row["bbox"]) for row in after["annotations"]]
    assert own[:2] == [(1, 1, [2, 2, 10, 8]), (2, 2, [2, 2, 10, 8])]
    assert after["categories"] == [
        dict(id=1, name="cat"),
        dict(id=2, name="dog", predicted=True),
    ]
    rows = [
        (row["id"], row["image_id"], row["bbox"], row["iscrowd"], row["score"])
        for row in after["annotations"][2:]
    ]
    assert rows == [
        (3, 1, [24, 10, 20, 16], 0, 0.8),
        (4, 1, [4, 20, 10, 10], 1, 0.4),
        (5, 1, [30, 0, 10, 6], 1, 0.3),
        (6, 2, [24, 10, 20, 16], 0, 0.8),
        (7, 2, [4, 20, 10, 10], 1, 0.4),
        (8, 2, [30, 0, 10, 6], 1, 0.3),
    ]
    val = json.loads((out / "cats" / "val.json").read_text())
    assert not any(row.get("predicted") for row in val["annotations"])
    entries = [dict(name=name, root=str(out / name)) for name in folders]
    dataset = MixtureDataset(datasets=entries, pipeline=PIPELINE)
    assert dataset.metainfo["classes"] == ("cat", "dog")
    sample = dataset[0]["data_samples"]
    assert sorted(sample.gt_instances.labels.tolist()) == [0, 1]
    assert sample.ignored_instances.labels.tolist() == [1, 1]
    # A detector does not label all objects: what else it finds can be ignored.
    ignored = DatasetAwareness(
        DatasetAwarenessConfig(ignore_unannotated_classes=0.15),
        dataset.label_space.coverage(), num_classes=2, embed_dims=4,
    ).ignored_if_found([sample, dataset[2]["data_samples"]])  # fmt: skip
    assert ignored["unannotated_BC"].tolist() == [[False, True], [True, False]]
    assert main(["data", "check", str(out / "cats"), "--quick"]) == 0


def test_the_page_shows_doubtful_images_first(folders, tmp_path):
    out = tmp_path / "done"
    complete(FakeTeacher(CAT, DOG, NO_DOG), folders, out, min_score=0.5)
    page = (out / "index.html").read_text()
    assert page.count("<figure>") == 4
    assert '<input type="checkbox" value="4">' in page  # of the doubtful dog
    assert "4? dog" in page
    assert f"damex data complete --out {out / 'cats'} --delete" in page


def test_nothing_is_left_of_an_error(folders, tmp_path):
    class Broken(FakeTeacher):
        def find(self, images, wanted, bar, *, own):
            if len(images) == 2:  # the training images come last
                raise RuntimeError("no more memory")
            return super().find(images, wanted, bar, own=own)

    with pytest.raises(RuntimeError, match="no more memory"):
        complete(Broken(CAT, DOG), folders, tmp_path / "done")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cats", "dogs"]


def test_without_permission_for_links_images_are_copied(folders, tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError("no privilege")

    monkeypatch.setattr("pathlib.Path.symlink_to", refuse)
    complete(FakeTeacher(CAT, DOG), folders, tmp_path / "done")
    copy = tmp_path / "done" / "dogs" / "images" / "val" / "pictures" / "val3.png"
    assert not copy.is_symlink()
    original = tmp_path / "dogs" / "pictures" / "val3.png"
    assert copy.read_bytes() == original.read_bytes()


def test_few_objects_choose_no_threshold(folders, tmp_path):
    rows = json.loads((tmp_path / "dogs" / "val.json").read_text())["annotations"]
    change(folders["dogs"], "val", annotations=rows[:4])
    said = complete(FakeTeacher(CAT, DOG), folders, tmp_path / "done")
    assert "not completed" in said
    assert "dog; --min-score" in said
    done = json.loads((tmp_path / "done" / "cats" / "train.json").read_text())
    assert len(done["annotations"]) == 2


def test_classes_have_the_names_of_the_mixture(folders, tmp_path):
    """As after rename or a label file, so that nothing has to be said again."""
    for split in ("train", "val"):
        change(folders["cats"], split, categories=[dict(id=4, name="kitty")])
    teacher = FakeTeacher(CAT, DOG)
    teacher.known = dict(cats={"kitty": "cat"}, dogs={"dog": "dog"})
    complete(teacher, folders, tmp_path / "done")
    document = json.loads((tmp_path / "done" / "cats" / "train.json").read_text())
    assert [one["name"] for one in document["categories"]] == ["cat", "dog"]
    labels = [row["category_id"] for row in document["annotations"]]
    assert labels == [1, 1, 2, 2]
    # Without the training, kitty is a class of its own.
    (cats, _) = read(folders)
    assert cats.classes == ("kitty",)


def test_another_dataset_of_a_trained_name_is_refused(folders, tmp_path):
    teacher = FakeTeacher(CAT, DOG)
    teacher.known = dict(cats={"lion": "lion"})
    with pytest.raises(ConfigError, match="class 'lion', which its training labels"):
        complete(teacher, folders, tmp_path / "done")
    teacher.known = dict(lions={"lion": "lion"})
    said = complete(teacher, folders, tmp_path / "done")
    assert said.startswith("not of the training: cats, dogs;")


def test_classes_that_the_training_left_out_are_labels_if_they_are_wanted(folders):
    """Else they stay out."""
    names = [dict(id=4, name="cat"), dict(id=5, name="dog"), dict(id=6, name="cow")]
    rows = [
        dict(id=n, image_id=1, category_id=n, bbox=[9, 9, 9, 9], area=81, iscrowd=0)
        for n in (4, 5, 6)
    ]
    for split in ("train", "val"):
        change(folders["cats"], split, categories=names, annotations=rows)
    (cats, _) = read(folders, known=dict(cats={"cat": "cat"}))
    assert sorted(cats.classes) == ["cat", "dog"]
    assert [name for _, name in cats.splits["train"].annotations] == ["cat", "dog"]
    (cats, _) = read(folders, known=dict(cats={"cow": "cat"}))  # "cat" was dropped
    own = [row["id"] for row, _ in cats.splits["train"].annotations]
    assert own == [2, 3]  # of dog and cow


@pytest.mark.parametrize(("named", "found"), [((), 2), (("cat", "dog"), 0)])
def test_labels_that_the_training_left_out_return_if_named(
    folders, tmp_path, named, found
):
    """A dog of the cats may be another animal: the detector's are found there."""
    names = [dict(id=4, name="cat"), dict(id=5, name="dog")]
    rows = [
        dict(id=n, image_id=1, category_id=n, bbox=[n, 9, 9, 9], area=81, iscrowd=0)
        for n in (4, 5)
    ]
    change(folders["cats"], "train", categories=names, annotations=rows)
    teacher = FakeTeacher(CAT, DOG)
    teacher.known = dict(cats={"cat": "cat"}, dogs={"dog": "dog"})
    complete(teacher, folders, tmp_path / "done", classes=named)
    document = json.loads((tmp_path / "done" / "cats" / "train.json").read_text())
    dogs = {row["id"] for row in document["categories"] if row["name"] == "dog"}
    kept = [row for row in document["annotations"] if row["category_id"] in dogs]
    predicted = [row for row in kept if row.get("predicted")]
    assert len(predicted) == found
    assert len(kept) - len(predicted) == bool(named)


def test_labels_count_as_training_reads_them(folders):
    """Clipped to the image, and without boxes that have no area."""
    boxes = [[30, 10, 60, 30], [20, 20, -5, 4], [50, 1, 9, 9]]
    rows = [dict(id=n, image_id=1, category_id=4, bbox=b) for n, b in enumerate(boxes)]
    change(folders["cats"], "train", annotations=rows)
    entry = dict(name="cats", data_root=folders["cats"], img="")
    entry.update(train="train.json", val="val.json")
    (cats,) = (one.splits["train"] for one in read_datasets([entry], {}, ["cat"]))
    assert cats.objects[0].corners_N4.tolist() == [[30, 10, WIDE, HIGH]]
    assert len(cats.annotations) == 3  # the files keep them


def test_datasets_of_the_training_give_thresholds_if_their_images_are_here(
    folders, tmp_path
):
    teacher, cats = FakeTeacher(CAT, DOG), {"cats": folders.pop("cats")}
    files = dict(train="train.json", val="val.json", img="")
    teacher.mixture = [dict(files, name="dogs", data_root=folders["dogs"])]
    assert "| cats | dog | 2 |" in complete(teacher, cats, tmp_path / "done")
    Path(folders["dogs"], "pictures").rename(tmp_path / "archived")
    with pytest.raises(ConfigError, match="fewer than 5 objects there: dog"):
        complete(teacher, cats, tmp_path / "again")


def test_a_class_without_a_precise_score_is_not_completed(folders, tmp_path):
    """It stays one that the dataset does not annotate."""
    wrong = [("dog", 0.8, [x, 0, x + 4, 4]) for x in (0, 8)]
    said = complete(FakeTeacher(CAT, DOG, *wrong), folders, tmp_path / "done")
    assert "| cats | dog | 0 | 0 | never | - | 0.00 |" in said
    document = json.loads((tmp_path / "done" / "cats" / "train.json").read_text())
    assert [one["name"] for one in document["categories"]] == ["cat"]
    with pytest.raises(ConfigError, match="no class reaches a precision"):
        complete(FakeTeacher(DOG, *wrong), folders, tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_class_that_was_kept_apart_is_not_missing(folders, tmp_path):
    teacher = FakeTeacher(CAT, ("dogs/dog", 0.9, [1, 1, 9, 9]))
    teacher.known = dict(dogs={"dog": "dogs/dog"})
    with pytest.raises(ConfigError, match="nothing to complete"):
        complete(teacher, dict(cats=folders["cats"]), tmp_path / "done")


def test_a_completed_dataset_is_no_reference_for_predicted_classes(folders, tmp_path):
    """Its validation images lack the labels, so right detections would be wrong."""
    teacher = FakeTeacher(CAT, DOG)
    complete(teacher, folders, tmp_path / "done")
    again = {name: str(tmp_path / "done" / name) for name in folders}
    found = find_thresholds(teacher, read(again), ["dog"], None, None)
    assert found["dog"] == Threshold(0.8, 0.8, 1.0, 1.0, 6)
    bird = FakeTeacher(("bird", 0.9, [9, 20, 14, 25]))
    complete(bird, again, tmp_path / "twice", min_score=0.5)
    document = json.loads((tmp_path / "twice" / "cats" / "train.json").read_text())
    flags = {one["name"]: one.get("predicted", False) for one in document["categories"]}
    assert flags == dict(cat=False, dog=True, bird=True)
    first = json.loads((tmp_path / "done" / "cats" / "train.json").read_text())
    dogs = {(row.get("score"), row.get("predicted")) for row in first["annotations"]}
    found = document["annotations"]
    kept = [row for row in found if row["category_id"] != 3]
    assert {(row.get("score"), row.get("predicted")) for row in kept} == dogs
    assert len(dogs) == 2  # those of people have neither


def test_classes_compete_for_an_object_with_those_without_a_threshold(
    folders, tmp_path
):
    wolf = ("wolf", 0.9, [24, 10, 44, 26])  # no validation image shows one
    said = complete(FakeTeacher(CAT, DOG, wolf), folders, tmp_path / "done")
    assert "| cats | dog | 0 | 0 | 0.80 | 1.00 | 1.00 |" in said


def test_without_validation_images_nothing_is_completed(folders, tmp_path):
    entry = dict(name="cats", data_root=folders["cats"], train="train.json")
    teacher = FakeTeacher(CAT, DOG)
    teacher.mixture = [entry]
    with pytest.raises(ConfigError, match="'cats' has no validation images"):
        complete(teacher, {}, tmp_path / "done")


def test_a_crowd_of_people_hides_no_object(folders, tmp_path):
    crowd = dict(id=9, image_id=1, category_id=4, bbox=[22, 8, 24, 20], iscrowd=1)
    rows = json.loads((tmp_path / "cats" / "train.json").read_text())["annotations"]
    change(folders["cats"], "train", annotations=[*rows, {**crowd, "area": 480}])
    said = complete(FakeTeacher(CAT, DOG), folders, tmp_path / "done")
    assert "| cats | dog | 2 | 0 |" in said


def test_images_of_one_name_in_two_folders_stay_two(folders, tmp_path):
    """And ids and names of files do not lead out of the folder."""
    root = Path(folders["cats"])
    entry = dict(name="cats", train="train.json", val="val.json", data_root=str(root))
    for split in ("train", "val"):
        (root / split).mkdir()
        for number in (1, 2):
            old = root / f"pictures/{split}{number}.png"
            old.rename(root / split / f"{number}.png")
        images = [
            dict(id=f"../../{n}", file_name=f"{n}.png", width=WIDE, height=HIGH)
            for n in (1, 2)
        ]
        images[0]["file_name"] = str(root / split / "1.png")  # an absolute path
        rows = [
            dict(id=n, image_id=f"../../{n}", category_id=4, bbox=[2, 2, 10, 8])
            for n in (1, 2)
        ]
        change(root, split, images=images, annotations=rows, info="no dict")
    teacher = FakeTeacher(CAT, DOG)
    teacher.mixture = [{**entry, "img": dict(train="train", val="val"), "tile": 32}]
    out = tmp_path / "deep" / "done"
    said = complete(teacher, {}, out, min_score=0.5)
    assert f"train --data {out / 'cats'} --tile cats=32 --work-dir" in said
    for split in ("train", "val"):
        document = json.loads((out / "cats" / f"{split}.json").read_text())
        for number, image in enumerate(document["images"], start=1):
            link = out / "cats" / image["file_name"]
            assert link.resolve() == (root / split / f"{number}.png").resolve()
            assert link.parent == out / "cats" / "images" / split
    assert sorted(path.name for path in out.parent.iterdir()) == ["done"]


# --- teachers -------------------------------------------------------------------------


def detections_of(folder, *, file_name, score=0.9):
    return dict(
        images=[
            dict(id=f"{split}{i}", file_name=file_name(split, i), width=48, height=32)
            for split, number in (("train", 2), ("val", 6))
            for i in range(1, number + 1)
        ],
        annotations=[
            dict(
                id=n,
                image_id=f"train{n}",
                category_id=1,
                bbox=[24, 10, 20, 16],
                score=score,
            )
            for n in (1, 2)
        ],
        categories=[dict(id=1, name="dog")],
    )


def test_a_file_of_detections_teaches(folders, tmp_path, capsys):
    file = tmp_path / "found.json"
    document = detections_of(folders, file_name="cats/pictures/{}{}.png".format)
    file.write_text(json.dumps(document))
    command = ["data", "complete", "--from", str(file), "--min-score", "0.5"]
    command += ["--data", folders["cats"], "--out", str(tmp_path / "done")]
    assert main(command) == 0
    assert "| cats | dog | 2 | 0 | 0.50 | - | - |" in capsys.readouterr().out
    images = [tmp_path / "cats" / "pictures" / f"train{n}.png" for n in (1, 2)]
    (one, _) = FileTeacher(str(file)).find(images, ["dog"], None, own="cats")
    assert one.boxes_N4.tolist() == [[24, 10, 44, 26]]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (dict(score=87.5), "score is 87.5, not a number in"),
        (dict(category_id=9), "its image or category is not listed"),
        (dict(bbox=[1, 2, 3]), "bbox is not a list of four numbers"),
    ],
)
def test_a_file_that_is_no_detections_is_refused(folders, tmp_path, changes, error):
    document = detections_of(folders, file_name="cats/{}{}.png".format)
    document["annotations"][0].update(changes)
    file = tmp_path / "found.json"
    file.write_text(json.dumps(document))
    with pytest.raises(DataError, match=error):
        FileTeacher(str(file))


def test_detections_belong_to_one_image_and_stay_in_it(folders, tmp_path):
    document = detections_of(folders, file_name="{}{}.png".format)
    document["images"].append(dict(document["images"][0], id="x"))
    document["images"][-1]["file_name"] = "b/train1.png"
    document["annotations"][0]["bbox"] = [40, 20, 100, 100]
    document["annotations"][1]["bbox"] = [60, 10, 20, 16]
    file = tmp_path / "found.json"
    file.write_text(json.dumps(document))
    teacher = FileTeacher(str(file))
    a, b, c = (Path(folder) / "train1.png" for folder in ("a", "b", "c"))
    find = partial(teacher.find, wanted=["dog"], bar=None, own="cats")
    first, other = find([a, b])
    assert first.boxes_N4.tolist() == [[40, 20, WIDE, HIGH]]
    assert other.names == ()  # the longer name
    assert find([Path("a/train2.png")])[0].names == ()
    with pytest.raises(DataError, match=r"may be a/train1\.png or c/train1"):
        find([c])
    with pytest.raises(DataError, match="has no image none"):
        find([Path("none.png")])
    document["images"][-1]["file_name"] = "./train1.png"
    file.write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"two images have .* 'train1\.png'"):
        FileTeacher(str(file))


def test_a_detector_is_asked_as_the_dataset_that_labels_the_class():
    """So its experts answer, and the classes of others do not compete."""
    asked = []

    def stream(images, dataset, min_score, batch_size, *, tile):
        asked.append((dataset, tile, Image.MAX_IMAGE_PIXELS))
        box = dict(dogs=[0, 0, 9, 9], pets=[0, 0, 9, 8])[dataset]
        for _ in images:
            yield SimpleNamespace(
                boxes=np.array([box, [20, 20, 29, 29.0]]),
                scores=np.array([0.5 if dataset == "dogs" else 0.6, 0.4]),
                names=("dog", "bone"),
            )

    space = SimpleNamespace(dataset_names=("cats",), dataset_classes=({},))
    predictor = SimpleNamespace(
        classes=("cat", "dog", "bone"),
        datasets=dict(cats=("cat",), dogs=("dog", "bone"), pets=("dog",)),
        label_space=space,
        stored=SimpleNamespace(mixture=[]),
        stream=stream,
        tile_of=lambda names: 24 if names == ["cats"] else None,
    )
    teacher = DetectorTeacher(predictor, batch_size=2)
    bar = SimpleNamespace(begin=lambda *_: None, step=lambda: None)
    limit = 1 << 30  # of OpenCV, which reads the images of a training
    for own, tile in (("cats", 24), ("others", "auto")):
        asked.clear()
        (found,) = teacher.find(["a.png"], ["dog"], bar, own=own)
        assert asked == [("dogs", tile, limit), ("pets", tile, limit)]
    assert found.names == ("dog",)  # one object, found twice
    assert found.boxes_N4.tolist() == [[0, 0, 9, 8]]


# --- commands -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--out new", "needs one teacher"),
        ("x.pth --from y.json --out new", "needs one teacher"),
        ("--from y.json --data cats --out dogs", "exists"),
        ("--from y.json --out new", "needs the datasets"),
        ("--from y.json --data cats --out cats/new", "lies inside of cats"),
        ("--from y.json --data cats --classes god --out new", "finds no 'god'"),
        ("--from y.json --data dogs --out new", "nothing to complete"),
        ("--out none --delete 7", "has no train.json"),
    ],
)
def test_what_cannot_be_completed_is_named(
    folders, tmp_path, monkeypatch, capsys, words, error
):
    monkeypatch.chdir(tmp_path)
    document = detections_of(folders, file_name="cats/pictures/{}{}.png".format)
    (tmp_path / "y.json").write_text(json.dumps(document))
    assert main(["data", "complete", *words.split()]) == 2
    assert error in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_found_labels_are_deleted_and_those_of_people_not(folders, tmp_path, capsys):
    out = tmp_path / "done"
    complete(FakeTeacher(CAT, DOG), folders, out)
    delete = ["data", "complete", "--out", str(out / "cats"), "--delete"]
    assert main([*delete, "1", "3"]) == 2
    assert "no predicted label with the id 1" in capsys.readouterr().err
    assert main([*delete, "3"]) == 0
    left = json.loads((out / "cats" / "train.json").read_text())["annotations"]
    assert [row["id"] for row in left] == [1, 2, 4]


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """Commands of a training that completes; they leave the files of real ones."""
    found = []

    def run(words, *, verbose):
        found.append([*words])
        if words[0] == "data":
            for name in ("cats", "dogs"):
                labels = tmp_path / "run" / "completed" / name / "train.json"
                labels.parent.mkdir(parents=True)
                labels.touch()
                os.utime(labels, (2, 2))
            return
        folder = Path(words[words.index("--work-dir") + 1])
        folder.mkdir(parents=True, exist_ok=True)
        start = config_of_folders(named_folders(words[2:4]))
        merge_options(start, parse_options(words[words.index("--cfg-options") + 1 :]))
        set_tiles(start, ["cats=32"] if "--tile" in words else [])
        (folder / "cats-dogs.py").write_text(f"mixture = {start.to_dict()['mixture']}")
        (folder / "last_checkpoint").touch()
        summary = dict(checkpoint="epoch_2.pth", config="cats-dogs.py")
        (folder / "summary.json").write_text(json.dumps(summary))

    monkeypatch.setattr("damex.workbench.cli.train.run_damex", run)
    return found


def test_half_of_the_epochs_teaches_the_other_half(folders, tmp_path, commands):
    """Repeated, it keeps what is finished, and resumes what is not."""
    options = ["mixture.0.rename={cat: kitty}", "mixture.1.weight=2.0", "moe=dense"]
    options.append("mixture.1.group=pets")
    options.append(option_of("work_dir", str(tmp_path / "run")))
    settings = dict(data=[*folders.values()], model=None, device="cpu")
    settings.update(work_dir=None, cfg_options=options, tile=["cats=32"])
    (tmp_path / "run").mkdir()
    before = tmp_path / "run" / "last_checkpoint"  # of a training on the folders
    before.touch()
    os.utime(before, (1, 1))
    train_completed(**settings, epochs=None)
    first, between, second = commands
    assert "--resume" not in [*first, *second]
    assert first[first.index("--epochs") + 1] == "2"  # half of the template's
    assert second[second.index("--epochs") + 1] == "2"
    teacher = tmp_path / "run" / "teacher" / "epoch_2.pth"
    out = ["--out", str(tmp_path / "run" / "completed")]
    # No --data: the datasets as they were trained, with their splits.
    assert between == ["data", "complete", str(teacher), *out, "--device", "cpu"]
    completed = tmp_path / "run" / "completed"
    assert second[2:4] == [str(completed / name) for name in folders]
    assert first[-5:] == options
    seen = ["mixture.0.group=cats", "mixture.0.tile=32", "mixture.1.group=pets"]
    seen.append(option_of("load_from", str(teacher)))
    assert second[-8:] == [*options[1:], *seen]
    train_completed(**settings, epochs=None)
    assert [{*one} - {*second} for one in commands[3:]] == [{"--resume"}]
    (teacher.parent / "summary.json").unlink()  # as if interrupted
    train_completed(**settings, epochs=None)
    assert {*commands[4]} - {*first} == {"--resume"}
    entries = [dict(root=root) for root in folders.values()]  # without --complete
    (tmp_path / "run" / "cats-dogs.py").write_text(f"mixture = {entries}")
    train_completed(**settings, epochs=None)
    assert commands[-1] == second
    train_completed(**settings | dict(work_dir=f"{completed}/.."), epochs=None)
    assert "--resume" in commands[-1]
    labels = completed / "cats" / "train.json"
    os.utime(labels, (time.time() + 9,) * 2)  # wrong labels were deleted since
    train_completed(**settings, epochs=None)
    assert commands[-1] == second
    with pytest.raises(ConfigError, match="was begun with other settings"):
        train_completed(**settings, epochs=7)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        (dict(epochs=1), "needs two epochs or more"),
        (dict(data=["cats"]), "so nothing is missing"),
        (dict(cfg_options=["label_space=partitioned"]), "so nothing is missing"),
        (dict(rare=True), "of the other options, --model"),
        (dict(cfg_options=["default_hooks.checkpoint=None"]), "goes on from check"),
        (dict(launcher="pytorch"), "For a config or several GPUs"),
    ],
)
def test_what_cannot_be_halved_is_refused_at_once(
    folders, tmp_path, monkeypatch, commands, changes, error
):
    monkeypatch.chdir(tmp_path)
    settings = dict(data=[*folders], model=None, device=None, work_dir=None)
    settings.update(epochs=None, cfg_options=[])
    with pytest.raises(ConfigError, match=error):
        train_completed(**{**settings, **changes})
    assert not commands


@pytest.mark.slow
def test_two_folders_are_trained_completed_and_trained_on(folders, tmp_path):
    """By real trainings; a teacher that knows too little is kept, and can be forced."""
    short = {
        "train_dataloader.sampler.samples_per_epoch": 2,
        "train_dataloader.batch_size": 2,
        "model.num_queries": 20,
        "model.test_cfg.max_per_img": 20,
        "image_size": 64,
    }
    settings = dict(epochs=2, work_dir=tmp_path / "run", complete=True, options=short)
    with pytest.raises(ConfigError, match="no class reaches a precision"):
        damex.train(folders, **settings, verbose=False)
    teacher = tmp_path / "run" / "teacher" / "epoch_1.pth"
    completed = tmp_path / "run" / "completed"
    words = ["--out", str(completed), "--min-score", "0.01"]
    words += ["--data", *(f"{name}={root}" for name, root in folders.items())]
    assert main(["data", "complete", str(teacher), *words]) == 0
    before = teacher.stat().st_mtime_ns
    run = damex.train(folders, **settings, verbose=False)
    assert teacher.stat().st_mtime_ns == before
    detector = Detector(run.checkpoint)
    assert detector.datasets == dict.fromkeys(folders, ("cat", "dog"))
