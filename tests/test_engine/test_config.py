import copy
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
from mmdet.registry import DATASETS
from mmengine.config import Config
from mmengine.runner import Runner

from damex.config_files import KEYS, PlainConfig, merge_options, read_config
from damex.datasets.label_space import LabelSpace
from damex.datasets.spec import parse_mixture
from damex.engine.config import resolve_config
from damex.errors import ConfigError
from damex.inference.trust import read_literals
from tests.conftest import CONFIGS, shipped_configs

MOE = dict(num_experts=2, gate=dict(type="TopKGate", k=1))


def loader(split, **dataset):
    return dict(
        batch_size=1, dataset=dict(type="MixtureDataset", split=split, **dataset)
    )


def config(mixture, **changes):
    values = dict(
        mixture=mixture,
        model=dict(type="MoEDINO", bbox_head=dict(type="DINOHead", num_classes=None)),
        train_dataloader=loader("train"),
        val_dataloader=loader("val"),
        test_dataloader=None,
    )
    return Config(copy.deepcopy({**values, **changes}))


def test_mixture_fills_in_what_follows_from_it(two_datasets):
    cfg = resolve_config(config(two_datasets, moe=MOE))
    # car, person, bus + dog
    assert cfg.model.bbox_head.num_classes == 4
    assert cfg.model.num_groups == 2
    assert cfg.model.moe == MOE
    for name in ("train_dataloader", "val_dataloader"):
        dataset = cfg[name].dataset
        assert [entry["name"] for entry in dataset.datasets] == ["street", "park"]
        space = LabelSpace.from_metainfo(dataset.label_space)
        assert space.classes == ("car", "person", "bus", "dog")
    assert cfg.test_dataloader is None


def test_the_config_passed_in_is_not_changed(two_datasets):
    cfg = config(two_datasets, moe=MOE)
    before = copy.deepcopy(cfg.to_dict())
    resolve_config(cfg)
    assert cfg.to_dict() == before


@pytest.mark.parametrize("moe", [MOE, None])
def test_written_config_can_be_read_and_resolved_again(two_datasets, tmp_path, moe):
    # mmengine writes the resolved config into work_dir; people start from that file.
    two_datasets[1]["rename"] = dict(dog="traffic light's dog", car="the car's car")
    once = resolve_config(config(two_datasets, moe=moe, label_space="partitioned"))
    once.dump(tmp_path / "written.py")
    again = resolve_config(Config.fromfile(tmp_path / "written.py"))
    assert again.to_dict() == once.to_dict()


ODD_NAMES = (
    *("driver's license", 'a "quoted" name', "back\\slash", "new\nline", "tab\t"),
    *(
        "{{{ fileDirname }}}",
        "a': 1, 'b",
        "{{ fileDirname }}",
        "{{$HOME:/}}",
        "{{ _base_.model }}",
        "{{{{",
        "\\{{",
    ),
    *("übung 名前", "ﬁsh", "\u202eright", "\udcff", "", "class", "__debug__", "items"),
)


def test_any_text_reads_back_from_a_written_config(tmp_path):
    content = dict(
        names=list(ODD_NAMES),
        mapping=dict(zip(ODD_NAMES, reversed(ODD_NAMES), strict=True)),
        order=dict(zebra=1, ape={2: (3,), "b": [()]}),
        numbers=[float("inf"), -float("inf"), 1e-5, True, None, -1],
    )
    cfg = PlainConfig(content)
    cfg.dump(tmp_path / "it's {{ fileBasename }}.py")
    again = Config.fromfile(tmp_path / "it's {{ fileBasename }}.py").to_dict()
    assert again == read_literals(cfg.pretty_text, where="a.pth") == content
    assert list(again["order"]) == ["zebra", "ape"]  # the order of classes, perhaps


def test_values_of_libraries_are_written_as_plain_ones():
    cfg = PlainConfig(dict(lr=np.float32(0.5), root=Path("a"), kind=Path))
    plain = read_literals(cfg.pretty_text, where="a.pth")
    assert plain == dict(lr=0.5, root="a", kind=f"{Path.__module__}.Path")
    for value, error in (({2}, r"=\{2\} is of type set"), (np.nan, " is NaN, which")):
        cfg = PlainConfig(dict(model=dict(steps=[1, value])))
        with pytest.raises(ConfigError, match=rf"^model.steps\[1\]{error}"):
            cfg.dump()


def test_the_keys_of_a_config_are_those_of_mmengine_and_more():
    assert {*inspect.signature(Runner).parameters} - {"cfg"} <= KEYS


def test_label_space_and_groups_of_the_config_are_used(two_datasets):
    cfg = resolve_config(config(two_datasets, label_space="partitioned"))
    assert cfg.model.bbox_head.num_classes == 6
    assert cfg.train_dataloader.dataset.label_space["classes"][0] == "street/car"
    for entry in two_datasets:
        entry["group"] = "outdoor"
    model = dict(dataset_head=dict())
    model = resolve_config(config(two_datasets, moe=None, model=model)).model
    assert model.label_coverage == dict(labels=[[0, 1, 2], [0, 1, 3]], groups=[0, 0])
    assert resolve_config(config(two_datasets, moe=MOE)).model.num_groups == 1


def test_evaluation_on_one_dataset_keeps_the_labels_of_the_mixture(two_datasets):
    cfg = config(two_datasets, val_dataloader=loader("val", datasets=two_datasets[1:]))
    dataset = resolve_config(cfg).val_dataloader.dataset
    assert [entry["name"] for entry in dataset.datasets] == ["park"]
    assert dataset.label_space["classes"] == ("car", "person", "bus", "dog")


def test_mixture_inside_of_a_wrapper_is_found(two_datasets):
    wrapped = loader("train")
    wrapped["dataset"] = dict(type="RepeatDataset", dataset=wrapped["dataset"])
    cfg = resolve_config(config(two_datasets, train_dataloader=wrapped))
    assert "label_space" not in cfg.train_dataloader.dataset
    assert len(cfg.train_dataloader.dataset.dataset.datasets) == 2
    wrapped["dataset"].update(type="MultiImageMixDataset", pipeline=[dict(type="M")])
    with pytest.raises(ConfigError, match=r"MultiImageMixDataset around a Mixture"):
        resolve_config(config(two_datasets, train_dataloader=wrapped))


@pytest.fixture
def resolved(two_datasets, tmp_path):
    """A config as a training leaves it in its work dir; its training files are gone."""
    two_datasets[1]["rename"] = dict(dog="bus")
    resolve_config(config(two_datasets)).dump(tmp_path / "resolved.py")
    for entry in two_datasets:
        Path(entry["data_root"], "train.json").unlink()
    return Config.fromfile(tmp_path / "resolved.py")


def test_a_resolved_config_evaluates_without_the_training_files(resolved):
    again = resolve_config(resolved)
    assert again.to_dict() == resolved.to_dict()
    dataset = DATASETS.build(again.val_dataloader.dataset)
    assert dataset.sizes == [5, 3]
    assert dataset.metainfo["classes"] == ("car", "person", "bus")


def test_options_reach_the_mixture_everywhere_in_a_written_config(resolved):
    resolved.test_dataloader = copy.deepcopy(resolved.val_dataloader)
    resolved.test_dataloader.dataset.datasets.pop()  # on purpose
    weights = {"mixture.0.weight": 5.0, "mixture.1.weight": 1.0}
    merge_options(resolved, {**weights, "train_dataloader.batch_size": 3})
    again = resolve_config(resolved)
    for loader in ("train_dataloader", "val_dataloader"):
        rows = again[loader].dataset.datasets
        assert [row.get("weight") for row in rows] == [5.0, 1.0]
        assert rows == again.mixture
    (alone,) = again.test_dataloader.dataset.datasets
    assert "weight" not in alone
    merge_options(resolved, {"mixture.1.group": "street"})
    with pytest.raises(ConfigError, match="does not lead to the label_space that the"):
        resolve_config(resolved)


@pytest.mark.parametrize(
    "change",
    [
        lambda cfg: cfg.mixture[1].pop("rename"),
        lambda cfg: cfg.mixture[1].update(group="street"),
        lambda cfg: cfg.mixture[1].update(name="park2"),
        lambda cfg: cfg.mixture[1].update(classes=["person", "dog"]),
        lambda cfg: cfg.mixture.reverse(),
        lambda cfg: cfg.update(label_space="partitioned"),
    ],
)
def test_a_mixture_that_left_its_label_space_is_refused(resolved, change):
    change(resolved)
    with pytest.raises(ConfigError, match="does not lead to the label_space that the"):
        resolve_config(resolved)


def test_an_annotation_file_is_parsed_once(two_datasets, monkeypatch):
    parsed = []
    parse = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed.append(1) or parse(text))
    cfg = resolve_config(config(two_datasets))
    DATASETS.build(cfg.train_dataloader.dataset)
    assert len(parsed) == 2


def test_config_without_mixture_stays_as_it_is():
    cfg = Config(dict(model=dict(type="DINO", bbox_head=dict(num_classes=80))))
    assert resolve_config(cfg).to_dict() == cfg.to_dict()


def test_the_number_of_classes_may_be_typed_if_it_is_right(two_datasets):
    model = dict(bbox_head=dict(num_classes=4))
    assert resolve_config(config(two_datasets, model=model)).model == model
    model["bbox_head"]["num_classes"] = 80
    with pytest.raises(ConfigError, match=r"is 80, but .* of street, park has 4 class"):
        resolve_config(config(two_datasets, model=model))


# --- options that look at which dataset annotates which class -------------------------


@pytest.mark.parametrize(
    "option",
    [
        dict(ignore_unannotated_classes=True),
        dict(label_prior=dict(source="head")),
        dict(dataset_head=dict()),
    ],
    ids=lambda option: next(iter(option)),
)
def test_the_detector_hears_which_dataset_annotates_what(
    two_datasets, tmp_path, option
):
    cfg = config(two_datasets)
    cfg.model.update(option)
    once = resolve_config(cfg)
    # street: car, person, bus; park: person, dog, car
    assert once.model.label_coverage == dict(
        labels=[[0, 1, 2], [0, 1, 3]], groups=[0, 1]
    )
    once.dump(tmp_path / "written.py")
    again = resolve_config(Config.fromfile(tmp_path / "written.py"))
    assert again.to_dict() == once.to_dict()


def test_options_that_are_off_leave_the_config_as_it_was(two_datasets):
    cfg = config(two_datasets)
    cfg.model.update(ignore_unannotated_classes=False, label_prior=None)
    assert "label_coverage" not in resolve_config(cfg).model


# --- the top-level moe ----------------------------------------------------------------


FILES = CONFIGS / "_base_" / "moe"


@pytest.mark.parametrize(
    ("moe", "expected"),
    [
        (dict(moe=None), dict(moe=None)),
        ({}, {}),
        (
            dict(moe=str(FILES / "damex.py")),
            dict(moe=Config.fromfile(FILES / "damex.py").moe, num_groups=2),
        ),
        (dict(moe=str(FILES / "dense.py")), dict(moe=None)),
    ],
    ids=["dense", "nothing", "file", "dense file"],
)
def test_the_top_level_moe_goes_into_the_model(two_datasets, moe, expected):
    model = resolve_config(config(two_datasets, **moe)).model
    assert {k: model[k] for k in ("moe", "num_groups") if k in model} == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(moe="configs/_base_/moe/damx.py"), "no config file .*mean 'damex'"),
        (dict(moe=str(CONFIGS / "_base_/runtime.py")), "runtime.py sets no moe=dict"),
        (dict(moe=MOE, model=dict(moe=None)), "both moe and model.moe are set; keep"),
    ],
)
def test_a_moe_that_is_not_there_or_twice_is_refused(two_datasets, changes, words):
    with pytest.raises(ConfigError, match=words):
        resolve_config(config(two_datasets, **changes))


def test_moe_without_mixture_still_reaches_the_model():
    cfg = resolve_config(Config(dict(model=dict(type="MoEDINO"), moe=MOE)))
    assert cfg.model.moe == MOE
    assert "moe" not in cfg


# --- the configs that come with the project -------------------------------------------


@pytest.mark.parametrize(
    "path",
    [p for p in shipped_configs(complete=False) if "mixture = [" in p.read_text()],
    ids=lambda path: path.stem,
)
def test_bundled_mixtures_are_in_order(path, make_coco_dataset, tmp_path, monkeypatch):
    entries = [dict(e) for e in Config.fromfile(path).mixture]
    for entry in entries:
        if "root" in entry:  # these look at what lies there
            assert not Path(entry["root"]).is_absolute()
            make_coco_dataset(tmp_path / entry["root"], classes=["a"], num_images=1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for spec in parse_mixture(entries):
        for split in ("train", "val", "test"):
            assert "type" in spec.dataset_config(split)


def test_a_label_file_goes_into_the_written_config(two_datasets, tmp_path):
    """So that a work directory says for itself what its labels mean."""
    content = dict(version=1, datasets=dict(park=dict(dog="hound", car=None)))
    path = tmp_path / "labels.json"
    path.write_text(json.dumps(content))
    once = resolve_config(config(two_datasets, label_space=str(path)))
    assert once.model.bbox_head.num_classes == 4
    assert once.val_dataloader.dataset.label_space["classes"][3] == "hound"
    once.dump(tmp_path / "written.py")
    path.unlink()
    for entry in two_datasets:
        Path(entry["data_root"], "train.json").unlink()
    again = resolve_config(Config.fromfile(tmp_path / "written.py"))
    assert again.to_dict() == once.to_dict()
    again.label_space.datasets.park.dog = "wolf"
    with pytest.raises(ConfigError, match="does not lead to the label_space that the"):
        resolve_config(again)


def test_homogeneous_batches_follow_the_loader(two_datasets):
    sampler = dict(type="MixtureSampler", homogeneous_batches=True)
    train = {**loader("train"), "batch_size": 3, "sampler": sampler}
    cfg = resolve_config(config(two_datasets, train_dataloader=train))
    assert cfg.train_dataloader.sampler.batch_size == 3
    train["batch_sampler"] = dict(type="AspectRatioBatchSampler")
    with pytest.raises(ConfigError, match="AspectRatioBatchSampler makes other batc"):
        resolve_config(config(two_datasets, train_dataloader=train))


def test_backbones_of_transformers_learn_at_a_tenth():
    keys = read_config("configs/hf/finetune_640.py").optim_wrapper.paramwise_cfg
    for part in ("conv_encoder", "backbone"):  # of DEIMv2, and of the others
        name = f"detr.model.{part}.model.embedder.stem1.convolution.weight"
        rates = [o.lr_mult for key, o in keys.custom_keys.items() if key in name]
        assert rates == [0.1], name
