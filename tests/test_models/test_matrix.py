"""Every detector of mmdet with every shipped mixture of experts: trains, predicts."""

import pytest
import torch
from mmengine.config import Config

from damex.models.insertion import moe_blocks
from tests.conftest import shipped_configs

CONFIGS = shipped_configs(folder="moe")


def moe_of(path):
    return Config.fromfile(path).moe


ROUTED = [p for p in CONFIGS if moe_of(p) and "channels" not in moe_of(p)]
GATED = [p for p in CONFIGS if moe_of(p) and "channels" in moe_of(p)]
every_mixture = pytest.mark.parametrize("path", ROUTED, ids=lambda path: path.stem)
every_gated = pytest.mark.parametrize("path", GATED, ids=lambda path: path.stem)


def experts_are_learning(block, record, *, others):
    """Whether exactly the experts that have tokens have a gradient.

    With ``others``, queries that are in no record may have reached more of them.
    """
    last = getattr(block.moe.experts, block.moe.experts.output_names[0])
    learning_E = (last.grad != 0).flatten(1).any(dim=1)
    has_tokens_E = record.assignment.counts_E > 0
    if getattr(block, "drop_path", None) is not None:  # may leave out all of them
        return not (learning_E & ~has_tokens_E).any()
    if others:
        return not (has_tokens_E & ~learning_E).any()
    return torch.equal(learning_E, has_tokens_E)


@every_mixture
def test_trains_and_predicts(
    path, detector_name, build_mmdet, make_batch, records, run_loss, run_predict, total
):
    moe = moe_of(path)
    detector = build_mmdet(detector_name, moe=moe)
    assert moe == moe_of(path)  # building does not change a config
    batch = make_batch([0, 1], sizes=[(64, 96), (64, 32)], boxes=[1, 3])
    blocks = moe_blocks(detector)
    assert blocks
    trained = set()
    for iteration in (0, 9):  # routers may have a warm-up
        loss = total(run_loss(detector, batch, iteration=iteration))
        detector.zero_grad()
        loss.backward()
        assert torch.isfinite(loss)
        named = dict(detector.named_parameters())
        found = {key for key, p in named.items() if p.grad is not None}
        assert all(named[key].grad.isfinite().all() for key in found)
        trained |= found
    assert {key for key in named if ".moe." in key} <= trained
    for block in blocks:
        if hasattr(block.moe.experts, "output_names"):
            others = detector_name == "MoEDDQDETR"  # its auxiliary queries
            assert experts_are_learning(block, records[block.name], others=others)
    samples = run_predict(detector, batch)
    assert [len(sample.pred_instances) for sample in samples] == [10, 10]
    assert set(samples[0].routing_counts) == {block.name for block in blocks}


@every_gated
def test_gated_channels_train_and_predict(
    path, detector_name, build_mmdet, make_batch, run_loss, run_predict, total
):
    detector = build_mmdet(detector_name, moe=moe_of(path))
    batch = make_batch([0, 1], sizes=[(64, 96), (64, 32)], boxes=[1, 3])
    losses = run_loss(detector, batch)
    total(losses).backward()
    assert 0 < losses["moe_active_channels"] < 1
    gating = dict(detector.channel_gating.named_parameters())
    frozen = bool(moe_of(path)["channels"].get("frozen"))
    for key, parameter in gating.items():
        assert (parameter.grad is None) == frozen, key
    samples = run_predict(detector, batch)
    assert [len(sample.pred_instances) for sample in samples] == [10, 10]
    assert "routing_counts" not in samples[0]


@every_mixture
def test_bf16_autocast_routes_as_float32(
    path, build, make_batch, records, run_loss, total
):
    """In the encoder, where no choice of queries has changed the tokens yet."""
    moe = moe_of(path)
    if "backbone" not in moe["layers"]:
        moe = {**moe, "layers": dict(encoder=[0])}
    detector = build(moe=moe)
    batch = make_batch([0, 2], sizes=[(64, 96), (64, 32)])
    run_loss(detector, batch, iteration=9)
    full = {name: record.logits_VE for name, record in records.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = total(run_loss(detector, batch, iteration=9))
    loss.backward()
    assert torch.isfinite(loss)
    for block in moe_blocks(detector):
        for key, parameter in block.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad.isfinite().all(), key
                assert parameter.grad.dtype == torch.float32
    for name, record in records.items():
        assert record.logits_VE.dtype == torch.float32
        # bfloat16 has 8 bits: the tokens that arrive differ by about 1 in 100
        torch.testing.assert_close(record.logits_VE, full[name], rtol=0.05, atol=0.05)
