"""``damex doctor``: planted problems, each with the command that fixes it."""

import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from damex.compat import OpsReport
from damex.workbench.doctor import (
    AGAIN,
    MODULES,
    Row,
    check_attention,
    check_fit,
    declared,
    doctor,
    examine,
    explain_failure,
    show,
)
from tests.conftest import ALONE

ROOT = Path(__file__).resolve().parents[1]
MMDET, MMCV = "onedl-mmdetection", "onedl-mmcv"


def run_doctor(
    *blocked: str, module: str = "damex.workbench.doctor", options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs the doctor where the blocked packages cannot be imported."""
    code = f"""{ALONE.format(hidden=blocked)}
import runpy
sys.argv[1:] = {options!r}
runpy.run_module({module!r}, run_name="__main__")
"""
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True
    )


def status_of(output: str, name: str) -> str:
    """Returns the row of that component, with single spaces."""
    rows = [line for line in output.splitlines() if line.strip().split("  ")[0] == name]
    assert len(rows) == 1, output
    return " ".join(rows[0].split())


@pytest.mark.slow
def test_good_environment_is_well(capsys):
    assert doctor() == 0
    said = capsys.readouterr().out
    assert " ok (C" in status_of(said, "torch")
    assert "ok" in status_of(said, MMDET)
    assert said.endswith("All is well.\n")
    result = run_doctor(options=["--quiet"])
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


def test_broken_torch_is_reported_once():
    result = run_doctor("torch", "numpy", "mmcv", "mmengine", "mmdet")
    assert result.returncode == 1, result.stderr
    assert status_of(result.stdout, "torch").endswith("PROBLEM")
    assert f"      {AGAIN} " in result.stdout
    for name in ("torchvision", "onedl-mmengine", MMDET, "timm"):
        assert status_of(result.stdout, name).endswith("not tried (see above)"), name
    assert "mmcv ops" not in result.stdout  # of an mmcv that cannot be judged


@pytest.mark.parametrize(
    ("module", "missing"),
    [("damex.workbench.doctor", "rich"), ("damex", "rich"), ("damex", "cyclopts")],
)
def test_without_its_own_packages_a_program_says_how_to_get_them(module, missing):
    result = run_doctor(missing, module=module, options=["doctor"])
    assert result.returncode == 1
    assert "pip install " in result.stderr
    assert result.stderr.endswith(f"{missing}\n")
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("versions", "version", "allowed"),
    [
        (">=2.4", "2.10.0", True),  # ten is more than four
        (">=2.4", "2.3.9", False),
        ("==2.4.0", "2.4+cpu", True),
        (">=2.6", "2.16.0.dev20260101", True),  # a nightly build
    ],
)
def test_requirement_allows(versions, version, allowed):
    row = check_fit(Requirement(f"any{versions}"), Row("any", version), "fix it")
    assert (row.problem, row.fix) == (
        ("", "") if allowed else ("version does not fit", "fix it")
    )


def test_from_source_the_needs_are_those_of_requirements_txt(monkeypatch):
    def not_installed(name):
        raise metadata.PackageNotFoundError(name)

    installed = {need.name: need.specifier for need in declared()}
    monkeypatch.setattr(metadata, "metadata", not_installed)
    needs = declared()
    assert needs[0] == Requirement("python>=3.11")
    assert {need.name: need.specifier for need in needs} == installed
    assert {*MODULES} <= {*installed, "opencv-python"}


def problems(monkeypatch, versions, modules=None):
    """The problems found among other distributions; None stands for a missing one."""
    real = metadata.version

    def version(name):
        if versions.get(name, "") is None:
            raise metadata.PackageNotFoundError(name)
        return versions.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    provided = metadata.packages_distributions() | (modules or {})
    monkeypatch.setattr(metadata, "packages_distributions", lambda: provided)
    return {row.name: (row.problem, row.fix) for row in examine() if row.problem}


INSTALL = 'pip install --upgrade "'
CASES = [
    ({MMDET: None}, {"mmdet": []}, MMDET, "not installed", INSTALL + MMDET),
    ({MMDET: "3.4.1"}, {}, MMDET, "version does not fit", INSTALL + MMDET),
    # mmdet 3.3 fixes DINO to 256 channels, and mmengine 0.10.7 resumes wrongly.
    *(
        (
            *({ours: None, other: "9"}, {module: [other]}, ours),
            f"{other} in its place is not supported",
            f"pip uninstall -y {other} && {INSTALL}{ours}",
        )
        for ours, other, module in (
            ("onedl-mmengine", "mmengine", "mmengine"),
            (MMDET, "mmdet", "mmdet"),
        )
    ),
    (
        *({"some-fork": "3.9"}, {"mmdet": [MMDET, "Some_Fork", "Some_Fork"]}, MMDET),
        f"{MMDET} and some-fork overwrite each other",
        f"pip uninstall -y {MMDET} some-fork && {INSTALL}{MMDET}",
    ),
    # pip would compile mmcv for up to an hour.
    (
        *({MMCV: None}, {"mmcv": []}, MMCV, "not installed"),
        f"env -u PIP_NO_BUILD_ISOLATION {INSTALL}{MMCV}",
    ),
]


@pytest.mark.parametrize(("versions", "modules", "name", "problem", "fix"), CASES)
def test_distributions_that_do_not_fit(
    monkeypatch, versions, modules, name, problem, fix
):
    monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    found = problems(monkeypatch, versions, modules)
    assert [*found] == [name]
    assert found[name][0] == problem
    assert found[name][1].startswith(fix)


def test_any_distribution_of_opencv_will_do(monkeypatch):
    twin = "opencv-python-headless"
    versions = {"opencv-python": None, twin: "4.12.0"}
    assert problems(monkeypatch, versions, {"cv2": [twin]}) == {}


PAIR = "pip install --upgrade --force-reinstall torch torchvision"


@pytest.mark.parametrize(
    ("name", "error", "fix"),
    [
        ("opencv-python", "libGL.so.1: cannot open", f"{AGAIN} opencv-python-headless"),
        ("torchvision", "operator torchvision::nms does not exist", PAIR),
        ("timm", "operator torchvision::nms does not exist", PAIR),
        ("torch", "RuntimeError: Numpy is not available", '"numpy<2"'),
        (MMDET, "No module named 'terminaltables'", "pip install terminaltables"),
        (MMDET, "No module named 'pkg_resources'", 'pip install "setuptools<82"'),
        (MMDET, "No module named 'mmdet.models'", f'{AGAIN} "{MMDET}==1.2"'),
    ],
)
def test_failed_import_names_error_and_command(name, error, fix):
    row = explain_failure(Row(name, "1.2"), error)
    assert row.problem == f"import fails: {error}"
    assert fix in row.fix


@pytest.mark.parametrize(
    ("kind", "has_gpu", "problem", "found", "note"),
    [
        ("stub", False, "unasked", "torch", "on the CPU"),
        ("compiled", True, "unasked", "mmcv", "compiled; not in bfloat16"),
        ("stub", True, "", "deformops", "on GPU"),
        ("stub", True, "missing: pip install", "torch", "missing: pip install"),
    ],
)
def test_row_of_deformable_attention(monkeypatch, kind, has_gpu, problem, found, note):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr("damex.compat.kernels.fused_problem", lambda *_: problem)
    row = check_attention(OpsReport(kind))
    assert (row.found, row.note, row.problem) == (found, note, "")


def test_problems_and_commands_are_below_the_table(capsys):
    fix = f"pip install {'m' * 300}"
    show([Row("torch", "2.5", ">=2.4", "CPU [build]"), Row("x", "-", "", "", "p", fix)])
    table, fixing = capsys.readouterr().out.split("To fix, from the top:\n")
    assert status_of(table, "torch") == "torch 2.5 >=2.4 ok (CPU [build])"
    assert status_of(table, "x") == "x - PROBLEM"
    assert fixing == f"  x: p\n      {fix}\n"  # unwrapped, for copying
