"""A detector of fewer datasets, or of fewer experts.

Other datasets stay as they were.
"""

import pytest
import torch
from mmengine.config import Config

from damex.__main__ import main
from damex.engine.config import build_runner, label_space_of, resolve_config
from damex.errors import ConfigError
from damex.inference.predictor import Predictor
from damex.inference.stored import DetectorCheckpoint
from damex.workbench.growth.grow import add_datasets
from damex.workbench.growth.prune import _cost, drop_datasets, merge_groups
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


def test_the_config_of_the_original_training_is_reduced(save, mixture):
    stored = DetectorCheckpoint.read(str(save(mixture)))
    start = dict(load_from="old.pth", load_optimizer=True, resume=True)
    stored.config.update(start, train_only=["park"])
    config = drop_datasets(stored, ["park"]).config
    assert not {*start, "train_only"} & config.keys()
    del stored.config["mixture"]  # its config names the datasets in the loaders
    config = drop_datasets(stored, ["park"]).config
    assert "mixture" not in config
    assert label_space_of(resolve_config(config)).dataset_names == ("street", "sky")


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


def test_experts_by_the_dataset_are_counted_again(save, mixture):
    """Street has two of the four."""
    stored = DetectorCheckpoint.read(
        str(save(mixture, extra="moe = dict(num_experts=4)"))
    )
    for drop, left in ((["street", "sky"], 1), (["street"], 2), (["park"], 3)):
        pruned = drop_datasets(stored, drop)
        assert pruned.config.model.moe.num_experts == left
        assert pruned.config.model.num_groups == 3 - len(drop)
        up = next(key for key in pruned.state if key.endswith("up_ELD"))
        rows = [row for row, name in enumerate(OWNERS) if name not in drop]
        assert torch.equal(pruned.state[up], stored.state[up][rows])
    with pytest.raises(ConfigError, match="street 2, sky 1 of its own, and 0 shared"):
        merge_groups(stored, ["street", "sky"])


def test_copies_of_an_ffn_in_parts_are_counted_again(save, mixture, tmp_path):
    """Eight copies are three, three and two."""
    old = save(mixture, moe="damex_shared_private")
    pruned = drop_datasets(DetectorCheckpoint.read(str(old)), ["park"])
    assert pruned.config.model.moe.fine_grained.copies == 5


REFUSALS = {
    "damex_best": [
        (drop_datasets, ["pork"], "did you mean 'park'"),
        (drop_datasets, ["park", "street", "sky"], "names all datasets"),
        (merge_groups, ["sky", "pork"], "did you mean 'park'"),
        (merge_groups, ["sky"], "must name datasets of two groups or more"),
    ],
    "vanilla": [
        (drop_datasets, ["park"], "belong to no dataset"),
        (merge_groups, ["park", "sky"], "no experts that belong"),
    ],
    "dense": [(merge_groups, ["park", "sky"], "no experts that belong")],
}


@pytest.mark.parametrize("moe", REFUSALS)
def test_datasets_that_cannot_be_dropped_or_merged(save, mixture, moe):
    stored = DetectorCheckpoint.read(str(save(mixture, moe=moe)))
    for function, names, words in REFUSALS[moe]:
        with pytest.raises(ConfigError, match=words) as caught:
            function(stored, names)
        assert "\n" not in str(caught.value)


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
    stored = DetectorCheckpoint.read(str(save(mixture)))
    for key in stored.state:
        if key.endswith("down_EDL"):
            stored.state[key][:, :, 2:] = 0.0
    merged = merge_groups(stored, ["park", "street"])
    assert merged.space.group_names == ("park+street", "sky")
    router = "decoder.layers.0.ffn.moe.router.weight_ED"
    for before, after in (
        (bank(stored.state), bank(merged.state)),
        (stored.state[router], merged.state[router]),
    ):
        expected = torch.stack([before[:2].mean(0), before[2]])
        torch.testing.assert_close(after, expected, atol=1e-5, rtol=1e-4)


def test_ffns_and_counts_of_tokens_are_averaged(save, mixture):
    """A balancer has an integer for each expert."""
    options = dict(
        moe="damex", extra='moe = dict(gate=dict(balance=dict(type="BiasBalancer")))'
    )
    stored = DetectorCheckpoint.read(str(save(mixture, **options)))
    counts = next(k for k in stored.state if k.endswith("balance.counts_E"))
    stored.state[counts].copy_(torch.tensor([4, 1, 8]))
    merged = merge_groups(stored, ["street", "sky"])
    assert merged.state[counts].tolist() == [6, 1]
    keys = [k for k in stored.state if ".moe.experts." in k]
    assert keys
    for key in keys:
        rows = stored.state[key]
        expected = torch.stack([(rows[0] + rows[2]) / 2, rows[1]])
        torch.testing.assert_close(merged.state[key], expected)


def test_the_cost_is_the_difference_of_two_evaluations():
    before, after = dict(street=0.5, sky=None), dict(street=0.375, sky=0.25)
    assert _cost(before, after).splitlines()[-2:] == [
        "| street | 0.500 | 0.375 | -0.125 |",
        "| sky | - | 0.250 | - |",
    ]


def test_the_merged_detector_is_tested_as_by_damex_test(
    save, mixture, tmp_path, capsys
):
    old, out = save(mixture), tmp_path / "merged.pth"
    words = ["merge", str(old), "--datasets", "street", "sky", "--out", str(out)]
    (tmp_path / "park").rename(tmp_path / "away")
    assert main(words) == 2
    assert "To merge without AP: --no-test." in capsys.readouterr().err
    (tmp_path / "away").rename(tmp_path / "park")
    assert main(words) == 0  # nothing is in the way
    rows = [row.split(" | ") for row in capsys.readouterr().out.splitlines()]
    table = {row[0].strip("| "): row[2] for row in rows if len(row) == 4}
    cfg = Config.fromfile(out.with_suffix(".py"))
    cfg.update(load_from=str(out), work_dir=str(tmp_path / "tested"))
    metrics = build_runner(cfg).test()
    for name in ("street", "park", "sky", "mean", "pooled"):
        assert table[name] == f"{metrics[f'mixture/{name}/AP']:.3f}"
    cfg.train_cfg.max_epochs = 1
    build_runner(cfg).train()


def own_bank(kind):
    """Lines of a config with a bank of the user's own."""
    return (
        f"moe = dict(experts=dict(_delete_=True, type={kind!r}),"
        "gate=dict(type='TopKGate', k=1, renormalize=True))"
    )


GROWN = {
    "grow": lambda stored, cfg: add_datasets(stored, cfg, like="park").state,
    "prune": lambda stored, cfg: drop_datasets(stored, ["street"]).state,
    "merge": lambda stored, cfg: merge_groups(stored, ["street", "park"]).state,
}


@pytest.mark.parametrize("command", GROWN)
@pytest.mark.parametrize("kind", ["DeclaredExperts", "OwnExperts"])
def test_a_bank_of_the_user_is_moved_as_it_declares_or_refused(
    save, make_config, mixture, own_experts, command, kind
):
    options = dict(moe="damex", extra=own_bank(kind))
    stored = DetectorCheckpoint.read(str(save(mixture[:2], **options)), trust=True)
    cfg = Config.fromfile(make_config(mixture, name="grown", **options))
    if kind == "OwnExperts":
        with pytest.raises(ConfigError, match="does not declare whether 'weight'"):
            GROWN[command](stored, cfg)
        return
    state = GROWN[command](stored, cfg)
    keys = [key for key in state if key.endswith("moe.experts.weight")]
    assert keys
    for key in keys:
        old = stored.state[key]
        rows = dict(grow=old[[0, 1, 1]], prune=old[[1]], merge=old.mean(0)[None])
        torch.testing.assert_close(state[key], rows[command])
