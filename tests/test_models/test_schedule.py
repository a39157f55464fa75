"""Gates and parameters that change with the iteration of a training."""

import pytest
import torch
from mmengine.optim import OptimWrapper

from damex.errors import ConfigError
from damex.models.insertion import moe_blocks

MOE = dict(
    layers=dict(decoder=[0, 2]),
    router=dict(type="MLPRouter", hidden_dims=8),
    gate=dict(type="DenseToSparseGate", start_temperature=4.0, end_temperature=1.0),
)


@pytest.mark.parametrize(
    ("iteration", "max_iters", "progress"),
    [
        (0, 11, 0.0),
        (4, 11, 0.4),  # iterations 0 to 10
        (10, 11, 1.0),
        (0, 1, 0.0),
        (12, 11, 1.0),
    ],
)
def test_progress_runs_from_the_first_to_the_last_iteration(
    build, iteration, max_iters, progress
):
    detector = build(moe=MOE)
    detector.begin_step(iteration=iteration, max_iters=max_iters)
    for block in moe_blocks(detector):
        assert block.moe.gate.progress.item() == pytest.approx(progress)


def test_gates_of_a_detector_follow_the_training(
    build, make_batch, run_loss, run_predict
):
    detector = build(moe=MOE)
    gates = [block.moe.gate for block in moe_blocks(detector)]
    run_loss(detector, make_batch([0, 1]), iteration=5, max_iters=11)
    # halfway between 4 and 1 on a logarithmic scale
    assert [gate.temperature.item() for gate in gates] == pytest.approx([2.0, 2.0])
    run_predict(detector, make_batch([0, 1]))
    assert [gate.progress.item() for gate in gates] == [0.5, 0.5]


def test_a_gate_that_is_never_told_the_progress_refuses_to_train(build, make_batch):
    detector = build(moe=MOE).train()
    data = detector.data_preprocessor(make_batch([0, 1]), True)
    with pytest.raises(RuntimeError, match="the training, which is not set"):
        detector(**data, mode="loss")


def test_a_loaded_detector_predicts_at_the_temperature_it_was_trained_at(
    build, make_batch, run_loss
):
    trained, loaded = build(moe=MOE), build(moe=MOE)
    run_loss(trained, make_batch([0, 1]), iteration=10, max_iters=11)
    loaded.load_state_dict(trained.state_dict())
    assert [b.moe.gate.temperature.item() for b in moe_blocks(loaded)] == [1.0, 1.0]


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


@pytest.mark.parametrize(
    "gate",
    [dict(type="ExpertChoiceGate", share=0.25), dict(type="DenseSoftmaxGate")],
    ids=lambda gate: gate["type"],
)
def test_gates_without_a_fixed_number_of_routes_train_a_detector(
    build, make_batch, run_loss, run_predict, gate
):
    losses = [dict(type="DatasetRoutingLoss"), dict(type="RouterZLoss")]
    detector = build(
        moe={**MOE, "gate": gate, "losses": losses, "layers": dict(encoder=[0])}
    )
    batch = make_batch([0, 2], sizes=[(64, 64), (64, 32)], boxes=[1, 3])
    found = run_loss(detector, batch)
    (found["loss_moe_dataset_routing"] + found["loss_cls"]).backward()
    for name, parameter in moe_blocks(detector)[0].named_parameters():
        assert parameter.grad is not None, name
    samples = run_predict(detector, batch)
    assert all(sum(s.routing_counts["encoder.0"]) > 0 for s in samples)


WARMUP_MOE = dict(
    layers=dict(decoder=[0, 2]),
    gate=dict(type="TopKGate", k=1),
    losses=[
        dict(type="SeparateRouterLoss"),
        dict(type="LoadBalanceLoss", weight=0.01),
    ],
    router_warmup=dict(iters=3),
)


def parameters(detector):
    return {name: p.detach().clone() for name, p in detector.named_parameters()}


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def routers(detector):
    return {n for n, _ in detector.named_parameters() if ".moe.router." in n}


def make(build, moe=WARMUP_MOE):
    detector = build(moe=moe).train()
    # weight decay, so that whatever an optimiser does not pass by moves
    optimizer = torch.optim.AdamW(detector.parameters(), lr=0.001, weight_decay=0.1)
    return detector, OptimWrapper(optimizer, clip_grad=dict(max_norm=0.1))


def train(detector, wrapper, make_batch, iterations):
    logs = []
    for iteration in iterations:
        detector.begin_step(iteration=iteration, max_iters=8)
        torch.manual_seed(iteration)
        batch = make_batch([0, 1, 2], seed=iteration)
        logs.append(detector.train_step(batch, wrapper))
    return logs


def test_first_only_routers_change_and_then_all_but_them(build, make_batch):
    detector, wrapper = make(build)
    start = parameters(detector)
    first = train(detector, wrapper, make_batch, range(3))
    middle = parameters(detector)
    assert changed(start, middle) == routers(detector)
    assert len(routers(detector)) == 2
    then = train(detector, wrapper, make_batch, range(3, 6))
    end = parameters(detector)
    assert changed(middle, end) & routers(detector) == set()
    # Every parameter that weight decay or a gradient can move has moved.
    still = end.keys() - changed(middle, end) - routers(detector)
    assert [name for name in still if end[name].abs().sum() > 0] == []
    assert "loss_moe_separate_router" in first[0]
    assert "loss_moe_separate_router" not in then[0]
    assert "moe_separate_router" in then[0]


def test_the_warmup_lowers_its_loss(build, make_batch):
    detector, wrapper = make(build, {**WARMUP_MOE, "router_warmup": dict(iters=7)})
    losses = []
    for _ in range(6):
        (log,) = train(detector, wrapper, make_batch, [0])  # the same batch
        losses.append(log["loss_moe_separate_router"].item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("cut", [2, 3, 5])
def test_a_run_that_goes_on_from_a_checkpoint_equals_one_that_was_not_cut(
    build, make_batch, cut
):
    whole, whole_wrapper = make(build)
    train(whole, whole_wrapper, make_batch, range(7))
    first, first_wrapper = make(build)
    train(first, first_wrapper, make_batch, range(cut))
    resumed, wrapper = make(build)
    resumed.load_state_dict(first.state_dict())
    wrapper.load_state_dict(first_wrapper.state_dict())
    train(resumed, wrapper, make_batch, range(cut, 7))
    assert changed(parameters(whole), parameters(resumed)) == set()


def test_gradients_accumulated_in_the_warmup_do_not_reach_frozen_routers(
    build, make_batch
):
    detector, wrapper = make(build)
    wrapper._accumulative_counts = 4
    start = parameters(detector)
    train(detector, wrapper, make_batch, range(4))
    found = changed(start, parameters(detector))
    assert found & routers(detector) == set()
    assert found


def test_a_share_is_of_all_iterations(build, make_batch):
    moe = {**WARMUP_MOE, "router_warmup": dict(share=0.3)}  # of 8: 2.4, so 3 iterations
    detector, wrapper = make(build, moe)
    train(detector, wrapper, make_batch, [2])
    middle = parameters(detector)
    train(detector, wrapper, make_batch, [3])
    assert changed(middle, parameters(detector)) & routers(detector) == set()
    assert "moe_separate_router" in train(detector, wrapper, make_batch, [3])[0]
    assert "loss_moe_separate_router" in train(detector, wrapper, make_batch, [2])[0]


def test_frozen_parameters_of_the_backbone_stay_frozen(model_config, make_batch):
    from mmdet.registry import MODELS

    config = model_config(moe=WARMUP_MOE)
    config.backbone.frozen_stages = 1
    detector = MODELS.build(config)
    detector.init_weights()
    detector.train()
    optimizer = torch.optim.AdamW(detector.parameters(), lr=0.001)
    train(detector, OptimWrapper(optimizer), make_batch, [0, 5])
    assert not detector.backbone.layer1[0].conv1.weight.requires_grad
    assert detector.backbone.layer2[0].conv1.weight.requires_grad
    assert not moe_blocks(detector)[0].moe.router.weight_ED.requires_grad


def test_the_dataset_loss_can_be_the_one_and_patches_its_tokens(build, make_batch):
    moe = dict(
        layers=dict(backbone=[3]),
        num_experts=4,
        experts=dict(type="PatchConvExperts", patch_size=1),
        losses=[dict(type="DatasetRoutingLoss")],
        router_warmup=dict(iters=1, loss="dataset_routing"),
    )
    detector, wrapper = make(build, moe)
    start = parameters(detector)
    train(detector, wrapper, make_batch, [0])
    assert changed(start, parameters(detector)) == routers(detector)


def test_a_training_that_is_told_nothing_is_refused(build, make_batch):
    detector, wrapper = make(build)
    with pytest.raises(RuntimeError, match=r"moe.router_warmup needs the iteration"):
        detector.train_step(make_batch([0, 1]), wrapper)


@pytest.mark.parametrize("iters", [8, 9])
def test_a_warmup_that_never_ends_is_refused_before_the_first_step(
    build, make_batch, iters
):
    detector, wrapper = make(build, {**WARMUP_MOE, "router_warmup": dict(iters=iters)})
    start = parameters(detector)
    message = rf"router_warmup.iters is {iters}, .*has 8 iterations.*set fewer iters"
    with pytest.raises(ConfigError, match=message):
        train(detector, wrapper, make_batch, [0])
    assert changed(start, parameters(detector)) == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(router_warmup=None), "no minimum .* set moe.router_warmup=dict"),
        (dict(router_warmup=0.1), r"such as dict\(share=0.1\) .*got 0.1"),
        (dict(router_warmp=dict(share=0.1)), "did you mean 'router_warmup'"),
        (dict(router_warmup=dict()), "share=None and iters=None"),
        (dict(router_warmup=dict(share=0.1, iters=5)), "share=0.1 and iters=5"),
        (dict(router_warmup=dict(epochs=1)), "unknown key 'epochs'; it has: share, it"),
        (dict(router_warmup=dict(iters=0)), "iters must be an integer .*got 0"),
        (dict(router_warmup=dict(iters=2.5)), "got 2.5"),
        (dict(router_warmup=dict(share=1.0)), "between 0 and 1, .*got 1.0"),
        (dict(router_warmup=dict(share=True)), "got True"),
        (
            dict(router_warmup=dict(iters=1, loss="load_balanc")),
            "loss is 'load_balanc', .*did you mean 'load_balance'",
        ),
        (dict(losses=[]), "'separate_router', which is not a loss in moe.losses"),
    ],
)
def test_a_config_that_cannot_work_names_field_value_and_choice(
    build, changes, message
):
    with pytest.raises(ConfigError, match=message):
        build(moe={**WARMUP_MOE, **changes})


def test_one_group_cannot_be_parted(build):
    with pytest.raises(ConfigError, match="needs two or more, got 1"):
        build(moe=WARMUP_MOE, num_groups=1)
