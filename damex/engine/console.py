"""ProgressHook: the console output of training and evaluation."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mmdet.engine.hooks import DetVisualizationHook
from mmdet.registry import HOOKS
from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.runner import BaseLoop, IterBasedTrainLoop, Runner
from rich.console import Console
from torch import nn

from damex.datasets.mixture import MixtureDataset
from damex.datasets.sampler import MixtureSampler
from damex.datasets.tiles import joined
from damex.engine.hooks import bare_model
from damex.errors import printable
from damex.files import make_folder
from damex.models.insertion import moe_blocks
from damex.progress import Bar, Pace

# The outputs of a detector shown in the progress line.
MEASURES = MappingProxyType(
    {
        "loss": "loss {:.2f}",
        "moe_routing_accuracy": "routing accuracy {:.1%}",
        "moe_active_channels": "open channels {:.1%}",
    }
)


@HOOKS.register_module()
class ProgressHook(Hook):
    """One live line with time left, loss and routing measures.

    A progress bar on a terminal, an occasional plain line in a pipe or file.

    Args:
        every_seconds: Seconds between plain lines.
    """

    priority = "LOW"

    def __init__(self, *, every_seconds: float = 15.0) -> None:
        self.every_seconds = every_seconds
        self._console = Console(
            file=sys.stdout, quiet=not is_main_process(), markup=False, emoji=False
        )
        self._bar = self._new_bar()
        self._paces: dict[str, Pace] = {}

    def before_train(self, runner: Runner) -> None:
        """Describe the run and open the bar."""
        self._console.print(describe_run(runner), highlight=False, soft_wrap=True)
        self._open("train", runner.max_iters, runner.iter)

    def after_train_iter(self, runner: Runner, *_: Any, **__: Any) -> None:
        """Update the line with means of mmengine's last ten values."""
        scalars = runner.message_hub.log_scalars
        status = [
            words.format(scalars[f"train/{key}"].mean(10))
            for key, words in MEASURES.items()
            if f"train/{key}" in scalars
        ]
        self._bar.step("  ".join(status), done=runner.iter + 1)

    def before_val(self, runner: Runner) -> None:
        """Open a bar for the evaluation."""
        self._open("evaluate", len(runner.val_dataloader), 0)

    def before_test(self, runner: Runner) -> None:
        """Describe the run and open the bar."""
        self._console.print(describe_run(runner), highlight=False, soft_wrap=True)
        self._open("test", len(runner.test_dataloader), 0)

    def after_val_iter(
        self, runner: Runner, batch_idx: int, *_: Any, **__: Any
    ) -> None:
        """Advance the bar."""
        self._bar.step("", done=batch_idx + 1)

    after_test_iter = after_val_iter

    def close(self, *_: Any) -> None:
        """Remove the bar from the screen."""
        self._bar.stop()

    after_train = after_test = close

    def after_val(self, runner: Runner) -> None:
        """Return to the training bar."""
        self.close()
        if isinstance(runner._train_loop, BaseLoop) and runner.iter < runner.max_iters:
            self._open("train", runner.max_iters, runner.iter)

    def _new_bar(self) -> Bar:
        return Bar(self._console, stays=True, every_seconds=self.every_seconds)

    def _open(self, label: str, total: int, done: int) -> None:
        self.close()
        self._bar = self._new_bar()
        pace = self._paces.setdefault(label, Pace(total))
        self._bar.begin(label, total, done=done, pace=pace)
        self._bar.start()


def describe_experts(model: nn.Module) -> str:
    """Number and layers of a detector's experts in a phrase, or "dense"."""
    gating = getattr(model, "channel_gating", None)
    if gating is not None:
        heads = gating.path.heads.values()
        channels = sum(head.num_channels for head in heads)
        return f"gates on {channels:,} channels of {len(heads)} layers"
    blocks = moe_blocks(model)
    if not blocks:
        return "dense"
    moe = blocks[0].moe
    experts = f"{moe.num_experts} experts in {', '.join(b.name for b in blocks)}"
    if moe.shards is not None:
        each = moe.num_experts // moe.shards.size
        experts += f", {each} on each process (only these are counted)"
    return experts


def describe_run(runner: Runner) -> str:
    """Describe the model, its experts, the data and the log file in a few lines."""
    model = bare_model(runner)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    experts = describe_experts(model)
    lines = [f"{type(model).__name__}: {millions:.2f} M parameters, {experts}"]
    # Accessing the other loop's dataloader would load its data.
    training = isinstance(runner._train_loop, BaseLoop)
    loader = runner.train_dataloader if training else runner.test_dataloader
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, MixtureDataset):
        rows = zip(dataset.specs, dataset.sizes, strict=True)
        names = ", ".join(
            f"{spec.name} ({size}{f', tile={spec.tile}' if spec.tile else ''})"
            for spec, size in rows
        )
        classes = len(dataset.metainfo["classes"])
        verb = "trained" if training else "tested"
        lines.append(f"{verb} on {names}: {classes} classes")
        sampler = getattr(loader, "sampler", None)
        if training and isinstance(sampler, MixtureSampler):
            lines.append(_describe_passes(runner, sampler))
    lines.append(f"details in {runner.logger.log_file or runner.log_dir}")
    return "\n".join(lines)


def _describe_passes(runner: Runner, sampler: MixtureSampler) -> str:
    """Effective epochs: how often the whole training shows each dataset."""
    loader = runner.train_dataloader
    samples = runner.max_epochs * sampler.total
    if isinstance(runner.train_loop, IterBasedTrainLoop):
        samples = runner.max_iters * loader.batch_size * sampler.world_size
    passes = sampler.passes(samples).items()
    shown = ", ".join(
        f"{name} {number:,.1f}" if number >= 1 else f"{name} {number:.2g}"
        for name, number in passes
    )
    return f"epochs of each dataset in all: {shown}"


# From mmengine and mmdet about their own code; users cannot act on them.
UPSTREAM_MESSAGES = (
    '"FileClient" will be deprecated',
    '"HardDiskBackend" is the alias',
    "is skipped since its requires_grad=False",  # a line for each frozen parameter
    "Resumed iteration number is not divisible",  # see AccumulationHook
    "metainfo from the resumed checkpoint is different",  # see check_label_space
)
UPSTREAM_WARNINGS = (
    r"torch\.meshgrid: in an upcoming release",
    r"Warning: The \w+ is out of bounds",  # boxes at the border are drawn anyway
    r"MultiScaleDeformableAttnFunction does not support",  # logged by damex
    r"Image size \(\d+ pixels\) exceeds limit",  # Pillow opens it anyway
)


def filter_console(logger: logging.Logger | None = None) -> None:
    """Show only warnings and errors on the screen; the log file keeps every line.

    Only commands call this, as it changes the whole process. Without `logger`,
    mmengine's current one is filtered.
    """
    logger = logger or MMLogger.get_current_instance()
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:
            handler.setLevel(max(handler.level, logging.WARNING))
            handler.addFilter(_is_for_users)
    for pattern in UPSTREAM_WARNINGS:
        warnings.filterwarnings("ignore", message=pattern)


def _is_for_users(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    record.msg, record.args = printable(message), None  # may name files of strangers
    return not any(text in message for text in UPSTREAM_MESSAGES)


@HOOKS.register_module()
class MixtureVisualizationHook(DetVisualizationHook):
    """Write ``--show-dir`` images to one folder per dataset.

    mmdet names images by file name alone, so that datasets could overwrite each other.
    Images of one name in several folders of a dataset go to folders of these names.
    """

    test_out_dir: str | None

    def before_run(self, runner: Runner) -> None:
        """Create the folder, before a checkpoint is loaded; ConfigError on failure."""
        self._windows: list[Any] = []  # of one image
        self._place: Any = None  # its dataset and file
        self._drawn: dict[Path, Path] = {}  # picture: image
        if self.test_out_dir is not None:
            # mmdet joins paths, which leaves an absolute one unchanged.
            logs = Path(runner.work_dir) / runner.timestamp
            self.test_out_dir = str((logs / self.test_out_dir).resolve())
            make_folder(Path(self.test_out_dir))
            if runner.world_size > 1:  # mmdet draws on the first process alone
                runner.logger.warning(
                    "--show-dir: only the images (or windows) of the first of "
                    f"{runner.world_size} processes are drawn; draw in one process."
                )

    def after_val_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any, outputs: Sequence[Any]
    ) -> None:
        """Draw the first image of a batch, or its window at its place."""
        super().after_val_iter(runner, batch_idx, data_batch, [joined(outputs[:1])])

    def after_test_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any, outputs: Sequence[Any]
    ) -> None:
        """Draw every image of a batch into the folder of its dataset.

        The windows of an image are drawn as one when another image follows.
        """
        for sample in outputs if self.draw else ():
            place = sample.metainfo.get("dataset_name"), sample.img_path
            if self._windows and self._place != place:
                self._draw_windows(runner, batch_idx)
            self._place = place
            if "window" in sample.metainfo:
                self._windows.append(sample)
            else:
                self._draw_image(runner, batch_idx, sample)

    def after_test_epoch(self, runner: Runner, metrics: Any = None) -> None:
        """Draw the windows of the last image."""
        if self._windows:
            self._draw_windows(runner, 0)

    def _draw_windows(self, runner: Runner, batch_idx: int) -> None:
        self._draw_image(runner, batch_idx, joined(self._windows))
        self._windows = []

    def _draw_image(self, runner: Runner, batch_idx: int, sample: Any) -> None:
        folder = self.test_out_dir
        if folder is not None:
            base = Path(folder) / sample.metainfo.get("dataset_name", "")
            path = Path(sample.img_path)
            image = path.parent.resolve() / path.name
            parts = image.parts[1:-1]
            places = (base.joinpath(*parts[n:]) for n in range(len(parts), -1, -1))
            self.test_out_dir = next(
                str(place)
                for place in places
                if self._drawn.setdefault(place / image.name, image) == image
            )
        super().after_test_iter(runner, batch_idx, None, [sample])
        self.test_out_dir = folder
