"""Pixels of image files: more than 8 bits, and EXIF in every format."""

import io
import struct
import zlib

import cv2
import numpy as np
import pytest
from mmengine.registry import TRANSFORMS
from PIL import Image, ImageOps, features

from damex.datasets.pixels import decode, read_header, to_8_bits
from damex.registry import MODELS  # noqa: F401 - as in a training

HEIGHT, WIDTH = 32, 48
# Columns of 0 to 47; 5 shares of the 255 gray levels for each.
RAMP = np.tile(np.arange(WIDTH), (HEIGHT, 1))
SHOWN = np.round(RAMP / (WIDTH - 1) * 255).astype(np.uint8)


PLAIN = (cv2.IMWRITE_TIFF_COMPRESSION, 1)  # OpenCV rounds floats of three channels


def encoded(suffix, array, *options):
    return cv2.imencode(suffix, array, options)[1].tobytes()


def by_pillow(array, **options):
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, "TIFF", **options)
    return buffer.getvalue()


def gray(values, kind=np.uint16):
    return np.asarray(values).astype(kind)


def color(values):
    return np.dstack([values] * 3).astype(np.uint16)


# A narrow band of 14 bits, as of a thermal camera, all of 10 and of 16 bits, and maps.
DEEP = {
    "14 bits, png": encoded(".png", gray(7000 + 3 * RAMP)),
    "10 bits, png, rgb": encoded(".png", color(21 * RAMP)),
    "16 bits, tif": encoded(".tif", gray(1394 * RAMP)),
    "16 bits, tif, rgb": encoded(".tif", color(1394 * RAMP)),
    "12 bits, tif, compressed": by_pillow(gray(80 * RAMP), compression="tiff_lzw"),
    "12 bits, pgm": encoded(".pgm", gray(80 * RAMP)),
    "signed 16 bits, tif": encoded(".tif", gray(RAMP - 20, np.int16)),
    "int32, tif": by_pillow(gray(100_000 + 1000 * RAMP, np.int32)),
    "float32 of 0 to 1, tif": by_pillow(gray(RAMP / 47, np.float32)),
    "float32, tif, rgb": encoded(".tif", np.float32(color(RAMP)) / 47, *PLAIN),
    "float64 in Kelvin, tif": encoded(".tif", gray(290 + RAMP / 100, np.float64)),
}


@pytest.mark.parametrize("case", DEEP)
def test_the_range_that_an_image_holds_is_shown(tmp_path, case):
    path = tmp_path / "a"
    path.write_bytes(DEEP[case])
    load = TRANSFORMS.build(dict(type="LoadImageFromFile"))
    seen = load(dict(img_path=str(path)))
    assert seen["img"].dtype == np.uint8
    # A level is 5.4; rounding moves it by 1 at most.
    difference = np.abs(seen["img"] - SHOWN[..., None].astype(int))
    assert seen["img"].shape == (HEIGHT, WIDTH, 3)
    assert difference.max() <= 1
    assert seen["levels"][0] < seen["levels"][1]


@pytest.mark.parametrize("case", [one for one in DEEP if "float64" not in one])
def test_the_header_tells_depth(case):
    assert read_header(io.BytesIO(DEEP[case])).is_deep


def test_images_of_8_bits_are_as_opencv_loads_them():
    rng = np.random.default_rng(0)
    dark = rng.integers(0, 40, (HEIGHT, WIDTH, 3), dtype=np.uint8)
    for suffix in (".png", ".jpg", ".tif", ".webp", ".bmp"):
        content = encoded(suffix, dark)
        found = decode(content)
        expected = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
        assert np.array_equal(found.image, expected)
        assert found.levels is None
        assert not read_header(io.BytesIO(content)).is_deep


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        # 2000 values: percentiles 0.1 and 99.9 leave one dead pixel out at each end.
        ([0, *[500] * 998, 755, *[1010] * 999, 65535], {0: 0, 999: 128, 1998: 255}),
        ([7] * 2000, {0: 0}),  # plain
        ([*[7] * 1999, 9], {0: 0, 1999: 255}),  # one pixel on a plain ground
        ([np.nan, *[1.0] * 999, *[2.0] * 999, np.inf], {0: 0, 1: 0, 1998: 255}),
        ([np.nan] * 4, {0: 0}),
    ],
)
def test_a_few_pixels_do_not_decide_the_range(values, expected):
    image, _ = to_8_bits(np.array([values]))
    assert {place: int(image[0, place]) for place in expected} == expected


def late_exif(content, exif):
    """A PNG with its EXIF block behind the pixels, as some tools write it."""
    data = b"eXIf" + exif.tobytes().removeprefix(b"Exif\0\0")
    block = struct.pack(">I", len(data) - 4) + data
    return content[:-12] + block + struct.pack(">I", zlib.crc32(data)) + content[-12:]


@pytest.mark.parametrize(
    ("suffix", "kind", "deep"),
    [
        *((".jpg", "JPEG", False), (".png", "PNG", False), (".png", "PNG", True)),
        *((".png", "late PNG", False), (".tif", "TIFF", False), (".tif", "TIFF", True)),
        *((".webp", "WEBP", False), (".avif", "AVIF", False)),
    ],
)
@pytest.mark.parametrize("orientation", range(1, 9))
def test_one_rule_of_rotation_for_all_formats(
    tmp_path, kind, suffix, orientation, deep
):
    """The size of the header, the pixels in training and those of Pillow agree."""
    name = kind.split()[-1]
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = Image.fromarray(gray(RAMP * 80) if deep else SHOWN)
    image.paste(0, (0, 0, 9, 5))  # no symmetry
    path = tmp_path / f"a{suffix}"
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow writes no AVIF")
    if kind == "late PNG":
        image.save(path)
        path.write_bytes(late_exif(path.read_bytes(), exif))
    else:
        image.save(path, name, exif=exif, quality=100)
    if kind == "AVIF" and not cv2.haveImageReader(str(path)):
        pytest.skip("this OpenCV reads no AVIF")
    pixels = np.asarray(image)
    pixels = to_8_bits(pixels)[0] if deep else pixels
    turned = Image.fromarray(pixels)
    turned.getexif()[0x0112] = orientation
    expected = np.asarray(ImageOps.exif_transpose(turned)).astype(int)
    load = TRANSFORMS.build(dict(type="LoadImageFromFile"))
    seen = load(dict(img_path=str(path)))["img"]
    assert seen.shape[1::-1] == read_header(path).shown
    assert np.abs(seen - expected[..., None]).mean() < 3
