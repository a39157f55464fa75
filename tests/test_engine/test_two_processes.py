"""Trainings with two real processes, all in one launch of ``two_processes.py``."""

from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow

FEW_STEPS = """
train_cfg = dict(max_epochs={epochs}, val_begin=9)
train_dataloader["sampler"]["samples_per_epoch"] = {samples}
custom_hooks = []
model = dict(num_queries=10, dn_cfg=dict(group_cfg=dict(num_dn_queries=10)))
model["test_cfg"] = dict(max_per_img=10)
optim_wrapper = dict(optimizer=dict(weight_decay={weight_decay}))
"""
NO_CHECKPOINT = "default_hooks = dict(checkpoint=None)"


def few_steps(*, epochs, samples, weight_decay=0.1):
    return FEW_STEPS.format(epochs=epochs, samples=samples, weight_decay=weight_decay)


@pytest.fixture(scope="module")
def results(tmp_path_factory, make_coco_dataset, write_config_to, launch_processes):
    """What both processes found, by rank."""
    folder = tmp_path_factory.mktemp("two")
    mixture = [
        make_coco_dataset(folder / "street", classes=["car", "person"], num_images=5),
        make_coco_dataset(folder / "park", classes=["dog", "car"], num_images=3),
    ]
    # 4 iterations of 2 processes with batch 2; the stage is the first 2 of them.
    stage = few_steps(epochs=1, samples=16)
    stage += "moe = dict(router_warmup=dict(_delete_=True, iters=2))\n" + NO_CHECKPOINT
    # Without weight decay, AdamW moves a parameter only by a gradient.
    deepmoe = few_steps(epochs=1, samples=8, weight_decay=0.0)
    # 1 iteration in each of 2 epochs.
    balance = few_steps(epochs=2, samples=4) + "moe = dict(num_experts=4)\n"
    balance += "model_wrapper_cfg = dict(broadcast_buffers=True)"
    # The detector is dense in the first 2 of 4 iterations.
    upcycled = few_steps(epochs=1, samples=16) + NO_CHECKPOINT
    upcycled += "\nmoe = dict(upcycling=dict(share=0.5))"
    for name, moe, extra in [
        ("stage", "pmoe_separate", stage),
        ("deepmoe", "deepmoe", deepmoe),
        ("balance", "loss_free", balance),
        ("upcycled", "damex", upcycled),
    ]:
        write_config_to(folder, mixture=mixture, moe=moe, extra=extra, name=name)
    script = Path(__file__).with_name("two_processes.py")
    launch_processes(script, folder, count=2)
    return [torch.load(folder / f"rank{rank}.pt") for rank in (0, 1)]


def changed(before, after, names):
    return {name for name in names if not torch.equal(before[name], after[name])}


def assert_ranks_agree(first, second):
    for ours, theirs in zip(first["states"], second["states"], strict=True):
        assert changed(ours, theirs, first["parameters"]) == set()


def test_two_halves_of_a_batch_move_the_bias_as_the_whole_batch_does(results):
    for rank in (0, 1):
        layer = results[rank]["layer"]
        assert torch.equal(layer["whole"], layer["alone"])
        assert torch.equal(layer["resumed"], layer["alone"][3:])
    # Every expert is above and below the mean at some time.
    moves_SE = layer["alone"].diff(dim=0).sign()
    assert moves_SE.amin(0).tolist() == [-1.0] * 3
    assert moves_SE.amax(0).tolist() == [1.0] * 3


def test_a_balanced_detector_resumes_with_the_load_of_both_processes(results):
    first, second = (results[rank]["balanced"] for rank in (0, 1))
    assert_ranks_agree(first, second)
    names = [name for name in first["states"][0] if "gate.balance." in name]
    assert {name.rsplit(".", 1)[1] for name in names} == {"bias_E", "counts_E"}
    for ours, theirs in zip(first["states"][1:], second["states"][1:], strict=True):
        assert changed(ours, theirs, names) == set()
        assert all(ours[n].sum() > 0 for n in names if n.endswith("counts_E"))
    for rank in (0, 1):
        whole, resumed = (results[rank][key] for key in ("balanced", "resumed"))
        for ours, theirs in zip(whole["states"][1:], resumed["states"], strict=True):
            assert changed(ours, theirs, [*whole["parameters"], *names]) == set()


def test_the_alarm_counts_the_choices_of_both_processes(results):
    for rank in (0, 1):
        tally = results[rank]["tally"]
        assert tally["counts_GE"].tolist() == [[9, 0, 3], [0, 6, 0]]
        assert tally["tokens_G"].tolist() == [12, 6]


def test_images_of_both_processes_are_weighted_as_one_batch(results):
    # Five objects, which weigh 4 / 4 ** 0.5 + 1 = 3 before scaling.
    weights = [results[rank]["weights"].item() for rank in (0, 1)]
    assert weights == pytest.approx([5 / 6, 5 / 3])


def test_the_stage_trains_routers_alone_and_then_never_again(results):
    first, second = (results[rank]["stage"] for rank in (0, 1))
    assert_ranks_agree(first, second)
    names, states = first["parameters"], first["states"]
    routers = {name for name in names if ".moe.router." in name}
    assert len(routers) == 2
    for before, after in [states[0:2], states[1:3]]:
        assert changed(before, after, names) == routers
    for before, after in [states[2:4], states[3:5]]:
        moved = changed(before, after, names)
        assert moved & routers == set()
        # A gradient or weight decay moves all the rest.
        still = set(names) - moved - routers
        assert {name for name in still if before[name].any()} == set()


def test_deepmoe_trains_all_parameters_alike_in_both_processes(results):
    first, second = (results[rank]["deepmoe"] for rank in (0, 1))
    assert_ranks_agree(first, second)
    moved = changed(first["states"][0], first["states"][-1], first["parameters"])
    assert set(first["parameters"]) - moved == set()


def test_batch_norms_are_averaged_before_a_checkpoint(results):
    runs = [results[rank]["deepmoe"] for rank in (0, 1)]
    first, second = (run["states"][-1] for run in runs)
    names = [name for name in first if name.endswith(("running_mean", "running_var"))]
    assert changed(first, second, names) == {*names} != set()
    for name in names:
        assert torch.equal(runs[0]["end"][name], runs[1]["end"][name])
        mean_C = (first[name] + second[name]) / 2
        torch.testing.assert_close(runs[0]["end"][name], mean_C)


def test_a_dense_phase_ends_alike_in_both_processes(results):
    first, second = (results[rank]["upcycled"] for rank in (0, 1))
    assert_ranks_agree(first, second)
    names, states = first["parameters"], first["states"]
    routers = {name for name in names if ".moe.router." in name}
    banks = {name for name in names if ".moe.experts." in name}
    assert len(routers) == 2
    for before, after in [states[0:2], states[1:3]]:
        assert changed(before, after, names) & routers == set()
        assert banks <= changed(before, after, names)
    for before, after in [states[2:4], states[3:5]]:
        assert routers <= changed(before, after, names)
    flags = [name for name in states[0] if name.endswith("dense_phase.flag")]
    assert len(flags) == 2
    found = [[bool(state[name]) for name in flags] for state in states]
    assert found == [[True] * 2] * 3 + [[False] * 2] * 2
