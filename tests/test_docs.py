"""The pages name only what exists: links, files, commands, options, keys, tables."""

import ast
import contextlib
import functools
import inspect
import itertools
import json
import re
import runpy
import shlex
import shutil
from collections.abc import Mapping
from pathlib import Path

import mmdet.models.layers
import mmdet.registry
import pytest
from cyclopts import CycloptsError
from markdown_it import MarkdownIt
from mdit_py_plugins.anchors import anchors_plugin
from mmengine.registry import Registry

import damex.registry  # noqa: F401  (registers the classes)
from damex.config_files import KEYS, MOE, config_of, read_part
from damex.datasets import label_space, spec
from damex.errors import ConfigError
from damex.models import config as moe_fields
from damex.models import dataset_awareness
from damex.options import parse_options
from damex.workbench.cli.commands import app as damex_app
from damex.workbench.cli.run import run_command
from studies.worlds import app as worlds_app
from tests.conftest import shipped_configs
from tools.analysis.step_cost import app as step_cost_app

ROOT = Path(__file__).parents[1]
FILES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")]
FILES += [ROOT / name for name in ("configs/README.md", "data/README.md")]
FILES += [path for path in ROOT.glob("docs/**/*.md") if "_build" not in path.parts]
PAGES = sorted(path.relative_to(ROOT).as_posix() for path in FILES)
MARKDOWN = MarkdownIt().enable("table").use(anchors_plugin, max_level=3)
# Words before a command, and programs that start a Python file or module.
BEFORE = re.compile(r"\w+=.*|do|then|time|nice|-n|\d+")
LAUNCHERS = re.compile(r"(.*/)?(python3?|torchrun)")
# A file or folder of the repository, perhaps with wildcards.
REPOSITORY = re.compile(
    r"(?<![\w./-])((?:configs|damex|docs|studies|tests|tools)/[\w./*{},-]*[\w*}])"
)
# Names in examples of code.
EXAMPLES = {"_delete_", "arms", "project", "start_scale"}
EXAMPLES |= {"GumbelGate", "MyDataset", "MyNet", "EntropyLoss", "PrototypeRouter"}
EXAMPLES |= {"MyHook", "ShiftExperts", "scale"}
# Files of the reader and of the build, and places to fill in.
OTHERS = re.compile(r"configs/(my_|with_)\w+\.py|.*\b[A-Z]{3,}\b.*|docs/_build/.*")
REGISTERED = {
    kind.__name__: kind
    for registry in vars(mmdet.registry).values()
    if isinstance(registry, Registry)
    for one in (registry, registry.parent)
    if one is not None
    for kind in one.module_dict.values()
}

MODULES = {"studies.worlds": worlds_app, "tools.analysis.step_cost": step_cost_app}

every_page = pytest.mark.parametrize("page", PAGES)


@functools.cache
def tokens(page):
    return MARKDOWN.parse((ROOT / page).read_text("utf-8"))


def inline(page, kind):
    """Tokens of a kind inside of paragraphs, headings and tables."""
    children = [one for token in tokens(page) for one in token.children or ()]
    return [one for one in children if one.type == kind]


def fences(page, *languages):
    every = [token for token in tokens(page) if token.type == "fence"]
    return [one.content for one in every if not languages or one.info in languages]


@functools.cache
def anchors(page):
    """Ids of headings as GitHub and Sphinx make them, and names of autodoc."""
    text = (ROOT / page).read_text("utf-8")
    found = {token.attrGet("id") for token in MARKDOWN.parse(text)}
    return found | {*re.findall(r"^\.\. auto\w+:: (\S+)", text, re.MULTILINE)}


def links(page):
    found = [token.attrGet("href") for token in inline(page, "link_open")]
    found += [token.attrGet("src") for token in inline(page, "image")]
    html = [token.content for token in tokens(page) if token.type == "html_block"]
    html += [token.content for token in inline(page, "html_inline")]
    found += re.findall(r'(?:href|src)="([^"]+)"', " ".join(html))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


@every_page
def test_links_resolve(page):
    problems = []
    for link in links(page):
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists():
            problems.append(f"{link}: no such file")
        elif anchor:
            linked = target.resolve().relative_to(ROOT).as_posix()
            if anchor not in anchors(linked):
                problems.append(f"{link}: no such heading")
    assert problems == []


@every_page
def test_fences_name_their_language_and_python_compiles(page):
    code = [one for one in tokens(page) if one.type in ("fence", "code_block")]
    assert [one.content for one in code if not one.info] == []
    for text in fences(page, "python"):
        ast.parse(text)


@every_page
def test_code_imports_public_names(page):
    reference = (ROOT / "docs/reference/api.md").read_text("utf-8")
    for text in fences(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("damex"):
                names = [f"{node.module}.{one.name}" for one in node.names]
                assert [one for one in names if f"`{one}`" not in reference] == []


@every_page
def test_named_files_exist(page):
    code = [*fences(page), *(token.content for token in inline(page, "code_inline"))]
    names = {*REPOSITORY.findall("\n".join(code))}
    spelled = {name: re.sub(r"\{[^}]*\}", "*", name) for name in names}
    missing = [name for name in names if not any(ROOT.glob(spelled[name]))]
    assert [name for name in missing if not OTHERS.fullmatch(name)] == []


def program(words):
    """The app and the arguments of a command of this project; None for others."""
    words = list(itertools.dropwhile(BEFORE.fullmatch, words))
    if words and LAUNCHERS.fullmatch(words[0]):
        words = itertools.dropwhile(lambda w: w != "-m" and w[-3:] != ".py", words)
        words = [word for word in words if word != "-m"]
    name, *rest = words or [""]
    if name.rpartition("/")[2] == "damex":
        return damex_app, rest
    if name in MODULES:
        return MODULES[name], rest
    if name in ("tools/train.py", "tools/test.py"):
        return damex_app, [Path(name).stem, *rest]
    if name.startswith("tools/analysis/"):
        return module(name)["app"], rest
    return None


@functools.cache
def module(name):
    """A script and what it imports from its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str((ROOT / name).parent))
        return runpy.run_path(str(ROOT / name), run_name="imported")


def commands(page):
    """Commands of this project in bash fences and after the prompts of sessions."""
    bash, console = (
        "\n".join(fences(page, language)).replace("\\\n", " ").splitlines()
        for language in ("bash", "console")
    )
    variables = dict(re.findall(r'^ *(\w+)="(.*)"$', "\n".join(bash), re.MULTILINE))
    for line in bash + [one[2:] for one in console if one.startswith("$ ")]:
        line = re.sub(r"\$(\w+)", lambda m: variables.get(m[1], m[0]), line)
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        parts = itertools.groupby(lexer, lambda word: set(word) <= set("();<>|&"))
        for words in (words for is_operator, words in parts if not is_operator):
            if found := program([*words]):
                yield line, *found


@every_page
def test_commands_parse(page):
    """Names of commands and options, numbers of values, choices; no placeholders."""
    problems = []
    for line, app, words in commands(page):
        problems += [f"{line}: synopsis" for word in words if word.startswith("[")]
        try:
            app.parse_args(words, exit_on_error=False, print_error=False)
        except CycloptsError as error:
            problems.append(f"{line}: {error}")
    assert problems == []


@every_page
def test_commands_and_options_in_sentences_exist(page):
    for token in inline(page, "code_inline"):
        name, *words = re.split(r"[\s\[\]=]+", token.content)
        if name != "damex" or not re.match(r"[a-z]", " ".join(words)):
            continue
        chain, apps, rest = damex_app.parse_commands(words)
        assert chain, f"{token.content}: no such command"
        if apps[-1].default_command:
            arguments = apps[-1].assemble_argument_collection()
            known = {"--help", *(name for one in arguments for name in one.names)}
            options = {word for word in rest if word.startswith("--")}
            assert options <= known, f"{token.content}: no such option"


def config_named(name, options=()):
    """A config of the repository; the template in place of a reader's file."""
    is_of_reader = name.endswith(".py") and "/" not in name
    if is_of_reader or OTHERS.fullmatch(name) or name.startswith(("data/", "work_")):
        name = "own_datasets"
    return config_of(name, options, needs_model=False)


def is_key(key, value):
    """Whether a config has a key, its class takes it, or the reference lists it."""
    *parents, last = key.split(".")
    for part in parents:
        if isinstance(value, list):
            value = dict(enumerate(value)).get(int(part))
        else:
            value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, Mapping):
        kinds = inspect.getmro(REGISTERED.get(value.get("type"), object))
        taken = {
            name for kind in kinds[:-1] for name in inspect.signature(kind).parameters
        }
        if last in {*value, *taken}:
            return True
    return key in KEYS or last in documented_keys()


@functools.cache
def documented_keys():
    text = (ROOT / "docs/reference/config.md").read_text("utf-8")
    first = "\n".join(re.findall(r"^\| (`.*?) \|", text, re.MULTILINE))
    return {key.rpartition(".")[2] for key in re.findall(r"`([\w.]+)`", first)}


@every_page
def test_configs_experts_and_config_keys_exist(page):
    problems = []
    for line, app, words in commands(page):
        try:
            given = app.parse_args(words, exit_on_error=False, print_error=False)[1]
            given = given.arguments
            name = given.get("config", "own_datasets")
            words = given.get("cfg_options", ())
            config, options = config_named(name), parse_options(words)
            config_named(name, words)
            for moe in (given.get("moe"), given.get("experts"), options.get("moe")):
                for one in [moe] if isinstance(moe, str) else moe or ():
                    config.moe = read_part(one, MOE).get("moe")
        except (ConfigError, CycloptsError) as error:
            problems.append(f"{line}: {error}")
            continue
        unknown = [key for key in options if not is_key(key, config.to_dict())]
        problems += [f"{line}: the config has no key {key}" for key in unknown]
    assert problems == []


@functools.cache
def known_keys():
    """Arguments of registered classes, fields of ``moe``, keys of shipped configs."""
    known = {*KEYS, "version", "constructor"}  # of label files; mmengine pops it
    kinds = {one for kind in REGISTERED.values() for one in inspect.getmro(kind)[:-1]}
    for part in (label_space, spec, moe_fields, dataset_awareness, mmdet.models.layers):
        kinds |= {*filter(inspect.isclass, vars(part).values())}
    for kind in kinds:
        with contextlib.suppress(ValueError):  # no signature
            known |= {*inspect.signature(kind).parameters}
    for name in ("own_datasets", "damex-dino-4scale_r50_8xb2-12e_coco-voc"):
        known |= {*keys_of(config_of(name, (), needs_model=False).to_dict())}
    return known


def keys_of(value):
    if isinstance(value, Mapping):
        yield from value
    if isinstance(value, Mapping | list | tuple):
        for one in value.values() if isinstance(value, Mapping) else value:
            yield from keys_of(one)


@every_page
def test_keys_and_classes_in_code_exist(page):
    for text in fences(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict":
                named = {one.arg: one.value for one in node.keywords}
                assert {*named} <= known_keys() | EXAMPLES | {None, "type"}, text
                if isinstance(kind := named.get("type"), ast.Constant):
                    assert kind.value in {*REGISTERED} | EXAMPLES, text


def test_the_reference_of_keys_lists_only_keys():
    assert documented_keys() - known_keys() == set()


def test_the_variants_are_the_files():
    page = (ROOT / "docs/experts/variants.md").read_text("utf-8")
    table = page.partition("## All variants")[2].partition("\n## ")[0]
    listed = {*re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)}
    files = {path.stem for path in shipped_configs(folder="moe")}
    assert listed == files - {"deepmoe_stage2"}  # named in the row of deepmoe


def test_the_reference_lists_all_commands_and_registered_classes():
    page = (ROOT / "docs/reference/commands.md").read_text("utf-8")
    groups = [(damex_app, ""), (damex_app["data"], "data ")]
    names = {
        f"{group}{name}" for app, group in groups for name in app if name[0] != "-"
    }
    listed = {*re.findall(r"^\| `damex ([\w ]+)` \|", page, re.MULTILINE)}
    assert listed == {name for name in names if "-" not in name} - {"data"}
    listed = {str(name).rpartition(".")[2] for name in anchors("docs/reference/api.md")}
    ours = {k for k, one in REGISTERED.items() if one.__module__.startswith("damex.")}
    assert "TopKGate" in ours
    assert ours <= listed


@every_page
def test_marked_tables_are_those_of_the_json(page):
    text, update = (ROOT / page).read_text("utf-8"), module("docs/results/update.py")
    assert text.count("<!-- table ") == len(update["TABLE"].findall(text))
    assert update["with_tables"](text) == text


@pytest.mark.parametrize("page", ["commands.md", "api.md"])
def test_the_reference_is_that_of_the_code(page):
    text = (ROOT / "docs/reference" / page).read_text("utf-8")
    assert module("docs/reference/update.py")["WRITERS"][page](text) == text


def test_every_table_is_on_a_page():
    update = module("docs/results/update.py")
    pages = "".join((ROOT / page).read_text("utf-8") for page in PAGES)
    assert {match[2] for match in update["TABLE"].finditer(pages)} == {
        *update["TABLES"]
    }


@pytest.fixture
def run(tmp_path, run_python, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = dict(PYTHONPATH=str(ROOT))
    return lambda *words: run_python(*words, env=place).stdout


@pytest.mark.slow
def test_the_readme_runs(tmp_path, run):
    """Its commands and its Python for two folders, as they are, on small toy data."""
    sizes = ["--count", "2", "--train", "8", "--val", "4"]
    assert run_command(worlds_app, ["--out", "toy", *sizes]) == 0
    worlds = [path.parent for path in tmp_path.glob("toy/*/train.json")]
    code = [one for one in fences("README.md") if "data/toy/" in one]
    for name in {*re.findall(r"data/toy/(\w+)", "".join(code))}:
        shutil.copytree(worlds.pop(), tmp_path / "data/toy" / name)
    lines = [words for line, _, words in commands("README.md") if line in code[0]]
    assert [words[0] for words in lines] == ["train", "predict"]
    short = {"train_dataloader.sampler.samples_per_epoch": 8}
    lines[0] += ["--cfg-options", *(f"{key}={one}" for key, one in short.items())]
    for words in lines:
        assert run_command(damex_app, words) == 0
    assert any((tmp_path / "seen").iterdir())
    assert "epochs=1)" in code[1]
    program = code[1].replace("epochs=1)", f"epochs=1, options={short})")
    (tmp_path / "program.py").write_text(program, "utf-8")
    printed = run("program.py")
    images = tmp_path / "data/toy/photos/images"
    assert all(one.name in printed for one in images.iterdir())


@pytest.mark.slow
def test_parts_of_ones_own_pass_the_tests_on_their_page(tmp_path, run):
    code = (ROOT / "docs/research/write-parts.md").read_text("utf-8")
    tests = ["test_gumbel_gate", "test_my_parts"]
    for name in (*tests, *(one.removeprefix("test_") for one in tests)):
        (text,) = re.findall(rf"`{name}\.py`.*?```python\n(.*?)```", code, re.DOTALL)
        (tmp_path / f"{name}.py").write_text(text, "utf-8")
    printed = run("-m", "pytest", "-v")
    assert all(f"{name}.py::" in printed for name in tests)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, run):
    notebook = (ROOT / "docs/get-started/tutorial.ipynb").read_text("utf-8")
    cells = json.loads(notebook)["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "FOLDERS" in code[0]
    assert run_command(damex_app, ["toydata", "--out", "toy"]) == 0
    options = {"train_dataloader.sampler.samples_per_epoch": 16}
    code[0] = (
        "FOLDERS = dict(photos='toy/photos', arcade='toy/arcade')\n"
        f"EPOCHS, OPTIONS, WORK_DIR = 1, {options!r}, 'run'"
    )
    (tmp_path / "notebook.py").write_text("\n\n".join(code), "utf-8")
    found = run("notebook.py")
    assert (tmp_path / "run" / "mixture.onnx").is_file()
    assert "checkpoint: " in found
