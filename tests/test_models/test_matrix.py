"""Every detector of mmdet with every shipped mixture of experts: trains, predicts."""

import copy
from pathlib import Path

import pytest
import torch
from mmengine.config import Config

from damex.models.insertion import moe_blocks

MIXTURES = sorted(
    path
    for path in (Path(__file__).parents[2] / "configs/_base_/moe").glob("*.py")
    if Config.fromfile(path).moe is not None
)
every_mixture = pytest.mark.parametrize("path", MIXTURES, ids=lambda path: path.stem)


def moe_of(path):
    return Config.fromfile(path).moe


def experts_are_learning(block, record):
    """Whether exactly the experts that have tokens have a gradient."""
    grad = block.moe.experts.b2_ED.grad
    return torch.equal((grad != 0).any(dim=1), record.assignment.counts_E > 0)


@every_mixture
def test_trains_and_predicts(
    path, detector_name, build_mmdet, make_batch, records, run_loss, run_predict, total
):
    detector = build_mmdet(detector_name, moe=moe_of(path))
    batch = make_batch([0, 1], sizes=[(64, 64), (64, 32)], boxes=[1, 3])
    loss = total(run_loss(detector, batch))
    loss.backward()
    assert torch.isfinite(loss)
    blocks = moe_blocks(detector)
    assert blocks
    for block in blocks:
        for key, parameter in block.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key
        if hasattr(block.moe.experts, "b2_ED"):
            assert experts_are_learning(block, records[block.name])
    samples = run_predict(detector, batch)
    assert [len(sample.pred_instances) for sample in samples] == [10, 10]
    assert set(samples[0].routing_counts) == {block.name for block in blocks}


@every_mixture
def test_bf16_autocast_routes_as_float32(
    path, build, make_batch, records, run_loss, total
):
    """In the encoder, where no choice of queries has changed the tokens yet."""
    moe = moe_of(path)
    if "layers" in moe:
        moe = {**moe, "layers": dict(encoder=[0])}
    detector = build(moe=moe)
    batch = make_batch([0, 2], sizes=[(64, 64), (64, 32)])
    run_loss(detector, batch)
    full = {name: record.logits_TE for name, record in records.items()}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = total(run_loss(detector, batch))
    loss.backward()
    assert torch.isfinite(loss)
    for block in moe_blocks(detector):
        for key, parameter in block.named_parameters():
            assert parameter.grad.isfinite().all(), key
            assert parameter.grad.dtype == torch.float32
    for name, record in records.items():
        assert record.logits_TE.dtype == torch.float32
        # bfloat16 has 8 bits: the tokens that arrive differ by about 1 in 100
        torch.testing.assert_close(record.logits_TE, full[name], rtol=0.05, atol=0.05)


def test_configs_are_not_changed_by_building(detector_name, build_mmdet):
    moe = moe_of(MIXTURES[0])
    before = copy.deepcopy(moe)
    build_mmdet(detector_name, moe=moe)
    assert moe == before
