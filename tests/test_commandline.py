"""The command ``damex``: help without torch, and mistakes in one line."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import damex
import damex.__main__ as program
from damex.commandline import commands, data
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


def test_checking_data_takes_neither_mmdet_nor_what_it_imports(two_datasets, tmp_path):
    config = tmp_path / "config.py"
    imports = dict(imports=["damex.registry"])
    config.write_text(f"mixture = {two_datasets!r}\ncustom_imports = {imports!r}")
    code = f"""
import sys
from damex.__main__ import main
main(["data", "check", {str(config)!r}])
assert not [name for name in ("mmdet", "scipy", "matplotlib") if name in sys.modules]
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "in 2 datasets with 16 images" in done.stdout


def test_every_command_has_help_with_an_example(capsys):
    for arguments in HELP[2:]:
        if arguments == ["data", "--help"]:
            continue
        assert program.main(arguments) == 0
        said = capsys.readouterr().out
        typed = " ".join(arguments[:-1])
        assert said.startswith(f"usage: damex {typed} ")
        assert f"examples:\n  damex {typed}" in said


@pytest.mark.parametrize("module", [commands, data])
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
        (["predict"], "checkpoint, images, as in: damex predict epoch_3.pth photo.jpg"),
        (["train"], "required: config, as in: damex train quickstart; see damex train"),
        (["predict", "a.pth", "b.png", "--min-score", "2"], "must be in [0, 1], got 2"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(arguments, words, capsys):
    assert program.main(arguments) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert words in said
    assert "\n" not in said


def test_the_version_is_one_line_without_torch(capsys):
    assert program.main(["--version"]) == 0
    assert capsys.readouterr().out == f"damex {damex.__version__}\n"


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_terminal_sees_a_line_before_the_imports(monkeypatch, capsys, on_terminal):
    seen = []
    monkeypatch.setattr("sys.stderr.isatty", lambda: on_terminal)
    monkeypatch.setattr(
        program, "import_module", lambda _: seen.append(capsys.readouterr()) or commands
    )
    with pytest.raises(AttributeError):  # that module has no function of this name
        program.main(["train"])
    assert seen[0].out == ""
    assert seen[0].err == (
        f"damex {damex.__version__}: loading ...\n" if on_terminal else ""
    )


def test_the_quick_start_elsewhere_says_how_to_make_its_data(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert program.main(["train", "quickstart"]) == 2
    said = capsys.readouterr().err.strip()
    assert "data/toy/shapes/train.json: there is no such annotation file" in said
    assert said.endswith("here: python -m damex.toydata --out data/toy")


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
