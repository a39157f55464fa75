"""Processes that are killed: what they wrote resumes, and others stop and say why."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
TRAINING = """
train_cfg = dict(max_epochs=1, val_begin=9)
train_dataloader["sampler"]["samples_per_epoch"] = 80
train_dataloader.update(num_workers=1, persistent_workers=True)
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=4))
custom_hooks = [dict(type="ProgressHook", every_seconds=0)]
model = dict(num_queries=10, dn_cfg=dict(group_cfg=dict(num_dn_queries=10)))
model["test_cfg"] = dict(max_per_img=10)
moe = dict(num_experts=4, expert_parallel=2)
"""
STEPS = 20
TIMEOUT = "env_cfg = dict(dist_cfg=dict(timeout=60))"  # seconds; else half an hour
# torchrun waits half a minute for a process that does not end when it is asked to.
AT_MOST = 240.0

pytestmark = pytest.mark.slow


def start(config, *arguments, errors):
    """``torchrun`` with two processes, and lines of the screen."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    tool = (str(ROOT / "tools" / "train.py"), str(config), "--launcher", "pytorch")
    return subprocess.Popen(
        [sys.executable, *launcher, *tool, *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=errors.open("w"),
        text=True,
    )


def processes_of(config):
    """Ids of the processes with a config on their command line, and their ranks."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it has ended
        if str(config).encode() in command:
            ranks = [v for v in variables if v.startswith(b"RANK=")]
            found[int(folder.name)] = int(ranks[0][5:]) if ranks else None
    return found


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def wait_until(condition, seconds):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.2)
    return condition()


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSTOP"])
def test_the_others_stop_and_resume_goes_on(name, write_config, tmp_path):
    config = write_config(extra=TRAINING + TIMEOUT * (name == "SIGSTOP"))
    errors = tmp_path / "errors.txt"
    launched = start(config, errors=errors)
    assert any("train 6/20" in line for line in launched.stdout), errors.read_text()
    (victim,) = [
        pid
        for pid, rank in processes_of(config).items()
        if rank == 1 and parent(pid) == launched.pid  # and none of its workers
    ]
    os.kill(victim, getattr(signal, name))
    assert launched.wait(timeout=AT_MOST) != 0
    words = errors.read_text()
    assert ("Signal 9 (SIGKILL)" if name == "SIGKILL" else "Timed out") in words
    # No worker is left over, of the victim neither.
    assert wait_until(lambda: not processes_of(config), 30.0), processes_of(config)
    checkpoint = Path((tmp_path / "work" / "last_checkpoint").read_text())
    steps = torch.load(checkpoint, weights_only=False)["meta"]["iter"]
    assert steps in (4, 8, 12, 16)
    if name == "SIGSTOP":
        return
    resumed = start(config, "--resume", errors=errors)
    lines = [line for line in resumed.stdout if " train " in line]
    assert resumed.wait(timeout=AT_MOST) == 0, errors.read_text()
    numbers = [int(line.split("train ")[1].split("/")[0]) for line in lines]
    assert numbers == list(range(steps + 1, STEPS + 1))
    assert (tmp_path / "work" / f"iter_{STEPS}.pth").is_file()
