import copy
import pickle

import pytest
import torch
from mmengine.config import Config
from torch.autograd.graph import saved_tensors_hooks

from damex.errors import ConfigError
from damex.models.context import RoutingContext, take_num_cp
from damex.papers.channels import ChannelGates
from tests.conftest import shipped_configs

MIXTURES = {path.stem: path for path in shipped_configs(folder="moe")}
# Group ids, masks, gate noise and dropout all have to be those of the first run.
NOISY = dict(
    layers=dict(encoder="all", decoder="all"),
    gate=dict(type="TopKGate", noise="gaussian", noise_scale=2.0),
    experts=dict(type="FFNExperts", dropout=0.3),
    losses=[
        dict(type="DatasetRoutingLoss", weight=0.1),
        dict(type="LoadBalanceLoss", weight=0.1),
    ],
)
SIZES = dict(sizes=[(64, 96), (64, 32)], boxes=[1, 3])


@pytest.fixture
def step(run_loss, total):
    """Loss terms and all gradients of one training step."""

    def run(detector, batch):
        losses = run_loss(detector, batch)
        total(losses).backward()
        grads = {n: p.grad for n, p in detector.named_parameters()}
        return {k: v for k, v in losses.items() if "loss" in k}, grads

    return run


def test_losses_and_gradients_are_those_without(
    detector_name, build_mmdet, make_batch, step
):
    """Also if the experts are recomputed in the recomputation."""
    parts = dict(encoder=dict(), decoder=dict())
    plain = build_mmdet(detector_name, moe=NOISY, **parts)
    parts = dict(encoder=dict(num_cp=2), decoder=dict(num_cp=1))
    recomputed = build_mmdet(detector_name, moe={**NOISY, "with_cp": True}, **parts)
    batch = make_batch([1, 0], **SIZES)
    expected, expected_grads = step(plain, batch)
    losses, grads = step(recomputed, batch)
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(grads, expected_grads)
    assert losses["loss_moe_dataset_routing"] > 0


def test_less_is_kept_for_the_backward_pass(build_mmdet, make_batch, run_loss):
    kept = []
    for num_cp in (0, 1, 2):
        detector = build_mmdet("MoEDINO", moe=NOISY, encoder=dict(num_cp=num_cp))
        sizes = []

        def count(tensor, sizes=sizes):
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        with saved_tensors_hooks(count, lambda tensor: tensor):
            run_loss(detector, make_batch([0, 1], sizes=[(256, 256)] * 2))
        kept.append(sum(sizes))
    # Each of the two layers weighs the same, and both are a good part of it all.
    assert kept[0] - kept[1] == pytest.approx(kept[1] - kept[2], rel=0.1)
    assert kept[2] < 0.75 * kept[0]


def test_nothing_is_recomputed_without_gradients(
    build_mmdet, make_batch, run_predict, monkeypatch
):
    monkeypatch.setattr("damex.models.context.checkpoint", None)
    detector = build_mmdet("MoEDINO", moe=NOISY, encoder=dict(num_cp=2))
    assert len(run_predict(detector, make_batch([0, 1]))) == 2


def test_a_second_step_before_the_backward_pass_of_the_first(
    build_mmdet, make_batch, run_loss, total
):
    """The recomputation sees its own step, not the one that is open or came last."""
    first, second = make_batch([1, 0], **SIZES), make_batch([0, 1], seed=5)
    grads = []
    for num_cp in (0, 2):
        detector = build_mmdet("MoEDINO", moe=NOISY, encoder=dict(num_cp=num_cp))
        loss = total(run_loss(detector, first))
        run_loss(detector, second)
        with detector.routing.step(torch.tensor([0])):
            loss.backward()
            assert detector.routing.records == {}
            assert detector.routing.group_ids_B.tolist() == [0]
        grads.append({n: p.grad for n, p in detector.named_parameters()})
    torch.testing.assert_close(grads[1], grads[0])


def test_copies_recompute_their_own_layers(build_mmdet, make_batch, step):
    detector = build_mmdet("MoEDINO", moe=NOISY, encoder=dict(num_cp=2))
    plain = build_mmdet("MoEDINO", moe=NOISY)
    assert list(detector.state_dict()) == list(plain.state_dict())
    batch = make_batch([0, 1], **SIZES)
    for copied in (copy.deepcopy(detector), pickle.loads(pickle.dumps(detector))):
        for layer in copied.encoder.layers:
            assert layer.forward.args[0] is layer
            assert layer.forward.args[1] is copied.routing
            assert layer.ffn.context is copied.routing
        torch.testing.assert_close(
            step(copied, batch), step(copy.deepcopy(detector), batch)
        )


def test_replay_restores_everything_and_keeps_no_record():
    context = RoutingContext()
    mask, ids = torch.tensor([[True, False, True]]), torch.tensor([1])
    with context.step(ids), context.component(mask):
        context.foreground = "a field of later"
        seen, packing = dict(vars(context)), context.packing
        context.add("first", "record")
    del context.foreground
    with context.step():
        context.add("second", "record")
        with context.replay(seen):
            assert context.packing is packing is not None
            assert context.group_ids_B is ids
            assert context.foreground == "a field of later"
            context.add("again", "record")
        assert context.records == {"second": "record"}
        assert context.packing is None
        assert not hasattr(context, "foreground")


def test_num_cp_is_taken_out_of_a_copy_of_the_config():
    config = dict(encoder=dict(num_layers=2, num_cp=1), decoder=dict(num_layers=2))
    before = copy.deepcopy(config)
    taken, counts = take_num_cp(config)
    assert config == before
    assert counts == {"encoder": 1}
    assert taken["encoder"] == dict(num_layers=2)
    for value in (3, -2, 1.5, True, "all"):
        config["encoder"]["num_cp"] = value
        with pytest.raises(ConfigError, match=rf"r.num_cp.* 0 to 2 .* got {value!r}"):
            take_num_cp(config)


@pytest.mark.parametrize("name", [None, *MIXTURES])
def test_every_shipped_mixture_can_be_recomputed(name, build_mmdet, make_batch, step):
    moe = name and Config.fromfile(MIXTURES[name]).moe  # None: dense
    batch = make_batch([1, 0], **SIZES)
    found = []
    for num_cp in (0, 2):
        parts = dict(encoder=dict(num_cp=num_cp), decoder=dict(num_cp=num_cp))
        detector = build_mmdet("MoEDINO", moe=moe, **parts)
        torch.manual_seed(1)
        found.append(step(detector, batch))
    torch.testing.assert_close(found[1], found[0])


def test_nothing_is_left_over_after_a_step():
    context = RoutingContext()
    context.add("decoder.0", object())  # outside of a step
    gates = ChannelGates(torch.zeros(2, 1), layers={"encoder.0": torch.ones(2, 3)})
    with context.step(torch.tensor([0, 1]), gates=gates):
        assert context.records == {}
        assert context.layer_gates("encoder.0") is gates.layers["encoder.0"]
        with context.component(torch.tensor([[True, False]] * 2)):
            assert context.packing.position_V.tolist() == [0, 2]
        assert context.packing is None
        context.add("decoder.0", object())
        assert list(context.records) == ["decoder.0"]
    assert (context.group_ids_B, context.records) == (None, {})
    with pytest.raises(RuntimeError, match="call its loss, predict or forward"):
        context.layer_gates("encoder.0")


def test_a_failed_step_leaves_nothing_and_steps_do_not_nest():
    context = RoutingContext()
    with (
        pytest.raises(RuntimeError, match="do not nest"),
        context.step(torch.ones(1)),
        context.component(torch.ones(1, 1, dtype=torch.bool)),
        context.step(),
    ):
        pass
    assert context.packing is None
    assert (context.group_ids_B, context.records) == (None, {})
    with context.step():
        assert context.records == {}
