import pytest
import torch

from damex.models import gate_progress
from damex.models.gate_progress import training_progress
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
    train_step(detector, make_batch([0, 1]))
    assert [gate.progress.item() for gate in gates] == [0.0, 0.0]
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
