"""Labels that another dataset of a mixture has: found, doubted, written, deleted."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

import damex
from damex.__main__ import main
from damex.datasets.mixture import MixtureDataset
from damex.evaluation import ImageResult
from damex.workbench.api import Detector
from damex.workbench.complete.complete import write_completed
from damex.workbench.complete.datasets import read_datasets
from damex.workbench.complete.teacher import DetectorTeacher, FileTeacher, Found
from damex.workbench.complete.thresholds import find_thresholds, precision_curve
from damex.workbench.complete.training import train_completed

WIDE, HIGH = 48, 32


class FakeTeacher:
    """Gives every image the same detections, of the wanted classes."""

    mixture = ()

    def __init__(self, *rows):
        self.rows, self.known = rows, {}
        self.classes = tuple(dict.fromkeys(name for name, _, _ in rows))
        self.asked = []

    def find(self, images, wanted, bar):
        rows = [row for row in self.rows if row[0] in wanted]
        self.asked.append((len(images), tuple(wanted)))
        one = Found(
            np.array([box for _, _, box in rows], float).reshape(-1, 4),
            np.array([score for _, score, _ in rows]),
            tuple(name for name, _, _ in rows),
        )
        return [one.without_doubles() for _ in images]


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
    settings = dict(classes=(), source="a teacher", samples=4, min_score=None)
    return write_completed(teacher, folders, out, **{**settings, **options})


def test_the_curve_of_a_class_is_that_of_coco():
    """Objects: 4. Found by score: right, right, right, five wrong, right."""
    boxes = [[10 * n, 0, 10 * n + 8, 8] for n in range(9)]
    truth = [
        dict(bbox=[10 * n, 0, 8, 8], label=3, area=64, iscrowd=0) for n in (0, 1, 2, 8)
    ]
    scores = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.35, 0.3, 0.2])
    image = ImageResult(
        100, 50, np.array(boxes, float), scores, np.full(9, 3), ground_truth=truth
    )
    curve = precision_curve([image], 3)
    assert curve.objects == 4
    for recall, precision, score in ((0.25, 1, 0.9), (0.75, 1, 0.7), (1, 4 / 9, 0.2)):
        place = round(100 * recall)
        assert curve.recall_R[place] == pytest.approx(recall)
        assert curve.precision_R[place] == pytest.approx(precision)
        assert curve.score_R[place] == pytest.approx(score)
    assert precision_curve([image], 1).objects == 0


def test_thresholds_are_the_best_f_scores(folders):
    """At .8 all dogs are found, and nothing else; at .4 there is a wrong one each."""
    datasets = read_datasets(
        [dict(name=name, root=root) for name, root in folders.items()], {}
    )
    teacher, bar = FakeTeacher(CAT, DOG, NO_DOG), SimpleNamespace()
    found = find_thresholds(teacher, datasets, ["dog", "cat"], None, bar)
    assert teacher.asked == [(6, ("cat",)), (6, ("dog",))]  # where it is labeled
    dog = found["dog"]
    assert (dog.sure, dog.doubtful, dog.precision, dog.recall, dog.objects) == (
        *(pytest.approx(0.8), pytest.approx(0.8), 1.0, 1.0),
        6,
    )
    fixed = find_thresholds(teacher, datasets, ["dog"], 0.3, bar)["dog"]
    assert (fixed.sure, fixed.doubtful) == (0.3, 0.15)


def test_a_class_is_labeled_only_where_most_labels_would_be_right(folders):
    """Of three finds of equal score, one is a dog."""
    entries = [dict(name=name, root=root) for name, root in folders.items()]
    wrong = [("dog", 0.8, [x, 0, x + 4, 4]) for x in (0, 8)]
    found = find_thresholds(
        FakeTeacher(DOG, *wrong), read_datasets(entries, {}), ["dog"], None, None
    )
    assert found["dog"].sure == float("inf")
    assert found["dog"].doubtful == pytest.approx(0.8)


def test_finds_become_labels_or_are_ignored(folders, tmp_path):
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
    pipeline = [
        dict(type="LoadImageFromFile"),
        dict(type="LoadAnnotations", with_bbox=True),
        dict(type="PackDetInputs"),
    ]
    entries = [dict(name=name, root=str(out / name)) for name in folders]
    dataset = MixtureDataset(datasets=entries, pipeline=pipeline)
    assert dataset.metainfo["classes"] == ("cat", "dog")
    sample = dataset[0]["data_samples"]
    assert sorted(sample.gt_instances.labels.tolist()) == [0, 1]
    assert sample.ignored_instances.labels.tolist() == [1, 1]
    assert main(["data", "check", str(out / "cats"), "--quick"]) == 0


def test_the_page_shows_doubtful_images_first(folders, tmp_path):
    out = tmp_path / "done"
    complete(FakeTeacher(CAT, DOG, NO_DOG), folders, out, min_score=0.5)
    page = (out / "index.html").read_text()
    assert page.count("<figure>") == 4
    assert '<input type="checkbox" value="4">' in page  # of the doubtful dog
    assert "4? dog" in page
    report = json.loads((out / "report.json").read_text())
    assert report["labels"] == {"cats": {"dog": [2, 2]}, "dogs": {"cat": [2, 0]}}


def test_nothing_is_left_of_an_error(folders, tmp_path):
    class Broken(FakeTeacher):
        def find(self, images, wanted, bar):
            if len(images) == 2:  # the training images come last
                raise RuntimeError("no more memory")
            return super().find(images, wanted, bar)

    with pytest.raises(RuntimeError, match="no more memory"):
        complete(Broken(CAT, DOG), folders, tmp_path / "done")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cats", "dogs"]


def test_without_permission_for_links_images_are_copied(folders, tmp_path, monkeypatch):
    def refuse(self, target):
        raise OSError("no privilege")

    monkeypatch.setattr("pathlib.Path.symlink_to", refuse)
    complete(FakeTeacher(CAT, DOG), folders, tmp_path / "done")
    copy = tmp_path / "done" / "dogs" / "pictures" / "val3.png"
    assert not copy.is_symlink()
    original = tmp_path / "dogs" / "pictures" / "val3.png"
    assert copy.read_bytes() == original.read_bytes()


def test_few_objects_choose_no_threshold(folders, tmp_path):
    file = tmp_path / "dogs" / "val.json"
    document = json.loads(file.read_text())
    document["annotations"] = document["annotations"][:4]
    file.write_text(json.dumps(document))
    said = complete(FakeTeacher(CAT, DOG), folders, tmp_path / "done")
    assert "not completed" in said
    assert "dog; give --min-score" in said
    done = json.loads((tmp_path / "done" / "cats" / "train.json").read_text())
    assert len(done["annotations"]) == 2


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
    (one, _) = FileTeacher(str(file)).find(
        [tmp_path / "cats" / "pictures" / f"train{n}.png" for n in (1, 2)],
        ["dog"],
        None,
    )
    assert one.boxes_N4.tolist() == [[24, 10, 44, 26]]
    del document["annotations"][0]["score"]
    file.write_text(json.dumps(document))
    assert main([*command[:-1], str(tmp_path / "other")]) == 2
    assert "has no score" in capsys.readouterr().err


def test_a_detector_is_asked_as_the_dataset_that_labels_the_class():
    """So its experts answer, and the classes of others do not compete."""
    asked = []

    def stream(images, dataset, min_score, batch_size):
        asked.append(dataset)
        box = dict(dogs=[0, 0, 9, 9], pets=[0, 0, 9, 8])[dataset]
        for _ in images:
            yield SimpleNamespace(
                boxes=np.array([box, [20, 20, 29, 29.0]]),
                scores=np.array([0.5 if dataset == "dogs" else 0.6, 0.4]),
                names=("dog", "bone"),
            )

    space = SimpleNamespace(dataset_names=(), dataset_classes=())
    predictor = SimpleNamespace(
        classes=("cat", "dog", "bone"),
        datasets=dict(cats=("cat",), dogs=("dog", "bone"), pets=("dog",)),
        label_space=space,
        mixture=[],
        stream=stream,
    )
    teacher = DetectorTeacher(predictor, batch_size=2)
    bar = SimpleNamespace(begin=lambda *_: None, step=lambda: None)
    (found,) = teacher.find(["a.png"], ["dog"], bar)
    assert asked == ["dogs", "pets"]
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
        ("--from y.json --data cats --classes god --out new", "finds no 'god'"),
        ("--from y.json --data dogs --out new", "nothing to complete"),
        ("--out cats --delete 7", "no predicted label with the id 7"),
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


def test_half_of_the_time_teaches_the_other_half(folders, tmp_path, monkeypatch):
    """Finished steps are kept when the command is repeated."""
    commands = []

    def run(words, *, verbose):
        commands.append(words[3:])
        folder = tmp_path / "run"
        if len(commands) == 1:
            (folder / "teacher").mkdir(parents=True)
            summary = json.dumps(dict(checkpoint="epoch_2.pth"))
            (folder / "teacher" / "summary.json").write_text(summary)
        elif words[3] == "data":
            (folder / "completed").mkdir()

    monkeypatch.setattr("damex.workbench.complete.training.run_command", run)
    options = dict(
        data=[*folders.values()],
        model=None,
        epochs=5,
        device="cpu",
        work_dir=str(tmp_path / "run"),
        options=["moe=dense"],
    )
    train_completed(**options)
    first, between, second = commands
    assert first[first.index("--epochs") + 1] == "2"
    assert second[second.index("--epochs") + 1] == "3"
    teacher = tmp_path / "run" / "teacher" / "epoch_2.pth"
    assert between[:3] == ["data", "complete", str(teacher)]
    assert second[-2:] == ["moe=dense", f"load_from={teacher}"]
    assert second[2:4] == [str(tmp_path / "run" / "completed" / n) for n in folders]
    train_completed(**options)
    assert len(commands) == 4  # the last training alone


@pytest.mark.slow
def test_two_folders_are_trained_completed_and_trained_on(folders, tmp_path):
    """The commands, on real detectors, from the shell's words and from Python."""
    short = {
        "train_dataloader.sampler.samples_per_epoch": 2,
        "train_dataloader.batch_size": 2,
        "model.num_queries": 20,
        "model.test_cfg.max_per_img": 20,
        "image_size": 64,
    }
    run = damex.train(
        folders,
        epochs=2,
        work_dir=tmp_path / "run",
        complete=True,
        options=short,
        verbose=False,
    )
    completed = tmp_path / "run" / "completed"
    assert sorted(path.name for path in completed.iterdir()) == [
        *("cats", "dogs", "index.html", "report.json")
    ]
    detector = Detector(run.checkpoint)
    assert detector.datasets == dict.fromkeys(folders, ("cat", "dog"))
