"""The command itself, on trainings of a few iterations."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from damex.analysis.compare_moe import compare_moe
from damex.analysis.training_run import TrainingRun
from damex.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path, two_datasets):
    """The shipped tiny detector on two datasets, 8 samples."""
    path = tmp_path / "config.py"
    bases = [
        f"{ROOT}/configs/_base_/{name}.py"
        for name in (
            "models/moe-dino_tiny",
            "moe/damex",
            "datasets/toy",
            "schedules/adamw_tiny",
            "runtime",
        )
    ]
    path.write_text(
        f"_base_ = {bases!r}\n"
        f"mixture = {[dict(entry) for entry in two_datasets]!r}\n"
        "train_dataloader = dict(\n"
        "    batch_size=2, num_workers=0, persistent_workers=False,\n"
        "    sampler=dict(samples_per_epoch=8),\n"
        ")\n"
        "train_cfg = dict(max_epochs=1, val_interval=1)\n"
    )
    return path


def run(config, *arguments):
    return subprocess.run(
        [sys.executable, "tools/compare_moe.py", str(config), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_a_comparison_trains_measures_and_goes_on_where_it_was(tmp_path, config):
    common = ("--work-dir", str(tmp_path / "compared"), "--seeds", "0")
    first = run(config, "--moe", "damex", *common, "--timed-rounds", "0")
    assert first.returncode == 0, first.stderr + first.stdout
    kept = tmp_path / "compared" / "damex" / "seed0" / "summary.json"
    before = kept.stat().st_mtime_ns

    more = ("--moe", "dense", "damex", "--timed-rounds", "1", "--timed-samples", "2")
    second = run(config, *common, *more, "--jobs", "2")
    assert second.returncode == 0, second.stderr + second.stdout
    assert "2 runs, 1 finished before; 2 at a time" in second.stdout
    assert kept.stat().st_mtime_ns == before
    timed = tmp_path / "compared" / "damex" / "timed0" / "summary.json"
    assert json.loads(timed.read_text())["datasets"] == {}  # nothing was evaluated

    rows = json.loads((tmp_path / "compared" / "comparison.json").read_text())
    assert [row["name"] for row in rows] == ["dense", "damex"]
    assert [row["seeds"] for row in rows] == [1, 1]
    assert (tmp_path / "compared" / "comparison.png").stat().st_size > 0
    dense, damex = rows
    assert dense["own_share"] is None
    assert 0 <= damex["own_share"][0] <= 1
    assert dense["seconds_per_iteration"] > 0
    assert dense["peak_memory_mib"] > 100

    other = run(
        config, "--moe", "damex", *common, "--cfg-options", "train_cfg.max_epochs=2"
    )
    assert other.returncode == 2
    assert "belongs to a run with other settings" in other.stderr


def test_a_failed_training_is_named_and_missing_in_the_table(tmp_path, config):
    wrong = tmp_path / "wrong.py"
    wrong.write_text("moe = dict(layers=dict(decoder=[9]))\n")
    result = run(
        config,
        *("--moe", str(wrong), "--seeds", "0", "--timed-rounds", "0"),
        *("--work-dir", str(tmp_path / "compared")),
    )
    assert result.returncode == 2
    assert "FAILED (error: moe.layers.decoder names layer 9" in result.stdout
    assert "1 runs failed" in result.stderr
    rows = json.loads((tmp_path / "compared" / "comparison.json").read_text())
    assert [row["seeds"] for row in rows] == [0]


def test_a_run_without_its_evaluation_has_not_finished(tmp_path):
    summary = dict(datasets={}, command="train.py config.py --cfg-options a=1")
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    scored = TrainingRun("config.py", tmp_path, ("a=1",), is_scored=True)
    assert scored.summary() is None
    assert TrainingRun("config.py", tmp_path, ("a=1",)).summary() == summary


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "there is no config file missing.py"),
        (["--moe", "damx"], "--moe names 'damx'.*did you mean.*damex"),
        (["--moe", "damex", "configs/_base_/moe/damex.py"], "names 'damex' twice"),
        (["--seeds", "1", "1"], r"--seeds must be different numbers, got \[1, 1\]"),
        (["--jobs", "0"], "--jobs must be 1 or more, got 0"),
        (["--timed-rounds", "-1"], "--timed-rounds must be 0 or more, got -1"),
    ],
)
def test_mistakes_on_the_command_line_are_named(arguments, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = [] if arguments[0].endswith(".py") else ["configs/quickstart.py"]
    with pytest.raises(ConfigError, match=message):
        compare_moe([*config, *arguments])
