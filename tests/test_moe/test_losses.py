"""Tests of damex.moe.losses, and of autocast with the losses of channels."""

import dataclasses
import math

import pytest
import torch

from damex.moe import (
    DatasetRoutingLoss,
    ExpertCapacity,
    ImportanceLoss,
    LoadBalanceLoss,
    LoadLoss,
    Packing,
    RouterZLoss,
    RoutingRecord,
    SeparateRouterLoss,
    TopKGate,
)
from damex.papers.channels import gate_l1, presence_loss

LOG2, LOG3 = math.log(2.0), math.log(3.0)


def make(logits_VE, *, foreground=None, groups=None, experts=None, k=1, routes=None):
    """A record of one image, by default without groups and of a top-k gate."""
    return RoutingRecord(
        logits_VE=logits_VE,
        packing=Packing(1, len(logits_VE)),
        assignment=TopKGate(k)(logits_VE) if routes is None else routes,
        group_ids_V=None if groups is None else torch.as_tensor(groups),
        group_experts_GE=experts,
        foreground_V=None if foreground is None else torch.as_tensor(foreground) > 0,
    )


def second_group(logits_VE, foreground=None, *, routes=None):
    """A record of one image of group 1, whose expert is 1."""
    groups = torch.ones(len(logits_VE), dtype=torch.int64)
    experts = torch.eye(2, dtype=torch.bool)
    return make(
        logits_VE, foreground=foreground, groups=groups, experts=experts, routes=routes
    )


def separate_loss(logits_VG, labels_V):
    """The loss of groups that have an expert each."""
    experts = torch.eye(logits_VG.shape[1], dtype=torch.bool)
    return SeparateRouterLoss()(make(logits_VG, groups=labels_V, experts=experts))


@pytest.mark.parametrize("loss", [DatasetRoutingLoss(), SeparateRouterLoss()])
@pytest.mark.parametrize("missing", ["group_ids_V", "group_experts_GE"])
def test_both_losses_say_what_their_record_lacks(loss, missing):
    complete = second_group(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    assert torch.isfinite(loss(complete))
    record = dataclasses.replace(complete, **{missing: None})
    message = f"{type(loss).__name__}: .*needs group_ids_V and group_experts_GE"
    with pytest.raises(ValueError, match=message):
        loss(record)


LOSSES = [DatasetRoutingLoss, ImportanceLoss, LoadLoss, LoadBalanceLoss, RouterZLoss]
ALL = [*LOSSES, SeparateRouterLoss]
# Probabilities (3/4, 1/4), (1/4, 3/4), (1/2, 1/2).
LOGITS = torch.tensor([[LOG3, 0.0], [0.0, LOG3], [0.0, 0.0]])
SIGNS, POINT = torch.tensor([[1.0, -1.0]]), torch.tensor([[1.0, 0.0]])
EYE = torch.eye(2).bool()
SHARED = torch.tensor([[False, False, True], [True, True, False]])
COLUMN = torch.tensor([[0], [1]])
COLLAPSED = torch.full((8, 4), -50.0).index_fill(1, torch.tensor([2]), 50.0)
THIRDS = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 2.0]]).log()
ROWS = [
    # Probabilities of the group's experts: 3/6 and 1/4 + 1/4.
    (DatasetRoutingLoss(), THIRDS, dict(groups=[0, 1], experts=SHARED), math.log(2)),
    (DatasetRoutingLoss(), 500 * SIGNS, dict(groups=[0], experts=EYE), 0.0),
    (DatasetRoutingLoss(), 500 * SIGNS, dict(groups=[1], experts=EYE), 1000.0),
    # f = (2/3, 1/3), the tie to the lowest; mean P = (1/2, 1/2): 2 * 1/2
    (LoadBalanceLoss(), LOGITS, {}, 1.0),
    (LoadBalanceLoss(), LOGITS[:1], {}, 1.5),  # P = (3/4, 1/4), f = (1, 0): 2 * 3/4
    (LoadBalanceLoss(), COLLAPSED, {}, 4.0),
    # Importance (3/4 + 1/4 + 3/4, 1/4 + 3/4 + 1/4) = (1.75, 1.25): mean 1.5,
    # population variance 0.0625.
    (ImportanceLoss(), LOGITS[[0, 1, 0]], {}, 0.0625 / 2.25),
    (ImportanceLoss(), COLLAPSED, {}, 3.0),  # (0, 0, 8, 0): mean 2, variance 12
    (ImportanceLoss(), torch.zeros(5, 1), {}, 0.0),
    # Threshold 1, chances Phi(0) = 0.5 and Phi(-2) = 0.0227501: mean 0.2613751,
    # deviation 0.2386249. With k = 2 Phi(2) = 0.9772499 and 0.5: mean 0.7386249.
    (LoadLoss(noise_std=0.5), POINT, {}, 0.833498),
    (LoadLoss(), POINT, {}, 0.833498),  # 1/E, as in the gate
    (LoadLoss(noise_std=0.5), POINT, dict(k=2), 0.104371),
    (LoadLoss(noise_std=0.5), torch.eye(2), {}, 0.0),
    # logsumexp(log 3, 0) = log 4, twice; logsumexp(0, 0) = log 2
    (RouterZLoss(), LOGITS, {}, 3 * LOG2**2),
    (RouterZLoss(tokens="foreground"), LOGITS[1:], dict(foreground=[0, 1]), LOG2**2),
    # y * (z_0 - z_1): 1 - 3 = -2, 2 + 1 = 3, -(0.5 - 0) = -0.5; mean 0.5 / 3
    (
        SeparateRouterLoss(),
        torch.tensor([[1.0, 3.0], [2.0, -1.0], [0.5, 0.0]]),
        dict(groups=[0, 0, 1], experts=EYE),
        -0.5 / 3,
    ),
    # The logit of a group is the mean of its experts': 1 - 2 and -(0 - 5), mean 2
    (
        SeparateRouterLoss(),
        torch.tensor([[0.0, 2.0, 2.0], [1.0, 5.0, -1.0]]),
        dict(groups=[0, 1], experts=torch.arange(3) % 2 == COLUMN),
        -2.0,
    ),
]


@pytest.mark.parametrize(("loss", "logits", "record", "expected"), ROWS)
def test_by_hand(loss, logits, record, expected):
    logits = logits.clone().requires_grad_()
    value = loss(make(logits, **record))
    assert value.item() == pytest.approx(expected, abs=1e-5)
    value.backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("tokens", ["all", "foreground"])
def test_load_balance_counts_the_demand_of_dropped_tokens(tokens):
    logits = LOGITS[[0, 0, 0, 1]]
    gate = TopKGate(1, capacity=ExpertCapacity(factor=0.5))  # one place each
    foreground = [True, True, False, True]
    record = second_group(logits, foreground, routes=gate(logits))
    free = second_group(logits, foreground)
    assert record.assignment.counts_E.tolist() == [1, 1]
    loss = LoadBalanceLoss(tokens=tokens)
    torch.testing.assert_close(loss(record), loss(free))


@pytest.mark.parametrize("loss", ALL)
@pytest.mark.parametrize("num_tokens", [0, 4], ids=["no token", "none that counts"])
def test_zero_with_a_graph_if_no_token_counts(loss, num_tokens):
    logits = torch.randn(num_tokens, 2, requires_grad=True)
    record = second_group(logits, [False] * num_tokens)
    tokens = "all" if num_tokens == 0 else "foreground"
    if loss.needs_groups:  # those of unknown group do not count either
        record = dataclasses.replace(record, group_ids_V=torch.full((num_tokens,), -1))
        tokens = "all"
    value = loss(tokens=tokens)(record)
    assert value.item() == 0.0
    value.backward()
    assert torch.equal(logits.grad, torch.zeros_like(logits))


@pytest.mark.parametrize("loss", LOSSES)
def test_errors_name_the_loss(loss):
    with pytest.raises(ValueError, match=f"{loss.__name__}: .*needs foreground_V"):
        loss(tokens="foreground")(second_group(LOGITS))
    with pytest.raises(ValueError, match=f"{loss.__name__}: unknown tokens 'objects'"):
        loss(tokens="objects")


@pytest.mark.parametrize("kind", LOSSES)
def test_background_does_not_count_even_if_nan(kind):
    torch.manual_seed(0)
    logits = torch.randn(11, 2)
    background = torch.full((5, 2), torch.nan)
    mixed = torch.cat([logits[:4], background, logits[4:]]).requires_grad_()
    foreground = torch.tensor([True] * 4 + [False] * 5 + [True] * 7)
    reference = logits.clone().requires_grad_()
    value = kind(tokens="foreground")(second_group(mixed, foreground))
    expected = kind()(second_group(reference))
    assert torch.equal(value, expected)
    value.backward()
    expected.backward()
    assert torch.equal(mixed.grad[foreground], reference.grad)
    assert reference.grad.abs().sum() > 0
    assert torch.equal(mixed.grad[~foreground], torch.zeros(5, 2))


@pytest.mark.parametrize("loss", [DatasetRoutingLoss(), SeparateRouterLoss()])
def test_tokens_of_unknown_group_take_no_part(loss):
    logits = torch.randn(5, 2, requires_grad=True)
    known = loss(make(logits[[0, 2, 3]], groups=[1, 0, 0], experts=EYE))
    value = loss(make(logits, groups=[1, -1, 0, 0, -1], experts=EYE))
    torch.testing.assert_close(value, known)
    value.backward()
    assert (logits.grad != 0).any(1).tolist() == [True, False, True, True, False]


def test_half_precision_does_not_overflow_the_sums():
    # 20,000 tokens with a logit of 30 would add up to more than float16 holds.
    logits_VG = torch.tensor([[30.0, 20.0]]).repeat(20_000, 1)
    labels_V = torch.zeros(20_000, dtype=torch.int64)
    with torch.autocast("cpu", dtype=torch.float16):
        loss = separate_loss(logits_VG, labels_V)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(-10.0, rel=1e-4)


def test_more_classes_are_the_mean_over_pairs():
    torch.manual_seed(2)
    logits_VG, labels_V = torch.randn(30, 3), torch.randint(0, 3, (30,))
    losses = []
    for a, b in [(0, 1), (0, 2), (1, 2)]:
        rows = (labels_V == a) | (labels_V == b)
        pair_VG = logits_VG[rows][:, [a, b]]
        losses.append(separate_loss(pair_VG, (labels_V[rows] == b).long()))
    found = separate_loss(logits_VG, labels_V)
    torch.testing.assert_close(found, torch.stack(losses).mean())


T, E = 1000, 6


def on_a_record(loss):
    group_experts_GE = torch.arange(E) % 2 == torch.arange(2).unsqueeze(1)

    def compute(logits_VE):
        # Routes are those of the float32 logits, so that values can be compared.
        routes = TopKGate(2)(logits_VE.detach().float())
        groups = torch.arange(T) % 5 % 2
        record = make(logits_VE, groups=groups, experts=group_experts_GE, routes=routes)
        return loss(record)

    return compute


AUTOCAST_LOSSES = {
    **{kind.__name__: on_a_record(kind()) for kind in ALL},
    "gate_l1": lambda gates_BC: gate_l1([gates_BC.relu(), gates_BC[:, :2].relu()]),
    "presence_loss": lambda logits_BE: presence_loss(
        logits_BE, torch.arange(T).unsqueeze(1) % 9 == torch.arange(E)
    ),
}


@pytest.mark.parametrize("name", AUTOCAST_LOSSES)
def test_autocast_gives_the_float32_value_and_a_finite_gradient(name):
    generator = torch.Generator().manual_seed(0)
    # Off zero, so that the sums over tokens are longer than bfloat16's 8 bits.
    inputs = 3.0 * torch.randn(T, E, generator=generator) + torch.arange(E)
    inputs = inputs.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = AUTOCAST_LOSSES[name](inputs)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(
        AUTOCAST_LOSSES[name](inputs.float()).item(), rel=1e-5
    )
    loss.backward()
    assert inputs.grad.isfinite().all()
    assert inputs.grad.any()
