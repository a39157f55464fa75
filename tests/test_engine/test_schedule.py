"""None"""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmengine.optim import OptimWrapper

from damex.engine import schedule as gate_progress
from damex.engine.schedule import IterationSeedHook, training_progress
from damex.errors import ConfigError
from damex.models.insertion import moe_blocks

MOE = dict(
    layers=dict(decoder=[0, 2]),
    router=dict(type="MLPRouter", hidden_dims=8),
    gate=dict(type="DenseToSparseGate", start_temperature=4.0, end_temperature=1.0),
)


class Hub:
    """In the place of mmengine's message hub."""

    def __init__(self, **info):
        self.info = info

    def get_current_instance(self):
        return self

    def get_info(self, key, default=None):
        return self.info.get(key, default)


@pytest.fixture
def set_hub(monkeypatch):
    return lambda **info: monkeypatch.setattr(gate_progress, "MessageHub", Hub(**info))


def train_step(detector, batch):
    detector.train()
    return detector(**detector.data_preprocessor(batch, True), mode="loss")


@pytest.mark.parametrize(
    ("info", "progress"),
    [
        (dict(iter=0, max_iters=11), 0.0),
        (dict(iter=4, max_iters=11), 0.4),  # iterations 0 to 10
        (dict(iter=10, max_iters=11), 1.0),
        (dict(iter=0, max_iters=1), 0.0),
        (dict(iter=12, max_iters=11), 1.0),
        (dict(iter=3), None),
        ({}, None),
    ],
)
def test_progress_runs_from_the_first_to_the_last_iteration(set_hub, info, progress):
    set_hub(**info)
    assert training_progress() == progress


def test_gates_of_a_detector_follow_the_runner(build, make_batch, set_hub):
    detector = build(moe=MOE)
    gates = [block.moe.gate for block in moe_blocks(detector)]
    set_hub()
    with pytest.raises(RuntimeError, match="the progress of the training, which nobo"):
        train_step(detector, make_batch([0, 1]))
    set_hub(iter=5, max_iters=11)
    train_step(detector, make_batch([0, 1]))
    # halfway between 4 and 1 on a logarithmic scale
    assert [gate.temperature.item() for gate in gates] == pytest.approx([2.0, 2.0])
    # a loss on validation data moves nothing
    set_hub(iter=9, max_iters=11)
    detector.eval()
    with torch.no_grad():
        batch = detector.data_preprocessor(make_batch([0, 1]), False)
        detector(**batch, mode="predict")
    assert [gate.progress.item() for gate in gates] == [0.5, 0.5]


def test_a_loaded_detector_predicts_at_the_temperature_it_was_trained_at(
    build, make_batch, set_hub
):
    trained, loaded = build(moe=MOE), build(moe=MOE)
    set_hub(iter=10, max_iters=11)
    train_step(trained, make_batch([0, 1]))
    loaded.load_state_dict(trained.state_dict())
    assert [b.moe.gate.temperature.item() for b in moe_blocks(loaded)] == [1.0, 1.0]


@pytest.mark.parametrize("with_cp", [False, True])
def test_a_balance_moves_once_per_step(build, make_batch, set_hub, with_cp):
    """Also when experts are recomputed, which must choose as the forward did."""
    set_hub()
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
        losses = train_step(detector, make_batch([0, 1, 2]))
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
    build, make_batch, set_hub, gate
):
    set_hub(iter=5, max_iters=11)
    losses = [dict(type="DatasetRoutingLoss"), dict(type="RouterZLoss")]
    detector = build(
        moe={**MOE, "gate": gate, "losses": losses, "layers": dict(encoder=[0])}
    )
    batch = make_batch([0, 2], sizes=[(64, 64), (64, 32)], boxes=[1, 3])
    found = train_step(detector, batch)
    (found["loss_moe_dataset_routing"] + found["loss_cls"]).backward()
    for name, parameter in moe_blocks(detector)[0].named_parameters():
        assert parameter.grad is not None, name
    detector.eval()
    with torch.no_grad():
        samples = detector(**detector.data_preprocessor(batch), mode="predict")
    assert all(sum(s.routing_counts["encoder.0"]) > 0 for s in samples)


STAGED_MOE = dict(
    layers=dict(decoder=[0, 2]),
    gate=dict(type="TopKGate", k=1),
    losses=[
        dict(type="SeparateRouterLoss"),
        dict(type="LoadBalanceLoss", weight=0.01),
    ],
    router_stage=dict(iters=3),
)


class StageHub:
    """In the place of mmengine's message hub."""

    info: dict

    def get_current_instance(self):
        return self

    def get_info(self, key, default=None):
        return self.info.get(key, default)


@pytest.fixture
def hub(monkeypatch):
    hub = StageHub()
    hub.info = dict(iter=0, max_iters=8)
    monkeypatch.setattr(gate_progress, "MessageHub", hub)
    return hub


def parameters(detector):
    return {name: p.detach().clone() for name, p in detector.named_parameters()}


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def routers(detector):
    return {n for n, _ in detector.named_parameters() if ".moe.router." in n}


def make(build, moe=STAGED_MOE):
    detector = build(moe=moe).train()
    # weight decay, so that whatever an optimiser does not pass by moves
    optimizer = torch.optim.AdamW(detector.parameters(), lr=0.001, weight_decay=0.1)
    return detector, OptimWrapper(optimizer, clip_grad=dict(max_norm=0.1))


def train(detector, wrapper, hub, make_batch, iterations):
    logs = []
    for iteration in iterations:
        hub.info["iter"] = iteration
        torch.manual_seed(iteration)
        batch = make_batch([0, 1, 2], seed=iteration)
        logs.append(detector.train_step(batch, wrapper))
    return logs


def test_first_only_routers_change_and_then_all_but_them(build, make_batch, hub):
    detector, wrapper = make(build)
    start = parameters(detector)
    first = train(detector, wrapper, hub, make_batch, range(3))
    middle = parameters(detector)
    assert changed(start, middle) == routers(detector)
    assert len(routers(detector)) == 2
    then = train(detector, wrapper, hub, make_batch, range(3, 6))
    end = parameters(detector)
    assert changed(middle, end) & routers(detector) == set()
    # Every parameter that weight decay or a gradient can move has moved.
    still = end.keys() - changed(middle, end) - routers(detector)
    assert [name for name in still if end[name].abs().sum() > 0] == []
    assert "loss_moe_separate_router" in first[0]
    assert "loss_moe_separate_router" not in then[0]
    assert "moe_separate_router" in then[0]


def test_the_stage_lowers_its_loss(build, make_batch, hub):
    detector, wrapper = make(build, {**STAGED_MOE, "router_stage": dict(iters=7)})
    losses = []
    for _ in range(6):
        (log,) = train(detector, wrapper, hub, make_batch, [0])  # the same batch
        losses.append(float(log["loss_moe_separate_router"]))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("cut", [2, 3, 5])
def test_a_run_that_goes_on_from_a_checkpoint_equals_one_that_was_not_cut(
    build, make_batch, hub, cut
):
    whole, whole_wrapper = make(build)
    train(whole, whole_wrapper, hub, make_batch, range(7))
    first, first_wrapper = make(build)
    train(first, first_wrapper, hub, make_batch, range(cut))
    resumed, wrapper = make(build)
    resumed.load_state_dict(first.state_dict())
    wrapper.load_state_dict(first_wrapper.state_dict())
    train(resumed, wrapper, hub, make_batch, range(cut, 7))
    assert changed(parameters(whole), parameters(resumed)) == set()


def test_gradients_accumulated_in_the_stage_do_not_reach_frozen_routers(
    build, make_batch, hub
):
    detector, wrapper = make(build)
    wrapper._accumulative_counts = 4
    start = parameters(detector)
    train(detector, wrapper, hub, make_batch, range(4))
    found = changed(start, parameters(detector))
    assert found & routers(detector) == set()
    assert found


def test_a_share_is_of_all_iterations(build, make_batch, hub):
    moe = {**STAGED_MOE, "router_stage": dict(share=0.3)}  # of 8: 2.4, so 3 iterations
    detector, wrapper = make(build, moe)
    train(detector, wrapper, hub, make_batch, [2])
    middle = parameters(detector)
    train(detector, wrapper, hub, make_batch, [3])
    assert changed(middle, parameters(detector)) & routers(detector) == set()
    hub.info["iter"] = 2
    assert detector._staged.stage.is_open()


def test_frozen_parameters_of_the_backbone_stay_frozen(model_config, make_batch, hub):
    from mmdet.registry import MODELS

    config = model_config(moe=STAGED_MOE)
    config.backbone.frozen_stages = 1
    detector = MODELS.build(config)
    detector.init_weights()
    detector.train()
    optimizer = torch.optim.AdamW(detector.parameters(), lr=0.001)
    train(detector, OptimWrapper(optimizer), hub, make_batch, [0, 5])
    assert not detector.backbone.layer1[0].conv1.weight.requires_grad
    assert detector.backbone.layer2[0].conv1.weight.requires_grad
    assert not moe_blocks(detector)[0].moe.router.weight_ED.requires_grad


def test_the_dataset_loss_can_be_the_stage_and_patches_its_tokens(
    build, make_batch, hub
):
    moe = dict(
        layers=dict(backbone=[3]),
        num_experts=4,
        experts=dict(type="PatchConvExperts", patch_size=1),
        losses=[dict(type="DatasetRoutingLoss")],
        router_stage=dict(iters=1, loss="dataset_routing"),
    )
    detector, wrapper = make(build, moe)
    start = parameters(detector)
    train(detector, wrapper, hub, make_batch, [0])
    assert changed(start, parameters(detector)) == routers(detector)


def test_without_a_runner_there_is_no_iteration(build, make_batch, hub):
    hub.info.clear()
    detector, wrapper = make(build)
    with pytest.raises(RuntimeError, match=r"moe.router_stage needs the iteration"):
        detector.train_step(make_batch([0, 1]), wrapper)


@pytest.mark.parametrize("iters", [8, 9])
def test_a_stage_that_never_ends_is_refused_before_the_first_step(
    build, make_batch, hub, iters
):
    detector, wrapper = make(build, {**STAGED_MOE, "router_stage": dict(iters=iters)})
    start = parameters(detector)
    message = rf"router_stage.iters is {iters}, .*has 8 iterations.*set fewer iters"
    with pytest.raises(ConfigError, match=message):
        train(detector, wrapper, hub, make_batch, [0])
    assert changed(start, parameters(detector)) == set()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(router_stage=None), "no minimum .* set moe.router_stage=dict"),
        (dict(router_stage=0.1), r"must be dict\(share=0.1\) .*got 0.1"),
        (dict(router_stage=dict()), "share=None and iters=None"),
        (dict(router_stage=dict(share=0.1, iters=5)), "share=0.1 and iters=5"),
        (dict(router_stage=dict(epochs=1)), "unknown key 'epochs'; it has: share, it"),
        (dict(router_stage=dict(iters=0)), "iters must be an integer .*got 0"),
        (dict(router_stage=dict(iters=2.5)), "got 2.5"),
        (dict(router_stage=dict(share=1.0)), "between 0 and 1, .*got 1.0"),
        (dict(router_stage=dict(share=True)), "got True"),
        (
            dict(router_stage=dict(iters=1, loss="load_balanc")),
            "loss is 'load_balanc', .*did you mean 'load_balance'",
        ),
        (dict(losses=[]), "'separate_router', which is no loss in moe.losses"),
    ],
)
def test_a_config_that_cannot_work_names_field_value_and_choice(
    build, changes, message
):
    with pytest.raises(ConfigError, match=message):
        build(moe={**STAGED_MOE, **changes})


def test_one_group_cannot_be_parted(build):
    with pytest.raises(ConfigError, match="needs two or more, got 1"):
        build(moe=STAGED_MOE, num_groups=1)


def draw(*, seed=3, rank=0, iteration=5):
    runner = SimpleNamespace(seed=seed, rank=rank, iter=iteration)
    IterationSeedHook().before_train_iter(runner, batch_idx=0)
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_randomness_of_an_iteration_does_not_depend_on_what_was_before():
    first = draw()
    torch.rand(1000)
    random.random()
    assert draw() == first


def test_other_seeds_processes_and_iterations_draw_something_else():
    drawn = [draw(), draw(seed=4), draw(rank=1), draw(iteration=6)]
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == 4
