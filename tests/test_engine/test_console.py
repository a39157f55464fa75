"""The progress line in a pipe and in a terminal, and what reaches the screen."""

import contextlib
import io
import logging
import os
import pty
from types import SimpleNamespace

import pytest
from mmengine.logging import HistoryBuffer
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop
from rich.console import Console

from damex import progress
from damex.datasets.sampler import MixtureSampler
from damex.datasets.spec import DatasetSpec
from damex.engine.console import ProgressHook, _describe_passes, filter_console


class Mixture:
    """Two datasets, with as much as a sampler asks for."""

    specs = (DatasetSpec("big"), DatasetSpec("small"))
    sizes = (1500, 10)

    def __len__(self):
        return sum(self.sizes)


@pytest.mark.parametrize(
    ("loop", "shown"),
    [
        # 10 epochs of 200 samples, half of them of each dataset.
        (EpochBasedTrainLoop, "big 0.67, small 100.0"),
        # 750 steps of a batch of 4.
        (IterBasedTrainLoop, "big 1.0, small 150.0"),
    ],
)
def test_effective_epochs_of_the_whole_training(loop, shown):
    sampler = MixtureSampler(
        Mixture(), seed=0, samples_per_epoch=200, sampling="uniform"
    )
    runner = SimpleNamespace(
        train_loop=loop.__new__(loop),
        train_dataloader=SimpleNamespace(batch_size=4),
        max_epochs=10,
        max_iters=750,
    )
    text = _describe_passes(runner, sampler)
    assert text == f"epochs of each dataset in all: {shown}"


@pytest.fixture
def hook():
    hook = ProgressHook(every_seconds=0.0)
    hook._console = Console(file=io.StringIO(), width=100)
    return hook


def lines(hook):
    return hook._console.file.getvalue().splitlines()


def train_iter(hook, done, **scalars):
    """End an iteration, with the values that mmengine has stored so far."""
    stored = {f"train/{k}": HistoryBuffer(v, [1] * len(v)) for k, v in scalars.items()}
    hub = SimpleNamespace(log_scalars=stored)
    hook.after_train_iter(SimpleNamespace(iter=done - 1, message_hub=hub), done - 1)


@pytest.mark.parametrize(
    ("scalars", "words"),
    [
        (dict(loss=[1.0]), "left  loss 1.00"),  # a dense detector
        (
            dict(loss=[9.0, *[4.0, 2.0] * 5], moe_routing_accuracy=[0.5, 1.0]),
            "loss 3.00  routing accuracy 75.0%",  # of the last ten
        ),
        (
            dict(loss=[1.0], moe_active_channels=[0.25]),
            "loss 1.00  open channels 25.0%",
        ),
    ],
)
def test_a_pipe_gets_plain_lines_with_the_measures_of_the_detector(
    hook, scalars, words
):
    hook._open("train", 10, 0)
    train_iter(hook, 2, **scalars)
    (line,) = lines(hook)
    assert line.strip().startswith("train 2/10")
    assert line.endswith(words)


def test_lines_come_now_and_then_and_at_the_end(hook):
    hook.every_seconds = 3600.0
    hook._open("train", 10, 0)
    for done in range(1, 11):
        train_iter(hook, done, loss=[1.0])
    assert len(lines(hook)) == 1
    assert "train 10/10  0:00:00 left" in lines(hook)[0]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (1.0, []),  # a short work says nothing
        (10.0, ["look 2/3  0:00:10 left", "look 3/3  0:00:00 left"]),
        (20.0, [f"look {n}/3  0:00:{60 - 20 * n:02} left" for n in (1, 2, 3)]),
    ],
)
def test_long_work_of_a_command_says_how_far_it_is(monkeypatch, seconds, expected):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    file = io.StringIO()
    bar = progress.Bar(Console(file=file), every_seconds=15.0)
    bar.begin("closed", 1)
    clock[0] += 100.0
    bar.step()
    with bar:
        bar.begin("look", 3)
        for _ in range(3):
            clock[0] += seconds
            bar.step()
    assert [line.strip() for line in file.getvalue().splitlines()] == expected


def test_two_slow_steps_change_the_time_left_by_what_they_took(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    pace = progress.Pace(900)
    for _ in range(450):
        clock[0] += 0.5
        pace.step()
    assert pace.left(450) == "0:03:45"
    for _ in range(2):
        clock[0] += 30.0
        pace.step()
    minutes = int(pace.left(448).split(":")[1])
    assert 4 <= minutes <= 5
    clock[0] += 600.0  # an evaluation
    pace.begin()
    clock[0] += 0.5
    pace.step()
    assert int(pace.left(447).split(":")[1]) == minutes


def _read_all(terminal):
    """What was written to a pseudo-terminal; one read gives 4 KiB at most."""
    chunks = []
    with contextlib.suppress(OSError):  # EIO: the other end is closed, all is read
        while chunk := os.read(terminal, 1 << 12):
            chunks.append(chunk)
    os.close(terminal)
    return b"".join(chunks).decode()


def test_a_terminal_gets_one_bar_that_is_drawn_again(monkeypatch):
    """A real pseudo-terminal, as a shell gives it to a program."""
    monkeypatch.setenv("TERM", "xterm")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w", encoding="utf-8") as terminal:
        hook = ProgressHook(every_seconds=3600.0)
        hook._console = Console(file=terminal, width=100)
        hook._open("train", 10, 0)
        for done in range(1, 11):
            train_iter(hook, done, loss=[float(done)], moe_routing_accuracy=[0.5])
            hook._bar.refresh()
        hook.close()
    said = _read_all(ours)
    assert "train" in said
    assert "━" in said
    for done in (1, 5, 10):
        assert f"{done}/10" in said
    assert "routing accuracy 50.0%" in said
    assert said.count("\r\n") <= 2  # one line, drawn again in its place
    assert "\x1b[2K" in said


@pytest.fixture
def logger(tmp_path):
    log = logging.Logger("test")
    log.addHandler(logging.StreamHandler(io.StringIO()))
    log.addHandler(logging.FileHandler(tmp_path / "log.txt"))
    filter_console(log)
    return log


def test_the_screen_shows_warnings_and_the_file_everything(logger, tmp_path):
    logger.info("one of hundreds of lines")
    logger.warning("a box was dropped")
    logger.warning('"FileClient" will be deprecated in future.')
    logger.warning("backbone.bn1.bias is skipped since its requires_grad=False")
    screen = logger.handlers[0].stream.getvalue()
    assert screen == "a box was dropped\n"
    assert len((tmp_path / "log.txt").read_text().splitlines()) == 4
