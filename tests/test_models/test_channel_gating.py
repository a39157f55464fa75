"""None"""

import copy

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from damex.models.context import RoutingContext
from damex.moe import ChannelGates

CHANNELS = dict(
    layers=dict(backbone=[3], encoder=[0], decoder="even"),
    channels=dict(embedding=dict(type="ShallowEmbedding", widths=(8, 16))),
)
LAYERS = [
    *(f"backbone.3.{block}.conv{conv}" for block in (0, 1) for conv in (1, 2)),
    "encoder.0",
    "decoder.0",
    "decoder.2",
]


def changed(**channels):
    return {**CHANNELS, "channels": {**CHANNELS["channels"], **channels}}


def run_loss(detector, batch):
    detector.train()
    torch.manual_seed(1)
    data = detector.data_preprocessor(copy.deepcopy(batch), True)
    return detector(**data, mode="loss")


def run_predict(detector, batch):
    detector.eval()
    data = detector.data_preprocessor(copy.deepcopy(batch), False)
    with torch.no_grad():
        return detector(**data, mode="predict")


def total(losses):
    return sum(
        torch.stack(v).sum() if isinstance(v, list) else v
        for k, v in losses.items()
        if "loss" in k
    )


@pytest.fixture
def batch(make_batch):
    return make_batch([0, 2], sizes=[(64, 64), (64, 32)], boxes=[1, 3])


@pytest.fixture
def gates_of(monkeypatch):
    """The gates of the last step of a detector."""
    from damex.models.channels import ChannelGating

    seen = []
    forward = ChannelGating.forward

    def spy(self, *args):
        seen.append(forward(self, *args))
        return seen[-1]

    monkeypatch.setattr(ChannelGating, "forward", spy)
    return lambda: seen[-1]


def test_every_gated_layer_has_its_gates(build, batch, gates_of):
    detector = build(moe=CHANNELS)
    run_loss(detector, batch)
    assert list(gates_of().layers) == LAYERS
    # Base width 32: stage 3 has 256 channels; FFNs have 256 hidden ones.
    assert {g.shape for g in gates_of().layers.values()} == {(2, 256)}
    assert gates_of().logits_BE.shape == (2, 4)  # classes


def test_losses_by_their_formulas(build, batch, gates_of):
    detector = build(moe=changed(l1_weight=0.01, aux_weight=0.5))
    losses = run_loss(detector, batch)
    layers = list(gates_of().layers.values())
    summed_B = torch.stack([gates_BC.sum(dim=1) for gates_BC in layers]).sum(dim=0)
    torch.testing.assert_close(losses["loss_moe_l1"], 0.01 * summed_B.mean())
    opened = sum((gates_BC > 0).sum() for gates_BC in layers)
    share = (opened / (2 * 7 * 256)).item()
    assert losses["moe_active_channels"].item() == pytest.approx(share)
    expected = []
    for logits_E, sample in zip(
        gates_of().logits_BE, batch["data_samples"], strict=True
    ):
        present = sorted(set(sample.gt_instances.labels.tolist()))
        log_probs_E = functional.log_softmax(logits_E, dim=0)
        expected.append(-log_probs_E[present].mean())
    torch.testing.assert_close(
        losses["loss_moe_embedding"], 0.5 * torch.stack(expected).mean()
    )


def test_the_embedding_can_learn_the_dataset(build, make_batch, gates_of):
    """Image 1 is of an unknown dataset and does not count."""
    detector = build(moe=changed(aux_target="datasets"))
    losses = run_loss(detector, make_batch([0, None, 2]))
    logits_BE = gates_of().logits_BE
    assert logits_BE.shape == (3, 3)
    expected = functional.cross_entropy(logits_BE[[0, 2]], torch.tensor([0, 2]))
    torch.testing.assert_close(losses["loss_moe_embedding"], expected)


def test_a_loss_of_weight_zero_is_not_there(build, batch):
    detector = build(moe=changed(l1_weight=0, aux_weight=0.0))
    losses = run_loss(detector, batch)
    assert not [key for key in losses if key.startswith("loss_moe")]
    assert "moe_active_channels" in losses


@pytest.mark.parametrize("depth", [18, 50], ids=["basic", "bottleneck"])
def test_it_trains_and_predicts(build, batch, depth):
    changes = {}
    if depth == 50:
        changes = dict(
            backbone=dict(depth=50, base_channels=8),
            neck=dict(in_channels=[64, 128, 256]),
        )
    detector = build(moe=CHANNELS, **changes)
    total(run_loss(detector, batch)).backward()
    without = [n for n, p in detector.named_parameters() if p.grad is None]
    assert without == []
    first, second = run_predict(detector, batch), run_predict(detector, batch)
    for a, b in zip(first, second, strict=True):
        assert len(a.pred_instances) > 0
        assert torch.equal(a.pred_instances.bboxes, b.pred_instances.bboxes)
        assert "routing_counts" not in a


def test_no_dataset_id_is_read_when_predicting(build, make_batch):
    detector = build(moe=changed(aux_target="datasets"))
    found = [run_predict(detector, make_batch(groups)) for groups in ([0], [2], [None])]
    for other in found[1:]:
        assert torch.equal(
            other[0].pred_instances.bboxes, found[0][0].pred_instances.bboxes
        )


def test_skipping_predicts_the_same_and_computes_less(build, batch):
    detector = build(moe=CHANNELS)
    found, flops = [], []
    for skip_closed in (True, False):
        for module in detector.modules():
            if hasattr(module, "skip_closed"):
                module.skip_closed = skip_closed
        with FlopCounterMode(display=False) as counter:
            found.append(run_predict(detector, batch))
        flops.append(counter.get_total_flops())
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(
            a.pred_instances.scores, b.pred_instances.scores, rtol=1e-4, atol=1e-5
        )
    assert flops[0] < flops[1]


def test_gates_do_not_change_with_padding(build, make_batch, gates_of):
    detector = build(moe=CHANNELS)
    sizes = [(64, 64), (64, 32)]
    run_predict(detector, make_batch([0, 0], sizes=sizes))
    tight = gates_of().logits_BE
    detector.data_preprocessor.pad_size_divisor = 128
    run_predict(detector, make_batch([0, 0], sizes=sizes))
    torch.testing.assert_close(gates_of().logits_BE, tight)


def test_dense_weights_keep_their_names_and_load(build, batch):
    dense, gated = build(moe=None), build(moe=CHANNELS)
    result = gated.load_state_dict(dense.state_dict(), strict=False)
    assert result.unexpected_keys == []
    assert {key.split(".")[0] for key in result.missing_keys} == {"channel_gating"}
    with torch.no_grad():
        for head in gated.channel_gating.path.heads.values():
            head.weight_CE.zero_()
        logits = gated.channel_gating.path.embedding.fc
        logits.weight.zero_()
        logits.bias.fill_(1.0)
        for head in gated.channel_gating.path.heads.values():
            head.weight_CE[:, 0] = 1.0  # every gate is 1
    for a, b in zip(run_predict(gated, batch), run_predict(dense, batch), strict=True):
        torch.testing.assert_close(
            a.pred_instances.scores, b.pred_instances.scores, rtol=1e-3, atol=1e-4
        )


def test_a_copy_and_a_loaded_state_predict_the_same(build, model_config, batch):
    detector = build(moe=CHANNELS)
    run_loss(detector, batch)  # batch norms learn
    other = MODELS.build(model_config(moe=CHANNELS))
    other.load_state_dict(detector.state_dict())
    expected = run_predict(detector, batch)
    twin = copy.deepcopy(detector)
    assert twin.routing is not detector.routing
    for found in (run_predict(twin, batch), run_predict(other, batch)):
        for a, b in zip(found, expected, strict=True):
            assert torch.equal(a.pred_instances.bboxes, b.pred_instances.bboxes)


def test_stage_two_trains_the_rest_only(build, batch):
    detector = build(moe=changed(frozen=True, l1_weight=1.0))
    before = copy.deepcopy(detector.state_dict())
    losses = run_loss(detector, batch)
    assert not [key for key in losses if key.startswith("loss_moe")]
    total(losses).backward()
    trained = [p for p in detector.parameters() if p.requires_grad]
    assert [p for p in trained if p.grad is None] == []
    torch.optim.AdamW(trained, lr=0.1).step()
    for key, value in detector.state_dict().items():
        if key.startswith("channel_gating"):
            assert torch.equal(value, before[key]), key
    name = "backbone.layer4.0.conv1.weight"
    assert not torch.equal(detector.state_dict()[name], before[name])


def test_raw_outputs_are_gated_too(build, batch):
    detector = build(moe=CHANNELS).eval()
    data = detector.data_preprocessor(copy.deepcopy(batch), False)
    with torch.no_grad():
        outputs = detector(**data, mode="tensor")
    assert len(outputs) > 0
    with pytest.raises(RuntimeError, match="only inside of a step"):
        detector.extract_feat(data["inputs"])


def test_both_stages_are_one_detector():
    """The checkpoint of deepmoe.py fits deepmoe_stage2.py."""
    from pathlib import Path

    folder = Path(__file__).parents[2] / "configs/_base_/moe"
    first = Config.fromfile(folder / "deepmoe.py").moe
    second = Config.fromfile(folder / "deepmoe_stage2.py").moe
    assert second.layers == first.layers
    assert second.channels.embedding == first.channels.embedding
    assert second.channels.frozen is True


def test_gates_are_known_during_the_step_only():
    context = RoutingContext()
    gates = ChannelGates(
        logits_BE=torch.zeros(1, 2), layers={"encoder.0": torch.ones(1, 3)}
    )
    with context.step(gates=gates):
        assert context.gates is gates
        assert context.layer_gates("encoder.0") is gates.layers["encoder.0"]
    with pytest.raises(RuntimeError, match="only inside of a step"):
        context.layer_gates("encoder.0")


def test_an_error_in_a_step_leaves_nothing_behind():
    context = RoutingContext()
    with pytest.raises(KeyError), context.step(gates=ChannelGates(torch.zeros(1), {})):
        context.layer_gates("decoder.9")
    with pytest.raises(RuntimeError, match="call the detector's loss, predict"):
        context.layer_gates("decoder.9")
