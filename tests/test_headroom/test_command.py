"""The command: on trainings of a few iterations, and its mistakes."""

import json

import pytest

from damex.commandline.commands import app
from damex.errors import ConfigError


@pytest.mark.slow
def test_a_ladder_is_trained_measured_and_goes_on_where_it_was(
    tmp_path, config, run_python
):
    folder = tmp_path / "ladder"
    common = (config, "--work-dir", folder, "--seeds", "3")
    first = run_python("-m", "damex", "headroom", *common, "--rungs", "zeroed")
    assert first.returncode == 0, first.stderr + first.stdout
    assert "together 1 trainings, 8 images" in first.stdout
    assert "zeroed: 1 x 8 evaluations" in first.stdout
    assert "No verdict" in first.stdout
    kept = [*(folder / "dense").rglob("summary.json")]
    assert len(kept) == 2
    before = [path.stat().st_mtime_ns for path in kept]

    more = ("--rungs", "zeroed", "single", "dense_lr2", "--jobs", "2")
    second = run_python("-m", "damex", "headroom", *common, *more)
    assert second.returncode == 0, second.stderr + second.stdout
    assert "4 runs, 1 finished before; 2 at a time" in second.stdout
    assert [path.stat().st_mtime_ns for path in kept] == before
    assert "(a guess from a single seed)" in second.stdout

    found = json.loads((folder / "headroom.json").read_text())
    assert list(found["rungs"]) == ["dense", "dense_lr2", "single"]
    assert found["seeds"] == [3]
    dense, single = found["rungs"]["dense"], found["rungs"]["single"]
    assert {*dense["datasets"]} == {*single["datasets"]} == {"street", "park"}
    assert single["minus_dense"]["mean"] == pytest.approx(
        single["mean_ap"][0] - dense["mean_ap"][0]
    )
    # The checkpoint was loaded, and is whole again after every zeroing.
    assert found["zeroed"]["none"]["mean_ap"] == dense["mean_ap"]
    assert found["verdict"]["reference"] in ("dense", "dense_lr2")
    assert (folder / "headroom.png").stat().st_size > 0
    absent = "Not included: partitioned, wide_decoder, wide_encoder, oracle.\n"
    assert absent in (folder / "headroom.md").read_text()

    options = ("--cfg-options", "train_cfg.max_epochs=2")
    other = run_python(
        "-m", "damex", "headroom", *common, "--rungs", "zeroed", *options
    )
    assert other.returncode == 2
    assert "runs of a config that differs in train_cfg;" in other.stderr


@pytest.mark.slow
def test_the_recipe_is_trained_once_for_the_oracle_and_for_itself(
    tmp_path, config, run_python
):
    folder = tmp_path / "ladder"
    common = (config, "--work-dir", folder, "--seeds", "3", "--rungs", "oracle")
    first = run_python("-m", "damex", "headroom", *common)
    assert first.returncode == 0, first.stderr + first.stdout
    assert "oracle: 1 evaluations of damex_best" in first.stdout
    found = json.loads((folder / "headroom.json").read_text())
    assert list(found["rungs"]) == ["dense", "oracle"]
    told = json.loads((folder / "damex_best/seed3/oracle/summary.json").read_text())
    assert told["routing_accuracy"]["mean"] == 1.0
    assert found["rungs"]["oracle"]["mean_ap"] == [told["mean_ap"]]

    second = run_python("-m", "damex", "headroom", *common, "--experts", "damex_best")
    assert second.returncode == 0, second.stderr + second.stdout
    assert "finished before" not in second.stdout  # nothing is left to run
    scored = json.loads((folder / "headroom.json").read_text())
    assert list(scored["rungs"]) == ["dense", "oracle", "damex_best"]
    own = json.loads((folder / "damex_best/seed3/summary.json").read_text())
    assert scored["rungs"]["damex_best"]["mean_ap"] == [own["mean_ap"]]


@pytest.mark.parametrize("rung", ["oracle", "zeroed"])
def test_what_is_evaluated_once_more_needs_checkpoints(tmp_path, config, rung):
    with config.open("a") as file:
        file.write("default_hooks = dict(checkpoint=None)\n")
    command = [str(config), "--work-dir", str(tmp_path), "--rungs", "single", rung]
    with pytest.raises(ConfigError, match=f"is None, and {rung} evaluate checkpoints"):
        app(["headroom", *command])


def test_another_recipe_of_the_same_name_is_refused(tmp_path, config):
    own = tmp_path / "damex_best.py"
    own.write_text("moe = dict(layers=dict(decoder=[1]), num_experts=3)")
    common = [str(config), "--work-dir", str(tmp_path / "ladder")]
    with pytest.raises(ConfigError, match="'damex_best' that is not the one of damex"):
        app(["headroom", *common, "--rungs", "oracle", "--experts", str(own)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "there is no config file 'missing.py'"),
        (
            ["quickstart", "--rungs", "wider"],
            '"wider" for --rungs.*See damex',
        ),
        (["quickstart", "--seeds", "1", "1"], "--seeds must be different numbers"),
        (["quickstart", "--jobs", "0"], '"0" for --jobs'),
        (["quickstart", "--cfg-options", "modl.a=1"], "did you mean 'model'"),
    ],
)
def test_mistakes_on_the_command_line_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        app(["headroom", *arguments])
