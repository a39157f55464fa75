"""The scripts that collect scores of runs and write the tables of results."""

import json
import runpy
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "docs/results"


@pytest.fixture(scope="module")
def scores():
    return runpy.run_path(str(RESULTS / "scores.py"), run_name="imported")


@pytest.fixture(scope="module")
def collect():
    return runpy.run_path(str(RESULTS / "collect.py"), run_name="imported")["collect"]


def arms(**scores):
    return {name: dict(mean_ap=one) for name, one in scores.items()}


def test_intervals_are_welchs(scores):
    """By hand: variances of 0.01, 4 degrees of freedom, t = 2.776."""

    def welch(of, base):
        return scores["difference"](arms(of=of, base=base), "of", "base")

    text, p_value, place = welch([0.1, 0.2, 0.3], [0.0, 0.1, 0.2])
    assert text == "+0.100 [-0.127, +0.327]"
    assert p_value == pytest.approx(0.288, abs=1e-3)
    assert place == "few seeds"
    # Unequal spreads: 2.03 degrees of freedom, not the 4 of Student's interval.
    text, _, _ = welch([0.0, 0.2, 0.4], [0.1, 0.101, 0.102])
    assert text == "+0.099 [-0.398, +0.596]"
    # One seed has no interval.
    assert welch([0.25], [0.0, 0.1, 0.2]) == ("+0.150", None, "-")


def test_the_share_of_a_gap_has_fiellers_interval(scores):
    """By hand: ends without a spread leave Student's interval, 4.303 x 0.1 / 3^0.5."""

    def share(of, base=(0.0, 0.0, 0.0), best=(1.0, 1.0, 1.0)):
        known = arms(of=of, base=base, best=best)
        return scores["share_of_gap"](known, "of", "base", "best")

    assert share([0.4, 0.5, 0.6]) == "50% [25%, 75%]"
    assert share([0.5], [0.0], [1.0]) == "-"
    assert share([0.4, 0.5, 0.6], base=[0.0, 0.9, 0.3]) == "17%"  # may have no gap


def test_equal_needs_an_interval_within_the_margin(scores):
    base = [0.100, 0.101, 0.102, 0.103, 0.104]

    def place(of):
        return scores["difference"](arms(of=of, base=base), "of", "base")[2]

    assert place([one + 0.002 for one in base]) == "equal"
    assert place([one + 0.009 for one in base]) == "open"
    assert place([0.06, 0.08, 0.10, 0.12, 0.14]) == "open"
    assert place(base[:4]) == "few seeds"


def test_places_are_corrected_for_the_number_of_arms(scores):
    dense = [0.10, 0.12, 0.14, 0.16, 0.18]

    def places(*gains):
        rows = {f"arm{i}": [s + gain for s in dense] for i, gain in enumerate(gains)}
        return [*scores["verdicts"](arms(dense=dense, **rows), "dense").values()]

    # p-values: 0.046 for a gain of 0.047, 0.0040 for one of 0.080.
    assert places(0.047) == ["above"]
    assert places(0.047, 0.0) == ["open", "open"]
    assert places(0.047, -0.080) == ["above", "below"]


def write(folder, name="summary.json", **scores):
    folder.mkdir(parents=True, exist_ok=True)
    mean = sum(scores.values()) / len(scores)
    datasets = {name: dict(ap=score, ap50=2 * score) for name, score in scores.items()}
    found = dict(mean_ap=mean, mean_ap50=mean, pooled_ap=mean, datasets=datasets)
    (folder / name).write_text(json.dumps(found), "utf-8")


def test_collected_runs_stay_and_grow(collect, tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "out.json"

    def stored():
        collect(runs, out)
        found = json.loads(out.read_text("utf-8"))["runs"]
        return {(one["arm"], one["seed"]): one for one in found}

    write(runs / "dense/seed1", a=0.25, b=0.75)
    write(runs / "single_a/seed1", a=0.125)
    write(runs / "single_full_a/seed1", a=0.5)
    write(runs / "single_full_b/seed1", b=1.0)
    first = stored()
    assert {*first} == {("dense", 1), ("single_full", 1)}  # b of single is missing
    assert first["single_full", 1]["mean_ap"] == 0.75
    assert first["single_full", 1]["datasets"] == dict(a=0.5, b=1.0)
    assert "torch" in first["dense", 1]["machine"]
    assert "not_told" not in first["dense", 1]

    write(runs / "dense/seed1", a=0.0, b=0.0)  # another run in the same folder
    write(runs / "dense-not_told/seed1", "test_summary.json", a=0.125, b=0.375)
    write(runs / "dense/seed2", a=0.5, b=0.5)
    second = stored()
    found = dict(not_told=0.25, pooled_not_told=0.25)
    assert second["dense", 1] == {**first["dense", 1], **found}
    assert second["dense", 2]["mean_ap"] == 0.5
    assert second["dense", 2]["datasets_ap50"] == dict(a=1.0, b=1.0)
    assert {arm for arm, _ in second} == {"dense", "single_full"}

    write(runs / "oracle/seed1", "test_summary.json", a=0.5, b=0.5)
    assert stored()["oracle", 1]["mean_ap"] == 0.5


def test_a_rebuilt_folder_is_compared_with_the_list_of_files(tmp_path):
    script = runpy.run_path(str(RESULTS.parents[1] / "tools/seven_files.py"))
    file = tmp_path / "a/train.json"
    (file.parent / "images").mkdir(parents=True)
    content = dict(categories=[dict(id=1, name="car")], annotations=[])
    content["images"] = [dict(id=n, file_name=f"{n}.jpg") for n in (1, 2)]
    file.write_text(json.dumps(content), "utf-8")
    listed = [*script["lines_of"](tmp_path)]
    assert [*script["differences"](tmp_path, listed)] == []
    content["annotations"] = [dict(image_id=1, category_id=1, bbox=[1, 2, 3, 4])]
    file.write_text(json.dumps(content), "utf-8")
    (file.parent / "images/2.jpg").write_bytes(b"pixels")
    assert [*script["differences"](tmp_path, [*listed, "3.jpg 0 0"])] == [
        "1.jpg: the boxes changed",
        "2.jpg: the file changed",
        f"3.jpg: not in {tmp_path}",
        "a/train.json: the file changed",
    ]
