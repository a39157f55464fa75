"""Mistakes in ``moe``: one line that names the field, its value and what is allowed."""

import pytest

from damex.engine.cli import _message
from damex.errors import ConfigError

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
        dict(gate=dict(capacity=dict(type="ExpertCapacity", priority="best"))),
        "moe.gate.capacity.priority",
        "'best'",
        "'score' or 'order'",
    ),
    (
        dict(gate=dict(capacity=dict(factor=1.25))),
        "moe.gate.capacity",
        "unknown type 'None'",
        "ExpertCapacity",
    ),
    (
        dict(gate=dict(type="DenseToSparseGate", end_temperature=0.0)),
        "temperatures",
        "0.0 at the end",
        "above 0",
    ),
    (
        dict(gate=dict(type="DenseToSparseGate", start_temperature=-1.0)),
        "temperatures",
        "-1.0 at the start",
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
        "weight of loss 'load_balance'",
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
                router_stage=dict(iters=1),
            ),
            "SeparateRouterLoss: ",
            got,
            allowed,
        )
        for pairs, got, allowed in [
            ([0, 1], "got 0", "two different classes"),
            ([(0, 9)], "got (0, 9)", "in [0, 2)"),
            ([(1, 1)], "got (1, 1)", "two different classes"),
            ([(0, -1)], "got (0, -1)", "two different classes"),
            ([(0, "a")], "got (0, 'a')", "two different classes"),
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
            "use LoadBalanceLoss or ImportanceLoss",
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
        "unknown part 'neck'",
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
    message = _message(caught.value)  # as the command line shows it
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
