"""Resuming in the middle of an epoch, with as many processes or others."""

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from mmengine.optim import LinearLR, MultiStepLR

from damex.engine.resumption import fast_forward

sys.path.insert(0, str(Path(__file__).parent))
import mid_epoch_training as trainings

# An epoch is 6 steps of one process or 3 of two; saved is 2 or 1 steps into the second.
TRAINING = """
train_cfg = dict(max_epochs=2, val_begin=9)
default_hooks = dict(checkpoint=dict(by_epoch=False, interval=4))
train_dataloader["batch_sampler"] = dict(type="AspectRatioBatchSampler")
model = dict(num_queries=10, dn_cfg=dict(group_cfg=dict(num_dn_queries=10)))
model["test_cfg"] = dict(max_per_img=10)
param_scheduler = [
    dict(type="LinearLR", start_factor=0.1, by_epoch=False, begin=0, end=2),
    dict(type="CosineAnnealingLR", eta_min_ratio=0.02, by_epoch=False),
    dict(type="MultiStepLR", milestones=[1], gamma=0.5),
]
"""
SECOND_EPOCH = {1: 6, 2: 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, make_coco_dataset, write_config_to, launch_processes):
    """All trainings; images of one dataset stand, those of the other lie."""
    folder = tmp_path_factory.mktemp("middle")
    mixture = [
        make_coco_dataset(folder / "street", classes=["car", "person"], num_images=5),
        make_coco_dataset(
            folder / "park", classes=["dog", "car"], num_images=3, size=(32, 48)
        ),
    ]
    write_config_to(folder, mixture=mixture, extra=TRAINING)
    steps = {
        # Workers are several batches ahead of what is in the checkpoint.
        "one": trainings.train(folder, "one", **{"train_dataloader.num_workers": 2}),
        "one_to_one": trainings.train(
            folder, "one_to_one", resume_from="one/iter_8.pth"
        ),
    }
    launch_processes(trainings.__file__, folder, count=2)
    steps["two_to_one"] = trainings.train(
        folder, "two_to_one", resume_from="two/iter_4.pth"
    )
    torch.save(steps, folder / "alone.pt")
    return folder


@pytest.fixture(scope="module")
def steps(folder):
    """Steps of each training, of every process."""
    ranks = [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]
    alone = torch.load(folder / "alone.pt")
    both = {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return {**{name: [found] for name, found in alone.items()}, **both}


def images(rows, since=0, until=99):
    return Counter(
        image
        for row in rows
        for number, batch, _ in row
        for image in batch
        if since <= number < until
    )


RESUMED = [("one", "one_to_one", 8), ("two", "two_to_one", 4), ("one", "one_to_two", 8)]
RESUMED.append(("two", "two_to_two", 4))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "saved"), RESUMED)
def test_each_image_of_the_epoch_is_seen_as_often_as_without_a_stop(
    steps, before, after, saved
):
    epoch = SECOND_EPOCH[len(steps[before])]
    whole = images(steps[before], since=epoch)
    assert whole.total() == 12
    assert images(steps[before], epoch, saved) + images(steps[after]) == whole


@pytest.mark.slow
@pytest.mark.parametrize("after", ["one_to_one", "two_to_one", "one_to_two"])
def test_steps_and_learning_rates_go_on_in_the_batches_of_the_resumed_run(steps, after):
    whole = steps["two" if after == "one_to_two" else "one"][0]
    (found, *_) = steps[after]
    expected = whole[-len(found) :]
    assert [number for number, _, _ in found] == [number for number, _, _ in expected]
    rates = [rate for *_, rate in found]
    assert rates == pytest.approx([rate for *_, rate in expected], rel=1e-9)
    assert len(set(rates)) == len(rates)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whole", "resumed"),
    [("one/iter_12.pth", "one_to_one"), ("two/iter_6.pth", "two_to_two")],
)
def test_with_as_many_processes_the_weights_are_those_of_a_run_without_a_stop(
    folder, whole, resumed
):
    paths = folder / whole, folder / resumed / Path(whole).name
    ours, theirs = (torch.load(p, weights_only=False)["state_dict"] for p in paths)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def logged(folder, name):
    (path,) = (folder / name).glob("*/*.log")
    return path.read_text()


@pytest.mark.slow
def test_another_total_batch_is_said(folder):
    words = "a batch of all processes was 2 x 2 images and is now 1 x 2"
    assert words in logged(folder, "two_to_one")
    assert "a batch of all processes was" not in logged(folder, "two_to_two")


@pytest.mark.slow
def test_a_checkpoint_of_another_mixture_begins_the_epoch_again(folder):
    found = trainings.train(
        folder,
        "other",
        resume_from="one/iter_8.pth",
        **{"train_dataloader.sampler.samples_per_epoch": 8, "max_epochs": 2},
    )
    assert sum(len(batch) for _, batch, _ in found) == 8
    assert "the epoch begins again" in logged(folder, "other")


def test_schedules_by_iteration_and_by_epoch_are_gone_through_together():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedulers = [
        LinearLR(optimizer, start_factor=0.5, end=4, by_epoch=False),
        MultiStepLR(optimizer, milestones=[1, 2], gamma=0.1, by_epoch=True),
    ]
    # The third epoch has had all its 3 steps, but is not over yet.
    fast_forward(schedulers, epochs=2, iters=9, length=3)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)
    assert [one._global_step for one in schedulers] == [9, 2]
