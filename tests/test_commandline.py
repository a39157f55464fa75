"""The command ``damex``: help without torch, and mistakes in one line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import damex.__main__ as program
from damex.commandline import commands, data, measuring
from damex.commandline.parser import Parser
from damex.commandline.run import run_command
from damex.datasets.formats.conversion import FORMATS

ROOT = Path(__file__).parents[1]
HELP = [
    [],
    ["--help"],
    *([name, "--help"] for name in program.COMMANDS),
    *(["data", name, "-h"] for name in data.COMMANDS),
]
# Every module that takes seconds, or that a broken installation could lack.
HEAVY = ("torch", "mmengine", "mmcv", "mmdet", "numpy", "PIL")
CODE = f"""
import sys
from damex.__main__ import main
for arguments in {HELP!r}:
    assert main(arguments) == 0, arguments
    loaded = [name for name in {HEAVY!r} if name in sys.modules]
    assert not loaded, (arguments, loaded)
"""


def test_no_help_imports_torch():
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_every_command_has_help_with_an_example(capsys):
    for arguments in HELP[2:]:
        if arguments == ["data", "--help"]:
            continue
        assert program.main(arguments) == 0
        said = capsys.readouterr().out
        typed = " ".join(arguments[:-1])
        assert said.startswith(f"usage: damex {typed} ")
        assert f"examples:\n  damex {typed}" in said


@pytest.mark.parametrize("module", [commands, data, measuring])
def test_examples_are_command_lines_that_work(module):
    for name, make in vars(module).items():
        if not name.endswith("_parser"):
            continue
        parser = make()
        assert isinstance(parser, Parser)
        for line in parser.epilog.splitlines()[1:]:
            words = line.split()
            start = len(parser.prog.split())
            assert " ".join(words[:start]) == parser.prog
            parser.parse_args(words[start:])


def test_the_formats_of_convert_are_those_that_can_be_read():
    assert set(data.FORMATS) == {one.name for one in FORMATS}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["tain"], "damex has no command 'tain'; did you mean 'train'?"),
        (["data", "chek"], "damex data has no command 'chek'; did you mean 'check'?"),
        (["predict"], "required: checkpoint, images; see --help."),
        (["predict", "a.pth", "b.png", "--min-score", "2"], "must be in [0, 1], got 2"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(arguments, words, capsys):
    assert program.main(arguments) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert words in said
    assert "\n" not in said


@pytest.mark.parametrize("words", [(), ("interrupted after 3 iterations.",)])
def test_an_interrupt_ends_in_one_line(words, capsys):
    def interrupt(_):
        raise KeyboardInterrupt(*words)

    assert run_command(interrupt, []) == 130
    assert capsys.readouterr().err.strip() == (*words, "interrupted")[0]


def test_the_installed_command_is_this_one():
    text = (ROOT / "pyproject.toml").read_text()
    module, function = re.search(
        r'\[project.scripts\]\ndamex = "(\S+):(\S+)"', text
    ).groups()
    assert getattr(sys.modules[module], function) is program.main
