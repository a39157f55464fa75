"""Mistakes in ``moe``: one line that names the field, its value and what is allowed."""

import pytest
import torch

from damex.errors import ConfigError
from damex.models.build import moe_difference, resolved_moe
from damex.models.config import read_moe
from damex.moe import TopKGate

WARMED_UP = dict(router_warmup=dict(iters=1))
CHOICE = dict(type="ExpertChoiceGate", share=0.5)
MISTAKES = [
    # modules: unknown types and arguments, values that they or the layer reject
    (dict(gate="TopKGate"), r"moe.gate must be .*dict\(type='TopKGate'\), got 'TopKG"),
    (dict(gate=dict(type="TopKGat")), "moe.gate .*'TopKGat'; did you mean 'TopKGate'"),
    (dict(gate=dict(kk=2)), "moe.gate.kk = 2 is not an argument.*did you mean 'k'"),
    (dict(gate=dict(k=5)), "moe.gate.k is 5, but there are 4 .*set k to 4 or less"),
    (dict(gate=CHOICE), "moe.gate is .* decoder.0, .*set moe.layers=dict.encoder='ev"),
    (dict(gate=dict(capacity=dict(factor=1.2))), "gate.capacity.*'None'.*ExpertCapac"),
    (dict(router=dict(type="LinearRoutr")), "moe.router .*'LinearRouter'"),
    (dict(experts=dict(num_experts=2)), "router scores 4 .*there are 2.*both the same"),
    (
        dict(experts=dict(type="LowRankExperts")),
        "'LowRankExperts', .*set moe.shared_exp",
    ),
    (
        dict(losses=["LoadBalanceLoss"]),
        "moe.losses must be .*a dict with a type.*got",
    ),
    (
        dict(losses=dict(type="RouterZLoss")),
        "moe.losses must be a list of dicts.*got",
    ),
    (dict(losses=[dict(type="LoadBalanceLos")]), "did you mean 'LoadBalanceLoss'"),
    (
        dict(losses=[dict(type="SeparateRouterLoss", pairs=9)], **WARMED_UP),
        "moe.losses.pairs = 9 is not an argument of SeparateRouterLoss",
    ),
    (
        dict(gate=CHOICE, losses=[dict(type="LoadLoss")], layers=dict(encoder=[0])),
        "LoadLoss: .*got ExpertChoiceGate; use TopKGate without a capacity",
    ),
    # fields
    (dict(num_experts=0), "moe.num_experts must be an integer of 1 or more, got 0"),
    (
        dict(num_experts=1, losses=[dict(type="DatasetRoutingLoss")]),
        "the mixture has 2 dataset groups but moe.num_experts is 1; set .*2 or more",
    ),
    (dict(with_cp="yes"), "moe.with_cp must be True or False, got 'yes'"),
    (
        dict(gates=dict(k=1)),
        "unknown key 'gates'; did you mean 'gate'.*losses, ",
    ),
    (dict(block=dict(norm="none")), r"moe.block.norm .*\('post', 'pre'\), got 'none'"),
    (dict(block="pre"), "moe.block must be a dict such as .*norm=.*, got 'pre'"),
    *[
        (dict(block=dict(drop_path=value)), rf"drop_path .*in \[0, 1\), got {value!r}")
        for value in (1.0, "0.2", True)
    ],
    # layers
    (dict(layers=[0, 2]), r"moe.layers .*dict\(decoder=\[0, 2, 4\]\), got \[0, 2\]"),
    (dict(layers=dict(decodr=[0])), "moe.layers .*'decodr'; did you mean 'decoder'"),
    (dict(layers=dict(decoder=[])), r"moe.layers = {'decoder': \[\]} .*decoder=\[0, 2"),
    (dict(layers=dict(decoder="odd")), "layers.decoder .*'all' or 'even', got 'odd'"),
    (dict(layers=dict(decoder=0)), "moe.layers.decoder .*list of layer numbers.*got 0"),
    (dict(layers=dict(decoder=[3])), "moe.layers.decoder names layer 3, .*0 to 2"),
    (
        dict(layers=dict(decoder=[True])),
        "moe.layers.decoder names layer True.*0 to 2",
    ),
    (dict(layers=dict(decoder=[0, 0])), "moe.layers.decoder: layer 0 .*listed twice"),
]


@pytest.mark.parametrize(("changes", "message"), MISTAKES)
def test_one_line_names_field_value_and_what_is_allowed(changes, message, build):
    moe = dict(layers=dict(decoder=[0, 2]), num_experts=4)
    with pytest.raises(ConfigError, match=message) as caught:
        build(moe={**moe, **changes}, num_groups=2)
    assert "\n" not in str(caught.value)  # as the command line shows it
    assert str(caught.value).startswith(("moe", "the mixture has 2 dataset groups"))


DAMEX = dict(
    layers=dict(decoder="even"),
    gate=dict(type="TopKGate", noise="gaussian"),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (dict(), None),
        (dict(with_cp=True), None),  # the same numbers
        (dict(gate=dict(type=TopKGate, k=1, noise="gaussian")), None),  # a default
        (dict(experts=None, block=None), None),
        (dict(gate=dict(type="TopKGate")), "moe.gate.noise was 'gaussian' and is None"),
        (dict(gate=CHOICE), "moe.gate was TopKGate and is ExpertChoiceGate"),
        (
            dict(losses=[dict(type="LoadBalanceLoss")]),
            "moe.losses.DatasetRoutingLoss was DatasetRoutingLoss and is None; "
            "moe.losses.LoadBalanceLoss was None and is LoadBalanceLoss",
        ),
        (dict(block=dict(norm="pre")), "moe.block.norm was 'post' and is 'pre'"),
    ],
)
def test_a_checkpoint_of_other_experts_is_recognized(changes, expected):
    saved, present = (resolved_moe(read_moe(m)) for m in (DAMEX, {**DAMEX, **changes}))
    assert moe_difference(saved, present) == expected


def test_the_resolved_tree_is_plain_data_and_knows_a_dense_detector(build, tmp_path):
    detector, dense = build(moe=DAMEX), build(moe=None)
    torch.save(detector.resolved_moe(), tmp_path / "moe.pth")
    saved = torch.load(tmp_path / "moe.pth", weights_only=True)
    assert moe_difference(saved, detector.resolved_moe()) is None
    assert moe_difference(dense.resolved_moe(), saved) is not None
