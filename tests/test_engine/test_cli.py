"""Mistakes of a user: one clear line, exit status 2, nothing overwritten."""

import io
import json
import logging
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from mmdet.registry import MODELS
from mmengine.config import Config
from mmengine.device import utils

from damex.__main__ import main
from damex.config_files import find_config, merge_options
from damex.engine.config import (
    build_runner,
    label_space_of,
    load_config,
    resolve_config,
)
from damex.errors import ConfigError
from damex.models.insertion import moe_blocks
from damex.options import option_of, parse_options
from damex.workbench.cli import train as commands

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(capsys):
    """Run a command in this process; returns its exit status and what it said."""

    def call(command, *arguments):
        status = main([command, *map(str, arguments)])
        return status, capsys.readouterr().err

    return call


@pytest.fixture
def refuse(run):
    """Run a command that ends in one line, which has all of `words`."""

    def call(words, command, *arguments):
        status, said = run(command, *arguments)
        assert status == 2
        (line,) = said.strip().splitlines()
        assert line.startswith("error: ")
        for word in words:
            assert word in line

    return call


def path_in_street(entries, name):
    return Path(entries[0]["data_root"]) / name


def box_outside_of_its_image(entries):
    path = path_in_street(entries, "train.json")
    document = json.loads(path.read_text())
    document["annotations"][0].update(bbox=[500, 2, 10, 10])
    path.write_text(json.dumps(document))


MISTAKES = {
    "annotation path": (
        lambda entries: entries[0].update(train="trian.json"),
        ("dataset 'street'", "trian.json", "Correct data_root"),
    ),
    "box outside of its image": (
        box_outside_of_its_image,
        (
            *("dataset 'street'", "annotation 1 of image '0.png'", "[500, 2, 10, 10]"),
            "--cfg-options train_dataloader.dataset.on_bad_box=drop",
        ),
    ),
    "image that is text": (
        lambda entries: path_in_street(entries, "images/0.png").write_text("not"),
        ("images/0.png (3 bytes) cannot be decoded", "Replace the"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_the_data(write_config, two_datasets, refuse, tmp_path, name):
    mistake, words = MISTAKES[name]
    mistake(two_datasets)
    refuse(words, "train", write_config(mixture=two_datasets))
    assert not list(tmp_path.rglob("*.pth"))


def test_a_missing_image_in_a_worker_is_one_line_too(
    write_config, two_datasets, refuse
):
    path_in_street(two_datasets, "images/0.png").unlink()
    extra = "train_dataloader['num_workers'] = 1\ndata_check = 'off'"
    refuse(["images/0.png does not exist"], "train", write_config(extra=extra))


def test_what_cannot_run_is_named(write_config, refuse, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "get_device", lambda: "cpu")
    monkeypatch.chdir(tmp_path)
    config = write_config(extra="auto_scale_lr = None")
    refuse(["is missing in"], "test", config, tmp_path / "none.pth")
    refuse(["base_batch_size"], "train", config, "--auto-scale-lr")
    refuse(["--amp needs a GPU"], "train", config, "--amp")
    refuse(["name of a folder, got ''"], "train", config, "--work-dir", "")
    refuse(["cannot be written"], "train", config, "--work-dir", config)
    assert not list(tmp_path.glob("2*"))  # no log in the present folder


def test_a_folder_in_place_of_a_config_is_for_data(refuse, tmp_path, monkeypatch):
    words = [f"{tmp_path} is a folder", f"damex train --data {tmp_path}"]
    refuse(words, "train", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").mkdir()  # as in work_dirs
    assert find_config("quickstart").is_file()


@pytest.fixture
def start(two_datasets, capsys, monkeypatch):
    """Start a training of folders, without a detector; returns what it printed."""

    def call(*words, rank=0):
        def build(cfg):
            cfg = resolve_config(cfg)
            return SimpleNamespace(cfg=cfg, rank=rank, train=lambda: None)

        monkeypatch.setattr(commands, "build_runner", build)
        assert main(["train", *words]) == 0
        return capsys.readouterr().out.splitlines()

    return call


def test_a_training_of_folders_names_merged_and_missing_classes(start, tmp_path):
    folders = [str(tmp_path / "street"), f"green={tmp_path / 'park'}"]
    lines = start("--data", *folders)
    assert lines[:3] == [
        "'car', 'person' are each one class of street and green",
        "street does not annotate: dog",
        "green does not annotate: bus",
    ]
    assert lines[3].endswith(f"damex data labels {folders[0]} {folders[1]}")
    assert "docs/guides/classes.md" in lines[4]
    assert start("--data", *folders, rank=1) == []
    assert start("--data", folders[0]) == []


def test_datasets_are_compared_as_they_are_trained(start, tmp_path, monkeypatch):
    """Some cannot be read without an option."""
    seen = []
    monkeypatch.setattr(commands, "share_experts", lambda rows: seen.extend(rows) or [])
    option = "mixture.0.classes=[car]"
    start("--data", str(tmp_path / "street"), "--cfg-options", option)
    assert seen[0]["classes"] == ["car"]


def test_it_names_the_classes_of_the_training(start, tmp_path):
    """Those of a label file, not of the folders."""
    labels = dict(street=dict(bus="car"), park=dict(dog=None, person="walker"))
    path = tmp_path / "labels.json"
    path.write_text(json.dumps(dict(version=1, datasets=labels)))
    folders = [str(tmp_path / "street"), str(tmp_path / "park")]
    lines = start("--data", *folders, "--cfg-options", f"label_space={path}")
    assert lines[:3] == [
        "'car' (street: 'car', 'bus') is one class of street and park",
        "street does not annotate: walker",
        "park does not annotate: person",
    ]


@pytest.fixture
def untrained(tmp_path):
    """Save a checkpoint of a config's detector as training would, without training."""

    def save(config):
        cfg = resolve_config(Config.fromfile(config))
        path = tmp_path / "untrained.pth"
        meta = dict(dataset_meta=label_space_of(cfg).to_metainfo())
        detector = MODELS.build(cfg.model)
        detector.init_weights()
        torch.save(dict(meta=meta, state_dict=detector.state_dict()), path)
        return path

    return save


def test_checkpoints_of_other_detectors_are_refused(
    write_config, two_datasets, untrained, refuse
):
    config = write_config()
    other = write_config(mixture=two_datasets[::-1], name="other")
    dense = untrained(write_config(extra="moe = None", name="dense"))
    refuse(["of another detector"], "test", config, dense)
    checkpoint = untrained(config)
    words = ["was trained with other labels; classes: "]
    refuse(words, "test", other, checkpoint)
    more = ("--cfg-options", "moe.num_experts=4")
    words = ["have another shape (such as decoder.layers.0.ffn.moe"]
    refuse(words, "test", config, checkpoint, *more)
    refuse(words, "train", config, "--resume", checkpoint, *more)


@pytest.mark.parametrize("command", ["train", "test"])
def test_a_device_that_cannot_be_used_is_named(write_config, refuse, command):
    words = [command, write_config(), *["none.pth"] * (command == "test"), "--device"]
    refuse(["--device must be cpu, cuda or cuda:N, got 'gpu'"], *words, "gpu")
    count = torch.cuda.device_count()
    refuse([f"{count} GPUs are seen here"], *words, f"cuda:{count}")


def test_a_dense_checkpoint_of_other_classes_starts_a_training(
    write_config, two_datasets, untrained, capsys
):
    """One sentence says what goes by name; the FFNs become experts as ever."""
    checkpoint = untrained(write_config(extra="moe = None", name="dense"))
    two_datasets[0]["classes"] = ["car"]
    runner = build_runner(Config.fromfile(write_config(mixture=two_datasets)))
    log = io.StringIO()
    runner.logger.addHandler(logging.StreamHandler(log))
    runner.load_checkpoint(str(checkpoint))
    assert (
        "untrained.pth: classes: loaded by name: car, person, dog; only in the "
        "checkpoint: 1."
    ) in log.getvalue()
    assert "do not match exactly" not in capsys.readouterr().out


def test_one_dataset_of_the_mixture_can_be_evaluated(
    write_config, two_datasets, untrained, run, tmp_path
):
    """Labels keep the meaning that they have in the whole mixture."""
    config = write_config()
    dataset = f"dict(datasets={two_datasets[1:]!r}, pipeline=test_pipeline)"
    extra = f"test_dataloader = dict(dataset={dataset})"
    one = write_config(extra=extra, name="one")
    status, said = run("test", one, untrained(config))
    assert (status, said) == (0, "")
    summary = json.loads((tmp_path / "work" / "test_summary.json").read_text())
    assert list(summary["datasets"]) == ["park"]


def test_an_evaluation_paints_images_of_each_dataset_on_the_named_device(
    write_config, untrained, run, tmp_path, monkeypatch
):
    monkeypatch.setattr(utils, "DEVICE", "cuda")  # as if there was one
    config = write_config()
    folder, dump = tmp_path / "painted", tmp_path / "found.pkl"
    options = ("--show-dir", folder, "--out", dump, "--device", "cpu")
    assert run("test", config, untrained(config), *options) == (0, "")
    assert utils.DEVICE == "cpu"
    assert len(list(folder.rglob("street/*.png"))) == 5
    assert len(list(folder.rglob("park/*.png"))) == 3
    assert dump.is_file()


def test_a_variable_that_was_read_with_the_config_file_is_refused():
    cfg = Config(dict(test_cfg=dict(size=8), size=8))
    with pytest.raises(ConfigError, match="size=9 changes nothing: size is a variable"):
        merge_options(cfg, {"size": 9})


@pytest.mark.parametrize("inside", [True, False])
def test_options_for_experts_change_the_file_of_the_config_or_of_an_option(inside):
    file = str(ROOT / "configs/_base_/moe/damex.py")
    cfg = Config(dict(moe=file if inside else None, load_from=None))
    options = {"moe.gate.k": 2, "load_from": "a.pth"} | (
        {} if inside else {"moe": file}
    )
    merge_options(cfg, options)
    assert cfg.moe.gate == dict(type="TopKGate", k=2, noise="gaussian")
    assert cfg.load_from == "a.pth"
    assert options.get("moe", file) == file


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"mixture.0.train.type": "VOCDataset"},
            r"mixture.0.train is 'train.json' in the config, and type of it .*set m",
        ),
        (
            {"mixture.7.name": "b"},
            r"^mixture.7.name: mixture is \[.* and 7 of it .*\.0\.",
        ),
        (
            {"mixture.a.name": "b"},
            r"^mixture.a.name: mixture is \[.* and a of it .*\.0\.",
        ),
        ({"mixture.0": "b"}, r"^mixture.0: mixture is \[.* set mixture as a whole"),
        ({"model": 3, "model.type": "X"}, "model model.type set one field as a whole"),
        ({"moe.gate.k": 2}, r"moe.gate.k=2: moe is None, a dense"),
    ],
)
def test_options_that_cannot_be_merged_end_in_one_line(options, words):
    cfg = Config(dict(moe=None, mixture=[dict(name="a", train="train.json")]))
    with pytest.raises(ConfigError, match=words):
        merge_options(cfg, options)


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("train_pipeline=[1,2", r"brackets of 'train_pipeline=.1,2' .* key=.a,b."),
        ("a=[1]]", "the brackets of"),
        ("a=[1,2)", "the brackets of"),
        ("a={x}", "the brackets of"),
        ("a=dict(x)", "the brackets of"),
        ("a='x", "the quotes of"),
        ("=3", "'=3' is not key=value"),
    ],
)
def test_options_are_collected_or_end_in_one_line(option, words):
    given = ["a=1", "b=[x,(2,)]", "c=,"]
    assert parse_options(given) == {"a": 1, "b": ["x", (2,)], "c": [""]}
    with pytest.raises(ConfigError, match=words):
        parse_options(["a=1", option])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("/my dir/e, f.pth", ["/my dir/e", "f.pth"]),
        ("'/my dir/e, f.pth'", "/my dir/e, f.pth"),
        ("/my dir (1,2)/e.pth", "/my dir (1,2)/e.pth"),
        ("[driver's license, traffic light]", ["driver's license", "traffic light"]),
        ("1e3", 1000.0),
        ("'1e3'", "1e3"),
        ("TRUE", True),
        ("'true'", "true"),
        ("{'type': 'X', a: [1, (2,)]}", {"type": "X", "a": [1, (2,)]}),
        ("[dict(type='X',a=1)]", [{"type": "X", "a": 1}]),
        ("(a) and (b)", "(a) and (b)"),
        ("()", ()),
    ],
)
def test_values_arrive_as_written(text, value):
    assert parse_options([f"a={text}"]) == {"a": value}


@pytest.mark.parametrize(
    "value",
    [
        *("x,y", "1e3", "true", "None", "", " a ", "driver's license", 'say "hi"'),
        *("[x", "dict(a=1)", "a\\", "C:\\Users", "two\nlines", "café"),
        *(1, -2.5e-7, float("inf"), None, True, [], (), {}, [""], (1,)),
        ["traffic light", "a:b", "1"],
        [{"type": "X", "options": {"rename": {"a=b": "c, d"}}}, [1, (2, "3")]],
        {1: "int", "1": "text"},
    ],
)
def test_options_of_python_arrive_as_they_are(value):
    (found,) = parse_options([option_of("a.b", value)]).values()
    assert (found, type(found)) == (value, type(value))


def test_options_of_other_types():
    assert option_of("a", Path("/my dir")) == "a='/my dir'"
    assert parse_options([option_of("a", np.float32(0.5))]) == {"a": 0.5}
    with pytest.raises(ConfigError, match=r"a=.* is of type set; options are numbers"):
        option_of("a", {1})


def test_a_dict_changes_fields_and_replaces_other_values():
    cfg = Config(dict(model=dict(a=1), load_from=None, mixture=[1]))
    options = {"model": {"b": 2}, "load_from": {"x": 1}, "mixture": {"y": 1}}
    merge_options(cfg, options)
    assert cfg.to_dict() == dict(
        model=dict(a=1, b=2), load_from=dict(x=1), mixture=dict(y=1)
    )


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("dict(imports=['no_such'])", ("'no_such'", "No module named", "PYTHONPATH=")),
        ("dict(imports=[3])", ("cannot be imported",)),
        ("dict(imprts=['x'])", ("custom_imports must be dict(imports=",)),
        ("['no_such']", ("custom_imports must be dict(imports=",)),
    ],
)
def test_modules_that_cannot_be_imported(write_config, refuse, value, words):
    extra = f"custom_imports = {value}".replace("dict(", "dict(_delete_=True, ")
    refuse(words, "train", write_config(extra=extra))


def test_a_config_that_names_no_runner_gets_experts_too(write_config, run, tmp_path):
    config = Config.fromfile(write_config())
    config.pop("runner_type")
    runner = build_runner(config)
    assert len(moe_blocks(runner.model)) > 0


WHOLE = "must be a whole number of 1 or more"
SETTINGS = {
    # misspelt
    "model.type=MoEDNIO": "MoEDNIO is not in the mmdet::model registry",
    "model.num_qeries=5": "unexpected keyword argument 'num_qeries'",
    "model.neck.type=ChanelMapper": "ChanelMapper is not in the mmdet::model registry",
    "train_dataloader.dataset.pipeline.3.prb=1": "RandomFlip.* argument 'prb'.* 'prob'",
    "optim_wrapper.optimizer.type=AdmW": "unknown type 'AdmW'.* 'AdamW'",
    "optim_wrapper.constructor=MuonConstructor": "'MuonOptimWrapperConstructor'",
    "optim_wrapper.optimizer.lrr=1": "AdamW.* unexpected keyword argument 'lrr'",
    "train_cfg.max_epoch=1": "EpochBasedTrainLoop.* unexpected .* 'max_epoch'",
    "load_form=x": "load_form='x'.* nothing reads it.* 'load_from'",
    "train_pipeline.3.prob=1": "changes nothing: train_pipeline is a variable",
    "mixtur=x": "did you mean 'mixture'",
    # impossible
    "model.roi_head.bbox_head.num_classes=80": "roi_head.*is 80.*leave num_classes out",
    "val_evaluator.type=CocoMetric": "reads one annotation file; set val_evaluator=",
    "moe.gate.type=DenseSoftmaxGate": "moe.gate.k = 1.* moe.gate._delete_=True",
    f"moe={ROOT}/configs/_base_/moe/deepmoe_stage2.py": "frozen=True.* load_from=CHECK",
    "moe.num_experts=four": "moe.num_experts.* 1 or more.* 'four'",
    "max_epochs=0": f"max_epochs {WHOLE}, got 0",
    "max_epochs=lots": f"max_epochs {WHOLE}, got 'lots'",
    "train_cfg.max_epochs=0": f"train_cfg.max_epochs {WHOLE}, got 0",
    "train_cfg.val_interval=0": f"train_cfg.val_interval {WHOLE}, got 0",
    "optim_wrapper.optimizer.lr=fast": "lr must be a number of 0 or more, got 'fast'",
    "optim_wrapper.optimizer.lr=-1": "optimizer.lr must be a number of 0 or more",
    "optim_wrapper.optimizer.lr=nan": "a number of 0 or more, got nan",
    "optim_wrapper.clip_grad.max_norm=-1": "max_norm must be a number above 0, got -1",
    "train_dataloader.batch_size=0": "batch_size must be an integer of 1",
    "val_dataloader.batch_size=big": "batch_size must be an integer of 1 or",
    "train_dataloader.num_workers=-1": "an integer of 0 or more, got -1",
    "train_dataloader=None": "must be set, too, with train_cfg and optim_wrapper; or",
    "train_dataloader.dataset.pipeline.2.scale=0": "Resize in a pipeline of train_data",
    "val_dataloader.dataset.pipeline.1.scale=(9,-9)": "scale must be made of numbers",
    "model=None": "model must be a dict, got None",
    "model.image_balance=3": "image_balance must be a number from 0 to 1, got 3",
    "model.num_queries=2": "set model.test_cfg.max_per_img=8.",
    "model.num_queries=many": "num_queries must be an integer of 1 or more, got 'many'",
    "model.decoder.layer_cfg.self_attn_cfg.embed_dims=77": "embed_dim must be divis",
    "model.bbox_head.embed_dims=77": "bbox_head.embed_dims is 77, .* encoder has 64",
    "model.decoder.layer_cfg.ffn_cfg.embed_dims=77": "decoder.*ffn.* is 77, .* has 64",
    "model.neck.out_channels=96": "neck.out_channels is 96, but the encoder has 64",
    "model.backbone.depth=77": "ResNet cannot be built: KeyError: invalid depth 77",
    "model.backbone=None": "should be a dict, .*NoneType",
    "param_scheduler.0.end=-1": "end should be larger than begin",
    "mixture=None": "mixture is None or missing, and train_dataloader has a Mixture",
    "val_evaluator.max_dets=0": "max_dets must be an integer of 1 or more, got 0",
    "data_check=slow": "data_check must be one of",
    "console=verbose": r"console must be one of \('progress', 'full'\), got 'verbose'",
    "log_level=LOUD": r"log_level must be one of \('DEBUG', ",
}


@pytest.mark.parametrize("option", SETTINGS)
def test_a_setting_that_cannot_work_is_named(write_config, run, option):
    extra = "train_dataloader['dataset']['pipeline'] = train_pipeline"
    status, said = run("train", write_config(extra=extra), "--cfg-options", option)
    assert status == 2
    lines = [line for line in said.splitlines() if line and "Warning" not in line]
    assert lines[-1].startswith("error: ")
    assert re.search(SETTINGS[option], lines[-1])
    assert len(lines) <= 2  # a warning of mmengine's, below its place


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.py", "x = undefined_name", ("NameError", "'undefined_name' is not")),
        ("a.py", "x = (", ("SyntaxError",)),
        ("a.json", "[1, 2]", ("AttributeError",)),
        ("a.json", '{"images": []}', ("has to set model",)),
        ("a.txt", "x", ("OSError",)),
    ],
)
def test_a_config_that_cannot_be_read_is_named(tmp_path, refuse, name, text, words):
    (tmp_path / name).write_text(text)
    refuse((name, *words), "train", tmp_path / name)


def test_a_missing_package_is_named(write_config, refuse, monkeypatch):
    for module in ("tensorboardX", "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    backend = "visualizer = dict(name='t', vis_backends=[dict(type='{}')])"
    config = write_config(extra=backend.format("TensorboardVisBackend"))
    refuse(['run "pip install future tensorboard"'], "train", config)


BROKEN = """
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

def scale(rate):
    return rate["value"]

@HOOKS.register_module(force=True)
class Broken(Hook):
    def __init__(self, rate):
        {line}
"""


@pytest.mark.parametrize(
    ("line", "error"),
    [("scale(rate={})", KeyError), ("scale(rat=rate, rate=0)", TypeError)],
)
def test_a_fault_in_a_class_of_the_user_keeps_its_traceback(
    write_config, tmp_path, monkeypatch, run, line, error
):
    name = f"broken_{error.__name__}"
    (tmp_path / f"{name}.py").write_text(BROKEN.format(line=line))
    monkeypatch.syspath_prepend(tmp_path)
    imports = f"custom_imports = dict(imports=['damex.registry', '{name}'])\n"
    hooks = "custom_hooks = [dict(type='Broken', rate=1)]"
    with pytest.raises(error):
        run("train", write_config(extra=imports + hooks))


def test_an_option_imports_modules(write_config, tmp_path, monkeypatch):
    (tmp_path / "named_by_option.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    options = ["custom_imports.imports=[named_by_option]"]
    load_config(str(write_config()), cfg_options=options)
    assert "named_by_option" in sys.modules


@pytest.mark.skipif(not torch.cuda.is_available(), reason="mmengine's AMP needs a GPU")
def test_amp_trains_and_evaluates(write_config, run, tmp_path):
    config = write_config(extra="train_cfg = dict(max_epochs=1)")
    assert run("train", config, "--amp")[0] == 0
    checkpoint = torch.load(tmp_path / "work" / "epoch_1.pth", weights_only=False)
    assert "loss_scaler" in checkpoint["optimizer"]
    assert all(value.isfinite().all() for value in checkpoint["state_dict"].values())
    assert run("test", config, tmp_path / "work" / "epoch_1.pth")[0] == 0


def test_averaged_weights_are_saved_resumed_and_evaluated(write_config, run, tmp_path):
    """mmengine's EMAHook, as mmdet's docs have it."""
    config = write_config(
        extra="custom_hooks = [dict(type='EMAHook', momentum=0.2)]\n"
        "train_cfg = dict(max_epochs=2, val_begin=2)\n"
        "train_dataloader['sampler'] = dict(samples_per_epoch=4)"
    )

    def train(folder, *arguments):
        status, said = run("train", config, "--work-dir", folder, *arguments)
        assert (status, said) == (0, "")
        return torch.load(folder / "epoch_2.pth", "cpu", weights_only=False)

    whole = train(tmp_path / "whole")
    key = "bbox_head.reg_branches.0.0.weight"
    trained = whole["ema_state_dict"][f"module.{key}"]  # mmengine swaps the two
    assert not torch.equal(whole["state_dict"][key], trained)

    resumed = train(
        tmp_path / "resumed", "--resume", tmp_path / "whole" / "epoch_1.pth"
    )
    for name in ("state_dict", "ema_state_dict"):
        assert whole[name].keys() == resumed[name].keys()
        for key, value in whole[name].items():
            assert torch.equal(value, resumed[name][key]), key

    found = [json.loads((tmp_path / "whole" / "summary.json").read_text())]
    for tested in (config, write_config(name="without")):
        arguments = (tmp_path / "whole" / "epoch_2.pth", "--work-dir", tmp_path / "t")
        assert run("test", tested, *arguments)[0] == 0
        found.append(json.loads((tmp_path / "t" / "test_summary.json").read_text()))
    assert found[0]["datasets"] == found[1]["datasets"] == found[2]["datasets"]
