"""The layers of the package, read from the syntax tree: who may import whom."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# They put the layers together: registered classes, the command, the lazy API.
ROOF = {"damex", "damex.__main__", "damex.registry"}
LAYERS = {"moe", "hf", "papers", "workbench"}
# Upper bounds of files and lines.
LIMITS = {"core": (77, 19_086), "workbench": (51, 12_720), "tests": (147, 32_867)}
LIMITS |= {"hf": (6, 1_221), "tests/test_hf": (6, 1_542)}


def layer_of(module):
    """The layer of a module: roof, a folder of its own, core, or another package."""
    parts = module.split(".")
    if module in ROOF or parts[0] != "damex":
        return "roof" if module in ROOF else parts[0]
    return parts[1] if parts[1] in LAYERS else "core"


def module_of(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_of(path) for path in (ROOT / "damex").rglob("*.py")}


def imports_of(path):
    """Each module that a file imports when it runs, in functions, too."""
    for node in nodes_of(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for name in node.names:
                full = f"{node.module}.{name.name}"
                yield full if full in MODULES else node.module
        elif isinstance(node, ast.Call) and is_dynamic(node.func):
            for text in node.args[:1]:
                if isinstance(text, ast.Constant):
                    yield text.value


def nodes_of(node):
    """All nodes of a tree, but those for the type checker."""
    yield node
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    for child in ast.iter_child_nodes(node):
        yield from nodes_of(child)


def is_dynamic(function):
    name = getattr(function, "id", getattr(function, "attr", None))
    return name in {"import_module", "__import__"}


ARROWS = sorted(
    {
        (module_of(path), name)
        for path in (ROOT / "damex").rglob("*.py")
        for name in imports_of(path)
    }
)


# A checkpoint may name any class that a config can name.
ALLOWED = {("damex.inference.stored", "damex.registry")}


@pytest.mark.parametrize(
    ("layer", "above"),
    [
        ("moe", {"core", "hf", "papers", "workbench", "roof"}),
        ("core", {"hf", "papers", "workbench", "roof"}),
        ("hf", {"papers", "workbench", "roof"}),
        ("papers", {"hf", "workbench", "roof"}),
    ],
)
def test_no_layer_imports_one_above(layer, above):
    arrows = {
        (source, target)
        for source, target in ARROWS
        if layer_of(source) == layer and layer_of(target) in above
    }
    about_itself = {(source, "damex") for source in MODULES}  # __version__
    errors = {(source, "damex.errors") for source in MODULES}
    assert sorted(arrows - about_itself - errors) == sorted(
        ALLOWED if layer == "core" else ()
    )


def test_the_idea_needs_torch_alone():
    allowed = {"moe", "torch", *sys.stdlib_module_names}
    assert [
        arrow
        for arrow in ARROWS
        if layer_of(arrow[0]) == "moe"
        and layer_of(arrow[1]) not in allowed
        and arrow[1] != "damex.errors"
    ] == []


def test_no_file_imports_itself_by_others():
    """Imports have no circle; those within functions count, too."""
    graph = {module: set() for module in MODULES - ROOF}
    for source, target in ARROWS:
        if source in graph and target in graph and source != target:
            graph[source].add(target)
    while leaves := [module for module, targets in graph.items() if not targets]:
        for leaf in leaves:
            del graph[leaf]
        for targets in graph.values():
            targets.difference_update(leaves)
    assert sorted(graph) == []


@pytest.mark.parametrize("layer", LIMITS)
def test_layers_keep_their_size(layer):
    folder = {"core": "damex", "hf": "damex/hf", "workbench": "damex/workbench"}
    files = [*(ROOT / folder.get(layer, layer)).rglob("*.py")]
    rooms = {"core": {"hf", "papers", "workbench"}, "tests": {"test_hf"}}
    skipped = rooms.get(layer, set())
    files = [one for one in files if not skipped & {*one.relative_to(ROOT).parts}]
    lines = sum(len(one.read_text("utf-8").splitlines()) for one in files)
    print(f"{layer}: {len(files)} files, {lines:,} lines")
    assert len(files) <= LIMITS[layer][0]
    assert lines <= LIMITS[layer][1]
