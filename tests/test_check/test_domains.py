"""Datasets that look alike: nobody tells their images apart, so they share experts."""

import numpy as np
import pytest
from PIL import Image

from damex.datasets.findings import Location
from damex.datasets.image_files import ImageRecord
from damex.workbench.check import domains
from damex.workbench.check.domains import (
    FEWEST,
    RIDGE,
    Pair,
    check_looks,
    groups_of,
    look_alikes,
    look_of,
    recognized,
    share_experts,
)


def draw(folder, number, *, bright, size=(60, 40)):
    """Random stripes on a dark or a bright ground."""
    draws = np.random.default_rng(number)
    pixels = np.full((*size[::-1], 3), 180 if bright else 60, np.uint8)
    for row in draws.integers(0, size[1] - 4, 5):
        pixels[row : row + 3] = draws.integers(0, 255, 3)
    path = folder / f"{number}.png"
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def images(tmp_path):
    """Two datasets of one kind, and one of another kind."""
    return {
        name: [draw(tmp_path / name, first + i, bright=bright) for i in range(30)]
        for name, first, bright in (("a", 0, True), ("b", 100, True), ("c", 200, False))
    }


def test_an_image_is_left_out_exactly():
    """As a ridge regression fitted anew without each image."""
    draws = np.random.default_rng(0)
    first, second = draws.normal(0, 1, (9, 4)), draws.normal(0.5, 1, (5, 4))
    looks = np.concatenate([first, second])
    looks = (looks - looks.mean(0)) / (looks.std(0) + 1e-6) / 2  # root of 4 features
    looks = np.concatenate([looks, np.ones((14, 1))], axis=1)
    signs = np.repeat([1.0, -1.0], [9, 5])
    right = []
    for i in range(14):
        rest = np.arange(14) != i
        gram = looks[rest].T @ looks[rest] + RIDGE * np.eye(5)
        weights = np.linalg.solve(gram, looks[rest].T @ signs[rest])
        right.append(looks[i] @ weights * signs[i] > 0)
    expected = (np.mean(right[:9]) + np.mean(right[9:])) / 2
    assert 0.3 < expected < 1  # the case is not trivial
    assert recognized(first, second) == pytest.approx(expected)


def test_datasets_of_one_kind_look_alike(images):
    (pair,) = look_alikes(images)
    assert pair[:2] == ("a", "b")
    assert 0.2 < pair.accuracy < 0.75


def test_too_few_images_and_unreadable_ones_decide_nothing(images, tmp_path):
    few = images["b"][: FEWEST - 1]
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    assert look_alikes({"a": images["a"], "b": [*few, broken]}) == []
    enough = {name: images[name][:FEWEST] for name in ("a", "b")}
    assert [pair[:2] for pair in look_alikes(enough)] == [("a", "b")]


def test_the_look_is_of_colors_not_of_the_size(tmp_path):
    wide = draw(tmp_path, 1, bright=True, size=(120, 80))
    small = tmp_path / "small.png"
    with Image.open(wide) as image:
        image.resize((60, 40), Image.Resampling.BOX).save(small)
    dark = draw(tmp_path, 2, bright=False)
    near = np.abs(look_of(wide) - look_of(small)).max()
    assert near < 0.1 < np.abs(look_of(wide) - look_of(dark)).max()


def test_groups_are_what_pairs_connect():
    pairs = [Pair("a", "b", 0.5), Pair("d", "e", 0.6), Pair("b", "c", 0.7)]
    groups = groups_of(pairs)
    assert groups["a"] == groups["b"] == groups["c"] == "a+b+c"
    assert groups["d"] == groups["e"] == "d+e"


def test_entries_of_one_kind_get_one_group(images, make_coco_dataset, tmp_path):
    for name, paths in images.items():
        root = tmp_path / "sets" / name
        make_coco_dataset(root, classes=[name], num_images=30, size=(60, 40))
        for number, path in enumerate(paths):
            path.replace(root / "images" / f"{number}.png")
    mixture = [dict(name=n, root=str(tmp_path / "sets" / n)) for n in images]
    named = [dict(entry) for entry in mixture]
    named[2]["group"] = "mine"
    (pair,) = share_experts(mixture)
    assert pair[:2] == ("a", "b")
    assert [entry.get("group") for entry in mixture] == ["a+b", "a+b", None]
    assert share_experts(named) == []  # the user has decided
    assert [entry.get("group") for entry in named] == [None, None, "mine"]
    missing = [mixture[2], dict(name="absent", root=str(tmp_path / "absent"))]
    assert share_experts(missing) == []  # the loader reports it


def test_three_datasets_of_one_kind_get_one_name(images):
    paths = dict(a=images["a"][:25], b=images["b"][:25], c=images["a"][25:])
    paths["c"] = [*paths["c"], *images["b"][25:], *images["a"][:15]]
    records = [
        ImageRecord(Location(name, "train.json", split="train"), "", path, (60, 40))
        for name, some in paths.items()
        for path in some
    ]
    found = [*check_looks(records, {n: n for n in paths}, is_mixture=True)]
    assert len(found) > 1
    assert all("group='a+b+c'" in one.message for one in found)


def test_images_of_16_bits_do_not_all_look_white(tmp_path):
    looks = []
    for number in (1, 2):
        with Image.open(draw(tmp_path, number, bright=True)) as image:
            deep = np.asarray(image.convert("L")).astype(np.uint16) * 20 + 20_000
        Image.fromarray(deep).save(tmp_path / "deep.png")
        looks.append(look_of(tmp_path / "deep.png"))
    assert np.abs(looks[0] - looks[1]).max() > 0.1


def test_a_file_that_breaks_the_reader_is_skipped(images, monkeypatch):
    def look(path):
        if path == images["a"][0]:
            raise SyntaxError("broken PNG file")
        return look_of(path)

    monkeypatch.setattr(domains, "look_of", look)
    assert len(domains.looks_of(images["a"])) == len(images["a"]) - 1


@pytest.mark.parametrize(("experts", "level"), [(True, "warning"), (False, "info")])
def test_the_check_names_datasets_that_look_alike(images, experts, level):
    records = [
        ImageRecord(Location(name, "train.json", split="train"), "", path, (60, 40))
        for name, paths in images.items()
        for path in paths
    ]
    alone = {name: name for name in images}
    (found,) = check_looks(records, alone, is_mixture=experts)
    assert (found.kind, found.level, found.dataset) == ("looks-alike", level, "a")
    assert "group='a+b'" in found.message
    shared = {**alone, "b": "a"}
    assert [*check_looks(records, shared, is_mixture=experts)] == []
    evaluated = [
        one._replace(location=Location("a", "val.json", split="val")) for one in records
    ]
    assert [*check_looks(evaluated, alone, is_mixture=experts)] == []
