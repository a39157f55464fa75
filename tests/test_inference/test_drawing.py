"""Hand-made predictions, drawn into images and videos."""

import cv2
import mmcv
import numpy as np
import pytest
from PIL import Image

from damex.errors import ConfigError
from damex.inference import drawing
from damex.inference.drawing import Drawings, draw_boxes
from damex.inference.media import Inputs

CLASSES = ("car", "dog")


def draw(one, target):
    with Drawings(target.parent, {one.path: target.name}, CLASSES) as drawings:
        drawings.add(one)


def test_boxes_and_names_are_drawn_where_they_are():
    white = np.full((64, 96, 3), 255, np.uint8)
    boxes = [[8, 30, 40, 60], [60, 30, 95, 60]]
    drawn = draw_boxes(white, boxes, ["a\nb", ""], [(200, 0, 0), (0, 0, 200)])
    assert (drawn.shape, drawn.dtype) == (white.shape, np.uint8)
    assert (white == 255).all()
    assert drawn[50, 8].tolist() == [200, 0, 0]
    assert drawn[50, 60].tolist() == [0, 0, 200]
    assert (drawn[33:58, 11:38] == 255).all()
    assert (drawn[20, 9] == [200, 0, 0]).all()  # above the first box
    assert (drawn[:29, 60:] == 255).all()  # no name, nothing above
    assert np.array_equal(draw_boxes(white, np.empty((0, 4)), [], []), white)


def test_an_image_is_drawn_as_the_detector_sees_it(predictor, photos, tmp_path):
    """Turned by its EXIF tag, as Pillow would not read it."""
    turned = Image.Exif()
    turned[0x0112] = 6
    pixels = np.random.default_rng(0).integers(0, 256, (96, 64, 3), dtype=np.uint8)
    source, target = photos / "turned.png", tmp_path / "seen" / "turned.png"
    Image.fromarray(pixels).save(source, exif=turned)
    (one,) = predictor.stream([source], "all", 1.0, keep_images=True)
    draw(one, target)
    seen = Inputs([dict(type="LoadImageFromFile")])(source)["pixels"]
    assert seen.shape == (64, 96, 3)
    assert np.array_equal(cv2.imread(str(target)), seen)


def test_drawings_of_all_files_have_unique_names(tmp_path, clip, make_prediction):
    names = ["a.bmp", "a.bmp.png", "a.png", "a.png.jpg", "b.bmp", "b.bmp.png/a.png"]
    paths = {tmp_path / "in" / name: name for name in names}
    paths |= {clip: "clip.mp4", clip.with_name("clip"): "clip"}
    with Drawings(tmp_path / "seen", paths, CLASSES) as drawings:
        for path in [*paths][:-1]:
            drawings.add(make_prediction(path, frame=0 if path == clip else None))
    seen = [path for path in (tmp_path / "seen").rglob("*") if path.is_file()]
    assert sorted(str(path.relative_to(tmp_path / "seen")) for path in seen) == [
        *("a.bmp.png", "a.bmp.png.png", "a.png", "a.png.jpg"),
        *("b.bmp.png.png", "b.bmp.png/a.png", "clip.mp4"),
    ]


@pytest.mark.parametrize("name", ["../a.png", "link/a.png", "a.png"])
def test_nothing_is_drawn_outside_of_the_folder(tmp_path, make_prediction, name):
    other = tmp_path / "out" / "a.png"
    other.parent.mkdir()
    other.write_text("mine")
    seen = tmp_path / "out" / "seen"
    seen.mkdir()
    (seen / "link").symlink_to(other.parent)
    (seen / "a.png").symlink_to(other)
    source = tmp_path / "source.png"
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
    target = tmp_path / "seen" / f"a{suffix}"
    target.parent.mkdir()
    target.write_text("earlier")
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    one = make_prediction(source, frame=0 if source == clip else None, image=noise)
    with (
        full_disk(500),
        pytest.raises(ConfigError, match=r"seen/a\.\w+ was not written") as caught,
    ):
        draw(one, target)
    assert "\n" not in str(caught.value)
    assert [*target.parent.iterdir()] == [target]
    assert target.read_text() == "earlier"


@pytest.mark.parametrize("frame", [None, 0])
def test_the_source_is_not_replaced(clip, make_prediction, frame):
    before = clip.read_bytes()
    with pytest.raises(ConfigError, match=r"would replace .*clip\.mp4"):
        draw(make_prediction(clip, frame=frame), clip)
    assert clip.read_bytes() == before


def test_frames_are_drawn_into_a_video_of_the_same_kind(
    tmp_path, clip, make_prediction
):
    other = clip.with_name("other.avi")
    other.write_bytes(clip.read_bytes())
    names = {clip: "clip.mp4", other: "deep/other.avi"}
    grays = (20, 60, 140, 180)
    with Drawings(tmp_path / "seen", names, CLASSES) as drawings:
        for path in names:
            for number, gray in enumerate(grays):
                image = np.full((64, 96, 3), gray, np.uint8)
                drawings.add(make_prediction(path, frame=number, image=image))
    for name in ("clip.mp4", "deep/other.avi.mp4"):
        video = mmcv.VideoReader(str(tmp_path / "seen" / name))
        assert (video.resolution, video.fps) == ((96, 64), 12.5)
        frames = np.stack([*video]).astype(float)
        rest = frames[:, 50:, 40:].mean((1, 2, 3))
        assert np.allclose(rest, grays, atol=10)
        side = frames[:, 20:35, 8:10].mean((1, 2))  # the left side of the dog
        assert (abs(side - rest[:, None]).max(1) > 25).all()


def test_a_video_that_cannot_be_written_is_an_error(
    tmp_path, clip, make_prediction, monkeypatch
):
    target = tmp_path / "seen" / "clip.mp4"
    monkeypatch.setattr(drawing, "CODEC", "none")
    with pytest.raises(ConfigError, match=r"cannot write the video .*seen/clip\.mp4"):
        draw(make_prediction(clip, frame=0), target)
    assert not [*target.parent.iterdir()]
