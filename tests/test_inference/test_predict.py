"""``damex predict``: the command as it is typed, and the files of its predictions."""

import csv
import dataclasses
import json
import shutil
from contextlib import nullcontext
from pathlib import Path

import mmcv
import pytest
import torch
from PIL import Image

from damex.__main__ import main
from damex.errors import ConfigError
from damex.inference.stored import write_checkpoint
from damex.workbench.cli import predict as command
from damex.workbench.cli.predict import coco_document, write_csv


@pytest.fixture
def predict(save, capsys):
    """Run the command on a checkpoint; returns its status and what it said."""
    checkpoint = save()
    capsys.readouterr()  # what building a detector says

    def run(*arguments):
        words = [str(word) for word in (checkpoint, *arguments, "--device", "cpu")]
        status = main(["predict", *words])
        return status, capsys.readouterr()

    return run


def test_images_are_listed_written_and_drawn(predict, photos, tmp_path):
    found, table, seen = (tmp_path / name for name in ("f.json", "f.csv", "seen"))
    outputs = ("--json", found, "--csv", table, "--draw", seen)
    options = ("--min-score", 0.2, "--min-probability", 0)
    status, said = predict(photos, *options, *outputs)
    assert status == 0
    *lines, last = said.out.splitlines()
    names = ["a.png", "b.jpg", "deep/a.png"]
    assert [line.split()[0] for line in lines] == names
    document = json.loads(found.read_text())
    assert [image["file_name"] for image in document["images"]] == names
    number = len(document["annotations"])
    assert number > 0
    assert last == f"3 images, {number} objects"
    with table.open(newline="") as file:
        assert len([*csv.DictReader(file)]) == number
    for image in document["images"]:
        with Image.open(seen / image["file_name"]) as drawn:
            assert drawn.size == (image["width"], image["height"])


def test_broken_images_are_named_at_the_end(predict, photos):
    (photos / "broken.png").write_text("not an image")
    Image.new("RGB", (1000, 2)).save(photos / "line.png")
    status, said = predict(photos, "--min-probability", 0)
    assert status == 1
    *_, count, error, broken, line = said.out.splitlines()
    assert count.startswith("3 images, ")
    assert error == "error: 2 of 5 files could not be read:"
    assert "broken.png is not an image that can be read." in broken
    assert "line.png (1000 x 2 px) cannot be resized as in the training" in line


def test_frames_of_a_video_are_images(predict, photos, clip, tmp_path):
    (tmp_path / "bad.avi").write_text("no video")
    found, seen = tmp_path / "found.json", tmp_path / "seen"
    options = ("--min-probability", 0, "--json", found, "--draw", seen)
    words = (photos / "a.png", clip, tmp_path / "bad.avi")
    status, said = predict(*words, *options, "--batch-size", 4)
    assert status == 1
    assert "error: 1 of 3 files could not be read:" in said.out
    assert "bad.avi is not a video that OpenCV can read." in said.out.splitlines()[-1]
    names = ["photos/a.png", *(f"clip.mp4:{number}" for number in range(5))]
    assert [line.split()[0] for line in said.out.splitlines()[:6]] == names
    document = json.loads(found.read_text())
    assert [image["file_name"] for image in document["images"]] == names
    assert len(mmcv.VideoReader(str(seen / "clip.mp4"))) == 5


def test_drawings_of_a_folder_above_stay_in_their_folder(predict, photos, monkeypatch):
    """``../photos`` and ``more`` share a folder above the one that was named."""
    work = photos.parent / "work"
    shutil.copytree(photos / "deep", work / "more")
    shutil.copytree(photos / "deep", work / "photos")
    before = {path: path.read_bytes() for path in work.rglob("*.png")}
    monkeypatch.chdir(work)
    status, _ = predict("../photos/a.png", "more", "--draw", "seen", "--json", "f.json")
    assert status == 0
    assert {path: path.read_bytes() for path in before} == before
    names = ["photos/a.png", "work/more/a.png"]
    images = json.loads(Path("f.json").read_text())["images"]
    assert [image["file_name"] for image in images] == names
    assert all((work / "seen" / name).is_file() for name in names)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
def test_what_was_found_before_a_stop_is_written(
    predict, photos, tmp_path, monkeypatch, kind
):
    found, table, seen = (tmp_path / name for name in ("f.json", "f.csv", "seen"))
    outputs = ("--json", found, "--csv", table, "--draw", seen)
    options = ("--min-score", 0.2, "--batch-size", 2)

    def stop_at_the_third(one, name, least, line_of=command.line_of):
        if name == "deep/a.png":
            raise kind("stop")
        return line_of(one, name, least)

    monkeypatch.setattr(command, "line_of", stop_at_the_third)
    with nullcontext() if kind is KeyboardInterrupt else pytest.raises(kind):
        status, said = predict(photos, *options, *outputs)
        assert status == 130
        assert said.out.splitlines()[-1] == "partial: stopped after 2 of 3 images"
        assert not said.err.strip()
    document = json.loads(found.read_text())
    names = ["a.png", "b.jpg"]
    assert [image["file_name"] for image in document["images"]] == names
    with table.open(newline="") as file:
        assert [*dict.fromkeys(row["file"] for row in csv.DictReader(file))] == names
    assert sorted(path.name for path in seen.iterdir()) == names
    assert not [*tmp_path.glob(".part*")]


@pytest.mark.parametrize("option", ["--json", "--csv", "--draw"])
def test_a_full_disk_ends_in_one_line(predict, photos, tmp_path, full_disk, option):
    out = tmp_path / "out"
    out.mkdir()
    target = out if option == "--draw" else out / "found"
    with full_disk(200):
        status, said = predict(photos, "--min-score", 0, option, target)
    assert status == 2
    assert said.out.splitlines()[-1].startswith("partial: stopped after ")
    (line,) = said.err.strip().splitlines()
    assert "was not written (File too large); free space" in line
    assert not [*out.iterdir()]


def test_a_dense_detector_looks_for_all_classes(save, photos, capsys):
    path = save(moe=False)
    capsys.readouterr()
    assert main(["predict", str(path), str(photos), "--device", "cpu"]) == 0
    note, *lines = capsys.readouterr().out.splitlines()
    assert note.startswith("note: ")
    assert note.endswith("its classes: street, park, sky.")
    assert [line.split()[0] for line in lines[:-1]] == ["a.png", "b.jpg", "deep/a.png"]
    assert not any(line.startswith("note") for line in lines)


def test_names_of_strangers_reach_no_terminal_and_no_formula(tmp_path, make_prediction):
    bad = "=1+1\x1b]0;owned\x07"
    names = dict(names=(bad, "@car"), dataset=bad, probabilities={bad: 0.4})
    one = dataclasses.replace(make_prediction(), **names)
    line = command.line_of(one, "+a\r.png", 0.5)
    assert "\x1b" not in line
    assert len(line.splitlines()) == 1
    assert r"=1+1\x1b]0;owned\x07 0.40" in line
    write_csv(tmp_path / "found.csv", [(one, "+a.png")])
    with (tmp_path / "found.csv").open() as file:
        rows = [*csv.DictReader(file)]
    shown = r"'=1+1\x1b]0;owned\x07"
    assert [row["class"] for row in rows] == [shown, "'@car"]
    assert (rows[0]["file"], rows[0]["dataset"]) == ("'+a.png", shown)


def test_images_that_look_like_no_dataset_are_marked(predict, photos):
    path = photos / "a.png"
    status, said = predict(path, "--min-probability", 1)
    assert status == 0
    first, counts, *_ = said.out.splitlines()
    assert first.endswith("looks like no dataset of the training")
    assert counts.startswith("1 image, ")
    assert "warning: 1 of them looks like no dataset" in said.out
    for quiet in (("--min-probability", 0), ("--dataset", "park")):
        _, said = predict(path, *quiet)
        assert "look" not in said.out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["none/"], "there is no file or folder none/"),
        (["a.png", "--json", "a.png/found.json"], "a.png cannot be written to"),
        (["a.png", "--json", "deep"], "deep is a folder; name a file"),
        (["a.png", "--json", "deep/../a.png"], "a.png would be replaced"),
        (["a.png", "--json", "link"], "link would be replaced"),
        (["deep", "--json", "f", "--csv", "./f"], "f would be replaced"),
        (["a.png", "--draw", "b.jpg"], "b.jpg cannot be written to"),
        (["a.png", "--draw", "."], "would write to ., where a.png lies"),
        (["a.png", "deep", "--draw", "deep"], "to deep, where deep/a.png lies"),
    ],
)
def test_mistakes_end_in_one_line(predict, photos, monkeypatch, arguments, words):
    monkeypatch.chdir(photos)
    Path("link").symlink_to("a.png")
    before = {path: path.read_bytes() for path in photos.rglob("*.*")}
    status, said = predict(*arguments)
    assert {path: path.read_bytes() for path in photos.rglob("*.*")} == before
    assert status == 2
    assert words in said.err
    assert len(said.err.strip().splitlines()) == 1


CLASSES = ("car", "dog")
WEIGHT = dict(weight=torch.zeros(9_000))


def test_json_is_a_coco_document_with_scores(make_prediction):
    some = make_prediction(probabilities=dict(street=0.25, park=0.75))
    none = make_prediction(dataset=None)
    document = coco_document([(some, "a.png"), (none, "b.png")], CLASSES)
    size = dict(width=96, height=64)
    assert document["images"] == [
        dict(id=1, file_name="a.png", **size, dataset="park", probability=0.75),
        dict(id=2, file_name="b.png", **size),
    ]
    assert document["categories"] == [dict(id=1, name="car"), dict(id=2, name="dog")]
    assert [row["id"] for row in document["annotations"]] == [1, 2, 3, 4]
    assert document["annotations"][0] == dict(
        id=1,
        image_id=1,
        category_id=2,
        bbox=[8.0, 10.0, 20.0, 30.0],
        area=600.0,
        score=0.9,
        iscrowd=0,
    )


def test_csv_has_a_row_per_detection(tmp_path, make_prediction):
    path = tmp_path / "found.csv"
    some = make_prediction(probabilities=dict(street=0.25, park=0.75))
    none = make_prediction(dataset=None)
    write_csv(path, [(some, "a,b.png"), (none, "c.png")])
    with path.open(newline="") as file:
        rows = [*csv.DictReader(file)]
    assert len(rows) == 4
    assert rows[0] == {
        **{"file": "a,b.png", "width": "96", "height": "64", "dataset": "park"},
        **{"probability": "0.75", "class": "dog", "score": "0.9"},
        **{"x1": "8.0", "y1": "10.0", "x2": "28.0", "y2": "40.0"},
    }
    assert (rows[3]["class"], rows[3]["dataset"], rows[3]["probability"]) == (
        "car",
        "",
        "",
    )


def test_without_any_image_earlier_files_stay_after_a_stop(
    predict, photos, tmp_path, monkeypatch
):
    files = [tmp_path / "a.json", tmp_path / "a.csv"]
    for path in files:
        path.write_text("earlier")

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "line_of", stop)
    status, _ = predict(photos, "--json", files[0], "--csv", files[1])
    assert status == 130
    assert all(path.read_text() == "earlier" for path in files)


@pytest.mark.parametrize(
    "content", [dict(state=WEIGHT, config=""), dict(state={}, config="#" * 9_000)]
)
def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, full_disk, content):
    path = tmp_path / "a.pth"
    path.write_text("earlier")
    reason = r"a\.\w+ was not written \(File too large\)"
    with full_disk(4_000), pytest.raises(ConfigError, match=reason):
        write_checkpoint(path, **content)
    assert path.read_text() == "earlier"
    assert [*tmp_path.iterdir()] == [path]
