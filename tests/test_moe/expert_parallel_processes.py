"""What ``test_shards.py`` trains, in one process and in several.

Arguments: a folder, how many processes share the experts of a layer out (1 stands for
DDP alone), and the device. Each process leaves what it found in ``rank0.pt`` and so on
there.
"""

import os
import sys
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from damex.moe import (
    ExpertGradients,
    ExpertShards,
    FFNExperts,
    Packing,
    gathered_experts,
    sharded_layers,
    sharded_names,
)

sys.path.insert(0, str(Path(__file__).parents[1]))
import stand_in_device
from layers import LAYERS, D, H, make_layer

BACKENDS = dict(cpu="gloo", cuda="nccl")
STEPS, MAX_NORM = 2, 0.05
# Gates, routers and experts that draw no noise and keep no load.
ALIKE = (
    *("top1", "top3 renormalised", "top2 with a capacity", "expert choice", "dense"),
    *("dense to sparse", "shared expert", "hierarchical", "low rank"),
)
CASES = {
    **{name: LAYERS[name] for name in ALIKE},
    "prelu": dict(
        experts=lambda e: FFNExperts(e, D, H, activation="prelu", output_bias=False)
    ),
    **{name: LAYERS["top1"] for name in ("recomputed", "accumulated", "frozen")},
}


class Net(nn.Module):
    """Two layers with experts between two that all processes have."""

    def __init__(self, case):
        super().__init__()
        torch.manual_seed(0)
        self.recomputes = case == "recomputed"
        self.first = nn.Linear(D, D)
        self.layers = nn.ModuleList(
            make_layer(**CASES[case], seed=seed) for seed in range(2)
        )
        self.last = nn.Linear(D, 1)
        self.double()
        if case == "frozen":
            for layer in self.layers:
                layer.experts.requires_grad_(False)

    def forward(self, tokens_BND, mask_BN, group_ids_B):
        """Mean over real tokens, zero without any, and the routing losses."""
        inputs = dict(packing=Packing.of_mask(mask_BN), group_ids_B=group_ids_B)
        hidden, losses = self.first(tokens_BND), []
        for layer in self.layers:
            if self.recomputes:
                out, record = checkpoint(layer, hidden, use_reentrant=False, **inputs)
            else:
                out, record = layer(hidden, **inputs)
            hidden = hidden + out
            losses += record.losses.values()
        values_BN = self.last(hidden).squeeze(2).square() * mask_BN
        return hidden, values_BN.sum() / mask_BN.sum().clamp_min(1) + sum(losses)


def make_batch(step, rank):
    """Images of uneven size; process 1 has no token at all in step 1."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    count, length = 1 + rank % 2, 5 + 2 * rank
    tokens_BND = torch.randn(count, length, D, generator=generator).double()
    mask_BN = torch.rand(count, length, generator=generator) < 0.6
    if (step, rank) == (1, 1):
        mask_BN[:] = False
    groups_B = torch.randint(-1, 3, (count,), generator=generator)
    return tokens_BND, mask_BN, groups_B


def make_optimizer(net):
    return torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.1)


def batches(case, step, rank):
    """Two micro-batches where gradients are accumulated."""
    steps = (step, step + STEPS) if case == "accumulated" else (step,)
    return [make_batch(number, rank) for number in steps]


def train_alone(case, num_processes):
    """One process with the batches of several; the loss is the mean of theirs."""
    net = Net(case)
    optimizer, found = make_optimizer(net), []
    for step in range(STEPS):
        outputs = []
        for rank in range(num_processes):
            for batch in batches(case, step, rank):
                output, loss = net(*batch)
                (loss / num_processes).backward()
            outputs.append(output.detach())
        grads = grads_of(net)
        norm = nn.utils.clip_grad_norm_(net.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found.append(dict(outputs=outputs, grads=grads, norm=norm))
    return found, state_of(net)


def train_together(case, rank, shards, device):
    """This process of several, with DDP and, where there are shards, an exchange."""
    net = Net(case)
    for parameter in net.parameters():  # all have to start as process 0 does
        parameter.data.add_(rank)
    if shards is not None:
        for layer in net.layers:
            layer.shard_experts(shards)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            net, sharded_names(net)
        )
    net.to(device)  # models are built on the CPU
    gradients = None if shards is None else ExpertGradients(net)
    wrapped, optimizer, found = DistributedDataParallel(net), make_optimizer(net), []
    for step in range(STEPS):
        *earlier, last = [
            [tensor.to(device) for tensor in batch]
            for batch in batches(case, step, rank)
        ]
        with wrapped.no_sync():
            for batch in earlier:
                wrapped(*batch)[1].backward()
        output, loss = wrapped(*last)
        loss.backward()
        clip = nn.utils.clip_grad_norm_
        if gradients is not None:
            gradients.reduce()
            clip = gradients.clip_grad_norm
        grads = whole_grads(net)
        norm = clip(net.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
        found.append(dict(output=output.detach(), grads=grads, norm=norm))
    with gathered_experts([net]):
        return found, state_of(net)


def grads_of(net):
    pairs = net.named_parameters()
    return {name: p.grad.clone() for name, p in pairs if p.grad is not None}


def whole_grads(net):
    grads = grads_of(net)
    for name, layer in sharded_layers(net).items():
        for own, parameter in layer.experts.named_parameters():
            if parameter.grad is None:
                continue
            grads[f"{name}.experts.{own}"] = layer.shards.gather(parameter.grad)
    return grads


def state_of(net):
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def main():
    folder, size, device = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    rank = int(os.environ["RANK"])
    if device == stand_in_device.NAME:
        stand_in_device.install()
    if device == "cuda":
        torch.cuda.set_device(rank)
    distributed.init_process_group(BACKENDS.get(device, device))
    shards = None
    if size > 1 or device == "cuda":  # a single GPU exchanges with itself
        shards = ExpertShards.of_world(size, device_type=device)
    result = {case: train_together(case, rank, shards, device) for case in CASES}
    result = tree_map_only(torch.Tensor, torch.Tensor.cpu, result)
    torch.save(result, folder / f"rank{rank}.pt")
    distributed.destroy_process_group()
