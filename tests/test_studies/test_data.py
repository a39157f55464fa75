from dataclasses import replace

import pytest
import torch

from studies.cluster_data import Strengths, draw_task
from studies.digits import uci_digits

pytestmark = pytest.mark.studies

LAW = Strengths(alpha=(0.5, 2.0), beta=(1.0, 2.0), gamma=(0.5, 3.0), noise_std=2.0)


def coordinates(task, samples):
    """Length of every patch along every signal and every centre, (B, P, K) each."""
    return (
        samples.patches_BPD @ task.signals_KD.t(),
        samples.patches_BPD @ task.centers_KD.t(),
    )


@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_sample_is_a_signal_a_centre_a_disturbance_and_noise(generator, num_groups):
    law = replace(LAW, noise_std=0.0)
    task = draw_task(law, generator, num_clusters=6, dims=16, num_groups=num_groups)
    directions = torch.cat([task.signals_KD, task.centers_KD])
    torch.testing.assert_close(directions @ directions.t(), torch.eye(12))
    samples = task.draw(4000, generator)
    signals_BPK, centers_BPK = coordinates(task, samples)
    # One patch each; the noise patch is zero here.
    assert ((signals_BPK.abs() > 1e-4).sum((1, 2)) == 2).all()
    assert ((centers_BPK.abs() > 1e-4).sum((1, 2)) == 1).all()
    own = torch.arange(4000)
    strength_B = signals_BPK.sum(1)[own, samples.clusters_B]
    assert torch.equal(strength_B.sign(), samples.labels_B)
    assert 0.4999 <= strength_B.abs().min() < 0.51
    assert 1.99 < strength_B.abs().max() <= 2.0001
    centre_B = centers_BPK.sum(1)[own, samples.clusters_B]
    assert 0.9999 <= centre_B.min() < 1.01
    assert 1.99 < centre_B.max() <= 2.0001
    rest_BK = signals_BPK.sum(1).index_put((own, samples.clusters_B), torch.zeros(4000))
    rivals_B = rest_BK.abs().argmax(1)
    assert (rivals_B != samples.clusters_B).all()
    # 6 clusters in groups: 0 to 1, 2 to 3, 4 to 5 for three of them, else all.
    size = 6 // num_groups
    assert torch.equal(rivals_B // size, samples.clusters_B // size)
    # All pairs of a group occur.
    pairs = torch.stack([samples.clusters_B, rivals_B]).unique(dim=1)
    assert pairs.shape[1] == 6 * (size - 1)
    rival_B = rest_BK[own, rivals_B]
    assert 0.4999 <= rival_B.abs().min() < 0.52
    assert 2.98 < rival_B.abs().max() <= 3.0001
    # Its sign tells nothing of the label: five deviations of a mean of 4000 signs.
    assert abs((rival_B.sign() * samples.labels_B).mean()) < 5 / 4000**0.5


def test_labels_clusters_and_places_are_drawn_evenly(generator):
    task = draw_task(LAW, generator, num_clusters=4, dims=8)
    samples = task.draw(16_000, generator)
    # Standard deviation of a share of 1/2 in 16000 draws: 0.004; four of them.
    assert abs((samples.labels_B > 0).double().mean().item() - 0.5) < 0.016
    # The patch of the centre is the one that lies along a direction wholly.
    centers_BP = coordinates(task, samples)[1].amax(2)
    places_B = (centers_BP / samples.patches_BPD.norm(dim=2)).argmax(1)
    for drawn_B in (samples.clusters_B, places_B):
        share = torch.bincount(drawn_B, minlength=4) / 16_000
        torch.testing.assert_close(share, torch.full((4,), 0.25), atol=0.014, rtol=0)


def test_a_noise_patch_has_the_length_asked_for(generator):
    task = draw_task(LAW, generator, num_clusters=4, dims=50)
    patches_BPD = task.draw(4000, generator).patches_BPD
    # Of squares: (8 - 1/8) / 3 / 1.5 = 1.75 for the label, (8 - 1) / 3 for the centre,
    # (27 - 1/8) / 3 / 2.5 for the disturbance, and sigma_p^2 = 4.
    expected = 1.75 + 7 / 3 + 26.875 / 7.5 + 4
    total = patches_BPD.square().sum((1, 2)).mean().item()
    assert total == pytest.approx(expected, rel=0.02)
    # 42 of the 50 dimensions of the noise, and nothing else, are outside of the span
    # of the directions: 4 * 42 / 50.
    basis_SD = torch.cat([task.signals_KD, task.centers_KD])
    rest_BPD = patches_BPD - patches_BPD @ basis_SD.t() @ basis_SD
    assert rest_BPD.square().sum((1, 2)).mean().item() == pytest.approx(3.36, rel=0.03)


@pytest.mark.parametrize(
    ("clusters", "dims", "groups", "message"),
    [(4, 7, 1, "8 orthogonal"), (6, 16, 4, "4 groups"), (4, 16, 4, "two or more")],
)
def test_what_cannot_be_drawn_is_refused(generator, clusters, dims, groups, message):
    with pytest.raises(ValueError, match=message):
        draw_task(LAW, generator, num_clusters=clusters, dims=dims, num_groups=groups)


def test_each_picture_is_in_one_part_and_keeps_its_digit():
    source = uci_digits(1000, seed=0)
    assert source.train.images_S1HW.shape == (1000, 1, 8, 8)
    assert source.test.images_S1HW.shape == (797, 1, 8, 8)
    first, second = source.train, source.test
    first_SD, second_SD = first.images_S1HW.flatten(1), second.images_S1HW.flatten(1)
    assert torch.cdist(first_SD, second_SD).min() > 0
    assert first_SD.max() == 1.0
    # The sum of all pixels of UCI's digits is 561718; here they are in 16ths.
    total = first_SD.sum() + second_SD.sum()
    assert total.item() == pytest.approx(561718 / 16)
    # The nearest picture of the other part shows the same digit nearly always.
    nearest = torch.cdist(second_SD, first_SD).argmin(1)
    right = first.labels_S[nearest] == second.labels_S
    assert right.double().mean() > 0.95
    # About 80 of each in the second part: no part is one writer's.
    assert second.labels_S.bincount().min() > 50
