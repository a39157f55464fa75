"""The command itself, on trainings of a few iterations."""

import json
from pathlib import Path

import pytest

from damex.config_files import read_config
from damex.errors import ConfigError
from tools.analysis import compare_moe as tool
from tools.analysis.compare_moe import (
    app,
    comparison_row,
    markdown_table,
    with_differences,
)

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_comparison_trains_measures_and_goes_on_where_it_was(
    tmp_path, config, capsys
):
    out = tmp_path / "compared"
    wrong = tmp_path / "wrong.py"
    wrong.write_text("moe = dict(layers=dict(decoder=[9]))")
    common = (str(config), "--work-dir", str(out), "--seeds", "0")
    with pytest.raises(ConfigError, match="1 runs failed"):
        app([*common, "--moe", "damex", str(wrong), "--timed-rounds", "0"])
    printed = capsys.readouterr().out
    assert "FAILED (error: moe.layers.decoder names layer 9" in printed
    rows = json.loads((out / "comparison.json").read_text())
    assert [row["seeds"] for row in rows] == [1, 0]
    kept = out / "damex" / "seed0" / "summary.json"
    before = kept.stat().st_mtime_ns

    timed = ("--timed-rounds", "1", "--timed-samples", "2", "--jobs", "2")
    app([*common, "--moe", "dense", "damex", *timed])
    assert "2 runs, 1 finished before; 2 at a time" in capsys.readouterr().out
    assert kept.stat().st_mtime_ns == before
    summary = json.loads((out / "damex" / "timed0" / "summary.json").read_text())
    assert summary["datasets"] == {}  # nothing was evaluated
    dense, damex = rows = json.loads((out / "comparison.json").read_text())
    assert [(row["name"], row["seeds"]) for row in rows] == [("dense", 1), ("damex", 1)]
    assert dense["routing_accuracy"] is None
    assert 0 <= damex["routing_accuracy"][0] <= 1
    assert dense["seconds_per_iteration"] > 0
    assert dense["peak_memory_mib"] > 100


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--moe", "damx"], "no config file 'damx'.*did you mean 'damex'"),
        (["--moe", "damex", "configs/_base_/moe/damex.py"], "names 'damex' twice"),
        (["--cfg-options", "moe=damex"], "moe=damex: name the mixtures with --moe"),
    ],
)
def test_mistakes_on_the_command_line_are_named(arguments, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=message):
        app(["configs/quickstart.py", *arguments])


def run_nothing(monkeypatch):
    """Lists of the runs that would be started."""
    asked = []
    monkeypatch.setattr(tool, "finish", lambda runs, *_, **__: asked.append(runs) or [])
    return asked


def test_an_edited_file_of_experts_is_not_mixed_with_what_it_was(
    tmp_path, config, monkeypatch
):
    run_nothing(monkeypatch)
    mine = tmp_path / "mine.py"
    mine.write_text("moe = dict(layers=dict(decoder=[1]), num_experts=2)")
    command = [str(config), "--moe", str(mine), "--work-dir", str(tmp_path / "out")]
    app([*command, "--cfg-options", "moe.gate.k=2"])
    written = read_config(str(tmp_path / "out/mine/config.py"))
    assert (written.moe.num_experts, written.moe.gate.k) == (2, 2)
    (tmp_path / "out/mine/seed0").mkdir()  # has begun
    app([*command, "--cfg-options", "moe.gate.k=2"])
    with pytest.raises(ConfigError, match="differs in moe;"):
        app(command)
    mine.write_text("moe = dict(layers=dict(decoder=[1]), num_experts=3)")
    with pytest.raises(ConfigError, match="differs in moe;"):
        app([*command, "--cfg-options", "moe.gate.k=2"])


@pytest.mark.parametrize(
    ("loop", "expected"),
    [
        (
            dict(max_epochs=12),
            {
                "max_epochs=1",
                "train_cfg.val_begin=9",
                "train_dataloader.sampler.samples_per_epoch=6",
            },
        ),
        (
            dict(_delete_=True, type="IterBasedTrainLoop", max_iters=9),
            {"max_iters=3", "train_cfg.val_begin=4"},  # batches of two images
        ),
    ],
)
def test_timed_runs_are_short_whatever_the_loop_counts(
    tmp_path, config, monkeypatch, loop, expected
):
    asked = run_nothing(monkeypatch)
    with config.open("a") as file:
        file.write(f"train_cfg = {loop}\n")
    app(
        [
            *(str(config), "--moe", "damex", "--seeds", "3", "--timed-rounds", "1"),
            *("--timed-samples", "6", "--work-dir", str(tmp_path / "out")),
        ]
    )
    (scored,), (timed,) = asked
    assert scored.options == ("randomness.seed=3",)
    assert {*timed.options} == expected
    assert timed.config == scored.config == str(tmp_path / "out/damex/config.py")


def scored(ap50, share=None):
    summary = dict(mean_ap50=ap50, mean_ap=ap50 / 2, pooled_ap=ap50 / 4)
    summary["datasets"] = dict(a=dict(ap50=ap50))
    if share is not None:
        summary["routing_accuracy"] = dict(a=share, mean=share)
        summary["max_load"] = share / 2
    return summary


def timed(seconds, memory):
    return dict(train_seconds=seconds, iterations=40, peak_memory_mib=memory)


@pytest.fixture
def rows():
    dense = comparison_row(
        "dense",
        [scored(0.25), scored(0.75)],
        [timed(40, 900), timed(8, 901), timed(10, 950)],
    )
    damex = comparison_row(
        "damex", [scored(0.5, 0.75), scored(0.5, 0.25)], [timed(12, 1000)]
    )
    return with_differences([dense, damex])


def test_rows_hold_mean_sample_deviation_and_medians(rows):
    dense, damex = rows
    # Deviations of 0.25 and 0.75 from 0.5: sqrt((1/16 + 1/16) / (2 - 1)).
    assert dense["ap50"] == pytest.approx((0.5, 0.125**0.5))
    assert dense["ap"] == pytest.approx((0.25, 0.125**0.5 / 2))
    assert dense["pooled_ap"] == pytest.approx((0.125, 0.125**0.5 / 4))
    assert dense["ap50_seeds"] == [0.25, 0.75]
    assert dense["datasets"]["a"] == dense["ap50"]
    assert dense["routing_accuracy"] is None
    assert damex["routing_accuracy"] == pytest.approx((0.5, 0.125**0.5))
    assert dense["seconds_per_iteration"] == pytest.approx(10 / 40)
    assert dense["peak_memory_mib"] == 901


def test_what_was_trained_before_a_run_was_resumed_took_no_time():
    resumed = dict(timed(10, 900), trained_iterations=20)
    nothing = dict(timed(0.1, 900), trained_iterations=0)
    row = comparison_row("dense", [], [resumed, nothing])
    assert row["seconds_per_iteration"] == 10 / 20
    dense = comparison_row("dense", [], [nothing])
    assert dense["seconds_per_iteration"] is None
    markdown_table(with_differences([dense, row]))


def test_missing_seeds_are_left_out():
    assert comparison_row("damex", [scored(0.5)])["ap50"] == (0.5, None)
    row = comparison_row("damex", [])
    assert row["seeds"] == 0
    assert row["ap50"] is None
    assert markdown_table(with_differences([row])).splitlines()[2].count("| -") == 9
    dense = comparison_row("dense", [scored(0.25), None, scored(0.5)])
    damex = comparison_row("damex", [None, scored(0.9), scored(0.625)])
    assert dense["seeds"] == 2
    assert dense["ap50_seeds"] == [0.25, None, 0.5]
    compared = with_differences([dense, damex])
    assert compared[1]["ap50_minus_first"] == (0.125, None)


def test_the_table_compares_with_the_first_row(rows):
    lines = markdown_table(rows).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    dense = ["dense", "0.500 ± 0.354", "-", "0.250 ± 0.177", "0.125 ± 0.088"]
    # Differences 0.25 and -0.25: their mean has the standard error 0.25, and the
    # quantile of one degree of freedom is tan(0.475 pi) = 12.706.
    damex = ["damex", "0.500 ± 0.000", "+0.000 [-3.177, +3.177]", "0.250 ± 0.000"]
    assert cells[2] == [*dense, "-", "-", "0.250", "1.00", "901 MiB"]
    routed = ["50.0%", "25.0%", "0.300", "1.20", "1000 MiB"]
    assert cells[3] == [*damex, "0.125 ± 0.000", *routed]
