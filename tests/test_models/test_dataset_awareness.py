"""Detectors that know, or guess, which dataset an image is from."""

import copy
import logging
import math
from unittest.mock import Mock

import pytest
import torch

from damex.errors import ConfigError
from damex.models import dataset_awareness
from damex.models.dataset_classifier import condition_on_dataset
from tests.test_models.test_detectors import assert_same

# Three datasets and four classes: 1 is annotated by two datasets, the others by one.
LABELS = [[0, 1], [1, 2], [3]]
COVERAGE = dict(labels=LABELS, groups=[0, 1, 2])
ENCODER = dict(
    layers=dict(encoder=[0, 1], decoder=[0]),
    losses=[dict(type="DatasetRoutingLoss", weight=0.1)],
)
EVERYTHING = dict(
    ignore_unannotated_classes=True,
    label_prior=dict(source="head"),
)


@pytest.fixture(params=[None, "damex", ENCODER], ids=["dense", "damex", "encoder"])
def moe(request):
    return request.param


@pytest.fixture
def build_aware(build):
    """A detector for the three datasets above."""

    def make(**options):
        return build(label_coverage=COVERAGE, **options)

    return make


@pytest.fixture
def annotated_batch(make_batch):
    """A batch whose boxes have labels that their datasets annotate."""

    def make(groups, **kwargs):
        batch = make_batch(groups, **kwargs)
        for group, sample in zip(groups, batch["data_samples"], strict=True):
            own = torch.tensor(LABELS[group or 0])
            labels = sample.gt_instances.labels
            sample.gt_instances.labels = own[labels % len(own)]
        return batch

    return make


def set_posterior(detector, posterior_G):
    """Make the head answer the same for all images."""
    with torch.no_grad():
        detector.awareness.head.bias.copy_(torch.tensor(posterior_G).log())


def shift_classes(detector, classes, value):
    """Raise the raw scores of classes in all layers and in the choice of queries."""
    with torch.no_grad():
        for branch in detector.bbox_head.cls_branches:
            branch.bias[classes] += value


# --- off, and the start ---------------------------------------------------------------


OFF = dict(
    ignore_unannotated_classes=False,
    label_prior=None,
    dataset_head=None,
)
HEAD = ["head.bias", "head.weight"]


@pytest.mark.parametrize(
    ("options", "added"),
    [
        (OFF, []),
        (dict(ignore_unannotated_classes=True), []),
        (dict(moe=ENCODER, label_prior=dict(source="router")), []),
        (dict(dataset_head=dict()), HEAD),
        (dict(label_prior=dict()), HEAD),
    ],
)
def test_options_add_their_tensors_and_leave_the_others(
    build_aware, build, moe, options, added
):
    """Also in their values: nothing draws random numbers."""
    options = {"moe": moe, **options}
    plain = build(moe=options["moe"]).state_dict()
    detector = build_aware(**options)
    aware = detector.state_dict()
    assert (detector.awareness is None) == (options.keys() == {"moe", *OFF})
    assert sorted(aware.keys() - plain.keys()) == [f"awareness.{key}" for key in added]
    assert all(torch.equal(aware[key], plain[key]) for key in plain)


def test_the_head_leaves_the_detector_as_it_is(
    build_aware, build, moe, annotated_batch, run_loss, run_predict
):
    plain = build(moe=moe)
    aware = build_aware(moe=moe, dataset_head=dict())
    batch = annotated_batch([0, 2], sizes=[(64, 64), (64, 40)], boxes=[1, 3])
    expected, losses = run_loss(plain, batch), run_loss(aware, batch)
    assert losses.pop("loss_dataset").item() == pytest.approx(0.1 * math.log(3))
    assert losses.pop("dataset_accuracy") in (0.0, 0.5, 1.0)
    assert losses.keys() == expected.keys()
    assert all(torch.equal(losses[key], expected[key]) for key in expected)
    assert_same(run_predict(aware, batch), run_predict(plain, batch))


# --- training: classes that are ignored -----------------------------------------------


def test_scores_of_foreign_classes_change_nothing_in_training(
    build_aware, annotated_batch, run_loss, moe
):
    """Not the matching, not which queries are chosen, not a loss."""
    detector = build_aware(moe=moe, ignore_unannotated_classes=True)
    batch = annotated_batch([0, 1], boxes=[1, 3])
    before = run_loss(detector, batch)
    shift_classes(detector, [3], 50.0)
    after = run_loss(detector, batch)
    assert all(torch.equal(before[key], after[key]) for key in before)
    # Class 2 is foreign to the first image alone.
    shift_classes(detector, [2], 50.0)
    assert run_loss(detector, batch)["loss_cls"] > 2 * before["loss_cls"]


@pytest.mark.parametrize(
    ("groups", "options"),
    [
        ([None, None], dict(ignore_unannotated_classes=True)),
        ([0, 2], dict(label_prior=dict())),
    ],
    ids=["unknown datasets", "prior"],
)
def test_what_does_not_apply_in_training(
    build_aware, build, make_batch, run_loss, groups, options
):
    aware = build_aware(moe=None, **options)
    if aware.awareness.head is not None:
        set_posterior(aware, [0.9, 0.1, 0.0])
    batch = make_batch(groups)
    losses, expected = run_loss(aware, batch), run_loss(build(moe=None), batch)
    assert all(torch.equal(losses[key], expected[key]) for key in expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_keeps_foreign_gradients_at_zero(
    build_aware, annotated_batch, run_loss, total, dtype
):
    detector = build_aware(moe="damex", **EVERYTHING)
    with torch.autocast("cpu", dtype=dtype):
        loss = total(run_loss(detector, annotated_batch([0, 0])))
    loss.backward()
    assert torch.isfinite(loss)
    for branch in detector.bbox_head.cls_branches:
        assert (branch.weight.grad[2:] == 0).all()
        assert (branch.weight.grad[:2] != 0).any()


# --- inference: the prior -------------------------------------------------------------


def test_answers_are_raw_scores_plus_the_log_prior(build_aware, annotated_batch):
    detector = build_aware(moe=None, label_prior=dict(floor=0.01)).eval()
    set_posterior(detector, [0.7, 0.2, 0.1])
    data = detector.data_preprocessor(annotated_batch([0, 1]), False)
    raw = []
    with (
        torch.no_grad(),
        detector.bbox_head.cls_branches[2].register_forward_hook(
            lambda *call: raw.append(call[2])
        ),
    ):
        scores_LBQC, _ = detector(**data, mode="tensor")
    expected = raw[0] + torch.tensor([0.7, 0.9, 0.2, 0.1]).log()
    torch.testing.assert_close(scores_LBQC[-1], expected)


def test_a_sure_posterior_leaves_the_classes_of_its_dataset_alone(
    build_aware, build, annotated_batch, run_predict
):
    """As in a detector that never heard of the others, choice of queries included."""
    batch = annotated_batch([0, 2], sizes=[(64, 64), (64, 40)])
    sure = build_aware(moe=None, label_prior=dict(floor=0.0))
    narrow = build(moe=None)
    for detector in (sure, narrow):
        shift_classes(detector, [0, 3], 2.0)  # foreign classes would win otherwise
    set_posterior(sure, [0.0, 1.0, 0.0])
    shift_classes(narrow, [0, 3], -1e9)
    for ours, theirs in zip(
        run_predict(sure, batch), run_predict(narrow, batch), strict=True
    ):
        ours, theirs = ours.pred_instances, theirs.pred_instances
        own = (ours.labels == 1) | (ours.labels == 2)
        assert own.sum() == 2 * 50
        assert (ours.scores[~own] == 0).all()
        own_theirs = (theirs.labels == 1) | (theirs.labels == 2)
        assert_same([ours[own]], [theirs[own_theirs]])


def test_a_given_dataset_needs_no_prior_of_a_predicted_one(
    build_aware, build, annotated_batch, run_predict
):
    """Else classes of a dataset that is named would count for nothing."""
    batch = annotated_batch([0, 2])
    aware, plain = build_aware(moe=None, label_prior=dict(floor=0.0)), build(moe=None)
    set_posterior(aware, [0.0, 0.0, 1.0])  # without the classes 1 and 2
    found = {}
    for detector in (aware, plain):
        with condition_on_dataset(detector, [1, 2]):
            found[detector] = [
                one.pred_instances for one in run_predict(detector, batch)
            ]
    assert_same(found[aware], found[plain])
    assert all((one.scores > 0).all() for one in found[aware])
    last, *_ = (one.pred_instances for one in run_predict(aware, batch))
    assert (last.scores[(last.labels == 1) | (last.labels == 2)] == 0).all()


def test_detections_of_the_images_own_dataset_have_the_prior_too(
    build_aware, annotated_batch, run_predict
):
    """What per-dataset AP is computed from."""
    detector = build_aware(moe=None, label_prior=dict())
    set_posterior(detector, [0.25, 0.75, 0.0])
    batch = annotated_batch([0])
    batch["data_samples"][0].set_metainfo(dict(annotated_labels=[0]))
    (sample,) = run_predict(detector, batch)
    of_class_0 = sample.pred_instances[sample.pred_instances.labels == 0].scores
    own = sample.dataset_instances.scores
    best = min(len(of_class_0), 10)
    assert torch.equal(own[:best], of_class_0[:best])


def test_the_prior_follows_the_router_of_the_last_encoder_layer(
    build_aware, annotated_batch, run_predict, records, monkeypatch
):
    posteriors = []
    prior = dataset_awareness.class_log_prior

    def spy(posterior_BG, *args, **kwargs):
        posteriors.append(posterior_BG)
        return prior(posterior_BG, *args, **kwargs)

    monkeypatch.setattr(dataset_awareness, "class_log_prior", spy)
    detector = build_aware(moe=ENCODER, label_prior=dict(source="router"))
    batch = annotated_batch([0, 1], sizes=[(64, 64), (64, 40)])
    run_predict(detector, batch)
    record = records["encoder.1"]
    probs_BNE = record.packing.unpack(record.probs_VE)
    # 40 of 64 columns at strides 8, 16 and 32: 5, 3 and 2 of 8, 4 and 2 cells.
    cells = 5 * 8 + 3 * 4 + 2 * 2
    expected_BG = probs_BNE.sum(1) / torch.tensor([[84.0], [cells]])
    torch.testing.assert_close(posteriors[0], expected_BG)
    torch.testing.assert_close(posteriors[0].sum(1), torch.ones(2))


def test_a_router_that_is_not_used_yet_is_not_asked(
    build_aware, annotated_batch, run_predict
):
    batch = annotated_batch([0, 1])
    moe = {**ENCODER, "upcycling": dict(iters=2)}
    aware, plain = (
        build_aware(moe=moe, label_prior=dict(source="router")),
        build_aware(moe=moe),
    )
    dense = run_predict(aware, batch)
    assert_same(dense, run_predict(plain, batch))
    aware.begin_step(iteration=2, max_iters=4)
    sparse = run_predict(aware, batch)
    change = dense[0].pred_instances.scores - sparse[0].pred_instances.scores
    assert change.abs().max() > 1e-3


def test_prediction_reads_no_dataset(build_aware, annotated_batch, run_predict):
    detector = build_aware(**EVERYTHING)
    batch = annotated_batch([0, 2])
    known = run_predict(detector, batch)
    for sample in batch["data_samples"]:
        sample.set_metainfo(dict(dataset_id=-1, group_id=-1))
    unknown = run_predict(detector, batch)
    assert_same(known, unknown)


# --- the head -------------------------------------------------------------------------


def test_detection_losses_do_not_bend_the_posterior(
    build_aware, annotated_batch, run_loss, total
):
    detector = build_aware(
        moe=None, label_prior=dict(), dataset_head=dict(loss_weight=2)
    )
    losses = run_loss(detector, annotated_batch([0, 2]))
    head = detector.awareness.head
    assert losses["loss_dataset"].item() == pytest.approx(2 * math.log(3))
    dataset = losses.pop("loss_dataset")
    total(losses).backward(retain_graph=True)
    assert head.weight.grad is None
    dataset.backward()
    assert (head.weight.grad != 0).any()


def test_every_parameter_gets_a_gradient(
    build_aware, annotated_batch, run_loss, total, moe
):
    detector = build_aware(moe=moe, **EVERYTHING)
    total(run_loss(detector, annotated_batch([0, 1]))).backward()
    assert [n for n, p in detector.named_parameters() if p.grad is None] == []


def test_nothing_is_left_over_after_a_step(
    build_aware, annotated_batch, run_loss, run_predict
):
    detector = build_aware(**EVERYTHING)
    batch = annotated_batch([0, 1])
    run_loss(detector, batch)
    expected = run_predict(detector, batch)
    logits = torch.zeros(2, 3, 4)
    assert detector.awareness.adjust(logits) is logits
    assert not detector.bbox_head._forward_hooks
    assert_same(run_predict(copy.deepcopy(detector), batch), expected)


# --- what is refused ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(label_prior=dict(source="oracle")),
            r"label_prior\.source must be one of",
        ),
        (dict(label_prior=dict(floor=1.0)), r"label_prior\.floor must be a number in"),
        (dict(dataset_head=dict(loss_weight=-1.0)), r"loss_weight must be a number of"),
    ],
)
def test_wrong_values(build_aware, options, message):
    with pytest.raises(ConfigError, match=message):
        build_aware(**options)


@pytest.mark.parametrize(
    "moe",
    ["damex", dict(layers=dict(encoder=[0])), None],
    ids=["decoder", "untaught", "dense"],
)
def test_a_router_that_cannot_know_is_refused(build_aware, moe):
    with pytest.raises(ConfigError, match="no router of the encoder is trained"):
        build_aware(moe=moe, label_prior=dict(source="router"))


def test_all_but_dino_on_a_mixture_refuse(build_mmdet, detector_name):
    detector = build_mmdet(detector_name)
    options = dict(ignore_unannotated_classes=True)
    build_awareness = dataset_awareness.build_awareness
    with pytest.raises(ConfigError, match=f"{detector_name} without a mixture"):
        build_awareness(detector, options, None)
    if detector_name == "MoEDINO":
        built = build_awareness(detector, options, COVERAGE)
        assert built.config.ignore_unannotated_classes
    else:
        with pytest.raises(ConfigError, match=f"here {detector_name} with a mixture"):
            build_awareness(detector, options, COVERAGE)


@pytest.mark.parametrize("prior", [None, dict()])
def test_ignored_classes_without_a_prior_are_warned_about(
    build_aware, prior, monkeypatch
):
    warn = Mock()
    monkeypatch.setattr(dataset_awareness, "print_log", warn)
    build_aware(ignore_unannotated_classes=True, label_prior=prior)
    assert warn.called == (prior is None)
    if prior is None:
        assert "set model.label_prior=dict(source='head')" in warn.call_args.args[0]
        assert warn.call_args.kwargs["level"] == logging.WARNING
