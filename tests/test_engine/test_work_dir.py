"""The folder of a run: its lock, its last checkpoint, what is removed and when."""

import errno
import fcntl
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from mmengine.logging import MessageHub

from damex.engine.resumption import CheckpointHook, latest_checkpoint
from damex.engine.work_dir import WorkDir, is_local
from damex.errors import ConfigError, DataError

HOLD = """
import sys
from damex.engine.work_dir import WorkDir
work = WorkDir(sys.argv[1])
work.logs = sys.argv[1] + "/logs"
print(work.lock(), flush=True)
input()
"""


@pytest.fixture
def other_process(tmp_path):
    """A process that holds the lock of a folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "None\n"
    yield process
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_folder_is_for_one_training_until_its_process_ends(other_process, tmp_path):
    work, loser = WorkDir(tmp_path), WorkDir(tmp_path)
    loser.logs = tmp_path / "logs"  # both began in the same second
    loser.logs.mkdir()
    for one in (work, loser):
        assert f"in use: process {other_process.pid} on " in one.lock()
    loser.remove_traces()
    assert (tmp_path / "logs").is_dir()
    other_process.kill()
    other_process.wait()
    left_over = tmp_path / ".part-12345678.pth"
    left_over.touch()
    assert work.lock() is None
    assert not left_over.exists()
    work.unlock()
    assert not (tmp_path / ".lock").exists()


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    assert WorkDir(tmp_path).lock() is None


def test_the_lock_of_another_user_is_no_traceback(tmp_path, monkeypatch):
    work, refused = WorkDir(tmp_path), PermissionError(errno.EACCES, "not yours")
    monkeypatch.setattr(os, "open", Mock(side_effect=refused))  # root may open anything
    assert ".lock cannot be opened: it is of another user" in work.lock()


@pytest.mark.parametrize("path", ["file", "file/below", "/proc/damex"])
def test_a_folder_that_cannot_be_written_to_is_refused(path, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        WorkDir(tmp_path / path)
    assert [*tmp_path.iterdir()] == [tmp_path / "file"]


def test_traces_are_removed_up_to_what_was_there(tmp_path):
    work = WorkDir(tmp_path / "a" / "b")
    work.logs = work.path / "logs"
    (work.logs / "vis_data").mkdir(parents=True)
    assert work.lock() is None
    work.unlock()
    work.remove_traces()
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "theirs").touch()
    WorkDir(tmp_path).remove_traces()
    assert (tmp_path / "theirs").exists()


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ("{original}/epoch_2.pth", "{copy}/epoch_2.pth"),
        ("{original}/epoch_9.pth", "{original}/epoch_9.pth"),
        ("s3://bucket/epoch_9.pth", "s3://bucket/epoch_9.pth"),
        ("", "copy/last_checkpoint is empty; resume with --resume {copy}/epoch_2.pth"),
        ("{original}/gone.pth", "gone.pth, which is missing; resume with --resume"),
    ],
)
def test_a_copied_folder_has_a_last_checkpoint_of_its_own(named, expected, tmp_path):
    original, copy = tmp_path / "original", tmp_path / "copy"
    assert latest_checkpoint(copy) is None
    for path in (
        original / "epoch_9.pth",
        original / "epoch_2.pth",
        copy / "epoch_2.pth",
    ):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    folders = {"original": original, "copy": copy}
    (copy / "last_checkpoint").write_text(named.format(**folders))
    expected = expected.format(**folders)
    if "resume" in expected:
        with pytest.raises(DataError, match=re.escape(expected)):
            latest_checkpoint(copy)
    else:
        assert latest_checkpoint(copy) == expected


class StubRunner:
    """What CheckpointHook needs; it writes empty checkpoints, or fails to."""

    epoch = iter = 0
    _load_from = None

    def __init__(self, folder):
        self.work_dir = str(folder)
        self.message_hub = MessageHub("work_dir")
        self.logger = SimpleNamespace(info=print)
        self.is_full = False

    def save_checkpoint(self, out_dir, filename, *_, **__):
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        Path(out_dir, filename).touch()


def checkpoints(folder):
    return sorted(path.name for path in folder.glob("*.pth"))


def test_an_old_checkpoint_goes_when_the_next_one_is_there(tmp_path):
    runner = StubRunner(tmp_path)
    hook = CheckpointHook(1, max_keep_ckpts=1, save_best="AP", rule="greater")
    hook.before_train(runner)
    for epoch, score in enumerate([0.1, 0.2, 0.2], start=1):
        hook.after_train_epoch(runner)
        runner.epoch = epoch
        hook.after_val_epoch(runner, {"AP": score})
    there = ["best_AP_epoch_2.pth", "epoch_3.pth"]
    assert checkpoints(tmp_path) == there
    assert (tmp_path / "last_checkpoint").read_text() == str(tmp_path / "epoch_3.pth")
    runner.is_full = True
    for write in (
        lambda: hook.after_train_epoch(runner),
        lambda: hook.after_val_epoch(runner, {"AP": 0.3}),
    ):
        with pytest.raises(OSError, match="No space"):
            write()
        assert checkpoints(tmp_path) == there
    assert latest_checkpoint(tmp_path) == str(tmp_path / "epoch_3.pth")


def test_an_unknown_score_to_save_the_best_by_is_refused():
    with pytest.raises(ConfigError, match=r"default_hooks\.checkpoint: .*foo"):
        CheckpointHook(1, save_best="foo")
    with pytest.raises(ConfigError, match="unknown max_keep; did you mean 'max_keep_"):
        CheckpointHook(1, max_keep=2)  # mmengine says so when it saves


@pytest.mark.parametrize("save_best", ["AP", ["AP", "AP50"]])
def test_a_copied_run_leaves_the_original_its_best(save_best, tmp_path):
    folders = original, copy = tmp_path / "original", tmp_path / "copy"
    scores = {"AP": 0.1, "AP50": 0.1}
    for folder in folders:
        folder.mkdir()
        for name in scores:
            (folder / f"best_{name}_epoch_1.pth").touch()
    runner = StubRunner(copy)
    runner.epoch = 2
    for name in reversed(scores):
        best = str(original / f"best_{name}_epoch_1.pth")
        runner.message_hub.update_info(f"best_ckpt_{name}", best)
        runner.message_hub.update_info("best_ckpt", best)
    hook = CheckpointHook(save_best=save_best, rule="greater")
    hook.before_train(runner)
    hook.after_val_epoch(runner, scores)
    assert checkpoints(original) == ["best_AP50_epoch_1.pth", "best_AP_epoch_1.pth"]
    assert "best_AP_epoch_1.pth" not in checkpoints(copy)
    assert "best_AP_epoch_2.pth" in checkpoints(copy)


def test_a_lock_that_was_removed_in_between_locks_nobody_out(tmp_path, monkeypatch):
    """Another run ends, and removes its lock, after this one has opened the file."""
    opened, lockf = [], fcntl.lockf

    def lock_late(file, *flags):
        if not opened:
            (tmp_path / ".lock").unlink()
        opened.append(file)
        return lockf(file, *flags)

    monkeypatch.setattr(fcntl, "lockf", lock_late)
    work = WorkDir(tmp_path)
    assert work.lock() is None
    assert len(opened) == 2
    assert os.path.samestat((tmp_path / ".lock").stat(), os.fstat(work._lock))
    work.unlock()


def test_a_checkpoint_of_a_remote_store_is_not_looked_for_here(tmp_path):
    assert is_local(str(tmp_path))
    assert is_local(str(tmp_path), backend_args=dict(backend="local"))
    for remote in (dict(backend_args=dict(backend="http")), {}):
        folder = str(tmp_path) if remote else "http://host/folder"
        assert not is_local(folder, **remote)
