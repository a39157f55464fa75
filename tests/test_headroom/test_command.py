"""The command: on trainings of a few iterations, its report, and its mistakes."""

import json

import pytest
from rich.console import Console

from damex.__main__ import main
from damex.errors import ConfigError
from damex.workbench.cli.commands import app
from damex.workbench.headroom.command import (
    _write,
    report,
    score_row,
    single_row,
    table_of,
    with_differences,
)


def headroom(capfd, *words, status=0):
    assert main(["headroom", *map(str, words)]) == status
    return capfd.readouterr()


@pytest.mark.slow
def test_baselines_are_trained_compared_and_resumed(
    tmp_path, config, capfd, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "100")
    folder = tmp_path / "headroom"
    common = (config, "--work-dir", folder, "--seeds", "3")
    first = headroom(capfd, *common, "--baselines")
    assert "together 1 trainings, 8 images" in first.out
    assert "No verdict" in first.out
    (kept,) = (folder / "dense").rglob("summary.json")
    before = kept.stat().st_mtime_ns

    more = ("--baselines", "single", "--jobs", "2")
    second = headroom(capfd, *common, *more)
    assert "3 runs, 1 finished before; 2 at a time" in second.out
    assert kept.stat().st_mtime_ns == before
    assert "(a guess from a single seed)" in second.out

    found = json.loads((folder / "headroom.json").read_text())
    assert list(found["rows"]) == ["dense", "single"]
    assert found["seeds"] == [3]
    dense, single = found["rows"]["dense"], found["rows"]["single"]
    assert {*dense["datasets"]} == {*single["datasets"]} == {"street", "park"}
    assert single["minus_dense"]["mean"] == pytest.approx(
        single["mean_ap"][0] - dense["mean_ap"][0]
    )
    assert found["verdict"]["reference"] == "dense"
    absent = "dense_lr2, partitioned, wide_decoder, wide_encoder, oracle.\n"
    assert f"Not included: {absent}" in (folder / "headroom.md").read_text()

    options = ("--baselines", "--cfg-options", "train_cfg.max_epochs=2")
    other = headroom(capfd, *common, *options, status=2)
    assert "runs of a config that differs in train_cfg;" in other.err


@pytest.mark.slow
def test_the_recipe_is_trained_once_for_the_oracle_and_for_itself(
    tmp_path, config, capfd
):
    folder = tmp_path / "headroom"
    common = (config, "--work-dir", folder, "--seeds", "3", "--baselines", "oracle")
    headroom(capfd, *common)
    found = json.loads((folder / "headroom.json").read_text())
    assert list(found["rows"]) == ["dense", "oracle"]
    oracle = json.loads((folder / "oracle/seed3/test_summary.json").read_text())
    assert oracle["routing_accuracy"]["mean"] == 1.0
    assert found["rows"]["oracle"]["mean_ap"] == [oracle["mean_ap"]]

    second = headroom(capfd, *common, "--experts", "damex_best")
    assert "finished before" not in second.out  # nothing is left to run
    scored = json.loads((folder / "headroom.json").read_text())
    assert list(scored["rows"]) == ["dense", "oracle", "damex_best"]
    recipe = json.loads((folder / "damex_best/seed3/summary.json").read_text())
    assert scored["rows"]["damex_best"]["mean_ap"] == [recipe["mean_ap"]]


def test_the_oracle_needs_checkpoints(tmp_path, config):
    with config.open("a") as file:
        file.write("default_hooks = dict(checkpoint=None)\n")
    command = [str(config), "--work-dir", str(tmp_path), "--baselines", "oracle"]
    with pytest.raises(ConfigError, match="is None, and oracle evaluates checkpoints"):
        app(["headroom", *command])


def test_another_recipe_of_the_same_name_is_refused(tmp_path, config):
    recipe = tmp_path / "damex_best.py"
    recipe.write_text("moe = dict(layers=dict(decoder=[1]), num_experts=3)")
    common = [str(config), "--work-dir", str(tmp_path / "headroom")]
    with pytest.raises(ConfigError, match="'damex_best' that is not the one of damex"):
        app(["headroom", *common, "--baselines", "oracle", "--experts", str(recipe)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["missing.py"], "there is no config file 'missing.py'"),
        (["quickstart", "--baselines", "wider"], '"wider" for --baselines'),
        (["quickstart", "--jobs", "0"], '"0" for --jobs'),
        (["quickstart", "--cfg-options", "modl.a=1"], "did you mean 'model'"),
    ],
)
def test_mistakes_on_the_command_line_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        app(["headroom", *arguments])


# ---- the report, from summaries made by hand ----


def summary(pooled=0.1, **ap):
    return dict(
        mean_ap50=2 * sum(ap.values()) / len(ap),
        mean_ap=sum(ap.values()) / len(ap),
        pooled_ap=pooled,
        datasets={name: dict(ap=v, ap50=2 * v) for name, v in ap.items()},
    )


@pytest.fixture
def rows():
    dense = score_row([summary(a=0.25, b=0.5), summary(a=0.125, b=0.25)])
    single = single_row(
        {
            "a": score_row([summary(a=0.5), None]),
            "b": score_row([summary(b=0.25), summary(b=0.375)]),
        }
    )
    return with_differences(dict(dense=dense, single=single))


def test_a_row_has_a_number_per_seed(rows):
    assert rows["dense"]["mean_ap"] == [0.375, 0.1875]
    assert rows["dense"]["mean_ap50"] == [0.75, 0.375]
    assert rows["dense"]["pooled_ap"] == [0.1, 0.1]
    assert rows["dense"]["datasets"]["a"] == dict(ap=[0.25, 0.125], ap50=[0.5, 0.25])
    assert rows["dense"]["minus_dense"] is None


def test_single_is_the_mean_over_the_detectors_of_one_dataset_each(rows):
    single = rows["single"]
    assert single["mean_ap"] == [0.375, None]  # a is missing in the second seed
    assert single["pooled_ap"] == [None, None]
    assert single["datasets"]["a"]["ap"] == [0.5, None]
    assert single["datasets"]["b"]["ap"] == [0.25, 0.375]
    assert single["minus_dense"] == dict(mean=0.0, ci95=None)


def test_the_table_has_a_column_per_dataset(rows):
    rows |= with_differences(dict(wide_decoder=score_row([None, None])))
    lines = table_of(rows).splitlines()
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells[0][:4] == ["training", "mean AP50", "mean AP", "minus dense [95%]"]
    assert cells[0][4:] == ["pooled AP", "a AP", "b AP"]
    assert cells[2][2:5] == ["0.281 ± 0.133", "-", "0.100 ± 0.000"]
    assert cells[3][2:] == ["0.375", "+0.000", "-", "0.500", "0.312 ± 0.088"]
    assert cells[4][1:] == ["-"] * 6  # without a run there are no numbers


def test_the_report_joins_the_singles_and_can_be_json():
    found = report(
        {
            "dense": [summary(a=0.25, b=0.25), summary(a=0.25, b=0.375)],
            "single_a": [summary(a=0.5), summary(a=0.5)],
            "single_b": [summary(b=0.5), summary(b=0.625)],
            "single_full_a": [summary(a=0.75), summary(a=0.875)],
            "single_full_b": [summary(b=0.25), None],
        },
        datasets=["a", "b"],
        seeds=[4, 5],
    )
    found = json.loads(json.dumps(found))
    assert list(found["rows"]) == ["dense", "single", "single_full"]
    assert found["rows"]["single_full"]["mean_ap"] == [0.5, None]
    assert found["rows"]["single"]["minus_dense"] == dict(mean=0.25, ci95=[0.25, 0.25])
    verdict = found["verdict"]
    assert (verdict["answer"], verdict["above"]) == ("yes", ["single"])
    assert verdict["differences"]["single"]["mean"] == 0.25


@pytest.mark.parametrize(
    ("scores", "helps"), [((0.5, 0.625), True), ((0.5, 0.25), False)]
)
def test_experts_are_scored_against_the_better_dense_detector(scores, helps):
    found = report(
        {
            "dense": [summary(a=0.125), summary(a=0.25)],
            "dense_lr2": [summary(a=0.25), summary(a=0.375)],
            "wide_decoder": [summary(a=0.25), summary(a=0.375)],
            "mine": [summary(a=score) for score in scores],
            "failed": [None, None],
        },
        datasets=["a"],
        seeds=[0, 1],
        experts=["mine", "failed"],
    )
    assert list(found["experts"]) == ["mine"]
    one = json.loads(json.dumps(found["experts"]["mine"]))
    # Seed by seed: 0.5 - 0.25 and the other one - 0.375.
    assert one["minus_best_dense"]["mean"] == (0.25 + scores[1] - 0.375) / 2
    assert one["helps"] is helps
    assert found["verdict"]["answer"] == "no"  # the experts are no part of the verdict


# Over dense_lr2 the gains are 0.25 and 1/64 to both sides, so their deviation is 1/64,
# and the interval reaches 4.3027 / 64 / sqrt(3) = 0.0388 to both sides.
PARTITIONED = [0.25 + 0.25 - 1 / 64, 0.25 + 0.25, 0.25 + 0.25 + 1 / 64]
HEAD_FIRST = (
    "A head per dataset is best: partitioned +0.250 [+0.211, +0.289] over dense_lr2 in "
    "mean AP. "
)


@pytest.mark.parametrize(
    ("others", "opening"),
    [
        (dict(), f"{HEAD_FIRST}No verdict: it needs a seed of dense"),
        (dict(single_full_a=[0.25] * 3), f"{HEAD_FIRST}No verdict: it needs"),
        (dict(wide_decoder=[0.25] * 3), f"{HEAD_FIRST}Experts are not shown to help:"),
        (dict(oracle=[0.375] * 3), f"{HEAD_FIRST}Experts can help: above dense_lr2"),
        # Another training is better, whatever its kind.
        (dict(oracle=[0.625] * 3), "Experts can help: above dense_lr2"),
        (dict(mine=[0.625] * 3), "No verdict: it needs a seed of dense"),
        (dict(single_full_a=[0.625] * 3), "No verdict: it needs a seed of dense"),
        # It has the highest mean, and its interval contains 0.
        (dict(partitioned=[0.25, 0.5, 0.75]), "No verdict: it needs a seed of dense"),
    ],
)
def test_a_head_per_dataset_that_is_best_comes_first(tmp_path, others, opening):
    scores = dict(dense=[0.125] * 3, dense_lr2=[0.25] * 3, partitioned=PARTITIONED)
    found = report(
        {n: [summary(a=ap) for ap in of] for n, of in {**scores, **others}.items()},
        datasets=["a"],
        seeds=[0, 1, 2],
        experts=["mine"] if "mine" in others else [],
    )
    _write(tmp_path, found, Console(quiet=True))
    stored = json.loads((tmp_path / "headroom.json").read_text())
    assert stored["verdict"]["text"].startswith(opening)
    if stored["verdict"]["answer"] is not None:
        assert stored["verdict"]["learning_speed"]["mean"] == 0.125
    assert f"\n\n{opening}" in (tmp_path / "headroom.md").read_text()
    assert stored["experts"]["partitioned"]["text"].startswith("partitioned ")


def test_without_a_verdict_experts_are_still_compared_and_gaps_are_named(tmp_path):
    found = report(
        {
            "dense": [summary(a=0.125), summary(a=0.25)],
            "dense_lr2": [summary(a=0.25), None],
            "partitioned": [None, None],
            "mine": [summary(a=0.5), summary(a=0.5)],
        },
        datasets=["a"],
        seeds=[4, 7],
        experts=["mine"],
    )
    _write(tmp_path, found, Console(quiet=True))
    paragraphs = (tmp_path / "headroom.md").read_text().split("\n\n")
    assert paragraphs[1:] == [
        "Not included: wide_decoder, wide_encoder, single, oracle.",
        "Missing: seed 7 of dense_lr2, seed 4 of partitioned, seed 7 of partitioned. "
        "Differences are over common seeds.",
        "No verdict: it needs a seed of dense and of one of wide_decoder, "
        "wide_encoder, single, oracle.",
        "mine helps: +0.250 over dense_lr2 in mean AP.\n",
    ]
