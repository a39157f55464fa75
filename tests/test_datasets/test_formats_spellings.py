"""Label files as people and tools write them: one content, many spellings."""

import json

import pytest

from damex.datasets.coco import NamedCocoDataset
from damex.errors import ConfigError, DataError
from damex.workbench.formats.tree import Tree
from tests.test_datasets.test_formats_readers import (
    CAT,
    CAT_LINE,
    CSV,
    DOG,
    DOG_LINE,
    YAML,
    YOLO_IMAGES,
    YOLO_LABELS,
    coco,
    kitti,
    xml,
)

FLAGS = [
    *(
        (value, False)
        for value in (0, "0", "0.0", 0.0, False, "false", " No ", "", None)
    ),
    *((value, True) for value in (1, "1", 1.0, "1.0", True, "True", "yes", 2, "2")),
    ("Unspecified", False),
]
UNCLEAR = ["maybe", -1, "-1", 0.5, float("nan")]


def flagged(kind, value):
    """A folder of one box whose flag is ``value``, in a format."""
    if kind == "coco":
        document = coco()
        document["annotations"][0]["iscrowd"] = value
        return {"x.json": document}
    word = "" if value is None else value
    if kind == "voc":
        return {"a.xml": xml(CAT, extra=f"<difficult>{word}</difficult>")}
    if kind == "dota":
        return {"a.txt": f"3 2 15 2 15 8 3 8 cat {word}".replace(" No ", "No")}
    return {"x.csv": f"{CSV.strip()},difficult\na.jpg,cat,3,2,15,8,{word}\n"}


@pytest.mark.parametrize("kind", ["coco", "voc", "dota", "csv"])
@pytest.mark.parametrize(("value", "crowd"), FLAGS, ids=lambda value: repr(value))
def test_flags(folder, read, kind, value, crowd):
    found = read(folder("a.jpg", flagged(kind, value)))
    [record] = found.documents["train"]["annotations"]
    assert record["iscrowd"] == crowd
    assert sum(found.noted.values()) == crowd


@pytest.mark.parametrize("kind", ["coco", "voc", "dota", "csv"])
@pytest.mark.parametrize("value", UNCLEAR)
def test_flags_that_are_neither_are_noted_by_name(folder, read, kind, value):
    found = read(folder("a.jpg", flagged(kind, value)))
    [record] = found.documents["train"]["annotations"]
    assert record["iscrowd"] == 0
    [note] = found.noted
    flag = "iscrowd" if kind == "coco" else "difficult"
    assert note == f"{flag!r} is neither true nor false: taken as false"


@pytest.mark.parametrize(("value", "flag"), FLAGS, ids=lambda value: repr(value))
def test_flags_in_a_loaded_coco_file(tmp_path, value, flag):
    """A text is no truth value for mmdet."""
    document = coco(boxes=[(1, CAT), (1, DOG), (1, CAT)])
    document["annotations"][1]["iscrowd"] = value
    document["annotations"][2]["ignore"] = value
    (tmp_path / "x.json").write_text(json.dumps(document))
    classes = dict(metainfo=dict(classes=("cat", "dog")), pipeline=[])
    files = dict(ann_file=str(tmp_path / "x.json"), data_prefix=dict(img="images/"))
    info = NamedCocoDataset(**files, **classes, test_mode=True).get_data_info(0)
    flags = [one["ignore_flag"] for one in info["instances"]]
    assert flags == [0, int(flag)] + [0] * (not flag)
    assert [one["iscrowd"] for one in info["ground_truth"]] == [0, int(flag), 0]


NAMES = ("thé", "thè")


def class_list(kind, names):
    """A file that names the classes of two labels, and its declared encoding."""
    if kind == "csv":
        return "x.csv", f"{CSV}a.jpg,{names[0]},3,2,15,8\na.jpg,{names[1]},20,5,30,19\n"
    if kind == "json":
        document = json.dumps(coco(boxes=[(1, CAT), (1, DOG)]), ensure_ascii=False)
        return "x.json", document.replace('"cat"', f'"{names[0]}"').replace(
            '"dog"', f'"{names[1]}"'
        )
    if kind == "yaml":
        return "data.yaml", f"train: .\nnames: [{names[0]}, {names[1]}]\n"
    return kind, "\n".join(names) + "\n"


LISTS = ["csv", "json", "yaml", "classes.txt", "obj.names"]


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize(
    "encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"]
)
def test_unicode_of_any_kind_is_read(folder, read, kind, encoding):
    is_yolo = kind not in ("csv", "json")
    root = folder("a.jpg", {"a.txt": f"{CAT_LINE}\n{DOG_LINE}"} if is_yolo else {})
    name, text = class_list(kind, NAMES)
    (root / name).write_bytes(text.replace("\n", "\r\n").encode(encoding))
    assert read(root).boxes() == {"a.jpg": [("thé", CAT[1]), ("thè", DOG[1])]}


@pytest.mark.parametrize("kind", LISTS)
@pytest.mark.parametrize(
    ("encoding", "names"),
    [("latin-1", NAMES), ("cp950", ("貓", "狗")), ("gbk", ("猫", "狗"))],
)
def test_other_encodings_are_refused_with_line_and_bytes(
    folder, read, kind, encoding, names
):
    is_yolo = kind not in ("csv", "json")
    root = folder("a.jpg", {"a.txt": f"{CAT_LINE}\n{DOG_LINE}"} if is_yolo else {})
    name, text = class_list(kind, names)
    (root / name).write_bytes(text.encode(encoding))
    with pytest.raises(DataError, match=rf"{name}:[1-3]: the bytes [0-9a-f ]+ are not"):
        read(root)


@pytest.mark.parametrize("kind", ["kitti", "dota"])
def test_names_in_label_files_of_another_encoding_are_refused(folder, read, kind):
    line = kitti("thé", CAT[1]) if kind == "kitti" else "3 2 15 2 15 8 3 8 thé 0"
    root = folder("a.jpg")
    (root / "a.txt").write_bytes(f"\n{line}\n".encode("latin-1"))
    with pytest.raises(DataError, match=r"a\.txt:2: the bytes e9 20"):
        read(root)


def test_other_files_may_be_in_any_encoding(folder, read):
    root = folder("a.jpg", {"a.txt": CAT_LINE, "classes.txt": "cat\n"})
    for name in ("readme.txt", "notes.csv", "notes.json", "notes.xml"):
        (root / name).write_bytes("Straße".encode("latin-1"))
    assert read(root).boxes() == {"a.jpg": [CAT]}


WORDS = [
    *("yes", "no", "on", "off", "null", "true", "~", "007", "12:30", "1e3", "0x1F"),
    *("1_000", "2024-02-31"),
]


@pytest.mark.parametrize("form", ["list", "mapping"])
def test_names_in_yaml_are_the_text_of_the_file(folder, read, form):
    names = f"[{', '.join(WORDS)}]"
    if form == "mapping":
        names = "".join(f"\n  {n}: {word}" for n, word in enumerate(WORDS))
    text = f"path:\ntrain: .\nval: null\ntest:\nnc: '{len(WORDS)}'\nnames: {names}\n"
    found = read(folder("a.jpg", {"a.txt": CAT_LINE, "data.yaml": text}))
    assert found.summary.classes == tuple(WORDS)


LABELIMG = (
    ("dog person cat tv car meatballs marinara_sauce tomato_soup chicken_noodle_soup")
    .replace(" ", "\n")
    .replace("_", " ")
)


@pytest.mark.parametrize(
    "lists",
    [
        {
            "train/labels/classes.txt": "cat\ndog",
            "valid/labels/classes.txt": "dog\ncat",
        },
        {"data.yaml": YAML, "train/labels/classes.txt": "dog\ncat\n"},
        {"data.yaml": YAML, "obj.names": "cat\ndog\nbird\n"},
        {"data.yaml": "nc: 2\nnames: [dog, cat]\n", "classes.txt": "cat\ndog\n"},
        {"data.yaml": YAML, "old.yaml": YAML.replace("cat, dog", "dog, cat")},
        {"obj.names": "cat\ndog", "classes.txt": "dog\ncat"},
    ],
)
def test_lists_of_names_that_differ_are_refused(folder, read, lists):
    with pytest.raises(DataError, match=r"class \d is .* in .* and .* in .*; remove"):
        read(folder(YOLO_IMAGES, {**YOLO_LABELS, **lists}))


@pytest.mark.parametrize(
    "lists",
    [
        {
            "train/labels/classes.txt": "cat\ndog",
            "valid/labels/classes.txt": "cat\ndog",
        },
        {"obj.names": "cat\ndog", "data/coco.names": "person\nbicycle"},
        {"classes.txt": "cat\ndog\n", "data/predefined_classes.txt": "dog\nperson"},
        {"data.yaml": YAML, "classes.txt": LABELIMG},
        {"valid/labels/obj.names": "cat\ndog", "all_labels.txt": "train/labels/a.txt"},
        {"obj.names": "cat\ndog", "classes.txt": "train/images/a.jpg 0\n"},
        {"obj.names": "cat\ndog", "labels.txt": "train/images/a\nvalid/images/a\n"},
    ],
)
def test_other_lists_are_not_the_names(folder, read, lists):
    found = read(folder(YOLO_IMAGES, {**YOLO_LABELS, **lists}))
    assert found.boxes() == {"train/images/a.jpg": [CAT], "valid/images/a.jpg": [DOG]}


@pytest.mark.parametrize("name", ["dataset.yml", "my_data.yaml", "pets.yaml"])
def test_a_broken_yaml_file_is_named_with_its_line(folder, read, name):
    text = "path: x\n\ttrain: train\nnames: [cat, dog\n"
    with pytest.raises(DataError, match=rf"{name}:2: not a YAML file"):
        read(folder(YOLO_IMAGES, {**YOLO_LABELS, name: text}))


def test_an_object_of_voc_with_several_boxes(folder, read):
    box = "<bndbox><xmin>20</xmin><ymin>5</ymin><xmax>30</xmax><ymax>19</ymax></bndbox>"
    one = xml(CAT).replace("</object>", f"{box}<bndbox></bndbox></object>")
    found = read(folder("a.jpg", {"a.xml": one}))
    assert found.boxes() == {"a.jpg": [CAT, ("cat", DOG[1])]}
    assert found.dropped == {"objects without a name or a box of four numbers": 1}


def test_ids_of_several_files_lose_the_boxes_of_both(folder, read):
    document = coco(["a.jpg", "a.png", "b.jpg"], [(1, CAT), (1, DOG), (3, DOG)])
    document["images"][1]["id"] = 1
    found = read(folder("a.jpg a.png b.jpg", {"x.json": document}))
    assert found.boxes() == {"b.jpg": [DOG]}
    assert found.dropped["image ids of several files, all left out"] == 1
    assert found.dropped["boxes of these ids"] == 2


@pytest.mark.parametrize("key", ["image_id", "category_id"])
def test_ids_that_are_a_text_and_a_number(folder, read, key):
    document = coco(boxes=[(1, CAT), (1, DOG)])
    record = document["annotations"][1]
    record[key] = str(record[key])
    found = read(folder("a.jpg", {"x.json": document}))
    assert found.boxes() == {"a.jpg": [CAT]}
    [lost] = found.summary.dropped.values()
    assert lost.example.endswith(
        "a number and a text are different ids, write both alike"
    )


def test_a_label_file_of_two_images_is_of_none(folder, read):
    files = {"labels/a.txt": CAT_LINE, "labels/b.txt": DOG_LINE, "x.names": "cat\ndog"}
    found = read(folder("images/a.jpg images/a.png images/b.jpg", files))
    assert found.boxes() == {"images/b.jpg": [DOG]}
    assert found.dropped["label files of several images, all left out"] == 1


@pytest.mark.parametrize("kind", ["kitti", "dota"])
def test_a_file_of_two_images_of_other_formats(folder, read, kind):
    line = kitti(*CAT) if kind == "kitti" else "3 2 15 2 15 8 3 8 cat 0"
    found = read(folder("a.jpg a.png b.jpg", {"a.txt": line, "b.txt": line}))
    assert found.boxes() == {"b.jpg": [CAT]}
    assert found.dropped["annotation files of several images"] == 1


@pytest.mark.parametrize("declared", ["", '<?xml version="1.0" encoding="utf-8"?>\n'])
def test_xml_of_another_encoding_than_declared(folder, read, declared):
    root = folder("a.jpg")
    text = declared + xml(("thé", CAT[1]))
    (root / "a.xml").write_bytes(text.encode("latin-1"))
    line = 2 if declared else 1
    with pytest.raises(ConfigError, match=rf"a\.xml:{line}: the bytes e9 3c 2f 6e"):
        read(root)


def test_the_suffix_in_voc_tells_images_of_one_name_apart(folder, read):
    files = {
        f"Annotations/{folder_}a.xml": xml(box, filename=name)
        for folder_, box, name in (("", CAT, "a.png"), ("x/", DOG, "a.jpg"))
    }
    found = read(folder("JPEGImages/a.jpg JPEGImages/a.png", files))
    assert found.boxes() == {"JPEGImages/a.jpg": [DOG], "JPEGImages/a.png": [CAT]}


# Each reaches 0.1 of the image over one border: 4 of 40 px, 2 of 20.
OVER = {
    "left": (-0.1, 0.25, 0.3, 0.75),
    "top": (0.25, -0.1, 0.5, 0.5),
    "right": (0.75, 0.25, 1.1, 0.75),
    "bottom": (0.25, 0.5, 0.5, 1.1),
}


@pytest.mark.parametrize("side", OVER)
@pytest.mark.parametrize("kind", ["box", "polygon", "csv"])
def test_shares_over_each_border_are_kept(folder, read, kind, side):
    x1, y1, x2, y2 = OVER[side]
    shape = ((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1)
    shape = (x1, y1, x2, y1, x2, y2, x1, y2) if kind == "polygon" else shape
    files = {"a.txt": " ".join(map(str, (0, *shape))), "x.names": "cat"}
    if kind == "csv":
        files = {"x.csv": f"{CSV}a.jpg,cat,{x1},{y1},{x2},{y2}\n"}
    found = read(folder("a.jpg", files))
    [(_, corners)] = found.boxes()["a.jpg"]
    assert corners == pytest.approx((x1 * 40, y1 * 20, x2 * 40, y2 * 20))
    assert found.dropped == {}


@pytest.mark.parametrize(
    "entry", ["{}.jpg", "JPEGImages/{}.jpg", "C:\\x\\{}.JPG", "{}"]
)
@pytest.mark.parametrize("column", ["", " ../Annotations/{}.xml"])
def test_lists_of_voc_name_files_in_many_ways(folder, read, entry, column):
    files = {f"Annotations/{name}.xml": xml(CAT) for name in ("a", "b", "c.1", "d")}
    lists = {"train": ("a", "c.1"), "val": ("b", "d")}
    for split, names in lists.items():
        text = "".join(f"{entry}{column}\n".format(name, name) for name in names)
        files[f"ImageSets/Main/{split}.txt"] = text
    found = read(folder([f"JPEGImages/{n}.jpg" for n in ("a", "b", "c.1", "d")], files))
    images = {split: [*images] for split, images in found.splits.items()}
    assert images == {
        split: [f"JPEGImages/{name}.jpg" for name in names]
        for split, names in lists.items()
    }


@pytest.mark.parametrize(
    ("folders", "splits"),
    [
        ("train_station test_site", (None, None)),
        ("train_station val_images", (None, "val")),
        ("validation_images WIDER_train", ("val", "train")),
        ("train_cats val_cats", ("train", "val")),
        ("train_cats val_dogs", (None, None)),
        ("train2017 test-v2", ("train", "test")),
        ("train_val test", ("train", "test")),
        ("pets/train_labels_01 pets/dev_board", ("train", None)),
    ],
)
def test_words_of_splits_in_folders(folder, folders, splits):
    tree = Tree(folder([f"{name}/a.jpg" for name in folders.split()]))
    assert tuple(map(tree.split_of_folder, folders.split())) == splits


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("filename,class,class_name", "a.jpg,0,cat"),
        ("filename,label,class_name,label_id", "a.jpg,0,cat,0"),
        ("filename,category,name", "a.jpg,cat,0"),
        ("filename,path,class", "b.jpg,images/a.jpg,cat"),
        ("image_id,name,label,file", "1,a.jpg,cat,a.jpg"),
    ],
)
def test_columns_of_csv_that_mean_the_same(folder, read, header, row):
    other = row.replace("images/a.jpg", "images/c.jpg").replace(",0", ",1")
    text = f"{header},xmin,ymin,xmax,ymax\n{row},3,2,15,8\n{other},20,5,30,19\n"
    found = read(folder("images/a.jpg images/c.jpg", {"x.csv": text}))
    labels = [label for boxes in found.boxes().values() for label, _ in boxes]
    assert labels == ["cat", "cat"]
    if "path" in header:
        assert len(found.boxes()) == 2


VIDEO = "0 0 Car 0 0 -1.5 10 10 40 40 1.5 1.6 3.9 1 1.5 20 -1.5\n"


@pytest.mark.parametrize(
    ("file", "content", "name"),
    [
        ("label_02/0000.txt", VIDEO, "KITTI tracking"),
        ("annotations/a.txt", "10,10,40,40,1,4,0,0\n", "VisDrone"),
        ("annotations/a.txt", "10,10,40,40,1,4,0,0,\n", "VisDrone"),
        ("gt/gt.txt", "1,1,10,10,40,40,1,1,0.5\n", "MOT"),
        ("Label/a.txt", "Person 10.5 10 40 40\n", "OIDv4"),
        ("a.json", dict(shapes=[], imagePath="a.jpg"), "LabelMe"),
        ("via.json", {"a.jpg1": dict(filename="a.jpg", regions=[])}, "VGG Image Ann"),
        ("a.json", [dict(image="a.jpg", annotations=[])], "CreateML"),
        ("a.json", [dict(name="a.jpg", labels=[])], "BDD100K"),
        ("x.xml", '<annotations><meta></meta><image id="0"/></annotations>', "CVAT"),
        ("x.tfrecord", "", "TFRecord"),
    ],
)
def test_formats_that_are_not_read_are_named(folder, read, file, content, name):
    with pytest.raises(
        ConfigError, match=rf"{file} is in the format of {name}.*Convert"
    ):
        read(folder("images/a.jpg", {file: content}))


MASKS = "JPEGImages/a.jpg SegmentationClass/a.png"
FOREIGN = {"labels/0.txt": CAT_LINE, "notes.json": {"categories": []}}
SIX = {"a.txt": f"{CAT_LINE} 0.78", "data.yaml": "train: .\nnames: [cat]"}


@pytest.mark.parametrize(
    ("images", "files", "error"),
    [
        (MASKS, {}, r"SegmentationClass/a\.png is in the format"),
        ("images/0_7436.jpeg", FOREIGN, r"1 label files such as labels/0\.txt, but no"),
        ("a.jpg", SIX, r"confidence of a detection.* or the angle"),
    ],
)
def test_labels_that_are_no_boxes_of_images(folder, read, images, files, error):
    with pytest.raises((ConfigError, DataError), match=error):
        read(folder(images, files))
