"""What ``test_training.py`` runs in each of two processes: half of a batch each.

Argument: a folder of folders with ``model.py`` and ``batch.pt``. Process 0 leaves the
gradients of both halves, averaged by DDP, in ``gradients.pt`` there.
"""

import os
import sys
from pathlib import Path

import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import damex.registry  # noqa: F401


class Loss(nn.Module):
    """The loss of a detector as the output of a forward, for DDP."""

    def __init__(self, detector):
        super().__init__()
        self.detector = detector

    def forward(self, batch):
        data = self.detector.data_preprocessor(batch, True)
        losses = self.detector(**data, mode="loss")
        return sum(value for name, value in losses.items() if "loss" in name)


def gradients(detector, batch, *, wrap=lambda module: module):
    """Gradients of a batch, with the statistics of batch norms as they are."""
    detector.train()
    for module in detector.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    model = wrap(Loss(detector))  # DDP averages while it lives
    model(batch).backward()
    return {n: p.grad for n, p in detector.named_parameters() if p.grad is not None}


def build(folder):
    init_default_scope("mmdet")
    torch.manual_seed(0)
    return MODELS.build(Config.fromfile(folder / "model.py").model)


def main():
    rank = int(os.environ["RANK"])
    distributed.init_process_group("gloo")
    for folder in sorted(Path(sys.argv[1]).iterdir()):
        whole = torch.load(folder / "batch.pt", weights_only=False)
        half = {key: values[2 * rank : 2 * rank + 2] for key, values in whole.items()}
        found = gradients(build(folder), half, wrap=DistributedDataParallel)
        if rank == 0:
            torch.save(found, folder / "gradients.pt")
    distributed.destroy_process_group()
