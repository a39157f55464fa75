"""MoE blocks in the places of FFNs and convolutions."""

import copy

import pytest
import torch
from mmdet.registry import MODELS
from torch import nn

from damex.models.blocks import MoEFFN
from damex.models.context import RoutingContext
from damex.models.insertion import moe_blocks
from damex.moe import FFNExperts, LinearRouter, MoELayer, TopKGate


def make_block(**options):
    torch.manual_seed(0)
    gate, experts = TopKGate(k=2, renormalize=True), FFNExperts(3, 8, 16)
    layer = MoELayer(router=LinearRouter(8, 3), gate=gate, experts=experts)
    return MoEFFN(layer, name="decoder.0", context=RoutingContext(), **options)


@pytest.fixture
def block():
    return make_block()


def test_the_residual_is_added_as_by_mmcv(block, tokens_BND):
    output_BND, _ = block.moe(tokens_BND)
    torch.testing.assert_close(block(tokens_BND), tokens_BND + output_BND)
    other_BND = torch.ones_like(tokens_BND)
    torch.testing.assert_close(block(tokens_BND, other_BND), other_BND + output_BND)


def test_padded_tokens_keep_their_residual(block, tokens_BND):
    mask_BN = torch.ones(2, 5, dtype=torch.bool)
    mask_BN[1, 3:] = False
    with block.context.step(), block.context.component(mask_BN):
        output_BND = block(tokens_BND)
    assert torch.equal(output_BND[1, 3:], tokens_BND[1, 3:])
    assert not torch.equal(output_BND[1, :3], tokens_BND[1, :3])


@pytest.mark.parametrize(
    "option",
    [
        dict(layer_scale_init_value=0.5),
        dict(dropout_layer=dict(type="DropPath", drop_prob=0.5)),
    ],
    ids=["layer scale", "drop path"],
)
def test_layer_scale_and_drop_path_of_the_ffn_stay(model_config, tokens_BND, option):
    """One expert computes what the FFN that it replaces computes."""
    found = []
    for moe in (None, dict(layers=dict(decoder=[0]), num_experts=1)):
        config = model_config(moe=moe)
        config.decoder.layer_cfg.ffn_cfg.update(option)
        found.append(MODELS.build(config).train())
    dense, sparse = found
    sparse.load_state_dict(dense.state_dict())  # strict
    tokens_BND = tokens_BND.repeat(4, 1, 8)
    outputs = []
    for detector in found:
        torch.manual_seed(0)
        ffn = detector.decoder.layers[0].ffn
        if "layer_scale_init_value" in option:
            torch.nn.init.constant_(ffn.gamma2.weight, 3.0)
        outputs.append(ffn(tokens_BND))
    torch.testing.assert_close(outputs[1], outputs[0])
    assert not torch.equal(outputs[0], tokens_BND)


def test_drop_path_drops_tokens_in_training_and_scales_the_rest():
    block, tokens = make_block(drop_path=0.2), torch.randn(4, 500, 8)
    with torch.no_grad():
        out, _ = block.moe(tokens)
        change = block(tokens) - tokens
    dropped = (change == 0).all(dim=-1)
    # 2000 tokens: 400 expected; five standard deviations of a binomial are 90
    assert abs(dropped.sum().item() - 400) < 90
    # each token has its own chance: no image is dropped or kept as a whole
    assert ((dropped.sum(1) > 0) & (dropped.sum(1) < 500)).all()
    torch.testing.assert_close(
        change[~dropped], (out / 0.8)[~dropped], rtol=1e-4, atol=1e-5
    )
    block.eval()
    with torch.no_grad():
        torch.testing.assert_close(block(tokens) - tokens, block.moe(tokens)[0])


def test_padding_does_not_shift_what_is_dropped():
    block, tokens = make_block(drop_path=0.5), torch.randn(1, 6, 8)
    padded = torch.cat([tokens, torch.randn(1, 4, 8)], dim=1)
    mask = torch.arange(10).unsqueeze(0) < 6
    outs = []
    for given, real in ((tokens, None), (padded, mask)):
        torch.manual_seed(4)
        with block.context.step(), block.context.component(real):
            outs.append(block(given))
    torch.testing.assert_close(outs[1][:, :6], outs[0])
    assert torch.equal(outs[1][:, 6:], padded[:, 6:])


PRE = dict(
    layers=dict(encoder=[1], decoder=[0, 2]),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
    block=dict(norm="pre"),
)


def test_the_closing_norm_moves_into_the_block(build):
    detector, dense = build(moe=PRE), build(moe=None)
    for part, numbers in (("encoder", [1]), ("decoder", [0, 2])):
        for number, layer in enumerate(getattr(detector, part).layers):
            assert isinstance(layer.norms[-1], nn.Identity) == (number in numbers)
            if number in numbers:
                assert isinstance(layer.ffn.norm, nn.LayerNorm)
    count = [
        sum(p.numel() for n, p in d.named_parameters() if "norm" in n)
        for d in (detector, dense)
    ]
    assert count[0] == count[1]


def test_the_layer_computes_x_plus_experts_of_the_norm_and_ends_there(build):
    layer = build(moe=PRE).encoder.layers[1].eval()
    nn.init.constant_(layer.ffn.norm.weight, 2.0)
    seen = []
    layer.ffn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    query = torch.randn(2, 6, 64)
    layer.self_attn.forward = lambda query, **_: query
    out = layer(query=query, query_pos=None, key_padding_mask=None)
    routed, _ = layer.ffn.moe(layer.ffn.norm(seen[0]))
    torch.testing.assert_close(out, seen[0] + routed)


def test_a_checkpoint_gives_its_closing_norm_to_the_block(build):
    """One of the dense detector, loaded strictly, or one with experts."""
    dense, detector = build(moe=None), build(moe=PRE)
    with torch.no_grad():
        dense.decoder.layers[2].norms[2].weight.fill_(3.0)
        dense.decoder.layers[1].norms[2].weight.fill_(4.0)
    state = dense.state_dict()
    detector.load_state_dict(state)
    assert set(state) == set(dense.state_dict())
    clone = copy.deepcopy(detector)
    other = build(moe=PRE)
    other.load_state_dict(detector.state_dict())
    clone.load_state_dict(build(moe=None).state_dict())
    for one, expected in ((detector, 3.0), (other, 3.0), (clone, 1.0)):
        assert (one.decoder.layers[2].ffn.norm.weight == expected).all()
    assert (detector.decoder.layers[1].norms[2].weight == 4.0).all()


PMOE = dict(
    layers=dict(backbone=[3]),
    num_experts=4,
    gate=dict(type="ExpertChoiceGate", share=0.5),
    experts=dict(type="PatchConvExperts", patch_size=1, border="neighbours"),
)
DAMEX_ON_PATCHES = {
    **PMOE,
    "gate": dict(type="TopKGate", k=1),
    "losses": [dict(type="DatasetRoutingLoss", weight=0.1)],
}


@pytest.mark.parametrize("with_cp", [False, True])
def test_damex_on_patches_trains_a_detector(build, make_batch, run_loss, with_cp):
    detector = build(moe={**DAMEX_ON_PATCHES, "with_cp": with_cp})
    (block,) = moe_blocks(detector)
    batch = make_batch([0, 2], sizes=[(64, 96), (64, 32)])
    # The last norm of a block starts at zero, and with it the gradient of the experts.
    nn.init.ones_(detector.backbone.layer4[1].norm2.weight)
    losses = run_loss(detector, batch)
    total = losses["loss_moe_dataset_routing"] + losses["loss_cls"]
    total.backward()
    for name, parameter in block.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
    assert 0.0 <= losses["moe_routing_accuracy"] <= 1.0


@pytest.mark.parametrize("mode", ["predict", "tensor"])
def test_patches_of_padding_are_not_routed(build, make_batch, records, mode):
    """Images of 96 x 160 and 96 x 96 have 3 x 5 and 3 x 3 cells in the last stage."""
    detector = build(moe=DAMEX_ON_PATCHES).eval()
    detector.counts_tokens = True
    batch = make_batch([0, 1], sizes=[(96, 160), (96, 96)])
    with torch.no_grad():
        found = detector(**detector.data_preprocessor(batch), mode=mode)
    if mode == "predict":  # each image alone, unpadded
        counts = [s.routing_counts["backbone.layer4.1.conv2"] for s in found]
        assert [sum(row) for row in counts] == [15, 9]
        return
    record = records["backbone.layer4.1.conv2"]
    image_V = record.packing.spread(torch.arange(2))
    assert image_V.bincount().tolist() == [15, 9]
    assert record.assignment.num_routes == 24


def test_dense_kernels_become_those_of_the_experts(build):
    dense, sparse = build(moe=None), build(moe=PMOE)
    sparse.load_state_dict(dense.state_dict())
    kernel = dense.backbone.layer4[1].conv2.weight
    (block,) = moe_blocks(sparse)
    # expert 1 has output channels 64 to 127
    assert torch.equal(block.moe.experts.weight_EOCKK[1], kernel[64:128])
    build(moe=PMOE).load_state_dict(sparse.state_dict())
    small = {**PMOE, "experts": {**PMOE["experts"], "kernel_size": 1}}
    found = build(moe=small).load_state_dict(dense.state_dict(), strict=False)
    assert found.unexpected_keys == ["backbone.layer4.1.conv2.weight"]


def test_loaded_experts_that_take_all_patches_equal_the_dense_backbone(
    build, make_batch
):
    gate = dict(type="ExpertChoiceGate", share=1.0, mean_one=True)
    router = dict(type="LinearRouter", init_std=0.0)
    dense = build(moe=None).eval()
    nn.init.ones_(dense.backbone.layer4[1].norm2.weight)
    sparse = build(moe={**PMOE, "gate": gate, "router": router}).eval()
    sparse.load_state_dict(dense.state_dict(), strict=False)
    images = torch.randn(2, 3, 96, 64)
    with torch.no_grad():
        pairs = zip(dense.backbone(images), sparse.backbone(images), strict=True)
        for expected, found in pairs:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_kernels_that_were_drawn_or_loaded_are_not_drawn_again(build):
    detector = build(moe=PMOE)
    before = moe_blocks(detector)[0].moe.experts.weight_EOCKK.clone()
    detector.init_weights()
    assert torch.equal(moe_blocks(detector)[0].moe.experts.weight_EOCKK, before)
    # Kaiming normal of 256 channels out and 9 cells: std sqrt(2 / 2304) = 0.02946
    assert before.std().item() == pytest.approx(0.02946, rel=0.01)


@pytest.mark.skipif(
    torch.__version__ < ("2.10" if torch.cuda.is_available() else "2.12"),
    reason="no grouped_mm, or, in torch 2.10 and 2.11, compiled only beside a GPU",
)
def test_a_compiled_block_gives_what_eager_gives(block, tokens_BND):
    block.moe.experts.backend = "grouped_mm"
    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    mask_BN = torch.ones(2, 5, dtype=torch.bool)
    mask_BN[1, 3:] = False
    found = []
    for function in (block, compiled):
        block.zero_grad()
        with block.context.step(), block.context.component(mask_BN):
            output_BND = function(tokens_BND)
            record = block.context.records["decoder.0"]
        output_BND.square().sum().backward()
        grads = [parameter.grad.clone() for parameter in block.parameters()]
        found.append([output_BND, record.logits_VE, record.assignment.counts_E, *grads])
    torch.testing.assert_close(*found)
