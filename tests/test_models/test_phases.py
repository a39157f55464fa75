"""Phases of a training: gates that anneal, router warm-up, upcycling on the way."""

import copy

import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN
from mmdet.registry import MODELS
from mmengine.optim import OptimWrapper

from damex.errors import ConfigError
from damex.models.blocks import MoEFFN
from damex.models.context import RoutingContext
from damex.models.insertion import moe_blocks
from damex.models.starts import DensePhase
from damex.moe import FFNExperts, LinearRouter, MoELayer, TopKGate
from tests.test_models.test_detectors import assert_same

SWITCH, MAX_ITERS = 3, 8
ANNEALED = dict(
    layers=dict(decoder=[0, 2]),
    router=dict(type="MLPRouter", hidden_dims=8),
    gate=dict(type="DenseToSparseGate", start_temperature=4.0, end_temperature=1.0),
)
WARMED_UP = dict(
    layers=dict(decoder=[0, 2]),
    gate=dict(type="TopKGate", k=1),
    losses=[
        dict(type="SeparateRouterLoss"),
        dict(type="LoadBalanceLoss", weight=0.01),
    ],
    router_warmup=dict(iters=SWITCH),
)
EXPERTS = dict(
    layers=dict(encoder=[1], decoder=[0, 2]),
    num_experts=3,
    gate=dict(type="TopKGate", k=2, renormalize=True),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
)
UPCYCLED = dict(**EXPERTS, upcycling=dict(iters=SWITCH))
PATCHES = dict(
    layers=dict(backbone=[3]),
    num_experts=4,
    experts=dict(type="PatchConvExperts", patch_size=1),
)
# Padding in the encoder, fillers among the denoising queries.
BATCH = dict(sizes=[(64, 64), (64, 40)], boxes=[1, 3])


def make(build, moe, state=None):
    detector = build(moe=moe).train()
    if state is not None:
        detector.load_state_dict(state)
    # weight decay moves all parameters that the optimizer does not skip
    optimizer = torch.optim.AdamW(detector.parameters(), lr=1e-3, weight_decay=0.1)
    return detector, OptimWrapper(optimizer, clip_grad=dict(max_norm=0.1))


def begin(detector, wrapper, iteration=SWITCH):
    detector.begin_step(
        iteration=iteration, max_iters=MAX_ITERS, optimizer=wrapper.optimizer
    )


def train(detector, wrapper, make_batch, iterations):
    logs = []
    for iteration in iterations:
        detector.train()
        begin(detector, wrapper, iteration)
        torch.manual_seed(iteration)
        batch = make_batch([0, 1], seed=iteration, **BATCH)
        logs.append(detector.train_step(batch, wrapper))
    return logs


def snapshot(detector):
    return {name: p.detach().clone() for name, p in detector.named_parameters()}


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def routers(detector):
    return {n for n, _ in detector.named_parameters() if ".moe.router." in n}


def test_progress_runs_from_the_first_to_the_last_iteration(build):
    detector = build(moe=ANNEALED)
    cases = [(0, 11, 0.0), (4, 11, 0.4), (10, 11, 1.0), (12, 11, 1.0), (0, 1, 0.0)]
    for iteration, max_iters, progress in cases:
        detector.begin_step(iteration=iteration, max_iters=max_iters)
        for block in moe_blocks(detector):
            assert block.moe.gate.progress.item() == pytest.approx(progress)


def test_gates_of_a_detector_follow_the_training(
    build, make_batch, run_loss, run_predict
):
    detector, loaded = build(moe=ANNEALED), build(moe=ANNEALED).train()
    data = loaded.data_preprocessor(make_batch([0, 1]), True)
    with pytest.raises(RuntimeError, match="the training, which is not set"):
        loaded(**data, mode="loss")
    run_loss(detector, make_batch([0, 1]), iteration=5, max_iters=11)
    run_predict(detector, make_batch([0, 1]))
    loaded.load_state_dict(detector.state_dict())
    for block in (*moe_blocks(detector), *moe_blocks(loaded)):
        assert block.moe.gate.progress == 0.5
        # halfway between 4 and 1 on a logarithmic scale
        assert block.moe.gate.temperature.item() == pytest.approx(2.0)


@pytest.mark.parametrize("with_cp", [False, True])
def test_a_balance_moves_once_per_step(build, make_batch, run_loss, with_cp):
    """Also when experts are recomputed, which must choose as the forward did."""
    balance = dict(type="BiasBalancer", rate=0.125)
    moe = dict(
        layers=dict(decoder=[0]),
        gate=dict(type="TopKGate", k=1, balance=balance),
        shared_expert=dict(type="SharedExpert", hidden_dims=16),
        with_cp=with_cp,
    )
    detector = build(moe=moe)
    (block,) = moe_blocks(detector)
    assert block.moe.shared_expert.expert.w1_EDH.shape == (1, 64, 16)
    balance = block.moe.gate.balance
    for step in range(3):
        counts_E = balance.counts_E.clone()
        before_E = balance.bias_E.clone()
        losses = run_loss(detector, make_batch([0, 1, 2]))
        expected_E = before_E + 0.125 * torch.sign(counts_E.sum() / 3 - counts_E)
        torch.testing.assert_close(balance.bias_E, expected_E)
        assert (counts_E.sum() > 0) == (step > 0)
        losses["loss_cls"].backward()
        assert balance.seen_E.sum() == 0  # recomputation does not count again
        assert block.moe.shared_expert.expert.w1_EDH.grad.abs().sum() > 0


def test_first_only_routers_change_and_then_all_but_them(build, make_batch):
    detector, wrapper = make(build, WARMED_UP)
    start = snapshot(detector)
    first = train(detector, wrapper, make_batch, range(3))
    middle = snapshot(detector)
    assert changed(start, middle) == routers(detector)
    assert len(routers(detector)) == 2
    then = train(detector, wrapper, make_batch, range(3, 6))
    end = snapshot(detector)
    assert changed(middle, end) & routers(detector) == set()
    # Every parameter that weight decay or a gradient can move has moved.
    still = end.keys() - changed(middle, end) - routers(detector)
    assert [name for name in still if end[name].abs().sum() > 0] == []
    assert "loss_moe_separate_router" in first[0]
    assert "loss_moe_separate_router" not in then[0]
    assert "moe_separate_router" in then[0]


@pytest.mark.parametrize(
    ("moe", "cut"),
    [
        (UPCYCLED, SWITCH - 1),
        (UPCYCLED, SWITCH),
        (UPCYCLED, SWITCH + 1),
        (WARMED_UP, SWITCH - 1),
        (WARMED_UP, SWITCH),
    ],
)
def test_a_resumed_run_equals_an_uninterrupted_one(build, make_batch, moe, cut):
    whole, whole_wrapper = make(build, moe)
    train(whole, whole_wrapper, make_batch, range(5))
    first, first_wrapper = make(build, moe)
    train(first, first_wrapper, make_batch, range(cut))
    resumed, wrapper = make(build, moe, state=first.state_dict())
    wrapper.load_state_dict(copy.deepcopy(first_wrapper.state_dict()))
    train(resumed, wrapper, make_batch, range(cut, 5))
    assert changed(whole.state_dict(), resumed.state_dict()) == set()


def test_gradients_accumulated_in_the_warmup_do_not_reach_frozen_routers(
    build, make_batch
):
    detector, wrapper = make(build, WARMED_UP)
    wrapper._accumulative_counts = 4
    start = snapshot(detector)
    train(detector, wrapper, make_batch, range(4))
    found = changed(start, snapshot(detector))
    assert found & routers(detector) == set()
    assert found


def test_a_share_is_of_all_iterations(build, make_batch):
    share = dict(share=0.3)  # of 8: 2.4, so 3 iterations
    detector, wrapper = make(build, {**WARMED_UP, "router_warmup": share})
    (log,) = train(detector, wrapper, make_batch, [2])
    assert "loss_moe_separate_router" in log
    middle = snapshot(detector)
    (log,) = train(detector, wrapper, make_batch, [3])
    assert "moe_separate_router" in log
    assert changed(middle, detector.state_dict()) & routers(detector) == set()
    detector = build(moe={**UPCYCLED, "upcycling": share})
    for iteration in (2, 3):
        detector.begin_step(iteration=iteration, max_iters=MAX_ITERS)
        assert detector.upcycling.is_dense == (iteration == 2)


def test_frozen_parameters_of_the_backbone_stay_frozen(model_config, make_batch):
    config = model_config(moe=WARMED_UP)
    config.backbone.frozen_stages = 1
    detector = MODELS.build(config)
    detector.init_weights()
    detector.train()
    optimizer = torch.optim.AdamW(detector.parameters(), lr=0.001)
    train(detector, OptimWrapper(optimizer), make_batch, [0, 5])
    assert not detector.backbone.layer1[0].conv1.weight.requires_grad
    assert detector.backbone.layer2[0].conv1.weight.requires_grad
    assert not moe_blocks(detector)[0].moe.router.weight_ED.requires_grad


def test_the_dataset_loss_can_warm_up_routers_of_patches(build, make_batch):
    moe = dict(
        **PATCHES,
        losses=[dict(type="DatasetRoutingLoss")],
        router_warmup=dict(iters=1, loss="dataset_routing"),
    )
    detector, wrapper = make(build, moe)
    start = snapshot(detector)
    train(detector, wrapper, make_batch, [0])
    assert changed(start, snapshot(detector)) == routers(detector)


@pytest.mark.parametrize(
    ("moe", "option"), [(WARMED_UP, "router_warmup"), (UPCYCLED, "upcycling")]
)
def test_a_phase_needs_the_iteration(build, make_batch, moe, option):
    detector, wrapper = make(build, moe)
    with pytest.raises(RuntimeError, match=f"moe.{option} needs the iteration"):
        detector.train_step(make_batch([0, 1]), wrapper)


@pytest.mark.parametrize(
    ("field", "message"),
    [("router_warmup", "nothing but the routers"), ("upcycling", "never have experts")],
)
@pytest.mark.parametrize("iters", [8, 9])
def test_a_phase_as_long_as_the_training_is_rejected_before_the_first_step(
    build, make_batch, field, message, iters
):
    moe = WARMED_UP if field == "router_warmup" else UPCYCLED
    detector, wrapper = make(build, {**moe, field: dict(iters=iters)})
    start = snapshot(detector)
    message = rf"{field}.iters is {iters}, .*has 8 iterations.*{message}.*fewer iters"
    with pytest.raises(ConfigError, match=message):
        train(detector, wrapper, make_batch, [0])
    assert changed(start, detector.state_dict()) == set()


FINE = dict(fine_grained=dict(parts=2, copies=2), num_experts=None)
MISTAKES = [
    (WARMED_UP, dict(router_warmup=None), "no minimum .* set moe.router_warmup=dict"),
    (WARMED_UP, dict(router_warmup=dict()), "share=None and iters=None"),
    (WARMED_UP, dict(router_warmup=dict(iters=0)), "iters must be an int.*got 0"),
    (WARMED_UP, dict(router_warmup=dict(share=1.0)), "between 0 and 1, .*got 1.0"),
    (
        WARMED_UP,
        dict(router_warmup=dict(iters=1, loss="load_balanc")),
        "loss is 'load_balanc', .*did you mean 'load_balance'",
    ),
    (WARMED_UP, dict(losses=[]), "'separate_router', which is not a loss in moe.loss"),
    (UPCYCLED, dict(upcycling=dict(share=0.1, iters=2)), "share=0.1 and iters=2"),
    (UPCYCLED, dict(router_warmup=dict(iters=2)), "and moe.router_warmup cannot"),
    (UPCYCLED, FINE, "moe.upcycling and moe.fine_grained cannot"),
    (UPCYCLED, dict(shared_expert=dict(type="SharedExpert")), "shared_expert cannot"),
    (UPCYCLED, PATCHES, "moe.upcycling is for FFNs"),
    (PATCHES, dict(block=dict(norm="pre")), "moe.block is for FFNs"),
]


@pytest.mark.parametrize(("moe", "changes", "message"), MISTAKES)
def test_mistakes_name_field_value_and_choice(build, moe, changes, message):
    with pytest.raises(ConfigError, match=message) as caught:
        build(moe={**moe, **changes})
    assert "\n" not in str(caught.value)


def test_a_warmup_needs_two_groups(build):
    with pytest.raises(ConfigError, match="needs two or more, got 1"):
        build(moe=WARMED_UP, num_groups=1)


def banks(detector):
    return [
        parameter
        for block in moe_blocks(detector)
        for parameter in block.moe.experts.parameters()
    ]


def test_the_dense_phase_is_the_training_of_a_dense_detector(
    build, make_batch, records
):
    dense, dense_wrapper = make(build, moe=None)
    detector, wrapper = make(build, UPCYCLED, state=dense.state_dict())
    for block in moe_blocks(detector):
        block.moe.router.forward = None  # would fail
    theirs = train(dense, dense_wrapper, make_batch, range(SWITCH))
    ours = train(detector, wrapper, make_batch, range(SWITCH))
    assert records == {}
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()  # no loss of a router
        for name in mine:
            torch.testing.assert_close(mine[name], other[name])
    block, ffn = moe_blocks(detector)[-1], dense.decoder.layers[2].ffn
    experts = block.moe.experts
    torch.testing.assert_close(experts.w1_EDH[0].t(), ffn.layers[0][0].weight)
    torch.testing.assert_close(experts.w2_EHD[0].t(), ffn.layers[1].weight)


def test_experts_start_as_the_ffn_with_its_moments_and_learn(
    build, make_batch, run_predict
):
    detector, wrapper = make(build, UPCYCLED)
    start = snapshot(detector)
    train(detector, wrapper, make_batch, range(SWITCH))
    batch = make_batch([0, 2], seed=9, **BATCH)
    before = run_predict(detector, batch)
    state = wrapper.optimizer.state
    first = [
        [t[0].clone() for t in (p, state[p]["exp_avg"], state[p]["exp_avg_sq"])]
        for p in banks(detector)
    ]
    begin(detector, wrapper)
    assert not detector.upcycling.is_dense
    for parameter, kept in zip(banks(detector), first, strict=True):
        own = state[parameter]
        for tensor, tensor_0 in zip(
            (parameter, own["exp_avg"], own["exp_avg_sq"]), kept, strict=True
        ):
            assert tensor_0.abs().sum() > 0
            assert torch.equal(tensor, tensor_0.expand_as(tensor))
        assert own["step"] == SWITCH
    for name in routers(detector):
        router = detector.get_parameter(name)
        assert torch.equal(router, start[name])  # no weight decay either
        assert router not in state
        assert router.requires_grad
    assert_same(before, run_predict(detector, batch), rtol=1e-5, atol=1e-5)
    (log,) = train(detector, wrapper, make_batch, [SWITCH])
    assert log["loss_moe_dataset_routing"] > 0
    assert routers(detector) <= changed(start, detector.state_dict())
    begin(detector, wrapper, SWITCH + 1)  # copies no more
    for w1_EDH in (block.moe.experts.w1_EDH for block in moe_blocks(detector)):
        assert not torch.equal(w1_EDH[0], w1_EDH[1])  # they see other tokens


def test_a_checkpoint_of_the_dense_phase_is_loaded_densely_or_into_experts(
    build, make_batch, run_predict
):
    detector, wrapper = make(build, UPCYCLED)
    train(detector, wrapper, make_batch, range(2))
    batch = make_batch([0, 2], **BATCH)
    before = run_predict(detector, batch)
    plain = build(moe=EXPERTS)
    plain.load_state_dict(detector.state_dict())
    for parameter in banks(detector):
        parameter.data[1:] = float("nan")  # not used
    loaded = build(moe=UPCYCLED)
    loaded.load_state_dict(detector.state_dict())
    for other in (plain, loaded):
        assert_same(before, run_predict(other, batch), rtol=1e-5, atol=1e-5)
    assert "routing_counts" not in run_predict(loaded, batch)[0]
    begin(detector, wrapper)
    loaded.load_state_dict(detector.state_dict())
    assert not loaded.upcycling.is_dense
    assert "routing_counts" in run_predict(loaded, batch)[0]


def test_recomputed_experts_learn_the_same(build, make_batch):
    plain, plain_wrapper = make(build, UPCYCLED)
    other, wrapper = make(build, moe={**UPCYCLED, "with_cp": True})
    train(plain, plain_wrapper, make_batch, range(2))
    train(other, wrapper, make_batch, range(2))
    assert changed(plain.state_dict(), other.state_dict()) == set()


def test_schedules_of_gates_begin_with_the_experts(build):
    gate = dict(type="DenseToSparseGate", start_temperature=4.0, end_temperature=1.0)
    detector = build(moe={**UPCYCLED, "gate": gate})
    found = []
    for iteration in (0, SWITCH, 5, MAX_ITERS - 1):
        detector.begin_step(iteration=iteration, max_iters=MAX_ITERS)
        found.append(moe_blocks(detector)[0].moe.gate.progress.item())
    assert found == [0.0, 0.0, 0.5, 1.0]


def test_without_the_option_nothing_new_is_in_the_state_dict(build):
    plain = build(moe=EXPERTS)
    new = set(build(moe=UPCYCLED).state_dict()) - set(plain.state_dict())
    paths = ("encoder.layers.1", "decoder.layers.0", "decoder.layers.2")
    assert new == {f"{path}.ffn.dense_phase.flag" for path in paths}
    assert plain.trains_in_stages is False


def test_experts_that_are_loaded_stay_experts(build):
    plain = build(moe=EXPERTS)
    detector, wrapper = make(build, UPCYCLED, state=plain.state_dict())
    detector.begin_step(iteration=0, max_iters=MAX_ITERS, optimizer=wrapper.optimizer)
    begin(detector, wrapper)
    assert not detector.upcycling.is_dense
    for ours, theirs in zip(banks(detector), banks(plain), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("activation", ["PReLU", "ReLU", "GELU"])
def test_a_dense_block_is_the_ffn_that_it_loads(activation):
    torch.manual_seed(0)
    layer = MoELayer(
        router=LinearRouter(8, 2),
        gate=TopKGate(k=1, renormalize=True),
        experts=FFNExperts(2, 8, 16, activation=activation.lower()),
    )
    parts = dict(context=RoutingContext(), dense_phase=DensePhase())
    block = MoEFFN(layer, name="decoder.0", **parts)
    dense = FFN(embed_dims=8, feedforward_channels=16, act_cfg=dict(type=activation))
    if activation == "PReLU":
        torch.nn.init.constant_(dense.layers[0][1].weight, -1.5)
    block.load_state_dict(dense.state_dict())
    assert block.dense_phase.is_open
    tokens_BND = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(block(tokens_BND), dense(tokens_BND))
    block(tokens_BND).sum().backward()
    for parameter in block.moe.experts.parameters():
        assert parameter.grad[0].abs().sum() > 0
        assert parameter.grad[1].abs().sum() == 0


@pytest.mark.parametrize("renormalize", [False, True])
def test_a_gate_that_scales_the_ffns_down_is_noted(build, monkeypatch, renormalize):
    logged = []
    monkeypatch.setattr(
        "damex.models.detectors.print_log", lambda text, **_: logged.append(text)
    )
    build(moe={**UPCYCLED, "gate": dict(renormalize=renormalize)})
    notes = [line for line in logged if line.startswith("moe.upcycling: the FFNs of 3")]
    assert len(notes) == (not renormalize)
