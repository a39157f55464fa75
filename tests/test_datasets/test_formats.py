"""Recognition, splits, the cache, and entries of a mixture with a root."""

import csv
import errno
import io
import json
import logging
import os
import pickle
import shutil
import sys
import unicodedata
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from damex.datasets.coco_records import read_coco
from damex.datasets.entries import Options, read_folders_once
from damex.datasets.label_space import LabelSpace
from damex.datasets.mixture import MixtureDataset
from damex.datasets.spec import DatasetSpec, parse_mixture
from damex.errors import ConfigError
from damex.workbench.check.check import check_config
from damex.workbench.cli.data import data
from damex.workbench.cli.run import run_command
from damex.workbench.formats.conversion import convert_cached
from damex.workbench.formats.records import content_share
from damex.workbench.formats.tree import Tree
from tests.test_datasets.test_mixture import PIPELINE

CLASSES = ("ant", "bee", "cow")
SIZES = ((40, 20), (33, 57), (64, 64), (101, 37))


@pytest.fixture
def csv_folder(tmp_path, write_image):
    """A folder of 40 images with one box each, in one CSV file without splits."""
    rows = ["filename,class,xmin,ymin,xmax,ymax"]
    for i in range(40):
        write_image(tmp_path / f"set/{i}.png")
        rows.append(f"{i}.png,{CLASSES[i % 3]},1,2,{10 + i % 20},9")
    (tmp_path / "set/boxes.csv").write_text("\n".join(rows))
    return tmp_path / "set"


# Each writer maps {image: (size, [(label, (x1, y1, x2, y2))])} to {file: text}.


def _rows(images, row, empty=None):
    """A line per box of ``row(name, label, *corners)``, or one for no boxes."""
    return [
        line
        for name, (_, boxes) in images.items()
        for line in [row(name, k, *b) for k, b in boxes] or [empty and empty(name)]
        if line
    ]


def _per_image(images, suffix, row, *start):
    """A text file per image with a line per box."""
    return {
        str(Path(name).with_suffix(suffix)): "\n".join(
            [*start, *(row(size, k, *b) for k, b in boxes)]
        )
        for name, (size, boxes) in images.items()
    }


def write_voc(images):
    def row(_, label, x1, y1, x2, y2):
        return (
            f"<object><name>{label}</name><bndbox><xmin>{x1}</xmin><ymin>{y1}</ymin>"
            f"<xmax>{x2}</xmax><ymax>{y2}</ymax></bndbox></object>"
        )

    return {
        file: f"<annotation><size><width>{size[0]}</width><height>{size[1]}</height>"
        f"</size>{text}</annotation>"
        for (file, text), (size, _) in zip(
            _per_image(images, ".xml", row).items(), images.values(), strict=True
        )
    }


def write_yolo(images):
    def row(size, label, x1, y1, x2, y2):
        w, h = size
        shares = ((x1 + x2) / 2 / w, (y1 + y2) / 2 / h, (x2 - x1) / w, (y2 - y1) / h)
        return f"{CLASSES.index(label)} {' '.join(map(repr, shares))}"

    return {**_per_image(images, ".txt", row), "classes.txt": "\n".join(CLASSES)}


def write_kitti(images):
    def row(_, label, *box):
        return f"{label} 0 0 0 {' '.join(map(repr, box))} 0 0 0 0 0 0 0"

    return {f"label_2/{k}": v for k, v in _per_image(images, ".txt", row).items()}


def write_dota(images):
    def row(_, label, x1, y1, x2, y2):
        return f"{x1!r} {y1!r} {x2!r} {y1!r} {x2!r} {y2!r} {x1!r} {y2!r} {label} 0"

    files = _per_image(images, ".txt", row, "imagesource:x", "gsd:1")
    return {f"labelTxt/{k}": v for k, v in files.items()}


def write_csv(images):
    text = io.StringIO()
    rows = _rows(
        images,
        lambda name, k, x1, y1, x2, y2: (x2, y2, name, k, x1, y1),
        lambda name: ("", "", name, "", "", ""),
    )
    header = ("xmax", "ymax", "file", "label", "xmin", "ymin")
    csv.writer(text).writerows([header, *rows])
    return {"boxes.csv": text.getvalue()}


def write_retinanet(images):
    rows = _rows(
        images,
        lambda name, k, *box: f"{name},{','.join(map(repr, box))},{k}",
        lambda name: f"{name},,,,,",
    )
    return {"boxes.csv": "\n".join(rows)}


def write_wider(images):
    lines = []
    for name, (size, boxes) in images.items():
        lines += [name, str(len(boxes))]
        lines += _rows(
            {name: (size, boxes)},
            lambda _, k, a, b, c, d: f"{a!r} {b!r} {c - a!r} {d - b!r} 0 0 0 0 0 0",
            lambda _: "0 0 0 0 0 0 0 0 0 0",
        )
    return {"wider_face_train_bbx_gt.txt": "\n".join(lines)}


def write_coco(images):
    document = dict(images=[], annotations=[], categories=[])
    document["categories"] = [dict(id=7 - i, name=k) for i, k in enumerate(CLASSES)]
    for number, (name, ((w, h), boxes)) in enumerate(images.items()):
        document["images"].append(dict(id=number, file_name=name, width=w, height=h))
        document["annotations"] += [
            dict(
                id=1000 * number + i,
                image_id=number,
                category_id=7 - CLASSES.index(k),
                bbox=[x1, y1, x2 - x1, y2 - y1],
            )
            for i, (k, (x1, y1, x2, y2)) in enumerate(boxes)
        ]
    return {"labels.json": document}


WRITERS = {
    "voc": write_voc,
    "yolo": write_yolo,
    "kitti": write_kitti,
    "dota": write_dota,
    "csv": write_csv,
    "csv without a header": write_retinanet,
    "wider_face": write_wider,
    "coco": write_coco,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_written_is_read(folder, write_image, read, kind):
    rng = np.random.default_rng(len(kind))
    images = {}
    for i in range(12):
        size = SIZES[rng.integers(len(SIZES))]
        write_image(folder() / f"im.{i}.png", size)
        boxes = []
        for _ in range(rng.integers(0, 5) if i else 3):
            corners = rng.uniform(0, 1, (2, 2)).round(4) * size
            (x1, y1), (x2, y2) = corners.min(0).tolist(), corners.max(0).tolist()
            boxes.append((CLASSES[rng.integers(3)], (x1, y1, x2, y2)))
        images[f"im.{i}.png"] = (size, boxes)
    found = read(folder("", WRITERS[kind](images)), val_share=0.0)
    assert found.summary.format == kind.split()[0]
    assert found.dropped == {}
    for name, (_, boxes) in images.items():
        labels = ["face" if kind == "wider_face" else k for k, _ in boxes]
        assert [k for k, _ in found.boxes()[name]] == labels
        for (_, got), (_, wanted) in zip(found.boxes()[name], boxes, strict=True):
            np.testing.assert_allclose(got, wanted, atol=2e-6)
    totals = found.summary.splits["train"]
    assert totals.images == 12
    assert sum(totals.boxes.values()) == sum(len(boxes) for _, boxes in images.values())


BAD = {
    "boxes with a coordinate that is NaN or infinite": (float("nan"), 2.0, 15.0, 8.0),
    "boxes with a negative width or height": (15.0, 2.0, 3.0, 8.0),
    "boxes with a width or height of 0": (3.0, 2.0, 3.0, 8.0),
    "boxes outside of their image": (-9.0, 2.0, -1.0, 8.0),
    "boxes that occur twice": (3.0, 2.0, 15.0, 8.0),
}
# DOTA has four points in any order.
UNORDERED = ("dota", "boxes with a negative width or height")


@pytest.mark.parametrize(
    ("kind", "reason"), [p for p in product(WRITERS, BAD) if p != UNORDERED]
)
def test_bad_boxes_are_left_out(folder, read, kind, reason):
    # Without a header, a tenth of the rows may be swapped.
    boxes = [("ant", (3.0, 2.0, 15.0 + i, 8.0)) for i in range(15)]
    images = {"a.png": ((40, 20), [*boxes, ("ant", BAD[reason])])}
    found = read(folder("a.png", WRITERS[kind](images)))
    assert found.dropped == {reason: 1}
    assert [box for _, box in found.boxes()["a.png"]] == [box for _, box in boxes]


@pytest.mark.parametrize("kind", ["voc", "csv", "coco"])
def test_odd_names_come_through(tmp_path, write_image, read, kind, monkeypatch):
    names = ["driver's license", 'say "hi"', "猫 🐈", "two\nlines", "%s {x}"]
    monkeypatch.setattr(f"{__name__}.CLASSES", names)
    root = tmp_path / 'it\'s a\n"set" ü'
    file = 'im\'s "0" 猫.png'
    write_image(root / file)
    boxes = [(name, (1.0 + i, 2.0, 9.0 + i, 9.0)) for i, name in enumerate(names)]
    for name, text in WRITERS[kind]({file: ((40, 20), boxes)}).items():
        content = text if isinstance(text, str) else json.dumps(text)
        (root / name).write_text(content, newline="")
    found = read(root, val_share=0.0)
    assert found.boxes() == {file: boxes}
    assert len(found.summary.splits["train"].line().splitlines()) == 1


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("a.json", "{}", "knows, but 1 .jpg, 1 .json. Looked for coco: a .json"),
        ("a.txt", "0 40 30 20 1", "a.txt:1: '0 40 30 20 1': YOLO coordinates are frac"),
        ("a.txt", "0,.5,.5,.2,.2", "a.txt:1: '0,.5,.5,.2,.2': columns are separated"),
        ("a.txt", "\n0 .5 .5 .2 .2 .9", "a.txt:2: '0 .5 .5 .2 .2 .9': a YOLO label"),
        ("a.txt", "cat .5 .5 .2 .2", "a YOLO label begins with the number of its"),
        ("a.txt", f"car {'1 ' * 12} x 1", "has a class and then numbers, not 'x'"),
        ("a.txt", "1 1 5 1 5 5 1 plane 0", "9 columns, but YOLO has 5 (class number, "),
        ("a.txt", "0 0,5 0,5 0,2 0,2", "decimals have a point, not a comma"),
        ("a.json", '{"images": [], "anno', "a.json is not a JSON file (Unterminated"),
        ("a.json", '{"images": [], "annotations": []}', "a.json has no list 'categor"),
        ("a.json", '[{"score": 0.5}]', "a.json is a list of detections, not ground"),
        ("a.xml", "<annotation><size>", "a.xml is not an XML file (no element found"),
        ("a.csv", "picture,b\na.jpg,1", "a.csv:1: 'picture,b' lacks columns such as"),
    ],
)
def test_what_is_nearly_recognised_is_quoted(folder, read, file, text, fault):
    with pytest.raises(ConfigError) as caught:
        read(folder("a.jpg", {file: text}))
    assert fault in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_formats_at_once(csv_folder, read):
    (csv_folder / "0.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    with pytest.raises(ConfigError) as caught:
        read(csv_folder)
    text = str(caught.value)
    assert "in 2 formats (yolo: 1 label files such as 0.txt; csv: boxes.csv)" in text
    assert "choose one with format='yolo'" in text
    assert len(read(csv_folder, format="csv").boxes()) == 40


@pytest.mark.parametrize(
    ("root", "options", "fault"),
    [
        ("none", {}, r"root='.*none': the folder does not exist \(seen from"),
        ("set/boxes.csv", {}, r"boxes.csv' is a file; give the folder: root='.*set'"),
        (
            "set",
            dict(format="voc"),
            r"of format 'voc', but 40 \.png.*Looked for voc: An",
        ),
        ("set", dict(format="dota"), r"1 \.csv\. 0\.txt:1: '1 2': 2 columns, but YOLO"),
        ("set", dict(train=("trian",)), r"train='trian' is not a split, folder, list"),
        ("set", dict(val=("none.txt",)), r"val='none.txt' is not a split"),
        ("set", dict(val=("a.txt",), val_share=0.2), r"val_share=0.2 cannot be used"),
        ("no_images", {}, r"holds no images, only 1 \.csv"),
    ],
)
def test_mistakes(csv_folder, read, root, options, fault):
    (csv_folder / "a.txt").write_text("1.png\n")
    (csv_folder / "0.txt").write_text("1 2\n")
    (csv_folder.parent / "no_images").mkdir()
    shutil.copy(csv_folder / "boxes.csv", csv_folder.parent / "no_images")
    with pytest.raises(ConfigError, match=fault) as caught:
        read(csv_folder.parent / root, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train/_annotations.coco.json", "train"),
        ("annotations/instances_val2017.json", "val"),
        ("train/valid.json", "val"),
        ("trains/devices.csv", None),
    ],
)
def test_split_of_a_file(folder, path, split):
    assert Tree(folder()).split_of_file(path) == split


def test_hidden_files_and_circles_of_links_are_ignored(folder):
    root = folder(["a/b.jpg", ".thumbs/b.jpg", "a/.b.jpg.png"])
    (root / "a/loop").symlink_to(root)
    assert list(Tree(root).files) == ["a/b.jpg"]


def test_a_folder_is_listed_under_each_of_its_links(folder):
    root = folder(["zz/b.jpg"])
    (root / "train").symlink_to(root / "zz")
    (root / "val").symlink_to(root / "zz")
    assert sorted(Tree(root).files) == ["train/b.jpg", "val/b.jpg", "zz/b.jpg"]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_accents_may_be_written_in_two_ways(folder, form):
    stored = unicodedata.normalize(form, "café.jpg")
    other = unicodedata.normalize("NFD" if form == "NFC" else "NFC", stored)
    assert other != stored
    assert Tree(folder([f"a/{stored}"])).locate_image(other) == f"a/{stored}"


def test_ambiguous_image_is_not_guessed(folder):
    tree = Tree(folder("one/a.jpg two/a.jpg two/b.jpg"))
    assert tree.locate_image("a.jpg") is None
    assert tree.locate_image("/data/two/a.png") == "two/a.jpg"
    assert tree.locate_image("a.jpg", near=["one"]) == "one/a.jpg"
    assert tree.locate_image("b") == "two/b.jpg"


def sides(found):
    return {
        s: {Path(name).name for name in images} for s, images in found.splits.items()
    }


def test_share_by_content_never_changes(csv_folder, write_image, read):
    before = sides(read(csv_folder, val_share=0.3))
    assert 0 < len(before["val"]) < 40  # of 40: contents follow from paths
    files = {*csv_folder.glob("*.png")}
    assert before["val"] == {p.name for p in files if content_share(p) < 0.3}
    assert before["train"] == {path.name for path in files} - before["val"]
    # More images; one has another name, in another folder; one has a copy.
    text = (csv_folder / "boxes.csv").read_text().replace("\n7.png", "\nseven.png")
    rows = [f"new{i}.png,ant,1,2,9,9" for i in range(20)]
    rows += [f"copy{i}.png,ant,1,2,9,9" for i in range(6)]
    (csv_folder / "boxes.csv").write_text("\n".join([text, *rows]))
    (csv_folder / "x").mkdir()
    (csv_folder / "7.png").rename(csv_folder / "x/seven.png")
    for i in range(20):
        write_image(csv_folder / f"new{i}.png")
    for i in range(6):
        shutil.copy(csv_folder / f"{i}.png", csv_folder / f"copy{i}.png")
    after = sides(read(csv_folder, val_share=0.3))
    for split, names in before.items():
        assert {"seven.png" if name == "7.png" else name for name in names} <= after[
            split
        ]
        copies = {n.removeprefix("copy") for n in after[split] if n.startswith("copy")}
        assert copies == names & {f"{i}.png" for i in range(6)}
    # A greater share keeps what it has.
    assert after["val"] <= sides(read(csv_folder, val_share=0.6))["val"]


def test_uncompressed_images_with_equal_borders_have_other_shares(tmp_path):
    pixels = np.zeros((3, 400, 200, 3), np.uint8)  # 64 KB are 109 rows
    pixels[:, 200] = np.arange(3, dtype=np.uint8)[:, None, None]
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / f"{number}.bmp")
    assert len({content_share(tmp_path / f"{n}.bmp") for n in range(3)}) == 3


@pytest.mark.parametrize("names", [10, 1])
def test_copies_of_roboflow_share_a_split_if_there_are_others(folder, read, names):
    images = [f"{n % names}_jpg.rf.{n:032x}.png" for n in range(30)]
    rows = [f"{name},1,2,9,9,x" for name in images]
    found = sides(read(folder(images, {"x.csv": "\n".join(rows)}), val_share=0.3))
    both = [{name.split("_")[0] for name in found[key]} for key in ("train", "val")]
    assert both[0].isdisjoint(both[1]) == (names > 1)


ANT = write_coco({"a.png": ((40, 20), [("ant", (1, 2, 9, 8))])})["labels.json"]


def test_a_folder_of_test_images_alone_is_read(folder, read):
    found = read(folder("a.png", {"test.json": ANT}))
    assert sides(found) == {"test": {"a.png"}}


def test_coco_is_found_among_many_other_files(folder, read):
    others = {f"meta/{number}.json": {"by": number} for number in range(60)}
    found = read(folder("a.png", {"labels.json": ANT, **others}), val_share=0.0)
    assert sides(found) == {"train": {"a.png"}}


def test_folders_split_the_images_of_one_file(folder, read):
    rows = ["filename,class,xmin,ymin,xmax,ymax"]
    names = ["trainval/0.png", "val/1.png", "other/2.png"]
    rows += [f"{name},ant,1,2,9,8" for name in names]
    root = folder(names, {"a.csv": "\n".join(rows)})
    assert sides(found := read(root)) == {"train": {"0.png"}, "val": {"1.png"}}
    assert found.dropped == {"annotated images in no split that is used": 1}
    found = read(root, test=("val",), val_share=0.0)  # the entry decides
    assert sides(found) == {"train": {"0.png", "2.png"}, "test": {"1.png"}}


def write_flat_voc(images):
    """All XML files in one folder."""
    return {f"Annotations/{Path(k).name}": v for k, v in write_voc(images).items()}


@pytest.mark.parametrize(
    "write", [write_csv, write_coco, write_voc, write_flat_voc, write_yolo]
)
@pytest.mark.parametrize(
    ("names", "splits"),
    [
        ("images/0 test/1", dict(train="0", test="1")),
        ("flight_a/0 flight_b/1 flight_test/2", dict(train="01", test="2")),
        ("val/0 val/1", dict(val="01")),  # all are evaluated
        ("val/0 test/1", dict(val="0", test="1")),
        ("train/0 valid/1 more/2", dict(train="0", val="1")),
        # Folders of classes.
        ("car/0 train/1 bus/2", dict(train="012")),
        ("car/0 train/1 bus/2 test/3", dict(train="0123")),
    ],
)
def test_folders_named_like_splits_split_images_of_all_formats(
    folder, read, write, names, splits
):
    boxes = [("ant", (1, 2, 9, 8))]
    images = {f"{name}.png": ((40, 20), boxes) for name in names.split()}
    options = {} if "val" in splits else dict(val_share=0.0)
    found = read(folder([*images], write(images)), **options)
    expected = {key: {f"{one}.png" for one in own} for key, own in splits.items()}
    assert sides(found) == expected


def test_a_file_named_train_with_images_of_test_is_noted(folder, read):
    files = {"train.csv": write_csv({"test/a.png": ((40, 20), [])})["boxes.csv"]}
    files["train.csv"] += "9,8,images/b.png,ant,1,2\n"
    found = read(folder("test/a.png images/b.png", files), val_share=0.0)
    assert sides(found) == {"train": {"a.png", "b.png"}}
    noted = "WARNING: images of train in folders named like val or test"
    assert found.summary.noted[noted].times == 1


def test_the_split_of_a_row_tells_equal_names_apart(folder, read):
    rows = ["filename,class,xmin,ymin,xmax,ymax,split"]
    rows += [f"0.png,{split},1,2,9,8,{split}" for split in ("train", "val", "val")]
    root = folder("train/0.png val/0.png", {"a.csv": "\n".join(rows)})
    found = read(root)
    assert found.splits.keys() == {"train", "val"}
    assert found.boxes()["val/0.png"] == [("val", (1.0, 2.0, 9.0, 8.0))]


def test_a_small_folder_has_something_to_evaluate_on(folder, read):
    root = folder("a.png b.png", {"x.csv": "a.png,1,2,9,9,x\nb.png,1,2,9,9,x\n"})
    shares = {n: content_share(root / n) for n in ("a.png", "b.png")}
    found = read(root, val_share=0.001)
    assert sides(found)["val"] == {min(shares, key=shares.get)}
    assert "no image falls into the validation share of 0.001" in str(found.noted)


@pytest.mark.parametrize(
    ("val", "expected", "dropped"),
    [
        (("late",), {"b.png"}, {}),
        (("late", "early\\sub/"), {"b.png", "d.png"}, {}),
        (
            ("late.txt",),
            {"a.png", "c.png", "d.png"},
            {"lines of the list late.txt that match no annotated image": 2},
        ),
    ],
)
def test_named_splits(folder, read, val, expected, dropped):
    images = ["early/a.png", "early/c.png", "late/b.png", "early/sub/d.png", "z.png"]
    rows = [f"{name},1,2,9,9,x" for name in images]
    listed = "a\n/home/x/early/c.png\n\nx/91.png\nninety\nearly/sub/d.jpeg\n"
    found = read(
        folder(images, {"x.csv": "\n".join(rows), "late.txt": listed}), val=val
    )
    assert sides(found)["val"] == expected
    assert sides(found)["train"] == {Path(name).name for name in images} - expected
    assert found.dropped == dropped
    examples = [count.example for count in found.summary.dropped.values()]
    assert examples == ["late.txt:4: x/91.png"][: len(dropped)]


def test_a_file_of_all_images_with_those_of_the_splits(folder, read):
    """Images that the splits use are not counted as left out."""
    names = [f"{i}.png" for i in range(8)]
    boxes = {name: ((40, 20), [("ant", (1, 2, 9, 8))]) for name in names}
    files = {
        f"{file}.json": write_coco({name: boxes[name] for name in used})["labels.json"]
        for file, used in (("val", names[6:]), ("train", names[1:6]), ("all", names))
    }
    root = folder(names, files)
    found = read(root)
    assert sides(found) == {"train": {*names[1:6]}, "val": {*names[6:]}}
    assert found.dropped == {
        "annotated images in no split that is used": 1,
        "annotations of used images in a file that no split uses": 7,
    }
    # What an entry holds back for validation is not trained on through another file.
    with pytest.raises(ConfigError, match="has no images for train, only the lists"):
        read(root, val=("all.json",))


def test_conversion_is_reused_until_something_changes(csv_folder, cache):
    files = sorted(csv_folder.rglob("*"))
    first = convert_cached(csv_folder, Options())
    assert sorted(csv_folder.rglob("*")) == files  # the user's folder stays
    assert first.folder.parent == cache
    stamp = first.file("train").stat().st_mtime_ns
    assert convert_cached(csv_folder, Options()) == first
    assert first.file("train").stat().st_mtime_ns == stamp
    # Options, content and times each ask for a new one.
    assert convert_cached(csv_folder, Options(val_share=0.5)).folder != first.folder
    os.utime(csv_folder / "3.png", ns=(1, 1))
    assert convert_cached(csv_folder, Options()).folder != first.folder
    with (csv_folder / "boxes.csv").open("a") as boxes:
        boxes.write("\n0.png,bee,1,1,5,5")
    third = convert_cached(csv_folder, Options())
    assert sum(sum(s.boxes.values()) for s in third.summary.splits.values()) == 41
    # A deleted file is written again; nothing else is left behind.
    third.file("val").unlink()
    assert convert_cached(csv_folder, Options()).file("val").is_file()
    assert len(list(cache.iterdir())) == 4
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def test_the_loser_of_a_race_takes_the_winners_files(csv_folder, cache, monkeypatch):
    theirs = convert_cached(csv_folder, Options())
    hidden = cache.parent / "hidden"
    theirs.folder.rename(hidden)
    rename = Path.rename

    def late(self, target):
        if not theirs.folder.exists():
            shutil.copytree(hidden, theirs.folder)
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    ours = convert_cached(csv_folder, Options())
    assert ours.folder == theirs.folder
    assert [path.name for path in cache.iterdir()] == [theirs.folder.name]


def test_cache_that_cannot_be_written(csv_folder, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(csv_folder / "boxes.csv"))
    with pytest.raises(ConfigError, match=r"cannot be conv.*set XDG_CACHE_HOME"):
        convert_cached(csv_folder, Options())


def test_entry_with_a_root_trains_and_evaluates(
    csv_folder, tmp_path, make_coco_dataset
):
    other = make_coco_dataset(tmp_path / "park", classes=["cow", "dog"], num_images=3)
    entries = [dict(name="bugs", root=str(csv_folder), val_share=0.25), other]
    spec = parse_mixture(entries)[0]
    assert LabelSpace.from_specs(parse_mixture(entries)).classes == (*CLASSES, "dog")
    sizes = {}
    for split in ("train", "val", "test"):
        dataset = MixtureDataset(datasets=entries, split=split, pipeline=PIPELINE)
        sizes[split] = dataset.sizes[0]
        source = spec.coco_source(split)
        assert len(read_coco(source.annotations, "bugs")["images"]) == sizes[split]
        sample = dataset[0]["data_samples"]
        number = int(Path(sample.img_path).stem)
        assert Path(sample.img_path) == source.images / f"{number}.png"
        if split == "train":
            name = dataset.metainfo["classes"][sample.gt_instances.labels[0]]
            assert name == CLASSES[number % 3]
            box = sample.gt_instances.bboxes.tensor[0].tolist()
            assert box == [1, 2, 10 + number % 20, 9]
        again = pickle.loads(pickle.dumps(dataset))
        assert again[0]["data_samples"].img_path == sample.img_path
    assert sizes["train"] + sizes["val"] == 40
    assert sizes["test"] == sizes["val"]
    assert entries[0] == dict(name="bugs", root=str(csv_folder), val_share=0.25)


def test_summary_is_logged_once(csv_folder, monkeypatch):
    (csv_folder / "1.png").write_bytes(b"")
    seen, levels = [], []

    def log(text, level, **_):
        seen.append(text)
        levels.append(level)

    monkeypatch.setattr("damex.datasets.mixture.print_log", log)
    for split in ("train", "val"):
        entry = dict(name="bugs", root=str(csv_folder), val_share=0.25)
        MixtureDataset(datasets=[entry], split=split, pipeline=PIPELINE)
    text = "\n".join(seen)
    assert text.count(f"bugs: csv data in {csv_folder} (boxes.csv)") == 1
    assert "left out: 1 images that cannot be read (for instance 1.png)" in text
    assert levels == [logging.WARNING, logging.INFO, logging.INFO]


def test_faults_of_a_root_name_the_dataset(csv_folder, tmp_path):
    spec = DatasetSpec("a", root=str(csv_folder), val_share=0.0)
    assert spec.coco_source("val") is None
    with pytest.raises(ConfigError, match=r"'a': .*set has no images for 'val'; name"):
        spec.dataset_config("val")
    (tmp_path / "empty").mkdir()
    spec = DatasetSpec("cars", root=str(tmp_path / "empty"))
    with pytest.raises(
        ConfigError, match=r"dataset 'cars': .*empty is empty; name the"
    ):
        spec.own_classes  # noqa: B018
    (tmp_path / "empty" / "notes.txt").write_text("no dataset")
    with pytest.raises(ConfigError, match=r"dataset 'cars': .* no annotations in"):
        DatasetSpec("cars", root=str(tmp_path / "empty")).own_classes  # noqa: B018


def test_convert_command(csv_folder, tmp_path, capsys):
    out = tmp_path / "out"
    data(["convert", str(csv_folder), "--out", str(out), "--val-share", "0.25"])
    text = capsys.readouterr().out
    assert "set: csv data in " in text
    files = {path.name for path in out.iterdir()}
    assert files == {"summary.json", "train.json", "val.json"}
    entry = eval(text.partition("for a mixture:\n")[2].strip().rstrip(","))
    theirs = MixtureDataset(datasets=[entry], pipeline=PIPELINE)
    root = dict(name="set", root=str(csv_folder), val_share=0.25)
    ours = MixtureDataset(datasets=[root], pipeline=PIPELINE)
    for i in range(max(len(theirs), len(ours))):
        paths = [d.get_data_info(i)["img_path"] for d in (theirs, ours)]
        assert paths[0] == paths[1]


def test_convert_writes_all_files_or_none(csv_folder, tmp_path, capsys, monkeypatch):
    """The disk is full when two of three files are written."""
    out, sizes, copy = tmp_path / "out", [], shutil.copyfile

    def fill(source, target):
        if len(sizes) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sizes.append(copy(source, target).stat().st_size)

    monkeypatch.setattr(shutil, "copyfile", fill)
    words = ["convert", str(csv_folder), "--out", str(out), "--val-share", "0.25"]
    assert run_command(data, words) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert "val.json was not written (No space left on device); free space" in line
    assert not [*out.iterdir()]
    assert min(sizes) > 0


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--out", "{root}/out"], "lies inside of"),
        (
            ["--out", "{tmp}/full"],
            "train.json exists; remove it, or name another --out",
        ),
        (["--out", "{tmp}/full/train.json"], "train.json cannot be written to"),
        (["--out", "/proc/x"], "/proc/x cannot be written to"),
        (["--out", "{tmp}/out", "--val-share", "2"], "--val-share must be from 0"),
        (["--out", "{tmp}/out", "--format", "vco"], 'Invalid value "vco" for --format'),
        (["--out", "{tmp}/out", "--classes", "a", "a"], "name 1 and name 2 are both"),
        ([], "--out requires an argument"),
    ],
)
def test_mistakes_of_the_command(csv_folder, tmp_path, capsys, arguments, fault):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/train.json").write_text("mine")
    filled = [a.format(root=csv_folder, tmp=tmp_path) for a in arguments]
    assert run_command(data, ["convert", str(csv_folder), *filled]) == 2
    error = capsys.readouterr().err.strip()
    assert fault in error
    assert "\n" not in error
    assert (tmp_path / "full/train.json").read_text() == "mine"
    assert not (tmp_path / "out").exists()


@pytest.fixture
def scans(monkeypatch):
    """The folders that are listed for their files, in order."""
    seen = []

    def scandir(path):
        if sys._getframe(1).f_code.co_name == "list_files":  # pathlib asks since 3.13
            seen.append(str(path))
        return scan(path)

    scan = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    return seen


def start(root):
    """What a training reads of a config: the entries, both splits, and the check."""
    mixture = [dict(name="set", root=str(root))]
    with read_folders_once():
        (spec,) = parse_mixture(mixture)
        assert spec.own_classes
        for split in ("train", "val"):
            MixtureDataset(datasets=mixture, split=split)
        check_config(dict(mixture=mixture), quick=True)
        return parse_mixture(mixture)[0].own_classes


def test_a_folder_is_listed_once_in_a_start_and_anew_in_the_next(csv_folder, scans):
    (csv_folder / "more").mkdir()
    start(csv_folder)
    assert sorted(scans) == [str(csv_folder), str(csv_folder / "more")]
    with (csv_folder / "boxes.csv").open("a") as file:
        file.write("\n0.png,dog,1,2,3,4")
    assert start(csv_folder) == ("ant", "bee", "cow", "dog")
    assert len(scans) == 4
    (spec,) = parse_mixture([dict(name="set", root=str(csv_folder))])
    assert (spec.own_classes, len(scans)) == (("ant", "bee", "cow", "dog"), 6)


def test_a_command_lists_a_folder_once(csv_folder, scans):
    assert run_command(data, ["check", str(csv_folder)]) == 0
    assert scans == [str(csv_folder)]


def test_a_failed_start_keeps_nothing(csv_folder, scans):
    def fail():
        with read_folders_once():
            assert parse_mixture([dict(name="set", root=str(csv_folder))])[
                0
            ].own_classes
            raise KeyboardInterrupt

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            fail()
    assert len(scans) == 2
