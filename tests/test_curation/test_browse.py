"""The page stands by itself and says what the files hold."""

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from html.parser import HTMLParser
from threading import Barrier, BrokenBarrierError

import numpy as np
import pytest
from mmdet.registry import TRANSFORMS
from PIL import Image

from damex.commandline.data import data
from damex.commandline.run import run_command
from damex.curation.boxes import Expectations
from damex.curation.sheets import TILE, contact_sheet, draw_tile, palette
from damex.curation.sources import coco_file
from damex.curation.views import Sample, SplitView, view_of
from damex.datasets.formats.images import images_of_any_size
from damex.datasets.spec import CocoSource


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


def test_the_page_needs_nothing_else(browse):
    _, page = browse("--samples", "3")
    assert page.open == []
    assert len(page.sources) == 6
    assert all(source.startswith("data:image/jpeg;base64,") for source in page.sources)
    assert page.links
    assert {link.removeprefix("#") for link in page.links} <= page.ids


def test_the_tables_count(browse):
    _, page = browse(rename=dict(car="vehicle"))
    rows = {row[0]: row for row in page.rows}
    assert rows["vehicle"][1:] == ["14/6", "20"]
    assert rows["person"][1:] == ["14/6", "20"]
    assert [row[1:5] for row in page.rows[1:3]] == [
        ["train", "14", "42", "3.0"],
        ["val", "6", "18", "3.0"],
    ]


def test_classes_that_are_not_in_use_are_not_shown(browse):
    _, page = browse(classes=["tree"])
    rows = {row[0]: row for row in page.rows}
    assert rows["tree"][1:] == ["14/6", "20"]
    assert "car" not in rows


def test_names_cannot_break_the_page(browse, dataset):
    for document in (dataset.train, dataset.val):
        document["categories"][0]["name"] = "<script>car</script> & co"
    _, page = browse()
    assert page.rows[-3][0] == "<script>car</script> & co"


def test_there_is_a_sheet_for_each_split(browse):
    out, _ = browse("--samples", "5")
    for split in ("train", "val"):
        with Image.open(out / f"street_{split}.png") as sheet:
            assert sheet.width > 4 * 400


def test_what_cannot_be_read_is_said(browse, dataset):
    dataset.text["val"] = "{"
    dataset.image(2).write_bytes(b"no image")
    _, page = browse("--samples", "14")
    assert len(page.sources) == 14


def view(dataset, num_samples, seed=0, expected=None):
    dataset.write()
    paths = CocoSource(dataset.root / "train.json", dataset.root / "images")
    source = coco_file("street", "train", paths)
    found = view_of(
        source, expected or Expectations(), {}, num_samples=num_samples, seed=seed
    )
    assert isinstance(found, SplitView)
    return found


def test_a_rare_class_is_among_few_samples(dataset):
    for document in (dataset.train, dataset.val):
        document["categories"].append(dict(id=4, name="bus"))
    dataset.train["annotations"][20]["category_id"] = 4
    for seed in range(5):
        found = view(dataset, 1, seed)
        assert "bus" in [name for name, _ in found.samples[0].boxes]


def test_samples_are_chosen_by_the_seed(dataset):
    names = [[s.name for s in view(dataset, 6, seed).samples] for seed in (0, 0, 1)]
    assert names[0] == names[1] != names[2]
    assert len(set(names[0])) == 6


def test_small_and_large_are_those_of_coco(dataset):
    boxes = [[0, 0, 31, 32], [0, 0, 32, 32], [0, 0, 95, 96], [0, 0, 96, 96]]
    for number, record in enumerate(dataset.train["annotations"]):
        record["bbox"] = boxes[number % 4]
    small, medium, large = view(dataset, 1).shares()
    assert (small, large) == (pytest.approx(11 / 42), pytest.approx(10 / 42))
    assert small + medium + large == pytest.approx(1)


def test_boxes_are_drawn_where_the_file_says_on_the_image_as_it_is_loaded(tmp_path):
    """An image that EXIF turns is drawn turned, with its boxes as they are."""
    path = tmp_path / "a.png"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (400, 200), "white").save(path, exif=exif)
    colors = palette(["car"])
    sample = Sample(path, "a.png", [("car", (20.0, 200.0, 100.0, 150.0))], True)
    tile = draw_tile(sample, colors)
    assert tile.size == (200, 400)
    pixels = np.asarray(tile)
    for x, y in ((20, 300), (120, 300), (70, 350)):
        assert tuple(pixels[y, x]) == colors["car"]
    as_stored = draw_tile(sample._replace(applies_exif=False), colors)
    assert as_stored.size == (400, 200)


def test_an_aerial_image_is_shown(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    Image.new("RGB", (40, 20), "red").save(tmp_path / "a.png")
    tile = draw_tile(Sample(tmp_path / "a.png", "a.png", [], True), {})
    assert tile.getpixel((5, 5)) == (255, 0, 0)


@pytest.mark.parametrize("name", ["a.png", "grey.png", "palette.png"])
def test_transparent_pixels_are_shown_as_they_are_loaded(tmp_path, name):
    pixels = np.full((TILE, TILE, 4), (200, 10, 30, 0), np.uint8)
    pixels[: TILE // 2] = (40, 80, 120, 255)
    image = Image.fromarray(pixels)
    if name == "grey.png":
        image = image.convert("LA")
    if name == "palette.png":
        image = image.convert("RGB").quantize(4)
        image.info["transparency"] = 0
    path = tmp_path / name
    image.save(path)
    loaded = TRANSFORMS.build(dict(type="LoadImageFromFile"))(dict(img_path=str(path)))
    tile = np.asarray(draw_tile(Sample(path, name, [], True), {}))
    assert np.array_equal(tile, loaded["img"][..., ::-1])


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


def test_an_image_that_cannot_be_opened_has_a_tile_too(tmp_path):
    tile = draw_tile(Sample(tmp_path / "none.jpg", "none.jpg", [], True), {})
    sheet = contact_sheet("street", [("none.jpg", tile)] * 5)
    assert sheet.height > 2 * tile.height


def test_colours_of_classes_differ():
    colors = palette(f"class {number}" for number in range(24))
    assert len(set(colors.values())) == 24
