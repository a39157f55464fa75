"""The command itself, on trainings of a few iterations."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from damex.analysis.compare import TrainingRun, compare_moe, run_all
from damex.analysis.comparison import comparison_row, draw_comparison, markdown_table
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
        "    batch_size=2, num_workers=0,\n"
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


@pytest.mark.slow
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
    assert dense["routing_accuracy"] is None
    assert 0 <= damex["routing_accuracy"][0] <= 1
    assert dense["seconds_per_iteration"] > 0
    assert dense["peak_memory_mib"] > 100

    other = run(
        config, "--moe", "damex", *common, "--cfg-options", "train_cfg.max_epochs=2"
    )
    assert other.returncode == 2
    assert "belongs to a run with other settings" in other.stderr


@pytest.mark.slow
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
        (["missing.py"], "there is no config file 'missing.py'"),
        (["--moe", "damx"], "no config file 'damx'.*did you mean 'damex'"),
        (["--moe", "damex", "configs/_base_/moe/damex.py"], "names 'damex' twice"),
        (["--seeds", "1", "1"], r"--seeds must be different numbers, got \[1, 1\]"),
        (["--jobs", "0"], "--jobs: must be 1 or more, got 0"),
        (["--timed-rounds", "-1"], "--timed-rounds: must be 0 or more, got -1"),
    ],
)
def test_mistakes_on_the_command_line_are_named(arguments, message, monkeypatch):
    monkeypatch.chdir(ROOT)
    config = [] if arguments[0].endswith(".py") else ["configs/quickstart.py"]
    with pytest.raises(ConfigError, match=message):
        compare_moe([*config, *arguments])


@dataclass(frozen=True)
class Sleeper:
    """Stands in for a TrainingRun: sleeps, and its status is the number of threads."""

    seconds: float

    def start(self, *, threads):
        code = f"import time; time.sleep({self.seconds}); raise SystemExit({threads})"
        return subprocess.Popen([sys.executable, "-c", code])


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ends_come_in_their_order_with_their_status():
    slow, fast = Sleeper(3.0), Sleeper(0.0)
    assert list(run_all([slow, fast], jobs=2, threads=7)) == [(fast, 7), (slow, 7)]
    assert list(run_all([slow, fast], jobs=1, threads=7)) == [(slow, 7), (fast, 7)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_training_outlives_the_command(number):
    script = """if True:
        import signal, subprocess, sys
        from damex.analysis.compare import run_all

        # Where tests run in a shell's background, Ctrl-C is ignored from the start.
        signal.signal(signal.SIGINT, signal.default_int_handler)

        class Announced:
            def start(self, *, threads):
                process = subprocess.Popen(["sleep", "60"])
                print(process.pid, flush=True)
                return process

        list(run_all([Announced(), Announced()], jobs=2, threads=1))
    """
    command = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True
    )
    children = [int(command.stdout.readline()) for _ in range(2)]
    time.sleep(0.2)  # into the pool's waiting
    assert all(is_alive(child) for child in children)
    command.send_signal(number)
    assert command.wait(timeout=20) != 0
    assert not any(is_alive(child) for child in children)


def test_the_callers_handler_of_sigterm_is_back_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    list(run_all([Sleeper(0.0)], jobs=1, threads=1))
    assert signal.getsignal(signal.SIGTERM) is before


def scored(ap50, share=None):
    summary = dict(mean_ap50=ap50, mean_ap=ap50 / 2, datasets=dict(a=dict(ap50=ap50)))
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
    return [dense, damex]


def test_rows_hold_mean_sample_deviation_and_medians(rows):
    dense, damex = rows
    # Deviations of 0.25 and 0.75 from 0.5: sqrt((1/16 + 1/16) / (2 - 1)).
    assert dense["ap50"] == pytest.approx((0.5, 0.125**0.5))
    assert dense["ap"] == pytest.approx((0.25, 0.125**0.5 / 2))
    assert dense["ap50_seeds"] == [0.25, 0.75]
    assert dense["datasets"]["a"] == dense["ap50"]
    assert dense["routing_accuracy"] is None
    assert damex["routing_accuracy"] == pytest.approx((0.5, 0.125**0.5))
    assert dense["seconds_per_iteration"] == pytest.approx(10 / 40)
    assert dense["peak_memory_mib"] == 901


def test_one_seed_has_no_spread():
    assert comparison_row("damex", [scored(0.5)])["ap50"] == (0.5, None)


def test_a_mixture_without_a_finished_run_has_no_numbers():
    row = comparison_row("damex", [])
    assert row["seeds"] == 0
    assert row["ap50"] is None
    assert markdown_table([row]).splitlines()[2].count("| -") == 7


def test_the_table_compares_times_with_the_first_row(rows):
    lines = markdown_table(rows).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    dense = ["dense", "0.500 ± 0.354", "0.250 ± 0.177", "-", "-", "0.250", "1.00"]
    damex = ["damex", "0.500 ± 0.000", "0.250 ± 0.000", "50.0%", "25.0%", "0.300"]
    assert cells[2] == [*dense, "901 MiB"]
    assert cells[3] == [*damex, "1.20", "1000 MiB"]


def row(name, values, mean, deviation):
    return dict(name=name, ap50_seeds=values, ap50=(mean, deviation))


def test_every_seed_is_a_dot_beside_its_name():
    rows = [
        row("dense", [0.2, 0.4], 0.3, 0.1),
        dict(name="failed", ap50_seeds=[], ap50=None),
        row("damex", [0.6], 0.6, None),
    ]
    axes = draw_comparison(rows).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["dense", "damex"]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [list(line.get_xdata()) for line in dots] == [[0.2, 0.4], [0.6]]
    assert [list(line.get_ydata()) for line in dots] == [[0, 0], [1]]
    band = axes.patches[0]
    assert band.get_x() == pytest.approx(0.2)
    assert band.get_width() == pytest.approx(0.2)


def test_nothing_finished_is_an_empty_picture():
    axes = draw_comparison([dict(name="failed", ap50_seeds=[], ap50=None)]).axes[0]
    assert not axes.lines
