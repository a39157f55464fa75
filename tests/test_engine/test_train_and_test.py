"""The tools as a user runs them: processes of their own, real files, real output."""

import json
from pathlib import Path

import pytest
import torch
from mmengine.config import Config

from damex.__main__ import main

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def test_train_then_test_end_in_the_same_table(write_config, run_tool, tmp_path):
    config = write_config()
    trained = run_tool("train.py", config)
    work = tmp_path / "work"
    summary = json.loads((work / "summary.json").read_text())
    assert set(summary["datasets"]) == {entry["name"] for entry in _mixture(config)}
    assert 0 <= summary["mean_ap"] <= summary["mean_ap50"] <= 1
    assert set(summary["routing_accuracy"]) == {*summary["datasets"], "mean"}
    assert summary["iterations"] == 12
    assert (work / "detections.png").is_file()
    assert len(trained.stdout.splitlines()) < 40, trained.stdout
    # The config of the work dir evaluates where the training files are not.
    files = [Path(e["data_root"], e["train"]) for e in _mixture(config)]
    for file in files:
        file.rename(f"{file}.away")
    run_tool(
        *("test.py", work / config.name, work / "epoch_2.pth"),
        *("--work-dir", tmp_path / "again"),
    )
    for file in files:
        Path(f"{file}.away").rename(file)
    again = json.loads((tmp_path / "again" / "test_summary.json").read_text())
    scores = ("mean_ap", "mean_ap50", "pooled_ap50", "datasets", "routing_accuracy")
    assert {key: again[key] for key in scores} == {key: summary[key] for key in scores}

    # As if it had been killed in its last evaluation, after the last checkpoint.
    (work / "summary.json").unlink()
    assert main(["train", str(config), "--resume"]) == 0
    summary_2 = json.loads((work / "summary.json").read_text())
    assert {key: summary_2[key] for key in scores} == {k: summary[k] for k in scores}


def test_odd_names_train_resume_evaluate_and_predict(
    write_config_to, run_tool, make_coco_dataset, tmp_path, capsys
):
    odd = tmp_path / "it's {{ here }} [b] 名"
    mixture = [
        make_coco_dataset(
            odd / "[red]", classes=["driver's license", "a\nb"], num_images=6
        ),
        make_coco_dataset(odd / "{{", classes=['"', "\\", "items"], num_images=6),
    ]
    config = write_config_to(odd, mixture=mixture, name="it's")
    trained = run_tool("train.py", config)
    assert "[red] (6), {{ (6)" in trained.stdout, trained.stdout
    written, checkpoint = odd / "work" / config.name, odd / "work" / "epoch_2.pth"
    longer = ("--resume", "--cfg-options", "max_epochs=3")
    assert main(["train", str(written), *longer, "--work-dir", str(odd / "work")]) == 0
    words = [str(checkpoint), "--work-dir", str(odd / "again")]
    assert main(["test", str(written), *words]) == 0
    images = str(odd / "[red]" / "images")
    options = ("--dataset", "[red]", "--min-score", "0", "--draw", str(odd / "drawn"))
    assert main(["predict", str(checkpoint), images, *options]) == 0
    assert "driver's license" in capsys.readouterr().out


def test_options_of_datasets_travel_with_the_checkpoint(write_config, tmp_path, capsys):
    config = write_config(extra="train_cfg = dict(max_epochs=1)")
    work, dense = tmp_path / "work", ["--cfg-options", "moe=dense"]
    prior = ["model.label_prior.source=head", "model.ignore_unannotated_classes=True"]
    assert main(["train", str(config), *dense, *prior]) == 0
    checkpoint = str(work / "epoch_1.pth")
    state = torch.load(checkpoint, weights_only=False)["state_dict"]
    assert state["awareness.head.weight"].abs().sum() > 0
    again = ["--work-dir", str(tmp_path / "again")]
    assert main(["test", str(work / config.name), checkpoint, *again]) == 0
    assert main(["test", str(config), checkpoint, *dense]) == 2
    assert "tensors are unknown (such as awareness." in capsys.readouterr().err


def _mixture(config):
    return Config.fromfile(config).mixture
