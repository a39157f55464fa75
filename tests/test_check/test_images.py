"""What is found about image files agrees with what mmdet loads."""

import io
import os

import numpy as np
import pytest
from mmdet.registry import TRANSFORMS
from PIL import Image

from damex.datasets.findings import Location
from damex.datasets.image_files import ImageInfo, ImageRecord, check_image
from damex.workbench.check import images
from damex.workbench.check.images import (
    NEAR,
    gradient_of,
    near_duplicates,
    probe_images,
)
from tests.test_check.conftest import SIZE, picture


def record_of(path, size, **kwargs):
    return ImageRecord(
        Location("street", "train.json"), "image 1", path, size, **kwargs
    )


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp", "tif"])
@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("color_type", ["color", "color_ignore_orientation"])
def test_no_error_is_what_the_loader_loads(tmp_path, suffix, orientation, color_type):
    """The size that LoadImageFromFile gives passes, and the other one does not."""
    path = tmp_path / f"a.{suffix}"
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(1).save(path, exif=exif)
    load = TRANSFORMS.build(dict(type="LoadImageFromFile", color_type=color_type))
    height, width = load(dict(img_path=str(path)))["img"].shape[:2]
    for size in (SIZE, SIZE[::-1]):
        record = record_of(path, size, applies_exif=color_type == "color")
        for decode in (True, False):
            [look] = probe_images([record], decode=decode)
            levels = {finding.level for finding in check_image(record, look)}
            assert ("error" in levels) == (size != (width, height))


def test_a_name_that_is_no_text_is_opened(tmp_path):
    path = tmp_path / os.fsdecode(b"caf\xe9.png")
    picture(1).save(path)
    [look] = probe_images([record_of(path, SIZE)], decode=True)
    assert look.problem is None


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "MPO"])  # MPO: JPEGs in one file
def test_a_file_that_was_cut_off_is_found_by_its_end(tmp_path, kind):
    options = dict(save_all=True, append_images=[picture(2)]) if kind == "MPO" else {}
    picture(1).save(tmp_path / "a", kind, **options)
    whole = (tmp_path / "a").read_bytes()
    shorter = whole[:-1] if kind == "PNG" else whole[: len(whole) // 4]
    for content, is_valid in ((whole + bytes(2000), True), (shorter, False)):
        (tmp_path / "a").write_bytes(content)
        [look] = probe_images([record_of(tmp_path / "a", SIZE)], decode=False)
        assert (look.problem is None) == is_valid


def test_opening_images_stops_when_time_is_over(tmp_path):
    path = tmp_path / "a.jpg"
    picture(1).save(path)
    assert probe_images([record_of(path, SIZE)] * 9, decode=False, seconds=-1) == []


@pytest.mark.parametrize("decode", [False, True])
def test_aerial_images_are_no_attack(tmp_path, monkeypatch, decode):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    picture(1).save(tmp_path / "a.jpg")
    [look] = probe_images([record_of(tmp_path / "a.jpg", SIZE)], decode=decode)
    assert (look.problem, look.header.size, bool(look.digest)) == (None, SIZE, decode)
    assert Image.MAX_IMAGE_PIXELS == 100


def gradient(image):
    return gradient_of(image, image.size)


def again(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return Image.open(io.BytesIO(buffer.getvalue()))


@pytest.mark.parametrize("number", range(5))
def test_a_gradient_stays_when_an_image_is_made_anew(number):
    image = picture(number, (640, 480))
    for copy in (
        again(image, quality=30),
        image.resize((320, 240), Image.Resampling.LANCZOS),
        image.resize((900, 675), Image.Resampling.BICUBIC),
        image.point(lambda value: 20 + 0.9 * value),
        image.convert("L"),
    ):
        assert gradient(image) @ gradient(copy) > NEAR
    assert gradient(image) @ gradient(picture(number + 1, (640, 480))) < 0.9


def test_a_fraction_of_the_size_gives_the_same_gradient():
    """JPEGs are decoded at a fraction, which 300 px is no whole number of."""
    image = picture(3, (300, 300))
    whole, part = again(image, quality=95), again(image, quality=95)
    part.draft("RGB", (64, 64))
    assert part.size != whole.size
    assert gradient_of(part, (300, 300)) @ gradient(whole) > 0.995


def test_plain_images_are_near_to_nothing():
    plain = Image.new("RGB", (64, 64), (200, 200, 200))
    noise = np.random.default_rng(0).integers(199, 202, (64, 64, 3), dtype=np.uint8)
    assert not gradient(plain).any()
    assert not gradient(Image.fromarray(noise)).any()


CAR, TREE = ("car", 0.1, 0.1, 0.3, 0.3), ("tree", 0.6, 0.6, 0.9, 0.9)
MOVED = ("car", 0.2, 0.1, 0.4, 0.3)  # by half its width: IoU 1/3
SHIFTED = ("car", 0.11, 0.1, 0.31, 0.3)


@pytest.mark.parametrize(
    ("boxes", "others", "dataset", "kind"),
    [
        ([CAR], [CAR], "street", "leak-near"),
        ([CAR], [SHIFTED], "street", "leak-near"),
        ([CAR], [MOVED], "street", "fixed-camera"),
        ([CAR], [("bus", *CAR[1:])], "street", "fixed-camera"),
        ([CAR], [CAR, TREE], "street", "fixed-camera"),
        ([CAR, TREE], [CAR, TREE, MOVED], "street", "leak-near"),
        ([CAR], [], "street", "fixed-camera"),
        ([], [], "street", "fixed-camera"),
        ([CAR], [TREE], "park", "leak-near"),
    ],
)
def test_images_that_look_alike_are_leaks_if_their_boxes_agree(
    tmp_path, boxes, others, dataset, kind
):
    first = record_of(tmp_path / "a.jpg", SIZE, boxes=tuple(boxes))
    other = record_of(tmp_path / "b.jpg", SIZE, boxes=tuple(others))
    other = other._replace(location=Location(dataset, "val.json", "val"))
    looks = [
        ImageInfo(None, digest=digest, gradient=np.eye(9)[0]) for digest in (b"a", b"b")
    ]
    [found] = images.find_leaks([other, first], looks)
    assert (found.kind, found.dataset) == (kind, dataset)


@pytest.mark.parametrize("size", [0, 1, 511, 512, 1300])
def test_near_pairs_are_those_of_all_pairs(size):
    rng = np.random.default_rng(size)
    rows = rng.standard_normal((size, 40)).astype(np.float32)
    if size > 600:
        rows[600], rows[1200], rows[7] = rows[3], rows[5], rows[8]
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    expected = {(i, j) for i, j in np.argwhere(rows @ rows.T >= NEAR).tolist() if i < j}
    assert {tuple(pair) for pair in near_duplicates(rows).tolist()} == expected
    assert size < 600 or {(3, 600), (5, 1200), (7, 8)} <= expected


def test_planted_near_duplicates_are_all_found():
    """Pairs that are just near enough, and just not, in one block and across blocks."""
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((3000, 60)).astype(np.float32)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)

    def plant(first, other, cosine):
        across = rows[other] - rows[other] @ rows[first] * rows[first]
        across /= np.linalg.norm(across)
        rows[other] = cosine * rows[first] + np.sqrt(1 - cosine**2) * across

    near = sorted((int(i), int(i) + 1) for i in rng.choice(600, 150, False) * 2)
    near += [(1300, 2900), (1301, 1302), (1303, 1303 + images.BLOCK)]
    for first, other in near:
        plant(first, other, NEAR + 1e-4)
    plant(2000, 2001, NEAR - 1e-4)
    rows[2002] = rows[2003] = 0
    assert near_duplicates(rows).tolist() == [[*pair] for pair in near]


def test_too_many_images_are_compared_with_those_of_evaluation_alone(monkeypatch):
    monkeypatch.setattr(images, "MAX_COMPARED", 600)
    rows = np.eye(700, dtype=np.float32)
    rows[1], rows[650], rows[690] = rows[0], rows[0], rows[680]
    pairs = [[0, 650], [1, 650], [680, 690]]
    assert near_duplicates(rows, num_train=640).tolist() == pairs
    assert near_duplicates(rows[:600], num_train=590).tolist() == [[0, 1]]
