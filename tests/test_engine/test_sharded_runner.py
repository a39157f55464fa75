"""``moe.expert_parallel`` in detectors and runners, with real processes."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mmengine.hooks import EMAHook
from mmengine.optim import AmpOptimWrapper, OptimWrapper, OptimWrapperDict
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from damex.engine.hooks import ExpertMeanDecayHook
from damex.engine.sharding import (
    check_sharding,
    exclude_from_ddp,
    reduce_before_steps,
    wrapper_config,
)
from damex.errors import ConfigError
from damex.models.insertion import moe_blocks
from damex.moe import ExpertShards

sys.path.insert(0, str(Path(__file__).parent))
import sharded_detector as detectors
import sharded_training as trainings

LAYOUTS = [
    pytest.param((2, 1), id="DDP on 2"),
    pytest.param((4, 2), id="experts over 2, data over 2"),
    pytest.param((4, 0), id="fully sharded on 4"),
]
# float32; seen are differences of 3e-7.
CLOSE = dict(rtol=1e-5, atol=1e-5)
TRAINING = """
train_cfg = dict(max_epochs=2, val_begin=2)
train_dataloader["sampler"]["samples_per_epoch"] = 8
model = dict(num_queries=10, test_cfg=dict(max_per_img=10))
moe = dict(num_experts=4)
custom_hooks = [
    dict(type="EMAHook", momentum=0.1),
    dict(type="RoutingAlarmHook", interval=1, min_iters=1),
]
# Larger than rounding errors, from which AdamW would make steps of full length.
optim_wrapper = dict(optimizer=dict(eps=1e-4))
"""


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_detector_of_the_quick_start_trains_as_in_one_process(
    layout, tmp_path, launch_processes
):
    count, size = layout
    script = detectors.__file__
    launch_processes(script, tmp_path, str(size), count=count)
    together = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(count)]
    first, _ = together[0]
    alone, scores = detectors.train_alone(count, [step["end"] for step in first])
    for rank, (steps, own_scores) in enumerate(together):
        for step, reference in zip(steps, alone, strict=True):
            torch.testing.assert_close(step["loss"], reference["losses"][rank], **CLOSE)
            torch.testing.assert_close(step["norm"], reference["norm"], **CLOSE)
            assert_all_close(step["grads"], reference["grads"])
            assert_all_close(step["end"], reference["end"])
        torch.testing.assert_close(own_scores, scores[rank], **CLOSE)
        for step, other in zip(steps, first, strict=True):
            assert step["norm"].item() == other["norm"].item()
            assert all(torch.equal(step["end"][k], v) for k, v in other["end"].items())


def assert_all_close(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, **CLOSE, msg=lambda words, name=name: f"{name}: {words}"
        )


# On the stand-in, collectives of CPU tensors fail, as with nccl.
@pytest.fixture(scope="module", params=["cpu", trainings.stand_in_device.NAME])
def folder(
    request, tmp_path_factory, make_coco_dataset, write_config_to, launch_processes
):
    """Work directories of all trainings."""
    if request.param != "cpu" and not trainings.stand_in_device.IS_AVAILABLE:
        pytest.skip("this torch has no devices in Python")
    folder = tmp_path_factory.mktemp("spread")
    mixture = [
        make_coco_dataset(folder / "street", classes=["car", "person"], num_images=5),
        make_coco_dataset(folder / "park", classes=["dog", "car"], num_images=3),
    ]
    write_config_to(folder, mixture=mixture, extra=TRAINING)
    launch_processes(trainings.__file__, folder, request.param, count=2)
    alone = dict(size=1, launcher="none")
    trainings.load_and_save(folder, "alone_again", resume_from="spread", **alone)
    trainings.load_and_save(
        folder, "alone_from_sharded", resume_from="sharded", custom_hooks=[], **alone
    )
    return folder


def load(path):
    return torch.load(path, map_location="cpu", weights_only=False)


def tensors(checkpoint):
    """All weights, averaged weights and moments by name."""
    found = dict(checkpoint["state_dict"])
    averages = checkpoint.get("ema_state_dict", {})
    found |= {f"ema.{k}": v for k, v in averages.items()}
    names = checkpoint["meta"]["optimizer_names"]
    for index, moments in checkpoint["optimizer"]["state"].items():
        found |= {f"{names[index]}.{key}": value for key, value in moments.items()}
    return found


def assert_equal(ours, theirs):
    ours, theirs = tensors(load(ours)), tensors(load(theirs))
    if not any(key.startswith("ema.") for key in ours):  # the run kept no averages
        theirs = {k: v for k, v in theirs.items() if not k.startswith("ema.")}
    assert ours.keys() == theirs.keys()
    assert [k for k in ours if not torch.equal(ours[k], theirs[k])] == []


def without_averages(checkpoint):
    """As it were without EMAHook, which saves averages in the place of weights."""
    averages = checkpoint.pop("ema_state_dict", None)
    if averages is not None:
        weights = {k.removeprefix("module."): v for k, v in averages.items()}
        checkpoint["state_dict"] = {k: weights[k] for k in checkpoint["state_dict"]}
    return checkpoint


@pytest.mark.slow
@pytest.mark.parametrize("work", ["spread", "sharded"])
def test_a_checkpoint_is_that_of_ddp(folder, work):
    ours, theirs = (load(folder / name / "epoch_2.pth") for name in (work, "plain"))
    assert ours["meta"]["moe"] == theirs["meta"]["moe"]
    if work == "sharded":  # EMAHook is for whole parameters
        ours, theirs = without_averages(ours), without_averages(theirs)
    ours, theirs = tensors(ours), tensors(theirs)
    moments = [key for key in ours if key.endswith("w1_EDH.exp_avg_sq")]
    assert len(moments) == 2
    assert all(ours[key].shape[0] == 4 for key in moments)
    assert any(key.endswith("num_batches_tracked") for key in ours)
    ours, theirs = ({k: v.double() for k, v in t.items()} for t in (ours, theirs))
    assert_all_close(ours, theirs)


@pytest.mark.slow
def test_the_log_says_which_process_has_which_experts(folder):
    (log,) = (folder / "spread").glob("*/*.log")
    words = "of 4 experts each process holds 2 (this one 0 to 1); 1 x 2 processes"
    assert words in log.read_text()


@pytest.mark.slow
def test_all_processes_together_evaluate_each_image_once(folder):
    for work in ("plain", "spread", "sharded"):
        summary = json.loads((folder / work / "summary.json").read_text())
        # 8 samples per epoch over two processes of batch 2: 2 iterations, 2 epochs.
        assert summary["iterations"] == 4
        images = {name: row["images"] for name, row in summary["datasets"].items()}
        assert images == dict(street=5, park=3)


@pytest.mark.slow
def test_a_resumed_training_ends_where_the_whole_one_does(folder):
    for resumed, whole in (("resumed", "spread"), ("sharded_resumed", "sharded")):
        paths = (folder / work / "epoch_2.pth" for work in (resumed, whole))
        assert_equal(*paths)


@pytest.mark.slow
def test_checkpoints_do_not_know_how_many_processes_there_were(folder):
    for again, saved in [
        ("spread_again", "plain"),
        ("alone_again", "spread"),
        ("sharded_again", "plain"),
        ("alone_from_sharded", "sharded"),
    ]:
        assert_equal(folder / again / "again.pth", folder / saved / "epoch_1.pth")


DAMEX = dict(layers=dict(decoder=[0]), losses=[dict(type="DatasetRoutingLoss")])
REFUSED = [
    (
        dict(num_experts=3),
        r"must divide the number of experts, 3, .*one of \[1, 3\], or "
        r"moe.num_experts=4",
    ),
    (dict(num_experts=4, upcycling=dict(share=0.5)), "and moe.upcycling cannot be set"),
    (
        dict(num_experts=4, router_warmup=dict(iters=2, loss="dataset_routing")),
        "and moe.router_warmup cannot be set",
    ),
    (
        dict(
            num_experts=4,
            layers=dict(backbone=[3]),
            losses=[],
            experts=dict(type="PatchConvExperts", patch_size=2),
        ),
        "PatchConvExperts are small slices",
    ),
]


@pytest.mark.parametrize(("moe", "words"), REFUSED)
def test_experts_that_cannot_be_spread_are_refused(build, moe, words):
    with pytest.raises(ConfigError, match=words):
        build(moe={**DAMEX, **moe, "expert_parallel": 2})


def test_the_number_of_processes_has_to_fit(build, request):
    moe = {**DAMEX, "num_experts": 4, "expert_parallel": 2}
    with pytest.raises(ConfigError, match=r"nproc_per_node=2 .*--launcher pytorch, or"):
        build(moe=moe)
    request.getfixturevalue("group")
    with pytest.raises(ConfigError, match=r"there are 1; start 2 .* one of \[1\] "):
        build(moe=moe)


def test_one_process_per_group_is_a_detector_without_shards(build):
    states = [
        build(moe={**DAMEX, "num_experts": 4, **option}).state_dict()
        for option in ({}, dict(expert_parallel=1))
    ]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][k], states[1][k]) for k in states[0])


@pytest.fixture
def spread_runner(build, group):
    """What the check needs of a runner whose detector has spread experts."""
    detector = build(moe={**DAMEX, "num_experts": 4})
    shards = ExpertShards.of_world(1)
    for block in moe_blocks(detector):
        block.moe.shard_experts(shards)
    return SimpleNamespace(model=detector, cfg={}, hooks=[], distributed=True)


@pytest.mark.parametrize("fully", [False, True])
@pytest.mark.parametrize("loader", ["val_dataloader", "test_dataloader"])
def test_processes_must_evaluate_as_many_images(spread_runner, loader, fully):
    if fully:
        runner_of_whole(spread_runner)
    check_sharding(spread_runner, loader)
    spread_runner.cfg[loader] = dict(sampler=dict(round_up=False))
    with pytest.raises(ConfigError, match=f"{loader}.sampler.round_up=False"):
        check_sharding(spread_runner, loader)


def runner_of_whole(runner):
    """Its model is to be fully sharded, and no layer's experts are spread."""
    runner.cfg["model_wrapper_cfg"] = dict(type="FullySharded")
    runner.model = torch.nn.Module()


def test_the_mean_of_all_experts_is_refused(spread_runner):
    spread_runner.hooks.append(ExpertMeanDecayHook(decay=1.0))
    with pytest.raises(ConfigError, match=r"ExpertMeanDecayHook .* moe.expert_parall"):
        check_sharding(spread_runner, "val_dataloader")


@pytest.mark.parametrize(
    ("words", "cfg", "in_stages", "hooks"),
    [
        ("sync_bn", dict(sync_bn="torch"), False, []),
        ("train_only", dict(train_only=["a"]), False, []),
        ("constructor='X'", dict(optim_wrapper=dict(constructor="X")), False, []),
        ("router_warmup", {}, True, []),
        ("EMAHook", {}, False, [EMAHook()]),
        ("ExpertMeanDecayHook", {}, False, [ExpertMeanDecayHook(decay=1.0)]),
    ],
)
def test_what_needs_whole_parameters_is_refused(
    spread_runner, words, cfg, in_stages, hooks
):
    runner_of_whole(spread_runner)
    spread_runner.model.trains_in_stages = in_stages
    one = dict(constructor="DefaultOptimWrapperConstructor")  # unlike a base config
    spread_runner.cfg |= dict(optim_wrapper=one) | cfg
    spread_runner.hooks += hooks
    with pytest.raises(ConfigError, match=f"{words} cannot be .*'FullySharded'"):
        check_sharding(spread_runner, "val_dataloader")


def test_fully_sharded_experts_are_not_spread(spread_runner):
    spread_runner.cfg["model_wrapper_cfg"] = dict(type="FullySharded")
    with pytest.raises(ConfigError, match="expert_parallel cannot be"):
        check_sharding(spread_runner, "val_dataloader")


def test_other_wrappers_than_ddp_are_refused(spread_runner):
    wrapper = dict(type="MMFullyShardedDataParallel")
    with pytest.raises(ConfigError, match=r"needs DDP .*'MMFullyShardedDataParallel'"):
        exclude_from_ddp(spread_runner.model, wrapper)


class Calls:
    """Stands for ExpertGradients and notes what is called."""

    def __init__(self):
        self.names = []

    def reduce(self):
        self.names.append("reduce")

    def clip_grad_norm(self, parameters, **kwargs):
        self.names.append(("clip", kwargs))
        return torch.tensor(1.0)


@pytest.mark.parametrize(
    ("clip_grad", "second"),
    [
        (None, []),
        (dict(max_norm=0.1), [("clip", dict(max_norm=0.1))]),
        (dict(type="value", clip_value=0.5), []),
    ],
)
def test_gradients_are_reduced_once_per_step_and_then_clipped(clip_grad, second):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    wrapper = OptimWrapper(optimizer, clip_grad=clip_grad, accumulative_counts=2)
    calls = Calls()
    reduce_before_steps(wrapper, calls)
    for count in (0, 1, 1, 2):
        wrapper.update_params(weight.sum() * 4)
        assert calls.names == ["reduce", *second] * count
    if getattr(wrapper, "grad_name", None) == "grad_value":  # two steps of 0.5
        assert weight.tolist() == [0.0, 0.0]


def test_a_scaler_has_to_ask_all_processes():
    wrapper = object.__new__(AmpOptimWrapper)
    wrapper.optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    wrapper.loss_scaler, wrapper.clip_grad_kwargs = torch.amp.GradScaler("cpu"), None
    with pytest.raises(ConfigError, match=r"optim_wrapper\.use_fsdp=True"):
        reduce_before_steps(wrapper, Calls())
    wrapper.loss_scaler = object.__new__(ShardedGradScaler)
    reduce_before_steps(wrapper, Calls())
    several = OptimWrapperDict(a=OptimWrapper(wrapper.optimizer))
    with pytest.raises(ConfigError, match="one optim_wrapper, got OptimWrapperDict"):
        reduce_before_steps(several, Calls())


# What is filled in around a model; test_two_processes.py trains with it.
STAGED, PLAIN = nn.Module(), nn.Module()
STAGED.trains_in_stages, PLAIN.trains_in_stages = True, False


@pytest.fixture
def on_gpu(monkeypatch):
    monkeypatch.setattr("damex.engine.sharding.get_device", lambda: "cuda")


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("model", "cfg", "unused"),
    [
        (PLAIN, {}, False),
        (PLAIN, dict(find_unused_parameters=True), True),
        (STAGED, dict(find_unused_parameters=False), True),
        (nn.Identity(), {}, False),
    ],
)
def test_a_stage_looks_for_unused_parameters(model, cfg, unused):
    assert wrapper_config(None, model, cfg) == dict(
        type="MMDistributedDataParallel",
        broadcast_buffers=False,
        find_unused_parameters=unused,
    )


@pytest.mark.usefixtures("on_gpu")
def test_a_wrapper_of_the_config_keeps_what_it_sets():
    own = dict(find_unused_parameters=False, broadcast_buffers=True)
    found = wrapper_config(own, STAGED, {})
    assert found == dict(own, type="MMDistributedDataParallel")
    assert own == dict(find_unused_parameters=False, broadcast_buffers=True)
    other = dict(type="MMFullyShardedDataParallel")
    assert wrapper_config(other, STAGED, {}) == other


def test_without_a_gpu_there_is_no_device_id_unless_one_is_set(monkeypatch):
    monkeypatch.setattr("damex.engine.sharding.get_device", lambda: "cpu")
    assert wrapper_config(None, PLAIN, {})["device_ids"] is None
    assert wrapper_config(dict(device_ids=[0]), PLAIN, {})["device_ids"] == [0]
