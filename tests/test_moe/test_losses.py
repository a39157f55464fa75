"""Tests of damex.moe.losses, and of autocast with the losses of channels."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch.nn import functional

from damex.moe import (
    DatasetRoutingLoss,
    ExpertCapacity,
    FFNExperts,
    ImportanceLoss,
    LinearRouter,
    LoadBalanceLoss,
    LoadLoss,
    MoELayer,
    Packing,
    RouterZLoss,
    RoutingRecord,
    SeparateRouterLoss,
    TopKGate,
    gate_l1,
    presence_loss,
)

LOG3 = math.log(3.0)


def make(logits_VE, *, foreground=None, groups=None, experts=None, k=1, routes=None):
    """A record of one image, by default without groups and of a top-k gate."""
    return RoutingRecord(
        logits_VE=logits_VE,
        packing=Packing(1, len(logits_VE)),
        assignment=TopKGate(k)(logits_VE) if routes is None else routes,
        group_ids_V=None if groups is None else torch.as_tensor(groups),
        group_experts_GE=experts,
        foreground_V=None if foreground is None else torch.as_tensor(foreground),
    )


def second_group(logits_VE, foreground=None, *, routes=None):
    """A record of one image of group 1, whose expert is 1."""
    groups = torch.ones(len(logits_VE), dtype=torch.int64)
    experts = torch.eye(2, dtype=torch.bool)
    return make(
        logits_VE, foreground=foreground, groups=groups, experts=experts, routes=routes
    )


def dataset_loss(logits_VE, allowed_VE):
    """The loss of tokens that have a group each, with its own experts."""
    groups = torch.arange(len(logits_VE))
    return DatasetRoutingLoss()(make(logits_VE, groups=groups, experts=allowed_VE))


def separate_loss(logits_VG, labels_V, **kwargs):
    """The loss of groups that have an expert each."""
    experts = torch.eye(logits_VG.shape[1], dtype=torch.bool)
    return SeparateRouterLoss(**kwargs)(
        make(logits_VG, groups=labels_V, experts=experts)
    )


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
# Probabilities (3/4, 1/4), (1/4, 3/4), (1/2, 1/2).
LOGITS = torch.tensor([[LOG3, 0.0], [0.0, LOG3], [0.0, 0.0]])


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


@pytest.mark.parametrize("loss", [*LOSSES, SeparateRouterLoss])
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


def one_hot(*experts, num_experts):
    return functional.one_hot(torch.tensor(experts), num_experts).bool()


def test_dataset_loss_by_hand():
    # probabilities: token 0 (1/6, 2/6, 3/6), token 1 (1/4, 1/4, 2/4)
    logits = torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 2.0]]).log()
    target = torch.tensor([[False, False, True], [True, True, False]])
    # token 0 may use expert 2: -log 1/2; token 1 experts 0 and 1: -log 1/2
    torch.testing.assert_close(
        dataset_loss(logits, target), torch.tensor(math.log(2.0))
    )


def test_one_expert_is_plain_cross_entropy_in_value_and_gradient():
    logits = torch.randn(9, 5, requires_grad=True)
    targets = torch.randint(5, (9,))
    ours = dataset_loss(logits, functional.one_hot(targets, 5).bool())
    theirs = functional.cross_entropy(logits, targets)
    torch.testing.assert_close(ours, theirs)
    grads = [torch.autograd.grad(loss, logits)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*grads)


def test_tokens_without_a_known_dataset_take_no_part():
    logits = torch.randn(4, 3, requires_grad=True)
    group_experts = one_hot(0, 2, num_experts=3)
    record = make(logits, groups=[1, -1, 0, -1], experts=group_experts)
    loss = DatasetRoutingLoss()(record)
    expected = functional.cross_entropy(logits[[0, 2]], torch.tensor([2, 0]))
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert torch.equal(logits.grad[[1, 3]], torch.zeros(2, 3))


def test_confident_right_and_wrong_routers_stay_finite():
    logits = torch.tensor([[500.0, -500.0]], requires_grad=True)
    right = dataset_loss(logits, one_hot(0, num_experts=2))
    wrong = dataset_loss(logits, one_hot(1, num_experts=2))
    assert (right.item(), wrong.item()) == (0.0, 1000.0)
    wrong.backward()
    assert logits.grad.tolist() == [[1.0, -1.0]]


def test_load_balance_by_hand():
    # f = (2/3, 1/3), the tie to the lowest; mean P = (1/2, 1/2): 2 * 1/2
    assert LoadBalanceLoss()(make(LOGITS)).item() == pytest.approx(1.0)
    # first token alone: P = (3/4, 1/4), f = (1, 0): 2 * 3/4
    assert LoadBalanceLoss()(make(LOGITS[:1])).item() == pytest.approx(1.5)
    collapsed = torch.full((8, 4), -50.0)
    collapsed[:, 2] = 50.0
    assert LoadBalanceLoss()(make(collapsed)).item() == pytest.approx(4.0)


def test_importance_by_hand():
    # importance (3/4 + 1/4 + 3/4, 1/4 + 3/4 + 1/4) = (1.75, 1.25): mean 1.5,
    # population variance 0.0625, CV^2 = 0.0625 / 2.25 = 0.027778
    logits = torch.tensor([[3.0, 1.0], [1.0, 3.0], [3.0, 1.0]]).log()
    assert ImportanceLoss()(make(logits)).item() == pytest.approx(0.0625 / 2.25)
    # one of three has it all: importance (1, 0, 0), mean 1/3, variance 2/9, CV^2 = 2
    collapsed = torch.tensor([[90.0, -90.0, -90.0]])
    assert ImportanceLoss()(make(collapsed)).item() == pytest.approx(2.0)
    assert ImportanceLoss()(make(torch.zeros(5, 1))).item() == 0.0


def test_load_by_hand():
    # E = 2, k = 1, std 0.5; token (1, 0): threshold 1, chances Phi(0) = 0.5 and
    # Phi(-2) = 0.0227501; mean 0.2613751, deviation 0.2386249, squared ratio 0.833498
    loss = LoadLoss(noise_std=0.5)(make(torch.tensor([[1.0, 0.0]])))
    assert loss.item() == pytest.approx(0.833498, abs=1e-5)
    # k = 2: the threshold is the lower logit 0, chances Phi(2) = 0.9772499 and 0.5;
    # mean 0.7386249, deviation 0.2386249, squared ratio 0.104371
    loss = LoadLoss(noise_std=0.5)(make(torch.tensor([[1.0, 0.0]]), k=2))
    assert loss.item() == pytest.approx(0.104371, abs=1e-5)
    # two tokens that mirror each other are balanced
    mirror = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    assert LoadLoss(noise_std=0.5)(make(mirror)).item() == pytest.approx(0.0)


def test_load_default_noise_is_that_of_the_gate():
    logits = torch.randn(6, 4)
    expected = LoadLoss(noise_std=0.25)(make(logits, k=2))
    assert torch.equal(LoadLoss()(make(logits, k=2)), expected)


def test_router_z_by_hand():
    # logsumexp(log 1, log 3) = log 4; logsumexp(0, 0) = log 2
    logits = torch.tensor([[1.0, 3.0], [1.0, 1.0]]).log()
    expected = (math.log(4) ** 2 + math.log(2) ** 2) / 2
    assert RouterZLoss()(make(logits)).item() == pytest.approx(expected)
    second = make(logits, foreground=[False, True])
    loss = RouterZLoss(tokens="foreground")(second)
    assert loss.item() == pytest.approx(math.log(2) ** 2)


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


@pytest.mark.parametrize("loss", [LoadBalanceLoss(), ImportanceLoss()])
def test_descent_balances_a_skewed_router(loss):
    torch.manual_seed(0)
    tokens = torch.randn(200, 6)
    weight = torch.randn(6, 4, requires_grad=True)
    bias = torch.tensor([3.0, 0.0, 0.0, 0.0], requires_grad=True)
    optimizer = torch.optim.SGD([weight, bias], lr=1.0)
    importance = []
    for _ in range(50):
        record = make(tokens @ weight + bias)
        importance.append(record.probs_VE.mean(0).max().item())
        optimizer.zero_grad()
        loss(record).backward()
        optimizer.step()
    assert importance[0] > 0.5
    assert importance[-1] < 0.35


def test_separate_router_by_hand():
    logits_VG = torch.tensor([[1.0, 3.0], [2.0, -1.0], [0.5, 0.0]])
    labels_V = torch.tensor([0, 0, 1])
    # y * (z_0 - z_1): 1 - 3 = -2, 2 + 1 = 3, -(0.5 - 0) = -0.5; mean 0.5 / 3
    loss = separate_loss(logits_VG, labels_V)
    assert loss.item() == pytest.approx(-0.5 / 3)


@pytest.mark.parametrize("steps", [1, 7, 40])
def test_gradient_descent_follows_the_closed_form_of_eq_6(steps):
    """w_0 moves by +c * mean(y * sum_j x_j) and w_1 by -c * the same."""
    torch.manual_seed(0)
    num_samples, num_patches, dims, lr = 12, 16, 5, 0.03
    patches_NJD = torch.randn(num_samples, num_patches, dims)
    y_N = torch.where(torch.rand(num_samples) < 0.5, 1.0, -1.0)
    router = LinearRouter(dims, 2, init_std=0.1)
    start_ED = router.weight_ED.detach().clone()
    optimizer = torch.optim.SGD(router.parameters(), lr=lr)
    labels_V = (y_N < 0).long().repeat_interleave(num_patches)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = separate_loss(router(patches_NJD.flatten(0, 1)), labels_V)
        (num_patches * loss).backward()
        optimizer.step()
    direction_D = (y_N[:, None] * patches_NJD.sum(1)).mean(0)
    moved = router.weight_ED.detach() - start_ED
    expected = steps * lr * torch.stack([direction_D, -direction_D])
    torch.testing.assert_close(moved, expected, rtol=1e-5, atol=1e-5)


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
    one = separate_loss(logits_VG, labels_V, pairs=[(0, 2)])
    torch.testing.assert_close(one, losses[1])


def test_tokens_of_unknown_group_take_no_part():
    torch.manual_seed(3)
    logits_VG, labels_V = torch.randn(4, 2), torch.tensor([0, 1, 0, -1])
    expected = separate_loss(logits_VG[:3], labels_V[:3])
    torch.testing.assert_close(separate_loss(logits_VG, labels_V), expected)


def test_on_a_record_a_group_has_the_mean_logit_of_its_experts():
    torch.manual_seed(4)
    moe = MoELayer(
        router=LinearRouter(4, 3),
        gate=TopKGate(1),
        experts=FFNExperts(3, 4, 8),
        losses=[SeparateRouterLoss(weight=2.0)],
        group_experts=[[0, 2], [1]],
    )
    tokens_BND = torch.randn(2, 5, 4)
    _, record = moe(tokens_BND, group_ids_B=torch.tensor([1, 0]))
    z = record.logits_VE
    margin_V = (z[:, 0] + z[:, 2]) / 2 - z[:, 1]
    # the first image is of group 1, the second of group 0
    expected = -2.0 * (margin_V[5:].sum() - margin_V[:5].sum()) / 10
    torch.testing.assert_close(record.losses["separate_router"], expected)


T, E = 1000, 6
ROUTING = (
    DatasetRoutingLoss(),
    ImportanceLoss(),
    LoadBalanceLoss(),
    LoadLoss(),
    RouterZLoss(),
    SeparateRouterLoss(),
)


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
    **{repr(loss): on_a_record(loss) for loss in ROUTING},
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
