"""``damex data plan``: groups of datasets that look alike."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from damex.commandline.data import data
from damex.commandline.run import run_command
from damex.curation.dataset_features import (
    affinities,
    box_statistics,
    colour_looks,
    read_features,
)
from damex.curation.plan import propose
from damex.datasets.spec import parse_mixture


@pytest.fixture
def entries(make_coco_dataset, edit_json, tmp_path):
    """Two dark datasets with small boxes, two bright ones with large boxes."""
    made = []
    for name, level, share, classes in (
        ("night", 30, 0.1, ["car", "bus"]),
        ("snow", 220, 0.8, ["ski"]),
        ("tunnel", 40, 0.12, ["car", "van"]),
        ("beach", 210, 0.7, ["ball"]),
    ):
        entry = make_coco_dataset(tmp_path / name, classes=classes, num_images=4)
        for i in range(4):
            Image.new("RGB", (48, 32), (level, level, level + i)).save(
                tmp_path / name / "images" / f"{i}.png"
            )

        def resize(document, share=share):
            for record in document["annotations"]:
                record["bbox"][2:] = [48 * share, 32 * share]

        edit_json(entry["data_root"] + "train.json", resize)
        made.append(entry)
    return made


@pytest.fixture
def found(entries):
    return [
        read_features(spec, spec.own_classes, colour_looks)
        for spec in parse_mixture(entries)
    ]


def test_statistics_of_boxes_by_hand():
    images = [dict(id=1, width=100, height=100), dict(id=2, width=100, height=100)]
    boxes = [[0, 0, 20, 5], [0, 0, 40, 10]]
    records = [dict(image_id=1, bbox=box) for box in [*boxes, [0, 0, -1, 5]]]
    found = box_statistics(dict(images=images, annotations=records))
    # Scales 0.1 and 0.2, both four times as wide as high; a box per image; 100 px.
    scales = np.log([0.1, 0.2])
    expected = [scales.mean(), scales.std(), np.log(4), 0.0, 0.0, np.log(100)]
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert (box_statistics(dict(images=images, annotations=[])) == 0).all()


def test_colours_tell_dark_from_bright_and_do_not_depend_on_the_order():
    dark, bright = (np.full((8, 8, 3), level, dtype=np.uint8) for level in (10, 240))
    both = colour_looks([dark, bright])
    np.testing.assert_array_equal(both, colour_looks([bright, dark]))
    assert np.abs(colour_looks([dark]) - colour_looks([bright])).max() == 1.0


def test_affinities_are_symmetric_and_largest_for_the_same(found):
    near = affinities(found)
    for matrix in near.values():
        np.testing.assert_allclose(matrix, matrix.T)
        np.testing.assert_allclose(np.diag(matrix), 1.0)
        assert (matrix <= 1.0 + 1e-12).all()
    # night and tunnel share one of three names.
    assert near["classes"][0, 2] == pytest.approx(np.exp(-2 / 3))
    assert near["all"][0, 2] > near["all"][0, 1]


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_datasets_that_look_alike_share_an_expert(found, order):
    rows = [found[i] for i in order]
    near = affinities(rows)["all"]
    made = propose(rows, np.full(4, 0.25), near, experts=2, slack=1.0)
    groups = {frozenset(members) for members in made.groups.values()}
    assert groups == {frozenset({"night", "tunnel"}), frozenset({"snow", "beach"})}
    assert made.capacity == 0.5
    assert made.value == pytest.approx(made.bound)


def test_capacity_parts_what_is_alike(found):
    """Night has half of all samples, and with tunnel an expert would have 0.7."""
    near = affinities(found)["all"]
    shares = np.array([0.5, 0.15, 0.2, 0.15])
    made = propose(found, shares, near, experts=2, slack=1.0)
    assert made.capacity == 0.5
    assert ["night"] in made.groups.values()
    assert made.value < made.bound + 1e-9


@pytest.fixture
def run(entries, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("damex.curation.plan.can_use_backbone", lambda: False)

    def call(*arguments):
        (tmp_path / "config.py").write_text(f"mixture = {entries!r}\n")
        status = run_command(data, ["plan", str(tmp_path / "config.py"), *arguments])
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


def test_the_command_says_what_it_compared_and_what_to_paste(run):
    status, out, _ = run("--experts", "2")
    assert status == 0
    assert "2 experts for 4 datasets, each for 75% of the samples or less." in out
    assert "Compared: colours and edges of up to 32 training images" in out
    pasted = out[out.index("To accept it") :].splitlines()[1:]
    assert len(pasted) == 4
    assert sum("group='night'" in line or "'tunnel'" in line for line in pasted) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--experts", "4"], "4 experts for 4 datasets leave nothing to plan"),
        (["--experts", "0"], '"0" for --experts'),
        (["--capacity", "0.5"], "--capacity must be 1 or more"),
    ],
)
def test_what_cannot_be_planned(run, arguments, message):
    status, _, said = run(*arguments)
    assert status == 2
    assert message in said


def test_a_missing_image_is_named(run, entries, edit_json):
    edit_json(
        entries[1]["data_root"] + "train.json",
        lambda document: document["images"][0].update(file_name="none.png"),
    )
    status, _, said = run()
    assert status == 2
    assert "dataset 'snow'" in said
    assert "none.png cannot be read" in said


def test_a_dataset_without_images_is_named(run, entries, edit_json):
    edit_json(
        entries[1]["data_root"] + "train.json",
        lambda document: document.update(images=[], annotations=[]),
    )
    status, _, said = run()
    assert status == 2
    assert "dataset 'snow': " in said
    assert "lists no images" in said
