"""Hand-made predictions, and the files that are made of them."""

import csv
import dataclasses
import json

import cv2
import numpy as np
import pytest
from PIL import Image

from damex.errors import ConfigError
from damex.inference import Prediction
from damex.inference.images import Inputs
from damex.inference.writing import draw, write_csv, write_json

CLASSES = ("car", "dog")


def prediction(path=None, *, probabilities=None, dataset="park"):
    return Prediction(
        path=path,
        width=96,
        height=64,
        boxes=np.array([[8, 10, 28, 40], [1, 2, 3.5, 4]], np.float32),
        scores=np.array([0.9, 0.25], np.float32),
        labels=np.array([1, 0]),
        names=("dog", "car"),
        dataset=dataset,
        probabilities={} if probabilities is None else probabilities,
    )


def test_json_is_a_coco_document_with_scores(tmp_path):
    some = prediction(probabilities=dict(street=0.25, park=0.75))
    none = prediction(dataset=None)
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


def test_csv_has_a_row_per_detection(tmp_path):
    path = tmp_path / "found.csv"
    some = prediction(probabilities=dict(street=0.25, park=0.75))
    write_csv(path, [some, prediction(dataset=None)], ["a,b.png", "c.png"])
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


def test_boxes_are_drawn_where_they_are(tmp_path):
    source = tmp_path / "a.bmp"
    Image.new("RGB", (96, 64), "white").save(source)
    draw(prediction(source), tmp_path / "seen" / "a.bmp", classes=CLASSES)
    drawn = np.array(Image.open(tmp_path / "seen" / "a.bmp.png"))
    assert drawn.shape == (64, 96, 3)
    assert (drawn[30, 8] != 255).any()  # the left side of the box
    assert (drawn[30, 50] == 255).all()


def make_image(path, kind):
    """An image of a kind whose pixels Pillow and OpenCV see in other ways."""
    rng = np.random.default_rng(0)
    if kind in ("turned", "upside down", "square"):
        turned = Image.Exif()
        turned[0x0112] = 3 if kind == "upside down" else 6
        shape = dict(turned=(96, 64, 3), square=(64, 64, 3)).get(kind, (64, 96, 3))
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        Image.fromarray(pixels).save(path, exif=turned)
    elif kind == "16 bits":
        cv2.imwrite(str(path), rng.integers(0, 2**16, (64, 96), dtype=np.uint16))
    else:
        cv2.imwrite(str(path), rng.random((64, 96, 3), dtype=np.float32))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.png", "turned"),
        ("a.png", "upside down"),
        ("a.png", "square"),
        ("a.png", "16 bits"),
        ("a.tif", "numbers"),
        ("a.hdr", "numbers"),
    ],
)
def test_an_image_is_drawn_as_the_detector_looked_at_it(tmp_path, name, kind):
    source, target = tmp_path / name, tmp_path / "seen" / f"{name}.png"
    make_image(source, kind)
    seen = Inputs([dict(type="LoadImageFromFile")])._read(source)["img"]
    height, width = seen.shape[:2]
    nothing = dict(boxes=np.empty((0, 4)), scores=np.empty(0), names=())
    one = dataclasses.replace(prediction(source), width=width, height=height, **nothing)
    draw(one, target, classes=CLASSES)
    assert np.array_equal(cv2.imread(str(target)), seen)


def test_images_of_any_size_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # what Pillow takes for large
    test_an_image_is_drawn_as_the_detector_looked_at_it(tmp_path, "a.png", "16 bits")


def test_the_image_itself_is_not_replaced(tmp_path):
    source = tmp_path / "a.png"
    Image.new("RGB", (96, 64)).save(source)
    with pytest.raises(ConfigError, match=r"would replace .*a\.png"):
        draw(prediction(source), source, classes=CLASSES)


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file.* cannot be written to"):
        write_csv(tmp_path / "file" / "found.csv", [], [])
