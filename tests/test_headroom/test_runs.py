"""Runs in subprocesses: skipped, resumed, started and stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from mmengine.device import utils
from rich.console import Console

from damex.config_files import read_config
from damex.errors import ConfigError
from damex.workbench.headroom import runs
from damex.workbench.headroom.runs import (
    Run,
    finish,
    fit_to_job,
    run_all,
    training_run,
    write_config,
)


def test_a_run_without_its_evaluation_or_with_a_truncated_summary_has_not_finished(
    tmp_path,
):
    summary = dict(datasets={}, command="train.py config.py --cfg-options a=1")
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    scored = Run("config.py", tmp_path, ("a=1",), is_scored=True)
    assert scored.summary() is None
    assert Run("config.py", tmp_path, ("a=1",)).summary() == summary
    (tmp_path / "summary.json").write_text('{"command": "damex tr')
    assert Run("config.py", tmp_path).summary() is None
    for content in ([], dict(datasets={}), dict(command="damex")):
        (tmp_path / "summary.json").write_text(json.dumps(content))
        with pytest.raises(ConfigError, match=r"summary\.json is not a summary"):
            Run("config.py", tmp_path).summary()


def test_an_evaluation_of_another_checkpoint_is_refused(tmp_path):
    command = f"/x/damex/__main__.py test config.py one.pth --work-dir {tmp_path}"
    summary = dict(datasets={"a": {}}, command=command)
    (tmp_path / "test_summary.json").write_text(json.dumps(summary))
    same = Run("config.py", tmp_path, command="test", inputs=("one.pth",))
    assert same.summary() == summary
    other = Run("config.py", tmp_path, command="test", inputs=("two.pth",))
    with pytest.raises(ConfigError, match="belongs to a run with other settings"):
        other.summary()


@pytest.mark.parametrize("run", ["seed0", "timed0"])
def test_a_config_is_written_once_and_not_mixed_with_another(tmp_path, config, run):
    folder = tmp_path / "dense"
    cfg = read_config(str(config))
    path = write_config(cfg, folder)
    assert path == folder / "config.py"
    assert read_config(str(path)).to_dict() == cfg.to_dict()
    before = path.stat().st_mtime_ns
    write_config(cfg, folder)
    assert path.stat().st_mtime_ns == before
    cfg.train_cfg.max_epochs = 5
    write_config(cfg, folder)  # nothing has run yet
    assert read_config(str(path)).train_cfg.max_epochs == 5
    (folder / run).mkdir()
    cfg.train_cfg.max_epochs = 6
    with pytest.raises(ConfigError, match="differs in train_cfg; name another"):
        write_config(cfg, folder)
    path.unlink()
    with pytest.raises(ConfigError, match=r"has runs, and no config\.py"):
        write_config(cfg, folder)


@pytest.fixture
def started(monkeypatch):
    """The arguments of what was started instead of starting it."""
    found = []
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **options: found.append(command[3:])
    )
    return found


def test_a_training_resumes_and_a_timed_run_does_not(tmp_path, started):
    run = training_run(tmp_path / "config.py", seed=4)
    run.start(threads=1)
    (run.folder / "last_checkpoint").touch()
    run.start(threads=1)
    config, folder = str(tmp_path / "config.py"), str(tmp_path / "seed4")
    options = ["--work-dir", folder, "--cfg-options", "randomness.seed=4"]
    Run("config.py", run.folder).start(threads=1)
    assert started == [
        ["train", config, *options],
        ["train", config, "--resume", *options],
        ["train", "config.py", "--work-dir", folder],
    ]


@dataclass(frozen=True)
class Sleeper:
    """Stands in for a Run: sleeps, and its status is the number of threads."""

    seconds: float

    def start(self, *, threads):
        code = f"import time; time.sleep({self.seconds}); raise SystemExit({threads})"
        return subprocess.Popen([sys.executable, "-c", code])


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ends_come_in_their_order_with_their_status():
    slow, fast = Sleeper(1.5), Sleeper(0.0)
    assert list(run_all([slow, fast], jobs=2, threads=7)) == [(fast, 7), (slow, 7)]
    before = signal.getsignal(signal.SIGTERM)
    assert list(run_all([slow, fast], jobs=1, threads=7)) == [(slow, 7), (fast, 7)]
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_time_that_is_left_is_that_of_the_images(tmp_path, monkeypatch, capsys):
    sizes = dict(dense=800, single=100, other=100)
    every = [
        training_run(tmp_path / k / "config.py", 1, images=n) for k, n in sizes.items()
    ]
    for run in every:
        run.folder.mkdir(parents=True)
        run.log.write_text("ended")
    clock = iter([0.0, 4800.0, 5400.0, 6000.0])
    time_of = SimpleNamespace(monotonic=lambda: next(clock))
    monkeypatch.setattr(runs, "time", time_of)
    monkeypatch.setattr(runs, "run_all", lambda some, **_: ((run, 1) for run in some))
    assert finish(every, Console(), jobs=1) == every
    said = capsys.readouterr().out.splitlines()[1:]
    assert [line.rpartition("; ")[2] for line in said] == [
        "20 min left",
        "10 min left",
        "0 min left",
    ]


def test_a_job_on_a_gpu_is_another_training_than_one_on_the_cpu(
    tmp_path, config, monkeypatch
):
    cfg = read_config(str(config))  # batches of two images, of eight in the base
    before = cfg.to_dict()
    assert fit_to_job(cfg, amp=False) == ""
    assert cfg.to_dict() == before
    with pytest.raises(ConfigError, match="--amp needs a GPU"):
        fit_to_job(cfg, amp=True)
    write_config(cfg, tmp_path / "dense")
    (tmp_path / "dense/seed0").mkdir()

    monkeypatch.setattr(utils, "DEVICE", "cuda")
    note = fit_to_job(cfg, amp=True)
    assert note == "learning rate x 0.25 (batches of 2, not 8)"
    assert cfg.optim_wrapper.type == "AmpOptimWrapper"
    with pytest.raises(ConfigError, match="differs in auto_scale_lr, optim_wrapper;"):
        write_config(cfg, tmp_path / "dense")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_training_outlives_the_command(number):
    script = """if True:
        import signal, subprocess, sys
        from damex.workbench.headroom.runs import run_all

        # Where tests run in a shell's background, Ctrl-C is ignored from the start.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        class Announced:
            def start(self, *, threads):
                process = subprocess.Popen(["sleep", "60"])
                print(process.pid, flush=True)
                return process

        list(run_all([Announced(), Announced()], jobs=2, threads=1))
    """
    command = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    )
    children = [int(command.stdout.readline()) for _ in range(2)]
    time.sleep(0.2)  # into the pool's waiting
    assert all(is_alive(child) for child in children)
    command.send_signal(number)
    assert command.wait(timeout=20) != 0
    assert not any(is_alive(child) for child in children)
