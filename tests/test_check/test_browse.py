"""The page stands by itself and says what the files hold."""

import json
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from html.parser import HTMLParser
from threading import Barrier, BrokenBarrierError

import numpy as np
import pytest
from mmdet.registry import TRANSFORMS
from PIL import Image

from damex.datasets.coco_schema import Expectations
from damex.datasets.findings import Location
from damex.datasets.image_files import images_of_any_size
from damex.datasets.spec import Source
from damex.inference.drawing import palette
from damex.workbench.check.browse import (
    TILE,
    Sample,
    draw_tile,
    size_shares,
    view_of,
)
from damex.workbench.cli.data import data
from damex.workbench.cli.run import run_command


class Page(HTMLParser):
    """Links, anchors, pictures and table rows of a page."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.sources, self.rows = set(), [], [], []
        self.open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids |= {found["id"]} if "id" in found else set()
        self.links += [found[key] for key in ("href",) if key in found]
        self.sources += [found[key] for key in ("src", "srcset") if key in found]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in ("meta", "img", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in ("meta", "img", "line", "circle", "polyline"):
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "table" in self.open and ("td" in self.open or "th" in self.open):
            self.rows[-1][-1] += " ".join(data.split())


@pytest.fixture
def browse(dataset, tmp_path):
    def call(*options, **entry):
        dataset.write()
        config = tmp_path / "config.py"
        mixture = dataset.config(**entry)["mixture"]
        config.write_text(f"model = dict()\nmixture = {mixture!r}\n")
        out = tmp_path / "out"
        arguments = ["browse", str(config), "--out", str(out), *options]
        assert run_command(data, arguments) == 0
        return out, Page((out / "index.html").read_text(encoding="utf-8"))

    return call


def test_the_page_needs_nothing_else_and_there_is_a_sheet_for_each_split(browse):
    out, page = browse("--samples", "5")
    assert page.open == []
    assert "<title>Data of config</title>" in (out / "index.html").read_text("utf-8")
    assert len(page.sources) == 10
    assert all(source.startswith("data:image/jpeg;base64,") for source in page.sources)
    assert page.links
    assert {link.removeprefix("#") for link in page.links} <= page.ids
    for split in ("train", "val"):
        with Image.open(out / f"street_{split}.png") as sheet:
            assert sheet.width > 4 * TILE


def test_folders_in_place_of_a_config(dataset, monkeypatch, tmp_path):
    dataset.write()
    shutil.copytree(dataset.root, tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    words = ["browse", "a b=street", "a_b=copy", "--samples", "1"]
    assert run_command(data, words) == 0
    sheets = (tmp_path / "work_dirs/a b-a_b/browse").glob("*.png")
    names = sorted(path.stem for path in sheets)
    assert names == ["a b_train", "a b_val", "a_b_train", "a_b_val"]


@pytest.mark.parametrize("how", ["entry", "label file"])
def test_the_tables_count(browse, tmp_path, how):
    if how == "entry":
        _, page = browse(rename=dict(car="vehicle"), classes=["car", "tree"])
    else:
        street = dict(car="vehicle", person=None)
        labels = dict(version=1, unlisted="union", datasets=dict(street=street))
        (tmp_path / "labels.json").write_text(json.dumps(labels))
        _, page = browse("--cfg-options", f"label_space={tmp_path / 'labels.json'}")
    rows = {row[0]: row for row in page.rows}
    assert rows["vehicle"][1:] == rows["tree"][1:] == ["14/6", "20"]
    assert "person" not in rows
    assert [row[1:5] for row in page.rows[1:3]] == [
        ["train", "14", "28", "2.0"],
        ["val", "6", "12", "2.0"],
    ]


def test_names_cannot_break_the_page(browse, dataset):
    for document in (dataset.train, dataset.val):
        document["categories"][0]["name"] = "<script>car</script> & co"
        document["categories"][1]["name"] = "line\nbreak"
    _, page = browse()
    assert page.rows[-3][0] == "<script>car</script> & co"
    assert page.rows[-2][0].split() == ["line", "break"]


def test_what_cannot_be_read_has_a_note_or_an_empty_tile(browse, dataset):
    dataset.text["val"] = "{"
    dataset.train["images"][0].update(width=None)
    dataset.image(2).write_bytes(b"no image")
    out, page = browse("--samples", "14")
    assert len(page.sources) == 14
    assert "cannot be read; run check" in (out / "index.html").read_text("utf-8")


def view(dataset, num_samples, seed=0):
    dataset.write()
    file = dataset.root / "train.json"
    source = Source(Location("street", str(file)), file, dataset.root / "images")
    rng = random.Random(seed)
    return view_of(source, Expectations(), {}, num_samples, rng)


def test_samples_are_chosen_by_the_seed_and_show_rare_classes(dataset):
    names = [[s.name for s in view(dataset, 6, seed).samples] for seed in (0, 0, 1)]
    assert names[0] == names[1] != names[2]
    assert len(set(names[0])) == 6
    dataset.train["categories"].append(dict(id=4, name="bus"))
    dataset.train["annotations"][20]["category_id"] = 4
    for seed in range(5):
        found = view(dataset, 1, seed)
        assert "bus" in [name for name, _ in found.samples[0].boxes]


def test_small_and_large_are_those_of_coco(dataset):
    boxes = [[0, 0, 31, 32], [0, 0, 32, 32], [0, 0, 95, 96], [0, 0, 96, 96]]
    for number, record in enumerate(dataset.train["annotations"]):
        record["bbox"] = boxes[number % 4]
    shares = size_shares(view(dataset, 1).side_B)
    assert shares == pytest.approx([11 / 42, 21 / 42, 10 / 42])


@pytest.mark.parametrize("applies_exif", [True, False])
def test_a_tile_is_what_training_loads_with_the_boxes_of_the_file(
    tmp_path, applies_exif
):
    """Transparent pixels and the EXIF orientation are those of the loader."""
    pixels = np.full((200, TILE, 4), (200, 10, 30, 0), np.uint8)
    pixels[:, : TILE // 2] = (40, 80, 120, 255)
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path, exif=exif)
    color_type = "color" if applies_exif else "color_ignore_orientation"
    load = TRANSFORMS.build(dict(type="LoadImageFromFile", color_type=color_type))
    expected = load(dict(img_path=str(path)))["img"][..., ::-1]
    sample = Sample(path, "a.png", [], applies_exif)
    assert np.array_equal(np.asarray(draw_tile(sample, {})), expected)
    colors = palette(["car"])
    box = ("car", (20.0, 100.0, 100.0, 90.0))
    tile = np.asarray(draw_tile(sample._replace(boxes=[box]), colors))
    for x, y in ((20, 150), (120, 150), (70, 190)):
        assert tuple(tile[y, x]) == colors["car"]


def test_a_limit_of_pillow_comes_back_after_threads_that_overlap():
    before, inside, entered = Image.MAX_IMAGE_PIXELS, Barrier(2), []

    def use(number):
        with images_of_any_size():
            entered.append(number)
            with suppress(BrokenBarrierError):
                inside.wait(0.2)  # both at once, if they may
            time.sleep(0.1 * entered.index(number))  # the first leaves first
            return Image.MAX_IMAGE_PIXELS

    with ThreadPoolExecutor(2) as pool:
        assert min(pool.map(use, range(2))) > before
    limit = Image.MAX_IMAGE_PIXELS
    assert limit == before
