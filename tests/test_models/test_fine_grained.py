"""Fine-grained experts start equal to the dense detector that they are cut from."""

import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN

from damex.errors import ConfigError
from damex.models.blocks import MoEFFN
from damex.models.config import FineGrained
from damex.models.context import RoutingContext
from damex.models.insertion import moe_blocks
from damex.models.starts import SplitStart, cut_hidden_dims
from damex.moe import (
    FFNExperts,
    LinearRouter,
    MoELayer,
    SharedExpert,
    TopKGate,
)

SHARED = dict(
    layers=dict(decoder="all"), fine_grained=dict(parts=4, shared=3, copies=4)
)
FINE = dict(layers=dict(decoder="all"), fine_grained=dict(parts=2, copies=4))


def make_block(
    *, parts, copies, hidden_dims, shared=0, activation="relu", embed_dims=8
):
    fine = FineGrained(parts=parts, copies=copies, shared=shared)
    width, routed = cut_hidden_dims(hidden_dims, parts=parts, shared=shared)
    layer = MoELayer(
        router=LinearRouter(embed_dims, fine.num_experts, init_std=1.0),
        gate=TopKGate(**fine.gate),
        experts=FFNExperts(fine.num_experts, embed_dims, routed, activation=activation),
        shared_expert=SharedExpert(embed_dims, width, activation=activation)
        if width
        else None,
    )
    split = SplitStart(parts=fine.routed, hidden_dims=hidden_dims)
    return MoEFFN(layer, name="decoder.0", context=RoutingContext(), split=split)


@pytest.mark.parametrize("activation", ["ReLU", "PReLU"])
@pytest.mark.parametrize("hidden_dims", [12, 13, 17])
@pytest.mark.parametrize(
    ("parts", "shared", "copies"),
    [(1, 0, 4), (2, 0, 4), (3, 0, 2), (4, 3, 8), (4, 1, 2), (4, 2, 3), (2, 1, 1)],
)
def test_a_block_equals_the_ffn_that_it_loads(
    parts, shared, copies, hidden_dims, activation
):
    torch.manual_seed(0)
    sizes = dict(parts=parts, shared=shared, copies=copies, hidden_dims=hidden_dims)
    block = make_block(**sizes, activation=activation.lower())
    act_cfg = dict(type=activation)
    dense = FFN(embed_dims=8, feedforward_channels=hidden_dims, act_cfg=act_cfg)
    if activation == "PReLU":
        torch.nn.init.constant_(dense.layers[0][1].weight, 0.7)
    with torch.no_grad():  # a router that forgot its ties: loading ties it again
        block.moe.router.weight_ED.normal_()
    block.load_state_dict(dense.state_dict())
    tokens = torch.randn(2, 50, 8)
    assert (block(tokens) - dense(tokens)).abs().max() <= 1e-5
    other = make_block(**sizes, activation=activation.lower())
    other.load_state_dict(block.state_dict())
    assert torch.equal(other(tokens), block(tokens))


# H = 3, D = 1
DENSE = {
    "layers.0.0.weight": torch.tensor([[1.0], [2.0], [3.0]]),
    "layers.0.0.bias": torch.tensor([4.0, 5.0, 6.0]),
    "layers.1.weight": torch.tensor([[7.0, 8.0, 9.0]]),
    "layers.1.bias": torch.tensor([10.0]),
}


def test_layout_by_hand():
    """Units 0, 1 and unit 2 are parts; b2 is halved; experts 0 and 2 are part 0."""
    block = make_block(parts=2, copies=2, hidden_dims=3, embed_dims=1)
    experts = block.moe.experts
    first = experts.w1_EDH.detach().clone()
    block.load_state_dict(DENSE)
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
    """Units 0 and 1 are shared, with the bias; unit 2 is in both copies."""
    block = make_block(parts=3, shared=2, copies=2, hidden_dims=3, embed_dims=1)
    block.load_state_dict(DENSE)
    shared, experts = block.moe.shared_expert.expert, block.moe.experts
    # 14 units in four parts: 4, 4, 3, 3
    widths = [cut_hidden_dims(14, parts=4, shared=shared) for shared in range(4)]
    assert widths == [(0, 4), (4, 4), (8, 3), (11, 3)]
    assert shared.w1_EDH.tolist() == [[[1.0, 2.0]]]
    assert shared.b1_EH.tolist() == [[4.0, 5.0]]
    assert shared.w2_EHD.tolist() == [[[7.0], [8.0]]]
    assert shared.b2_ED.tolist() == [[10.0]]
    assert experts.w1_EDH.tolist() == [[[3.0]]] * 2
    assert experts.b1_EH.tolist() == [[6.0]] * 2
    assert experts.w2_EHD.tolist() == [[[9.0]]] * 2
    assert experts.b2_ED.tolist() == [[0.0]] * 2


@pytest.mark.parametrize("hidden_dims", [11, 13])  # 12 and 11 have parts of one width
def test_an_ffn_of_another_width_is_reported_by_the_loader(hidden_dims):
    block = make_block(parts=2, copies=2, hidden_dims=12)
    dense = FFN(embed_dims=8, feedforward_channels=hidden_dims)
    with pytest.raises(RuntimeError, match="Missing key"):
        block.load_state_dict(dense.state_dict())


def test_all_copies_draw_one_ffn_when_there_is_no_checkpoint():
    torch.manual_seed(0)
    block = make_block(parts=2, copies=3, hidden_dims=12)
    block.reset_parameters()
    experts, router = block.moe.experts, block.moe.router
    w1 = experts.w1_EDH.view(3, 2, 8, 6)  # copies, parts
    assert torch.equal(w1[0], w1[1])
    assert torch.equal(w1[0], w1[2])
    assert not torch.equal(w1[0, 0], w1[0, 1])
    # Xavier bound of the whole FFN, 8 -> 12, not of a part: sqrt(6 / 20) > sqrt(6 / 14)
    assert w1.abs().max() <= (6 / 20) ** 0.5
    assert torch.equal(router.weight_ED[0::2], router.weight_ED[1::2])
    assert not torch.equal(router.weight_ED[0], router.weight_ED[2])


@pytest.mark.parametrize("hidden_dims", [12, 13])
@pytest.mark.parametrize(("parts", "shared"), [(4, 3), (3, 1)])
def test_a_shared_part_and_each_copy_are_one_drawn_ffn(parts, shared, hidden_dims):
    torch.manual_seed(0)
    sizes = dict(parts=parts, shared=shared, hidden_dims=hidden_dims)
    block = make_block(**sizes, copies=3)
    block.reset_parameters()
    moe, routed = block.moe, parts - shared
    banks = [(moe.shared_expert.expert, slice(0, 1))]
    banks.append((moe.experts, slice(routed, 2 * routed)))  # the second copy
    used = [(bank, e) for bank, ids in banks for e in range(bank.num_experts)[ids]]
    units = sum(bank.hidden_dims for bank, _ in used)
    assert hidden_dims <= units <= hidden_dims + 1  # (H=13, 3 - 1): 4 + 4 + 5
    dense = FFN(embed_dims=8, feedforward_channels=units)
    with torch.no_grad():
        first, second = dense.layers[0][0], dense.layers[1]
        first.weight.copy_(torch.cat([b.w1_EDH[e] for b, e in used], dim=1).T)
        first.bias.copy_(torch.cat([b.b1_EH[e] for b, e in used]))
        second.weight.copy_(torch.cat([b.w2_EHD[e] for b, e in used]).T)
        second.bias.copy_(moe.shared_expert.expert.b2_ED[0])
    assert not moe.experts.b2_ED.any()
    # Drawn as a whole: the xavier bound is that of 8 -> H, and reached in both.
    bound = (6 / (8 + hidden_dims)) ** 0.5
    for bank, e in used:
        live = bank.w1_EDH[e][:, bank.w2_EHD[e].any(dim=1)]
        assert 0.8 * bound < live.abs().max() <= bound
    tokens = torch.randn(2, 50, 8)
    assert (block(tokens) - dense(tokens)).abs().max() <= 1e-5


# A gate of one expert per token, with one weight, may be any: all copies are equal.
@pytest.mark.parametrize("moe", ["fine_grained", "damex_shared_private"])
def test_a_detector_predicts_as_the_dense_one_whose_checkpoint_it_loads(
    build, make_batch, run_predict, moe
):
    dense = build(moe=None)
    fine = build(moe=moe)
    fine.load_state_dict(dense.state_dict())
    batch = make_batch([0, 1], sizes=[(64, 64), (64, 40)])
    pairs = zip(run_predict(fine, batch), run_predict(dense, batch), strict=True)
    for ours, theirs in pairs:
        a, b = ours.pred_instances, theirs.pred_instances
        torch.testing.assert_close(a.scores, b.scores, rtol=0, atol=1e-4)
        torch.testing.assert_close(a.bboxes, b.bboxes, rtol=1e-4, atol=1e-3)
        assert torch.equal(a.labels, b.labels)
    # more than one copy is in use, so that this says something
    counts = torch.tensor(run_predict(fine, batch)[0].routing_counts["decoder.0"])
    assert (counts > 0).sum() >= 2


def test_experts_gate_and_widths_follow_from_the_parts(build):
    moe = moe_blocks(build(moe=FINE))[0].moe
    assert (moe.num_experts, moe.experts.hidden_dims) == (8, 128)  # half of 256
    assert (moe.gate.k, moe.gate.renormalize, moe.gate.weight_scale) == (2, True, 2.0)
    # also after the detector drew its weights
    assert torch.equal(moe.router.weight_ED[0::2], moe.router.weight_ED[1::2])
    assert torch.equal(moe.experts.w1_EDH[:2], moe.experts.w1_EDH[2:4])
    experts = dict(type="FFNExperts", activation="gelu", dropout=0.1)
    moe = moe_blocks(build(moe={**SHARED, "experts": experts}))[0].moe
    shared = moe.shared_expert.expert
    assert (shared.hidden_dims, moe.experts.hidden_dims) == (192, 64)  # of 256
    assert (moe.num_experts, moe.gate.k, moe.gate.weight_scale) == (4, 1, 1.0)
    assert (shared.activation, shared.dropout) == ("gelu", 0.1)  # parts of one FFN
    three = dict(fine_grained=dict(parts=4, shared=1, copies=2))
    moe = moe_blocks(build(moe={**SHARED, **three}))[0].moe
    assert (moe.num_experts, moe.gate.k, moe.gate.weight_scale) == (6, 3, 3.0)
    assert torch.equal(moe.router.weight_ED[:3], moe.router.weight_ED[:1].expand(3, -1))
    assert moe.group_experts_GE is None  # three groups, two copies


def test_one_routed_part_takes_any_router_and_noise(build, make_batch, run_loss, total):
    moe = dict(
        SHARED,
        router=dict(type="HierarchicalRouter"),
        gate=dict(type="TopKGate", noise="gaussian"),
        losses=[dict(type="DatasetRoutingLoss")],
    )
    detector = build(moe=moe)
    total(run_loss(detector, make_batch([0, 2]))).backward()
    found = moe_blocks(detector)[0].moe.named_parameters()
    assert [name for name, p in found if p.grad is None] == []


@pytest.mark.parametrize(
    ("fine", "groups", "expected"),
    [
        (dict(parts=2, copies=4), 2, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        # no copy is cut between two groups
        (dict(parts=2, copies=4), 3, [[0, 1, 2, 3], [4, 5], [6, 7]]),
        (dict(parts=2, copies=4), 4, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (dict(parts=4, shared=2, copies=4), 3, [[0, 1, 2, 3], [4, 5], [6, 7]]),
    ],
)
def test_groups_of_datasets_get_whole_copies(build, fine, groups, expected):
    detector = build(moe={**FINE, "fine_grained": fine}, num_groups=groups)
    group_experts_GE = moe_blocks(detector)[0].moe.group_experts_GE
    assert [row.nonzero().flatten().tolist() for row in group_experts_GE] == expected


def cut(parts, copies=2, **changes):
    return dict(fine_grained=dict(parts=parts, copies=copies, **changes))


ONE = cut(4, 4, shared=3)  # of which one routed part
SHARED_EXPERT = dict(shared_expert=dict(type="SharedExpert"))
COSINE = dict(router=dict(type="CosineRouter", proj_dims=8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(fine_grained=dict(parts=2)), "copies must be an integer .*got None"),
        (cut(300), r"fine_grained: .*parts must lie in \[1, H=256\], got 300"),
        (cut(4, shared=4), r"shared must lie in \[0, parts=4\), .*got 4"),
        (dict(num_experts=6), r"moe.num_experts is 6, .*= 8 experts"),
        (dict(**ONE, num_experts=6), r"6, .*\(parts - shared\) \* copies = 4"),
        (dict(gate=dict(k=1)), "moe.gate.k is 1, .*must be 2"),
        (dict(**ONE, gate=dict(k=2)), "moe.gate.k is 2, .*must be 1"),
        (dict(gate=dict(noise="gaussian")), "gate.noise is 'gauss.*must be None"),
        (COSINE, "moe.router is 'CosineRouter', .*must be 'LinearRouter'"),
        (SHARED_EXPERT, "moe.shared_expert is 'SharedExpert', .*must be None"),
        (dict(block=dict(norm="pre")), "moe.block.norm is 'pre', .*must be 'post'"),
        (
            dict(**cut(2), losses=[dict(type="DatasetRoutingLoss")]),
            "3 dataset groups but moe.fine_grained.copies is 2; set copies=3",
        ),
    ],
)
def test_errors_are_one_line_with_field_value_and_choice(build, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(moe={**FINE, **changes})
    assert "\n" not in str(caught.value)
