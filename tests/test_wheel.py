"""What an installed damex has outside of a checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from functools import partial
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
CODE = """
import sys
import damex
from damex.config_files import find_config, moe_of_file, read_config

assert damex.__file__.startswith(sys.argv[1]), damex.__file__
print(read_config("quickstart").filename)
print(find_config("configs/damex_dino/damex-dino-4scale_r50_8xb2-12e_coco-voc.py"))
print(find_config("damex-dino-4scale_r50_8xb2-12e_coco-voc"))
assert moe_of_file("vanilla") == moe_of_file("configs/_base_/moe/vanilla.py")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the content of a wheel."""
    return install(tmp_path_factory.mktemp("wheel"), "build_wheel")


def install(folder, build):
    """Build a wheel of a checkout ``folder/damex``; returns its files in a folder."""
    pytest.importorskip("setuptools", reason="builds a wheel")
    source, site = folder / "damex", folder / "site"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "requirements.txt", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("damex", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True)
    code = f"from setuptools import build_meta; print(build_meta.{build}('..'))"
    subprocess.run([sys.executable, "-c", code], cwd=source, check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    return site


def test_a_checkout_is_found_from_the_folder_above_it(tmp_path):
    site = install(tmp_path, "build_editable")
    code = f"import site; site.addsitedir({str(site)!r}); import damex; print(damex)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"from '{tmp_path / 'damex' / 'damex' / '__init__.py'}'" in done.stdout


def test_every_config_is_in_the_wheel(site):
    shipped, configs = site / "damex" / ".mim" / "configs", ROOT / "configs"
    for kind in ("*.py", "*.json"):
        files = {path.relative_to(shipped) for path in shipped.rglob(kind)}
        assert files == {path.relative_to(configs) for path in configs.rglob(kind)}


def test_every_file_of_the_package_is_in_the_wheel(site):
    """Templates and pictures, too."""
    words = ["git", "-c", "safe.directory=*", "ls-files", "-z", "--", "damex"]
    done = subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True)
    names = [*filter(None, done.stdout.split("\0"))]
    assert names
    assert [name for name in names if not (site / name).exists()] == []


@pytest.fixture
def run(site, tmp_path, run_python):
    return partial(run_python, cwd=tmp_path, env=dict(PYTHONPATH=str(site)))


def test_configs_have_names_far_from_a_checkout(site, run):
    found = [Path(line) for line in run("-c", CODE, site).stdout.splitlines()]
    assert all(file.is_relative_to(site) for file in found)
    assert found[0].name == "quickstart.py"
    assert found[1] == found[2]


def test_the_commands_work_far_from_a_checkout(run):
    done = run("-m", "damex", "train", "quikstart", status=2)
    assert "did you mean 'quickstart'?" in done.stderr
    run("-m", "damex")
    run("-m", "damex", "tain", status=2)
