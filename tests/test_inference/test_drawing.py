"""Hand-made predictions, drawn into images and videos."""

import dataclasses

import cv2
import mmcv
import numpy as np
import pytest
from PIL import Image

from damex.errors import ConfigError
from damex.inference.drawing import Drawings
from damex.inference.images import Inputs

CLASSES = ("car", "dog")


def draw(one, target):
    with Drawings(target.parent, {one.path: target.name}, CLASSES) as drawings:
        drawings.add(one)


def test_boxes_are_drawn_where_they_are(tmp_path, make_prediction):
    source = tmp_path / "a.bmp"
    Image.new("RGB", (96, 64), "white").save(source)
    draw(make_prediction(source), tmp_path / "seen" / "a.bmp")
    drawn = np.array(Image.open(tmp_path / "seen" / "a.bmp.png"))
    assert drawn.shape == (64, 96, 3)
    assert (drawn[30, 8] != 255).any()  # the left side of the box
    assert (drawn[30, 50] == 255).all()


def make_image(path, kind):
    """An image of a kind whose pixels Pillow and OpenCV see in other ways."""
    rng = np.random.default_rng(0)
    if kind in ("turned", "upside down", "square"):
        turned = Image.Exif()
        turned[0x0112] = 3 if kind == "upside down" else 6
        shape = dict(turned=(96, 64, 3), square=(64, 64, 3)).get(kind, (64, 96, 3))
        pixels = rng.integers(0, 256, shape, dtype=np.uint8)
        Image.fromarray(pixels).save(path, exif=turned)
    elif kind == "16 bits":
        cv2.imwrite(str(path), rng.integers(0, 2**16, (64, 96), dtype=np.uint16))
    else:
        cv2.imwrite(str(path), rng.random((64, 96, 3), dtype=np.float32))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.png", "turned"),
        ("a.png", "upside down"),
        ("a.png", "square"),
        ("a.png", "16 bits"),
        ("a.tif", "numbers"),
        ("a.hdr", "numbers"),
    ],
)
def test_an_image_is_drawn_as_the_detector_looked_at_it(
    tmp_path, make_prediction, name, kind
):
    source, target = tmp_path / name, tmp_path / "seen" / f"{name}.png"
    make_image(source, kind)
    seen = Inputs([dict(type="LoadImageFromFile")])._read(source)["img"]
    height, width = seen.shape[:2]
    nothing = dict(boxes=np.empty((0, 4)), scores=np.empty(0), names=())
    one = dataclasses.replace(
        make_prediction(source), width=width, height=height, **nothing
    )
    draw(one, target)
    assert np.array_equal(cv2.imread(str(target)), seen)


def test_drawings_of_all_files_have_their_own_places(tmp_path, clip, make_prediction):
    names = ["a.bmp", "a.bmp.png", "a.png", "a.png.jpg", "b.bmp", "b.bmp.png/a.png"]
    paths = {tmp_path / "in" / name: name for name in names}
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (96, 64)).save(path)
    paths |= {clip: "clip.mp4", clip.with_name("clip"): "clip"}
    with Drawings(tmp_path / "seen", paths, CLASSES) as drawings:
        for path in [*paths][:-1]:
            is_video = path == clip
            drawings.add(make_prediction(path, frame=0 if is_video else None))
    seen = [path for path in (tmp_path / "seen").rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(tmp_path / "seen")) for path in seen) == [
        *("a.bmp.png", "a.bmp.png.png", "a.png", "a.png.jpg"),
        *("b.bmp.png.png", "b.bmp.png/a.png", "clip.mp4"),
    ]


@pytest.mark.parametrize("name", ["../a.png", "link/a.png", "a.png"])
def test_nothing_is_drawn_outside_of_the_folder(tmp_path, make_prediction, name):
    source, other = tmp_path / "source.png", tmp_path / "out" / "a.png"
    Image.new("RGB", (96, 64)).save(source)
    other.parent.mkdir()
    other.write_text("mine")
    seen = tmp_path / "out" / "seen"
    seen.mkdir()
    (seen / "link").symlink_to(other.parent)
    (seen / "a.png").symlink_to(other)
    with (
        Drawings(seen, {source: name}, CLASSES) as drawings,
        pytest.raises(ConfigError, match=r"would replace .*out/a\.png"),
    ):
        drawings.add(make_prediction(source))
    assert other.read_text() == "mine"


@pytest.mark.parametrize("suffix", [".png", ".mp4"])
def test_a_drawing_that_does_not_fit_on_the_disk_is_removed(
    tmp_path, clip, make_prediction, full_disk, suffix
):
    source = clip if suffix == ".mp4" else tmp_path / "a.png"
    if source != clip:
        Image.effect_noise((96, 64), 90).save(source)
    target = tmp_path / "seen" / f"a{suffix}"
    target.parent.mkdir()
    target.write_text("earlier")
    one = make_prediction(source, frame=0 if source == clip else None)
    with (
        full_disk(500),
        pytest.raises(ConfigError, match=r"seen/a\.\w+ was not written") as caught,
    ):
        draw(one, target)
    assert "\n" not in str(caught.value)
    assert [*target.parent.iterdir()] == [target]
    assert target.read_text() == "earlier"


def test_the_image_itself_is_not_replaced(tmp_path, make_prediction):
    source = tmp_path / "a.png"
    Image.new("RGB", (96, 64)).save(source)
    with pytest.raises(ConfigError, match=r"would replace .*a\.png"):
        draw(make_prediction(source), source)


def test_the_video_itself_is_not_replaced(clip, make_prediction):
    before = clip.read_bytes()
    with pytest.raises(ConfigError, match=r"would replace .*clip\.mp4"):
        draw(make_prediction(clip, frame=0), clip)
    assert clip.read_bytes() == before


def test_frames_are_drawn_into_a_video_of_the_same_kind(
    tmp_path, clip, make_prediction
):
    other = clip.with_name("other.avi")
    other.write_bytes(clip.read_bytes())
    names = {clip: "clip.mp4", other: "deep/other.avi"}
    with Drawings(tmp_path / "seen", names, CLASSES) as drawings:
        for path in names:
            for number in (0, 1, 3, 4):  # what was not looked at is left out
                drawings.add(make_prediction(path, frame=number))
    for name in ("clip.mp4", "deep/other.avi.mp4"):
        video = mmcv.VideoReader(str(tmp_path / "seen" / name))
        assert (video.resolution, video.fps) == ((96, 64), 12.5)
        frames = np.stack([*video]).astype(float)
        beside = frames[:, 50:, 40:].mean((1, 2, 3))
        assert np.allclose(beside, [20, 60, 140, 180], atol=10)
        side = frames[:, 20:35, 8:10].mean((1, 2))  # the left side of the dog
        assert (abs(side - beside[:, None]).max(1) > 25).all()


def test_a_video_that_cannot_be_written_is_an_error(
    tmp_path, clip, make_prediction, monkeypatch
):
    target = tmp_path / "seen" / "clip.mp4"
    monkeypatch.setattr(mmcv.VideoReader, "resolution", (0, 0))  # no codec takes it
    with pytest.raises(ConfigError, match=r"cannot write the video .*seen/clip\.mp4"):
        draw(make_prediction(clip, frame=0), target)
    assert not [*target.parent.iterdir()]
