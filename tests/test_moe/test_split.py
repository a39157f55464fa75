"""Tests of damex.moe.split."""

from __future__ import annotations

import torch

from damex.moe import (
    FFNExperts,
    SharedExpert,
    load_dense_split,
    load_shared_split,
    shared_hidden_dims,
)

DENSE = (
    torch.tensor([[1.0], [2.0], [3.0]]),
    torch.tensor([4.0, 5.0, 6.0]),
    torch.tensor([[7.0, 8.0, 9.0]]),
    torch.tensor([10.0]),
)


def test_layout_by_hand():
    # H = 3 in two parts: units 0, 1 and unit 2; b2 is halved; experts 0, 2 are part 0
    experts = FFNExperts(4, 1, 2)
    first = experts.w1_EDH.detach().clone()
    load_dense_split(experts, *DENSE, parts=2)
    assert experts.b2_ED.tolist() == [[5.0]] * 4
    for copy in (0, 2):
        assert experts.w1_EDH[copy].tolist() == [[1.0, 2.0]]
        assert experts.b1_EH[copy].tolist() == [4.0, 5.0]
        assert experts.w2_EHD[copy].tolist() == [[7.0], [8.0]]
        assert experts.w1_EDH[copy + 1, 0, 0] == 3.0
        assert experts.b1_EH[copy + 1, 0] == 6.0
        # the unit over: zero behind, as it was drawn before
        assert experts.w2_EHD[copy + 1].tolist() == [[9.0], [0.0]]
        assert experts.w1_EDH[copy + 1, 0, 1] == first[copy + 1, 0, 1] != 0


def test_layout_with_a_shared_expert_by_hand():
    # H = 3: units 0 and 1 are shared, with the bias; unit 2 is in every copy
    shared, experts = SharedExpert(1, 2), FFNExperts(2, 1, 1)
    load_shared_split(shared, experts, *DENSE, parts=1)
    # 14 units in four parts: 4, 4, 3, 3
    counts = [shared_hidden_dims(14, parts=4, shared=shared) for shared in range(4)]
    assert counts == [0, 4, 8, 11]
    assert shared.expert.w1_EDH.tolist() == [[[1.0, 2.0]]]
    assert shared.expert.b1_EH.tolist() == [[4.0, 5.0]]
    assert shared.expert.w2_EHD.tolist() == [[[7.0], [8.0]]]
    assert shared.expert.b2_ED.tolist() == [[10.0]]
    assert experts.w1_EDH.tolist() == [[[3.0]]] * 2
    assert experts.b1_EH.tolist() == [[6.0]] * 2
    assert experts.w2_EHD.tolist() == [[[9.0]]] * 2
    assert experts.b2_ED.tolist() == [[0.0]] * 2
    # x = 1: 7 relu(1 + 4) + 8 relu(2 + 5) + 9 relu(3 + 6) + 10 = 182
    tokens = torch.ones(2, 1)
    out = shared(tokens) + experts(tokens, torch.tensor([1, 1]))
    assert out.tolist() == [[182.0]] * 2
