"""``damex experts``: its numbers by hand, and its table and picture."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from damex.__main__ import main
from damex.errors import DataError
from damex.inference.media import Inputs, detect
from damex.inference.stored import DetectorCheckpoint
from damex.moe import LayerTally
from damex.workbench import experts as command
from damex.workbench.experts import (
    LayerUse,
    record_routes,
    rows_of_mixture,
    rows_of_words,
)
from tests.test_inference.conftest import BEST


def test_the_numbers_of_a_layer_by_hand():
    counts = torch.tensor([[2, 1], [0, 10]])
    use = LayerUse("encoder.0", LayerTally(counts, counts.sum(1)))
    assert use.share_RE == pytest.approx(np.array([[2 / 3, 1 / 3], [0.0, 1.0]]))
    # Both rows count alike, although the second has more tokens.
    assert use.load_E == pytest.approx(np.array([1 / 3, 2 / 3]))
    load = math.log(3) - 2 / 3 * math.log(2)
    assert use.entropy == pytest.approx(load)
    assert use.most_entropy == pytest.approx(math.log(2))
    # H(expert) - H(expert | row)
    within = 0.5 * load
    assert use.information == pytest.approx(load - within)
    assert use.most_information == pytest.approx(math.log(2))
    assert list(use.unused) == []


def test_a_row_without_images_is_no_row_of_the_load():
    counts = torch.tensor([[4, 0, 0], [0, 0, 0]])
    use = LayerUse("a", LayerTally(counts, counts.sum(1)))
    assert use.load_E.tolist() == [1.0, 0.0, 0.0]
    assert (use.entropy, use.information) == (0.0, 0.0)
    assert list(use.unused) == [1, 2]


def test_images_of_a_folder_are_a_row(photos):
    rows = rows_of_words([str(photos)])
    assert [(row.name, len(row.paths)) for row in rows] == [
        ("photos", 2),
        ("photos/deep", 1),
    ]


@pytest.fixture
def stored(save):
    def make(mixture=(), **options):
        read = DetectorCheckpoint.read(str(save(**options)))
        return dataclasses.replace(read, config=dict(mixture=list(mixture)))

    return make


def test_validation_images_are_found_by_the_mixture(
    stored, make_coco_dataset, tmp_path
):
    sizes = dict(sky=5, street=2)
    entries = [
        make_coco_dataset(tmp_path / name, classes=["car"], num_images=count)
        for name, count in sizes.items()
    ]
    entries.append(dict(name="park", train=dict(type="VOCDataset"), classes=["dog"]))
    rows, notes = rows_of_mixture(stored(entries), per_dataset=3)
    assert [(row.name, row.group) for row in rows] == [("street", 0), ("sky", 2)]
    assert [path.name for path in rows[0].paths] == ["0.png", "1.png"]
    assert [path.name for path in rows[1].paths] == ["0.png", "1.png", "3.png"]
    (note,) = notes
    assert note.startswith("No images of park: ")


def test_without_any_image_one_line_says_what_to_do(stored):
    with pytest.raises(DataError, match="name some with --images"):
        rows_of_mixture(stored(), per_dataset=3)


def record(stored, photos, *, batch_size=2, tile=None):
    detector, rows = stored.build(), rows_of_words([str(photos)])
    rows = [dataclasses.replace(row, tile=tile) for row in rows]
    inputs = Inputs(stored.pipeline)
    routes = record_routes(detector, inputs, rows, batch_size, lambda: None)
    return detector, inputs, rows, routes


@pytest.mark.parametrize("tile", [None, 20])
def test_tokens_are_counted_as_in_evaluation(stored, photos, tile):
    """The detector's own counts per image, one image at a time, are the other way."""
    narrow = photos / "b.jpg"  # images of two shapes, one of which is padded
    Image.open(narrow).resize((32, 64)).save(narrow)
    detector, inputs, rows, found = record(stored(), photos, tile=tile)
    detector.counts_tokens = True
    for number, row in enumerate(rows):
        parts = [inputs(path) for path in row.paths]
        if tile:
            parts = [part for one in parts for part in inputs.windows(one, tile, {})]
        samples = [detect(detector, [part])[0] for part in parts]
        for name, tally in found.served.items():
            counts = np.sum([sample.routing_counts[name] for sample in samples], axis=0)
            assert tally.counts_GE[number].tolist() == counts.tolist()
            assert tally.tokens_G[number] == counts.sum()


def test_where_images_vote_the_choice_of_tokens_is_shown_too(stored, photos):
    *_, found = record(stored(), photos)
    assert set(found.chosen) == set(found.served)
    for name, tally in found.served.items():
        assert (tally.counts_GE > 0).sum(1).tolist() != [3, 3]
        assert (found.chosen[name].counts_GE != tally.counts_GE).any()
    own = dict(layers=dict(encoder=[0]), losses=[dict(type="DatasetRoutingLoss")])
    *_, found = record(stored(moe=own), photos)
    assert found.chosen == {}


@pytest.fixture
def experts(save, capsys, tmp_path):
    """Run the command; returns its status, what it said, and its picture."""

    def run(*words, **options):
        checkpoint = save(**options)
        capsys.readouterr()
        out = tmp_path / "new" / "out.png"
        arguments = [checkpoint, *words, "--out", out, "--device", "cpu"]
        status = main(["experts", *map(str, arguments)])
        return status, capsys.readouterr(), out

    return run


def test_the_table_and_the_picture_hold_the_numbers(
    experts, photos, stored, monkeypatch
):
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda one, path: (figures.append(one), save(one, path))
    )
    status, said, out = experts("--images", photos)
    assert status == 0
    assert Image.open(out).format == "PNG"
    *_, found = record(stored(), photos, batch_size=8)  # the command's default
    panels = iter(figures[0].axes)
    for name, tally in found.served.items():
        use = LayerUse(name, tally)
        alone = LayerUse(name, found.chosen[name])  # images vote in this detector
        assert f"{use.information:.2f} of {use.most_information:.2f}" in said.out
        for one, title in ((use, name), (alone, f"{name}, tokens alone")):
            panel = next(panels)
            assert panel.get_title() == title
            shown = [text.get_text() for text in panel.texts]
            assert shown == [f"{100 * share:.0f}" for share in one.share_RE.flat]
    assert not any(panel.axison for panel in panels)
    names = [label.get_text() for label in figures[0].axes[0].get_yticklabels()]
    assert names == ["photos", "photos/deep"]


def test_names_that_matplotlib_takes_for_formulas_are_drawn(tmp_path):
    counts = torch.tensor([[2, 1] * 20, [0, 10] * 20])  # too many experts for numbers
    use = LayerUse("encoder.0", LayerTally(counts, counts.sum(1)))
    command.draw(tmp_path / "a.png", ["$\\bad{$", "\u6f22\u5b57"], [use], {})
    assert Image.open(tmp_path / "a.png").size > (200, 100)


@pytest.mark.parametrize("losses", [["DatasetRoutingLoss"], []])
def test_experts_of_datasets_that_are_not_shown_are_no_collapse(
    experts, photos, losses
):
    """Nor can it be told of other images whose experts they should use."""
    loss = [dict(type=kind) for kind in losses]
    _, said, _ = experts("--images", photos / "deep", moe={**BEST, "losses": loss})
    assert ("warning: " in said.out) == (losses == [])


def test_images_that_cannot_be_used_are_listed(experts, photos):
    (photos / "broken.png").write_text("no image")
    Image.new("RGB", (400, 8)).save(photos / "thin.png")
    status, said, out = experts("--images", photos, num_queries=70)
    assert status == 1
    assert "broken.png is not an image that can be read." in said.out
    assert "thin.png: it has " in said.out
    assert out.is_file()


@pytest.mark.parametrize(
    ("options", "words", "complaint"),
    [
        (dict(moe=False), ["--images", "{photos}"], "has no mixture of experts"),
        ({}, [], "name some with --images"),
        ({}, ["--images", "none/"], "there is no file or folder none/"),
        ({}, ["--out", "look", "--images", "{photos}"], "must end in .png, got look"),
        (
            *({}, ["--out", "{photos}/a.png", "--images", "{photos}"]),
            "a.png would be replaced",
        ),
    ],
)
def test_mistakes_end_in_one_line(save, photos, capsys, options, words, complaint):
    checkpoint = save(**options)
    capsys.readouterr()
    words = [word.format(photos=photos) for word in words]
    assert main(["experts", str(checkpoint), *words, "--device", "cpu"]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert len(said.err.strip().splitlines()) == 1
