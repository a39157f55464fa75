"""The command ``damex``: help without torch, and mistakes in one line."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

import damex
import damex.__main__ as program
from damex.workbench.cli import data
from damex.workbench.cli import run as commands
from damex.workbench.cli.commands import app
from damex.workbench.cli.run import run_command
from damex.workbench.formats.conversion import FORMATS

ROOT = Path(__file__).parents[1]
NAMES = [
    *([name] for name in app if name[0] != "-" and name != "data"),
    *(["data", name] for name in data.data if name[0] != "-"),
]
HELP = [[], ["--help"], ["data"], *([*words, "--help"] for words in NAMES)]
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


def test_no_help_imports_torch(run_python):
    run_python("-c", CODE)


def test_checking_data_takes_neither_mmdet_nor_what_it_imports(
    two_datasets, tmp_path, run_python
):
    config = tmp_path / "config.py"
    imports = dict(imports=["damex.registry"])
    config.write_text(f"mixture = {two_datasets!r}\ncustom_imports = {imports!r}")
    code = f"""
import sys
from damex.__main__ import main
main(["data", "check", {str(config)!r}])
assert not [name for name in ("mmdet", "scipy", "matplotlib") if name in sys.modules]
"""
    done = run_python("-c", code)
    assert "in 2 datasets with 16 images" in done.stdout


@pytest.mark.parametrize("words", NAMES, ids=" ".join)
def test_help_has_examples_that_work(words, capsys):
    assert program.main([*words, "--help"]) == 0
    examples = capsys.readouterr().out.partition("Examples:\n")[2].splitlines()
    assert examples
    for line in examples:
        name, *given = line.split()
        assert [name, *given[: len(words)]] == ["damex", *words]
        app.parse_args(given, exit_on_error=False, print_error=False)


def test_the_formats_of_convert_are_those_that_can_be_read():
    assert set(get_args(data.Format)) == {one.name for one in FORMATS}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tain", 'Unknown command "tain". Did you mean "train"?'),
        ("data chek", 'Unknown command "chek". Did you mean "check"?'),
        ("predict", "CHECKPOINT .* damex predict epoch_3.pth photo.jpg --draw seen"),
        ("predict a.pth", "IMAGES requires"),
        ("train", r"CONFIG .* damex train quickstart\. See damex train --help\."),
        ("predict a.pth b.png --min-score 2", "for --min-score. Must be <= 1."),
        ("predict a.pth b.png --jsn f", r"--jsn. Did you mean --json\?"),
        ("train none.py", r"no config file .none\.py."),
        ("predict a.pth b.png --batch-size 0", '"0" for --batch-size'),
        ("train a.py --launcher torch", 'Choose from: "none", "pytorch"'),
        (
            "data browse a.py --samples 0",
            '"0" for --samples.* See damex data browse --h',
        ),
        ("export a.pth --out b.onnx --image-size 3", "--image-size requires 2"),
        ("prune a.pth --drop --out b.pth", "--drop requires at least 1"),
        ("train a.py --cfg-options --amp", "--cfg-options requires at least 1"),
    ],
)
def test_a_wrong_command_line_ends_in_one_line(line, words, capsys):
    assert program.main(line.split()) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("error: ")
    assert re.search(words, said)
    assert "\n" not in said


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("train a.py", dict(resume=None, cfg_options=(), launcher="none")),
        ("train a.py --resume --amp", dict(resume=(), amp=True)),
        ("train a.py --resume b.pth", dict(resume=("b.pth",))),
        ("train a.py --local_rank=1 --launcher pytorch", dict(launcher="pytorch")),
        (
            "train a.py --cfg-options a=1 b=[2,3] --work-dir w --cfg-options c=4",
            dict(cfg_options=("a=1", "b=[2,3]", "c=4"), work_dir="w"),
        ),
        ("predict a.pth b.png --draw c d.png", dict(images=("b.png", "d.png"))),
        ("export a.pth --out=b.onnx --image-size 3 4", dict(image_size=(3, 4))),
        ("headroom a.py --baselines --seeds 0 1", dict(baselines=(), seeds=(0, 1))),
    ],
)
def test_options_reach_the_command(monkeypatch, line, expected):
    seen = {}
    name, *_ = line.split()
    module = SimpleNamespace(**{name: lambda **given: seen.update(given)})
    monkeypatch.setattr(commands, "import_module", lambda _: module)
    assert program.main(line.split()) == 0
    assert {key: seen[key] for key in expected} == expected


def test_the_version_is_one_line(capsys):
    assert program.main(["--version"]) == 0
    assert capsys.readouterr().out == f"damex {damex.__version__}\n"


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_terminal_sees_a_line_before_the_imports(monkeypatch, capsys, on_terminal):
    monkeypatch.setattr("sys.stderr.isatty", lambda: on_terminal)
    monkeypatch.setattr(commands, "import_module", lambda _: commands)
    with pytest.raises(AttributeError):  # that module has no function of this name
        program.main(["doctor"])
    line = f"damex {damex.__version__}: loading ...\n"
    assert capsys.readouterr() == ("", line if on_terminal else "")


def test_the_quick_start_elsewhere_says_how_to_make_its_data(
    monkeypatch, capsys, tmp_path
):
    monkeypatch.chdir(tmp_path)
    assert program.main(["train", "quickstart"]) == 2
    said = capsys.readouterr().err.strip()
    assert "data/toy/shapes/train.json: the annotation file does not exist" in said
    assert said.endswith("here: damex toydata --out data/toy")


@pytest.mark.parametrize("words", [(), ("interrupted after 3 iterations.",)])
def test_an_interrupt_ends_in_one_line(words, capsys):
    def interrupt(_):
        raise KeyboardInterrupt(*words)

    assert run_command(interrupt, []) == 130
    assert capsys.readouterr().err.strip() == (*words, "interrupted")[0]


def run_code(code, **streams):
    line = f"import sys; from damex.workbench.cli.run import run_command; {code}"
    command = [sys.executable, "-c", line]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **streams)


def test_a_reader_that_ends_first_causes_no_traceback():
    code = "sys.exit(run_command(lambda _: print('a' * 1_000_000), []))"
    writer = run_code(code, stdout=subprocess.PIPE)
    writer.stdout.read(1)
    writer.stdout.close()
    assert writer.stderr.read() == ""
    assert writer.wait(60) == 141


def test_a_broken_pipe_of_something_else_is_not_hidden():
    code = (
        "import os; read, write = os.pipe(); os.close(read); "
        "run_command(lambda _: os.write(write, b'a'), [])"
    )
    failed = run_code(code, stdout=subprocess.DEVNULL)
    assert "BrokenPipeError" in failed.stderr.read()
    assert failed.wait(60) == 1


def test_the_installed_command_is_this_one():
    text = (ROOT / "pyproject.toml").read_text()
    module, function = re.search(
        r'\[project.scripts\]\ndamex = "(\S+):(\S+)"', text
    ).groups()
    assert getattr(sys.modules[module], function) is program.main
