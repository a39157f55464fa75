import pytest
import torch

from damex.studies.cluster_data import draw_task


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def coordinates(task, samples):
    """Length of every patch along every signal and every centre, (B, P, K) each."""
    return (
        samples.patches_BPD @ task.signals_KD.t(),
        samples.patches_BPD @ task.centers_KD.t(),
    )


@pytest.mark.parametrize("num_groups", [1, 3])
def test_a_sample_is_a_signal_a_centre_a_disturbance_and_noise(generator, num_groups):
    task = draw_task(6, 16, generator, num_groups=num_groups, noise_std=0.0)
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
    assert 0.5 <= strength_B.abs().min() < 0.51
    assert 1.99 < strength_B.abs().max() <= 2.0
    centre_B = centers_BPK.sum(1)[own, samples.clusters_B]
    assert 1.0 <= centre_B.min() < 1.01
    assert 1.99 < centre_B.max() <= 2.0
    rest_BK = signals_BPK.sum(1).index_put((own, samples.clusters_B), torch.zeros(4000))
    rivals_B = rest_BK.abs().argmax(1)
    assert (rivals_B != samples.clusters_B).all()
    # 6 clusters in groups: 0 to 1, 2 to 3, 4 to 5 for three of them, else all.
    size = 6 // num_groups
    assert torch.equal(rivals_B // size, samples.groups_B)
    assert torch.equal(samples.clusters_B // size, samples.groups_B)
    strongest = rest_BK.abs().amax(1)
    assert 0.5 <= strongest.min() < 0.52
    assert 2.98 < strongest.max() <= 3.0


def test_labels_clusters_and_places_are_drawn_evenly(generator):
    task = draw_task(4, 8, generator)
    samples = task.draw(16_000, generator)
    # Standard deviation of a share of 1/2 in 16000 draws: 0.004; four of them.
    assert abs((samples.labels_B > 0).double().mean().item() - 0.5) < 0.016
    share_K = torch.bincount(samples.clusters_B, minlength=4) / 16_000
    torch.testing.assert_close(share_K, torch.full((4,), 0.25), atol=0.014, rtol=0)
    places_B = coordinates(task, samples)[1].abs().amax(2).argmax(1)
    assert places_B.unique().tolist() == [0, 1, 2, 3]


def test_a_noise_patch_has_the_length_asked_for(generator):
    task = draw_task(2, 64, generator, noise_std=2.0)
    samples = task.draw(4000, generator)
    # Of squares: 1/3 (8 - 1/8) / 1.5 = 1.75 for the label, (8 - 1) / 3 for the centre,
    # (27 - 1/8) / 3 / 2.5 for the disturbance, and 4.
    expected = 1.75 + 7 / 3 + 26.875 / 7.5 + 4
    total = samples.patches_BPD.square().sum((1, 2)).mean().item()
    assert total == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize(
    ("clusters", "dims", "groups", "message"),
    [(4, 7, 1, "8 orthogonal"), (6, 16, 4, "4 groups"), (4, 16, 4, "two or more")],
)
def test_what_cannot_be_drawn_is_refused(generator, clusters, dims, groups, message):
    with pytest.raises(ValueError, match=message):
        draw_task(clusters, dims, generator, num_groups=groups)
