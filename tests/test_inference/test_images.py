"""Which images a command line names, and which of them are whole."""

import pytest
from PIL import Image

from damex.errors import DataError
from damex.inference.images import fault_of, find_images, frames_of, names_of


def test_files_folders_and_patterns_stand_for_images_once(photos):
    (photos / "notes.txt").write_text("no image")
    words = [str(photos / "b.jpg"), str(photos), str(photos / "*.png")]
    found = find_images(words)
    names = ["b.jpg", "a.png", "deep/a.png"]
    assert [path.relative_to(photos).as_posix() for path in found] == names


def test_a_pattern_may_go_into_folders(photos):
    found = find_images([str(photos / "**" / "a.png")])
    assert [path.parent.name for path in found] == ["photos", "deep"]


def test_a_file_that_is_named_is_taken_whatever_its_name(photos):
    odd = photos / "picture.data"
    (photos / "a.png").rename(odd)
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


def test_a_file_that_was_cut_off_has_a_fault(photos):
    path = photos / "b.jpg"
    assert fault_of(path) is None
    path.write_bytes(path.read_bytes()[:-200])
    assert "cannot be decoded to its end" in fault_of(path)
    path.unlink()
    assert fault_of(path) == "does not exist"


def test_a_large_file_is_looked_at_as_well(photos, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)  # what Pillow takes for large
    test_a_file_that_was_cut_off_has_a_fault(photos)


def test_what_pillow_does_not_know_is_left_to_others(photos):
    path = photos / "text.png"
    path.write_text("not an image")
    assert fault_of(path) is None
    with pytest.raises(OSError, match="cannot identify"):
        Image.open(path)


def test_videos_are_found_where_they_are_wanted(photos, clip):
    folder = [str(clip.parent)]
    assert clip not in find_images(folder)
    assert clip in find_images(folder, videos=True)
    assert find_images([str(clip)]) == [clip]


def test_frames_come_in_order(clip):
    frames = [*frames_of(clip)]
    assert [frame.number for frame in frames] == [0, 1, 2, 3, 4]
    means = [frame.pixels.mean() for frame in frames]
    assert means == pytest.approx([20, 60, 100, 140, 180], abs=4)


def test_a_file_that_is_no_video_is_named(tmp_path):
    path = tmp_path / "clip.mp4"
    with pytest.raises(DataError, match=r"clip\.mp4 does not exist"):
        next(frames_of(path))
    path.write_text("no video")
    with pytest.raises(DataError, match=r"clip\.mp4 is no video that OpenCV can read"):
        next(frames_of(path))
