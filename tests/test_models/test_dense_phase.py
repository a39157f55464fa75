"""Upcycling inside one training: dense at first, then experts that are copies."""

import copy

import pytest
import torch
from mmcv.cnn.bricks.transformer import FFN
from mmengine.optim import OptimWrapper

from damex.errors import ConfigError
from damex.models.blocks import MoEFFN
from damex.models.context import RoutingContext
from damex.models.insertion import moe_blocks
from damex.models.upcycling import DensePhase
from damex.moe import FFNExperts, LinearRouter, MoELayer, TopKGate

SWITCH, MAX_ITERS = 3, 8
MOE = dict(
    layers=dict(encoder=[1], decoder=[0, 2]),
    num_experts=3,
    gate=dict(type="TopKGate", k=2, renormalize=True),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
    upcycling=dict(iters=SWITCH),
)
# Padding in the encoder, fillers among the denoising queries.
BATCH = dict(sizes=[(64, 64), (64, 32)], boxes=[1, 3])


def make(build, moe=MOE, state=None):
    detector = build(moe=moe).train()
    if state is not None:
        detector.load_state_dict(state)
    # weight decay, so that whatever an optimiser does not pass by moves
    optimizer = torch.optim.AdamW(detector.parameters(), lr=1e-3, weight_decay=0.1)
    return detector, OptimWrapper(optimizer, clip_grad=dict(max_norm=0.1))


def train(detector, wrapper, make_batch, iterations):
    logs = []
    for iteration in iterations:
        detector.train()
        detector.begin_step(
            iteration=iteration, max_iters=MAX_ITERS, optimizer=wrapper.optimizer
        )
        torch.manual_seed(iteration)
        batch = make_batch([0, 1], seed=iteration, **BATCH)
        logs.append(detector.train_step(batch, wrapper))
    return logs


def begin_switch(detector, wrapper):
    detector.begin_step(
        iteration=SWITCH, max_iters=MAX_ITERS, optimizer=wrapper.optimizer
    )


def predictions(run_predict, detector, batch):
    return [
        (sample.pred_instances.bboxes, sample.pred_instances.scores)
        for sample in run_predict(detector, copy.deepcopy(batch))
    ]


def banks(detector):
    return [
        parameter
        for block in moe_blocks(detector)
        for parameter in block.moe.experts.parameters()
    ]


def routers(detector):
    return [p for n, p in detector.named_parameters() if ".moe.router." in n]


def changed(first, second):
    return [name for name in first if not torch.equal(first[name], second[name])]


def test_the_dense_phase_is_the_training_of_a_dense_detector(build, make_batch):
    dense, dense_wrapper = make(build, moe=None)
    detector, wrapper = make(build, state=dense.state_dict())
    theirs = train(dense, dense_wrapper, make_batch, range(SWITCH))
    ours = train(detector, wrapper, make_batch, range(SWITCH))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys()  # no loss of a router
        for name in mine:
            torch.testing.assert_close(mine[name], other[name])
    block, ffn = moe_blocks(detector)[-1], dense.decoder.layers[2].ffn
    experts = block.moe.experts
    torch.testing.assert_close(experts.w1_EDH[0].t(), ffn.layers[0][0].weight)
    torch.testing.assert_close(experts.w2_EHD[0].t(), ffn.layers[1].weight)


def test_at_the_switch_all_experts_are_the_ffn_with_its_moments(
    build, make_batch, run_predict
):
    detector, wrapper = make(build)
    start = [router.detach().clone() for router in routers(detector)]
    train(detector, wrapper, make_batch, range(SWITCH))
    batch = make_batch([0, 2], seed=9, **BATCH)
    before = predictions(run_predict, detector, batch)
    state = wrapper.optimizer.state
    first = [
        [t[0].clone() for t in (p, state[p]["exp_avg"], state[p]["exp_avg_sq"])]
        for p in banks(detector)
    ]
    begin_switch(detector, wrapper)
    assert not detector.upcycling.is_dense
    for parameter, kept in zip(banks(detector), first, strict=True):
        own = state[parameter]
        for tensor, tensor_0 in zip(
            (parameter, own["exp_avg"], own["exp_avg_sq"]), kept, strict=True
        ):
            assert tensor_0.abs().sum() > 0
            assert torch.equal(tensor, tensor_0.expand_as(tensor))
        assert own["step"] == SWITCH
    for router, value in zip(routers(detector), start, strict=True):
        assert torch.equal(router, value)  # no weight decay either
        assert router not in state
        assert router.requires_grad
    after = predictions(run_predict, detector, batch)
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new, rtol=1e-5, atol=1e-5)


def test_after_the_switch_routers_and_experts_learn(build, make_batch):
    detector, wrapper = make(build)
    train(detector, wrapper, make_batch, range(SWITCH))
    begin_switch(detector, wrapper)
    start = copy.deepcopy(detector.state_dict())
    (log,) = train(detector, wrapper, make_batch, [SWITCH])
    assert log["loss_moe_dataset_routing"] > 0
    moved = changed(start, detector.state_dict())
    assert {n for n in start if ".moe.router." in n} <= set(moved)
    for w1_EDH in (block.moe.experts.w1_EDH for block in moe_blocks(detector)):
        assert not torch.equal(w1_EDH[0], w1_EDH[1])  # they see other tokens


@pytest.mark.parametrize("cut", [SWITCH - 1, SWITCH, SWITCH + 1])
def test_a_run_that_goes_on_from_a_checkpoint_equals_one_that_was_not_cut(
    build, make_batch, cut
):
    whole, whole_wrapper = make(build)
    train(whole, whole_wrapper, make_batch, range(6))
    first, first_wrapper = make(build)
    train(first, first_wrapper, make_batch, range(cut))
    resumed, wrapper = make(build, state=first.state_dict())
    wrapper.load_state_dict(copy.deepcopy(first_wrapper.state_dict()))
    train(resumed, wrapper, make_batch, range(cut, 6))
    assert changed(whole.state_dict(), resumed.state_dict()) == []


def test_the_copy_is_made_once(build, make_batch):
    detector, wrapper = make(build)
    train(detector, wrapper, make_batch, range(SWITCH + 1))
    start = copy.deepcopy(detector.state_dict())
    begin_switch(detector, wrapper)
    begin_switch(detector, wrapper)
    assert changed(start, detector.state_dict()) == []


def test_a_checkpoint_of_the_dense_phase_predicts_densely(
    build, make_batch, run_predict
):
    detector, wrapper = make(build)
    train(detector, wrapper, make_batch, range(2))
    for parameter in [*banks(detector)]:
        parameter.data[1:] = float("nan")  # nobody looks at them
    batch = make_batch([0, 2], **BATCH)
    before = predictions(run_predict, detector, batch)
    loaded = build(moe=MOE)
    loaded.load_state_dict(detector.state_dict())
    after = predictions(run_predict, loaded, batch)
    for old, new in zip(before, after, strict=True):
        assert old[1].isfinite().all()
        assert all(map(torch.equal, old, new))
    samples = run_predict(loaded, batch)
    assert "routing_counts" not in samples[0]
    begin_switch(detector, wrapper)
    loaded.load_state_dict(detector.state_dict())
    assert not loaded.upcycling.is_dense
    assert "routing_counts" in run_predict(loaded, batch)[0]


def test_nothing_is_routed_in_the_dense_phase(build, make_batch, records):
    detector, wrapper = make(build)
    for block in moe_blocks(detector):
        block.moe.router.forward = None  # would fail
    train(detector, wrapper, make_batch, [0])
    assert records == {}


def test_recomputed_experts_learn_the_same(build, make_batch):
    plain, plain_wrapper = make(build)
    other, wrapper = make(build, moe={**MOE, "with_cp": True})
    train(plain, plain_wrapper, make_batch, range(2))
    train(other, wrapper, make_batch, range(2))
    assert changed(plain.state_dict(), other.state_dict()) == []


def test_schedules_of_gates_begin_with_the_experts(build):
    gate = dict(type="DenseToSparseGate", start_temperature=4.0, end_temperature=1.0)
    detector = build(moe={**MOE, "gate": gate})
    found = []
    for iteration in (0, SWITCH, 5, MAX_ITERS - 1):
        detector.begin_step(iteration=iteration, max_iters=MAX_ITERS)
        found.append(moe_blocks(detector)[0].moe.gate.progress.item())
    assert found == [0.0, 0.0, 0.5, 1.0]


def test_a_share_is_of_all_iterations(build):
    detector = build(moe={**MOE, "upcycling": dict(share=0.3)})  # of 8: 2.4, so 3
    detector.begin_step(iteration=2, max_iters=8)
    assert detector.upcycling.is_dense
    detector.begin_step(iteration=3, max_iters=8)
    assert not detector.upcycling.is_dense


def test_gradients_of_a_step_that_is_not_finished_are_copied_too(build, make_batch):
    detector, wrapper = make(build)
    wrapper._accumulative_counts = 5
    train(detector, wrapper, make_batch, range(SWITCH))
    begin_switch(detector, wrapper)
    for parameter in banks(detector):
        assert parameter.grad[0].abs().sum() > 0
        assert torch.equal(parameter.grad, parameter.grad[:1].expand_as(parameter))


def test_without_the_option_nothing_new_is_in_the_state_dict(build):
    plain = build(moe={k: v for k, v in MOE.items() if k != "upcycling"})
    new = set(build(moe=MOE).state_dict()) - set(plain.state_dict())
    assert new == {f"{path}.ffn.dense_phase.flag" for path in PATHS}
    assert plain.trains_in_stages is False


PATHS = ("encoder.layers.1", "decoder.layers.0", "decoder.layers.2")


def test_a_checkpoint_of_the_dense_phase_starts_a_detector_of_experts(
    build, make_batch, run_predict
):
    detector, wrapper = make(build)
    train(detector, wrapper, make_batch, range(2))
    plain = build(moe={k: v for k, v in MOE.items() if k != "upcycling"})
    plain.load_state_dict(detector.state_dict())
    batch = make_batch([0, 2], **BATCH)
    before, after = (predictions(run_predict, one, batch) for one in (detector, plain))
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(old, new, rtol=1e-5, atol=1e-5)


def test_experts_that_are_loaded_stay_experts(build):
    plain = build(moe={k: v for k, v in MOE.items() if k != "upcycling"})
    detector, wrapper = make(build, state=plain.state_dict())
    detector.begin_step(iteration=0, max_iters=MAX_ITERS, optimizer=wrapper.optimizer)
    begin_switch(detector, wrapper)
    assert not detector.upcycling.is_dense
    for ours, theirs in zip(banks(detector), banks(plain), strict=True):
        assert torch.equal(ours, theirs)


def make_block(activation):
    torch.manual_seed(0)
    layer = MoELayer(
        router=LinearRouter(8, 2),
        gate=TopKGate(k=1, renormalize=True),
        experts=FFNExperts(2, 8, 16, activation=activation),
    )
    return MoEFFN(
        layer, name="decoder.0", context=RoutingContext(), dense_phase=DensePhase()
    )


@pytest.mark.parametrize("activation", ["PReLU", "ReLU", "GELU"])
def test_a_dense_block_is_the_ffn_that_it_loads(activation):
    block = make_block(activation.lower())
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(upcycling=dict(share=0.1, iters=2)), "moe.upcycling: set one of share"),
        (dict(upcycling=dict(share=1.5)), "upcycling.share must be a number between"),
        (
            dict(fine_grained=dict(parts=2, copies=2), num_experts=None),
            "moe.upcycling and moe.fine_grained cannot",
        ),
        (
            dict(shared_expert=dict(type="SharedExpert")),
            "moe.upcycling and moe.shared_expert cannot",
        ),
        (
            dict(router_warmup=dict(iters=2)),
            "moe.upcycling and moe.router_warmup cannot",
        ),
        (
            dict(
                layers=dict(backbone=[3]),
                experts=dict(type="PatchConvExperts", patch_size=1),
                num_experts=4,
            ),
            "moe.upcycling is for FFNs",
        ),
    ],
)
def test_what_cannot_be_upcycled_is_refused(build, changes, message):
    with pytest.raises(ConfigError, match=message):
        build(moe={**MOE, **changes})


def test_a_training_that_ends_in_the_dense_phase_is_refused(build):
    detector = build(moe=MOE)
    with pytest.raises(ConfigError, match="the training has 3 iterations, so the det"):
        detector.begin_step(iteration=0, max_iters=3)


@pytest.mark.parametrize(("renormalize", "is_said"), [(False, True), (True, False)])
def test_a_gate_that_shrinks_the_answer_is_said(
    build, monkeypatch, renormalize, is_said
):
    said = []
    monkeypatch.setattr(
        "damex.models.detectors.print_log", lambda text, **_: said.append(text)
    )
    gate = dict(type="TopKGate", k=1, renormalize=renormalize)
    build(moe={**MOE, "gate": gate})
    notes = [text for text in said if text.startswith("moe.upcycling: the FFNs of 3")]
    assert len(notes) == is_said
