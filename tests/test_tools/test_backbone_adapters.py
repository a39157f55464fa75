"""Adapters: by hand, zero at the start, and each image uses those of its dataset."""

import pytest
import torch

from tools.analysis.backbone.adapters import Adapter


@pytest.fixture
def detector(build):
    def make(kind, **adapters):
        extra = dict(adapters=adapters) if adapters else {}
        base = "moe-dino-mini_efficientnet-lite0"
        return build(moe=None, base=base, type=kind, **extra)

    return make


def test_adapter_by_hand():
    adapter = Adapter(datasets=2, channels=2, rank=1)
    with torch.no_grad():
        adapter.scale_GC[1] = torch.tensor([1.0, 0.5])
        adapter.shift_GC[1] = torch.tensor([0.0, 3.0])
        adapter.down_GCL[1] = torch.tensor([[1.0], [2.0]])
        adapter.up_GLC[1] = torch.tensor([[10.0, 100.0]])
    maps = torch.tensor([[[[1.0, 2.0]], [[4.0, 6.0]]]]).repeat(2, 1, 1, 1)
    untouched, adapted = adapter(maps, torch.tensor([0, 1]))
    assert torch.equal(untouched, maps[0])
    # x + x * scale + shift + (x . down) * up, with x . down of 9 and 14.
    expected = [[[2.0 + 90, 4.0 + 140]], [[6.0 + 3 + 900, 9.0 + 3 + 1400]]]
    assert torch.equal(adapted, torch.tensor(expected))


def test_detector_starts_as_dense(detector, make_batch, run_loss):
    batch = make_batch([0, 2])
    dense = run_loss(detector("MoEDINO"), batch)
    adapted = detector("AdaptedDINO", datasets=3)
    ranks = {80: 5, 112: 7, 192: 12, 320: 20}  # channels / 16
    expected = [(c, ranks[c]) for c in [*[80] * 3, *[112] * 3, *[192] * 4, 320]]
    assert [a.down_GCL.shape[1:] for a in adapted.adapters] == expected
    losses = run_loss(adapted, batch)
    for name, loss in dense.items():
        assert torch.equal(torch.as_tensor(loss), torch.as_tensor(losses[name])), name


@pytest.mark.parametrize(
    ("options", "moves"),
    [
        (dict(datasets=3), [False, True]),
        (dict(datasets=3, offset=1), [False, False]),  # adapters 1 and 0
        (dict(datasets=1), [True, True]),
    ],
)
def test_each_image_uses_the_adapters_of_its_dataset(
    detector, make_batch, run_predict, options, moves
):
    adapted, batch = detector("AdaptedDINO", **options), make_batch([0, 2])
    before = run_predict(adapted, batch)
    with torch.no_grad():
        for adapter in adapted.adapters:
            adapter.shift_GC[-1] = 1.0  # the third, or the only one
    after = run_predict(adapted, batch)
    changed = [
        not torch.equal(a.pred_instances.scores, b.pred_instances.scores)
        for a, b in zip(before, after, strict=True)
    ]
    assert changed == moves


def test_adapters_of_one_dataset_get_no_gradients_from_others(
    detector, make_batch, run_loss, total
):
    adapted = detector("AdaptedDINO", datasets=3)
    total(run_loss(adapted, make_batch([0, 2, 2]))).backward()
    for adapter in adapted.adapters:
        size = adapter.up_GLC.grad.abs().sum(dim=(1, 2))
        assert (size > 0).tolist() == [True, False, True]
