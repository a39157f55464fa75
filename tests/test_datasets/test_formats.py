"""Recognition, splits, the cache, and entries of a mixture with a root."""

from __future__ import annotations

import errno
import json
import logging
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from damex.commandline.data import data
from damex.commandline.run import run_command
from damex.datasets.coco import read_coco
from damex.datasets.formats.entry import convert_cached
from damex.datasets.formats.images import content_share
from damex.datasets.formats.records import Options
from damex.datasets.formats.tree import Tree, split_of_file
from damex.datasets.label_space import LabelSpace
from damex.datasets.mixture import MixtureDataset
from damex.datasets.spec import DatasetSpec, parse_mixture
from damex.errors import ConfigError

CLASSES = ("ant", "bee", "cow")
SIZES = ((40, 20), (33, 57), (64, 64), (101, 37))
PIPELINE = [
    dict(type="LoadImageFromFile"),
    dict(type="LoadAnnotations", with_bbox=True),
    dict(type="PackDetInputs"),
]


@pytest.fixture
def csv_folder(tmp_path, write_image):
    """A folder of 40 images with one box each, in one CSV file without splits."""
    rows = ["filename,class,xmin,ymin,xmax,ymax"]
    for i in range(40):
        write_image(tmp_path / f"set/{i}.png")
        rows.append(f"{i}.png,{CLASSES[i % 3]},1,2,{10 + i % 20},9")
    (tmp_path / "set/boxes.csv").write_text("\n".join(rows))
    return tmp_path / "set"


# Each writer takes (folder, {image: (size, [(label, (x1, y1, x2, y2))])}).


def write_voc(root, images):
    for name, (size, boxes) in images.items():
        objects = "".join(
            f"<object><name>{k}</name><bndbox><xmin>{b[0]}</xmin><ymin>{b[1]}</ymin>"
            f"<xmax>{b[2]}</xmax><ymax>{b[3]}</ymax></bndbox></object>"
            for k, b in boxes
        )
        size = f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"
        text = f"<annotation>{size}{objects}</annotation>"
        (root / Path(name).with_suffix(".xml")).write_text(text)


def write_yolo(root, images):
    (root / "classes.txt").write_text("\n".join(CLASSES))
    for name, ((w, h), boxes) in images.items():
        lines = [
            f"{CLASSES.index(k)} {(x1 + x2) / 2 / w!r} {(y1 + y2) / 2 / h!r} "
            f"{(x2 - x1) / w!r} {(y2 - y1) / h!r}"
            for k, (x1, y1, x2, y2) in boxes
        ]
        (root / Path(name).with_suffix(".txt")).write_text("\n".join(lines))


def write_kitti(root, images):
    for folder in ("image_2", "label_2"):
        (root / folder).mkdir()
    for name, (_, boxes) in images.items():
        (root / name).rename(root / "image_2" / name)
        lines = [f"{k} 0 0 0 {' '.join(map(repr, b))} 0 0 0 0 0 0 0" for k, b in boxes]
        file = root / "label_2" / Path(name).with_suffix(".txt")
        file.write_text("\n".join(lines))


def write_dota(root, images):
    (root / "labelTxt").mkdir()
    for name, (_, boxes) in images.items():
        lines = [
            f"{x1!r} {y1!r} {x2!r} {y1!r} {x2!r} {y2!r} {x1!r} {y2!r} {k} 0"
            for k, (x1, y1, x2, y2) in boxes
        ]
        text = "\n".join(["imagesource:x", "gsd:1", *lines])
        (root / "labelTxt" / Path(name).with_suffix(".txt")).write_text(text)


def write_csv(root, images):
    rows = [
        f"{x2!r},{y2!r},{name},{k},{x1!r},{y1!r}"
        for name, (_, boxes) in images.items()
        for k, (x1, y1, x2, y2) in boxes
    ]
    rows += [f",,{name},,," for name, (_, boxes) in images.items() if not boxes]
    (root / "boxes.csv").write_text(
        "\n".join(["xmax,ymax,file,label,xmin,ymin", *rows])
    )


def write_retinanet(root, images):
    rows = [
        f"{name},{x1!r},{y1!r},{x2!r},{y2!r},{k}"
        for name, (_, boxes) in images.items()
        for k, (x1, y1, x2, y2) in boxes
    ]
    rows += [f"{name},,,,," for name, (_, boxes) in images.items() if not boxes]
    (root / "boxes.csv").write_text("\n".join(rows))


def write_wider(root, images):
    lines = []
    for name, (_, boxes) in images.items():
        rest = [
            f"{a!r} {b!r} {c - a!r} {d - b!r} 0 0 0 0 0 0" for _, (a, b, c, d) in boxes
        ]
        lines += [name, str(len(boxes)), *(rest or ["0 0 0 0 0 0 0 0 0 0"])]
    (root / "wider_face_train_bbx_gt.txt").write_text("\n".join(lines))


def write_coco(root, images):
    document = dict(images=[], annotations=[], categories=[])
    document["categories"] = [dict(id=7 - i, name=k) for i, k in enumerate(CLASSES)]
    for number, (name, ((w, h), boxes)) in enumerate(images.items()):
        document["images"].append(dict(id=number, file_name=name, width=w, height=h))
        for k, (x1, y1, x2, y2) in boxes:
            document["annotations"].append(
                dict(
                    id=len(document["annotations"]),
                    image_id=number,
                    category_id=7 - CLASSES.index(k),
                    bbox=[x1, y1, x2 - x1, y2 - y1],
                )
            )
    (root / "labels.json").write_text(json.dumps(document))


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


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_written_is_read(tmp_path, write_image, read, kind, seed):
    rng = np.random.default_rng(seed)
    images = {}
    for i in range(6):
        size = SIZES[rng.integers(len(SIZES))]
        write_image(tmp_path / f"im.{i}.png", size)
        boxes = []
        for _ in range(rng.integers(0, 5) if i else 3):
            corners = rng.uniform(0, 1, (2, 2)).round(4) * size
            (x1, y1), (x2, y2) = corners.min(0).tolist(), corners.max(0).tolist()
            boxes.append((CLASSES[rng.integers(3)], (x1, y1, x2, y2)))
        images[f"im.{i}.png"] = (size, boxes)
    WRITERS[kind](tmp_path, images)
    found = read(tmp_path, val_share=0.0)
    assert found.summary.format == kind.split()[0]
    assert found.dropped == {}
    by_name = {Path(name).name: boxes for name, boxes in found.boxes().items()}
    assert by_name.keys() == images.keys()
    for name, (_, boxes) in images.items():
        labels = ["face" if kind == "wider_face" else k for k, _ in boxes]
        assert [k for k, _ in by_name[name]] == labels
        for (_, got), (_, wanted) in zip(by_name[name], boxes, strict=True):
            np.testing.assert_allclose(got, wanted, atol=2e-6)
    totals = found.summary.splits["train"]
    assert totals.images == 6
    assert sum(totals.boxes.values()) == sum(len(boxes) for _, boxes in images.values())


def test_nothing_is_recognised(tmp_path, write_image, write, read):
    for i in range(3):
        write_image(tmp_path / f"{i}.jpg")
        write(tmp_path / f"{i}.json", '{"shapes": []}')
    with pytest.raises(ConfigError) as caught:
        read(tmp_path)
    text = str(caught.value)
    assert f"{tmp_path} holds annotations in no format that damex knows" in text
    assert "it has 3 .jpg, 3 .json" in text
    assert "kitti: label_2/*.txt" in text
    assert "\n" not in text


def test_two_formats_at_once(csv_folder, read):
    (csv_folder / "0.txt").write_text("0 0.5 0.5 0.5 0.5\n")
    with pytest.raises(ConfigError) as caught:
        read(csv_folder)
    text = str(caught.value)
    assert (
        "annotations in 2 formats (yolo: 1 label files such as 0.txt; csv: box" in text
    )
    assert "choose one with format='yolo'" in text
    assert len(read(csv_folder, format="csv").boxes()) == 40


@pytest.mark.parametrize(
    ("root", "options", "fault"),
    [
        ("none", {}, r"root='.*none': there is no such folder \(seen from"),
        ("set/boxes.csv", {}, r"boxes.csv' is a file; give the folder: root='.*set'"),
        ("set", dict(format="vco"), r"format='vco' is unknown; did you mean 'voc'"),
        ("set", dict(format="voc"), r"does not look like voc: there is no Annotations"),
        ("set", dict(train=("trian",)), r"train='trian' is no split, folder, list of"),
        ("set", dict(val=("none.txt",)), r"val='none.txt' is no split"),
        ("set", dict(val=("a.txt",), val_share=0.2), r"val_share=0.2 cannot be used"),
    ],
)
def test_mistakes(csv_folder, read, root, options, fault):
    (csv_folder / "a.txt").write_text("1.png\n")
    with pytest.raises(ConfigError, match=fault) as caught:
        read(csv_folder.parent / root, **options)
    assert "\n" not in str(caught.value)


def test_folder_without_images(tmp_path, write, read):
    write(tmp_path / "a.csv", "filename,class,xmin,ymin,xmax,ymax\na.jpg,x,1,2,3,4\n")
    with pytest.raises(ConfigError, match=r"holds no images, only 1 \.csv"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("path", "split"),
    [
        ("train/_annotations.coco.json", "train"),
        ("annotations/instances_val2017.json", "val"),
        ("wider_face_split/wider_face_test_bbx_gt.txt", "test"),
        ("validation-annotations-bbox.csv", "val"),
        ("train/valid.json", "val"),
        ("trains/devices.csv", None),
    ],
)
def test_split_of_a_file(path, split):
    assert split_of_file(path) == split


def test_hidden_files_and_circles_of_links_are_passed_over(tmp_path, write_image):
    write_image(tmp_path / "a/b.jpg")
    write_image(tmp_path / ".thumbs/b.jpg")
    write_image(tmp_path / "a/.b.jpg", kind="JPEG")
    (tmp_path / "a/loop").symlink_to(tmp_path)
    assert list(Tree(tmp_path).files) == ["a/b.jpg"]


def test_ambiguous_image_is_not_guessed(tmp_path, write_image):
    for name in ("one/a.jpg", "two/a.jpg", "two/b.jpg"):
        write_image(tmp_path / name)
    tree = Tree(tmp_path)
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
    assert 4 <= len(before["val"]) <= 20
    assert before["val"] | before["train"] == {f"{i}.png" for i in range(40)}
    expected = {
        path.name for path in csv_folder.glob("*.png") if content_share(path) < 0.3
    }
    assert before["val"] == expected
    # More images; one has another name, in another folder.
    text = (csv_folder / "boxes.csv").read_text().replace("\n7.png", "\nseven.png")
    rows = [f"new{i}.png,ant,1,2,9,9" for i in range(20)]
    (csv_folder / "boxes.csv").write_text("\n".join([text, *rows]))
    (csv_folder / "x").mkdir()
    (csv_folder / "7.png").rename(csv_folder / "x/seven.png")
    for i in range(20):
        write_image(csv_folder / f"new{i}.png")
    after = sides(read(csv_folder, val_share=0.3))
    for split, names in before.items():
        renamed = {
            name.replace("7.png", "seven.png") if name == "7.png" else name
            for name in names
        }
        assert renamed <= after[split]
    # A greater share keeps what it has.
    assert after["val"] <= sides(read(csv_folder, val_share=0.6))["val"]


def test_equal_images_land_on_one_side(csv_folder, read):
    rows = (csv_folder / "boxes.csv").read_text().splitlines()
    for i in range(40):
        shutil.copy(csv_folder / f"{i}.png", csv_folder / f"copy{i}.png")
        rows.append(f"copy{rows[i + 1]}")
    (csv_folder / "boxes.csv").write_text("\n".join(rows))
    for names in sides(read(csv_folder, val_share=0.5)).values():
        assert {n for n in names if n.startswith("copy")} == {
            f"copy{n}" for n in names if not n.startswith("copy")
        }


def test_a_small_folder_has_something_to_evaluate_on(
    tmp_path, write_image, write, read
):
    for name in "ab":
        write_image(tmp_path / f"{name}.png")
    write(tmp_path / "x.csv", "a.png,1,2,9,9,x\nb.png,1,2,9,9,x\n")
    shares = {n: content_share(tmp_path / n) for n in ("a.png", "b.png")}
    found = read(tmp_path, val_share=0.001)
    assert sides(found)["val"] == {min(shares, key=shares.get)}
    assert "no image falls into the validation share of 0.001" in str(found.noted)


@pytest.mark.parametrize(
    ("options", "val"),
    [
        (dict(val=("late",)), {"b.png"}),
        (dict(val=("late.txt",)), {"a.png", "c.png"}),
        (dict(val=("late", "early/c.png.csv")), None),
    ],
)
def test_named_splits(tmp_path, write_image, write, read, options, val):
    for name in ("early/a", "early/c", "late/b", "early/d"):
        write_image(tmp_path / f"{name}.png")
    rows = [f"{n}.png,1,2,9,9,x" for n in ("early/a", "early/c", "late/b", "early/d")]
    write(tmp_path / "x.csv", "\n".join(rows))
    write(tmp_path / "late.txt", "a\n/home/x/early/c.png\n")
    if val is None:
        with pytest.raises(ConfigError, match=r"val='early/c\.png\.csv' is no split"):
            read(tmp_path, **options)
        return
    found = sides(read(tmp_path, **options))
    assert found["val"] == val
    assert found["train"] == {"a.png", "b.png", "c.png", "d.png"} - val


def test_conversion_is_reused_until_something_changes(csv_folder, cache):
    def file():
        return convert_cached(csv_folder, Options()).file("train")

    first = file()
    assert first.is_relative_to(cache)
    stamp = first.stat().st_mtime_ns
    assert file() == first
    assert first.stat().st_mtime_ns == stamp
    # Options, content and times each ask for a new one.
    assert convert_cached(csv_folder, Options(val_share=0.5)).file("train") != first
    image = csv_folder / "3.png"
    os.utime(image, ns=(1, 1))
    second = file()
    assert second != first
    with (csv_folder / "boxes.csv").open("a") as boxes:
        boxes.write("\n0.png,bee,1,1,5,5")
    third = convert_cached(csv_folder, Options())
    totals = [sum(s.boxes.values()) for s in third.summary.splits.values()]
    assert sum(totals) == 41
    # A file that somebody took out is made again; nothing else is left behind.
    third.file("val").unlink()
    assert convert_cached(csv_folder, Options()).file("val").is_file()
    assert len(list(cache.iterdir())) == 4
    assert not [path for path in cache.iterdir() if path.name.startswith(".")]


def test_the_users_folder_is_not_written_to(csv_folder):
    before = sorted(csv_folder.rglob("*"))
    convert_cached(csv_folder, Options())
    assert sorted(csv_folder.rglob("*")) == before


def test_two_processes_at_once_agree(csv_folder, cache):
    code = (
        "import sys\n"
        "from damex.datasets.formats.entry import convert_cached\n"
        "from damex.datasets.formats.records import Options\n"
        "sys.stdin.readline()\n"
        f"print(convert_cached({str(csv_folder)!r}, Options()).file('train'))\n"
    )
    pipe = subprocess.PIPE
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True
        )
        for _ in range(3)
    ]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    files = {process.communicate()[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert files == {str(convert_cached(csv_folder, Options()).file("train"))}
    assert len(list(cache.iterdir())) == 1


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
    with pytest.raises(ConfigError, match=r"cannot be written to .*set XDG_CACHE_HOME"):
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


def test_summary_is_said_once(csv_folder, monkeypatch):
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


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        (dict(data_root="x"), r"\('a'\) has both root and data_root; root alone finds"),
        (dict(img="x/"), r"has both root and img"),
        (dict(train=dict(type="VOCDataset")), r"beside root, train is a split, folder"),
        (dict(format="vocc"), r"format='vocc' is unknown; did you mean 'voc'\?"),
        (
            dict(val_share=1.0),
            r"val_share must be a number from 0 to below 1, got 1\.0",
        ),
        (dict(val_share="x"), r"val_share must be a number"),
        (dict(root=None, format="voc"), r"format is for an entry with root="),
        (dict(root=None, val_share=0.2), r"val_share is for an entry with root="),
    ],
)
def test_keys_that_do_not_go_together(changes, fault):
    with pytest.raises(ConfigError, match=r"mixture\[0\] .*" + fault):
        parse_mixture([{**dict(name="a", root="r"), **changes}])


def test_list_of_files_needs_a_root():
    spec = DatasetSpec("a", train=["a.json", "b.json"])
    with pytest.raises(ConfigError, match=r"only an entry with root=\.\.\. can have"):
        spec.source("train")


def test_same_root_twice_is_refused():
    entries = [dict(name="a", root="r"), dict(name="b", root="./r/")]
    with pytest.raises(ConfigError, match=r"trains on the same .* as mixture\[0\]"):
        parse_mixture(entries)
    entries = [dict(name="a", root="r", train="x"), dict(name="b", root="r", train="y")]
    assert len(parse_mixture(entries)) == 2


def test_no_validation_images(csv_folder):
    spec = DatasetSpec("a", root=str(csv_folder), val_share=0.0)
    assert spec.coco_source("val") is None
    with pytest.raises(ConfigError, match=r"'a': .*set has no images for 'val'; name"):
        spec.dataset_config("val")


def test_fault_of_a_root_names_the_dataset(tmp_path):
    spec = DatasetSpec("cars", root=str(tmp_path))
    with pytest.raises(ConfigError, match=r"dataset 'cars': .* in no format that"):
        spec.own_classes  # noqa: B018


def test_convert_command(csv_folder, tmp_path, capsys):
    out = tmp_path / "out"
    data(["convert", str(csv_folder), "--out", str(out), "--val-share", "0.25"])
    text = capsys.readouterr().out
    assert "set: csv data in " in text
    assert sorted(path.name for path in out.iterdir()) == [
        "summary.json",
        "train.json",
        "val.json",
    ]
    entry = eval(text.partition("for a mixture:\n")[2].strip().rstrip(","))
    theirs = MixtureDataset(datasets=[entry], pipeline=PIPELINE)
    root = dict(name="set", root=str(csv_folder), val_share=0.25)
    ours = MixtureDataset(datasets=[root], pipeline=PIPELINE)
    assert [i["img_path"] for i in map(theirs.get_data_info, range(len(theirs)))] == [
        i["img_path"] for i in map(ours.get_data_info, range(len(ours)))
    ]


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
        (["--out", "{tmp}/full"], "train.json exists and is not overwritten"),
        (["--out", "{tmp}/full/train.json"], "train.json cannot be written to"),
        (["--out", "/proc/x"], "/proc/x cannot be written to"),
        (["--out", "{tmp}/out", "--val-share", "2"], "--val-share must be from 0"),
        (["--out", "{tmp}/out", "--format", "vco"], "invalid choice: 'vco'"),
        ([], "required: --out"),
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
