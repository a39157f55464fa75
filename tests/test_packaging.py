"""What the files beside the package say about it."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from damex import __version__
from damex.workbench.export.onnx_graph import PACKAGES

ROOT = Path(__file__).parents[1]


def requirements(lines, python):
    """The versions of the requirements that apply to a Python on Linux, by name."""
    where = {"python_version": python, "python_full_version": f"{python}.9"}
    where |= {"sys_platform": "linux", "platform_machine": "x86_64"}
    needs = [Requirement(line) for line in lines if not line.startswith(("#", " "))]
    return {
        canonicalize_name(need.name): need.specifier
        for need in needs
        if need.marker is None or need.marker.evaluate(where)
    }


def lines_of(name):
    return (ROOT / name).read_text("utf-8").splitlines()


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_constraints_have_a_version_for_everything_that_make_installs(python):
    project = tomllib.loads("\n".join(lines_of("pyproject.toml")))["project"]
    extras = re.search(r"'\.\[([\w,]+)\]'", "\n".join(lines_of("Makefile")))[1]
    lines = lines_of("requirements.txt")
    for extra in extras.split(","):
        lines += project["optional-dependencies"][extra]
    needs = requirements(lines, python)
    found = [line.removesuffix(" \\") for line in lines_of("constraints.txt")]
    pins = requirements(found, python)
    assert {"torch", "pytest", "onnx"} < needs.keys() <= pins.keys()
    versions = {name: str(pins[name]).removeprefix("==") for name in needs}
    assert [name for name, need in needs.items() if versions[name] not in need] == []


def test_an_export_needs_what_the_extra_installs():
    project = tomllib.loads("\n".join(lines_of("pyproject.toml")))["project"]
    needs = requirements(project["optional-dependencies"]["onnx"], "3.11")
    assert {name: str(need)[2:] for name, need in needs.items()} == {**PACKAGES}


def test_constraints_have_a_hash_for_each_version():
    pins = "\n".join(lines_of("constraints.txt")[3:])
    each = r"[\w.-]+==\S+( ; [^\\\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n"
    assert re.fullmatch(f"({each})+", f"{pins}\n")


def test_the_citation_is_of_this_version():
    assert f"version: {__version__}" in lines_of("CITATION.cff")
    assert any(
        line.startswith(f"## {__version__} ") for line in lines_of("CHANGELOG.md")
    )


def test_a_tagged_commit_is_ready_to_be_released():
    asked = ["git", "-C", str(ROOT), "describe", "--tags", "--exact-match"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("this commit has no tag")
    assert done.stdout.strip() == f"v{__version__}"
    assert not any("example.org" in line for line in lines_of("pyproject.toml"))
    assert f"## {__version__} (unreleased)" not in lines_of("CHANGELOG.md")
