import dataclasses
import math

import pytest
import torch

from studies.digits import DigitImages, uci_digits
from studies.pmoe2023.data import PatchSamples, Task
from studies.pmoe2023.models import (
    PatchCNN,
    PatchMoE,
    Recipe,
)
from studies.pmoe2023.plan import MULTI, SPURIOUS
from studies.pmoe2023.study import NUM_TRAIN
from studies.pmoe2023.training import (
    accuracy,
    best_hits,
    fit,
    top_hits,
    train_router,
)

pytestmark = pytest.mark.studies

TINY = Recipe(num_experts=2, num_filters=2, num_tokens=2, joint=True)
# Each "picture" is its own digit, so that patches can be read.
READABLE = DigitImages(
    torch.arange(100).remainder(10).float().view(100, 1, 1, 1), torch.arange(100) % 10
)
DIGITS = uci_digits(NUM_TRAIN, seed=0)


def tiny_model(recipe=TINY):
    """Expert 0: router (1, 0), filter (1, 1), a = 2; 1: (0, 1), (1, -1), a = -1."""
    model = PatchMoE(recipe, embed_dims=2)
    with torch.no_grad():
        model.moe.router.weight_ED.copy_(torch.eye(2))
        model.moe.experts.filter_EDO.copy_(
            torch.tensor([[[1.0], [1.0]], [[1.0], [-1.0]]])
        )
        model.moe.experts.output_EOC.copy_(torch.tensor([[[2.0]], [[-1.0]]]))
    return model


LOG2 = math.log(2)
SAMPLE = torch.tensor([[[LOG2, 0.0], [0.0, 1.0], [-5.0, 1.0]]])


TOP = torch.tensor([[[3.0, 1.0], [0.0, 0.0]]])
FIRST, SECOND = math.e**3 / (math.e**3 + 1), math.e / (math.e + 1)


@pytest.mark.parametrize(
    ("changes", "sample", "logit"),
    [
        # Expert 0 takes patches 0 and 1 with softmax(log 2, 0) = 2/3, 1/3: 2 / 2 times
        # 2/3 relu(log 2) + 1/3 relu(1). Expert 1 takes patches 1 and 2 (both 1):
        # filters give -1 and -6, relu 0.
        (dict(), SAMPLE, 2 / 3 * LOG2 + 1 / 3),
        (dict(joint=False), SAMPLE, LOG2 + 1),  # gating values of one
        (dict(joint=False, pool="all"), SAMPLE, 2 / 3 * (LOG2 + 1)),
        # Expert 1 takes (3, 1) and (0, 0) with softmax(1, 0): filter 2 and 0, a = -1;
        # expert 0 takes them with softmax(3, 0): filter 4 and 0, a = 2.
        (dict(), TOP, (2 * 4 * FIRST - 2 * SECOND) / 2),
    ],
)
def test_pmoe_is_equation_1(changes, sample, logit):
    model = tiny_model(dataclasses.replace(TINY, **changes))
    torch.testing.assert_close(model(sample), torch.tensor([[logit, 0.0]]))


def test_the_cnn_is_pmoe_with_one_expert_that_takes_all():
    recipe = Recipe(num_experts=1, num_filters=6, num_tokens=5, joint=False)
    pmoe = PatchMoE(recipe, embed_dims=3, num_classes=4)
    cnn = PatchCNN(6, embed_dims=3, num_classes=4)
    with torch.no_grad():
        cnn.filters.weight.copy_(pmoe.moe.experts.filter_EDO[0].t())
        cnn.output_OC.copy_(pmoe.moe.experts.output_EOC[0])
    patches = torch.randn(7, 5, 3)
    torch.testing.assert_close(cnn(patches), pmoe(patches))


def test_starting_values():
    torch.manual_seed(0)
    recipe = Recipe(num_experts=2, num_filters=400, num_tokens=2, joint=False)
    experts = PatchMoE(recipe, embed_dims=64).moe.experts
    assert experts.filter_EDO.std().item() == pytest.approx(0.05, rel=0.05)
    assert experts.output_EOC.std().item() == pytest.approx(1.0, rel=0.1)
    signs = dataclasses.replace(recipe, output="signs", filter_std=0.3)
    experts = PatchMoE(signs, embed_dims=64).moe.experts
    assert experts.filter_EDO.std().item() == pytest.approx(0.3, rel=0.05)
    assert experts.output_EOC.flatten(1).tolist() == [[1.0] * 200, [-1.0] * 200]
    assert [name for name, _ in experts.named_parameters()] == ["filter_EDO"]


def test_samples_have_one_pattern_of_their_class():
    samples = Task().draw(READABLE, 200, seed=0)
    digits_BN = samples.patches_BND[..., 0]
    pattern_B = digits_BN.gather(1, samples.position_B.unsqueeze(1)).squeeze(1)
    assert torch.equal(pattern_B, 1.0 - samples.labels_B)  # class 0 shows a 1
    assert ((digits_BN < 2).sum(1) == 1).all()
    assert samples.labels_B.sum() == 100
    assert digits_BN.unique().tolist() == list(range(10))
    assert samples.position_B.unique().tolist() == list(range(16))
    again = Task().draw(READABLE, 200, seed=0)
    assert torch.equal(samples.patches_BND, again.patches_BND)
    other = Task().draw(READABLE, 200, seed=1)
    assert not torch.equal(samples.position_B, other.position_B)


SOURCE = dataclasses.replace(DIGITS, train=READABLE, test=READABLE)


@pytest.mark.parametrize(
    ("draw", "share"), [(SPURIOUS.train, 0.95), (SPURIOUS.test, 0.5)]
)
def test_a_spurious_pattern_agrees_as_often_as_asked_and_not_in_tests(draw, share):
    samples = draw(SOURCE, 2000, 0)
    digits_BN = samples.patches_BND[..., 0]
    spurious_BN = (digits_BN == 2) | (digits_BN == 3)
    assert (spurious_BN.sum(1) == 1).all()
    assert ((digits_BN < 2).sum(1) == 1).all()
    agrees_B = digits_BN[spurious_BN] == 2 + samples.labels_B
    assert agrees_B.double().mean().item() == pytest.approx(share, abs=0.03)


def test_four_classes():
    samples = MULTI.draw(READABLE, 400, seed=0)
    digits_BN = samples.patches_BND[..., 0]
    pattern_B = digits_BN.gather(1, samples.position_B.unsqueeze(1)).squeeze(1)
    assert torch.equal(pattern_B, torch.tensor([1.0, 0.0, 2.0, 3.0])[samples.labels_B])
    assert ((digits_BN < 4).sum(1) == 1).all()
    assert samples.labels_B.bincount().tolist() == [100] * 4
    with pytest.raises(ValueError, match="spurious needs the classes"):
        MULTI.draw(READABLE, 4, seed=0, spurious=0.9)


def test_routers_of_four_classes_are_trained_in_pairs():
    patches = torch.eye(4).unsqueeze(1).repeat(5, 1, 1)
    samples = PatchSamples(patches, torch.arange(20) % 4, torch.zeros(20).long())
    recipe = dataclasses.replace(TINY, num_experts=4, num_filters=4, router_std=0.0)
    model = PatchMoE(recipe, embed_dims=4, num_classes=4)
    train_router(model, samples, lr=2.0, epochs=1)
    # Two pairs share the mean of the loss: 2 * (1/2) * (1/2) for each class's mean.
    pair = torch.tensor([[0.5, -0.5], [-0.5, 0.5]])
    expected = torch.block_diag(pair, pair)
    torch.testing.assert_close(model.moe.router.weight_ED.data, expected)


def test_training_stops_after_an_epoch_without_error():
    patches = torch.tensor([[[4.0]], [[-4.0]]]).repeat(10, 1, 1)
    samples = PatchSamples(patches, torch.arange(20) % 2, torch.zeros(20).long())
    right = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(1, 2))
    with torch.no_grad():
        right[1].weight.copy_(torch.tensor([[1.0], [-1.0]]))
        right[1].bias.zero_()
    assert fit(right, samples, lr=0.0, epochs=7, seed=0) == 1
    assert accuracy(right, samples) == 100.0
    with torch.no_grad():
        right[1].weight.neg_()
    assert fit(right, samples, lr=0.0, epochs=7, seed=0) == 7
    assert accuracy(right, samples) == 0.0


def test_hits():
    # Expert 0 ranks patches by the first pixel, expert 1 by the second.
    patches = torch.tensor(
        [
            [[3.0, 0.0], [2.0, 9.0], [1.0, 5.0]],  # class 0, pattern 1: second, first
            [[9.0, 1.0], [2.0, 2.0], [1.0, 3.0]],  # class 0, pattern 0: first, last
            [[9.0, 1.0], [2.0, 2.0], [1.0, 3.0]],  # class 1, pattern 2: last, first
        ]
    )
    samples = PatchSamples(patches, torch.tensor([0, 0, 1]), torch.tensor([1, 0, 2]))
    model = tiny_model()
    # own experts see ranks 2, 1 and 1
    assert top_hits(model, samples, 1) == pytest.approx(200 / 3)
    assert top_hits(model, samples, 2) == 100.0
    # firsts by class: expert 0 one of two and none of one, expert 1 one and one
    assert best_hits(model, samples, 1) == (50.0, 100.0)
    # with l = 2, expert 0 takes both of class 0 and its rival, ranked third, not
    assert best_hits(model, samples, 2) == (100.0, 100.0)


def test_the_quick_run_finds_the_exact_things_exact(result):
    exact = [row for row in result.rows if row.criterion]
    assert len(exact) == 8
    assert [row.name for row in exact if not row.holds] == []
    assert result.conclusion.startswith("8 of 8 criteria hold. ")


def test_the_quick_run_learns_as_it_should(mean):
    assert mean("separate pMoE, accuracy, %", "N = 300") > 92
    assert mean("separate router: pattern in the top 2, %", "N = 300") > 80
    assert mean("CNN-40, accuracy, %", "N = 300, best of the rates: 0.2, 30") < 88
    # The joint router has to learn: with gating values of 1, or of a softmax over all
    # patches, it stays where it started or learns slowly.
    assert mean("joint pMoE, accuracy, %", "N = 300") > 96
    assert mean("joint router: largest gate for o2, %", "N = 300") > 90
    assert mean("joint pMoE: l = 6 minus l = 1, points", "N = 100") > 5
