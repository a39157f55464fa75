"""FFNs that add nothing: by hand, in a detector, and afterwards."""

from contextlib import suppress

import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN

from damex.errors import ConfigError
from damex.headroom.ablations import app, ffn_sites, zeroed


@pytest.mark.parametrize("scale", [0.0, 0.5], ids=["plain", "layer_scale"])
def test_a_zeroed_ffn_is_its_identity(scale):
    ffn = FFN(embed_dims=8, feedforward_channels=16, layer_scale_init_value=scale)
    ffn.eval()
    tokens, identity = torch.randn(2, 3, 8), torch.randn(2, 3, 8)
    before, state = ffn(tokens), {k: v.clone() for k, v in ffn.state_dict().items()}
    with zeroed([ffn]):
        assert torch.equal(ffn(tokens), tokens)
        assert torch.equal(ffn(tokens, identity), identity)
    assert torch.equal(ffn(tokens), before)
    assert all(torch.equal(v, state[k]) for k, v in ffn.state_dict().items())


def test_an_ffn_without_identity_gives_zeros_and_works_again_after_an_error():
    ffn = FFN(embed_dims=8, feedforward_channels=16, add_identity=False).eval()
    tokens = torch.randn(2, 3, 8)
    with suppress(RuntimeError), zeroed([ffn]):
        assert not ffn(tokens).any()
        raise RuntimeError
    assert ffn(tokens).any()


def test_sites_are_layers_and_whole_components(build, make_batch, run_predict):
    detector = build(moe=None)
    sites = ffn_sites(detector)
    encoder, decoder = detector.encoder.layers, detector.decoder.layers
    assert {name: len(ffns) for name, ffns in sites.items()} == {
        **{"encoder.0": 1, "encoder.1": 1, "encoder": 2},
        **{"decoder.0": 1, "decoder.1": 1, "decoder.2": 1, "decoder": 3},
    }
    assert sites["encoder.1"][0] is encoder[1].ffn
    assert sites["decoder"] == [layer.ffn for layer in decoder]

    batch = make_batch([None])
    with zeroed(sites["encoder.1"]):
        zero = run_predict(detector, batch)[0].pred_instances.scores
    # Weights of the last linear layer set to zero are the same by another way.
    whole = run_predict(detector, batch)[0].pred_instances.scores
    assert not torch.equal(zero, whole)
    with torch.no_grad():
        for parameter in encoder[1].ffn.layers[1].parameters():
            parameter.zero_()
    assert torch.equal(zero, run_predict(detector, batch)[0].pred_instances.scores)


def test_every_detector_has_sites(build_mmdet, detector_name):
    sites = ffn_sites(build_mmdet(detector_name))
    assert {"encoder.0", "encoder.1", "encoder", "decoder.1", "decoder"} < {*sites}


def test_experts_and_other_models_cannot_be_zeroed(build):
    with pytest.raises(ConfigError, match="layer 0 of the decoder has a MoEFFN"):
        ffn_sites(build())
    with pytest.raises(ConfigError, match="Linear has no layers in an encoder"):
        ffn_sites(torch.nn.Linear(1, 1))


def test_an_unknown_ablation_is_an_error():
    with pytest.raises(ConfigError, match="ablate_ffns, oracle"):
        app(["zero"])
