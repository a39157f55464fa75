import pytest

from damex.moe import expert_groups


@pytest.mark.parametrize(
    ("groups", "experts", "expected"),
    [
        (3, 3, ((0,), (1,), (2,))),
        (2, 4, ((0, 1), (2, 3))),
        (3, 5, ((0, 1), (2, 3), (4,))),  # 5 = 1 * 3 + 2: the first two get one more
        (1, 2, ((0, 1),)),
    ],
)
def test_experts_are_shared_out_evenly_and_in_order(groups, experts, expected):
    assert expert_groups(groups, experts) == expected


@pytest.mark.parametrize(("groups", "experts"), [(3, 2), (0, 2)])
def test_groups_without_experts_are_refused(groups, experts):
    with pytest.raises(ValueError, match=f"got {groups} groups and {experts} experts"):
        expert_groups(groups, experts)
