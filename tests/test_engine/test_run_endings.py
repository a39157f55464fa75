"""Trainings that end early: one line, the last checkpoint, and nothing half written."""

import errno
import logging
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmdet.registry import HOOKS
from mmengine.fileio.backends import LocalBackend
from mmengine.hooks import Hook
from mmengine.logging import HistoryBuffer

import damex.workbench.check.check
from damex.__main__ import main
from damex.engine.hooks import TrainingStepHook, check_losses
from damex.engine.runner import MixtureRunner
from damex.engine.work_dir import WorkDir
from damex.errors import ConfigError
from damex.models.timm_backbone import TimmBackbone

SMALL = """
train_cfg = dict(max_epochs=3, val_begin=9)
model = dict(num_queries=30, dn_cfg=dict(group_cfg=dict(num_dn_queries=10)))
default_hooks = dict(checkpoint=dict(save_best=None))
"""


@HOOKS.register_module()
class SignalAt(Hook):
    """Sends a signal to this process in an iteration."""

    def __init__(self, iteration, name):
        self.iteration, self.number = iteration, getattr(signal, name)

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        for _ in range(2 * (runner.iter == self.iteration)):  # a parent repeats it
            os.kill(os.getpid(), self.number)


@HOOKS.register_module()
class NaNAfter(Hook):
    """Makes a parameter infinite that no prediction depends on."""

    def __init__(self, iteration):
        self.iteration = iteration

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == self.iteration:
            runner.model.unused = torch.nn.Parameter(torch.full((2,), torch.inf))


@HOOKS.register_module()
class LogToFullDisk(Hook):
    """Fills the disk under the log file."""

    def before_train(self, runner):
        for handler in runner.logger.handlers:
            if isinstance(handler, logging.FileHandler):
                handler.setStream(Path("/dev/full").open("w"))  # noqa: SIM115
        runner.logger.info("one more line")


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.fixture
def last_line(capfd):
    """Run a command; get its exit status, and its last line if it is the only error."""

    def run(*arguments):
        capfd.readouterr()
        status = main([*map(str, arguments)])
        error = capfd.readouterr().err
        assert "Traceback" not in error
        *_, line = error.strip().splitlines() or [""]
        return status, line

    return run


def continues(line, folder, last_line, *, from_epoch):
    """Whether the command in a line finishes the training."""
    assert f"The last checkpoint is {folder}/epoch_{from_epoch}.pth" in line
    _, _, command = line.partition("Continue with: ")
    program, *arguments = shlex.split(command)
    assert (program, last_line(*arguments)[0]) == ("damex", 0)
    last = torch.load(folder / "epoch_3.pth", weights_only=False)
    return last["meta"]["iter"] == 18


def test_a_full_disk_leaves_the_last_checkpoint(
    write_config, tmp_path, monkeypatch, last_line
):
    """``put`` is how mmengine writes a checkpoint."""
    put, written = LocalBackend.put, Counter()

    def put_until_full(self, content, path):
        written["files"] += 1
        if written["files"] == 2:
            put(self, content[: len(content) // 2], path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        put(self, content, path)

    monkeypatch.setattr(LocalBackend, "put", put_until_full)
    status, line = last_line("train", write_config(extra=SMALL))
    work = tmp_path / "work"
    assert status == 2
    assert f"{work}/epoch_2.pth was not written (No space left on device)" in line
    assert "MiB are free" in line
    found = [name for name in names(work) if "/" not in name]
    assert found[1:] == ["config.py", "epoch_1.pth", "last_checkpoint"]
    assert continues(line, work, last_line, from_epoch=1)


def test_an_interrupt_names_what_is_saved(write_config, tmp_path, last_line):
    hook = "custom_hooks = [dict(type='SignalAt', iteration=8, name='SIGTERM')]"
    config = write_config(extra=SMALL + hook)
    status, line = last_line("train", config)
    assert status == 130
    assert line.startswith("interrupted after 8 of 18 iterations. The last checkpoint")
    written = tmp_path / "work" / "config.py"
    written.write_text(written.read_text().replace("iteration=8", "iteration=-1"))
    assert continues(line, tmp_path / "work", last_line, from_epoch=1)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_another_interrupt_has_its_usual_effect(monkeypatch):
    runner = SimpleNamespace(signals=[], has_begun=True)
    with damex.engine.work_dir._interruptible(runner):
        for _ in range(2):  # a parent process repeats it
            signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr(damex.engine.work_dir, "ECHO", 0.0)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_interrupted_start_leaves_nothing(
    write_config, tmp_path, monkeypatch, last_line
):
    config = write_config(extra=SMALL)
    explain = damex.engine.work_dir._explain

    def interrupt(*_):
        os.kill(os.getpid(), signal.SIGINT)

    def repeat(*arguments):  # a parent process does
        interrupt()
        return explain(*arguments)

    monkeypatch.setattr(damex.workbench.check.check, "refusal", interrupt)
    monkeypatch.setattr(damex.engine.work_dir, "_explain", repeat)
    assert last_line("train", config) == (130, "interrupted before the training.")
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        (["train"], "model = dict(type='Nothing')"),
        (["train"], "mixture[0]['root'] += '/nothing'"),
        (["train"], "load_from = 'nothing.pth'"),
        (["train", "--resume"], ""),
        (["test", "nothing.pth"], ""),
    ],
)
def test_a_failed_start_leaves_the_folder_as_it_was(
    arguments, extra, exists, write_config, tmp_path, last_line
):
    config, work = write_config(extra=SMALL + extra), tmp_path / "work"
    if exists:
        work.mkdir()
        (work / "config.py").write_text("theirs")
    command, *others = arguments
    status, line = last_line(command, config, *others)
    assert (status, line[:6]) == (2, "error:")
    assert work.exists() == exists
    if exists:
        assert names(work) == ["config.py"]
        assert (work / "config.py").read_text() == "theirs"


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        (
            "optim_wrapper = dict(optimizer=dict(lr=1e9), clip_grad=None)",
            r"diverged: the predictions of iteration [2-6] are not finite. Lower "
            r"optim_wrapper.optimizer.lr \(it is 1000000000.0\)",
        ),
        (
            "model['bbox_head'] = dict(loss_iou=dict(loss_weight=float('inf')))",
            "diverged: not finite in iteration 1: loss_iou, d0.loss_iou, .* and . more",
        ),
    ],
)
def test_a_diverging_training_stops_at_once(
    extra, expected, write_config, tmp_path, last_line
):
    status, line = last_line("train", write_config(extra=SMALL + extra))
    assert status == 2
    assert re.search(expected, line)
    assert line.endswith("No checkpoint was written yet.")
    assert not [*tmp_path.rglob("*.pth")]


def test_a_diverged_training_starts_again_from_its_last_checkpoint(
    write_config, tmp_path, last_line
):
    """With --resume the learning rate would be that of the checkpoint."""
    hook = "custom_hooks = [dict(type='NaNAfter', iteration=8)]"
    status, line = last_line("train", write_config(extra=SMALL + hook))
    last = tmp_path / "work" / "epoch_1.pth"
    assert status == 2
    assert "weights such as" in line
    assert "are not finite after iteration 12" in line
    assert f"checkpoint is {last} (iteration 6). Start from it with load_from=" in line
    assert "--resume" not in line
    assert [*tmp_path.rglob("*.pth")] == [last]


def test_losses_of_mixed_precision_may_overflow_while_the_scaler_can_help():
    losses = {"loss": torch.tensor(torch.inf), "loss_cls": torch.tensor(torch.inf)}
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    check_losses(losses, scaler, iteration=1)
    for not_helping in (None, torch.amp.GradScaler("cpu", init_scale=0.5)):
        with pytest.raises(FloatingPointError, match=r"in iteration 1: loss_cls$"):
            check_losses(losses, not_helping, iteration=1)
    finite = {"loss": torch.ones(())}
    check_losses(finite, None, iteration=1)
    with pytest.raises(FloatingPointError, match="iteration 1: gradients"):
        check_losses(finite, not_helping, iteration=1)


@pytest.mark.parametrize(("scale", "helps"), [(None, True), (1.0, False)])
@pytest.mark.parametrize("what", ["sum of", "gradients"])
def test_a_scaler_that_never_changes_does_not_help(scale, helps, what):
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    wrapper = SimpleNamespace(loss_scaler=scaler, _scale_update_param=scale)
    loss, norm = (torch.nan, 1.0) if what == "sum of" else (1.0, torch.nan)
    hub = SimpleNamespace(log_scalars={"train/grad_norm": HistoryBuffer([norm], [1])})
    runner = SimpleNamespace(optim_wrapper=wrapper, rank=0, iter=0, message_hub=hub)
    outputs = {"loss": torch.tensor(loss)}
    with nullcontext() if helps else pytest.raises(FloatingPointError, match=what):
        TrainingStepHook().after_train_iter(runner, outputs=outputs)


def test_statistics_that_are_not_finite_are_not_saved():
    runner = SimpleNamespace(model=torch.nn.BatchNorm2d(2))
    state = {**runner.model.state_dict(), "running_var": torch.tensor([1.0, torch.inf])}
    with pytest.raises(FloatingPointError, match="such as running_var are not finite"):
        TrainingStepHook().before_save_checkpoint(
            runner, dict(state_dict=state, meta=dict(iter=3))
        )


def test_activations_of_batch_norms_are_not_lost():
    runner = SimpleNamespace(distributed=True, cfg=dict(sync_bn="torch"))
    backbone = TimmBackbone("tf_efficientnet_lite0", out_indices=(2, 3, 4))
    with pytest.raises(ConfigError, match="drops the activations"):
        MixtureRunner.wrap_model(runner, None, backbone)


def test_a_log_on_a_full_disk_ends_a_run_without_a_traceback(
    write_config, tmp_path, last_line
):
    hook = "custom_hooks = [dict(type='LogToFullDisk')]"
    status, line = last_line("train", write_config(extra=SMALL + hook))
    assert status == 2
    assert f"{tmp_path}/work cannot be written to (No space left on device)" in line


def test_a_folder_in_use_is_left_alone(write_config, tmp_path, monkeypatch, last_line):
    config = write_config(extra=SMALL)
    monkeypatch.setattr(WorkDir, "lock", lambda _: "work is in use: process 7.")
    assert last_line("train", config) == (2, "error: work is in use: process 7.")
    assert not (tmp_path / "work").exists()


def test_an_evaluation_leaves_the_config_of_the_training(
    write_config, tmp_path, last_line
):
    scored = "train_cfg.update(max_epochs=1, val_begin=1); default_hooks.clear()"
    config = write_config(extra=SMALL + scored)
    assert last_line("train", config)[0] == 0
    written = tmp_path / "work" / "config.py"
    before = written.read_text()
    checkpoint = tmp_path / "work" / "epoch_1.pth"
    file = tmp_path / "file"
    file.touch()
    status, line = last_line("test", config, checkpoint, "--show-dir", file)
    assert (status, line.partition(" (")[0]) == (
        2,
        f"error: {file} cannot be written to",
    )
    options = ("--cfg-options", "test_dataloader.batch_size=3")
    assert last_line("test", config, checkpoint, *options)[0] == 0
    assert written.read_text() == before
    assert last_line("train", config, "--resume", checkpoint)[0] == 0
    assert written.read_text() == before  # which starts a training from nothing
    (best,) = written.parent.glob("best_*.pth")  # has no optimizer to resume
    assert last_line("test", written, best, "--cfg-options", "resume=True")[0] == 0


@HOOKS.register_module()
class SignalIn(Hook):
    """Sends a signal where Python ignores exceptions."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        class Dying:
            def __del__(self):
                signal.raise_signal(signal.SIGINT)

        if runner.iter == 8:
            Dying()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_ctrl_c_in_a_destructor_is_not_lost(write_config, tmp_path, last_line):
    config = write_config(extra=SMALL + "custom_hooks = [dict(type='SignalIn')]")
    status, line = last_line("train", config)
    assert status == 130
    assert line.startswith("interrupted after 8 of 18 iterations. The last checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize("waits_for", ["train 9/", "evaluate 2/", "details in"])
def test_ctrl_c_ends_data_loading_processes_without_a_word(
    waits_for, write_config, tmp_path
):
    loading = """
train_dataloader.update(num_workers=2, persistent_workers=True)
val_dataloader.update(num_workers=2, persistent_workers=True)
train_cfg.update(val_begin=2, val_interval=1)
custom_hooks = [dict(type="ProgressHook", every_seconds=0)]
"""
    config, errors = write_config(extra=SMALL + loading), tmp_path / "errors.txt"
    with errors.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "damex", "train", str(config)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,  # a terminal signals the whole group
            # Jobs in the background ignore SIGINT, and so would their children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert any(waits_for in line for line in process.stdout), errors.read_text()
        os.killpg(process.pid, signal.SIGINT)
        began = time.monotonic()
        while "interrupted" not in errors.read_text() and process.poll() is None:
            time.sleep(0.05)
        assert time.monotonic() - began < 30  # half a second on an idle machine
        assert process.wait(timeout=60) == 130
    *_, line = errors.read_text().strip().splitlines()
    assert line.startswith("interrupted after ")
    assert "Traceback" not in errors.read_text()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
