"""EXIF rotation: boxes must lie where the pixels are, as a training loads them."""

import numpy as np
import pytest
from PIL import Image

from damex.datasets.image_files import turn_box
from damex.datasets.mixture import MixtureDataset
from damex.datasets.pixels import read_header
from damex.errors import DataError
from tests.test_datasets.test_mixture import PIPELINE

SIZE = (48, 32)
STORED_BOX = (6, 4, 30, 12)
TURNED = "images with EXIF rotation: boxes turned with them"
AS_SHOWN = (
    "images with EXIF rotation: boxes taken for the image as it is shown, and not as "
    "it is stored"
)


def paint(path, orientation, kind=None):
    """A red rectangle at STORED_BOX of the stored pixels, on black."""
    pixels = np.zeros((SIZE[1], SIZE[0], 3), np.uint8)
    x1, y1, x2, y2 = STORED_BOX
    pixels[y1:y2, x1:x2, 0] = 255
    exif = Image.Exif()
    exif[0x0112] = orientation
    # Without subsampling of colours, the rectangle of a JPEG keeps its border.
    options = dict(quality=100, subsampling=0) if kind in (None, "JPEG") else {}
    Image.fromarray(pixels).save(path, kind, exif=exif, **options)


def red_box(inputs):
    """The box around what is red in an image tensor (BGR, C H W)."""
    ys, xs = np.nonzero(inputs[2].numpy() > 128)
    return [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]


def load(root, **entry):
    """The only sample that is loaded for training of a folder."""
    entry = dict(name="a", root=str(root), val_share=0.0, **entry)
    dataset = MixtureDataset(datasets=[entry], pipeline=PIPELINE)
    assert len(dataset) == 1
    return dataset[0]


def csv_row(box, size=None):
    header, row = "filename,class,xmin,ymin,xmax,ymax", ["a.jpg", "x", *box]
    if size is not None:
        header, row = f"{header},width,height", [*row, *size]
    return f"{header}\n{','.join(map(str, row))}\n"


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_header_is_the_image_as_loaded(tmp_path, orientation, kind):
    path = tmp_path / "a.jpg"
    paint(path, orientation, kind)
    (tmp_path / "x.csv").write_text(csv_row((0, 0, 9, 9)))
    sample = load(tmp_path)
    header = read_header(path)
    assert header.shown == tuple(sample["inputs"].shape[:0:-1])
    if kind != "WEBP":
        turned = [round(v) for v in turn_box(STORED_BOX, header)]
        assert red_box(sample["inputs"]) == turned


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("written_for", ["stored", "shown", "fractions"])
def test_boxes_lie_on_the_pixels(tmp_path, read, written_for, orientation):
    paint(tmp_path / "a.jpg", orientation)
    header = read_header(tmp_path / "a.jpg")
    box, noted = turn_box(STORED_BOX, header), {AS_SHOWN: 1}
    if written_for == "fractions":  # of the image as shown
        (x1, y1, x2, y2), (w, h) = box, header.shown
        shares = [(x1 + x2) / 2 / w, (y1 + y2) / 2 / h, (x2 - x1) / w, (y2 - y1) / h]
        (tmp_path / "a.txt").write_text(f"0 {' '.join(map(str, shares))}")
        (tmp_path / "classes.txt").write_text("x")
    elif written_for == "shown" or orientation < 5:
        (tmp_path / "x.csv").write_text(csv_row(box, header.shown))
    else:
        (tmp_path / "x.csv").write_text(csv_row(STORED_BOX, SIZE))
        noted = {TURNED: 1}
    sample = load(tmp_path)
    (found,) = sample["data_samples"].gt_instances.bboxes.numpy()
    np.testing.assert_allclose(red_box(sample["inputs"]), found, atol=1e-4)
    counts = read(tmp_path, val_share=0.0).noted
    assert counts == ({} if orientation == 1 else noted)


def test_without_a_stated_size_boxes_that_only_fit_the_stored_pixels_are_turned(
    tmp_path, read
):
    paint(tmp_path / "a.jpg", 6)  # shown as 32 x 48
    (tmp_path / "x.csv").write_text(csv_row((6, 4, 40, 12)))
    found = read(tmp_path, val_share=0.0)
    # Turned clockwise: x = 32 - y, y = x.
    assert found.boxes() == {"a.jpg": [("x", (20, 6, 28, 40))]}
    assert found.noted == {TURNED: 1}


@pytest.mark.parametrize(
    ("boxes", "kept"),
    [
        # In images of 48 x 32 px, shown as 32 x 48; the third fits both.
        ([(6, 4, 20, 40), (6, 4, 20, 41), (6, 4, 10, 12)], True),
        ([(6, 4, 40, 12), (6, 4, 41, 12), (6, 4, 10, 12)], False),
        # One reaches over the border of the stored image.
        ([(6, 4, 40, 12), (6, 4, 41, 12), (6, 4, 20, 36)], False),
        ([(6, 4, 20, 40), (6, 4, 41, 12), (6, 4, 10, 12)], False),  # undecided
    ],
)
def test_boxes_decide_if_sizes_are_of_stored_images(tmp_path, read, boxes, kept):
    text = ""
    for name, box in zip("abc", boxes, strict=True):
        paint(tmp_path / f"{name}.jpg", 6)
        text += csv_row(box, SIZE).replace("a.jpg", f"{name}.jpg")
    header = text.splitlines()[0]
    (tmp_path / "x.csv").write_text(f"{header}\n" + text.replace(f"{header}\n", ""))
    found = read(tmp_path, val_share=0.0)
    # Turned clockwise: x = 32 - y, y = x.
    turned = [(32 - y2, x1, 32 - y1, x2) for x1, y1, x2, y2 in boxes]
    shown = [box for [(_, box)] in found.boxes().values()]
    assert shown == (boxes if kept else turned)
    assert (TURNED in found.noted) is not kept
    is_clear = kept or all(y2 <= 32 for _, _, _, y2 in boxes)
    assert any("WARNING" in what for what in found.noted) is not is_clear


def test_neither_size_fits(tmp_path, read):
    paint(tmp_path / "a.jpg", 6)
    (tmp_path / "x.csv").write_text(csv_row(STORED_BOX, (96, 64)))
    with pytest.raises(
        DataError, match=r"no box is left. Left out: 1 images of another"
    ):
        read(tmp_path)


def test_aerial_image_above_pillows_limit(tmp_path, read, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    Image.new("L", SIZE).save(tmp_path / "a.jpg")
    (tmp_path / "x.csv").write_text(csv_row(STORED_BOX))
    assert read(tmp_path).boxes() == {"a.jpg": [("x", STORED_BOX)]}
    assert Image.MAX_IMAGE_PIXELS == 100


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "L", "CMYK", "I;16"])
def test_any_kind_of_pixels_named_jpg_loads(tmp_path, mode):
    kind = "JPEG" if mode == "CMYK" else "PNG"
    Image.new(mode, SIZE).save(tmp_path / "a.jpg", kind)
    (tmp_path / "x.csv").write_text(csv_row(STORED_BOX, SIZE))
    assert load(tmp_path)["inputs"].shape == (3, 32, 48)
