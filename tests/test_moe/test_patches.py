"""Tests of damex.papers.patches."""

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from damex.moe import LinearRouter, MoELayer, Packing, TopKGate
from damex.papers.expert_choice import ExpertChoiceGate
from damex.papers.patches import (
    PatchConvExperts,
    merge_patches,
    patch_grid,
    real_patches,
    route_patches,
    split_patches,
)


def test_a_halo_shows_the_neighbors_and_zeros_outside():
    map_BCHW = torch.arange(1.0, 5.0).view(1, 1, 2, 2)
    patches = split_patches(map_BCHW, (1, 2), halo=1)
    above, below = patches[0, :, 0].tolist()
    assert above == [[0, 0, 0, 0], [0, 1, 2, 0], [0, 3, 4, 0]]
    assert below == [[0, 1, 2, 0], [0, 3, 4, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("size", [(4, 6), (5, 7), (1, 1), (3, 2)])
@pytest.mark.parametrize("patch_size", [(1, 1), (2, 3), (4, 4)])
def test_merging_undoes_splitting(size, patch_size):
    map_BCHW = torch.randn(2, 3, *size)
    patches = split_patches(map_BCHW, patch_size)
    down, across = patch_grid(size, patch_size)
    assert patches.shape == (2, down * across, 3, *patch_size)
    assert torch.equal(merge_patches(patches, size), map_BCHW)


def test_patches_that_touch_the_image_are_real():
    # A map of 5 x 4 cells in patches of 2 x 2: a grid of 3 x 2 patches.
    share_B2 = torch.tensor([[1.0, 1.0], [0.4, 1.0], [0.6, 0.5], [0.41, 0.51]])
    mask = real_patches(share_B2, (5, 4), (2, 2)).view(4, 3, 2).int()
    # rows of image: 5, 2, 3, 2.05; columns: 4, 4, 2, 2.04
    assert mask[0].tolist() == [[1, 1], [1, 1], [1, 1]]
    assert mask[1].tolist() == [[1, 1], [0, 0], [0, 0]]
    assert mask[2].tolist() == [[1, 0], [1, 0], [0, 0]]
    assert mask[3].tolist() == [[1, 1], [1, 1], [0, 0]]


def test_a_share_in_float32_does_not_add_a_patch():
    # 3/7 of 7 rows is 3.0000002 in float32 and has to stay 3 rows.
    share_B2 = torch.tensor([[3 / 7, 6 / 7]])
    mask = real_patches(share_B2, (7, 7), (1, 1)).view(7, 7)
    assert mask.sum(0).tolist() == [3, 3, 3, 3, 3, 3, 0]


def make_layer(gate, *, patch_size=2, experts=3, channels=4, **kwargs):
    torch.manual_seed(0)
    convs = {
        name: kwargs.pop(name) for name in ("kernel_size", "border") & kwargs.keys()
    }
    bank = PatchConvExperts(experts, channels, 6, patch_size=patch_size, **convs)
    router = LinearRouter(bank.embed_dims, experts, init_std=0.5)
    return MoELayer(router=router, gate=gate, experts=bank, **kwargs)


def masked_reference(moe, map_BCHW, record):
    """Every expert convolves every patch; a mask of weights picks afterwards."""
    bank, size = moe.experts, tuple(map_BCHW.shape[2:])
    weight_VE = torch.zeros_like(record.logits_VE)
    routes = record.assignment
    weight_VE = weight_VE.index_put(
        (routes.token_index_R, routes.expert_index_R), routes.weight_R
    )
    patches = split_patches(map_BCHW, bank.patch_size)
    images, count = patches.shape[:2]
    outs = []
    for expert in range(moe.num_experts):
        weight_OCKK = bank.weight_EOCKK[expert]
        padding = bank.kernel_size // 2
        if bank.border == "neighbours":
            # cells that hang over are cut off at the end
            pad = [-side % p for side, p in zip(size, bank.patch_size, strict=True)]
            whole = functional.pad(map_BCHW, (0, pad[1], 0, pad[0]))
            out = functional.conv2d(whole, weight_OCKK, padding=padding)
            out = split_patches(out, bank.patch_size)
        else:
            out = functional.conv2d(patches.flatten(0, 1), weight_OCKK, padding=padding)
            out = out.unflatten(0, (images, count))
        outs.append(out * weight_VE[:, expert].view(images, count, 1, 1, 1))
    return merge_patches(torch.cat(outs, dim=2), size)


@pytest.mark.parametrize("border", ["zeros", "neighbours"])
@pytest.mark.parametrize("kernel_size", [1, 3])
@pytest.mark.parametrize(
    "gate",
    [
        ExpertChoiceGate(num_tokens=2),
        ExpertChoiceGate(share=0.4, weights="all"),
        TopKGate(1),
    ],
    ids=["selected", "all", "top1"],
)
def test_gathered_patches_equal_masked_ones_in_outputs_and_gradients(
    gate, kernel_size, border
):
    moe = make_layer(gate, kernel_size=kernel_size, border=border).double()
    base = torch.randn(2, 4, 5, 6, dtype=torch.double)
    found = []
    for masked in (False, True):
        map_BCHW = base.clone().requires_grad_()
        moe.zero_grad()
        out, record = route_patches(moe, map_BCHW)
        if masked:
            out = masked_reference(moe, map_BCHW, record)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        grads = [map_BCHW.grad, *(p.grad.clone() for p in moe.parameters())]
        found.append([out.detach(), *grads])
    for gathered, reference in zip(*found, strict=True):
        torch.testing.assert_close(gathered, reference)
    assert all(part.abs().sum() > 0 for part in found[0])


@pytest.mark.parametrize("num_patches", [1, 2, 4, 8])
def test_flops_are_l_of_n_of_the_dense_convolution(num_patches):
    moe = make_layer(ExpertChoiceGate(num_tokens=num_patches))
    map_BCHW = torch.randn(2, 4, 4, 8)  # 8 patches of 2 x 2
    with FlopCounterMode(display=False) as counter:
        route_patches(moe, map_BCHW)
    counts = counter.get_flop_counts()["Global"]
    found = counts[torch.ops.aten.convolution]
    # 2 images x 32 cells x 4 channels in x 6 out x 9 kernel cells, multiply and add
    dense = 2 * 32 * 4 * 6 * 9 * 2
    assert found == dense * num_patches // 8
    # the router: 16 patches of 16 numbers for 3 experts, multiply and add
    assert sum(counts.values()) - found == 16 * 16 * 3 * 2


def test_padding_is_not_routed_and_changes_nothing():
    moe = make_layer(ExpertChoiceGate(share=0.5))
    map_BCHW = torch.randn(1, 4, 4, 4)
    alone, _ = route_patches(moe, map_BCHW)
    padded = torch.full((1, 4, 6, 8), 1e6)
    padded[..., :4, :4] = map_BCHW
    mask_BN = torch.zeros(1, 3, 4, dtype=torch.bool)
    mask_BN[:, :2, :2] = True
    out, record = route_patches(
        moe, padded, packing=Packing.of_mask(mask_BN.flatten(1))
    )
    torch.testing.assert_close(out[..., :4, :4], alone)
    assert out[..., 4:, :].abs().sum() == out[..., 4:].abs().sum() == 0
    assert record.assignment.counts_E.tolist() == [2, 2, 2]
