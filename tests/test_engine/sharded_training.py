"""Trainings of ``test_sharded_runner.py`` in each of two processes, in one launch.

Arguments: a folder with ``config.py``, and the device. What is compared are the
checkpoints.
"""

import sys
from pathlib import Path

from mmengine.config import Config
from torch import distributed
from torch.distributed.tensor import DTensor
from two_processes import save_seconds

from damex.engine.runner import MixtureRunner
from damex.moe import sharded_layers

sys.path.insert(0, str(Path(__file__).parents[1]))
import stand_in_device


def run(folder, work, *, size, resume_from=None, launcher="pytorch", **changes):
    """Train in a work directory of its own, from an earlier one's first epoch or anew.

    Returns:
        The runner, when it is done.
    """
    cfg = Config.fromfile(folder / "config.py")
    cfg.launcher = launcher
    cfg.work_dir = str(folder / work)
    cfg.experiment_name = f"{folder.name}_{work}"
    cfg.moe.expert_parallel = size
    if resume_from is not None:
        cfg.load_from = str(folder / resume_from / "epoch_1.pth")
        cfg.resume = True
    cfg.merge_from_dict(changes)
    runner = MixtureRunner.from_cfg(cfg)
    runner.train()
    assert len(sharded_layers(runner.model)) == (0 if size == 1 else 2)
    return runner


def load_and_save(folder, work, **kwargs):
    """Resume at the end of a training, and save what was loaded as ``again.pth``."""
    runner = run(folder, work, max_epochs=1, **kwargs)
    runner.save_checkpoint(str(folder / work), "again.pth")


def main():
    folder, device = Path(sys.argv[1]), sys.argv[2]
    if device == stand_in_device.NAME:
        stand_in_device.install()
    save_seconds()
    distributed.init_process_group("gloo" if device == "cpu" else device)
    run(folder, "plain", size=1)
    run(folder, "spread", size=2)
    run(folder, "resumed", size=2, resume_from="spread")
    load_and_save(folder, "spread_again", size=2, resume_from="plain")
    sharded = dict(size=1, model_wrapper_cfg=dict(type="FullySharded"), custom_hooks=[])
    runner = run(folder, "sharded", **sharded)
    assert all(isinstance(p, DTensor) for p in runner.model.parameters())
    run(folder, "sharded_resumed", resume_from="sharded", **sharded)
    load_and_save(folder, "sharded_again", resume_from="plain", **sharded)
    distributed.destroy_process_group()
