"""Arguments that cannot work are rejected by an error with field and value."""

from functools import partial

import pytest
import torch
from torch import nn

from damex.moe import (
    Assignment,
    BiasBalancer,
    ChainedOptimizer,
    CosineRouter,
    FFNExperts,
    LinearRouter,
    LoadLoss,
    LowRankExperts,
    NormalizedGD,
    Packing,
    RouterZLoss,
    RoutingRecord,
    SeparateRouterLoss,
    TopKGate,
    expert_groups,
    expert_parameters,
)
from damex.moe.grouped import grouped_linear
from damex.papers.channels import ShallowEmbedding
from damex.papers.dense_gates import DenseToSparseGate
from damex.papers.expert_choice import ExpertChoiceGate
from damex.papers.patches import PatchConvExperts, route_patches
from tests.test_moe.layers import D, make_layer, needs_grouped_mm

CONV = dict(num_experts=3, in_channels=4, out_channels=6, patch_size=2)
NONE = dict(group_experts=None)
INDEX, ONES = torch.tensor([0, 4]), torch.ones(2)
PAIR = Assignment.from_pairs(
    INDEX[:1], INDEX[:1], ONES[:1], num_tokens=1, num_experts=2
)
pairs = partial(Assignment.from_pairs, num_tokens=4, num_experts=3)


def one_parameter_in_two_optimizers():
    weight = nn.Parameter(torch.zeros(2, 2))
    ChainedOptimizer(torch.optim.SGD([weight]), NormalizedGD([weight]))


def optimize(*shapes, **options):
    NormalizedGD([nn.Parameter(torch.zeros(shape)) for shape in shapes], **options)


def multiply(width=8, **options):
    x, weight = torch.zeros(3, width), torch.zeros(2, width, 16)
    dtype = options.pop("dtype", torch.float32)
    x, weight = x.to(dtype), weight.to(dtype)
    grouped_linear(x, weight, None, torch.tensor([2, 1]), **options)


CASES = [
    (lambda: FFNExperts(0, 4, 8), "num_experts must be an integer of 1 or more, got 0"),
    (lambda: FFNExperts(2, 4, 8, activation="swish"), "activation 'swish'.*'silu'"),
    (lambda: FFNExperts(2, 4, 8, backend="cutlass"), "unknown backend 'cutlass'"),
    (lambda: LowRankExperts(3, 8, 9), "rank must be at most embed_dims=8, .*got 9"),
    (lambda: PatchConvExperts(**CONV | dict(num_experts=4)), "4 experts and 6 cha"),
    (lambda: PatchConvExperts(**CONV, kernel_size=2), "odd positive integer, got 2"),
    (lambda: PatchConvExperts(**CONV | dict(patch_size=0)), "patch_size must .* got 0"),
    (lambda: CosineRouter(4, 2, init_temperature=0.001), "got 0.01 and 0.001"),
    (lambda: expert_groups(3, 2), "got 3 groups and 2 experts"),
    (lambda: TopKGate(3)(torch.zeros(1, 2)), "k=3 experts .* only 2 experts"),
    (lambda: TopKGate(noise_scale=1.0), "no effect without noise"),
    (lambda: BiasBalancer(2)(torch.zeros(1, 3)), "for 2 experts, .* router scores 3"),
    (lambda: DenseToSparseGate().eval()(torch.zeros(1, 128)), "of 0.0078 or"),
    (
        lambda: LoadLoss().check_layer(
            gate=TopKGate(noise="gaussian", noise_scale=1.0), num_groups=None
        ),
        "noise_std=None and noise_scale=1.0 of the gate differ",
    ),
    (
        lambda: LoadLoss().check_layer(gate=TopKGate(noise="uniform"), num_groups=None),
        "needs noise='gaussian'",
    ),
    (lambda: ExpertChoiceGate(num_tokens=2, share=0.5), "one of .* got 2 and 0.5"),
    (lambda: ExpertChoiceGate(share=1, weights="one", mean_one=True), "mean_one out"),
    (lambda: pairs(INDEX, 0 * INDEX, ONES), r"token_index .*\[0, 4\).* from 0 to 4"),
    (lambda: pairs(0 * INDEX, INDEX, ONES), r"expert_index must lie in \[0, 3\)"),
    (lambda: pairs(INDEX, INDEX, ONES[:1]), r"of one length, got shapes .*\(1,\)"),
    (lambda: Packing.of_mask(torch.ones(2, 3)), r"\(B, N\), got torch.float32"),
    (
        lambda: make_layer(router=lambda e: LinearRouter(D, 3)),
        "scores 3 experts, but there are 4",
    ),
    (lambda: route_patches(make_layer(), torch.zeros(1, D, 2, 2)), "got FFNExperts"),
    (lambda: make_layer(group_experts=[]), "at least one dataset group"),
    (lambda: make_layer(group_experts=[[0], []]), "group 1 must name one or more"),
    (
        lambda: make_layer(group_experts=[[0], [4]]),
        r"group 1 must .*\[0, 4\), got \[4\]",
    ),
    (
        lambda: make_layer(group_experts=None, losses=[SeparateRouterLoss()]),
        "needs group_experts",
    ),
    (lambda: make_layer(losses=[RouterZLoss()] * 2), "two losses share a name"),
    (lambda: make_layer(losses=[RouterZLoss(weight=-1)]), "'router_z': weight must"),
    (
        lambda: LoadLoss()(RoutingRecord(torch.zeros(1, 2), Packing(1, 1), PAIR)),
        "same number of experts",
    ),
    (lambda: optimize((2, 2), (3, 2)), r"group 0 .* got shapes \[\(2, 2\), \(3, 2\)"),
    (lambda: expert_parameters(nn.Linear(2, 2)), "no MoELayer"),
    (one_parameter_in_two_optimizers, "more than one parameter group"),
    (lambda: ShallowEmbedding(2, widths=()), "one or more positive widths"),
    (
        lambda: ShallowEmbedding(2)(
            torch.zeros(1, 3, 8, 8), torch.ones(1, 8, 9, dtype=torch.bool)
        ),
        r"bool of shape \(1, 8, 8\), got torch.bool",
    ),
]


@pytest.mark.parametrize(("call", "message"), CASES, ids=[text for _, text in CASES])
def test_what_cannot_work_is_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@needs_grouped_mm
def test_grouped_mm_names_what_it_lacks():
    with pytest.raises(ValueError, match=r"not torch.float64; use backend='auto'"):
        multiply(dtype=torch.float64, backend="grouped_mm")
    with pytest.raises(ValueError, match=r"16 bytes, which widths \(30, 16\)"):
        multiply(30, backend="grouped_mm")
