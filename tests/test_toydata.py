"""The toy mixture: true boxes, promised traits, and a generation in one step."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from damex import toydata
from damex.__main__ import main
from damex.commandline.run import run_command
from damex.errors import DataError
from damex.toydata import VERSION, generate_toy_mixture, render_image
from damex.toydata.__main__ import app, contact_sheet
from damex.toydata.domains import (
    DATASETS,
    ICONS,
    SPLITS,
    TOYS,
    WORDS,
    WORLDS,
    source_columns,
    source_indices,
    world_specs,
)
from damex.toydata.drawing import SHAPES, Box, Canvas, draw

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


class TestCanvas:
    def test_box_is_tight_around_half_covered_pixels(self, canvas):
        alpha = np.zeros((6, 8))
        alpha[2:5, 3:7] = 0.5
        alpha[1, 3:7] = 0.49  # a soft edge, less than half covered
        assert canvas.paste(sprite_of(alpha), 10, 5, name="a")
        # x = 10 + 3, y = 5 + 2, columns 3..6 and rows 2..4
        assert canvas.boxes() == [Box("a", 13, 7, 4, 3)]

    def test_box_shrinks_to_what_stays_visible_and_that_is_60_percent(self, canvas):
        canvas.paste(solid(10, 10), 0, 0, name="below")
        before = canvas.pixels.copy()
        # columns 5..9 would be hidden: 50 % left
        assert not canvas.paste(solid(20, 20), 5, 0, name=None)
        np.testing.assert_array_equal(canvas.pixels, before)
        # columns 7..9 are hidden: 70 % is left, 7 columns wide
        assert canvas.paste(solid(20, 10), 7, 0, name="above")
        assert canvas.boxes() == [Box("below", 0, 0, 7, 10), Box("above", 7, 0, 10, 20)]

    def test_thin_objects_do_not_pile_up(self, canvas):
        frame = np.ones((20, 20))
        frame[2:18, 2:18] = 0
        canvas.paste(sprite_of(frame), 0, 0, name="frame")
        # no pixel of the frame is hidden, but its box holds the whole of the other
        assert not canvas.paste(solid(8, 8), 6, 6, name="inner")
        assert canvas.paste(solid(8, 8), 6, 6, name=None)


class TestSprites:
    @pytest.mark.parametrize(("size", "angle"), [(12, 2.0), (56, 0.7)])
    @pytest.mark.parametrize(
        "shape", [name for name in SHAPES if name not in ("cross", "stick")]
    )
    def test_drawing_fits_its_size_without_empty_border(self, shape, size, angle):
        sprite = draw(SHAPES[shape], (0.8, 0.2, 0.2), size=size, angle=angle)
        alpha = sprite[:, :, 3]
        assert 0.55 * size < max(alpha.shape) <= size
        assert all(edge.any() for edge in (alpha[0], alpha[-1], *alpha.T[[0, -1]]))

    def test_angle_turns_clockwise(self):
        wedge = [([(0, 0), (0.9, -0.1), (0.9, 0.1)], 1)]
        right = draw(wedge, (1, 1, 1), size=40)
        down = draw(wedge, (1, 1, 1), size=40, angle=np.pi / 2)
        assert right.shape[1] > 3 * right.shape[0]
        # the point is at the start, the wide end where the wedge points to
        assert down.shape[0] > 3 * down.shape[1]
        assert down[-2, :, 3].sum() > down[1, :, 3].sum()


class TestContent:
    @pytest.mark.parametrize("split", SPLITS)
    @pytest.mark.parametrize("name", NAMES)
    def test_json_is_valid_coco(self, small_root, name, split):
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
    def test_every_class_occurs_and_numbers_of_objects_vary(self, spec):
        renderer = spec.build_renderer("train")
        images = [
            render_image(spec, "train", index, seed=0, renderer=renderer).boxes()
            for index in range(40)
        ]
        assert {box.name for boxes in images for box in boxes} == set(spec.classes)
        numbers = {len(boxes) for boxes in images}
        assert numbers <= {*range(1, 9)}
        assert len(numbers) >= 4

    def test_json_holds_the_rendered_boxes(self, small_root):
        spec = SMALL[3]
        content = read(small_root, spec.name, "val")
        renderer = spec.build_renderer("val")
        canvas = render_image(spec, "val", 2, seed=0, renderer=renderer)
        assert canvas.boxes() == [
            Box(spec.classes[entry["category_id"] - 1], *entry["bbox"])
            for entry in content["annotations"]
            if entry["image_id"] == 3
        ]


class TestPromises:
    def test_names_overlap_under_different_ids(self):
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

    def test_playroom_and_arcade_name_the_same_drawings_differently(self):
        assert [row[1:] for row in TOYS[:3]] == [row[1:] for row in ICONS[:3]]
        assert not {row[0] for row in TOYS} & {row[0] for row in ICONS}

    def test_splits_share_no_digit_and_no_column_of_a_photograph(self):
        train, val = (source_indices(split) for split in SPLITS)
        assert (train, val) == (range(1438), range(1438, 1797))  # 80 % of 1797
        train, val = (source_columns(split, width=640) for split in SPLITS)
        # five strips of 640 / 5 = 128 columns that take turns
        assert train == ((0, 128), (256, 384), (512, 640))
        assert val == ((128, 256), (384, 512))


class TestGeneration:
    def test_bytes_depend_on_the_seed_only(self, small_root, tmp_path):
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

    def test_a_second_call_counts_and_leaves_every_file_alone(self, small_root):
        times = {path: path.stat().st_mtime_ns for path in small_root.rglob("*")}
        report = generate_toy_mixture(small_root, specs=SMALL)
        with pytest.raises(DataError, match=r"'seed': 0.*--force"):
            generate_toy_mixture(small_root, seed=1, specs=SMALL)
        with pytest.raises(DataError, match="is a file"):
            generate_toy_mixture(small_root / "toy.json", force=True)
        after = {path: path.stat().st_mtime_ns for path in small_root.rglob("*")}
        assert after == times
        assert not report.created
        for entry, spec in zip(report.datasets, SMALL, strict=True):
            assert entry["num_images"] == {"train": spec.num_train, "val": 3}
            for split in SPLITS:
                content = read(small_root, entry["name"], split)
                assert entry["num_boxes"][split] == len(content["annotations"])
        assert "24 distinct class names" in report.table()

    @pytest.mark.parametrize("is_filled", [False, True])
    def test_an_interruption_changes_nothing(self, tmp_path, monkeypatch, is_filled):
        out, write = tmp_path / "out", toydata.write_dataset
        if is_filled:
            generate_toy_mixture(out, specs=SMALL[4:])
        before = files_of(tmp_path)

        def interrupted(root, spec, *, seed):
            if spec.name == "arcade":
                raise KeyboardInterrupt
            return write(root, spec, seed=seed)

        monkeypatch.setattr(toydata, "write_dataset", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate_toy_mixture(out, seed=1, specs=SMALL[3:], force=is_filled)
        assert files_of(tmp_path) == before
        assert len([*tmp_path.iterdir()]) == is_filled

    def test_force_replaces_its_own_files_only(self, tmp_path):
        out = tmp_path / "out"
        generate_toy_mixture(out, specs=SMALL[3:])
        (out / "playroom" / "mine.txt").write_text("mine")
        generate_toy_mixture(out, seed=1, specs=SMALL[4:], force=True)
        left = [path.name for path in (out / "playroom").rglob("*")]
        assert left == ["mine.txt"]
        assert read(out, "arcade", "train")["info"]["seed"] == 1
        generate_toy_mixture(tmp_path / "fresh", seed=1, specs=SMALL[4:])
        mine = files_of(out).keys() - files_of(tmp_path / "fresh").keys()
        assert mine == {"playroom/mine.txt"}

    def test_force_never_overwrites_a_foreign_file(self, tmp_path):
        (tmp_path / "arcade").mkdir()
        (tmp_path / "arcade" / "train.json").write_text("mine")
        with pytest.raises(DataError, match=r"in the way.*'arcade/train.json'"):
            generate_toy_mixture(tmp_path, specs=SMALL, force=True)
        assert (tmp_path / "arcade" / "train.json").read_text() == "mine"

    @pytest.mark.parametrize("file", ["../mine.txt", "arcade/mine.txt", "/etc/mine"])
    def test_a_stamp_that_lists_foreign_files_is_not_trusted(self, tmp_path, file):
        out = tmp_path / "out"
        generate_toy_mixture(out, specs=SMALL[4:])
        (tmp_path / "mine.txt").write_text("mine")
        (out / "arcade" / "mine.txt").write_text("mine")
        stamp = json.loads((out / "toy.json").read_text())
        stamp["files"].append(file)
        (out / "toy.json").write_text(json.dumps(stamp))
        with pytest.raises(DataError, match="in the way"):
            generate_toy_mixture(out, seed=1, specs=SMALL[4:], force=True)
        assert (tmp_path / "mine.txt").exists()
        assert (out / "arcade" / "mine.txt").exists()

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ([], "other content (notes.txt)"),
            (["--seed", "-1"], "got -1"),
            (["--train", "3"], "are for --worlds"),
            (["--names", "agreeing"], "are for --worlds"),
            (["--worlds", "2", "--names", "mixed"], '"conflicting", "agreeing"'),
            (["--worlds", "9"], "1 to 8, got 9"),
            (["--worlds", "2", "--train", "0"], "1 or more"),
        ],
    )
    def test_command_refuses_with_a_message(self, tmp_path, capsys, words, message):
        (tmp_path / "notes.txt").write_text("mine")
        assert run_command(app, ["--out", str(tmp_path), *words]) == 2
        assert message in capsys.readouterr().err
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_package_needs_neither_torch_nor_mmdet():
    code = "import sys, damex.toydata.__main__; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_sheet_has_one_row_per_dataset(small_root, tmp_path):
    # 150 + 2 * (256 + 6) wide, 5 * (256 + 6) + 6 high
    assert contact_sheet(small_root, num_columns=2).size == (674, 1316)
    with pytest.raises(DataError, match="no dataset of the toy mixture"):
        contact_sheet(tmp_path)


def test_worlds_draw_the_same_objects_under_shifted_or_equal_names(tmp_path):
    boxes = {}
    for names in ("agreeing", "conflicting"):
        specs = world_specs(3, names=names, num_train=20, num_val=2)
        generate_toy_mixture(tmp_path / names, specs=specs)
        for world in WORLDS[:3]:
            content = read(tmp_path / names, world, "train")
            assert [one["name"] for one in content["categories"]] == [*WORDS]
            boxes[names, world] = content["annotations"]
    for number, world in enumerate(WORLDS[:3]):
        agreeing = boxes["agreeing", world]
        assert {one["category_id"] for one in agreeing} == {*range(1, 9)}
        shifted = [
            one | {"category_id": (one["category_id"] - 1 + number) % 8 + 1}
            for one in agreeing
        ]
        assert boxes["conflicting", world] == shifted
    with pytest.raises(DataError, match="already holds"):  # told apart by their names
        generate_toy_mixture(tmp_path / "agreeing", specs=specs)
