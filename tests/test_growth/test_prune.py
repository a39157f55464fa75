"""A detector without a dataset, whose other datasets stay as they were."""

import pytest
import torch
from mmengine.config import Config

from damex.__main__ import main
from damex.engine.cli import build_runner
from damex.engine.config import label_space_of, resolve_config
from damex.errors import ConfigError
from damex.growth.prune import drop_datasets
from damex.inference import Predictor
from damex.inference.stored import StoredDetector
from tests.test_growth.test_grow import assert_same, detections

OWNERS = ("street", "street", "park", "sky")  # of four experts


@pytest.fixture
def pruned(save, mixture, tmp_path, capsys):
    """Paths of the old checkpoint and the new one, and what the command says."""
    old = save(mixture)
    out = tmp_path / "pruned.pth"
    capsys.readouterr()
    assert main(["prune", str(old), "--drop", "park", "--out", str(out)]) == 0
    return old, out, capsys.readouterr().out


def test_detections_of_the_others_are_the_same(pruned, tmp_path):
    old, new, said = pruned
    for dataset in ("street", "sky"):
        before = detections(old, tmp_path, dataset)
        assert sum(len(one.scores) for one in before) > 100
        assert_same(before, detections(new, tmp_path, dataset), exactly=False)
    predictor = Predictor(new, device="cpu")
    assert predictor.classes == ("car", "person", "bus", "kite")  # no dog
    assert "datasets: street, sky; classes: 4; gone: dog" in said


def test_a_config_without_a_mixture_stays_without(save, mixture):
    """As after a training whose config names the datasets in its loaders."""
    stored = StoredDetector.read(str(save(mixture)))
    del stored.config["mixture"]
    config = drop_datasets(stored, ["park"]).config
    assert "mixture" not in config
    assert label_space_of(resolve_config(config)).dataset_names == ("street", "sky")


def test_what_a_training_started_from_is_left_out(save, mixture):
    stored = StoredDetector.read(str(save(mixture)))
    stored.config.update(load_from="old.pth", resume=True, train_only=["park"])
    config = drop_datasets(stored, ["park"]).config
    assert not {"load_from", "resume", "train_only"} & config.keys()


def test_a_class_alone_has_fewer_answers_than_queries(
    save, mixture, make_coco_dataset, tmp_path
):
    """50 queries and 1 class are 50 answers, not the 100 that the config asks for."""
    sky = make_coco_dataset(tmp_path / "high" / "sky", classes=["kite"], num_images=4)
    old = save([*mixture[:2], sky])
    out = str(tmp_path / "out.pth")
    assert main(["prune", str(old), "--drop", "street", "park", "--out", out]) == 0
    before, after = (detections(path, tmp_path, "sky") for path in (old, out))
    assert len(after[0].scores) == 50
    assert_same(before, after, exactly=False)


@pytest.mark.slow
def test_it_is_tested_and_trained_with_the_config_beside_it(pruned, tmp_path):
    _, new, _ = pruned
    cfg = Config.fromfile(new.with_suffix(".py"))
    assert [entry["name"] for entry in cfg.mixture] == ["street", "sky"]
    cfg.work_dir = str(tmp_path / "tested")
    cfg.load_from = str(new)
    metrics = build_runner(cfg).test()
    assert {"mixture/street/AP", "mixture/sky/AP"} <= metrics.keys()
    cfg.train_cfg.max_epochs = 1
    build_runner(cfg).train()


@pytest.mark.parametrize(
    ("drop", "left"), [(["street", "sky"], 1), (["street"], 2), (["park"], 3)]
)
def test_experts_by_the_dataset_are_counted_again(save, mixture, drop, left):
    """Street has two of the four."""
    old = save(mixture, extra="moe = dict(num_experts=4)")
    pruned = drop_datasets(StoredDetector.read(str(old)), drop)
    assert pruned.config.model.moe.num_experts == left
    assert pruned.config.model.num_groups == 3 - len(drop)
    (up, *_) = (key for key in pruned.state if key.endswith("up_ELD"))
    given = StoredDetector.read(str(old)).state[up]
    rows = [row for row, name in enumerate(OWNERS) if name not in drop]
    assert torch.equal(pruned.state[up], given[rows])


def test_copies_of_an_ffn_in_parts_are_counted_again(save, mixture, tmp_path):
    """Eight copies are three, three and two."""
    old = save(mixture, moe="damex_shared_private")
    pruned = drop_datasets(StoredDetector.read(str(old)), ["park"])
    assert pruned.config.model.moe.fine_grained.copies == 5


REFUSALS = {
    "unknown": ({}, ["pork"], "did you mean 'park'"),
    "all": ({}, ["street", "park", "sky"], "names all datasets"),
    "nobody's": (dict(moe="vanilla"), ["park"], "belong to no dataset"),
}


@pytest.mark.parametrize(("options", "drop", "words"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_dropped_is_refused(save, mixture, options, drop, words):
    stored = StoredDetector.read(str(save(mixture, **options)))
    with pytest.raises(ConfigError, match=words) as caught:
        drop_datasets(stored, drop)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_without_a_mixture_is_refused(save, mixture, tmp_path, capsys):
    old = save(mixture)
    content = torch.load(old, weights_only=False)
    content["meta"]["dataset_meta"] = dict(classes=("car",))
    torch.save(content, old)
    out = str(tmp_path / "out.pth")
    assert main(["prune", str(old), "--drop", "park", "--out", out]) == 2
    assert "is of a training without a mixture" in capsys.readouterr().err
