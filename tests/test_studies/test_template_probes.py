"""A loss with several tokens per object: the detector that predicts stays the same."""

import pytest
import torch

import studies.template_probes  # noqa: F401  (registers the detector)


def test_heads_of_the_loss_start_as_the_encoders_and_do_not_predict(
    build, make_batch, run_loss, run_predict
):
    plain = build(moe=None)
    detector = build(moe=None, type="OneToManyDINO", image_balance=0.5)
    head = detector.bbox_head
    assert torch.equal(detector.dense_cls.weight, head.cls_branches[-1].weight)
    missing = plain.load_state_dict(detector.state_dict(), strict=False)
    assert {name.partition(".")[0] for name in missing.unexpected_keys} == {
        "dense_cls",
        "dense_reg",
    }
    batch = make_batch([0, 1], boxes=[1, 4])
    for ours, theirs in zip(
        run_predict(detector, batch), run_predict(plain, batch), strict=True
    ):
        assert torch.equal(ours.pred_instances.scores, theirs.pred_instances.scores)
    losses = run_loss(detector, batch)
    (losses["many_aux_loss_cls"] + losses["many_aux_loss_bbox"]).backward()
    weight = detector.encoder.layers[0].ffn.layers[0][0].weight
    assert weight.grad.abs().sum() > 0


def test_images_are_weighted_by_their_objects(build, make_batch, run_loss):
    """Two alike images weigh as without; with 1 and 4 objects, 5/3 and 5/6."""
    results = []
    for balance in (0.0, 0.5):
        detector = build(moe=None, type="OneToManyDINO", image_balance=balance)
        alike = run_loss(detector, make_batch([0, 1], boxes=[2, 2]))
        other = run_loss(detector, make_batch([0, 1], boxes=[1, 4]))
        results.append([float(one["many_aux_loss_bbox"]) for one in (alike, other)])
    (alike, other), (alike_balanced, other_balanced) = results
    assert alike_balanced == pytest.approx(alike, rel=1e-5)
    assert 5 / 6 * other < other_balanced < 5 / 3 * other
    assert other_balanced != pytest.approx(other, rel=1e-3)
