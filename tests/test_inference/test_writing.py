"""Hand-made predictions, and the files that are made of them."""

import csv
import json

import pytest
import torch

from damex.errors import ConfigError, DataError
from damex.inference import writing
from damex.inference.writing import (
    check_outputs,
    csv_table,
    json_document,
    write_checkpoint,
)

CLASSES = ("car", "dog")
WEIGHT = dict(weight=torch.zeros(9_000))


def write(output, pairs):
    with output as add:
        for one, name in pairs:
            add(one, name)


def test_json_is_a_coco_document_with_scores(tmp_path, make_prediction):
    some = make_prediction(probabilities=dict(street=0.25, park=0.75))
    none = make_prediction(dataset=None)
    path = tmp_path / "new" / "found.json"
    write(json_document(path, CLASSES), [(some, "a.png"), (none, "b.png")])
    document = json.loads(path.read_text())
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
    write(csv_table(path), [(some, "a,b.png"), (none, "c.png")])
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


@pytest.mark.parametrize("error", [KeyboardInterrupt, DataError])
@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize(
    ("kind", "read"),
    [
        ("json", lambda path: json.loads(path.read_text())["images"]),
        ("csv", lambda path: [*csv.DictReader(path.open(newline=""))][::2]),
    ],
)
def test_what_was_found_before_a_stop_is_kept(
    tmp_path, make_prediction, kind, read, count, error
):
    """Without anything that was found, an earlier file stays."""
    path = tmp_path / f"found.{kind}"
    path.write_text("earlier")
    output = csv_table(path) if kind == "csv" else json_document(path, CLASSES)

    def found():
        for number in range(count):
            yield make_prediction(), f"{number}.png"
            assert path.read_text() == "earlier"
        raise error

    with pytest.raises(error):
        write(output, found())
    if count:
        assert len(read(path)) == count
    else:
        assert path.read_text() == "earlier"
    assert [*tmp_path.iterdir()] == [path]


def test_rows_are_on_the_disk_before_the_end(tmp_path, make_prediction):
    with csv_table(tmp_path / "found.csv") as add:
        add(make_prediction(), "a.png")
        (part,) = tmp_path.iterdir()
        assert len([*csv.DictReader(part.open(newline=""))]) == 2


def test_a_row_that_was_cut_by_a_stop_is_left_out(
    tmp_path, make_prediction, monkeypatch
):
    path = tmp_path / "found.csv"

    def half(one, name):
        yield [name, "half of the image"]
        raise KeyboardInterrupt

    def found():
        yield make_prediction(), "a.png"
        monkeypatch.setattr(writing, "_rows", half)
        yield make_prediction(), "b.png"

    with pytest.raises(KeyboardInterrupt):
        write(csv_table(path), found())
    names = [row["file"] for row in csv.DictReader(path.open(newline=""))]
    assert names == ["a.png", "a.png"]


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("a.csv", lambda path, found: write(csv_table(path), found)),
        ("a.json", lambda path, found: write(json_document(path, CLASSES), found)),
        ("a.pth", lambda path, _: write_checkpoint(path, WEIGHT, config="")),
        ("a.pth", lambda path, _: write_checkpoint(path, {}, config="#" * 9_000)),
    ],
)
def test_a_full_disk_leaves_the_earlier_file(
    tmp_path, make_prediction, full_disk, name, make
):
    path = tmp_path / name
    path.write_text("earlier")
    found = [(make_prediction(), f"{number}.png") for number in range(100)]
    reason = r"a\.\w+ was not written \(File too large\)"
    with full_disk(4_000), pytest.raises(ConfigError, match=reason):
        make(path, found)
    assert path.read_text() == "earlier"
    assert [*tmp_path.iterdir()] == [path]


def test_inputs_and_outputs_are_different_files(tmp_path):
    image, link = tmp_path / "a.png", tmp_path / "link.json"
    image.write_text("")
    link.symlink_to(image)
    new = tmp_path / "new.json"
    check_outputs([new], [image])
    for targets in ([image], [link], [new, tmp_path / "x" / ".." / "new.json"]):
        with pytest.raises(ConfigError, match="would be replaced"):
            check_outputs(targets, [image])
