"""Hand-made predictions, and the files that are made of them."""

import csv
import json

import pytest

from damex.errors import ConfigError
from damex.inference.writing import write_csv, write_json

CLASSES = ("car", "dog")


def test_json_is_a_coco_document_with_scores(tmp_path, make_prediction):
    some = make_prediction(probabilities=dict(street=0.25, park=0.75))
    none = make_prediction(dataset=None)
    path = tmp_path / "new" / "found.json"
    write_json(path, [some, none], ["a.png", "b.png"], CLASSES)
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
    write_csv(path, [some, make_prediction(dataset=None)], ["a,b.png", "c.png"])
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


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.* cannot be written to"):
        write_csv(tmp_path / "file" / "found.csv", [], [])
