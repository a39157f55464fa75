import torch

from damex.moe import active_share, distinct_patterns

FIRST = torch.tensor([[1.0, 0.0, 2.0], [0.5, 0.0, 0.5], [0.0, 0.0, 9.0]])
SECOND = torch.tensor([[0.25, 0.0], [4.0, 0.0], [4.0, 0.0]])


def test_active_share_by_hand():
    # Open: 2 + 2 + 1 of 9 and 1 + 1 + 1 of 6.
    assert active_share([FIRST, SECOND]).item() == torch.tensor(8 / 15).item()


def test_patterns_are_sets_of_open_channels():
    # Images 0 and 1 open the same channels by other amounts; image 2 opens fewer.
    assert distinct_patterns([FIRST, SECOND]) == 2
    # Two layers make a pattern together: here the second tells images 0 and 1 apart.
    other = torch.tensor([[0.25, 1.0], [4.0, 0.0], [4.0, 0.0]])
    assert distinct_patterns([FIRST, other]) == 3
    assert distinct_patterns([SECOND]) == 1
