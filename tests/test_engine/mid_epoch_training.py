"""Trainings of ``test_resumption.py``; ``main`` has those of each of two processes.

Argument: a folder with ``config.py``. Each process leaves in ``rank0.pt`` or
``rank1.pt`` there what its trainings saw.
"""

import os
import sys
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from torch import distributed
from two_processes import save_seconds

from damex.engine.runner import MixtureRunner


class Diary(Hook):
    """Iteration, images and learning rate of every step."""

    def __init__(self):
        self.steps = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        images = [sample.img_path for sample in data_batch["data_samples"]]
        rate = runner.optim_wrapper.get_lr()["lr"][0]
        self.steps.append((runner.iter, images, rate))


def train(folder, work, *, resume_from=None, launcher="none", **changes):
    """The steps of a training, resumed from a checkpoint or from the start."""
    cfg = Config.fromfile(folder / "config.py")
    cfg.launcher = launcher
    cfg.work_dir = str(folder / work)
    cfg.experiment_name = f"{folder.name}_{work}"
    if resume_from is not None:
        cfg.resume, cfg.load_from = True, str(folder / resume_from)
    cfg.merge_from_dict(changes)
    runner, diary = MixtureRunner.from_cfg(cfg), Diary()
    runner.register_hook(diary)
    runner.train()
    return diary.steps


def main():
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    save_seconds()
    distributed.init_process_group("gloo")
    steps = {
        name: train(folder, name, resume_from=checkpoint, launcher="pytorch")
        for name, checkpoint in [
            ("two", None),
            ("two_to_two", "two/iter_4.pth"),
            ("one_to_two", "one/iter_8.pth"),
        ]
    }
    torch.save(steps, folder / f"rank{rank}.pt")
    distributed.destroy_process_group()
