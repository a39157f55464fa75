"""Tokens kept to the experts of one group: by labels, by a vote, by nobody."""

import copy

import pytest
import torch

from damex.moe import (
    BiasBalancer,
    DatasetRoutingLoss,
    ExpertCapacity,
    GroupChoice,
    ImportanceLoss,
    LoadBalanceLoss,
    Packing,
    RouterZLoss,
    TopKGate,
)
from damex.moe.routing import image_votes
from damex.papers.dense_gates import DenseSoftmaxGate, DenseToSparseGate
from damex.papers.expert_choice import ExpertChoiceGate
from tests.test_moe.layers import ROUTERS, D, begun
from tests.test_moe.layers import make_layer as any_layer

E = 6
GROUPS = [[0, 1], [2, 3], [4, 5]]
ONE_EACH = [[0], [1], [2]]
FORCED = GroupChoice(teacher_forcing=True)
VOTE = GroupChoice(image_vote=True)
ORACLE = GroupChoice(oracle=True)


GATES = {
    "top1": lambda: TopKGate(1),
    "top2 renormalised": lambda: TopKGate(2, renormalize=True),
    "top2 noisy": lambda: TopKGate(
        2, noise="gaussian", noise_scale=50.0, noisy_weights=True
    ),
    "with a capacity": lambda: TopKGate(1, capacity=ExpertCapacity(factor=1.0)),
    "dense to sparse": lambda: begun(DenseToSparseGate(threshold=0.01), 0.2),
}
every_gate = pytest.mark.parametrize("gate", GATES.values(), ids=GATES.keys())
every_router = pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS.keys())


def make_layer(choice, gate=GATES["top1"], *, group_experts=GROUPS, **options):
    options = dict(losses=(), group_experts=group_experts) | options
    experts = sum(map(len, group_experts))
    return any_layer(gate, num_experts=experts, group_choice=choice, **options)


def make_tokens(num_images=3, num_tokens=7):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(num_images, num_tokens, D, generator=generator)


IDS = torch.tensor([2, 0, 1])


def group_of_routes(record):
    return record.assignment.expert_index_R // 2


def routes(record):
    a = record.assignment
    return a.token_index_R.tolist(), a.expert_index_R.tolist()


@every_router
@every_gate
def test_forced_tokens_never_leave_their_group(gate, router):
    losses = [DatasetRoutingLoss(), LoadBalanceLoss(), ImportanceLoss(), RouterZLoss()]
    layer = make_layer(FORCED, gate, router=router, losses=losses)
    torch.manual_seed(2)
    out, record = layer(make_tokens(), group_ids_B=IDS)
    wanted_R = record.group_ids_V[record.assignment.token_index_R]
    assert torch.equal(group_of_routes(record), wanted_R)
    torch.manual_seed(2)
    _, free = make_layer(None, gate, router=router, losses=losses)(
        make_tokens(), group_ids_B=IDS
    )
    free_R = free.group_ids_V[free.assignment.token_index_R]
    assert (group_of_routes(free) != free_R).any()
    torch.testing.assert_close(record.logits_VE, free.logits_VE)
    (out.square().sum() + sum(record.losses.values())).backward()
    for name, parameter in layer.named_parameters():
        assert torch.isfinite(parameter.grad).all(), name


@every_gate
def test_images_of_unknown_dataset_stay_free(gate):
    tokens, unknown = make_tokens(), torch.tensor([-1, -1, -1])
    torch.manual_seed(2)
    out, record = make_layer(FORCED, gate)(tokens, group_ids_B=unknown)
    torch.manual_seed(2)
    expected, free = make_layer(None, gate)(tokens, group_ids_B=unknown)
    assert routes(record) == routes(free)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("choice", [FORCED, VOTE])
def test_forcing_acts_in_training_only_and_votes_in_evaluation_only(choice):
    training = choice is VOTE
    layer, free = (make_layer(c).train(training) for c in (choice, None))
    out, record = layer(make_tokens(), group_ids_B=IDS)
    assert record.votes_BG is None
    assert torch.equal(out, free(make_tokens())[0])


def test_forced_routes_are_the_best_of_the_group_with_the_weights_of_all_experts():
    _, record = make_layer(FORCED)(make_tokens(), group_ids_B=IDS)
    a = record.assignment
    for token, expert, weight in zip(
        a.token_index_R.tolist(), a.expert_index_R.tolist(), a.weight_R, strict=True
    ):
        group = GROUPS[record.group_ids_V[token]]
        assert expert == max(group, key=lambda e: record.logits_VE[token, e])
        torch.testing.assert_close(weight, record.probs_VE[token, expert])


@every_router
def test_with_one_expert_each_only_the_dataset_loss_teaches_the_router(router):
    """Then experts are assigned by dataset, with weight 1."""
    grads = []
    for task in (0.0, 1.0):
        layer = make_layer(
            FORCED,
            lambda: TopKGate(1, renormalize=True, noise="gaussian"),
            router=router,
            group_experts=ONE_EACH,
            losses=[DatasetRoutingLoss()],
        )
        out, record = layer(make_tokens(), group_ids_B=IDS)
        (task * out.square().sum() + record.losses["dataset_routing"]).backward()
        grads.append([p.grad.clone() for p in layer.router.parameters()])
    order_V = record.assignment.token_index_R
    assert torch.equal(record.assignment.expert_index_R, record.group_ids_V[order_V])
    assert torch.equal(record.assignment.weight_R, torch.ones(21))
    assert any(grad.abs().sum() > 0 for grad in grads[0])
    for without, with_task in zip(*grads, strict=True):
        torch.testing.assert_close(with_task, without)


@every_router
@every_gate
def test_the_oracle_takes_the_routes_of_teacher_forcing(gate, router):
    torch.manual_seed(2)
    tokens = make_tokens()
    forced = make_layer(FORCED, gate, router=router)
    if getattr(forced.gate, "noise", None) is not None:
        forced.gate.noise = None
        forced.gate.noisy_weights = False
    oracle = copy.deepcopy(forced).eval()
    oracle.group_choice = GroupChoice(oracle=True, image_vote=True)
    expected, trained = forced(tokens, group_ids_B=IDS)
    out, record = oracle(tokens, group_ids_B=IDS)
    assert routes(record) == routes(trained)
    assert torch.equal(out, expected)
    with pytest.raises(ValueError, match=r"in evaluation \['oracle'\] need group_ids"):
        oracle(tokens)


def test_a_sure_token_outvotes_a_majority():
    """Two of three tokens lean to group 0, and the sum of logarithms says group 1.

    Groups {0}, {1}: log p of (0, 1) by token, from p = 0.6, 0.6, 0.01 for group 0:
    sums 2 ln 0.6 + ln 0.01 = -5.6268 and 2 ln 0.4 + ln 0.99 = -1.8426.
    """
    prob_V2 = torch.tensor([[0.6, 0.4], [0.6, 0.4], [0.01, 0.99]])
    experts_GE = torch.eye(2, dtype=torch.bool)
    votes = image_votes(prob_V2.log() + 5.0, experts_GE, Packing(1, 3))
    torch.testing.assert_close(
        votes, torch.tensor([[-5.626821, -1.842632]], dtype=torch.float64)
    )


@every_router
@every_gate
def test_a_vote_sends_an_image_to_one_group(gate, router):
    layer = make_layer(VOTE, gate, router=router).eval()
    _, record = layer(make_tokens())
    winner_V = record.votes_BG.argmax(1).repeat_interleave(7)
    token_R = record.assignment.token_index_R
    assert torch.equal(group_of_routes(record), winner_V[token_R])
    prob_VG = record.probs_VE.view(21, 3, 2).sum(2)
    expected_BG = prob_VG.double().log().view(3, 7, 3).sum(1)
    torch.testing.assert_close(record.votes_BG, expected_BG, rtol=1e-5, atol=1e-5)


def test_padding_and_other_images_have_no_vote():
    layer = make_layer(VOTE, GATES["top2 renormalised"]).eval()
    tokens = make_tokens()
    out, record = layer(tokens)
    junk = torch.full((3, 5, D), 100.0)
    mask_BN = (torch.arange(12) < 7).expand(3, -1)
    padded, again = layer(
        torch.cat([tokens, junk], dim=1), packing=Packing.of_mask(mask_BN)
    )
    torch.testing.assert_close(padded[:, :7], out)
    torch.testing.assert_close(again.votes_BG, record.votes_BG)
    order = torch.tensor([2, 0, 1])
    torch.testing.assert_close(layer(tokens[order])[0], out[order])
    for image in range(3):
        torch.testing.assert_close(layer(tokens[image : image + 1])[0][0], out[image])


def test_a_bias_opens_no_closed_expert():
    layer = make_layer(VOTE, lambda: TopKGate(1, balance=BiasBalancer(E))).eval()
    winner_V = layer(make_tokens())[1].votes_BG.argmax(1).repeat_interleave(7)
    layer.gate.balance.bias_E += torch.tensor([9.0, 0, 7.0, 0, 0, 8.0])
    _, record = layer(make_tokens())
    winner_R = winner_V[record.assignment.token_index_R]
    assert torch.equal(group_of_routes(record), winner_R)


@pytest.mark.parametrize(
    ("gate", "choice", "message"),
    [
        (lambda: TopKGate(3), FORCED, "k=3 and a group has 2; set k=2"),
        (
            lambda: TopKGate(1, balance=BiasBalancer(E)),
            FORCED,
            "combined with balance",
        ),
        (DenseSoftmaxGate, VOTE, "DenseSoftmaxGate does not keep .* image_vote"),
        (lambda: DenseToSparseGate(threshold=0.0), ORACLE, "set threshold=0.01"),
        (lambda: ExpertChoiceGate(share=0.5), FORCED, "ExpertChoiceGate does not"),
    ],
)
def test_gates_that_cannot_keep_to_a_group_are_refused(gate, choice, message):
    with pytest.raises(ValueError, match=message):
        make_layer(choice, gate)


def test_missing_groups_are_named():
    with pytest.raises(ValueError, match="image_vote needs group_experts"):
        any_layer(group_experts=None, losses=(), group_choice=VOTE)
    with pytest.raises(ValueError, match=r"in training \['teacher_forcing'\] need"):
        make_layer(FORCED)(make_tokens())
