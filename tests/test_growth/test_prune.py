"""A detector of fewer datasets, or of fewer experts.

Other datasets stay as they were.
"""

import json
from pathlib import Path

import pytest
import torch
from mmengine.config import Config

from damex.__main__ import main
from damex.engine.cli import build_runner
from damex.engine.config import label_space_of, resolve_config
from damex.errors import ConfigError
from damex.files import write_json
from damex.growth.prune import drop_datasets, merge_groups
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


def bank(state, start="decoder.layers.0.ffn.moe.experts."):
    """Maps of the experts of a layer, multiplied out."""
    return state[f"{start}down_EDL"] @ state[f"{start}up_ELD"]


def test_experts_that_are_alike_merge_into_one_that_answers_the_same(
    save, mixture, tmp_path, capsys
):
    old = save(mixture)
    content = torch.load(old, weights_only=False)
    for key, tensor in content["state_dict"].items():
        if ".moe." in key and "_E" in key and len(tensor) == 3:
            tensor[2] = tensor[0]  # sky's as street's
    torch.save(content, old)
    out = tmp_path / "merged.pth"
    capsys.readouterr()
    words = ["merge", str(old), "--datasets", "street", "sky", "--out", str(out)]
    assert main([*words, "--no-test"]) == 0
    assert "experts: street+sky, park\n" in capsys.readouterr().out
    for dataset in ("street", "park", "sky"):
        before, after = (detections(path, tmp_path, dataset) for path in (old, out))
        assert sum(len(one.scores) for one in before) > 50
        assert_same(before, after, exactly=False)
    assert len(bank(torch.load(out, weights_only=False)["state_dict"])) == 2
    entries = Config.fromfile(out.with_suffix(".py")).mixture
    groups = {entry["name"]: entry.get("group") for entry in entries}
    assert groups == dict(street="street+sky", park=None, sky="street+sky")


def test_the_mean_of_maps_is_that_of_their_products(save, mixture):
    """Rank 4 holds the mean of two maps of rank 2."""
    stored = StoredDetector.read(str(save(mixture)))
    for key in stored.state:
        if key.endswith("down_EDL"):
            stored.state[key][:, :, 2:] = 0.0
    merged = merge_groups(stored, ["park", "street"])
    maps_EDD = bank(stored.state)
    assert merged.space.group_names == ("park+street", "sky")
    expected = torch.stack([maps_EDD[:2].mean(0), maps_EDD[2]])
    torch.testing.assert_close(bank(merged.state), expected, atol=1e-5, rtol=1e-4)
    router = "decoder.layers.0.ffn.moe.router.weight_ED"
    rows_ED = stored.state[router]
    expected = torch.stack([rows_ED[:2].mean(0), rows_ED[2]])
    torch.testing.assert_close(merged.state[router], expected)


def test_counts_of_tokens_are_averaged_too(save, mixture):
    """A balancer has an integer for each expert."""
    options = dict(
        moe="damex", extra='moe = dict(gate=dict(balance=dict(type="BiasBalancer")))'
    )
    stored = StoredDetector.read(str(save(mixture, **options)))
    (key, *_) = (k for k in stored.state if k.endswith("balance.counts_E"))
    stored.state[key].copy_(torch.tensor([4, 1, 8]))
    merged = merge_groups(stored, ["street", "sky"])
    assert merged.state[key].tolist() == [6, 1]


def test_whole_ffns_are_averaged_weight_by_weight(save, mixture):
    stored = StoredDetector.read(str(save(mixture, moe="damex")))
    merged = merge_groups(stored, ["street", "sky"])
    keys = [k for k in stored.state if ".moe.experts." in k]
    assert keys
    for key in keys:
        rows = stored.state[key]
        expected = torch.stack([(rows[0] + rows[2]) / 2, rows[1]])
        torch.testing.assert_close(merged.state[key], expected)


def merge_all(save, mixture, tmp_path):
    """The command, its evaluation included."""
    old, out = save(mixture), tmp_path / "merged.pth"
    words = ["merge", str(old), "--datasets", "street", "sky", "--out", str(out)]
    return main(words), old, out


def test_the_cost_is_the_difference_of_two_evaluations(
    save, mixture, tmp_path, capsys, monkeypatch
):
    def evaluate(runs, *_, jobs):
        for run in runs:
            (checkpoint,) = run.inputs
            groups = Config.fromfile(run.config).model.num_groups
            ap = {("old.pth", 3): 0.5, ("merged.pth", 2): 0.375}
            ap = ap[Path(checkpoint).name, groups]
            summary = dict(
                command=f"damex test {run.config} {checkpoint}",
                datasets={name: dict(ap=ap) for name in ("street", "park")}
                | dict(sky=dict(ap=None)),
                mean_ap=ap - 0.125,
                pooled_ap=0.25,
            )
            write_json(run.folder / "test_summary.json", summary)
        return []

    monkeypatch.setattr("damex.growth.commands.finish", evaluate)
    status, _, _ = merge_all(save, mixture, tmp_path)
    assert status == 0
    assert capsys.readouterr().out.splitlines()[-6:-1] == [
        "| street | 0.500 | 0.375 | -0.125 |",
        "| park | 0.500 | 0.375 | -0.125 |",
        "| sky | - | - | - |",
        "| mean | 0.375 | 0.250 | -0.125 |",
        "| pooled | 0.250 | 0.250 | +0.000 |",
    ]


@pytest.mark.slow
def test_both_are_evaluated(save, mixture, tmp_path, capsys):
    status, old, out = merge_all(save, mixture, tmp_path)
    assert status == 0
    assert "| street | " in capsys.readouterr().out
    for name, path in (("before", old), ("after", out)):
        text = (tmp_path / "merged_test" / name / "test_summary.json").read_text()
        assert str(path) in json.loads(text)["command"]


UNMERGED = {
    "one": ({}, ["sky"], "must name datasets of two groups or more"),
    "unknown": ({}, ["sky", "pork"], "did you mean 'park'"),
    "nobody's": (dict(moe="vanilla"), ["park", "sky"], "no experts that belong"),
    "dense": (dict(moe="dense"), ["park", "sky"], "no experts that belong"),
    "unlike": (
        dict(extra="moe = dict(num_experts=4)"),
        ["street", "sky"],
        "street 2, sky 1 of its own, and 0 shared",
    ),
}


@pytest.mark.parametrize(("options", "names", "words"), UNMERGED.values(), ids=UNMERGED)
def test_what_cannot_be_merged_is_refused(save, mixture, options, names, words):
    stored = StoredDetector.read(str(save(mixture, **options)))
    with pytest.raises(ConfigError, match=words) as caught:
        merge_groups(stored, names)
    assert "\n" not in str(caught.value)
