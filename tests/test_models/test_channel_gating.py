import copy
from pathlib import Path

import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from damex.errors import ConfigError
from damex.models.config import read_moe
from damex.models.context import RoutingContext
from damex.papers.channel_gating import ChannelGating, insert_channels

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


@pytest.fixture
def batch(make_batch):
    return make_batch([0, 2], sizes=[(64, 96), (64, 40)], boxes=[1, 3])


@pytest.fixture
def gates_of(monkeypatch):
    """The gates of the last step of a detector."""
    seen = []
    forward = ChannelGating.forward

    def spy(self, *args):
        seen.append(forward(self, *args))
        return seen[-1]

    monkeypatch.setattr(ChannelGating, "forward", spy)
    return lambda: seen[-1]


def test_every_gated_layer_has_its_gates_also_without_losses(
    build, batch, gates_of, run_loss
):
    detector = build(moe=changed(l1_weight=0, aux_weight=0.0))
    losses = run_loss(detector, batch)
    assert "moe_active_channels" in losses
    assert not [key for key in losses if key.startswith("loss_moe")]
    assert list(gates_of().layers) == LAYERS
    # Base width 32: stage 3 has 256 channels; FFNs have 256 hidden ones.
    assert {g.shape for g in gates_of().layers.values()} == {(2, 256)}
    assert gates_of().logits_BE.shape == (2, 4)  # classes


def test_losses_by_their_formulas(build, batch, gates_of, run_loss):
    detector = build(moe=changed(l1_weight=0.01, aux_weight=0.5))
    losses = run_loss(detector, batch)
    layers = list(gates_of().layers.values())
    summed_B = torch.stack([gates_BC.sum(dim=1) for gates_BC in layers]).sum(dim=0)
    torch.testing.assert_close(losses["loss_moe_l1"], 0.01 * summed_B.mean())
    opened = sum((gates_BC > 0).sum() for gates_BC in layers)
    share = (opened / (2 * 7 * 256)).item()
    assert losses["moe_active_channels"].item() == pytest.approx(share)
    expected = []
    log_probs_BE = functional.log_softmax(gates_of().logits_BE, dim=1)
    for log_probs_E, sample in zip(log_probs_BE, batch["data_samples"], strict=True):
        expected.append(-log_probs_E[sample.gt_instances.labels.unique()].mean())
    torch.testing.assert_close(
        losses["loss_moe_embedding"], 0.5 * torch.stack(expected).mean()
    )


def test_the_embedding_can_learn_the_dataset(build, make_batch, gates_of, run_loss):
    """Image 1 is of an unknown dataset and does not count."""
    detector = build(moe=changed(aux_target="datasets"))
    losses = run_loss(detector, make_batch([0, None, 2]))
    logits_BE = gates_of().logits_BE
    assert logits_BE.shape == (3, 3)
    expected = functional.cross_entropy(logits_BE[[0, 2]], torch.tensor([0, 2]))
    torch.testing.assert_close(losses["loss_moe_embedding"], expected)


def test_it_trains_and_predicts(build, batch, run_loss, run_predict, total):
    """With bottlenecks."""
    changes = dict(
        backbone=dict(depth=50, base_channels=8),
        neck=dict(in_channels=[64, 128, 256]),
    )
    detector = build(moe=CHANNELS, **changes)
    total(run_loss(detector, batch)).backward()
    without = [n for n, p in detector.named_parameters() if p.grad is None]
    assert without == []
    first = run_predict(detector, batch)
    other = build(moe=CHANNELS, **changes)
    other.load_state_dict(detector.state_dict())
    for sample in batch["data_samples"]:  # no dataset is read
        sample.set_metainfo(dict(group_id=-1, dataset_id=-1))
    second = run_predict(copy.deepcopy(other), batch)
    for a, b in zip(first, second, strict=True):
        assert len(a.pred_instances) > 0
        assert torch.equal(a.pred_instances.bboxes, b.pred_instances.bboxes)
        assert "routing_counts" not in a


def test_skipping_predicts_the_same_and_computes_less(build, batch, run_predict):
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


def test_gates_do_not_change_with_padding(build, make_batch, gates_of, run_predict):
    detector = build(moe=CHANNELS)
    sizes = [(64, 96), (64, 72)]  # one batch, both ways
    run_predict(detector, make_batch([0, 0], sizes=sizes))
    tight = gates_of().logits_BE
    detector.data_preprocessor.pad_size_divisor = 128
    run_predict(detector, make_batch([0, 0], sizes=sizes))
    torch.testing.assert_close(gates_of().logits_BE, tight)


def test_dense_weights_keep_their_names_and_load(build, batch, run_predict):
    dense, gated = build(moe=None), build(moe=CHANNELS)
    result = gated.load_state_dict(dense.state_dict(), strict=False)
    assert result.unexpected_keys == []
    assert {key.split(".")[0] for key in result.missing_keys} == {"channel_gating"}
    with torch.no_grad():
        logits = gated.channel_gating.path.embedding.fc
        logits.weight.zero_()
        logits.bias.fill_(1.0)
        for head in gated.channel_gating.path.heads.values():
            head.weight_CE.zero_()
            head.weight_CE[:, 0] = 1.0  # every gate is 1
    for a, b in zip(run_predict(gated, batch), run_predict(dense, batch), strict=True):
        torch.testing.assert_close(
            a.pred_instances.scores, b.pred_instances.scores, rtol=1e-3, atol=1e-4
        )


def test_stage_two_trains_the_rest_only(build, batch, run_loss, total):
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
    folder = Path(__file__).parents[2] / "configs/_base_/moe"
    first = Config.fromfile(folder / "deepmoe.py").moe
    second = Config.fromfile(folder / "deepmoe_stage2.py").moe
    assert second.layers == first.layers
    assert second.channels.embedding == first.channels.embedding
    assert second.channels.frozen is True


CONVS = ("0.conv1", "0.conv2", "1.conv1", "1.conv2")


def test_the_report_names_every_layer_and_the_cost(build):
    config = read_moe({**CHANNELS, "layers": dict(backbone=[2], decoder=[1])})
    mount = dict(context=RoutingContext(), num_groups=3)
    detector = build(moe=None)
    gating, report = insert_channels(detector, config.layers, config.channels, **mount)
    # Base width 32: stage 2 has two blocks of two convs of 128 channels.
    # Convs 3*8*9 and 8*16*9, norms 2*8 and 2*16, linear 16*4 + 4; heads 4 * 768.
    assert 216 + 1152 + 16 + 32 + 68 + 4 * 768 == 4556
    assert str(report).splitlines() == [
        "gates on 768 channels of 5 layers (4,556 parameters more):",
        *(f"  backbone.2.{block}: 128 channels" for block in CONVS),
        "  decoder.1: 256 channels",
    ]
    assert gating.path.names == (*(f"backbone.2.{one}" for one in CONVS), "decoder.1")


def test_without_auxiliary_loss_the_embedding_has_any_size(build):
    embedding = dict(type="ShallowEmbedding", widths=(8,), embed_dims=7)
    moe = changed(embedding=embedding, aux_weight=0)
    assert build(moe=moe).channel_gating.path.embedding.embed_dims == 7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(router=dict(type="LinearRouter")), "no use for moe.router"),
        (dict(num_experts=2), "no use for moe.num_experts"),
        (dict(channels=[1]), r"moe.channels must be a dict .*, got \[1\]"),
        (dict(layers=dict(backbone=[2, 2])), "listed twice"),
        (dict(layers=dict(decoder=[0, 0])), "listed twice"),
        (changed(l1_wieght=1), "key 'l1_wieght'; did you mean 'l1_weight'"),
        (changed(l1_weight=-0.1), "l1_weight must be a number of 0 or more, got -0.1"),
        (changed(aux_weight=True), "aux_weight must be .*got True"),
        (changed(aux_target="boxes"), r"one of \('classes', 'datasets'\), got 'boxes'"),
        (changed(gate_init="zeros"), "gate_init: .*'zeros'.*'ones'"),
        (changed(frozen=1), "frozen must be True or False, got 1"),
        (changed(embedding=dict(type="Shallow")), "embedding has the unknown type"),
        (changed(embedding=dict(widths=())), "channels.embedding = .*positive widths"),
        (changed(embedding=dict(embed_dims=7)), "embed_dims is 7, .* has 4 classes"),
    ],
)
def test_settings_that_cannot_work_are_named(build, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(moe={**CHANNELS, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(moe=changed(aux_target="datasets"), num_groups=None),
            "no mixture to take the dataset groups",
        ),
        (
            dict(backbone=dict(type="MobileNetV2")),
            r"needs a ResNet of mmdet .*MobileNetV2",
        ),
        (
            dict(backbone=dict(type="ResNeXt", depth=50, groups=4, base_width=4)),
            r"backbone.3.0 is a resnext.Bottleneck; ch",
        ),
        ({"backbone.conv_cfg": dict(type="ConvAWS")}, "need a Conv2d .*got ConvAWS2d"),
    ],
    ids=["mixture", "MobileNet", "ResNeXt", "standardized kernels"],
)
def test_detectors_that_cannot_be_gated_are_refused(model_config, changes, message):
    config = model_config(moe=CHANNELS)
    for key, value in changes.items():
        owner, _, field = key.rpartition(".")
        (config[owner] if owner else config)[field] = value
    with pytest.raises(ConfigError, match=message):
        MODELS.build(config)
