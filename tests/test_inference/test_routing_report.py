"""``damex experts``: its numbers by hand, and its page of real detectors."""

import dataclasses
import json
import math
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from PIL import Image

from damex.__main__ import main
from damex.errors import DataError
from damex.inference.routing_recorder import TILE, Recorder
from damex.inference.routing_report import (
    LayerUse,
    paint,
    read_history,
    rows_of_mixture,
    rows_of_words,
)
from damex.inference.stored import Inputs, StoredDetector, detect
from damex.models.insertion import moe_blocks
from damex.moe import LayerTally
from tests.test_inference.conftest import BEST


class Page(HTMLParser):
    """Tags, addresses and table cells of a page; every tag has to be closed."""

    EMPTY = ("meta", "img", "line", "circle", "polyline", "br")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.addresses, self.rows = [], set(), [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.addresses += [v for k, v in attrs if k in ("src", "href", "srcset")]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.EMPTY:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "td" in self.open or "th" in self.open:
            self.rows[-1][-1] += " ".join(data.split())


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


def test_experts_are_painted_in_their_colours_over_grey():
    picture = Image.new("RGB", (3, 1), (200, 0, 0))
    painted = paint(picture, np.array([[0, 1, 2]]), [(255, 0, 0), (0, 0, 255)])
    left, middle, right = np.asarray(painted)[0].astype(int)
    assert left[0] > left[1] == left[2]
    assert middle[2] > middle[1] == middle[0]
    assert right[0] == right[1] == right[2] < left[1] + 1  # nobody: darker grey


def test_images_of_a_folder_are_a_row(photos):
    rows = rows_of_words([str(photos)])
    assert [(row.name, len(row.paths)) for row in rows] == [
        ("photos", 2),
        ("photos/deep", 1),
    ]


@pytest.fixture
def stored(save):
    def make(mixture=(), **options):
        read = StoredDetector.read(str(save(**options)))
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


def record(stored, photos, *, recorder=None, **options):
    recorder = recorder or Recorder(stored, device="cpu")
    rows = rows_of_words([str(photos)])
    settings = dict(examples_per_row=2, batch_size=2, advance=lambda: None)
    return recorder, rows, recorder.record(rows, **{**settings, **options})


def test_tokens_are_counted_as_in_evaluation(stored, photos):
    """The detector's own counts per image, one image at a time, are the other way."""
    detector = stored()
    recorder, rows, found = record(detector, photos, batch_size=1)
    recorder.detector.counts_tokens = True
    inputs = Inputs(detector.pipeline)
    for number, row in enumerate(rows):
        samples = [detect(recorder.detector, [inputs(path)])[0] for path in row.paths]
        for name, tally in found.served.items():
            counts = np.sum([sample.routing_counts[name] for sample in samples], axis=0)
            assert tally.counts_GE[number].tolist() == counts.tolist()
            assert tally.tokens_G[number] == counts.sum()


def test_where_images_vote_the_choice_of_tokens_is_shown_too(stored, photos):
    _, _, found = record(stored(), photos)
    assert set(found.chosen) == set(found.served)
    for example in found.examples:
        assert all(len(experts) == 1 for experts in example.elected.values())
    own = dict(layers=dict(encoder=[0]), losses=[dict(type="DatasetRoutingLoss")])
    _, _, found = record(stored(moe=own), photos)
    assert found.chosen == {}
    assert all(example.elected == {} for example in found.examples)


def test_regions_lie_where_the_tokens_are(stored, photos):
    """A router that tells left from right, on images that are padded to a square."""
    recorder = Recorder(stored(), device="cpu")
    recorder.detector.data_preprocessor.pad_size_divisor = 96
    block = next(b for b in moe_blocks(recorder.detector) if b.name == "encoder.1")

    def choose(router, inputs, logits_VE):
        columns = []
        for height, width in recorder._levels:
            columns.append((torch.arange(width) / width).repeat(height))
        place_V = block.context.packing.pack(torch.cat(columns)[None])
        right_V = (place_V >= 0.5).long()
        return 10.0 * torch.nn.functional.one_hot(right_V, logits_VE.shape[1])

    block.moe.router.register_forward_hook(choose)
    narrow = photos / "b.jpg"  # a.png is wider: half of this one's input is padding
    Image.open(narrow).resize((32, 64)).save(narrow)
    _, _, found = record(None, photos, recorder=recorder)
    assert found.faults == []
    wide, tall, _ = found.examples
    for example in (wide, tall):
        width, height = example.picture.size
        assert max(width, height) == TILE
        assert [places.shape for places in example.regions["encoder.1"]] == [
            (height, width)
        ] * len(recorder._levels)
    finest = wide.regions["encoder.1"][0]
    half = wide.picture.width // 2
    assert (finest[:, : half - 1] == 0).all()
    assert (finest[:, half + 1 :] == 1).all()
    # The image ends where the left half of its padded input does, or before.
    assert (tall.regions["encoder.1"][0] == 0).all()


@pytest.fixture
def experts(save, capsys, tmp_path):
    """Run the command; returns its status, what it said, and the page if it wrote."""

    def run(*words, **options):
        checkpoint = save(**options)
        capsys.readouterr()
        out = tmp_path / "out"
        arguments = [checkpoint, *words, "--out", out, "--device", "cpu"]
        status = main(["experts", *map(str, arguments)])
        page = out / "index.html"
        text = page.read_text(encoding="utf-8") if page.exists() else None
        return status, capsys.readouterr(), text

    return run


def test_the_page_holds_the_numbers_and_needs_nothing_else(experts, photos, stored):
    status, said, text = experts("--images", photos)
    assert status == 0
    page = Page(text)
    assert not page.tags & {"script", "link", "iframe", "object"}
    for address in page.addresses:
        assert address.startswith(("data:image/jpeg;base64,", "#"))
    assert "url(" not in text
    assert "@import" not in text
    _, _, found = record(stored(), photos, batch_size=8)  # the command's default
    tables = iter([row for row in page.rows if row[0] in ("photos", "photos/deep")])
    for name, tally in found.served.items():
        use = LayerUse(name, tally)
        alone = LayerUse(name, found.chosen[name])  # images vote in this detector
        for shares in (*use.share_RE, *alone.share_RE):
            shown = ["0" if s < 0.0005 else f"{100 * s:.1f}" for s in shares]
            assert next(tables)[1:] == shown
        words = f"{use.information:.2f} of {use.most_information:.2f}"
        assert any(row[0] == name and words in row for row in page.rows)
        assert words in said.out
    assert [*tables] == []
    assert "No curves and no AP" in said.out


@pytest.mark.parametrize("losses", [["DatasetRoutingLoss"], []])
def test_experts_of_datasets_that_are_not_shown_are_no_collapse(
    experts, photos, losses
):
    """Nor can it be told of other images whose experts they should use."""
    loss = [dict(type=kind) for kind in losses]
    _, said, text = experts("--images", photos / "deep", moe={**BEST, "losses": loss})
    assert ("warning: " in said.out) == ("Collapse:" in text) == (losses == [])


def test_curves_and_scores_of_the_run_are_drawn(experts, photos, save, tmp_path):
    folder = tmp_path / "20260101_000000" / "vis_data"
    folder.mkdir(parents=True)
    lines = [
        dict(loss_moe_dataset_routing=0.5, step=10),
        {"routing/encoder.0/evenness": 0.75, "routing/encoder.0/expert_1": 0.25},
        {"mixture/park/AP": 0.125, "mixture/sky/AP": float("nan"), "step": 1},
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / "scalars.json").write_text(text + '\n{"half": ', encoding="utf-8")
    checkpoint = save()
    saved = torch.load(checkpoint, weights_only=False)
    saved["meta"] |= dict(experiment_name="quick_20260101_000000", epoch=1)
    torch.save(saved, checkpoint)
    out = tmp_path / "out"
    words = [checkpoint, "--images", photos, "--out", out, "--device", "cpu"]
    assert main(["experts", *map(str, words)]) == 0
    text = (out / "index.html").read_text(encoding="utf-8")
    rows = {row[0]: row for row in Page(text).rows}
    assert rows["park"][5] == "0.125"
    assert rows["sky"][5] == rows["street"][5] == "\N{EN DASH}"
    for title in ("AP of each dataset", "Losses of the routers", "Load of encoder.0"):
        assert f"<div>{title}</div>" in text


@pytest.mark.parametrize(
    ("meta", "train_cfg", "score"),
    [
        (dict(epoch=1, iter=2), dict(max_epochs=9), 0.1),
        (dict(epoch=3, iter=2), dict(max_epochs=9), None),
        (dict(epoch=9, iter=1), dict(max_iters=9), 0.1),
        (
            dict(epoch=9, iter=1),
            dict(type="IterBasedTrainLoop"),
            0.1,
        ),
    ],
)
def test_scores_are_those_of_the_step(tmp_path, meta, train_cfg, score):
    """The epoch, or the iteration if the training counts them."""
    folder = tmp_path / "20260101_000000" / "vis_data"
    folder.mkdir(parents=True)
    lines = [{"mixture/park/AP": ap, "step": step} for step, ap in ((1, 0.1), (2, 0.2))]
    (folder / "scalars.json").write_text("\n".join(map(json.dumps, lines)))
    meta = dict(experiment_name="quick_20260101_000000", **meta)
    found, charts, note = read_history(tmp_path / "a.pth", meta, train_cfg)
    assert found.get("mixture/park/AP") == score
    assert bool(note) == (score is None)
    assert charts["AP of each dataset"] == {"park": [(1.0, 0.1), (2.0, 0.2)]}


def test_a_summary_counts_for_the_last_checkpoint_alone(tmp_path):
    row = dict(ap=0.5, ap50=0.75, images=8, boxes=9)
    summary = dict(datasets=dict(park=row), routing_accuracy=dict(park=1.0, mean=1.0))
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "last_checkpoint").write_text("elsewhere/epoch_2.pth")
    scores, _, _ = read_history(tmp_path / "epoch_2.pth", {}, {})
    assert scores["mixture/park/AP50"] == 0.75
    assert scores["mixture/park/routing_accuracy"] == 1.0
    assert read_history(tmp_path / "epoch_1.pth", {}, {})[0] == {}
    (tmp_path / "summary.json").write_text("{}")
    assert read_history(tmp_path / "epoch_2.pth", {}, {})[0] == {}


def test_broken_images_are_listed_and_names_escaped(experts, photos):
    bad = photos / "<script>&"
    bad.mkdir()
    (photos / "a.png").rename(bad / "a.png")
    (photos / "broken.png").write_text("no image")
    status, said, text = experts("--images", photos)
    assert status == 1
    assert "broken.png is not an image that can be read." in said.out
    assert "broken.png is not an image that can be read." in text
    page = Page(text)
    assert "script" not in page.tags
    assert any(row[0] == "photos/<script>&" for row in page.rows)


@pytest.mark.parametrize(
    ("options", "words", "complaint"),
    [
        (dict(moe=False), ["--images", "{photos}"], "has no mixture of experts"),
        ({}, [], "name some with --images"),
        ({}, ["--images", "none/"], "there is no file or folder none/"),
    ],
)
def test_mistakes_end_in_one_line(experts, photos, options, words, complaint):
    words = [word.format(photos=photos) for word in words]
    status, said, _ = experts(*words, **options)
    assert status == 2
    assert complaint in said.err
    assert len(said.err.strip().splitlines()) == 1
