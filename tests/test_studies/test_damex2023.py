import dataclasses
import math

import pytest
import torch
from torch.nn import functional

from studies.damex2023.faults import draw_images
from studies.damex2023.mixing import (
    ClusterMoE,
    Mixing,
    draw_mixture,
    evaluate,
)

pytestmark = pytest.mark.studies

MIXING = Mixing(dims=32, num_experts=4, hidden_dims=3, clusters=4, num_samples=64)


@pytest.fixture
def task(generator):
    return draw_mixture(MIXING, 4, shared=False, generator=generator)


@pytest.fixture
def model():
    torch.manual_seed(0)
    return ClusterMoE("damex", MIXING, 4).eval()


def test_the_model_is_the_paper_s_sum_over_patches(model, task, generator):
    patches = task.draw(5, generator).patches_BPD
    with torch.no_grad():
        score, _ = model(patches)
    router, ffn = model.layer.router, model.layer.experts.ffn
    for sample in range(5):
        logits = router.weight_ED @ patches[sample].sum(0)
        expert = int(logits.argmax())
        hidden = patches[sample] @ ffn.w1_EDH[expert] + ffn.b1_EH[expert]
        out = hidden**3 @ ffn.w2_EHD[expert] + ffn.b2_ED[expert]
        weight = functional.softmax(logits, dim=0)[expert]
        expected = model.readout.weight @ (weight * out.sum(0))
        torch.testing.assert_close(score[sample], expected[0], rtol=1e-4, atol=1e-6)


def test_outcomes_of_a_router_that_knows_the_data_sets(model, task, generator):
    with torch.no_grad():
        # The centres of data set d, clusters 4d to 4d + 3, point to expert d.
        centers_GD = task.centers_KD.unflatten(0, (4, 4)).sum(1)
        model.layer.router.weight_ED.copy_(centers_GD * 100)
    clear = dataclasses.replace(
        task, strengths=dataclasses.replace(task.strengths, noise_std=0.0)
    )
    found = evaluate(model, clear.draw(2000, generator), MIXING)
    assert found.routing == 100.0
    assert found.entropy == pytest.approx(0.0, abs=1e-9)
    assert found.information == pytest.approx(math.log(4), abs=0.01)
    assert found.counts_GE.sum() == 2000
    # Untrained experts toss a coin: 0.5 +- 4 * 0.5 / sqrt(2000).
    assert abs(found.accuracy - 50) < 4.5


def test_images_hold_tokens_of_their_own_data_set(task, generator):
    tokens = draw_images(task, torch.tensor([2, 0]), 200, generator)
    assert tokens.shape == (2, 200, 32)
    cluster = (tokens @ task.centers_KD.t()).argmax(2)
    # Noise makes another cluster's centre the nearest now and then.
    for image, dataset in enumerate((2, 0)):
        assert ((cluster[image] // 4) == dataset).double().mean() > 0.9


def values(result, name, *parts):
    """Means of the rows with this in their name and these in their settings.

    Rows with more experts than usual are left out unless they are asked for.
    """
    return [
        row.mean
        for row in result.rows
        if row.name.startswith(name)
        and all(part in row.settings for part in parts)
        and ("experts" in row.settings) == ("32 experts" in parts)
    ]


def test_damex_routes_by_data_set_and_the_vanilla_mixture_does_not(result):
    # Two and eight data sets, two mixtures.
    assert len(values(result, "mutual information", "vanilla")) == 4
    assert max(values(result, "mutual information", "vanilla")) < 0.6
    largest = [math.log(2), math.log(8)] * 2
    found = values(result, "mutual information", "DAMEX")
    assert all(0.6 * most < one for one, most in zip(found, largest, strict=True))
    assert min(values(result, "routed to an expert", "DAMEX, 2")) > 95


def test_mixing_more_data_sets_costs_both_and_damex_less_where_they_disturb(result):
    vanilla = values(result, "test accuracy", "vanilla", "any data set")
    damex = values(result, "test accuracy", "DAMEX", "any data set")
    assert vanilla[0] > 94 > vanilla[1] + 2
    assert damex[1] > vanilla[1] + 2
    # Within one data set an expert meets all of its disturbances (Theorem 4.1).
    assert values(result, "test accuracy", "DAMEX, 8", "the same")[0] < 87.5


def test_faults_show_with_the_released_way_only(result):
    share = "routed to the expert"
    assert values(result, share, "our layout", "2 data sets")[0] > 95
    assert values(result, share, "our layout", "8 data sets")[0] > 90
    assert 25 < values(result, share, "released layout", "2 data sets")[0] < 75
    ours = values(result, "probability", "our layout")
    released = values(result, "probability", "released layout")
    assert all(a > b + 10 for a, b in zip(ours, released, strict=True))
    # 1 - 141 / 900 = 84.3 % at a perfect router.
    assert 75 < values(result, "dropped tokens", "capacity")[0] <= 84.4
    assert values(result, "dropped tokens", "dropless") == [0.0]
    accuracy = "class accuracy"
    hidden = "do not show"
    assert abs(values(result, accuracy, "own numbers", hidden)[0] - 50) < 5
    assert values(result, accuracy, "labels by name", hidden)[0] > 95


def test_what_holds_exactly_holds_and_the_conclusion_says_what_does_not(result):
    exact = ("loss minus", "output with minus", "served of", "wrong routing")
    chosen = [row for row in result.rows if row.name.startswith(exact)]
    assert len(chosen) == 9
    assert all(row.holds for row in chosen)
    assert "is confirmed where disturbing signals come from any" in result.conclusion
    assert "is not confirmed where" in result.conclusion
