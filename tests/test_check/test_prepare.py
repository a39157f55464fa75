"""``damex data prepare uodb``: what is missing, and what is made of the rest."""

import json

import pytest
from mmengine.config import Config

from damex.workbench.check.prepare import read_recipes
from damex.workbench.cli.data import data
from damex.workbench.cli.run import run_command
from tests.conftest import CONFIGS


@pytest.fixture
def run(tmp_path, capsys):
    """Run the command on a folder; its status, lines and errors."""

    def call(*names):
        arguments = ["prepare", "uodb", *names, "--root", str(tmp_path)]
        status = run_command(data, arguments)
        said = capsys.readouterr()
        return status, said.out.splitlines(), said.err

    return call


def test_the_configs_datasets_all_have_a_recipe():
    mixture = Config.fromfile(CONFIGS / "_base_/datasets/uodb.py").mixture
    assert [entry["name"] for entry in mixture] == list(read_recipes())
    # COCO's eighty come from its own file.
    counts = [len(recipe.classes.split()) for recipe in read_recipes().values()]
    assert sum(counts) + 80 == 167


def test_only_what_is_missing_is_listed_with_where_to_get_it(run, tmp_path):
    (tmp_path / "kitti" / "JPEGImages").mkdir(parents=True)
    status, lines, _ = run()
    assert (status, lines[-1]) == (1, "0 of 11 datasets are ready")
    text = "\n".join(lines)
    for name, recipe in read_recipes().items():
        assert f"{name}: {recipe.size}; license: {recipe.licence}." in text
        assert recipe.source in text
    start = next(i for i, line in enumerate(lines) if line.startswith("kitti: "))
    assert lines[start + 2 : start + 5] == [
        "    ImageSets/Main/trainval.txt",
        "    ImageSets/Main/test.txt",
        "    Annotations",
    ]


def test_coco_is_parted_by_the_images_of_val2017(run, tmp_path):
    folder = tmp_path / "coco" / "annotations"
    folder.mkdir(parents=True)
    (tmp_path / "coco" / "val2014").mkdir()
    images = [dict(id=i, file_name=f"{i}.jpg", width=48, height=32) for i in (1, 2, 3)]
    boxes = [
        dict(id=i, image_id=i, category_id=7, bbox=[0, 0, 9, 9], segmentation=[[0]])
        for i in (1, 2, 3)
    ]
    whole = dict(
        images=images, annotations=boxes, categories=[dict(id=7, name="train")]
    )
    held = dict(images=images[1:2], annotations=[], categories=[])
    for year, content in ((2014, whole), (2017, held)):
        (folder / f"instances_val{year}.json").write_text(json.dumps(content))
    status, lines, _ = run("coco")
    assert status == 0
    assert lines[0] == "coco: train.json: 2 images, 2 boxes of 1 classes"
    made = {
        split: json.loads((tmp_path / "coco" / f"{split}.json").read_text())
        for split in ("train", "val")
    }
    names = [image["file_name"] for image in made["train"]["images"]]
    assert names == ["val2014/1.jpg", "val2014/3.jpg"]
    assert [record["image_id"] for record in made["val"]["annotations"]] == [2]
    assert run("coco")[1][0].startswith("coco: ready")


def test_a_dataset_in_vocs_layout_becomes_two_coco_files(run, write_voc, tmp_path):
    root = tmp_path / "kitti"
    objects = dict(a=["Car", "Van"], b=["Cyclist"], c=["Car"])
    write_voc(root, objects, trainval="a\nb\n", test="c\n")
    status, lines, said = run("kitti")
    assert status == 0, said
    assert lines[0] == (
        "kitti: train.json: 2 images, 2 boxes of 3 classes, 1 boxes of other classes "
        "left out"
    )
    val = json.loads((root / "val.json").read_text())
    assert [image["file_name"] for image in val["images"]] == ["JPEGImages/c.jpg"]
    assert val["annotations"][0]["category_id"] == 3
    train = json.loads((root / "train.json").read_text())
    names = [category["name"] for category in train["categories"]]
    assert names == ["pedestrian", "cyclist", "car"]
    found = [(a["image_id"], a["category_id"]) for a in train["annotations"]]
    assert sorted(category for _, category in found) == [2, 3]


def test_a_dataset_that_does_not_exist(run):
    status, _, said = run("kiti")
    assert status == 2
    assert "UODB has no dataset 'kiti'; did you mean 'kitti'" in said
