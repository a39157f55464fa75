import pytest

from damex.errors import ConfigError
from damex.models.insertion import moe_blocks
from damex.models.layer_choice import backbone_stages

ON_PATCHES = dict(num_experts=4, experts=dict(type="PatchConvExperts", patch_size=1))
CHANNELS = dict(channels=dict(embedding=dict(type="ShallowEmbedding", widths=(8,))))


@pytest.mark.parametrize(
    ("chosen", "stages"),
    [("all", [0, 1, 2, 3]), ("even", [0, 2]), ("last", [3]), ([3, 1], [3, 1])],
)
def test_stages_behind_a_word_or_a_list(chosen, stages):
    assert list(backbone_stages(chosen, 4)) == stages


@pytest.mark.parametrize("moe", [ON_PATCHES, CHANNELS], ids=["experts", "channels"])
@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ([4], "backbone names stage 4, but .* 4 stages: 0 to 3"),
        ([-1], "backbone names stage -1"),
        ([True], "backbone names stage True"),
        ("first", "backbone must be .*'all', 'even' or 'last', got 'first'"),
        (3, "backbone must be a list of stage numbers, .*got 3"),
        ({"all": 1}, "backbone must be a list of stage numbers"),
    ],
)
def test_experts_and_channels_refuse_the_same_stages(build, moe, chosen, message):
    with pytest.raises(ConfigError, match=message):
        build(moe={**moe, "layers": dict(backbone=chosen)})


def test_experts_and_channels_know_the_same_words(build):
    gated = build(moe={**CHANNELS, "layers": dict(backbone="last")})
    names = {name.split(".")[1] for name in gated.channel_gating.path.names}
    assert names == {"3"}
    replaced = build(moe={**ON_PATCHES, "layers": dict(backbone="even")})
    assert [block.name.split(".")[1] for block in moe_blocks(replaced)] == [
        "layer1",
        "layer3",
    ]
