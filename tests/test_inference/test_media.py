"""Which images a command line names, and which of them are whole."""

import shutil
from contextlib import nullcontext

import cv2
import numpy as np
import pytest
from PIL import Image, ImageFile

from damex.errors import DataError
from damex.inference import media
from damex.inference.media import frames_of, problem_of
from damex.workbench.cli.predict import find_images, names_of


def test_files_folders_and_patterns_are_images_once(photos, monkeypatch):
    (photos / "notes.txt").write_text("no image")
    words = [str(photos / "b.jpg"), str(photos), str(photos / "*.png")]
    found = find_images(words)
    names = ["b.jpg", "a.png", "deep/a.png"]
    assert [path.relative_to(photos).as_posix() for path in found] == names
    found = find_images([str(photos / "**" / "a.png")])
    assert [path.parent.name for path in found] == ["photos", "deep"]
    monkeypatch.setenv("HOME", str(photos))
    assert find_images(["~/deep"]) == [photos / "deep" / "a.png"]
    odd = (photos / "a.png").rename(photos / "picture.data")
    assert find_images([str(odd)]) == [odd]


@pytest.mark.parametrize(
    ("word", "text"),
    [("none.jpg", "no file or folder .*none.jpg"), ("empty", "no image in the folder")],
)
def test_a_word_that_stands_for_nothing_is_an_error(tmp_path, word, text):
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=text):
        find_images([str(tmp_path / word)])


def test_images_of_one_name_are_told_apart_by_their_folders(photos):
    paths = find_images([str(photos)])
    assert names_of(paths) == ["a.png", "b.jpg", "deep/a.png"]
    assert names_of([paths[2]]) == ["a.png"]
    assert names_of([]) == []


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["../photos", "more"], ["photos/a.png", "work/more/a.png"]),
        (["../photos/../photos/a.png"], ["a.png"]),
        (
            ["{root}/photos", "more/../../work/more"],
            ["photos/a.png", "work/more/a.png"],
        ),
        (["more", "./more", "../work/more", "{root}/work/more/a.png"], ["a.png"]),
        (["link", "more"], ["link/a.png", "more/a.png"]),
        (["link/../photos", "more"], ["photos/a.png", "work/more/a.png"]),
        (["more", "{root}/\udcff.png"], ["work/more/a.png", "\\xff.png"]),
    ],
)
def test_names_stay_below_any_folder(tmp_path, monkeypatch, words, names):
    for folder in ("photos", "work/more"):
        (tmp_path / folder).mkdir(parents=True)
        Image.new("RGB", (2, 2)).save(tmp_path / folder / "a.png")
    shutil.copy(tmp_path / "photos/a.png", tmp_path / "\udcff.png")
    (tmp_path / "work/link").symlink_to(tmp_path / "photos")
    monkeypatch.chdir(tmp_path / "work")
    paths = find_images([word.format(root=tmp_path) for word in words])
    assert names_of(paths) == names


def test_images_in_a_folder_are_known_by_suffix_or_content(tmp_path):
    image = Image.new("RGB", (2, 2))
    for name in ("a.gif", "b.avif", "c.JPG", "plain"):
        image.save(tmp_path / name, format="PNG" if name == "plain" else None)
    for name in ("phone.heic", "README", "empty", "notes.txt", "plain.bak"):
        (tmp_path / name).write_text("" if name == "empty" else "text")
    names = ["a.gif", "b.avif", "c.JPG", "phone.heic", "plain"]
    assert [path.name for path in find_images([str(tmp_path)])] == names


def test_folders_are_searched_through_links_and_without_hidden_files(tmp_path):
    (tmp_path / "in/.ipynb_checkpoints").mkdir(parents=True)
    (tmp_path / "camera").mkdir()
    for name in ("in/a.PNG", "in/.ipynb_checkpoints/a.png", "camera/b.png"):
        Image.new("RGB", (3, 2)).save(tmp_path / name)
    (tmp_path / "in/._a.png").write_bytes(b"\0\5\26\7")
    (tmp_path / "in/.DS_Store").write_bytes(b"\0")
    (tmp_path / "in/camera").symlink_to(tmp_path / "camera")
    (tmp_path / "camera/loop").symlink_to(tmp_path / "in")
    (tmp_path / "in/broken.png").symlink_to(tmp_path / "none.png")
    found = [path.relative_to(tmp_path) for path in find_images([f"{tmp_path}/in"])]
    assert [*map(str, found)] == ["in/a.PNG", "in/camera/b.png"]
    pattern = find_images([f"{tmp_path}/in/**/*.png"])
    assert [path.name for path in pattern] == ["b.png"]
    hidden = tmp_path / "in/.ipynb_checkpoints/a.png"
    assert find_images([str(hidden)]) == [hidden]


@pytest.mark.parametrize(
    "word", ["0", "rtsp://192.0.2.1/s", "https://a.invalid/b.jpg", "/dev/video77"]
)
def test_cameras_streams_and_addresses_are_not_read(word):
    with pytest.raises(DataError, match=rf"{word} is not a file: .* pass the frames"):
        find_images([word])


def test_a_folder_named_by_a_number_is_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "0").mkdir()
    with pytest.raises(DataError, match="no image in the folder 0"):
        find_images(["0"])
    Image.new("RGB", (3, 2)).save("0/a.png")
    assert [path.name for path in find_images(["0"])] == ["a.png"]


def test_a_file_that_was_cut_off_has_a_problem(photos):
    path = photos / "b.jpg"
    assert problem_of(path) is None
    path.write_bytes(path.read_bytes()[:-200])
    assert "cannot be decoded to its end" in problem_of(path)
    path.unlink()
    assert problem_of(path) == "does not exist"


def test_a_file_that_would_fill_the_memory_is_not_opened(photos, monkeypatch):
    bomb = photos / "bomb"
    Image.new("1", (500, 200)).save(bomb, "PNG")
    assert problem_of(bomb) is None
    monkeypatch.setattr(
        Image, "MAX_IMAGE_PIXELS", 40_000
    )  # an error from twice as many
    assert problem_of(photos / "a.png") is None
    assert bomb in find_images([str(photos)])
    monkeypatch.setattr(ImageFile.ImageFile, "load", None)
    assert "too large (Image size (100000 pixels)" in problem_of(bomb)
    assert Image.MAX_IMAGE_PIXELS == 40_000


def test_what_pillow_does_not_know_is_left_to_others(photos):
    path = photos / "text.png"
    path.write_text("not an image")
    assert problem_of(path) is None


def test_videos_are_found_where_they_are_wanted(photos, clip):
    folder = [str(clip.parent)]
    assert clip not in find_images(folder)
    assert clip in find_images(folder, videos=True)
    assert find_images([str(clip)]) == [clip]


def test_frames_come_in_order(clip):
    means = [frame.mean() for frame in frames_of(clip)]
    assert means == pytest.approx([20, 60, 100, 140, 180], abs=4)


def test_a_file_that_is_no_video_is_named(tmp_path):
    path = tmp_path / "clip.mp4"
    with pytest.raises(DataError, match=r"clip\.mp4 does not exist"):
        next(frames_of(path))
    path.write_text("no video")
    with pytest.raises(DataError, match=r"clip\.mp4 is not a video"):
        next(frames_of(path))
    path = path.rename(tmp_path / "\udcff.mp4")  # OpenCV would crash
    with pytest.raises(DataError, match="not UTF-8"):
        next(frames_of(path))


@pytest.mark.parametrize("suffix", [".avi", ".mkv"])
def test_a_video_that_breaks_off_is_named_after_its_frames(tmp_path, suffix):
    path = tmp_path / f"clip{suffix}"
    codec = cv2.VideoWriter.fourcc(*"MJPG")
    writer = cv2.VideoWriter(str(path), codec, 25, (128, 96))
    rng = np.random.default_rng(0)
    for _ in range(20):
        writer.write(rng.integers(0, 256, (96, 128, 3), dtype=np.uint8))
    writer.release()
    assert len([*frames_of(path)]) == 20
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    frames, read = frames_of(path), []
    with pytest.raises(DataError, match=r"breaks off: (\d+) of 20 frames") as caught:
        read.extend(frames)
    assert f"off: {len(read)} of" in str(caught.value)
    assert 5 < len(read) < 15


@pytest.mark.parametrize(("stated", "is_whole"), [(-9, True), (6, True), (7, False)])
def test_a_count_may_be_unknown_or_off_by_one(clip, monkeypatch, stated, is_whole):
    monkeypatch.setattr(media, "frame_count", lambda _: stated)
    with nullcontext() if is_whole else pytest.raises(DataError, match="5 of 7 frames"):
        assert len([*frames_of(clip)]) == 5
