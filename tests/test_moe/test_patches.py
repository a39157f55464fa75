"""Tests of damex.moe.patches."""

from __future__ import annotations

import pytest
import torch

from damex.moe import merge_patches, patch_grid, real_patches, split_patches


def test_patches_by_hand():
    map_BCHW = torch.arange(12.0).view(1, 1, 3, 4)
    # 0 1 | 2 3
    # 4 5 | 6 7
    # ----+----   and a row of zeros below the last
    # 8 9 | 10 11
    patches = split_patches(map_BCHW, (2, 2))
    expected = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 0, 0], [10, 11, 0, 0]]
    assert patches.flatten(2).tolist() == [expected]


def test_a_halo_shows_the_neighbours_and_zeros_outside():
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
