"""MixtureMetric: AP by hand, per dataset and pooled, and what it refuses."""

import copy
import itertools
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from mmdet.evaluation import DumpDetResults
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from damex import evaluation
from damex.datasets.label_space import LabelSpace
from damex.datasets.mixture import MixtureDataset
from damex.datasets.spec import DatasetSpec
from damex.engine.summary import class_scores
from damex.errors import ConfigError, DataError
from damex.evaluation import COCO_BACKENDS, ImageResult, MixtureMetric, coco_scores

COUNTS = ("images", "boxes")
NAMES = ("AP", "AP50", "AP75", "AP_small", "AP_medium", "AP_large")


@pytest.fixture(params=COCO_BACKENDS)
def backend(request):
    return request.param


def truth(box, label=0, *, area=None, crowd=0):
    """Ground truth of a box x, y, width, height."""
    area = box[2] * box[3] if area is None else area
    return dict(bbox=box, label=label, area=area, iscrowd=crowd)


def image(found, ground_truth):
    """A 640 x 480 image; ``found`` is (x1, y1, x2, y2, score, label) per detection."""
    rows = np.asarray(found, dtype=np.float32).reshape(-1, 6)
    return ImageResult(
        boxes=rows[:, :4],
        scores=rows[:, 4],
        labels=rows[:, 5].astype(int),
        ground_truth=ground_truth,
    )


OBJECT, HIT = truth([0, 0, 100, 100]), (0, 0, 100, 100)
NONE, FAR = math.nan, [200, 0, 200, 200]
IN_CROWD = [(210, 10, 230, 30, 0.9, 0), (*HIT, 0.8, 0)]
MISS = [(*HIT, 0.9, 0), (400, 300, 500, 400, 0.8, 0), (200, 0, 400, 200, 0.7, 0)]
HALF = dict.fromkeys(("AP", "AP50", "AP75", "AP_large"), (51 + 50 * 2 / 3) / 101)
# Detections and objects of an image, number of classes, and expected scores. COCO reads
# precision at 101 recalls.
BY_HAND = {
    # Two objects; detections by score: hit, miss, hit. Precision 1 at recall 1/2 and
    # 2/3 at recall 1: 51 recalls (0.00 to 0.50) at 1, 50 at 2/3. No object is smaller
    # than 96 x 96.
    "hit, miss, hit": (MISS, [OBJECT, truth(FAR)], 1, HALF),
    # Shifted by 20 of 100 px: IoU = 80 / 120 = 0.667, a hit at the thresholds 0.50,
    # 0.55, 0.60 and 0.65: 4 of 10.
    "overlap": ([(20, 0, 120, 100, 1, 0)], [OBJECT], 1, dict(AP=0.4, AP50=1.0, AP75=0)),
    # Class 2 is found (1.0), class 5 is not (0.0); the others have no object.
    "mean": (
        [(*HIT, 0.9, 2)],
        [truth(FAR, 5), truth(OBJECT["bbox"], 2)],
        7,
        dict(AP=0.5),
    ),
    "wrong label": ([(*HIT, 0.9, 1)], [OBJECT], 2, dict(AP=0.0)),
    # A 100 x 100 box around an outline of 500 px is a small object (< 32 x 32 = 1024).
    "outline": (
        [(*HIT, 1, 0)],
        [{**OBJECT, "area": 500}],
        1,
        dict(AP_small=1, AP_large=NONE),
    ),
    "nothing detected": (
        [],
        [OBJECT],
        1,
        dict(AP=0, AP_large=0, AP_small=NONE),
    ),
    # The best detection lies inside of the crowd; it is ignored, and the crowd need not
    # be found. As an ordinary object it would cost: one hit of two, after a miss.
    "crowd": (IN_CROWD, [OBJECT, truth(FAR, crowd=1)], 1, dict(AP=1.0)),
    "no crowd": (IN_CROWD, [OBJECT, truth(FAR)], 1, dict(AP=51 * 0.5 / 101)),
    **{
        f"nothing to find, {len(found)} detections, {name}": (
            *(found, objects, 1),
            dict.fromkeys(NAMES, NONE),
        )
        for found in ([], [(*HIT, 0.9, 0)])
        for name, objects in {
            "no objects": [],
            "another class": [{**OBJECT, "label": 1}],
            "a crowd": [{**OBJECT, "iscrowd": 1}],
        }.items()
    },
}


@pytest.mark.parametrize("case", BY_HAND)
def test_average_precision_by_hand(backend, case):
    found, objects, num_classes, expected = BY_HAND[case]
    classes = {label: f"class {label}" for label in range(num_classes)}
    scores = coco_scores([image(found, objects)], classes=classes, backend=backend)
    assert tuple(scores) == NAMES
    for name, value in expected.items():
        assert scores[name] == pytest.approx(value, nan_ok=True), name


def test_false_detections_in_an_empty_image_count(backend):
    hit, empty = image([(*HIT, 0.5, 0)], [OBJECT]), image([(*HIT, 0.9, 0)], [])
    scores = coco_scores([hit, empty], classes={0: "a"}, backend=backend)
    # The mistake comes first: precision 1/2 at every recall.
    assert scores["AP"] == pytest.approx(0.5)


def test_detections_and_objects_of_other_classes_do_not_count(backend):
    objects = [truth([0, 0, 50, 50], 1)]
    found = [(0, 0, 50, 50, 0.5, 1)]
    plain = coco_scores([image(found, objects)], classes={1: "a"}, backend=backend)
    more = coco_scores(
        [
            image(
                [*found, (0, 0, 50, 50, 0.9, 0), (300, 0, 350, 50, 0.8, 2)],
                [*objects, truth([300, 300, 50, 50], 2)],
            )
        ],
        classes={1: "a"},
        backend=backend,
    )
    assert plain["AP"] == pytest.approx(1.0)
    np.testing.assert_equal(more, plain)


def test_other_classes_do_not_use_up_the_100_detections(backend):
    # COCO keeps the 100 best detections of an image and class.
    noise = [(300, 0, 350, 50, 0.9, 0)] * 150
    scores = coco_scores(
        [image([*noise, (0, 0, 50, 50, 0.1, 1)], [truth([0, 0, 50, 50], 1)])],
        classes={1: "a"},
        backend=backend,
    )
    assert scores["AP"] == pytest.approx(1.0)


def test_unknown_backend():
    with pytest.raises(ValueError, match=r"backend must be one of .* got 'coco'"):
        coco_scores([], classes={}, backend="coco")


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


def instances(found):
    """Detections of (box, score, label) as mmengine hands them to a metric."""
    return dict(
        bboxes=torch.tensor([f[0] for f in found], dtype=torch.float).view(-1, 4),
        scores=torch.tensor([f[1] for f in found]),
        labels=torch.tensor([f[2] for f in found], dtype=torch.long),
    )


def sample(dataset_id, found=(), truth=(), *, chosen=None, counts=None, groups=None):
    """A data sample as mmengine hands it to a metric.

    ``found`` is (box, score, label), ``chosen`` the same among the dataset's classes;
    ``truth`` is (box, label); all images have the same image id. ``counts`` are token
    counts, ``groups`` the experts of each group.
    """
    result = dict(
        img_id=1,
        dataset_id=dataset_id,
        dataset_name=f"dataset {dataset_id}",
        ori_shape=(200, 300),
        pred_instances=instances(found),
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
    if chosen is not None:
        result["dataset_instances"] = instances(chosen)
    if counts is not None:
        result["routing_counts"] = counts
    if groups is not None:
        result["group_experts"] = groups
    return result


def evaluate(samples, *, space=SPACE, batch_size=2, **options):
    metric = MixtureMetric(**options)
    metric.dataset_meta = space.to_metainfo()
    for start in range(0, len(samples), batch_size):
        metric.process({}, samples[start : start + batch_size])
    scores = metric.evaluate(len(samples))
    assert all(key.startswith("mixture/") for key in scores)
    return {key.removeprefix("mixture/"): value for key, value in scores.items()}


def hit(dataset_id, label, **options):
    return sample(dataset_id, [(BOX, 0.9, label)], [(BOX, label)], **options)


def test_equal_image_ids_of_two_datasets_do_not_meet(backend):
    # street: found. park: the same box in the image of the same id, not found.
    scores = evaluate(
        [hit(STREET, PERSON), sample(PARK, truth=[(BOX, PERSON)])], backend=backend
    )
    assert scores["street/AP"] == pytest.approx(1.0)
    assert scores["park/AP"] == 0.0
    assert scores["mean/AP"] == pytest.approx(0.5)


def test_where_the_dataset_is_not_known_other_classes_take_places():
    """The person of park is found among park's classes alone."""
    samples = [
        sample(PARK, [(BOX, 0.9, CAR)], [(BOX, PERSON)], chosen=[(BOX, 0.4, PERSON)])
    ]
    known, unknown = (evaluate(samples, dataset_known=value) for value in (True, False))
    assert (known["park/AP"], unknown["park/AP"]) == (pytest.approx(1.0), 0.0)
    assert known["pooled/AP"] == 0.0


def test_classwise_adds_the_ap_of_each_annotated_class_and_where_images_went(backend):
    # person 1, dog 0 in park; two of three images of park went to the experts of street
    # (group 0 has expert 0, group 1 expert 1).
    truth = [(BOX, PERSON), ((200, 0, 250, 50), DOG)]
    samples = [
        sample(
            PARK,
            [(AWAY, 0.95, DOG), (BOX, 0.9, PERSON)],
            truth,
            counts={"encoder.0": counts},
            groups=[[0], [1]],
        )
        for counts in ([5, 1], [4, 2], [0, 6])
    ]
    scores = evaluate(samples, backend=backend, classwise=True)
    assert scores[f"park/AP_class_{PERSON}"] == pytest.approx(1.0)
    assert scores[f"park/AP_class_{DOG}"] == 0.0
    assert scores["park/AP"] == pytest.approx(0.5)
    assert (scores["park/confusion_0"], scores["park/confusion_1"]) == (2, 1)
    names = class_scores(scores, SPACE)
    assert names["classes"]["park"]["dog"] == 0.0
    assert names["confusion"] == dict(
        park=dict(zip(SPACE.group_names, (2, 1), strict=False))
    )
    assert "pooled" not in names["classes"]


def test_equal_scores_count_as_in_pycocotools(backend):
    """By image id, not in the order of the file; here of six images with one box."""
    rng = np.random.default_rng(0)
    ids = [70, 3, 41, 12, 9, 25]
    samples, document, rows = [], dict(images=[], annotations=[]), []
    for image_id in ids:
        # Some of the equal scores are hits, the others are misses.
        found = [(BOX if hit else AWAY, 0.5, CAR) for hit in rng.random(3) < 0.4]
        samples.append(sample(STREET, found, [(BOX, CAR)]) | dict(img_id=image_id))
        document["images"].append(dict(id=image_id))
        x1, y1, x2, y2 = BOX
        bbox = [x1, y1, x2 - x1, y2 - y1]
        one = dict(image_id=image_id, category_id=1, bbox=bbox, iscrowd=0)
        area = bbox[2] * bbox[3]
        number = len(document["annotations"]) + 1
        document["annotations"].append({**one, "id": number, "area": area})
        rows += [
            [image_id, a, b, c - a, d - b, score, 1] for (a, b, c, d), score, _ in found
        ]
    truth = COCO()
    truth.dataset = {**document, "categories": [dict(id=1, name="car")]}
    truth.createIndex()
    expected = COCOeval(truth, truth.loadRes(np.array(rows, float)), "bbox")
    expected.evaluate()
    expected.accumulate()
    expected.summarize()
    scores = evaluate(samples, backend=backend)
    assert 0 < expected.stats[0] < 1
    assert scores["street/AP"] == pytest.approx(expected.stats[0], abs=1e-9)


def test_more_objects_than_detections_that_count(backend, monkeypatch):
    """Of 150 objects, each found, 100 count: recall 2/3, 67 of 101 recalls."""
    boxes = [
        (20 * i, 40 * j, 20 * i + 16, 40 * j + 16) for i in range(15) for j in range(10)
    ]
    found = [(box, 1 - n / 1000, CAR) for n, box in enumerate(boxes)]
    said = []
    monkeypatch.setattr(evaluation, "print_log", lambda text, **_: said.append(text))
    few = sample(STREET, found[:9], [(box, CAR) for box in boxes[:9]])
    crowded = sample(STREET, found, [(box, CAR) for box in boxes])
    assert evaluate([crowded], backend=backend)["street/AP"] == pytest.approx(67 / 101)
    limits = [text for text in said if "more than" in text]
    assert len(limits) == 1
    assert (
        "1 of 1 images have more than 100 objects of one class (up to 150)" in limits[0]
    )
    assert "max_dets" in limits[0]
    said.clear()
    scores = evaluate([crowded, few], backend=backend, max_dets=150)
    assert scores["street/AP"] == pytest.approx(1.0)
    assert not [text for text in said if "more than" in text]
    # The detector gives 100 detections of an image: the metric cannot help.
    cut = sample(STREET, found[:100], [(box, CAR) for box in boxes])
    evaluate([cut, few], backend=backend, max_dets=150)
    (limit,) = [text for text in said if "more than" in text]
    assert "1 of 2 images have more than 100 objects (up to 150)" in limit
    assert "max_per_img" in limit
    # Of two windows, it gives 200: the detections of one object are one.
    said.clear()
    halves = [dict(copy.deepcopy(cut), window=(n, 0, 300, 400)) for n in (0, 1)]
    evaluate(halves, backend=backend, max_dets=150)
    assert not [text for text in said if "more than" in text]
    evaluate(halves[:1], backend=backend, max_dets=150)
    assert any("more than 100 objects per window (up to 150)" in text for text in said)


def test_two_images_of_one_dataset_with_one_id_stay_two():
    # Each detection lies where the other image has its object.
    samples = [
        sample(STREET, [(AWAY, 0.9, CAR)], [(BOX, CAR)]),
        sample(STREET, [(BOX, 0.9, CAR)], [(AWAY, CAR)]),
    ]
    scores = evaluate(samples)
    assert scores["street/AP"] == 0.0
    assert scores["street/images"] == 2


def test_pooled_scores_know_no_datasets():
    # park's image has a car that park does not annotate: a mistake, and before the hit.
    car = (AWAY, 0.95, CAR)
    samples = [
        hit(STREET, CAR),
        sample(PARK, [car, (BOX, 0.9, DOG)], [(BOX, DOG)], chosen=[(BOX, 0.9, DOG)]),
    ]
    scores = evaluate(samples)
    assert (scores["street/AP"], scores["park/AP"]) == pytest.approx((1.0, 1.0))
    # car 1/2, dog 1; the class person has no object.
    assert scores["pooled/AP"] == scores["pooled/AP50"] == pytest.approx(0.75)
    assert scores["mean/AP"] == pytest.approx(1.0)
    assert (scores["pooled/images"], scores["pooled/boxes"]) == (2, 2)


def test_results_written_by_test_py_give_the_same_scores(tmp_path):
    samples = [
        sample(STREET, [(BOX, 0.9, DOG)], [(BOX, CAR)], chosen=[(BOX, 0.8, CAR)]),
        sample(PARK, [(AWAY, 0.9, DOG)], [(BOX, DOG)], chosen=[(BOX, 0.9, DOG)]),
    ]
    dump = DumpDetResults(out_file_path=str(tmp_path / "results.pkl"))
    dump.process({}, samples)
    dump.evaluate(len(samples))
    written = pickle.loads((tmp_path / "results.pkl").read_bytes())
    assert evaluate(written) == pytest.approx(evaluate(samples), nan_ok=True)


def test_windows_of_equal_ids_are_of_several_images():
    """ConcatDataset repeats ids. Half precision, as of val_cfg.fp16."""
    parts = []
    for number, left in itertools.product((0, 1), (0, 200)):
        part = hit(STREET, CAR, chosen=[(BOX, 0.9, CAR)])
        for key in ("pred_instances", "dataset_instances"):
            part[key]["bboxes"][:, ::2] -= left
            part[key] |= {name: part[key][name].half() for name in ("bboxes", "scores")}
        part |= dict(window=(left, 0, left + 64, 64), image_number=number)
        parts.append(part)
    scores = evaluate(parts)
    assert (scores["street/images"], scores["street/boxes"]) == (2, 2)
    assert scores["street/AP"] == pytest.approx(1.0)


def test_other_detectors_are_told_of(monkeypatch):
    logged = []
    monkeypatch.setattr(
        "damex.evaluation.print_log", lambda text, **_: logged.append(text)
    )
    evaluate([sample(STREET, truth=[(BOX, CAR)], chosen=[])])
    assert len(logged) == 1
    evaluate([sample(STREET, truth=[(BOX, CAR)])])
    assert logged[1].startswith("the detector chooses its detections among all classes")


def test_datasets_without_objects_or_samples():
    scores = evaluate([hit(STREET, CAR), sample(PARK, [(BOX, 0.9, DOG)])])
    assert math.isnan(scores["park/AP"])  # and not in the mean
    assert scores["mean/AP"] == scores["mean/AP50"] == pytest.approx(1.0)
    counts = [scores[f"{name}/{key}"] for name in ("street", "park") for key in COUNTS]
    assert counts == [1, 1, 1, 0]
    scores = evaluate([sample(STREET), sample(PARK)])
    assert math.isnan(scores["mean/AP"])  # save_best looks for it
    assert math.isnan(scores["street/AP"])
    scores = evaluate([hit(PARK, DOG)])
    assert not [key for key in scores if key.startswith("street/")]
    assert scores["mean/AP"] == pytest.approx(1.0)


def test_routing_accuracy_by_hand():
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
    assert scores["street/routing_accuracy"] == pytest.approx(10 / 20)
    # park: experts 1 and 2 have 6 + 2 of 10.
    assert scores["park/routing_accuracy"] == pytest.approx(8 / 10)
    assert scores["mean/routing_accuracy"] == pytest.approx(0.65)
    # l0: 6, 11, 5, 2 of 24 tokens; l2: 1, 0, 2, 3 of 6.
    assert scores["mean/max_load"] == pytest.approx((11 / 24 + 3 / 6) / 2)


def test_routing_accuracy_counts_the_experts_of_the_group():
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
    assert (
        scores["a/routing_accuracy"]
        == scores["c/routing_accuracy"]
        == pytest.approx(0.75)
    )
    assert scores["b/routing_accuracy"] == pytest.approx(0.25)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),  # a dense detector
        (
            dict(counts={"l": [0, 0]}, groups=[[0], [1]]),
            {"street/routing_accuracy": 0.0, "mean/max_load": 0.0},
        ),
        (dict(counts={"l": [3, 1]}), {"mean/max_load": 0.75}),  # experts of no group
    ],
)
def test_routing_scores_need_experts_and_groups(options, expected):
    scores = evaluate([hit(STREET, CAR, **options)])
    found = {k: v for k, v in scores.items() if "routing" in k or "load" in k}
    found.pop("mean/routing_accuracy", None)
    assert found == expected


def test_sample_of_another_dataset_class_is_refused():
    stranger = sample(STREET)
    del stranger["dataset_id"]
    with pytest.raises(ConfigError, match="without dataset_id; use it with a dataset"):
        MixtureMetric().process({}, [stranger])


def test_scores_that_are_no_numbers_name_the_dataset_and_the_likely_cause():
    with pytest.raises(
        DataError, match=r"dataset 'dataset 1'; did the training diverge\?"
    ):
        evaluate([sample(PARK, [(BOX, math.nan, DOG)], [(BOX, DOG)])])


MAPPED = dict(
    version=1,
    datasets=dict(
        street=dict(car="vehicle", bus="vehicle", person="street/person"),
        park=dict(car="vehicle", dog=None),
    ),
)


@pytest.mark.parametrize(
    ("label_space", "classes"),
    [
        ("union", ["car", "person", "bus", "dog"]),
        (
            "partitioned",
            [
                *("street/car", "street/person", "street/bus"),
                *("park/person", "park/dog", "park/car"),
            ],
        ),
        (MAPPED, ["vehicle", "street/person", "person"]),
    ],
    ids=["merged", "disjoint", "mapped"],
)
def test_scores_of_a_dataset_are_pycocotools_on_its_file(
    two_datasets, edit_json, backend, label_space, classes
):
    """Of each dataset alone, by hand, with crowds and objects of several sizes."""

    def vary(document):
        for record in document["annotations"]:
            record["iscrowd"] = int(record["id"] % 5 == 0)
            record["area"] *= 0.4 if record["id"] % 2 else 9.0

    for entry in two_datasets:
        edit_json(entry["data_root"] + "val.json", vary)
    dataset = MixtureDataset(
        datasets=two_datasets,
        split="val",
        pipeline=[dict(type="LoadImageFromFile"), dict(type="PackDetInputs")],
        label_space=label_space,
    )
    assert list(dataset.metainfo["classes"]) == classes
    samples, rows = _noisy_detections(dataset)
    scores = evaluate(samples, space=dataset.label_space, backend=backend)
    for entry, own in zip(
        two_datasets, dataset.label_space.dataset_classes, strict=True
    ):
        truth, ids = _file_by_hand(entry["data_root"] + "val.json", own)
        found = [
            dict(
                image_id=image_id,
                category_id=ids[classes[label]],
                bbox=[*box[:2], box[2] - box[0], box[3] - box[1]],
                score=score,
            )
            for image_id, box, score, label in rows[entry["name"]]
        ]
        evaluation = COCOeval(truth, truth.loadRes(found), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        assert 0.05 < evaluation.stats[0] < 0.95
        for key, value in zip(NAMES, evaluation.stats, strict=False):
            expected = math.nan if value < 0 else value
            assert scores[f"{entry['name']}/{key}"] == pytest.approx(
                expected, abs=1e-6, nan_ok=True
            )


def _noisy_detections(dataset):
    """Samples with detections near and far, and those of its dataset's classes."""
    rng = np.random.default_rng(0)
    number = len(dataset.metainfo["classes"])
    samples, rows = [], {name: [] for name in dataset.label_space.dataset_names}
    for data in dataset:
        record = data["data_samples"].to_dict()
        found = []
        for truth in [*record["ground_truth"]] * 3:
            x, y, w, h = truth["bbox"] + rng.normal(0, 1.5, 4)
            label = truth["label"] if rng.random() < 0.7 else int(rng.integers(number))
            found.append(((x, y, x + w, y + h), rng.random(), label))
        chosen = [f for f in found if f[2] in record["annotated_labels"]]
        samples.append(
            {
                **record,
                "pred_instances": instances(found),
                "dataset_instances": instances(chosen),
            }
        )
        rows[record["dataset_name"]] += [(record["img_id"], *f) for f in chosen]
    return samples, rows


def _file_by_hand(path, own):
    """The COCO file alone, and the id of each class that its words stand for.

    Own words of one class become one category; those of none are taken out.
    """
    document = json.loads(Path(path).read_text())
    ids, new = {}, {}
    for category in document["categories"]:
        if category["name"] in own:
            target = own[category["name"]]
            new[category["id"]] = ids.setdefault(target, category["id"])
    document["categories"] = [
        c for c in document["categories"] if c["id"] in ids.values()
    ]
    document["annotations"] = [
        {**a, "category_id": new[a["category_id"]]}
        for a in document["annotations"]
        if a["category_id"] in new
    ]
    truth = COCO()
    truth.dataset = document
    truth.createIndex()
    return truth, ids


# --- detectors choose their detections among the classes of a dataset -----------------


def test_every_detector_chooses_among_the_classes_of_the_dataset(
    detector_name, build_mmdet, make_batch, run_predict
):
    detector = build_mmdet(detector_name)
    head, outputs = detector.bbox_head, []
    head.register_forward_hook(lambda *call: outputs.append(call[2]))
    batch = make_batch([0, 1])
    plain = run_predict(detector, batch)
    assert all("dataset_instances" not in sample for sample in plain)
    labels = [[3, 7], [5, 20, 79]]
    for sample, allowed in zip(batch["data_samples"], labels, strict=True):
        sample.set_metainfo(dict(annotated_labels=allowed))
    samples = run_predict(detector, batch)
    for image, (sample, allowed) in enumerate(zip(samples, labels, strict=True)):
        # The plain detections stay, and so few of them are of the dataset's classes
        # that the case says something.
        assert torch.equal(
            sample.pred_instances.scores, plain[image].pred_instances.scores
        )
        assert not set(sample.pred_instances.labels.tolist()) <= set(allowed)
        logits_QC = outputs[-1][0][-1, image]
        if detector_name == "MoEDDQDETR":
            mask = head.cache_dict["distinct_query_mask"][-1]
            logits_QC = logits_QC[mask[image * head.cache_dict["num_heads"]][0]]
        if head.loss_cls.use_sigmoid:
            scores = logits_QC[:, allowed].sigmoid().flatten()
        else:
            scores = logits_QC[:, [*allowed, 80]].softmax(-1)[:, :-1].amax(-1)
        expected = scores.sort(descending=True).values[:10]
        found = sample.dataset_instances
        torch.testing.assert_close(found.scores, expected)
        assert set(found.labels.tolist()) <= set(allowed)
