"""The command: what it prints, what it writes, and how it ends."""

import json
from typing import ClassVar

import pytest
from mmengine.dataset import Compose

from damex.datasets.coco import NamedCocoDataset
from damex.datasets.findings import MAX_LISTED
from damex.datasets.mixture import MixtureDataset
from damex.errors import DataError
from damex.workbench.check.check import check_config
from damex.workbench.cli.data import data
from damex.workbench.cli.run import run_command
from tests.test_check.conftest import CLASSES, SIZE, picture


@pytest.fixture
def run(capsys):
    def call(*arguments):
        status = run_command(data, [*map(str, arguments)])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


def coco(dataset, split="train"):
    return (
        "--coco",
        dataset.root / f"{split}.json",
        "--images",
        dataset.root / "images",
    )


def test_only_an_error_ends_with_1(dataset, run):
    dataset.write()
    status, out, _ = run("check", *coco(dataset))
    assert status == 0
    assert "0 errors, 0 warnings, 0 infos" in out
    assert "14 images and 42 boxes" in out
    dataset.train["annotations"][4]["area"] = 0
    dataset.write()
    status, out, _ = run("check", *coco(dataset))
    assert (status, "area-zero (1)" in out) == (0, True)


def test_an_error_ends_with_1_and_the_report_has_these_fields_alone(
    dataset, run, tmp_path
):
    dataset.image(2).unlink()
    dataset.train["annotations"][4].update(bbox=[500, 2, 10, 10], area=100)
    dataset.write()
    report = tmp_path / "reports" / "street.json"  # its folder is made
    status, out, _ = run("check", *coco(dataset), "--json", report)
    assert status == 1
    written = json.loads(report.read_text())
    assert [*written] == ["findings"]
    fields = ["level", "kind", "dataset", "file", "record", "message"]
    assert [[*row] for row in written["findings"]] == [fields] * 2
    assert {row["kind"] for row in written["findings"]} == {
        "box-outside",
        "image-missing",
    }
    for row in written["findings"]:
        assert row["message"].removeprefix("dataset 'train': ") in out


def test_a_config_is_checked_with_its_options(dataset, run, tmp_path):
    dataset.write()
    dataset.image(2).write_bytes(b"")
    config = tmp_path / "config.py"
    entry = dataset.config()["mixture"][0]
    config.write_text(f"model = dict(num_queries=2)\nmixture = [{entry!r}]\n")
    status, out, _ = run("check", config, "--quick")
    assert status == 1
    assert "many-boxes (20)" in out
    assert "image-empty (1)" in out
    status, out, _ = run(
        "check", config, "--quick", "--cfg-options", "model.num_queries=3"
    )
    assert "many-boxes" not in out
    status, out, _ = run(
        "check", config, "--quick", "--cfg-options", "mixture.0.tile=16"
    )
    assert "many-boxes" not in out  # a window shows some of them


@pytest.mark.parametrize("command", ["check", "browse", "labels"])
def test_a_folder_stands_for_a_config_of_one_dataset(
    dataset, run, tmp_path, monkeypatch, command
):
    dataset.write()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for folder in (dataset.root, "street", "~/street"):
        status, out, err = run(command, folder)
        assert (status, err.strip()) == (0, "")
        assert {
            "check": "in 1 dataset with 20 images and 60 boxes",
            "browse": "index.html: 2 splits",
            "labels": "car     street: 14",
        }[command] in out
    missing = tmp_path / "stret/*"
    fault = f"'{missing}' is not a folder, and there is no config file '{missing}'"
    assert fault in run(command, missing)[2]


def test_a_folder_is_checked_as_a_training_on_it_would_see_it(dataset, run):
    """Images of 96 pixels are not shrunk to 256; where they are to 48, boxes are."""
    dataset.write()
    assert "boxes-small" not in run("check", dataset.root)[1]
    out = run("check", dataset.root, "--cfg-options", "image_size=48")[1]
    assert "are below 16 px where images are scaled to 48 x 48. tile=48" in " ".join(
        out.split()
    )


def test_a_report_that_cannot_be_written_is_refused_before_the_check(
    dataset, run, tmp_path
):
    (tmp_path / "street/train.json").write_text("never read")
    status, out, err = run("check", tmp_path / "street", "--json", tmp_path)
    assert (status, out) == (2, "")
    assert f"{tmp_path} is a folder; name a file to write to." in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "check takes a config"),
        (("quickstart", "--coco", "a", "--images", "b"), "or --coco FILE"),
        (("--coco", "a"), "belong together"),
    ],
)
def test_a_wrong_command_line_is_said(run, arguments, part):
    status, _, err = run("check", *arguments)
    assert status == 2
    assert part in err


def test_a_dataset_class_of_mmdet_is_checked_by_what_it_loads(dataset):
    """An mmdet class that is not COCO's: its images and boxes are looked at."""
    dataset.write()
    cfg = dataset.config(train=dict(type=PlainDataset, path=str(dataset.root)))
    findings = check_config(cfg, quick=False).findings
    assert [f.kind for f in findings if f.level == "error"] == ["image-missing"]
    assert "not-checked" in {f.kind for f in findings}
    assert next(f.record for f in findings if f.level == "error") == "image 1"


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (lambda: dict(train=dict(type=PlainDataset, path=None)), "TypeError"),
        (lambda: dict(root="/lost"), "/lost"),
    ],
)
def test_what_cannot_be_loaded_is_a_finding_and_the_rest_is_checked(
    dataset, entry, message
):
    dataset.train["annotations"][4]["area"] = 0
    dataset.write()
    cfg = dataset.config()
    cfg["mixture"].append(dict(name="lost", **entry()))
    others = check_config(dataset.config(), quick=True).findings
    findings = check_config(cfg, quick=True).findings
    lost = [f for f in findings if f.dataset == "lost"]
    assert {(f.kind, f.level) for f in lost} == {("not-loaded", "error")}
    assert len(lost) == len({f.message for f in lost})  # not once per split
    assert message in lost[0].message
    assert [f for f in findings if f not in lost] == others


class PlainDataset(NamedCocoDataset.__mro__[2]):
    """Two images, of which one does not exist."""

    METAINFO: ClassVar = dict(classes=("car", "tree", "person"))

    def __init__(self, *, path, **kwargs):
        self.path = path + "/images"
        super().__init__(**kwargs)

    def load_data_list(self):
        instances = [
            dict(bbox=[5 * i, 5, 5 * i + 20, 30], bbox_label=i % 3, ignore_flag=0)
            for i in range(12)
        ]
        size = dict(width=SIZE[0], height=SIZE[1], instances=instances)
        return [
            dict(img_path=f"{self.path}/1.jpg", img_id=1, **size),
            dict(img_path=f"{self.path}/none.jpg", img_id=2, **size),
        ]


def test_a_coco_dataset_written_as_a_dict_is_checked_as_a_file(dataset):
    dataset.train["annotations"][4]["area"] = 0
    dataset.write()
    paths = dict(ann_file="train.json", data_prefix=dict(img="images/"))
    inner = dict(type="CocoDataset", **paths)
    repeated = dict(type="RepeatDataset", times=2, dataset=inner)
    cfg = dataset.config(train=repeated, classes=CLASSES)
    [finding] = check_config(cfg, quick=False).findings
    assert (finding.kind, finding.record) == ("area-zero", "annotation 7")


@pytest.fixture
def yolo(tmp_path, monkeypatch):
    """A folder with a box of another class, a thin box and a missing image."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "bees"
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (root / split / kind).mkdir(parents=True)
        for number in range(3):
            file = root / split / "images" / f"{number}.jpg"
            picture(len(split) * 10 + number).save(file)
            lines = ["0 .5 .5 .2 .3", "0 .2 .2 .2 .002", "0 .3 .4 .2 .1"]
            lines[2:] = lines[2:] if number else ["0 2.3 .4 .2 .1"]
            text = "\n".join(lines)
            (root / split / "labels" / f"{number}.txt").write_text(text)
    (root / "train" / "images" / "2.jpg").unlink()
    (root / "data.yaml").write_text("names: [bee]\ntrain: train\nval: val\n")
    return root


def test_findings_of_a_folder_name_its_files_and_what_was_left_out(yolo, run, tmp_path):
    config = tmp_path / "bees.py"
    config.write_text(f"mixture = [dict(name='bees', root={str(yolo)!r})]")
    report = tmp_path / "report.json"
    status, out, _ = run("check", config, "--quick", "--json", report)
    assert (status, "cache" in out) == (0, False)
    top = out.strip().splitlines()[:4]
    assert top[0].startswith("bees: 0 errors")
    assert "warning left-out" in top[1]
    assert "boxes" in " ".join(top[2:4])
    found = json.loads(report.read_text())["findings"]
    assert ("labels/1.txt", "line 2") in {
        (f["file"].removeprefix(f"{yolo}/train/"), f["record"])
        for f in found
        if f["kind"] == "box-thin"
    }
    dataset = MixtureDataset(datasets=[dict(name="bees", root=str(yolo))])
    image = yolo / "train" / "images" / "1.jpg"
    image.unlink()
    dataset.pipelines[0] = Compose([dict(type="LoadImageFromFile")])
    with pytest.raises(DataError, match=rf"{image} does .*image train/images/1.jpg of"):
        dataset[1]


def test_leaks_are_found_across_datasets(dataset, tmp_path):
    dataset.write()
    other = tmp_path / "park"
    (other / "images").mkdir(parents=True)
    for number in range(1, 21):
        picture(100 + number).save(other / "images" / f"{number}.jpg")
    for split in ("train", "val"):
        (other / f"{split}.json").write_text(
            (dataset.root / f"{split}.json").read_text()
        )
    (other / "images" / "17.jpg").write_bytes(dataset.image(3).read_bytes())
    entry = dict(name="park", data_root=f"{other}/", train="train.json", val="val.json")
    mixture = [*dataset.config()["mixture"], dict(entry, img="images/")]
    [finding] = check_config(dict(mixture=mixture), quick=False).findings
    assert (finding.kind, finding.dataset) == ("leak-identical", "park")
    assert str(dataset.image(3)) in finding.message


def test_many_findings_of_a_kind_end_in_their_number(dataset):
    record = dataset.train["annotations"][4]
    for number in range(MAX_LISTED + 50):
        again = {**record, "id": 1000 + number, "bbox": [500 + number, 0, 9, 9]}
        dataset.train["annotations"].append({**again, "area": 81})
    dataset.image(2).unlink()
    every = dataset.check()
    assert "image-missing" in {f.kind for f in every}  # each kind has its own limit
    findings = [f for f in every if f.kind == "box-outside"]
    assert len(findings) == MAX_LISTED + 1
    assert findings[-1].count == 50
    assert "50 more" in findings[-1].message
