"""Losses of every detector: classes that are ignored, and weights of images."""

import json
from types import SimpleNamespace

import pytest
import torch
from mmdet.models.losses import CrossEntropyLoss, FocalLoss
from mmdet.structures import DetDataSample
from mmengine.dataset import pseudo_collate
from mmengine.structures import InstanceData
from torch import nn

from damex.datasets.mixture import MixtureDataset
from damex.errors import ConfigError
from damex.models.detection_losses import ignored_boxes_of, ignoring, image_weights

# 40 pixels wide and 20 high.
SHAPE = (20, 40)


class Head(nn.Module):
    """The part of a head that a loss passes: targets, then classification."""

    num_classes = 3

    def __init__(self, loss):
        super().__init__()
        self.loss_cls = loss

    def get_targets(self, scores, boxes, truth, metas):
        return None


def sample_of(boxes=(), labels=()):
    sample = DetDataSample(metainfo=dict(img_shape=SHAPE))
    sample.gt_instances = InstanceData(
        bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long)
    )
    sample.ignored_instances = InstanceData(
        bboxes=torch.tensor(boxes, dtype=torch.float).view(-1, 4),
        labels=torch.tensor(labels, dtype=torch.long),
    )
    return sample


def taught(loss, samples, boxes, labels, scores, **options):
    """Which scores (rows, classes) get a gradient in a loss of all images."""
    head = Head(loss)
    scores = torch.tensor(scores, dtype=torch.float, requires_grad=True)
    with ignoring(SimpleNamespace(bbox_head=head), samples, **options):
        head.get_targets(None, [torch.tensor(one) for one in boxes], None, None)
        head.loss_cls(scores, torch.tensor(labels)).backward()
    assert "get_targets" not in vars(head)
    return (scores.grad != 0).int().tolist()


def test_an_ignored_box_forgives_its_class_where_half_of_a_query_lies_in_it():
    """Pixels 0 to 20 of 40 are ignored for class 1: half of the image's width."""
    samples = [sample_of([[0, 0, 20, 20]], [1]), sample_of()]
    # Centre and size; of the widths, 0.26 / 0.5 and 0.24 / 0.5 lie left of 0.5.
    boxes = [
        [[0.49, 0.5, 0.5, 0.5], [0.51, 0.5, 0.5, 0.5], [0.2, 0.5, 0.1, 0.1]],
        [[0.2, 0.5, 0.1, 0.1]],
    ]
    found = taught(
        FocalLoss(), samples, boxes, labels=[3, 3, 0, 3], scores=[[0.0] * 3] * 4
    )
    # The third is matched with class 0, and shows nothing else.
    assert found == [[1, 0, 1], [1, 1, 1], [1, 1, 1], [1, 1, 1]]


def test_a_class_without_annotations_is_ignored_only_where_it_is_found():
    """Classes 1 and 2 are not annotated in the first image, 0 not in the second."""
    unannotated = torch.tensor([[False, True, True], [True, False, False]])
    box = [0.5, 0.5, 0.2, 0.2]
    found = taught(
        FocalLoss(),
        [sample_of(), sample_of()],
        [[box, box], [box]],
        labels=[3, 1, 3],
        # Sigmoid(2) is 0.88, of -2 0.12.
        scores=[[2.0, 2.0, -2.0], [2.0, 2.0, 2.0], [2.0, 2.0, 2.0]],
        unannotated_BC=unannotated,
        above=0.15,
    )
    assert found == [[1, 0, 1], [1, 1, 1], [0, 1, 1]]


def test_a_softmax_ignores_the_query():
    """Else the background would take the probability of the class that is left out.

    exp(2) of 1 + 1 + 1 + exp(2) is a probability of 0.71, of class 1 and of class 2.
    """
    box = [0.5, 0.5, 0.2, 0.2]
    found = taught(
        CrossEntropyLoss(),
        [sample_of()],
        [[box, box, box]],
        labels=[3, 3, 1],
        scores=[[0.0, 2.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]],
        unannotated_BC=torch.tensor([[False, True, True]]),
        above=0.5,
    )
    assert found == [[0] * 4, [1] * 4, [1] * 4]


@pytest.fixture
def lessons(build_mmdet, make_batch, run_loss, total):
    """``lessons(name)``: gradients of the scores of every loss, unmatched and matched.

    Class 0 is ignored all over the first image, class 1 all over the second: by
    ``boxes``, or as the options of the detector say.
    """

    def gather(name, *, boxes=True, **options):
        detector = build_mmdet(name, **options)
        head = detector.bbox_head
        calls = []

        def keep(module, inputs):
            scores, target = inputs[:2]
            scores.retain_grad()
            labels = target[0] if isinstance(target, tuple) else target
            calls.append((scores, labels))

        dense = getattr(head, "aux_loss_for_dense", None)
        for module in filter(None, (head, dense)):
            module.loss_cls.register_forward_pre_hook(keep)
        batch = make_batch([0, 1], sizes=[(64, 96), (64, 64)], boxes=[2, 3])
        for label, sample in enumerate(batch["data_samples"]):
            sample.gt_instances.labels[:] = 3
            if not boxes:
                continue
            height, width = sample.img_shape
            sample.ignored_instances = InstanceData(
                bboxes=torch.tensor([[-width, -height, 2 * width, 2 * height]]).float(),
                labels=torch.tensor([label]),
            )
        total(run_loss(detector, batch)).backward()
        found = [(scores.grad, labels >= head.num_classes) for scores, labels in calls]
        return [(grad[unmatched], grad[~unmatched]) for grad, unmatched in found]

    return gather


# Classes without annotations that are found: at first all have a probability of 0.01.
BY_SCORE = dict(
    boxes=False,
    ignore_unannotated_classes=0.001,
    label_coverage=dict(
        labels=[[*range(1, 80)], [0, *range(2, 80)]],
        groups=[0, 1],
    ),
)


@pytest.mark.parametrize("options", [{}, BY_SCORE], ids=["boxes", "score"])
def test_every_loss_of_every_detector_ignores_the_classes_of_its_image(
    detector_name, lessons, options
):
    found = lessons(detector_name, **options)
    assert len(found) >= 2
    if detector_name == "MoEDETR":  # a softmax: the query learns nothing
        assert not any(unmatched.any() for unmatched, _ in found)
        assert all((matched != 0).all() for _, matched in found)
        return
    seen = set()
    for unmatched, matched in found:
        first, second = ((unmatched[:, label] == 0).tolist() for label in (0, 1))
        of_rows = [*zip(first, second, strict=True)]
        seen |= {*of_rows}
        assert of_rows == sorted(of_rows, reverse=True)  # the images in their order
        assert (unmatched[:, 2:] != 0).all()
        assert (matched != 0).all()
    assert seen == {(True, False), (False, True)}


def test_the_first_stage_of_deformable_detr_ignores_objects_of_any_class(lessons):
    """It calls every object class 0, whatever it is."""
    *layers, (objects, _) = lessons(
        "MoEDeformableDETR", as_two_stage=True, with_box_refine=True
    )
    assert len(layers) == 2
    assert (objects[:, 0] == 0).all()
    assert (objects[:, 1:] != 0).all()
    for unmatched, _ in layers:
        assert (unmatched[:, 0] != 0).any()


def test_a_crowd_of_a_coco_file_reaches_the_loss(make_coco_dataset, tmp_path):
    """As an ignored box, with the label of the mixture."""
    entries = [
        make_coco_dataset(tmp_path / name, classes=classes, num_images=1)
        for name, classes in (("street", ["car", "bus"]), ("park", ["dog", "bus"]))
    ]
    file = tmp_path / "park" / "train.json"
    document = json.loads(file.read_text())
    document["annotations"][1]["iscrowd"] = 1  # of class bus
    file.write_text(json.dumps(document))
    pipeline = [
        dict(type="LoadImageFromFile"),
        dict(type="LoadAnnotations", with_bbox=True),
        dict(type="Resize", scale=(96, 64)),  # twice as large
        dict(type="PackDetInputs"),
    ]
    dataset = MixtureDataset(datasets=entries, pipeline=pipeline)
    (sample,) = pseudo_collate([dataset[1]])["data_samples"]
    assert sample.gt_instances.labels.tolist() == [2]
    assert sample.ignored_instances.labels.tolist() == [1]
    x, y, w, h = document["annotations"][1]["bbox"]
    ((boxes, labels),) = ignored_boxes_of([sample])
    expected = torch.tensor([[x / 48, y / 32, (x + w) / 48, (y + h) / 32]])
    torch.testing.assert_close(boxes, expected)
    assert labels.tolist() == [1]


BOXES = [4, 1]


@pytest.mark.parametrize(
    ("power", "expected"),
    # Five objects. With 1/2 the weighted sum is 4 / 2 + 1 / 1 = 3 before scaling.
    [(0.0, [1, 1]), (0.5, [5 / 6, 5 / 3]), (1.0, [5 / 8, 5 / 2])],
)
def test_weights_by_hand(power, expected):
    weights = image_weights(torch.tensor([4, 1]), power)
    torch.testing.assert_close(weights, torch.tensor(expected, dtype=torch.float))
    # An image without objects takes nothing from them.
    more = image_weights(torch.tensor([4, 1, 0]), power)
    torch.testing.assert_close(more, torch.cat([weights, weights[1:]]))
    assert image_weights(torch.tensor([0, 0]), power).tolist() == [1, 1]


def test_images_are_balanced_where_losses_are_divided_by_all_objects(build_mmdet):
    """DAB-DETR of mmdet divides by those of a process, DETR by other numbers."""
    for balance in (0.0, 0.5):
        head = build_mmdet("MoEDABDETR", image_balance=balance).bbox_head
        assert head.sync_cls_avg_factor == bool(balance)
    with pytest.raises(ConfigError, match="image_balance needs a loss_cls with"):
        build_mmdet("MoEDETR", image_balance=0.5)


def matched(losses):
    """All losses but those of denoising queries, which are random."""
    return {k: v for k, v in losses.items() if "loss" in k and "dn" not in k}


@pytest.mark.parametrize("name", ["MoEDINO", "MoEDeformableDETR", "MoEDDQDETR"])
@pytest.mark.parametrize("power", [0.0, 0.5])
def test_the_loss_is_the_weighted_mean_of_those_of_single_images(
    build_mmdet, make_batch, run_loss, name, power
):
    """Weights of n objects: n, or n ** 0.5, or 1, divided by their sum."""
    staged = dict(as_two_stage=True) if name == "MoEDeformableDETR" else {}
    detector = build_mmdet(name, image_balance=power, **staged)
    for module in detector.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    batch = make_batch([0, 1], sizes=[(64, 96), (64, 96)], boxes=BOXES)
    alone = [
        run_loss(detector, pseudo_collate([dict(inputs=image, data_samples=sample)]))
        for image, sample in zip(*batch.values(), strict=True)
    ]
    together = matched(run_loss(detector, batch))
    shares = torch.tensor(BOXES).float() ** (1 - power)
    shares /= shares.sum()
    assert together
    for key, loss in together.items():
        if name == "MoEDDQDETR" and "aux" in key:
            continue  # its dense queries have another head
        each = torch.stack([losses[key].sum() for losses in alone])
        torch.testing.assert_close(loss.sum(), (each * shares).sum())


def test_denoising_queries_have_the_weight_of_their_image(build, make_batch, run_loss):
    seen = []
    detector = build(image_balance=1.0)
    detector.bbox_head.loss_bbox.register_forward_pre_hook(
        lambda _, inputs: seen.append({*inputs[2].flatten().tolist()})
    )
    run_loss(detector, make_batch([0, 1], boxes=BOXES))
    layers = detector.bbox_head.num_pred_layer - 1
    assert seen == [{0.0, 0.625, 2.5}] * (2 * layers + 1)  # and the encoder's tokens
    assert "get_dn_targets" not in vars(detector.bbox_head)
