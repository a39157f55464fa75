import json
from importlib.metadata import version

import pytest
import torch
from matplotlib.figure import Figure

from studies.harness import Session, seeded
from studies.report import (
    Row,
    StudyResult,
    markdown_report,
    unjudged,
    write_report,
)

pytestmark = pytest.mark.studies


def test_outcomes_are_gathered_by_case_in_the_order_of_the_jobs():
    jobs = [(case, seed) for seed in (3, 4) for case in "ba"]
    found = Session().run(jobs, lambda case, seed: f"{case}{seed}", "measure")
    assert found == {"b": ["b3", "b4"], "a": ["a3", "a4"]}
    assert list(found) == ["b", "a"]


def test_a_seed_decides_what_is_drawn_inside_and_nothing_outside():
    torch.manual_seed(0)
    plain = torch.rand(2)
    torch.manual_seed(0)
    first = torch.rand(1)
    draws = []
    for _ in range(2):
        with seeded(7):
            draws.append(torch.rand(3))
    assert torch.equal(*draws)
    assert torch.equal(torch.cat([first, torch.rand(1)]), plain)


RUN = dict(command="`study`", date="2020-01-01", minutes=1.5)


@pytest.fixture
def result():
    rows = [
        Row("accuracy, %", "99.46 ± 0.55", [98.0, 100.0], ">= 95", True, "paper", 2),
        Row("|entropy|", "-", [0.25]),
        Row("bound", "<= 87.5", [90.0], "<= 88.3", holds=False, digits=1),
    ]
    return StudyResult("A paper", rows, Figure(), dict(width=8), "It is so.")


def test_the_report_shows_published_beside_ours_and_what_fails(result):
    text = markdown_report(result, "name", run=RUN)
    lines = text.splitlines()
    assert lines[0] == "## A paper"
    assert lines[2] == "1 of 2 criteria hold; not confirmed: bound. It is so."
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


def test_the_conclusion_names_what_failed_and_where():
    good = Row("a", "-", [1.0], "> 0", holds=True)
    bad = Row("b", "-", [1.0], "> 2", holds=False, settings="N = 3")
    shown = Row("c", "-", [1.0])
    text = StudyResult("A paper", [good, bad, shown], Figure()).conclusion
    assert text == "1 of 2 criteria hold; not confirmed: b (N = 3)."
    left = unjudged([good, bad])
    assert [(row.criterion, row.holds) for row in left] == [("", None)] * 2
    text = StudyResult("A paper", [good, *left], Figure(), remark="Quick.").conclusion
    assert text == "1 of 1 criteria hold. Quick."


def test_three_files_are_written_and_the_json_holds_every_seed(result, tmp_path):
    paths = write_report(result, tmp_path / "new", "name", run=RUN)
    assert [path.name for path in paths] == ["name.json", "name.md", "name.png"]
    content = json.loads(paths[0].read_text())
    assert content["rows"][0]["values"] == [98.0, 100.0]
    assert content["rows"][2]["holds"] is False
    assert content["run"]["minutes"] == 1.5
    assert paths[2].read_bytes().startswith(b"\x89PNG")
