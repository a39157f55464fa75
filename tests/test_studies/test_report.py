import json
from importlib.metadata import version

import pytest
from matplotlib.figure import Figure

from damex.studies.report import markdown_report, write_report
from damex.studies.result import Row, StudyResult

RUN = dict(command="`study`", date="2020-01-01", minutes=1.5)


@pytest.fixture
def result():
    rows = [
        Row("accuracy, %", "99.46 ± 0.55", [98.0, 100.0], ">= 95", True, "paper", 2),
        Row("|entropy|", "-", [0.25]),
        Row("bound", "<= 87.5", [90.0], "<= 88.3", holds=False, digits=1),
    ]
    return StudyResult("A paper", rows, "It holds.", Figure(), dict(width=8))


def test_rows_know_mean_and_sample_deviation(result):
    first, second, third = result.rows
    # Deviations -1 and 1 from 99: sqrt(2 / (2 - 1)).
    assert (first.mean, first.spread) == (99.0, pytest.approx(2**0.5))
    assert first.measured() == "99.00 ± 1.41"
    assert second.measured() == "0.250"
    assert result.failures() == [third]


def test_the_report_shows_published_beside_ours_and_what_fails(result):
    text = markdown_report(result, "name", run=RUN)
    lines = text.splitlines()
    assert lines[0] == "## A paper"
    assert (
        "| accuracy, % | paper | 99.46 ± 0.55 | 99.00 ± 1.41 | 2 | >= 95 | yes |"
        in lines
    )
    assert "| \\|entropy\\| | - | - | 0.250 | 1 | - | - |" in lines
    assert "| bound | - | <= 87.5 | 90.0 | 1 | <= 88.3 | **no** |" in lines
    assert "Settings: width 8." in lines
    run = "Run: command: `study`; date: 2020-01-01; minutes: 1.5; with python 3."
    assert lines[-1].startswith(run)
    assert f"torch {version('torch')}" in lines[-1]


def test_three_files_are_written_and_the_json_holds_every_seed(result, tmp_path):
    paths = write_report(result, tmp_path / "new", "name", run=RUN)
    assert [path.name for path in paths] == ["name.json", "name.md", "name.png"]
    content = json.loads(paths[0].read_text())
    assert content["rows"][0]["values"] == [98.0, 100.0]
    assert content["rows"][2]["holds"] is False
    assert content["run"]["minutes"] == 1.5
    assert paths[2].read_bytes().startswith(b"\x89PNG")
