"""Fine-grained experts start equal to the dense detector that they are cut from."""

import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN

from damex.errors import ConfigError
from damex.models.blocks import MoEFFN
from damex.models.config import FineGrained
from damex.models.context import RoutingContext
from damex.models.insertion import moe_blocks
from damex.models.upcycling import SplitStart
from damex.moe import FFNExperts, LinearRouter, MoELayer, TopKGate, split_hidden_dims

FINE = dict(layers=dict(decoder="all"), fine_grained=dict(parts=2, copies=4))


def make_block(*, parts, copies, hidden_dims, activation="relu"):
    fine = FineGrained(parts=parts, copies=copies)
    layer = MoELayer(
        router=LinearRouter(8, fine.num_experts, init_std=1.0),
        gate=TopKGate(**fine.gate),
        experts=FFNExperts(
            fine.num_experts,
            8,
            split_hidden_dims(hidden_dims, parts=parts),
            activation=activation,
        ),
    )
    split = SplitStart(parts=parts, hidden_dims=hidden_dims)
    return MoEFFN(layer, name="decoder.0", context=RoutingContext(), split=split)


@pytest.mark.parametrize("hidden_dims", [12, 13, 17])
@pytest.mark.parametrize(("parts", "copies"), [(1, 4), (2, 4), (3, 2)])
def test_a_block_equals_the_ffn_that_it_loads(parts, copies, hidden_dims):
    torch.manual_seed(0)
    block = make_block(parts=parts, copies=copies, hidden_dims=hidden_dims)
    dense = FFN(embed_dims=8, feedforward_channels=hidden_dims)
    with torch.no_grad():  # a router that forgot its ties: loading ties it again
        block.moe.router.weight_ED.normal_()
    block.load_state_dict(dense.state_dict())
    tokens = torch.randn(2, 50, 8)
    assert (block(tokens) - dense(tokens)).abs().max() <= 1e-5
    other = make_block(parts=parts, copies=copies, hidden_dims=hidden_dims)
    other.load_state_dict(block.state_dict())
    assert torch.equal(other(tokens), block(tokens))


def test_a_block_with_prelus_equals_the_ffn_that_it_loads():
    torch.manual_seed(0)
    block = make_block(parts=2, copies=4, hidden_dims=12, activation="prelu")
    dense = FFN(embed_dims=8, feedforward_channels=12, act_cfg=dict(type="PReLU"))
    torch.nn.init.constant_(dense.layers[0][1].weight, 0.7)
    block.load_state_dict(dense.state_dict())
    tokens = torch.randn(2, 50, 8)
    assert (block(tokens) - dense(tokens)).abs().max() <= 1e-5


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


def test_a_detector_predicts_as_the_dense_one_whose_checkpoint_it_loads(
    build, make_batch, run_predict
):
    dense = build(moe=None)
    fine = build(moe="fine_grained")
    fine.load_state_dict(dense.state_dict())
    batch = make_batch([0, 1], sizes=[(64, 64), (64, 32)])
    pairs = zip(run_predict(fine, batch), run_predict(dense, batch), strict=True)
    for ours, theirs in pairs:
        a, b = ours.pred_instances, theirs.pred_instances
        torch.testing.assert_close(a.scores, b.scores, rtol=0, atol=1e-4)
        torch.testing.assert_close(a.bboxes, b.bboxes, rtol=1e-4, atol=1e-3)
        assert torch.equal(a.labels, b.labels)
    # more than one copy is in use, so that this says something
    counts = torch.tensor(run_predict(fine, batch)[0].routing_counts["decoder.0"])
    assert (counts > 0).sum() >= 2


def test_experts_gate_and_width_follow_from_parts_and_copies(build):
    moe = moe_blocks(build(moe=FINE))[0].moe
    assert moe.num_experts == 8
    assert moe.experts.hidden_dims == 128  # half of 256
    assert (moe.gate.k, moe.gate.renormalize, moe.gate.weight_scale) == (2, True, 2.0)
    # also after the detector drew its weights
    assert torch.equal(moe.router.weight_ED[0::2], moe.router.weight_ED[1::2])
    assert torch.equal(moe.experts.w1_EDH[:2], moe.experts.w1_EDH[2:4])


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        (2, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (3, ((0, 1, 2, 3), (4, 5), (6, 7))),  # no copy is cut between two groups
        (4, ((0, 1), (2, 3), (4, 5), (6, 7))),
    ],
)
def test_groups_of_datasets_get_whole_copies(build, groups, expected):
    block = moe_blocks(build(moe=FINE, num_groups=groups))[0]
    ids = [row.nonzero().flatten().tolist() for row in block.moe.group_experts_GE]
    assert tuple(map(tuple, ids)) == expected


def test_the_dataset_loss_goes_with_fine_grained_experts(build, make_batch, run_loss):
    detector = build(moe={**FINE, "losses": [dict(type="DatasetRoutingLoss")]})
    loss = run_loss(detector, make_batch([0, 2]))["loss_moe_dataset_routing"]
    loss.backward()
    # Untrained: half of the tokens -log(4 / 8), half -log(2 / 8), times 0.1.
    assert loss.item() == pytest.approx(0.1 * (0.693 + 1.386) / 2, abs=0.02)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(fine_grained=2),
            r"moe.fine_grained must be .*dict\(parts=2, .*got 2",
        ),
        (dict(fine_grained=dict(parts=2)), "copies must be an integer .*got None"),
        (dict(fine_grained=dict(parts=0, copies=2)), "parts must be .*got 0"),
        (
            dict(fine_grained=dict(part=2, copies=2)),
            "unknown key 'part'; did you mean 'parts'",
        ),
        (
            dict(fine_grained=dict(parts=300, copies=3)),
            r"moe.fine_grained: .*parts must lie in \[1, H=256\], got 300",
        ),
        (dict(num_experts=6), r"moe.num_experts is 6, .*= 8 experts"),
        (dict(gate=dict(type="TopKGate", k=1)), "moe.gate.k is 1, .*must be 2"),
        (
            dict(gate=dict(type="TopKGate", noise="gaussian")),
            "moe.gate.noise is 'gaussian', .*must be None",
        ),
        (
            dict(router=dict(type="CosineRouter", proj_dims=8)),
            "moe.router is 'CosineRouter', .*must be 'LinearRouter'",
        ),
        (
            dict(shared_expert=dict(type="SharedExpert")),
            "moe.shared_expert is 'SharedExpert', .*must be None",
        ),
        (dict(block=dict(norm="pre")), "moe.block.norm is 'pre', .*must be 'post'"),
        (
            dict(
                fine_grained=dict(parts=2, copies=2),
                losses=[dict(type="DatasetRoutingLoss")],
            ),
            "3 dataset groups but moe.fine_grained.copies is 2; set copies=3",
        ),
    ],
)
def test_errors_are_one_line_with_field_value_and_choice(build, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(moe={**FINE, **changes})
    assert "\n" not in str(caught.value)
