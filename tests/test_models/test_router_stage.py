import pytest
import torch
from mmengine.optim import OptimWrapper

from damex.errors import ConfigError
from damex.models import gate_progress
from damex.models.insertion import moe_blocks

MOE = dict(
    layers=dict(decoder=[0, 2]),
    gate=dict(type="TopKGate", k=1),
    losses=[
        dict(type="SeparateRouterLoss"),
        dict(type="LoadBalanceLoss", weight=0.01),
    ],
    router_stage=dict(iters=3),
)


class Hub:
    """In the place of mmengine's message hub."""

    info: dict

    def get_current_instance(self):
        return self

    def get_info(self, key, default=None):
        return self.info.get(key, default)


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    hub.info = dict(iter=0, max_iters=8)
    monkeypatch.setattr(gate_progress, "MessageHub", hub)
    return hub


def parameters(detector):
    return {name: p.detach().clone() for name, p in detector.named_parameters()}


def changed(before, after):
    return {name for name in before if not torch.equal(before[name], after[name])}


def routers(detector):
    return {n for n, _ in detector.named_parameters() if ".moe.router." in n}


def make(build, moe=MOE):
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
    detector, wrapper = make(build, {**MOE, "router_stage": dict(iters=7)})
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
    moe = {**MOE, "router_stage": dict(share=0.3)}  # of 8: 2.4, so 3 iterations
    detector, wrapper = make(build, moe)
    train(detector, wrapper, hub, make_batch, [2])
    middle = parameters(detector)
    train(detector, wrapper, hub, make_batch, [3])
    assert changed(middle, parameters(detector)) & routers(detector) == set()
    hub.info["iter"] = 2
    assert detector._staged.stage.is_open()


def test_frozen_parameters_of_the_backbone_stay_frozen(model_config, make_batch, hub):
    from mmdet.registry import MODELS

    config = model_config(moe=MOE)
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
    detector, wrapper = make(build, {**MOE, "router_stage": dict(iters=iters)})
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
        build(moe={**MOE, **changes})


def test_one_group_cannot_be_parted(build):
    with pytest.raises(ConfigError, match="needs two or more, got 1"):
        build(moe=MOE, num_groups=1)
