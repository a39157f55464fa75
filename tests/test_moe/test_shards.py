"""Experts spread over processes answer and learn as those of a single process do."""

import copy
import sys
from pathlib import Path

import pytest
import torch

from damex.moe import (
    ExpertGradients,
    ExpertShards,
    FFNExperts,
    sharded_names,
)
from tests.test_moe.layers import make_batch, make_layer

sys.path.insert(0, str(Path(__file__).parent))
import expert_parallel_processes as processes

CLOSE = dict(rtol=0, atol=1e-9)  # float64
GPUS = min(2, torch.cuda.device_count())
stand_in = processes.stand_in_device
DEVICE = stand_in.NAME if stand_in.IS_AVAILABLE else "cpu"
LAYOUTS = [
    pytest.param((2, 1, "cpu"), id="DDP on 2"),
    pytest.param((4, 4, "cpu"), id="experts over 4"),
    # On a device, no collective is of CPU tensors, as with nccl.
    pytest.param((4, 2, DEVICE), id=f"experts over 2, data over 2, {DEVICE}"),
    pytest.param(
        (GPUS, GPUS, "cuda"),
        id="experts over GPUs",
        marks=pytest.mark.skipif(GPUS == 0, reason="nccl needs a GPU"),
    ),
]


@pytest.fixture(scope="module", params=LAYOUTS)
def together(request, tmp_path_factory, launch_processes):
    """What each of some processes found, in one launch for all cases."""
    count, size, device = request.param
    folder = tmp_path_factory.mktemp("shards")
    arguments, on_gpus = (folder, str(size), device), device == "cuda"
    launch_processes(processes.__file__, *arguments, count=count, on_gpus=on_gpus)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize("case", processes.CASES)
def test_several_processes_train_as_one(together, case):
    alone, state = processes.train_alone(case, len(together))
    for rank, found in enumerate(together):
        steps, own_state = found[case]
        for step, reference in zip(steps, alone, strict=True):
            output = reference["outputs"][rank]
            torch.testing.assert_close(step["output"], output, **CLOSE)
            torch.testing.assert_close(step["grads"], reference["grads"], **CLOSE)
            torch.testing.assert_close(step["norm"], reference["norm"], **CLOSE)
        torch.testing.assert_close(own_state, state, **CLOSE)
    norms = [[step["norm"].item() for step in found[case][0]] for found in together]
    assert all(own == norms[0] for own in norms)  # to the last bit
    assert min(norms[0]) > processes.MAX_NORM  # so that clipping matters


def test_a_copy_of_a_layer_talks_to_the_same_processes(group):
    layer = make_layer()
    layer.shard_experts(ExpertShards.of_world(1))
    layer.eval()(make_batch()[0])[0].sum().backward()
    assert copy.deepcopy(layer).shards is layer.shards


def test_names_are_those_of_the_experts_alone(group):
    layer = make_layer()
    assert sharded_names(layer) == []
    layer.shard_experts(ExpertShards.of_world(1))
    outer = torch.nn.ModuleDict(dict(one=make_layer(), two=layer))
    names = [f"experts.{n}" for n in ("w1_EDH", "b1_EH", "w2_EHD", "b2_ED")]
    assert sharded_names(layer) == names
    assert sharded_names(outer) == [f"two.{name}" for name in names]


@pytest.mark.parametrize("order", [1.0, 2.0, float("inf")])
def test_clipping_in_a_group_of_one_is_that_of_torch(group, order):
    layer, other = make_layer(), make_layer()
    layer.shard_experts(ExpertShards.of_world(1))
    tokens_BND, _ = make_batch()
    for one in (layer, other):
        one.eval()(tokens_BND)[0].square().sum().backward()
    ours, theirs = [*layer.parameters()], [*other.parameters()]
    own = ExpertGradients(layer).clip_grad_norm(ours, 0.01, order)
    expected = torch.nn.utils.clip_grad_norm_(theirs, 0.01, order)
    torch.testing.assert_close(own, expected)
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, two.grad)


def test_what_cannot_be_shared_out_is_refused(group):
    shards = ExpertShards.of_world(1)
    bank = FFNExperts(4, 6, 8)
    bank.register_buffer("scale", torch.ones(()))
    with pytest.raises(ValueError, match=r"scale of FFNExperts has the shape \(\)"):
        shards.shard(bank)
    shards.size = 3
    with pytest.raises(ValueError, match=r"4 experts .* among 3 processes"):
        shards.shard(FFNExperts(4, 6, 8))
