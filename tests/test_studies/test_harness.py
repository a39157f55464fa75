import io
import json
from importlib.metadata import version

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from studies.harness import StudyProgress
from studies.report import Row, StudyResult, markdown_report, write_report

pytestmark = pytest.mark.studies


def lines_of(items, **kwargs):
    """What is printed when every item takes ten seconds."""
    ticks = iter(range(0, 1000, 10))
    screen = io.StringIO()
    progress = StudyProgress(
        Console(file=screen), every_seconds=20, clock=lambda: next(ticks)
    )
    assert list(progress.track(items, "train", **kwargs)) == [0, 1, 2, 3, 4]
    return screen.getvalue().splitlines()


def test_a_pipe_gets_a_line_now_and_then_and_one_at_the_end():
    assert lines_of(range(5)) == [
        "  train: 2/5, 30 s left",
        "  train: 4/5, 10 s left",
        "  train: 5/5, 0 s left",
    ]


def test_without_a_known_number_no_time_is_promised():
    assert lines_of(iter(range(5))) == ["  train: 2", "  train: 4"]
    assert lines_of(iter(range(5)), total=5)[0] == "  train: 2/5, 30 s left"


def test_a_terminal_gets_a_bar():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80)
    assert list(StudyProgress(console).track([7, 8], "fit")) == [7, 8]
    assert "fit" in screen.getvalue()
    assert "100%" in screen.getvalue()


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
