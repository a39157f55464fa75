"""Files are written whole or not at all, and a fault is one line."""

import os
import stat
from pathlib import Path

import pytest
import torch

from damex.errors import ConfigError, DataError
from damex.files import atomic_folder, atomic_write, decode, write_text

# Opening this file succeeds, and each write to it fails as on a full disk.
FULL = Path("/dev/full")


def save_to_a_full_disk(part):
    with FULL.open("wb") as file:
        torch.save(dict(weight=torch.zeros(1000)), file)


def fill_the_disk(part):
    part.write_text("half")
    with FULL.open("w") as file:
        file.write("the rest")


def stop(part):
    part.write_text("half")
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("write", "error", "text"),
    [
        (save_to_a_full_disk, ConfigError, r"old\.pth was not written \(No space left"),
        (fill_the_disk, ConfigError, r"old\.pth was not written \(No space left"),
        (stop, KeyboardInterrupt, "^$"),
        (lambda part: torch.ones(2) @ torch.ones(3), RuntimeError, "size"),
    ],
)
def test_a_write_that_fails_leaves_the_earlier_file(tmp_path, write, error, text):
    path = tmp_path / "old.pth"
    path.write_text("earlier")
    with pytest.raises(error, match=text) as caught, atomic_write(path) as part:
        write(part)
    assert "\n" not in str(caught.value) or error is RuntimeError
    assert [*tmp_path.iterdir()] == [path]
    assert path.read_text() == "earlier"


def test_a_file_appears_whole_in_a_new_folder(tmp_path):
    path = tmp_path / "new" / "deep" / "a.json"
    with atomic_write(path) as part:
        part.write_text("half")
        assert not path.exists()
        assert part.parent == path.parent
        assert part.match(".part-*.json")  # damex removes it after a kill
    assert path.read_text() == "half"
    assert [*path.parent.iterdir()] == [path]
    assert path.stat().st_mode & 0o077 == 0o666 & ~_umask() & 0o077


def fill(folder, name, error=None):
    with atomic_folder(Path(folder)) as draft:
        (draft / name).write_text("1")
        assert not Path(folder, name).exists()
        if error is not None:
            raise error


@pytest.mark.parametrize("error", [OSError(28, "No space left"), KeyboardInterrupt()])
def test_a_folder_that_fails_leaves_nothing(tmp_path, error):
    kind = ConfigError if isinstance(error, OSError) else KeyboardInterrupt
    with pytest.raises(kind):
        fill(tmp_path / "new", "half", error)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_a_folder_is_made_from_is_named(tmp_path):
    missing = FileNotFoundError(2, "No such file or directory", str(tmp_path / "a.jpg"))
    with pytest.raises(FileNotFoundError, match=r"a\.jpg"):
        fill(tmp_path / "new", "half", missing)


def test_a_folder_appears_whole_and_replaces_no_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    fill("made/deep", "one")
    fill("empty", "one")
    with pytest.raises(ConfigError, match="empty was not written"):
        fill("empty", "two")
    files = sorted(str(file) for file in Path().rglob("*"))
    assert files == ["empty", "empty/one", "made", "made/deep", "made/deep/one"]


def _umask():
    umask = os.umask(0)
    os.umask(umask)
    return umask


def test_a_link_is_followed_and_a_device_is_not_replaced(tmp_path):
    target, link = tmp_path / "target.txt", tmp_path / "link.txt"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_text(pipe, "new")
    assert os.read(reader, 9) == b"new"
    os.close(reader)
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("file/a.txt", "file cannot be written to"),
        ("folder", "folder is a folder; name a file"),
        ("/proc/x/a.txt", "/proc/x cannot be written to"),
    ],
)
def test_a_place_without_files_is_named(tmp_path, name, text):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=text):
        write_text(tmp_path / name, "")


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"caf\xc3\xa9\r\nb\rc\n", "café\nb\nc\n"),
        (b"", ""),
        ("\ufeffé".encode(), "é"),
        ("猫\n狗\n".encode("utf-16-le"), "猫\n狗\n"),  # no ASCII but the ends of lines
        ("a猫\n".encode("utf-16-be"), "a猫\n"),
    ],
)
def test_decode(raw, text):
    assert decode(raw, "a.txt") == text


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"a\nth\xe9,1", r"a\.txt:2: the bytes e9 2c 31 are not UTF-8 text; save"),
        (b"\xff\xfea", r"a\.txt:1: the bytes 61 are not UTF-16 text"),
        (b"cat\ndog and fox\0", r"a\.txt:2: a zero byte is not text"),
    ],
)
def test_what_is_not_text(raw, fault):
    with pytest.raises(DataError, match=fault):
        decode(raw, "a.txt")


def test_the_content_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    done = []
    replace, fsync = Path.replace, os.fsync
    monkeypatch.setattr(
        Path, "replace", lambda *paths: (done.append("name"), replace(*paths))
    )

    def sync(descriptor):
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        done.append("folder" if is_folder else "content")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    write_text(tmp_path / "a.txt", "x")
    assert done == ["content", "name", "folder"]
