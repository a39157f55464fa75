"""A new dataset in an old detector, whose other datasets stay as they were."""

import ast
import copy
import shlex
import sys

import numpy as np
import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config

from damex.__main__ import main
from damex.config_files import config_of, merge_options
from damex.engine.config import build_runner
from damex.errors import ConfigError
from damex.inference.predictor import Predictor
from damex.inference.stored import DetectorCheckpoint
from damex.workbench.cli.commands import app
from damex.workbench.growth.grow import add_datasets, build_initialized


def detections(checkpoint, folder, dataset):
    """Detections in all images of a dataset, whose name is given."""
    images = sorted((folder / dataset / "images").glob("*.png"))
    predictor = Predictor(checkpoint, device="cpu")
    return predictor(images, dataset=dataset, min_score=0.0)


def assert_same(before, after, *, exactly=True):
    for old, new in zip(before, after, strict=True):
        assert old.names == new.names
        for name in ("scores", "boxes"):
            values = getattr(old, name), getattr(new, name)
            if exactly:
                assert np.array_equal(*values)
            else:
                np.testing.assert_allclose(*values, atol=1e-4)


def state_of(path):
    return torch.load(path, weights_only=False)["state_dict"]


def test_an_initialized_detector_is_always_the_same_and_reseeds_no_gpu(
    model_config, monkeypatch
):
    reseeded, model = [], model_config()
    monkeypatch.setattr(torch.cuda, "manual_seed_all", reseeded.append)
    before = torch.get_rng_state()
    first, again = (build_initialized(model).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), before)
    assert reseeded == []


@pytest.fixture
def grown(save, make_config, mixture, tmp_path, capsys):
    """Paths of the old checkpoint, of the grown one, and of the config."""
    old = save(mixture[:2])
    config = make_config(mixture, name="grown")
    out = tmp_path / "grown.pth"
    arguments = ["grow", str(old), str(config), "--out", str(out), "--images", "3"]
    assert main(arguments) == 0
    return old, out, config


def test_growth_changes_no_detection_of_old_datasets(grown, tmp_path):
    old, new, _ = grown
    for dataset in ("street", "park"):
        before = detections(old, tmp_path, dataset)
        assert sum(len(one.scores) for one in before) > 100
        assert_same(before, detections(new, tmp_path, dataset), exactly=False)


def test_new_experts_are_those_of_the_dataset_that_new_images_look_like(
    grown, tmp_path, capsys
):
    old, new, _ = grown
    images = sorted((tmp_path / "sky" / "images").glob("*.png"))[:3]
    found = Predictor(old, device="cpu")(images, min_score=1.0)
    mean = {
        name: np.mean([one.probabilities[name] for one in found])
        for name in ("street", "park")
    }
    best = max(mean, key=mean.get)
    state = state_of(new)
    tied = [key for key in state if key.endswith(("up_ELD", "down_EDL", "weight_ED"))]
    assert len(tied) == 3 * 5  # layers
    for key in tied:
        assert torch.equal(state[key][2], state[key][["street", "park"].index(best)])
        assert not torch.equal(state[key][0], state[key][1])


@pytest.mark.parametrize("name", ["2019", "my cells"])
def test_the_printed_commands_train_what_was_asked_for(
    save, make_config, mixture, tmp_path, capsys, name
):
    old, out = save(mixture[:2]), str(tmp_path / "new" / "grown.pth")
    config = make_config([*mixture[:2], {**mixture[2], "name": name}], name="with it")
    options = ["max_epochs=3", "train_dataloader.batch_size=1"]
    words = [str(old), str(config), "--out", out, "--like", "park", "--cfg-options"]
    capsys.readouterr()
    assert main(["grow", *words, *options]) == 0
    *_, first, second = capsys.readouterr().out.split(":\n  damex train ")
    for text, wanted in ((first, None), (second, [name])):
        command, *lines = text.splitlines()
        _, options, _ = app.parse_args(["train", *shlex.split(command)])
        cfg = config_of(*options.args, options.kwargs.get("cfg_options", ()))
        for line in lines:
            if "config: " in line:
                key, value = line.partition("config: ")[2].split(" = ")
                cfg[key] = ast.literal_eval(value)
        assert options.args == (str(config),)
        assert (cfg.max_epochs, cfg.train_dataloader.batch_size) == (3, 1)
        assert cfg.load_from == out
        assert cfg.get("train_only") == wanted


def test_an_old_group_with_old_classes_has_nothing_to_train_alone(
    save, make_config, mixture, make_coco_dataset, tmp_path, capsys
):
    more = make_coco_dataset(tmp_path / "more", classes=["car"], num_images=2)
    config = make_config([*mixture[:2], {**more, "group": "park"}], name="grown")
    old, out = save(mixture[:2]), str(tmp_path / "grown.pth")
    capsys.readouterr()
    assert main(["grow", str(old), str(config), "--out", out]) == 0
    *_, command, last = capsys.readouterr().out.splitlines()
    assert command.startswith("  damex train ")
    assert "train_only" not in command
    assert "cannot be trained alone" in last
    assert "all classes and experts of these datasets are shared" in last


def train(config, checkpoint, folder, **options):
    cfg = Config.fromfile(config)
    options = dict(load_from=str(checkpoint), max_epochs=1, **options)
    merge_options(cfg, dict(work_dir=str(folder), **options))
    # It would move weights without a gradient.
    cfg.optim_wrapper.optimizer.weight_decay = 0.5
    cfg.train_cfg.val_interval = 5
    build_runner(cfg).train()
    return folder / "epoch_1.pth"


def test_old_datasets_stay_as_they_are_bit_by_bit(grown, tmp_path):
    _, new, config = grown
    path = train(config, new, tmp_path / "trained", train_only=["sky"])
    for dataset in ("street", "park"):
        before = detections(new, tmp_path, dataset)
        assert_same(before, detections(path, tmp_path, dataset))
    (before, *_), (after, *_) = (detections(p, tmp_path, "sky") for p in (new, path))
    assert not np.array_equal(before.boxes, after.boxes)
    first, last = state_of(new), state_of(path)
    changed = {}
    for key, tensor in first.items():
        rows = (tensor != last[key]).reshape(len(tensor) if tensor.dim() else 1, -1)
        if rows.any():
            changed[key] = rows.any(1).nonzero().flatten().tolist()
    heads = {key for key in changed if "cls_branches" in key or "label_emb" in key}
    assert len(heads) == 4 * 2 + 1
    assert all(changed[key] == [4] for key in heads)  # kite, behind four classes
    others = changed.keys() - heads
    assert others
    assert all(".moe.experts." in k or ".moe.router." in k for k in others)
    # Routers only choose here; all of them learn whose an image is.
    expected = {key: [0, 1, 2] if ".router." in key else [2] for key in others}
    assert {key: changed[key] for key in others} == expected


def test_the_dataset_to_copy_can_be_named(save, make_config, mixture):
    """Park's experts are those of the group green."""
    entries = [mixture[0], {**mixture[1], "group": "green"}]
    stored = DetectorCheckpoint.read(str(save(entries)))
    cfg = Config.fromfile(make_config([*entries, mixture[2]], name="grown"))
    for like, source in (("park", "green"), ("street", "street"), ("none", None)):
        grown = add_datasets(stored, copy.deepcopy(cfg), like=like)
        assert grown.sources.get("sky") == source
        for key in (k for k in grown.state if k.endswith("up_ELD")):
            maps = dict(street=stored.state[key][0], green=stored.state[key][1])
            expected = maps.get(source, torch.zeros_like(maps["green"]))
            assert torch.equal(grown.state[key][2], expected)


GATE = """
from damex.moe import TopKGate
from damex.registry import MODELS

@MODELS.register_module()
class GateOfTheUser(TopKGate):
    pass
"""


def test_classes_of_the_user_need_trust(
    save, make_config, mixture, tmp_path, monkeypatch, capsys
):
    module, kind = "gate_of_the_user", "GateOfTheUser"
    (tmp_path / f"{module}.py").write_text(GATE)
    monkeypatch.syspath_prepend(tmp_path)
    lines = (
        f"custom_imports = dict(imports=['damex.registry', {module!r}])\n"
        f"moe = dict(gate=dict(type={kind!r}))"
    )

    old = save(mixture[:2], moe="damex", extra=lines)
    for trust, status in ((["--trust"], 0), ([], 2)):
        del sys.modules[module], MODELS.module_dict[kind]  # as in a new process
        config = make_config(mixture, name="grown", moe="damex", extra=lines)
        out = str(tmp_path / f"{status}.pth")
        words = ["grow", str(old), str(config), "--like", "park", "--out", out]
        assert main([*words, *trust]) == status
    said = capsys.readouterr().err
    assert f"type={kind!r}, which is not among the types of the slot gate" in said


def test_the_config_may_spread_experts_over_processes(save, make_config, mixture):
    stored = DetectorCheckpoint.read(str(save(mixture[:2])))
    spread = "moe = dict(expert_parallel=3)"
    cfg = Config.fromfile(make_config(mixture, name="grown", extra=spread))
    grown = add_datasets(stored, cfg, like="park")
    assert grown.config.model.moe.expert_parallel == 3
    assert "moe.expert_parallel" in grown.alone_problem
    assert all(len(v) == 3 for k, v in grown.state.items() if k.endswith("up_ELD"))


def test_a_mixture_that_does_not_extend_the_checkpoint_is_rejected(
    save, make_config, mixture
):
    stored = DetectorCheckpoint.read(str(save(mixture[:2])))
    street, park, sky = mixture
    toy = {**park, "rename": {"car": "toy car"}}
    for entries, like, words in (
        ([street, park], "auto", "no other datasets than"),
        ([park, sky], "auto", "trained on 'street', which the config's"),
        ([street, {**park, "group": "x"}, sky], "auto", "is of the group 'park' in"),
        ([street, toy, sky], "auto", "class 'car' of dataset 'park' is 'car' in"),
        (mixture, "pork", "did you mean 'park'"),
    ):
        cfg = Config.fromfile(make_config(entries, name="grown"))
        with pytest.raises(ConfigError, match=words) as caught:
            add_datasets(stored, cfg, like=like)
        assert "\n" not in str(caught.value)


def test_a_fixed_number_of_experts_is_refused(save, make_config, mixture):
    moe = "moe = dict(num_experts=4)"
    stored = DetectorCheckpoint.read(str(save(mixture[:2], extra=moe)))
    cfg = Config.fromfile(make_config(mixture, name="grown", extra=moe))
    with pytest.raises(ConfigError, match="has 2 experts per layer in the"):
        add_datasets(stored, cfg)


def test_experts_of_nobody_keep_their_number(save, make_config, mixture):
    """By itself it would follow that of the datasets."""
    stored = DetectorCheckpoint.read(str(save(mixture[:2], moe="vanilla")))
    options = dict(name="grown", moe="vanilla")
    cfg = Config.fromfile(make_config(mixture, **options))
    with pytest.raises(ConfigError, match=r"no dataset .* set moe\.num_experts=2\."):
        add_datasets(stored, cfg, like="park")
    fixed = "moe = dict(num_experts=2)"
    cfg = Config.fromfile(make_config(mixture, extra=fixed, **options))
    grown = add_datasets(stored, cfg)  # nothing to be like: auto looks at no image
    assert grown.new_classes == ("kite",)
    assert grown.sources == {}
    experts = [key for key in stored.state if ".moe." in key and "group_" not in key]
    assert experts
    assert all(torch.equal(grown.state[key], stored.state[key]) for key in experts)


BALANCED = "renormalize=True, balance=dict(type='BiasBalancer')"


@pytest.mark.parametrize(
    ("moe", "gate", "problem"),
    [
        ("damex", "k=1", "the weight of an expert depends on all others"),
        ("damex", "k=2, renormalize=True", "not chosen within a dataset alone"),
        ("damex", BALANCED, "not chosen within a dataset alone"),
    ],
)
def test_gates_that_mix_datasets_are_named(
    save, make_config, mixture, moe, gate, problem
):
    each = 2 if "balance" in gate else 1  # alone, an expert cannot be outvoted
    extra = f"moe = dict(num_experts={{}}, gate=dict({gate}))"
    stored = DetectorCheckpoint.read(
        str(save(mixture[:2], moe=moe, extra=extra.format(2 * each)))
    )
    options = dict(name="grown", moe=moe, extra=extra.format(3 * each))
    cfg = Config.fromfile(make_config(mixture, **options))
    notes = add_datasets(stored, cfg, like="park").notes
    assert problem in " ".join(notes)
