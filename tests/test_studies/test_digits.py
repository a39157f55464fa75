import pytest
import torch

from damex.studies.digits import split_digits


def test_each_picture_is_in_one_part_and_keeps_its_digit():
    first, second = split_digits(1000, seed=0)
    assert first.images_SD.shape == (1000, 64)
    assert second.images_SD.shape == (797, 64)
    assert torch.cdist(first.images_SD, second.images_SD).min() > 0
    assert first.images_SD.max() == 1.0
    # The sum of all pixels of scikit-learn's digits is 561718; here they are in 16ths.
    total = first.images_SD.sum() + second.images_SD.sum()
    assert total.item() == pytest.approx(561718 / 16)
    # The nearest picture of the other part shows the same digit nearly always.
    nearest = torch.cdist(second.images_SD, first.images_SD).argmin(1)
    right = first.labels_S[nearest] == second.labels_S
    assert right.double().mean() > 0.95
    # About 80 of each in the second part: no part is one writer's.
    assert second.labels_S.bincount().min() > 50


def test_the_seed_alone_decides():
    parts = [split_digits(1000, seed=seed)[0].labels_S for seed in (0, 0, 1)]
    assert torch.equal(parts[0], parts[1])
    assert not torch.equal(parts[0], parts[2])
