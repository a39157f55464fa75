import pytest

from damex.errors import ConfigError
from damex.models.context import RoutingContext
from damex.models.insertion import insert_moe

PMOE = dict(
    layers=dict(backbone=[3]),
    num_experts=4,
    gate=dict(type="ExpertChoiceGate", share=0.5),
    experts=dict(type="PatchConvExperts", patch_size=1, border="neighbours"),
)


def test_the_report_says_what_was_replaced(build):
    dense = build(moe=None)
    report = insert_moe(dense, PMOE, context=RoutingContext(), num_groups=None)
    (row,) = report.layers
    # 256 x 256 x 9 weights; as many in the experts and 256 x 4 in the router
    assert row.dense_parameters == 589_824
    assert row.moe_parameters == 589_824 + 1_024
    assert "backbone.layer4.1.conv2: convolution 256-256 3x3 (589,824" in str(report)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(layers=dict(backbone=[])), r"set moe.layers=dict\(backbone=\[3\]\)"),
        (dict(layers=dict(decoder=[0])), "replaces convolutions; set moe.layers"),
        (
            dict(layers=dict(backbone=[3], decoder=[0])),
            "replaces convolutions; set moe.layers",
        ),
        (
            dict(experts=dict(type="FFNExperts")),
            "needs experts that convolve patches; .*got the type 'FFNExperts'",
        ),
        (dict(experts=None), "got the type 'FFNExperts'"),
        (dict(shared_expert=dict(type="SharedExpert")), "moe.shared_expert is an FFN"),
        (dict(num_experts=5), "moe.experts = .*5 experts and 256 channels"),
        (dict(experts=dict(type="PatchConvExperts")), "moe.experts = .*'patch_size'"),
        (
            dict(experts=dict(type="PatchConvExperts", patch_size=0)),
            "moe.experts = .*got 0",
        ),
    ],
)
def test_a_config_that_cannot_work_names_field_value_and_choice(
    build, changes, message
):
    with pytest.raises(ConfigError, match=message):
        build(moe={**PMOE, **changes})
