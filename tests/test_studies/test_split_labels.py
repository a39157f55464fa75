"""Halves of a dataset that label other classes, and the default on them."""

import json

import pytest

from damex.__main__ import main
from damex.workbench.cli.run import run_command
from damex.workbench.toydata import generate_toy_mixture
from studies.completing import app as completing
from studies.split_labels import app
from studies.worlds import WORDS, world_specs


@pytest.fixture
def halves(tmp_path):
    """``halves(train, val)``: the folders of two halves of a world."""

    def make(num_train, num_val):
        specs = world_specs(1, names="agreeing", num_train=num_train, num_val=num_val)
        generate_toy_mixture(tmp_path / "worlds", seed=0, specs=specs)
        out = tmp_path / "halves"
        words = [str(tmp_path / "worlds/ruby"), "--out", str(out)]
        assert run_command(app, words) == 0
        return [out / "ruby_a", out / "ruby_b"]

    return make


def test_halves_share_no_label_and_no_training_image(halves):
    found = {
        (path.name, split): json.loads((path / f"{split}.json").read_text("utf-8"))
        for path in halves(9, 4)
        for split in ("train", "val")
    }
    names = {
        key: [category["name"] for category in document["categories"]]
        for key, document in found.items()
    }
    assert names["ruby_a", "train"] == names["ruby_a", "val"] == [*WORDS[::2]]
    assert names["ruby_b", "train"] == names["ruby_b", "val"] == [*WORDS[1::2]]
    files = {
        key: {image["file_name"] for image in document["images"]}
        for key, document in found.items()
    }
    assert len(files["ruby_a", "train"]) == 5
    assert len(files["ruby_b", "train"]) == 4
    assert not files["ruby_a", "train"] & files["ruby_b", "train"]
    assert files["ruby_a", "val"] == files["ruby_b", "val"]
    for document in found.values():
        labels = {category["id"] for category in document["categories"]}
        images = {image["id"] for image in document["images"]}
        assert {one["category_id"] for one in document["annotations"]} <= labels
        assert {one["image_id"] for one in document["annotations"]} <= images
        assert document["annotations"]


def test_halves_may_keep_all_labels_of_some_classes(halves, tmp_path):
    halves(9, 4)
    out, kept = tmp_path / "whole", [WORDS[0], WORDS[3]]
    words = ["--out", str(out), "--all-labels", "--classes", *kept]
    assert run_command(app, [str(tmp_path / "worlds/ruby"), *words]) == 0
    read = {
        split: json.loads((out / "ruby_b" / f"{split}.json").read_text("utf-8"))
        for split in ("train", "val")
    }
    names = {k: [c["name"] for c in one["categories"]] for k, one in read.items()}
    assert names == dict(train=kept, val=[WORDS[3]])
    assert len(read["train"]["images"]) == 4
    labels = {one["category_id"] for one in read["train"]["annotations"]}
    assert labels == {one["id"] for one in read["train"]["categories"]}


def test_the_quality_of_labels_is_counted(tmp_path, capsys):
    """Two of three labels are right, one of them twice; an ignored box is right."""
    boxes = [[0, 0, 10, 6], [20, 0, 10, 6], [40, 0, 10, 6], [60, 0, 10, 6]]
    finds = [boxes[0], [0, 0, 10, 5], [20, 0, 10, 4], boxes[2]]
    images = [dict(id=1, file_name="images/a.png")]
    for folder, rows, more in (
        ("truth", boxes, [{}] * 4),
        ("done", finds, [dict(predicted=True, iscrowd=int(n == 3)) for n in range(4)]),
    ):
        (tmp_path / folder / "cats").mkdir(parents=True)
        category = dict(id=1, name="dog", predicted=folder == "done")
        annotations = [
            dict(id=n, image_id=1, category_id=1, bbox=box, score=1 - n / 10, **also)
            for n, (box, also) in enumerate(zip(rows, more, strict=True))
        ]
        document = dict(images=images, annotations=annotations, categories=[category])
        file = tmp_path / folder / "cats" / "train.json"
        file.write_text(json.dumps(document))
    words = ["quality", str(tmp_path / "done"), str(tmp_path / "truth")]
    assert run_command(completing, words) == 0
    row = capsys.readouterr().out.splitlines()[1].split()
    assert row == ["cats", "dog", "3", "1", "4", "67%", "50%", "75%"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("moe=dense",)])
def test_datasets_that_look_alike_share_experts(halves, tmp_path, options, capfd):
    """Else images go to experts that have not learned their labels: a warning."""
    work = tmp_path / "work"
    words = ["--data", *map(str, halves(240, 8)), "--work-dir", str(work)]
    words += ["--cfg-options", *options, "image_size=128", "max_epochs=1"]
    words += ["train_dataloader.sampler.samples_per_epoch=32"]
    assert main(["train", *words]) == 0
    printed = capfd.readouterr().out
    says_so = "ruby_a and ruby_b look alike: they share experts." in printed
    assert says_so == (not options)
    assert "ruby_a does not annotate: " in printed
    summary = json.loads((work / "summary.json").read_text("utf-8"))
    assert "warnings" not in summary
    assert [row["images"] for row in summary["datasets"].values()] == [8, 8]
