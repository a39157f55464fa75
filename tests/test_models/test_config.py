"""Mistakes in ``moe``: one line that names the field, its value and what is allowed."""

import copy

import pytest
import torch
from torch import nn

from damex.errors import ConfigError
from damex.models.blocks import MoEFFN
from damex.models.build import moe_difference, resolved_moe
from damex.models.config import BlockConfig, read_config, read_moe
from damex.models.context import RoutingContext
from damex.moe import FFNExperts, LinearRouter, MoELayer, TopKGate

MISTAKES = [
    # changes to moe, field, value, what is allowed
    (dict(gate=dict(type="TopKGate", k=5)), "moe.gate.k", "is 5", "4 or less"),
    (dict(gate=dict(type="TopKGate", k=0)), "moe.gate =", "got 0", "k must be at l"),
    (dict(gate=dict(type="TopKGate", k=1.5)), "moe.gate.k", "got 1.5", "type int"),
    (dict(gate=dict(type="TopKGate", k="two")), "moe.gate.k", "'two'", "type int"),
    (dict(gate=dict(type="TopKGate", k=True)), "moe.gate.k", "True", "type int"),
    (
        dict(gate=dict(type="TopKGate", noise="gumbel")),
        "moe.gate.noise",
        "'gumbel'",
        "'gaussian' or 'uniform' or None",
    ),
    (
        dict(gate=dict(type="ExpertChoiceGate", num_tokens=0)),
        "num_tokens must",
        "got 0",
        "at least 1",
    ),
    (
        dict(gate=dict(type="ExpertChoiceGate", share=0)),
        "share must",
        "got 0",
        "in (0, 1]",
    ),
    (
        dict(gate=dict(type="ExpertChoiceGate", share=1.5)),
        "share must",
        "got 1.5",
        "in (0, 1]",
    ),
    (
        dict(gate=dict(type="ExpertChoiceGate", share="half")),
        "moe.gate.share",
        "'half'",
        "of type float or None",
    ),
    (
        dict(gate=dict(type="ExpertChoiceGate", num_tokens=2, weights="sum")),
        "moe.gate.weights",
        "'sum'",
        "'selected' or 'all'",
    ),
    (
        dict(gate=dict(type="ExpertChoiceGate", share=0.5)),
        "moe.gate",
        "is ExpertChoiceGate and moe.layers chooses decoder.0",
        "set moe.layers=dict(encoder='even')",
    ),
    (
        dict(gate=dict(capacity=dict(type="ExpertCapacity", factor=-1.0))),
        "moe.gate.capacity =",
        "got -1.0",
        "factor must be above 0",
    ),
    (
        dict(gate=dict(capacity=dict(factor=1.25))),
        "moe.gate.capacity",
        "unknown type 'None'",
        "ExpertCapacity",
    ),
    (
        dict(gate=dict(type="DenseToSparseGate", end_temperature=0.0)),
        "end_temperature",
        "got 0.0",
        "above 0",
    ),
    (
        dict(gate=dict(type="DenseToSparseGate", start_temperature=-1.0)),
        "start_temperature",
        "got -1.0",
        "above 0",
    ),
    (
        dict(gate=dict(type="DenseToSparseGate", end_k=9)),
        "moe.gate.end_k",
        "is 9",
        "4 or less",
    ),
    (
        dict(router=dict(type="CosineRouter", init_temperature=0.0)),
        "init_temperature",
        "0.0",
        "0 < min_temperature <= init_temperature",
    ),
    (
        dict(router=dict(type="HierarchicalRouter", num_groups=9)),
        "num_groups",
        "got 9 groups",
        "1 <= num_groups <= num_experts",
    ),
    (dict(router=dict(type="LinearRoutr")), "moe.router", "Routr'", "LinearRouter"),
    (
        dict(gate=dict(type="TopKGat")),
        "moe.gate",
        "'TopKGat'",
        "did you mean 'TopKGate'?",
    ),
    (dict(gate="TopKGate"), "moe.gate", "got 'TopKGate'", "dict(type='TopKGate')"),
    (dict(gate=dict(type="TopKGate", kk=2)), "moe.gate.kk", "2", "did you mean 'k'?"),
    (
        dict(losses=[dict(type="LoadBalanceLos")]),
        "moe.losses",
        "'LoadBalanceLos'",
        "did you mean 'LoadBalanceLoss'?",
    ),
    (
        dict(losses=[dict(type="LoadBalanceLoss", weight=-1.0)]),
        "loss 'load_balance': weight",
        "got -1.0",
        ">= 0",
    ),
    (
        dict(losses=[dict(type="LoadBalanceLoss", weight="x")]),
        "moe.losses.weight",
        "'x'",
        "of type float",
    ),
    (
        dict(losses=["LoadBalanceLoss"]),
        "moe.losses",
        "'LoadBalanceLoss'",
        "a dict with a type",
    ),
    (
        dict(losses=dict(type="RouterZLoss")),
        "moe.losses",
        "got {'type': 'RouterZLoss'}",
        "a list of dicts",
    ),
    (
        dict(losses=[dict(weight=1.0)]),
        "moe.losses",
        "unknown type 'None'",
        "LoadBalanceLoss",
    ),
    (
        dict(losses=[dict(type="DatasetRoutingLoss", tokens="fg")]),
        "moe.losses.tokens",
        "'fg'",
        "'all' or 'foreground'",
    ),
    *[
        (
            dict(
                losses=[dict(type="SeparateRouterLoss", pairs=pairs)],
                router_warmup=dict(iters=1),
            ),
            "SeparateRouterLoss: ",
            got,
            allowed,
        )
        for pairs, got, allowed in [
            ([0, 1], "got 0", "two different groups"),
            ([(0, 9)], "got (0, 9)", "in [0, 2)"),
            ([(1, 1)], "got (1, 1)", "two different groups"),
            ([(0, -1)], "got (0, -1)", "two different groups"),
            ([(0, "a")], "got (0, 'a')", "two different groups"),
            ([], "got []", "such as [(0, 1)]"),
            ("01", "got '01'", "such as [(0, 1)]"),
            (1, "got 1", "such as [(0, 1)]"),
        ]
    ],
    *[
        (
            dict(gate=gate, losses=[dict(type="LoadLoss")], layers=dict(encoder=[0])),
            "LoadLoss: ",
            f"got {gate['type']}",
            "use TopKGate without a capacity",
        )
        for gate in [
            dict(type="ExpertChoiceGate", share=0.5),
            dict(type="DenseToSparseGate"),
            dict(type="DenseToSparseGate", threshold=0.0, end_k=1),
            dict(type="TopKGate", k=2, capacity=dict(type="ExpertCapacity")),
        ]
    ],
    (dict(experts=dict(init_std=0.0)), "moe.experts =", "got 0.0", "be above 0"),
    (
        dict(experts=dict(num_experts=2)),
        "the router scores 4 experts",
        "there are 2",
        "both the same num_experts",
    ),
    (
        dict(experts=dict(type="FFNExperts", activation="elu")),
        "activation",
        "'elu'",
        "'gelu'",
    ),
    (dict(num_experts=0), "moe.num_experts", "got 0", "an integer of 1 or more"),
    (dict(num_experts="four"), "moe.num_experts", "'four'", "an integer of 1 or more"),
    (dict(num_experts=True), "moe.num_experts", "True", "an integer of 1 or more"),
    (
        dict(num_experts=1, losses=[dict(type="DatasetRoutingLoss")]),
        "moe.num_experts",
        "is 1",
        "2 or more",
    ),
    (dict(with_cp="yes"), "moe.with_cp", "'yes'", "True or False"),
    (dict(block=dict(norm="none")), "moe.block.norm", "'none'", "('post', 'pre')"),
    (
        dict(gates=dict(type="TopKGate")),
        "unknown key 'gates'",
        "did you mean 'gate'?",
        "losses, with_cp",
    ),
    (dict(layers=dict(decoder=[3])), "moe.layers.decoder", "layer 3", "0 to 2"),
    (dict(layers=dict(decoder=[True])), "moe.layers.decoder", "layer True", "0 to 2"),
    (dict(layers=dict(decoder=[0, 0])), "moe.layers.decoder", "layer 0", "twice"),
    (
        dict(layers=dict(decoder=0)),
        "moe.layers.decoder",
        "got 0",
        "a list of layer numbers",
    ),
    (dict(layers=dict(encoder=[-1])), "moe.layers.encoder", "layer -1", "0 to 1"),
    (
        dict(layers=dict(decoder=[0], neck=[1])),
        "moe.layers",
        "unknown key 'neck'",
        "encoder, decoder",
    ),
    (
        dict(layers=dict(decodr=[0])),
        "moe.layers",
        "'decodr'",
        "did you mean 'decoder'?",
    ),
    (dict(layers=dict(decoder="odd")), "layers.decoder", "'odd'", "'all' or 'even'"),
    (dict(layers=dict(decoder=[])), "moe.layers", "{'decoder': []}", "decoder=[0, 2"),
    (dict(layers=[0, 2]), "moe.layers", "got [0, 2]", "dict(decoder=[0, 2, 4])"),
]


@pytest.mark.parametrize(
    ("changes", "field", "value", "allowed"),
    MISTAKES,
    ids=[f"{number}-{m[1]}-{m[2]}" for number, m in enumerate(MISTAKES)],
)
def test_one_line_names_field_value_and_what_is_allowed(
    changes, field, value, allowed, build
):
    moe = dict(layers=dict(decoder=[0, 2]), num_experts=4)
    with pytest.raises(ConfigError) as caught:
        build(moe={**moe, **changes}, num_groups=2)
    message = str(caught.value)  # as the command line shows it
    assert "\n" not in message
    assert message.startswith(("moe", "the mixture has 2 dataset groups"))
    for part in (field, value, allowed):
        assert part in message


@pytest.mark.parametrize("num_groups", [3, 4])
def test_groups_need_not_divide_the_experts(num_groups, build):
    """Not a mistake: the first groups get one expert more."""
    router = dict(type="HierarchicalRouter", num_groups=num_groups)
    moe = dict(layers=dict(decoder=[0]), num_experts=5, router=router)
    detector = build(moe=moe, num_groups=2)
    assert detector.decoder.layers[0].ffn.moe.router.num_groups == num_groups


PRE = dict(
    layers=dict(encoder=[1], decoder=[0, 2]),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
    block=dict(norm="pre"),
)


def make_block(**options):
    torch.manual_seed(0)
    layer = MoELayer(
        router=LinearRouter(8, 3), gate=TopKGate(1), experts=FFNExperts(3, 8, 16)
    )
    return MoEFFN(layer, name="decoder.0", context=RoutingContext(), **options)


def test_a_norm_stands_before_the_experts_and_not_on_the_residual():
    norm = nn.LayerNorm(8)
    nn.init.constant_(norm.weight, 2.0)
    block, tokens = make_block(norm=norm), torch.randn(2, 5, 8)
    out, _ = block.moe(norm(tokens))
    torch.testing.assert_close(block(tokens), tokens + out)


def test_the_closing_norm_moves_into_the_block(build):
    detector, dense = build(moe=PRE), build(moe=None)
    for part, numbers in (("encoder", [1]), ("decoder", [0, 2])):
        layers = getattr(detector, part).layers
        for number, layer in enumerate(layers):
            moved = number in numbers
            assert isinstance(layer.norms[-1], nn.Identity) == moved
            if moved:
                assert isinstance(layer.ffn.norm, nn.LayerNorm)
    count = [
        sum(p.numel() for n, p in d.named_parameters() if "norm" in n)
        for d in (detector, dense)
    ]
    assert count[0] == count[1]


def test_the_layer_computes_x_plus_experts_of_the_norm_and_ends_there(build):
    layer = build(moe=PRE).encoder.layers[1].eval()
    seen = []
    layer.ffn.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    layer.self_attn = _Passes()
    query = torch.randn(2, 6, 64)
    out = layer(query=query, query_pos=None, key_padding_mask=None)
    routed, _ = layer.ffn.moe(layer.ffn.norm(seen[0]))
    torch.testing.assert_close(out, seen[0] + routed)


class _Passes(nn.Module):
    def forward(self, query, **kwargs):
        return query


def test_a_dense_checkpoint_gives_its_closing_norm_to_the_block(build):
    dense, detector = build(moe=None), build(moe=PRE)
    with torch.no_grad():
        dense.decoder.layers[2].norms[2].weight.fill_(3.0)
        dense.decoder.layers[1].norms[2].weight.fill_(4.0)
    state = dense.state_dict()
    detector.load_state_dict(state)  # strict: nothing is missing or too much
    assert (detector.decoder.layers[2].ffn.norm.weight == 3.0).all()
    assert (detector.decoder.layers[1].norms[2].weight == 4.0).all()
    assert set(state) == set(dense.state_dict())


def test_own_checkpoints_and_copies_go_round(build):
    detector = build(moe=PRE)
    with torch.no_grad():
        detector.decoder.layers[0].ffn.norm.weight.fill_(5.0)
    other = build(moe=PRE)
    other.load_state_dict(detector.state_dict())
    assert (other.decoder.layers[0].ffn.norm.weight == 5.0).all()
    clone = copy.deepcopy(other)
    clone.load_state_dict(build(moe=None).state_dict())
    assert (clone.decoder.layers[0].ffn.norm.weight == 1.0).all()
    assert (other.decoder.layers[0].ffn.norm.weight == 5.0).all()


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


def test_defaults_are_those_of_a_detr():
    assert BlockConfig() == BlockConfig(norm="post", drop_path=0.0)
    assert read_config(BlockConfig, dict(norm="pre"), "moe.block").drop_path == 0.0


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dict(norm="both"), r"moe.block.norm must be one of .*'pre'.*, got 'both'"),
        (
            dict(drop_path=1.0),
            r"block.drop_path must be a number in \[0, 1\), got 1.0",
        ),
        (
            dict(drop_path="0.2"),
            r"drop_path must be a number in .*, got '0.2'",
        ),
        (dict(drop_path=True), r"moe.block.drop_path must be a number in .*, got True"),
        (dict(droppath=0.1), "unknown key 'droppath'; did you mean 'drop_path'"),
        ("pre", r"moe.block must be a dict such as .*norm=.*, got 'pre'"),
    ],
)
def test_errors_are_one_line_with_field_value_and_choice(config, message, build):
    with pytest.raises(ConfigError, match=message) as caught:
        build(moe=dict(layers=dict(decoder=[0]), block=config))
    assert "\n" not in str(caught.value)


DAMEX = dict(
    layers=dict(decoder="even"),
    gate=dict(type="TopKGate", noise="gaussian"),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (dict(), None),
        (dict(with_cp=True), None),  # the same numbers
        (dict(gate=dict(type=TopKGate, k=1, noise="gaussian")), None),  # a default
        (dict(experts=None, block=None), None),
        (dict(gate=dict(type="TopKGate")), "moe.gate.noise was 'gaussian' and is None"),
        (
            dict(gate=dict(type="DenseSoftmaxGate")),
            "moe.gate was TopKGate and is DenseSoftmaxGate",
        ),
        (
            dict(losses=[dict(type="LoadBalanceLoss")]),
            "moe.losses.DatasetRoutingLoss was DatasetRoutingLoss and is None; "
            "moe.losses.LoadBalanceLoss was None and is LoadBalanceLoss",
        ),
        (dict(block=dict(norm="pre")), "moe.block.norm was 'post' and is 'pre'"),
    ],
)
def test_a_checkpoint_of_other_experts_is_told_apart(changes, said):
    saved, present = (resolved_moe(read_moe(m)) for m in (DAMEX, {**DAMEX, **changes}))
    assert moe_difference(saved, present) == said


def test_the_resolved_tree_is_plain_data_and_knows_a_dense_detector(build, tmp_path):
    detector, dense = build(moe=DAMEX), build(moe=None)
    torch.save(detector.resolved_moe(), tmp_path / "moe.pth")
    saved = torch.load(tmp_path / "moe.pth", weights_only=True)
    assert moe_difference(saved, detector.resolved_moe()) is None
    assert moe_difference(dense.resolved_moe(), saved) is not None
