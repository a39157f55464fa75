"""YOLO in its many layouts; boxes worked out by hand."""

from __future__ import annotations

import pytest

from damex.errors import ConfigError, DataError

# In an image of 40 x 20 px.
CAT, CAT_LINE = ("cat", (3.0, 2.0, 15.0, 8.0)), "0 0.225 0.25 0.3 0.3"
DOG, DOG_LINE = ("dog", (20.0, 5.0, 30.0, 19.0)), "1 0.625 0.6 0.25 0.7"


@pytest.fixture
def roboflow(tmp_path, write_image, write):
    """A folder with train/ and valid/, each images/ and labels/; no data.yaml yet."""
    for split, line in (("train", CAT_LINE), ("valid", DOG_LINE)):
        write_image(tmp_path / f"{split}/images/a.jpg")
        write(tmp_path / f"{split}/labels/a.txt", f"{line}\n")
    return tmp_path


SPLITS = {
    "train": {"train/images/a.jpg": [CAT]},
    "val": {"valid/images/a.jpg": [DOG]},
}


@pytest.mark.parametrize(
    "yaml",
    [
        "train: ../train/images\nval: ../valid/images\nnc: 2\nnames: ['cat', 'dog']",
        "train: train/images\nval: valid\nnames: {0: cat, 1: dog}",
        "path: /home/bob/sets/pets\ntrain: train/images\nval: valid/images\n"
        "names:\n  1: dog\n  0: cat\n",
        "path: ../datasets/pets\ntrain: [train/images]\nvalid: valid/images\n"
        "test:\nnames: [cat, dog]",
        "train: /data/pets/train/images\nval: C:\\pets\\valid\\images\n"
        "test: test/images\nnames: [cat, dog]",
    ],
    ids=["roboflow", "mapping", "other machine", "lists", "absolute"],
)
def test_data_yaml(roboflow, write, read, yaml):
    write(roboflow / "data.yaml", yaml)
    found = read(roboflow)
    assert found.splits == SPLITS
    assert found.summary.classes == ("cat", "dog")
    assert found.dropped == {}


def test_yaml_with_a_list_of_images(roboflow, write, read):
    write(roboflow / "lists/train.txt", "./train/images/a.jpg\n")
    write(roboflow / "lists/val.txt", "/home/bob/pets/valid/images/a.jpg\n")
    write(
        roboflow / "pets.yaml",
        "train: lists/train.txt\nval: lists/val.txt\nnames: [cat, dog]\n",
    )
    assert read(roboflow).splits == SPLITS


@pytest.mark.parametrize(
    ("yaml", "fault"),
    [
        ("train: no/such\nval: valid\nnames: [a, b]", r"train is 'no/such', and there"),
        ("train: x.txt\nval: valid\nnames: [a, b]", r"train is the list 'x.txt', and"),
        ("train: train\nval: valid\nnames: 7", r"names must be a list of class names"),
        ("train: train\nval: valid\nnames: {a: b}", r"data\.yaml: names: invalid li"),
        ("train: train\nval: valid\nnames: {~: b}", r"data\.yaml: names: int\(\) arg"),
        ("train: train\nnc: 3\nnames: [a, b]", r"nc is 3, and names lists 2 classes"),
        (
            "train: train\nnames: [a, b, a]",
            r"data\.yaml: name 1 and name 3 are both",
        ),
        ("train: train\nnames: [a, '']", r"name 2 is empty"),
    ],
)
def test_broken_yaml(roboflow, write, read, yaml, fault):
    write(roboflow / "data.yaml", yaml)
    with pytest.raises(DataError, match=fault):
        read(roboflow)


@pytest.mark.parametrize(
    ("yaml", "error", "fault"),
    [
        (
            "train: a\nnames: [cat, dog\nx: 1",
            DataError,
            r"data.yaml:3: not a YAML file",
        ),
        ("- cat", DataError, r"data\.yaml has no 'key: value' lines"),
        ("nc: 2", ConfigError, r"looked for data\.yaml with names: and train:"),
    ],
)
def test_yaml_that_is_none(roboflow, write, read, yaml, error, fault):
    write(roboflow / "data.yaml", yaml)
    with pytest.raises(error, match=fault):
        read(roboflow)


@pytest.mark.parametrize(
    ("names", "fault"),
    [
        ("cat\n\ndog\n", r"classes\.txt: line 2 is empty; line 1 names class 0"),
        ("cat\ndog\ncat\n", r"classes\.txt: line 1 and line 3 are both 'cat'"),
    ],
)
def test_a_file_of_names_numbers_the_classes_by_its_lines(
    roboflow, write, read, names, fault
):
    write(roboflow / "classes.txt", "cat\ndog\n\n\n")
    assert read(roboflow).splits == SPLITS
    write(roboflow / "classes.txt", names)
    with pytest.raises(DataError, match=fault):
        read(roboflow)


def test_yaml_that_is_not_of_the_data_does_not_matter(roboflow, write, read):
    write(roboflow / "data.yaml", "train: train\nval: valid\nnames: [cat, dog]")
    boxes = read(roboflow).boxes()
    write(roboflow / "export.yaml", "made: 2024-02-31\n")
    write(roboflow / "other.yaml", "{")
    assert read(roboflow).boxes() == boxes


def test_two_data_sets_side_by_side(roboflow, write, read):
    for split in ("train", "valid"):
        write(roboflow / split / "data.yaml", "train: images\nnames: [cat, dog]")
    with pytest.raises(ConfigError, match=r"several data sets .*root='.*/train'"):
        read(roboflow)


def test_darknet(tmp_path, write_image, write, read):
    for name, line in (("a", CAT_LINE), ("b", DOG_LINE), ("c", CAT_LINE)):
        write_image(tmp_path / f"obj/{name}.JPG")
        write(tmp_path / f"obj/{name}.txt", line)
    write(tmp_path / "obj.names", "cat\ndog\n")
    write(
        tmp_path / "obj.data",
        "classes = 2\ntrain = data/train.txt\nvalid = data/valid.txt\n"
        "names = data/obj.names\nbackup = backup/\n",
    )
    write(tmp_path / "train.txt", "data/obj/a.JPG\n")
    write(tmp_path / "valid.txt", "data/obj/b.JPG\ndata/obj/gone.JPG\n")
    found = read(tmp_path)
    assert found.splits == {
        "train": {"obj/a.JPG": [CAT]},
        "val": {"obj/b.JPG": [DOG]},
    }
    assert found.dropped == {
        "images of the list valid.txt that are not there": 1,
        "annotated images in no split that is used": 1,
    }


def test_lists_without_a_config(tmp_path, write_image, write, read):
    for name in "abc":
        write_image(tmp_path / f"{name}.jpg")
        write(tmp_path / f"{name}.txt", CAT_LINE)
    write(tmp_path / "classes.txt", "cat\ndog\n")
    write(tmp_path / "train.txt", "a.jpg\nc.jpg\n")
    write(tmp_path / "val.txt", "b.jpg\n")
    found = read(tmp_path)
    assert list(found.splits["train"]) == ["a.jpg", "c.jpg"]
    assert list(found.splits["val"]) == ["b.jpg"]


def test_lists_of_another_copy_are_passed_over(tmp_path, write_image, write, read):
    for name in "abc":
        write_image(tmp_path / f"{name}.jpg")
        write(tmp_path / f"{name}.txt", CAT_LINE)
    write(tmp_path / "x.names", "cat\ndog\n")
    write(tmp_path / "train.txt", "a.jpg\n" + "".join(f"{i}.jpg\n" for i in range(9)))
    found = read(tmp_path, val_share=0.0)
    assert len(found.boxes()) == 3
    what = "images of list files are not there: the lists are passed over"
    assert found.noted == {what: 9}


def test_folders_images_and_labels(tmp_path, write_image, write, read):
    for split, line in (("train", CAT_LINE), ("val", DOG_LINE)):
        write_image(tmp_path / f"images/{split}/a.png")
        write(tmp_path / f"labels/{split}/a.txt", line)
    write(tmp_path / "labels/classes.txt", "cat\ndog\n")
    assert read(tmp_path).splits == {
        "train": {"images/train/a.png": [CAT]},
        "val": {"images/val/a.png": [DOG]},
    }


def test_names_come_from_the_entry_where_no_file_has_them(
    tmp_path, write_image, write, read
):
    write_image(tmp_path / "a.jpg")
    write(tmp_path / "a.txt", f"{CAT_LINE}\n{DOG_LINE}")
    with pytest.raises(ConfigError, match=r"no file names the classes .*classes=\["):
        read(tmp_path)
    assert read(tmp_path, classes=("cat", "dog")).boxes() == {"a.jpg": [CAT, DOG]}


def test_polygons_become_the_boxes_around_them(tmp_path, write_image, write, read):
    write_image(tmp_path / "a.jpg")
    write(
        tmp_path / "a.txt",
        "0 0.075 0.25 0.225 0.1 0.375 0.25 0.225 0.4\n"  # a rhombus
        "1 0.5 0.25 0.75 0.25 0.5 0.95\n",  # a triangle
    )
    assert read(tmp_path, classes=("cat", "dog")).boxes() == {"a.jpg": [CAT, DOG]}


def test_keypoints_behind_a_box_are_left_out(roboflow, write, read):
    config = "train: train\nval: valid\nnames: [cat, dog]\nkpt_shape: {}"
    write(roboflow / "data.yaml", config.format("[2, 3]"))
    points = "0.9 0.9 2 0.01 0.01 0"  # the box does not reach them
    write(roboflow / "train/labels/a.txt", f"{CAT_LINE} {points}\n")
    write(roboflow / "valid/labels/a.txt", f"{DOG_LINE} {points}\n{DOG_LINE} 0.5\n")
    found = read(roboflow)
    assert found.splits == SPLITS
    assert found.dropped == {"lines that are no box or polygon of a class": 1}
    write(roboflow / "data.yaml", config.format("17"))
    with pytest.raises(DataError, match=r"data.yaml: kpt_shape must be .* got 17"):
        read(roboflow)


def test_images_without_objects_stay(roboflow, write_image, write, read):
    write(roboflow / "data.yaml", "train: train\nval: valid\nnames: [cat, dog]")
    write_image(roboflow / "train/images/empty.jpg")
    write(roboflow / "train/labels/empty.txt", "\n")
    write_image(roboflow / "train/images/none.jpg")
    found = read(roboflow)
    assert found.splits["train"] == {
        "train/images/a.jpg": [CAT],
        "train/images/empty.jpg": [],
        "train/images/none.jpg": [],
    }
    what = "images without a label file: kept as without objects"
    assert found.noted == {what: 1}
    assert found.summary.noted[what].example == "train/images/none.jpg"


def test_faults(roboflow, write_image, write, read):
    write(roboflow / "data.yaml", "train: train\nval: valid\nnames: [cat, dog]")
    lines = [
        CAT_LINE,
        "0 nan 0.25 0.3 0.3",
        "0 0.225 0.25 -0.3 0.3",
        "0 0.225 0.25 0 0.3",
        "0 -0.4 0.25 0.3 0.3",
        CAT_LINE,
        "2 0.225 0.25 0.3 0.3",
        "0 9 5 12 6",
        "0 0.225 0.25 0.3",
        "cat 0.225 0.25 0.3 0.3",
    ]
    write(roboflow / "train/labels/a.txt", "\n".join(lines))
    write(roboflow / "train/labels/lost.txt", CAT_LINE)
    found = read(roboflow)
    assert found.splits == SPLITS
    examples = {what: entry.example for what, entry in found.summary.dropped.items()}
    place = "train/labels/a.txt"
    assert examples == {
        "boxes with a coordinate that is NaN or infinite": f"{place}:2",
        "boxes with a negative width or height": f"{place}:3",
        "boxes with a width or height of 0": f"{place}:4",
        "boxes outside of their image": f"{place}:5",
        "boxes that stand there twice": f"{place}:6",
        "boxes of an unknown class number": f"{place}:7: 2; there are 0 to 1",
        "boxes that are no shares of the image (above 1)": f"{place}:8: '0 9 5 12 6': "
        "YOLO coordinates are fractions of the image (0 to 1), not pixels",
        "lines that are no box or polygon of a class": f"{place}:9: '0 0.225 0.25 0.3'"
        ": 4 columns, but YOLO has 5 (class number, centre x, centre y, width, height)"
        ", DOTA 9 or 10 (8 numbers, class, difficult), KITTI 15",
        "annotation files without an image": "train/labels/lost.txt",
    }
    assert found.dropped.pop("lines that are no box or polygon of a class") == 2


def test_validation_images_that_are_training_images_are_said(roboflow, write, read):
    write(roboflow / "data.yaml", "train: train\nval: train\nnames: [cat, dog]")
    assert read(roboflow).noted == {
        "WARNING: images of val are images of train, too": 1
    }
