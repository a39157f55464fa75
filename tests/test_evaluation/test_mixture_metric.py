from __future__ import annotations

import math

import pytest
import torch

from damex.datasets.label_space import LabelSpace
from damex.datasets.mixture import MixtureDataset
from damex.datasets.spec import DatasetSpec
from damex.errors import ConfigError, DataError
from damex.evaluation.mixture_metric import MixtureMetric

# Labels: car 0, person 1, dog 2; street annotates car and person, park person and dog.
SPACE = LabelSpace.from_specs(
    [
        DatasetSpec("street", classes=("car", "person")),
        DatasetSpec("park", classes=("person", "dog")),
    ]
)
STREET, PARK = 0, 1
CAR, PERSON, DOG = 0, 1, 2
BOX = (10, 10, 60, 60)  # x1, y1, x2, y2
AWAY = (100, 100, 150, 150)


def sample(dataset_id, found=(), truth=(), *, counts=None, groups=None):
    """A data sample as mmengine hands it to a metric.

    ``found`` is (box, score, label), ``truth`` is (box, label); all images have the
    same image id. ``counts`` are token counts, ``groups`` the experts of each group.
    """
    result = dict(
        img_id=1,
        dataset_id=dataset_id,
        dataset_name=f"dataset {dataset_id}",
        ori_shape=(200, 300),
        pred_instances=dict(
            bboxes=torch.tensor([f[0] for f in found], dtype=torch.float).view(-1, 4),
            scores=torch.tensor([f[1] for f in found]),
            labels=torch.tensor([f[2] for f in found], dtype=torch.long),
        ),
        ground_truth=[
            dict(
                bbox=[box[0], box[1], box[2] - box[0], box[3] - box[1]],
                label=label,
                area=(box[2] - box[0]) * (box[3] - box[1]),
                iscrowd=0,
            )
            for box, label in truth
        ],
    )
    if counts is not None:
        result["routing_counts"] = counts
    if groups is not None:
        result["group_experts"] = groups
    return result


def evaluate(samples, *, space=SPACE, batch_size=2, backend=None):
    metric = MixtureMetric(backend=backend)
    metric.dataset_meta = space.to_metainfo()
    for start in range(0, len(samples), batch_size):
        metric.process({}, samples[start : start + batch_size])
    scores = metric.evaluate(len(samples))
    assert all(key.startswith("mixture/") for key in scores)
    return {key.removeprefix("mixture/"): value for key, value in scores.items()}


def hit(dataset_id, label, **options):
    return sample(dataset_id, [(BOX, 0.9, label)], [(BOX, label)], **options)


@pytest.mark.parametrize("backend", ["faster_coco_eval", "pycocotools"])
def test_equal_image_ids_of_two_datasets_do_not_meet(backend):
    # street: found. park: the same box in the image of the same id, not found.
    scores = evaluate(
        [hit(STREET, PERSON), sample(PARK, truth=[(BOX, PERSON)])], backend=backend
    )
    assert scores["street/AP"] == pytest.approx(1.0)
    assert scores["park/AP"] == 0.0
    assert scores["mean/AP"] == pytest.approx(0.5)


def test_two_images_of_one_dataset_with_one_id_stay_two():
    # Each detection lies where the other image has its object.
    samples = [
        sample(STREET, [(AWAY, 0.9, CAR)], [(BOX, CAR)]),
        sample(STREET, [(BOX, 0.9, CAR)], [(AWAY, CAR)]),
    ]
    scores = evaluate(samples)
    assert scores["street/AP"] == 0.0
    assert scores["street/images"] == 2


def test_classes_of_other_datasets_are_ignored():
    # A confident dog in street would be a mistake, but street does not annotate dogs;
    # in park it is one.
    dog = (AWAY, 0.95, DOG)
    samples = [
        sample(dataset_id, [dog, (BOX, 0.9, PERSON)], [(BOX, PERSON), *extra])
        for dataset_id, extra in ((STREET, []), (PARK, [((200, 0, 250, 50), DOG)]))
    ]
    scores = evaluate(samples)
    assert scores["street/AP"] == pytest.approx(1.0)
    # person 1, dog 0
    assert scores["park/AP"] == pytest.approx(0.5)


def test_numbers_of_images_and_boxes():
    scores = evaluate(
        [
            sample(PARK, truth=[(BOX, PERSON), (AWAY, DOG)]),
            sample(STREET, truth=[(BOX, CAR)]),
            sample(PARK),
        ]
    )
    assert (scores["street/images"], scores["street/boxes"]) == (1, 1)
    assert (scores["park/images"], scores["park/boxes"]) == (2, 2)


def test_dataset_without_objects_is_nan_and_not_in_the_mean():
    scores = evaluate([hit(STREET, CAR), sample(PARK, [(BOX, 0.9, DOG)])])
    assert math.isnan(scores["park/AP"])
    assert scores["mean/AP"] == pytest.approx(1.0)
    assert scores["mean/AP50"] == pytest.approx(1.0)


def test_without_any_object_there_is_no_mean():
    scores = evaluate([sample(STREET), sample(PARK)])
    assert "mean/AP" not in scores
    assert math.isnan(scores["street/AP"])


def test_dataset_without_samples_is_left_out():
    scores = evaluate([hit(PARK, DOG)])
    assert not [key for key in scores if key.startswith("street/")]
    assert scores["mean/AP"] == pytest.approx(1.0)


def test_own_share_by_hand():
    # Experts 0 and 3 are street's, 1 and 2 are park's.
    groups = [[0, 3], [1, 2]]
    samples = [
        hit(
            STREET, CAR, counts={"l0": [5, 2, 0, 1], "l2": [1, 0, 0, 1]}, groups=groups
        ),
        hit(PARK, DOG, counts={"l0": [1, 1, 5, 1], "l2": [0, 0, 2, 0]}, groups=groups),
        hit(
            STREET, CAR, counts={"l0": [0, 8, 0, 0], "l2": [0, 0, 0, 2]}, groups=groups
        ),
    ]
    scores = evaluate(samples)
    # street: experts 0 and 3 have 8 + 2 of 10 + 10 tokens.
    assert scores["street/own_share"] == pytest.approx(10 / 20)
    # park: experts 1 and 2 have 6 + 2 of 10.
    assert scores["park/own_share"] == pytest.approx(8 / 10)
    assert scores["mean/own_share"] == pytest.approx(0.65)
    # l0: 6, 11, 5, 2 of 24 tokens; l2: 1, 0, 2, 3 of 6.
    assert scores["mean/busiest_share"] == pytest.approx((11 / 24 + 3 / 6) / 2)


def test_own_share_counts_the_experts_of_the_group():
    space = LabelSpace.from_specs(
        [
            DatasetSpec("a", classes=("x",), group="night"),
            DatasetSpec("b", classes=("x",)),
            DatasetSpec("c", classes=("x",), group="night"),
        ]
    )
    # Groups: night (a, c) has expert 0, b has expert 1.
    routed = dict(counts={"l": [3, 1]}, groups=[[0], [1]])
    samples = [hit(i, 0, **routed) for i in range(3)]
    scores = evaluate(samples, space=space)
    assert scores["a/own_share"] == scores["c/own_share"] == pytest.approx(0.75)
    assert scores["b/own_share"] == pytest.approx(0.25)


def test_dense_detector_has_no_own_share():
    assert not [key for key in evaluate([hit(STREET, CAR)]) if "_share" in key]


def test_dataset_that_routed_no_token_has_share_zero():
    scores = evaluate([hit(STREET, CAR, counts={"l": [0, 0]}, groups=[[0], [1]])])
    assert scores["street/own_share"] == 0.0


def test_experts_that_no_dataset_owns_have_no_own_share():
    scores = evaluate([hit(STREET, CAR, counts={"l": [3, 1]})])
    assert scores["mean/busiest_share"] == 0.75
    assert not [key for key in scores if key.endswith("own_share")]


def test_scores_do_not_depend_on_the_batches():
    samples = [
        sample(i % 2, [(BOX, 0.1 * i, PERSON)], [(BOX if i % 3 else AWAY, PERSON)])
        for i in range(1, 8)
    ]
    assert evaluate(samples, batch_size=1) == pytest.approx(
        evaluate(samples, batch_size=7), nan_ok=True
    )


def test_sample_of_another_dataset_class_is_refused():
    stranger = sample(STREET)
    del stranger["dataset_id"]
    with pytest.raises(ConfigError, match="without dataset_id; use it with a dataset"):
        MixtureMetric().process({}, [stranger])


def test_predicting_the_annotations_of_real_files_scores_one(two_datasets, edit_json):
    # From the files through MixtureDataset into the metric; ids collide on purpose.
    edit_json(
        two_datasets[1]["data_root"] + "val.json",
        lambda d: d["annotations"][0].update(iscrowd=1),
    )
    dataset = MixtureDataset(
        datasets=two_datasets,
        split="val",
        pipeline=[
            dict(type="LoadImageFromFile"),
            dict(type="LoadAnnotations", with_bbox=True),
            dict(type="PackDetInputs"),
        ],
    )
    samples = []
    for index in range(len(dataset)):
        data = dataset[index]["data_samples"]
        truth = data.gt_instances
        found = dict(
            bboxes=truth.bboxes.tensor,
            labels=truth.labels,
            scores=torch.linspace(0.5, 0.9, len(truth.labels)),
        )
        samples.append({**data.to_dict(), "pred_instances": found})
    space = LabelSpace.from_metainfo(dataset.metainfo)
    scores = evaluate(samples, space=space)
    assert scores["street/AP"] == pytest.approx(1.0)
    assert scores["park/AP"] == pytest.approx(1.0)
    assert (scores["street/boxes"], scores["park/boxes"]) == (10, 6)


def test_scores_that_are_no_numbers_name_the_dataset_and_the_likely_cause():
    with pytest.raises(
        DataError, match=r"dataset 'dataset 1'; did the training diverge\?"
    ):
        evaluate([sample(PARK, [(BOX, math.nan, DOG)], [(BOX, DOG)])])
