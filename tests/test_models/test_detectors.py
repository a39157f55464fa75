import copy

import pytest
import torch
from mmdet.registry import MODELS

from damex.errors import DataError

ENCODER_AND_DECODER = dict(
    layers=dict(encoder=[0], decoder=[0, 2]),
    gate=dict(type="TopKGate", k=1),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
)


def assert_same(first, second, rtol=0.0, atol=0.0):
    """Detections are equal; by default, to the last bit."""
    for pair in zip(first, second, strict=True):
        a, b = (getattr(one, "pred_instances", one) for one in pair)
        for field in ("scores", "bboxes"):
            torch.testing.assert_close(a[field], b[field], rtol=rtol, atol=atol)
        assert torch.equal(a.labels, b.labels)


@pytest.mark.parametrize(
    ("groups", "boxes"),
    [([0, 1, 2], None), ([1, 1], None), ([0, 1], [0, 0])],
    ids=["all groups", "one group", "no boxes"],
)
def test_every_parameter_gets_a_gradient(
    build, make_batch, groups, boxes, run_loss, total
):
    """Also those of experts that no token of the batch goes to."""
    detector = build()
    loss = total(run_loss(detector, make_batch(groups, boxes=boxes)))
    loss.backward()
    assert torch.isfinite(loss)
    assert [n for n, p in detector.named_parameters() if p.grad is None] == []
    assert detector.routing.records == {}  # nothing is left over
    assert detector.routing.group_ids_B is None


def tokens_per_image(record):
    return record.packing.spread(torch.arange(2)).bincount(minlength=2).tolist()


def test_padding_and_filler_queries_are_never_routed(
    build, make_batch, records, run_loss
):
    detector = build(moe=ENCODER_AND_DECODER)
    run_loss(detector, make_batch([0, 1], sizes=[(64, 96), (64, 32)], boxes=[1, 3]))
    # 64 x 96 at strides 8, 16, 32: 96 + 24 + 6 = 126 features; a third at 64 x 32.
    assert tokens_per_image(records["encoder.0"]) == [126, 42]
    # 50 denoising queries / 3 boxes = 16 groups, positive and negative: 96 queries in
    # blocks of 3, of which the first image fills 32; then 50 matching queries.
    decoder = records["decoder.0"]
    assert tokens_per_image(decoder) == [32 + 50, 96 + 50]
    assert decoder.assignment.counts_E.sum() == 228


@pytest.mark.parametrize("divisor", [1, 32, 96])
def test_an_image_does_not_depend_on_the_others_of_its_batch(
    build_mmdet, make_batch, run_predict, detector_name, divisor
):
    """Nor on the padding that larger ones would bring: convolutions see it."""
    moe = dict(layers=dict(encoder=[0], decoder=[1]), gate=dict(type="TopKGate", k=1))
    detector = build_mmdet(detector_name, moe=moe)
    detector.data_preprocessor.pad_size_divisor = divisor
    batch = make_batch([0, 1, 1, 0], sizes=[(64, 96), (96, 40), (48, 56), (64, 96)])
    together = run_predict(detector, batch)
    assert [sample.img_shape for sample in together] == [
        sample.img_shape for sample in batch["data_samples"]
    ]
    for image in range(4):
        alone = {key: values[image : image + 1] for key, values in batch.items()}
        assert_same(
            run_predict(detector, alone),
            together[image : image + 1],
            rtol=1e-4,
            atol=1e-3,
        )


def test_an_image_with_fewer_cells_than_queries_is_named(
    build, make_batch, run_predict
):
    """32 x 64 at strides 8, 16, 32: 32 + 8 + 2 cells, and 50 queries."""
    detector, batch = build(), make_batch([0, 0], sizes=[(64, 64), (32, 64)])
    detector.data_preprocessor.pad_size_divisor = 32
    batch["data_samples"][1].set_metainfo(dict(img_path="thin.png"))
    with pytest.raises(DataError, match=r"thin\.png: it has 42 .*fewer than .*=50: "):
        run_predict(detector, batch)


def test_samples_tell_where_their_tokens_went_if_asked(build, make_batch, run_predict):
    detector = build()
    for sample in run_predict(detector, make_batch([0, 1])):
        assert set(sample.routing_counts) == {"decoder.0", "decoder.2"}
        assert all(sum(counts) == 50 for counts in sample.routing_counts.values())
    detector.counts_tokens = False
    data = detector.data_preprocessor(make_batch([0]), False)
    with torch.no_grad():
        (sample,) = detector(**data, mode="predict")
    assert "routing_counts" not in sample
    assert "routing_counts" not in run_predict(build(moe=None), make_batch([0]))[0]


def test_one_expert_equals_the_dense_detector(build, make_batch, run_loss, run_predict):
    """Same weights, one expert: same losses, same detections."""
    dense = build(moe=None)
    moe = build(moe=ENCODER_AND_DECODER, num_groups=1)
    moe.load_state_dict(dense.state_dict())
    batch = make_batch([0, 0], sizes=[(64, 64), (48, 96)])
    ours, theirs = run_loss(moe, batch), run_loss(dense, batch)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-4)
    assert ours["loss_moe_dataset_routing"] == 0.0
    assert_same(
        run_predict(moe, batch), run_predict(dense, batch), rtol=1e-4, atol=1e-3
    )


def test_keys_outside_of_experts_are_those_of_mmdets_dino(build, model_config):
    config = model_config(moe=None)
    for field in ("moe", "num_groups"):
        config.pop(field)
    theirs = set(MODELS.build({**config, "type": "DINO"}).state_dict())
    ours = set(build().state_dict())
    assert {key for key in ours - theirs if ".ffn.moe." not in key} == set()
    assert {key for key in theirs - ours if ".ffn.layers." not in key} == set()


def test_copies_and_state_dicts_predict_the_same(
    build, make_batch, run_loss, run_predict
):
    detector = build()
    batch = make_batch([0, 1])
    run_loss(detector, batch)  # a copy after a forward must work as well
    expected = run_predict(detector, batch)
    assert_same(run_predict(copy.deepcopy(detector), batch), expected)
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    other.load_state_dict(detector.state_dict())
    assert_same(run_predict(other, batch), expected)


def test_a_batch_of_unknown_datasets_teaches_no_dataset(
    build, make_batch, run_loss, total
):
    detector = build(moe="damex")
    losses = run_loss(detector, make_batch([None, None]))
    total(losses).backward()
    assert losses["loss_moe_dataset_routing"] == losses["moe_routing_accuracy"] == 0.0
    assert all(p.grad is not None for p in detector.parameters() if p.requires_grad)
