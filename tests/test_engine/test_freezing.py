"""``train_only``: what is trained, what is kept, and what cannot be asked for."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from mmengine.config import Config
from torch import nn

from damex.config_files import merge_options
from damex.datasets.label_space import LabelSpace
from damex.engine.config import build_runner
from damex.engine.freezing import FreezeRowsHook, freeze_all_but
from damex.errors import ConfigError
from tests.test_inference.conftest import SPACE


def trained(detector):
    return {name for name, p in detector.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("datasets", "classes", "experts"),
    [
        (["park"], [2], [1]),
        (["street", "park"], [0, 1, 2], [0, 1]),
        (["sky"], [3], [2]),
    ],
)
def test_what_other_datasets_have_is_kept(build, datasets, classes, experts):
    """A class that one other dataset has is not trained."""
    detector = build(moe="damex_best")
    kept = freeze_all_but(detector, SPACE, datasets)
    names = trained(detector)
    for name in names:
        rows = (~kept[name]).nonzero().flatten().tolist()
        own = experts if ".moe.experts." in name else classes
        # Routers only choose here; all of them learn whose an image is.
        assert rows == ([0, 1, 2] if ".moe.router." in name else own)
    parts = {name.split(".")[0] for name in names}
    assert parts == {"bbox_head", "dn_query_generator", "encoder", "decoder"}


def test_routers_that_weigh_or_choose_keep_the_rows_of_others(build, model_config):
    """Else the detections of other datasets would change."""
    best = dict(model_config(moe="damex_best").moe, num_experts=6)
    for moe, rows in (("damex", [1]), (best, [2, 3])):
        detector = build(moe=moe)
        kept = freeze_all_but(detector, SPACE, ["park"])
        routers = {name for name in trained(detector) if ".moe.router." in name}
        assert routers
        free = [(~kept[name]).nonzero().flatten().tolist() for name in routers]
        assert all(one == rows for one in free)


@pytest.mark.parametrize("datasets", [["park"], ["park", "street"]])
def test_a_group_is_trained_if_all_its_datasets_are(build, datasets):
    space = replace(SPACE, groups=("a", "a", "sky"))
    detector = build(moe="damex_best", num_groups=2)
    freeze_all_but(detector, space, datasets)
    is_trained = any(".moe." in name for name in trained(detector))
    assert is_trained == (len(datasets) == 2)


def test_kept_rows_get_no_gradient_and_do_not_move():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    kept = torch.tensor([True, False, True])
    hook = FreezeRowsHook({"1.weight": kept})
    runner = SimpleNamespace(model=model)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1
    )
    before = {key: value.clone() for key, value in model.state_dict().items()}
    hook.before_train(runner)
    for step in range(3):
        model.train()
        hook.before_train_iter(runner, step)
        optimizer.zero_grad()
        model(torch.randn(8, 2)).square().sum().backward()
        assert (model[1].weight.grad[kept] == 0).all()
        assert (model[1].weight.grad[~kept] != 0).all()
        optimizer.step()
        hook.after_train_iter(runner, step)
    after = model.state_dict()
    assert torch.equal(before["1.weight"][kept], after["1.weight"][kept])
    assert not torch.equal(before["1.weight"][~kept], after["1.weight"][~kept])
    assert torch.equal(before["0.running_mean"], after["0.running_mean"])
    assert after["0.num_batches_tracked"] == 0


@pytest.mark.parametrize(
    ("moe", "buffer"), [("loss_free", "counts_E"), ("dense_to_sparse", "progress")]
)
def test_what_gates_write_down_is_kept(build, make_batch, run_loss, total, moe, buffer):
    """A gate moves its bias, or its temperature, for all datasets."""
    detector = build(moe=moe)
    kept = freeze_all_but(detector, SPACE, ["park"])
    assert any(name.endswith(buffer) for name in kept)
    hook, runner = FreezeRowsHook(kept), SimpleNamespace(model=detector)
    parameters = [p for p in detector.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    before = {key: value.clone() for key, value in detector.named_buffers()}
    seen = dict[str, set]()
    hook.before_train(runner)
    for step in range(3):
        detector.train()
        detector.begin_step(iteration=step, max_iters=3)
        hook.before_train_iter(runner, step)
        for name, value in detector.named_buffers():
            assert torch.equal(value, before[name]), name
        optimizer.zero_grad()
        total(run_loss(detector, make_batch([0, 1]), iteration=step)).backward()
        optimizer.step()
        for name, value in detector.named_buffers():
            if name.endswith(buffer):
                seen.setdefault(name, set()).add(tuple(value.flatten().tolist()))
        hook.after_train_iter(runner, step)
        for name, value in detector.named_buffers():
            assert torch.equal(value, before[name]), name
    assert all(len(values) > 1 for values in seen.values())  # it did move in the step


def test_a_name_that_reads_as_a_number_is_a_name(build):
    """``--cfg-options train_only=[2019]`` names the dataset 2019."""
    names = ("street", "2019", "sky")
    space = replace(SPACE, dataset_names=names, groups=names)
    numbers, words = (
        freeze_all_but(build(moe="damex_best"), space, [name])
        for name in (2019, "2019")
    )
    assert numbers.keys() == words.keys()
    assert all(torch.equal(numbers[key], words[key]) for key in words)


REFUSALS = {
    "a word": ("sky", {}, r"must be a list of names of datasets, such as .*\['sky'\]"),
    "unknown": (["sly"], {}, "has no dataset 'sly'; did you mean 'sky'"),
    "stages": (
        ["sky"],
        dict(moe=dict(layers=dict(decoder="all"), upcycling=dict(share=0.5))),
        "cannot be combined with moe.router_warmup",
    ),
}


@pytest.mark.parametrize(
    ("datasets", "changes", "words"), REFUSALS.values(), ids=REFUSALS
)
def test_what_cannot_be_trained_alone_is_refused(build, datasets, changes, words):
    with pytest.raises(ConfigError, match=words):
        freeze_all_but(build(**changes), SPACE, datasets)


def test_nothing_of_its_own_is_nothing_to_train(build):
    mappings = ({"car": "car"}, {"car": "car"})
    space = LabelSpace(("car",), ("a", "b"), mappings, ("all", "all"))
    with pytest.raises(ConfigError, match="nothing would be trained"):
        freeze_all_but(build(num_groups=1), space, ["a"])


def test_a_training_needs_weights_to_keep(write_config):
    cfg = Config.fromfile(write_config())
    merge_options(cfg, dict(train_only=["park"]))
    with pytest.raises(ConfigError, match=r"train_only=.*; set load_from="):
        build_runner(cfg).train()
