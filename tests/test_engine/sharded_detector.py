"""The quick start's detector, trained by one process and by several that share it.

Arguments: a folder and how many processes share the experts of a layer out; 1 stands
for DDP alone, 0 for all parameters shared out. Each process leaves what it found in
``rank0.pt`` and so on there.
"""

import os
import sys
from pathlib import Path

import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.registry import init_default_scope
from torch import distributed, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import damex.registry  # noqa: F401
from damex.engine.sharding import shard_fully
from damex.models.insertion import moe_blocks
from damex.moe import ExpertGradients, gathered_experts, sharded_layers, sharded_names

sys.path.insert(0, str(Path(__file__).parents[2]))
from tests.conftest import batch_of

ROOT = Path(__file__).parents[2]
STEPS, MAX_NORM, NUM_EXPERTS = 2, 0.1, 8
# In prediction, images of other sizes need other passes: the second process makes one,
# the others two, and all take part in each.
SIZES = [[(128, 96), (64, 128)], [(96, 96), (96, 96)], [(64, 96), (96, 128)]]


def make_detector(size):
    """As the config has it, but for eight experts and a backbone of random weights."""
    cfg = Config.fromfile(ROOT / "configs" / "quickstart.py")
    model = cfg.model
    model.backbone.pretrained = False
    model.bbox_head.num_classes = 4
    model.data_preprocessor.pad_size_divisor = 32
    moe = dict(cfg.moe, num_experts=NUM_EXPERTS, expert_parallel=max(size, 1))
    model.update(moe=moe, num_groups=5)
    torch.manual_seed(0)
    detector = MODELS.build(model)
    detector.init_weights()
    generator = torch.Generator().manual_seed(0)
    with gathered_experts([detector]):
        for block in moe_blocks(detector):
            for parameter in block.moe.experts.parameters():  # adapters start at zero
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.data.add_(noise, alpha=0.02)
    return detector.train()


def make_batch(step, rank):
    """Images of uneven size. As many boxes everywhere, so that their number, by which
    losses are divided, is that of the mean over processes."""
    seed = 10 * step + rank
    groups = [seed % 5, (seed + 2) % 5]
    return batch_of(groups, sizes=SIZES[rank % 3], boxes=(3, 1), seed=seed)


def loss_of(model, detector, step, rank):
    """The loss, under a seed for the denoising queries and the noise of gates."""
    data = detector.data_preprocessor(make_batch(step, rank), True)
    torch.manual_seed(100 * step + rank)
    loss, _ = detector.parse_losses(model(**data, mode="loss"))
    return loss


def scores_of(detector, rank):
    """Scores of the detections; all processes predict together."""
    detector.eval()
    data = detector.data_preprocessor(make_batch(9, rank), False)
    with torch.no_grad():
        samples = detector(**data, mode="predict")
    detector.train()
    return torch.stack([sample.pred_instances.scores for sample in samples])


def make_optimizer(detector):
    """With an eps that gradients of rounding errors alone do not reach."""
    return torch.optim.AdamW(detector.parameters(), lr=0.0016, eps=1e-4)


def grads_of(detector):
    """Gradients by name, of whole banks where they are shared out."""
    pairs = detector.named_parameters()
    grads = {name: whole(p.grad) for name, p in pairs if p.grad is not None}
    for name, layer in sharded_layers(detector).items():
        for own, parameter in layer.experts.named_parameters():
            grads[f"{name}.experts.{own}"] = layer.shards.gather(parameter.grad)
    return grads


def parameters_of(detector):
    return {name: whole(p.detach()) for name, p in detector.named_parameters()}


def whole(tensor):
    """A copy of all of it, also where each process has a share."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()


def train_alone(num_processes, ends):
    """One process with the batches of several; the loss is the mean of theirs.

    Each step starts from the parameters at the end of theirs before. In float32 two
    trainings part ways as soon as rounding moves one ReLU over its kink.
    """
    detector = make_detector(1)
    optimizer, found = make_optimizer(detector), []
    for step in range(STEPS):
        if step > 0:
            detector.load_state_dict(ends[step - 1], strict=False)
        detector.begin_step(iteration=step, max_iters=STEPS)
        losses = []
        for rank in range(num_processes):
            loss = loss_of(detector, detector, step, rank)
            (loss / num_processes).backward()
            losses.append(loss.detach())
        grads = grads_of(detector)
        norm = nn.utils.clip_grad_norm_(detector.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        end = parameters_of(detector)
        found.append(dict(losses=losses, grads=grads, norm=norm, end=end))
    detector.load_state_dict(ends[-1], strict=False)
    return found, [scores_of(detector, rank) for rank in range(num_processes)]


def train_together(rank, size):
    """This process of several, under DDP or fully sharded."""
    detector = make_detector(size)
    gradients, clip = None, nn.utils.clip_grad_norm_
    if size == 0:
        shard_fully(detector)
    if size > 1:
        gradients = ExpertGradients(detector)
        clip = gradients.clip_grad_norm
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            detector, sharded_names(detector)
        )
    model = detector
    if size > 0:
        model = DistributedDataParallel(detector, broadcast_buffers=False)
    optimizer, found = make_optimizer(detector), []
    for step in range(STEPS):
        detector.begin_step(iteration=step, max_iters=STEPS)
        loss = loss_of(model, detector, step, rank)
        loss.backward()
        if gradients is not None:
            gradients.reduce()
        grads = grads_of(detector)
        norm = whole(clip(detector.parameters(), MAX_NORM))
        optimizer.step()
        optimizer.zero_grad()
        with gathered_experts([detector]):
            end = parameters_of(detector)
        found.append(dict(loss=loss.detach(), grads=grads, norm=norm, end=end))
    return found, scores_of(detector, rank)


def main():
    folder, size, rank = Path(sys.argv[1]), int(sys.argv[2]), int(os.environ["RANK"])
    init_default_scope("mmdet")
    distributed.init_process_group("gloo")
    torch.save(train_together(rank, size), folder / f"rank{rank}.pt")
    distributed.destroy_process_group()
