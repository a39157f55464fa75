"""What ``test_two_processes.py`` runs in each of two processes, in one launch.

Argument: a folder with the configs ``stage.py``, ``deepmoe.py``, ``balance.py`` and
``upcycled.py``.
Each process leaves its results in ``rank0.pt`` or ``rank1.pt`` there.
"""

import copy
import gc
import os
import shutil
import sys
from pathlib import Path

import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from damex.engine.hooks import summed
from damex.engine.runner import MixtureRunner
from damex.models.detection_losses import image_weights
from damex.moe import (
    BiasBalancer,
    FFNExperts,
    LayerTally,
    LinearRouter,
    MoELayer,
    TopKGate,
)

STEPS = 6


def make_layer():
    """Tokens are their own router logits."""
    torch.manual_seed(0)
    router = LinearRouter(3, 3)
    router.weight_ED.data = torch.eye(3)
    gate = TopKGate(1, balance=BiasBalancer(3, rate=0.125))
    return MoELayer(router=router, gate=gate, experts=FFNExperts(3, 3, 4))


def make_tokens():
    """Steps of four images; the first two like expert 0, the others 2 and then 1."""
    generator = torch.Generator().manual_seed(0)
    tokens_SBND = torch.randn(STEPS, 4, 20, 3, generator=generator)
    tokens_SBND[:, :2, :, 0] += 1.0
    tokens_SBND[:3, 2:, :, 2] += 2.0
    tokens_SBND[3:, 2:, :, 1] += 2.0
    return tokens_SBND


class DetectorLike(nn.Module):
    """Balances inside of its forward, as a detector does."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, tokens_BND):
        self.layer.gate.begin_step(None)
        out_BND, _ = self.layer(tokens_BND)
        self.layer.gate.end_step()
        return out_BND


def biases(layer, tokens_SBND, *, wrap=lambda model: model, cut=None):
    """Bias in each step, and what is in a checkpoint after ``cut`` steps."""
    model, found, state = wrap(DetectorLike(layer)), [], None
    for number, tokens_BND in enumerate(tokens_SBND, start=1):
        model(tokens_BND).sum().backward()
        found.append(layer.gate.balance.bias_E.clone())
        if number == cut:
            state = copy.deepcopy(layer.state_dict())
    return torch.stack(found), state


def balance_by_halves(rank):
    """Under DDP, which broadcasts buffers: all steps, and the last three resumed."""
    tokens_SBND = make_tokens()[:, 2 * rank : 2 * rank + 2]
    whole, state = biases(
        make_layer(), tokens_SBND, wrap=DistributedDataParallel, cut=3
    )
    states = [state]
    distributed.broadcast_object_list(states, src=0)
    layer = make_layer()
    layer.load_state_dict(states[0])
    resumed, _ = biases(layer, tokens_SBND[3:], wrap=DistributedDataParallel)
    return dict(whole=whole, resumed=resumed)


class Snapshots(Hook):
    """Parameters and buffers before the training and after each iteration."""

    def __init__(self):
        self.states = []

    def before_train(self, runner):
        self.take(runner)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.take(runner)

    def take(self, runner):
        assert is_model_wrapper(runner.model)
        self.states.append(copy.deepcopy(runner.model.module.state_dict()))


def save_seconds():
    """Of each run: mmengine collects garbage for every dataset."""
    gc.freeze()


def train(folder, name, *, work=None, **changes):
    cfg = Config.fromfile(folder / f"{name}.py")
    cfg.launcher = "pytorch"
    cfg.work_dir = str(folder / (work or name))
    cfg.experiment_name = work or name
    cfg.merge_from_dict(changes)
    runner = MixtureRunner.from_cfg(cfg)
    snapshots = Snapshots()
    runner.register_hook(snapshots)
    runner.train()
    model = runner.model.module
    names = [name for name, _ in model.named_parameters()]
    return dict(parameters=names, states=snapshots.states, end=model.state_dict())


def train_balanced(folder, rank):
    """Two epochs at once, and the second one resumed."""
    whole = train(folder, "balance")
    if rank == 0:
        (folder / "resumed").mkdir()
        shutil.copy(folder / "balance" / "epoch_1.pth", folder / "resumed")
        (folder / "resumed" / "last_checkpoint").write_text(
            str(folder / "resumed" / "epoch_1.pth")
        )
    distributed.barrier()
    return whole, train(folder, "balance", work="resumed", resume=True)


def tally_of(rank):
    """What the alarm makes of choices that differ between the processes."""
    own_GE = torch.tensor([[3, 0, 1], [0, 2, 0]]) * (rank + 1)
    found = summed(LayerTally(own_GE, own_GE.sum(1), torch.eye(2, 3).bool()))
    return dict(counts_GE=found.counts_GE, tokens_G=found.tokens_G)


def main():
    folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
    save_seconds()
    # While no process knows of another, a layer is that of a single process.
    alone, _ = biases(make_layer(), make_tokens())
    distributed.init_process_group("gloo")
    halves = balance_by_halves(rank)
    balanced, resumed = train_balanced(folder, rank)
    result = dict(
        layer=dict(alone=alone, **halves),
        stage=train(folder, "stage"),
        deepmoe=train(folder, "deepmoe"),
        balanced=balanced,
        upcycled=train(folder, "upcycled"),
        resumed=resumed,
        tally=tally_of(rank),
        weights=image_weights(torch.tensor([[4], [1]][rank]), 0.5),
    )
    torch.save(result, folder / f"rank{rank}.pt")
    distributed.destroy_process_group()
