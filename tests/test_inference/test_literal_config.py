"""The config of a stranger's checkpoint is read as values, and nothing else."""

import math

import pytest
from mmengine.config import Config

from damex.config_files import PlainConfig
from damex.errors import DataError
from damex.inference.literal_config import read_literals


@pytest.mark.parametrize("kind", [Config, PlainConfig])
def test_what_a_training_writes_is_read_as_it_was(kind):
    values = dict(
        model=dict(type="DINO", size=(1, 2), rate=-1e-4, none=None, flag=True),
        steps=[dict(type="Resize", scale=(1333, 800)), dict(type="Pad")],
        names={"two words": 1, "class": [1, [2]]},
        note="a 'quoted' \\ text\nof two lines",
        empty=dict(),
    )
    assert read_literals(kind(values).pretty_text, where="a.pth") == values


def test_numbers_without_end_are_read():
    found = read_literals("a = [inf, -inf, nan]", where="a.pth")["a"]
    assert found[:2] == [math.inf, -math.inf]
    assert math.isnan(found[2])


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "a = __import__('os').system('true')",
        "a = open('x')",
        "a = dict(b=print())",
        "a = dict([('b', 1)])",
        "a = dict(**{'b': 1})",
        "a = {**{'b': 1}}",
        "a = dict({'b': print()})",
        "a = b",
        "a = [x for x in (1, 2)]",
        "a = f'{1}'",
        "a = 1 + 1",
        "a = -'b'",
        "a.b = 1",
        "a, b = 1, 2",
        "print(1)",
        "a: int = 1",
        "a = lambda: 1",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(DataError, match=r"x\.pth is more than values.*line 2"):
        read_literals(f"ok = 1\n{text}", where="x.pth")


@pytest.mark.parametrize("text", ["a = (", "a = " + "[" * 5000, "a = 1\0"])
def test_text_that_is_no_program_is_refused(text):
    with pytest.raises(DataError, match=r"x\.pth cannot be read"):
        read_literals(text, where="x.pth")


@pytest.mark.parametrize("brace", ["{{$HOME:x}}", "{{{ fileDirname }}}", "\\{{a}}"])
def test_what_is_written_is_read_as_it_was(tmp_path, brace):
    values = dict(
        model={brace: brace, "it's": (1, [2.5]), 3: None, "a': 1, 'b": -math.inf},
        note=f"{brace} \"quoted\" 'twice'\n" * 9,
    )
    text = PlainConfig(values).pretty_text
    assert read_literals(text, where="a.pth") == values
    (tmp_path / "a.py").write_text(text)
    assert Config.fromfile(tmp_path / "a.py").to_dict() == values
