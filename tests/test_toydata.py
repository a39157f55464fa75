"""The toy mixture: true boxes, promised traits, and generation as a whole."""

import hashlib
import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from damex.__main__ import main
from damex.workbench import toydata
from damex.workbench.toydata import (
    DATASETS,
    ICONS,
    SPLITS,
    TOYS,
    VERSION,
    generate_toy_mixture,
    render_image,
    source_columns,
    source_indices,
)
from damex.workbench.toydata.drawing import SHAPES, Box, Canvas, draw

NAMES = ["shapes", "digits", "photos", "playroom", "arcade"]
SMALL = tuple(
    replace(spec, num_train=8 - index, num_val=3) for index, spec in enumerate(DATASETS)
)


@pytest.fixture(scope="module")
def small_root(tmp_path_factory):
    root = tmp_path_factory.mktemp("toy") / "small"
    generate_toy_mixture(root, specs=SMALL)
    return root


def read(root, name, split):
    return json.loads((root / name / f"{split}.json").read_text(encoding="utf-8"))


def files_of(root):
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def solid(height, width):
    return sprite_of(np.ones((height, width)))


def sprite_of(alpha):
    return np.dstack([np.zeros((*alpha.shape, 3)), alpha])


@pytest.fixture
def canvas():
    return Canvas(np.ones((30, 30, 3)))


def test_box_is_tight_around_half_covered_pixels(canvas):
    alpha = np.zeros((6, 8))
    alpha[2:5, 3:7] = 0.5
    alpha[1, 3:7] = 0.49  # a soft edge, less than half covered
    assert canvas.paste(sprite_of(alpha), 10, 5, name="a")
    # x = 10 + 3, y = 5 + 2, columns 3..6 and rows 2..4
    assert canvas.boxes() == [Box("a", 13, 7, 4, 3)]


def test_box_shrinks_to_what_stays_visible_and_that_is_60_percent(canvas):
    canvas.paste(solid(10, 10), 0, 0, name="below")
    before = canvas.pixels.copy()
    # columns 5..9 would be hidden: 50 % left
    assert not canvas.paste(solid(20, 20), 5, 0, name=None)
    np.testing.assert_array_equal(canvas.pixels, before)
    # columns 7..9 are hidden: 70 % is left, 7 columns wide
    assert canvas.paste(solid(20, 10), 7, 0, name="above")
    assert canvas.boxes() == [Box("below", 0, 0, 7, 10), Box("above", 7, 0, 10, 20)]


def test_thin_objects_do_not_pile_up(canvas):
    frame = np.ones((20, 20))
    frame[2:18, 2:18] = 0
    canvas.paste(sprite_of(frame), 0, 0, name="frame")
    # no pixel of the frame is hidden, but its box holds the whole of the other
    assert not canvas.paste(solid(8, 8), 6, 6, name="inner")
    assert canvas.paste(solid(8, 8), 6, 6, name=None)


@pytest.mark.parametrize(("size", "angle"), [(12, 2.0), (56, 0.7)])
@pytest.mark.parametrize(
    "shape", [name for name in SHAPES if name not in ("cross", "stick")]
)
def test_drawing_fits_its_size_without_empty_border(shape, size, angle):
    sprite = draw(SHAPES[shape], (0.8, 0.2, 0.2), size=size, angle=angle)
    alpha = sprite[:, :, 3]
    assert 0.55 * size < max(alpha.shape) <= size
    assert all(edge.any() for edge in (alpha[0], alpha[-1], *alpha.T[[0, -1]]))


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_json_is_valid_coco(small_root, name, split):
    path = small_root / name / f"{split}.json"
    command = ["data", "check", "--coco", str(path), "--images"]
    assert main([*command, str(small_root / name / "images")]) == 0
    content = read(small_root, name, split)
    assert (content["info"]["version"], content["info"]["seed"]) == (VERSION, 0)
    for key in ("images", "annotations", "categories"):
        ids = [entry["id"] for entry in content[key]]
        assert ids == list(range(1, len(ids) + 1))
    for entry in content["annotations"]:
        assert entry["area"] == entry["bbox"][2] * entry["bbox"][3]
    with_boxes = {entry["image_id"] for entry in content["annotations"]}
    assert len(with_boxes) == len(content["images"])


@pytest.mark.parametrize("spec", DATASETS, ids=NAMES)
def test_every_class_occurs_and_numbers_of_objects_vary(spec):
    images = [render_image(spec, "train", index, seed=0).boxes() for index in range(40)]
    assert {box.name for boxes in images for box in boxes} == set(spec.classes)
    numbers = {len(boxes) for boxes in images}
    assert numbers <= {*range(1, 9)}
    assert len(numbers) >= 4


def test_json_holds_the_rendered_boxes(small_root):
    spec = SMALL[3]
    content = read(small_root, spec.name, "val")
    canvas = render_image(spec, "val", 2, seed=0)
    assert canvas.boxes() == [
        Box(spec.classes[entry["category_id"] - 1], *entry["bbox"])
        for entry in content["annotations"]
        if entry["image_id"] == 3
    ]


def test_names_overlap_under_different_ids():
    ids = {
        spec.name: {name: i for i, name in enumerate(spec.classes, start=1)}
        for spec in DATASETS
    }
    counts = Counter(name for names in ids.values() for name in names)
    assert len(counts) == 24
    shared = {name for name, count in counts.items() if count > 1}
    assert shared == {"circle", "star", "car"}
    for name in shared:
        first, other = (names[name] for names in ids.values() if name in names)
        assert first != other
    assert all(list(spec.classes) != sorted(spec.classes) for spec in DATASETS)


def test_playroom_and_arcade_name_the_same_drawings_differently():
    assert [row[1:] for row in TOYS[:3]] == [row[1:] for row in ICONS[:3]]
    assert not {row[0] for row in TOYS} & {row[0] for row in ICONS}


def test_splits_share_no_digit_and_no_column_of_a_photograph():
    train, val = (source_indices(split) for split in SPLITS)
    assert (train, val) == (range(1438), range(1438, 1797))  # 80 % of 1797
    train, val = (source_columns(split, width=640) for split in SPLITS)
    # five strips of 640 / 5 = 128 columns that take turns
    assert train == ((0, 128), (256, 384), (512, 640))
    assert val == ((128, 256), (384, 512))


def test_bytes_depend_on_the_seed_only(small_root, tmp_path):
    np.random.seed(123)
    state = np.random.get_state()[1].copy()
    for seed in (0, 1):
        generate_toy_mixture(tmp_path / f"{seed}", seed=seed, specs=SMALL)
    np.testing.assert_array_equal(np.random.get_state()[1], state)
    first, other = files_of(tmp_path / "0"), files_of(tmp_path / "1")
    assert first == files_of(small_root)
    assert first.keys() == other.keys()
    assert not set(first.values()) & set(other.values())
    assert max(Counter(first.values()).values()) == 1  # no image occurs twice
    # An image does not depend on how many there are.
    generate_toy_mixture(tmp_path / "2", specs=[replace(SMALL[0], num_train=2)])
    name = "shapes/images/train_00001.jpg"
    assert files_of(tmp_path / "2")[name] == first[name]


def test_an_interruption_leaves_nothing(tmp_path, monkeypatch):
    write = toydata._write_split

    def interrupted(root, spec, split, seed):
        if spec.name == "arcade":
            raise KeyboardInterrupt
        return write(root, spec, split, seed)

    monkeypatch.setattr(toydata, "_write_split", interrupted)
    with pytest.raises(KeyboardInterrupt):
        generate_toy_mixture(tmp_path / "out", specs=SMALL[3:])
    assert not [*tmp_path.iterdir()]


def test_a_second_call_leaves_every_file_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(toydata, "DATASETS", SMALL)
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is filled
    generate_toy_mixture(out, specs=SMALL)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.*")}
    assert main(["toydata", "--out", str(out)]) == 0
    assert "holds the toy mixture already; to make it" in capsys.readouterr().out
    assert main(["toydata", "--out", str(out), "--seed", "1"]) == 2
    assert "out exists; remove it, or name another --out" in capsys.readouterr().err
    assert before == {p: p.stat().st_mtime_ns for p in out.rglob("*.*")}
    (out / "arcade/val.json").unlink()  # incomplete
    assert main(["toydata", "--out", str(out)]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--out", "."], ". exists; remove it"),
        (["--out", "notes.txt"], "notes.txt exists; remove it"),
        (["--out", "new", "--seed", "-1"], "Must be >= 0"),
    ],
)
def test_the_command_refuses(tmp_path, monkeypatch, capsys, words, message):
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert main(["toydata", *words]) == 2
    assert message in capsys.readouterr().err
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt"}
