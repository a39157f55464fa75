"""Worlds: the same objects under shifted or equal names."""

import json

import pytest

from damex.workbench.cli.run import run_command
from studies.worlds import WORDS, WORLDS, app


@pytest.fixture
def make(tmp_path):
    """``make(names)``: three small worlds; their annotations by world."""

    def run(names):
        out = tmp_path / names
        sizes = ["--count", "3", "--train", "20", "--val", "2"]
        assert run_command(app, ["--out", str(out), "--names", names, *sizes]) == 0
        found = {}
        for world in WORLDS[:3]:
            content = json.loads((out / world / "train.json").read_text())
            assert [one["name"] for one in content["categories"]] == [*WORDS]
            found[world] = content["annotations"]
        return found

    return run


def test_conflicting_names_are_shifted_by_the_number_of_the_world(make):
    agreeing, conflicting = make("agreeing"), make("conflicting")
    for number, world in enumerate(WORLDS[:3]):
        assert {one["category_id"] for one in agreeing[world]} == {*range(1, 9)}
        shifted = [
            one | {"category_id": (one["category_id"] - 1 + number) % 8 + 1}
            for one in agreeing[world]
        ]
        assert conflicting[world] == shifted


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--names", "mixed"], '"conflicting", "agreeing"'),
        (["--count", "9"], "1 to 8, got 9"),
        (["--train", "0"], "1 or more"),
    ],
)
def test_the_command_refuses_with_a_message(tmp_path, capsys, words, message):
    assert run_command(app, ["--out", str(tmp_path / "out"), *words]) == 2
    assert message in capsys.readouterr().err
