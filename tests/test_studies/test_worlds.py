"""Worlds: the same objects under shifted or equal names."""

import json

import pytest
import torch

from damex.datasets.label_space import LabelSpace
from damex.workbench.cli.run import run_command
from studies.one_label_space import SharedNamesMetric
from studies.worlds import WORDS, WORLDS, app


@pytest.fixture
def make(tmp_path):
    """``make(names)``: three small worlds; their annotations by world."""

    def run(names):
        out = tmp_path / names
        sizes = ["--count", "3", "--train", "20", "--val", "2"]
        assert run_command(app, ["--out", str(out), "--names", names, *sizes]) == 0
        found = {}
        for world in WORLDS[:3]:
            content = json.loads((out / world / "train.json").read_text())
            assert [one["name"] for one in content["categories"]] == [*WORDS]
            found[world] = content["annotations"]
        return found

    return run


def test_conflicting_names_are_shifted_by_the_number_of_the_world(make):
    agreeing, conflicting = make("agreeing"), make("conflicting")
    for number, world in enumerate(WORLDS[:3]):
        assert {one["category_id"] for one in agreeing[world]} == {*range(1, 9)}
        shifted = [
            one | {"category_id": (one["category_id"] - 1 + number) % 8 + 1}
            for one in agreeing[world]
        ]
        assert conflicting[world] == shifted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--names", "mixed"], '"conflicting", "agreeing"'),
        (["--count", "9"], "1 to 8, got 9"),
        (["--train", "0"], "1 or more"),
    ],
)
def test_the_command_refuses_with_a_message(tmp_path, capsys, words, message):
    assert run_command(app, ["--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err


HEADS = LabelSpace(
    classes=("a/x", "a/y", "b/x", "b/y"),
    dataset_names=("a", "b"),
    dataset_classes=tuple({n: f"{one}/{n}" for n in "xy"} for one in "ab"),
    groups=("a", "b"),
)


@pytest.mark.parametrize(
    ("dataset_known", "mean", "pooled"),
    # Name x, best first: image 3 as x, a miss; then both hits, and one of them only
    # once: precision 2/3, and 1/2 in dataset a. Name y: 1.
    [(True, 1.0, 1.0), (False, (3 / 4 + 1) / 2, (2 / 3 + 1) / 2)],
)
def test_separate_heads_are_scored_by_shared_names(dataset_known, mean, pooled):
    metric = SharedNamesMetric(dataset_known=dataset_known)
    metric.dataset_meta = HEADS.to_metainfo()
    for number, (dataset, name, found) in enumerate(
        [
            ("a", "x", {"a/x": 0.9, "b/x": 0.8}),
            ("b", "x", {"b/x": 0.7}),
            ("a", "y", {"a/y": 0.5, "b/x": 0.95}),
        ]
    ):
        own = {one: score for one, score in found.items() if one[0] == dataset}
        label = HEADS.classes.index(f"{dataset}/{name}")
        box = dict(bbox=[0, 0, 50, 50], area=2500, iscrowd=0, label=label)
        sample = dict(
            dataset_id="ab".index(dataset), dataset_name=dataset, img_id=number
        )
        sample |= dict(ground_truth=[box], pred_instances=_instances(found))
        metric.process({}, [sample | dict(dataset_instances=_instances(own))])
    scores = metric.evaluate(3)
    assert scores["mixture/mean/AP"] == pytest.approx(mean)
    assert scores["mixture/pooled/AP"] == pytest.approx(pooled)


def _instances(found):
    return dict(
        bboxes=torch.tensor([[0.0, 0.0, 50.0, 50.0]] * len(found)),
        scores=torch.tensor([*found.values()]),
        labels=torch.tensor([HEADS.classes.index(one) for one in found]),
    )
