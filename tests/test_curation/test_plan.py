"""``damex data plan``: groups of datasets that look alike."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from PIL import Image

from damex.commandline.data import data
from damex.commandline.run import run_command
from damex.curation.dataset_features import (
    affinities,
    box_statistics,
    color_features,
    read_features,
)
from damex.curation.plan import (
    choose_medoids,
    least_capacity,
    map_datasets,
    propose,
    relax,
)
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
        read_features(spec, spec.own_classes, color_features)
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
    both = color_features([dark, bright])
    np.testing.assert_array_equal(both, color_features([bright, dark]))
    assert np.abs(color_features([dark]) - color_features([bright])).max() == 1.0


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
    made = propose(
        [one.name for one in rows], np.full(4, 0.25), near, experts=2, slack=1.0
    )
    groups = {frozenset(members) for members in made.groups.values()}
    assert groups == {frozenset({"night", "tunnel"}), frozenset({"snow", "beach"})}
    assert made.capacity == 0.5
    assert made.value == pytest.approx(made.bound)


def test_capacity_parts_what_is_alike(found):
    """Night has half of all samples, and with tunnel an expert would have 0.7."""
    near = affinities(found)["all"]
    shares = np.array([0.5, 0.15, 0.2, 0.15])
    made = propose([one.name for one in found], shares, near, experts=2, slack=1.0)
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(images=[], annotations=[]), "lists no images"),
        (
            dict(images=[dict(id=1, file_name="none.png", width=9, height=9)]),
            "none.png cannot be read",
        ),
    ],
)
def test_a_dataset_that_cannot_be_compared_is_named(
    run, entries, edit_json, change, message
):
    file = entries[1]["data_root"] + "train.json"
    edit_json(file, lambda document: document.update({"annotations": [], **change}))
    status, _, said = run()
    assert status == 2
    assert "dataset 'snow'" in said
    assert message in said


def brute_force(affinity, sizes, capacity):
    """Value of the best plan of all; None where none fits."""
    count, experts = affinity.shape
    values = [
        sum(affinity[i, j] for i, j in enumerate(plan))
        for plan in product(range(experts), repeat=count)
        if all(
            sum(sizes[i] for i in range(count) if plan[i] == j) <= capacity[j] + 1e-9
            for j in range(experts)
        )
    ]
    return max(values) if values else None


@pytest.mark.parametrize("seed", range(40))
def test_equals_brute_force(seed):
    rng = np.random.default_rng(seed)
    count, experts = int(rng.integers(1, 7)), int(rng.integers(1, 4))
    affinity, sizes = rng.random((count, experts)), rng.random(count) + 0.1
    capacity = np.full(experts, rng.uniform(0.9, 1.6) * sizes.sum() / experts)
    expected = brute_force(affinity, sizes, capacity)
    found = map_datasets(affinity, sizes, capacity)
    if expected is None:
        assert found is None
        return
    plan, bound = found
    assert affinity[np.arange(count), plan].sum() == pytest.approx(expected)
    assert bound >= expected - 1e-6
    loads = np.bincount(plan, weights=sizes, minlength=experts)
    assert (loads <= capacity * (1 + 1e-8)).all()
    order = rng.permutation(count)  # rows may come in any order
    other, _ = map_datasets(affinity[order], sizes[order], capacity)
    assert plan[order].tolist() == other.tolist()


def test_the_relaxation_divides_datasets_and_the_plan_does_not():
    """Three datasets of 2 on two experts of 3 and 4: one has to be where it is not."""
    affinity = np.array([[1.0, 0.0], [0.9, 0.1], [0.8, 0.0]])
    sizes, capacity = np.full(3, 2.0), np.array([3.0, 4.0])
    shares, value = relax(affinity, sizes, capacity)
    assert (shares.max(axis=1) < 1).any()
    assert value == pytest.approx(1.0 + 0.4 + 0.1)  # half of the second or third
    plan, bound = map_datasets(affinity, sizes, capacity)
    assert plan.tolist() == [0, 1, 1]
    assert bound == pytest.approx(value)


def test_what_does_not_fit_is_no_plan():
    assert map_datasets(np.ones((2, 1)), np.ones(2), np.array([1.5])) is None
    # By weight it would: 3 + 3 + 2 on two experts of 4, but none is divided.
    sizes = np.array([3.0, 3.0, 2.0])
    assert map_datasets(np.ones((3, 2)), sizes, np.full(2, 4.0)) is None
    assert least_capacity(sizes, 2, slack=1.0) == 5.0
    assert map_datasets(np.ones((3, 2)), sizes, np.full(2, 5.0)) is not None


def test_medoids_are_the_middles_of_groups():
    # Positions on a line: two groups and a loner.
    places = np.array([0.0, 1.0, 2.0, 10.0, 11.0, 12.0, 30.0])
    affinity = np.exp(-np.abs(places[:, None] - places))
    assert choose_medoids(affinity, 3) == [1, 4, 6]
    assert choose_medoids(affinity, 7) == list(range(7))
    places = np.arange(40) // 4 * 10.0  # too many for all sets: one by one
    affinity = np.exp(-np.abs(places[:, None] - places))
    assert choose_medoids(affinity, 10) == list(range(0, 40, 4))
