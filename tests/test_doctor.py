import subprocess
import sys
from collections.abc import Sequence
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from damex.compat import OpsReport
from damex.doctor import (
    TRIALS,
    Finding,
    check_attention,
    check_numpy,
    check_ops,
    check_python,
    check_torchvision,
    check_versions,
    declared,
    examine,
    explain_failure,
    fits,
    show,
)

ROOT = Path(__file__).resolve().parents[1]
MMDET = Requirement("onedl-mmdetection>=3.5")


def run_doctor(
    *blocked: str, module: str = "damex.doctor", options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs the doctor where the blocked packages cannot be imported."""
    code = f"""
import runpy, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
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


@pytest.mark.parametrize(
    ("kind", "has_gpu", "fault", "found", "note"),
    [
        ("stub", False, "unasked", "torch", "on the CPU"),
        ("compiled", True, "unasked", "mmcv", "compiled; not in bfloat16"),
        ("stub", True, "", "deformops", "on GPU"),
        ("stub", True, "missing: pip install", "torch", "missing: pip install"),
    ],
)
def test_row_of_deformable_attention(monkeypatch, kind, has_gpu, fault, found, note):
    monkeypatch.setattr("torch.cuda.is_available", lambda: has_gpu)
    monkeypatch.setattr("damex.compat.kernels.fused_fault", lambda *_: fault)
    row = check_attention(OpsReport(kind))
    assert (row.found, row.note, row.problem) == (found, note, "")


# ---- the whole program ----


@pytest.mark.slow
def test_good_environment_is_well():
    result = run_doctor()
    assert result.returncode == 0, result.stdout + result.stderr
    torch, needs = metadata.version("torch"), {n.name: n for n in declared()[1]}
    start = f"torch {torch} {needs['torch'].specifier} ok (C"
    assert status_of(result.stdout, "torch").startswith(start)
    assert "ok" in status_of(result.stdout, "onedl-mmdetection")
    assert result.stdout.endswith("All is well.\n")
    result = run_doctor(options=["--quiet"])
    assert (result.returncode, result.stdout) == (0, ""), result.stderr


@pytest.mark.slow
def test_blocked_mmdet_is_fixed_by_its_own_command():
    result = run_doctor("mmdet", "timm")
    assert result.returncode == 1, result.stderr
    assert status_of(result.stdout, "onedl-mmdetection").endswith("PROBLEM")
    assert status_of(result.stdout, "onedl-mmcv").endswith("ok")
    assert "No module named 'mmdet" in result.stdout
    assert "pip install --force-reinstall --no-deps" in result.stdout


def test_broken_torch_is_reported_once():
    result = run_doctor("torch", "numpy", "mmcv", "mmengine", "mmdet")
    assert result.returncode == 1, result.stderr
    assert status_of(result.stdout, "torch").endswith("PROBLEM")
    for name in ("torchvision", "onedl-mmengine", "onedl-mmdetection", "timm"):
        assert status_of(result.stdout, name).endswith("not tried (see above)"), name
    # Nothing that takes torch or mmcv can be judged.
    for name in ("numpy and torch", "mmcv ops"):
        assert name not in result.stdout


# ---- versions ----


@pytest.mark.parametrize(
    ("versions", "version", "allowed"),
    [
        (">=2.4", "2.10.0", True),  # ten is more than four
        (">=2.4", "2.3.9", False),
        ("==2.4.0", "2.4+cpu", True),
        (">=2.6", "2.15.0+cu130", True),
        (">=2.6", "2.16.0.dev20260101", True),  # a nightly build
    ],
)
def test_requirement_allows(versions, version, allowed):
    assert fits(Requirement(f"any{versions}"), version) is allowed


def test_needs_are_those_of_the_installed_damex_or_of_requirements_txt(monkeypatch):
    about = Message()
    about["Requires-Python"] = ">=3.10"
    about["Requires-Dist"] = "torch>=2.4"
    about["Requires-Dist"] = 'pytest>=8; extra == "dev"'
    monkeypatch.setattr(metadata, "metadata", lambda name: about)
    assert declared() == (PYTHON, [Requirement("torch>=2.4")])

    def not_installed(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "metadata", not_installed)
    python, needs = declared()
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    expected = [Requirement(line) for line in lines if not line.startswith("#")]
    assert (python, needs) == (PYTHON, expected)
    assert Requirement("torch>=2.6,<3") in needs


def test_every_trial_is_of_something_needed():
    names = {need.name for need in declared()[1]} | {"opencv-python"}
    assert set(TRIALS) <= names
    order = list(TRIALS)
    for name, trial in TRIALS.items():
        assert all(order.index(need) < order.index(name) for need in trial.needs)


# ---- checks on made-up versions ----

INSTALL = 'pip install --upgrade "onedl-mmdetection>=3.5"'
OLD, NEW = "mmdet", "onedl-mmdetection"


@pytest.mark.parametrize(
    ("installed", "found", "needed", "problem", "fix"),
    [
        ({NEW: "3.5.1"}, "3.5.1", ">=3.5", "", ""),
        ({}, "-", ">=3.5", "not installed", INSTALL),
        ({NEW: "3.4.1"}, "3.4.1", ">=3.5", "version does not fit", INSTALL),
        (
            {OLD: "3.3.0"},
            *("-", ">=3.5", "mmdet in its place is not supported"),
            f"pip uninstall -y mmdet && {INSTALL}",
        ),
        (
            {OLD: "3.3.0", NEW: "3.5.1"},
            *("3.5.1", ">=3.5", "onedl-mmdetection and mmdet overwrite each other"),
            f"pip uninstall -y onedl-mmdetection mmdet && {INSTALL}",
        ),
    ],
)
def test_versions_of_a_distribution_and_its_twin(
    installed, found, needed, problem, fix
):
    row = check_versions(MMDET, installed)
    assert (row.found, row.needed, row.problem, row.fix) == (
        *(found, needed, problem, fix),
    )
    assert row.note == ""
    both = {"opencv-python": "4.12.0", "opencv-python-headless": "4.12.0"}
    assert check_versions(Requirement("opencv-python"), both).problem == ""


# ---- traps of this ecosystem, planted ----


def problems(monkeypatch, installed, removed=(), modules=()):
    """The problems that the doctor finds among other distributions than there are."""
    real = metadata.version

    def version(name):
        if name in removed:
            raise metadata.PackageNotFoundError(name)
        return installed.get(name) or real(name)

    monkeypatch.setattr(metadata, "version", version)
    provided = metadata.packages_distributions() | dict(modules)
    monkeypatch.setattr(metadata, "packages_distributions", lambda: provided)
    return {row.name: (row.problem, row.fix) for row in examine() if row.problem}


@pytest.mark.parametrize(
    ("ours", "other", "module"),
    [
        ("onedl-mmengine", "mmengine", "mmengine"),
        ("onedl-mmcv", "mmcv-lite", "mmcv"),
        ("onedl-mmdetection", "mmdet", "mmdet"),
    ],
)
def test_original_packages_are_replaced(monkeypatch, ours, other, module):
    """mmdet 3.3 fixes DINO to 256 channels, and mmengine 0.10.7 resumes wrongly."""
    found = problems(monkeypatch, {other: "9"}, [ours], {module: [other]})
    problem, fix = found[ours]
    assert problem == f"{other} in its place is not supported"
    assert fix.startswith(f'pip uninstall -y {other} && pip install --upgrade "{ours}')


def test_every_lower_bound_is_declared_once():
    """What `damex doctor` accepts is what pip installs."""
    assert all(trial.twins in ((), (HEADLESS,)) for trial in TRIALS.values())
    for need in declared()[1]:
        assert any(one.operator == ">=" for one in need.specifier), need.name


@pytest.mark.parametrize("variable", ["", "env -u PIP_NO_BUILD_ISOLATION "])
def test_mmcv_is_not_installed_by_a_build_that_compiles(monkeypatch, variable):
    monkeypatch.delenv("PIP_NO_BUILD_ISOLATION", raising=False)
    if variable:
        monkeypatch.setenv("PIP_NO_BUILD_ISOLATION", "0")
    found = problems(monkeypatch, {}, ["onedl-mmcv"], {"mmcv": []})
    start, _, comment = found["onedl-mmcv"][1].partition("  # ")
    assert start.startswith(f'{variable}pip install --upgrade "onedl-mmcv')
    assert comment == (
        "a minute; with --no-build-isolation it compiles for up to an hour"
    )


@pytest.mark.parametrize(
    ("other", "module", "name"),
    [
        ("mmdet", "mmdet", "onedl-mmdetection"),
        ("Some_Fork", "mmdet", "onedl-mmdetection"),
        ("mmcv-full", "mmcv", "onedl-mmcv"),
    ],
)
def test_two_distributions_that_provide_one_module(monkeypatch, other, module, name):
    other_name = other.lower().replace("_", "-")
    modules = {module: [name, other, other]}
    found = problems(monkeypatch, {other_name: "3.9"}, modules=modules)
    assert [*found] == [name]
    problem, fix = found[name]
    assert problem == f"{name} and {other_name} overwrite each other"
    assert fix.startswith(f"pip uninstall -y {name} {other_name} && pip install ")


HEADLESS = "opencv-python-headless"
AGAIN = "pip install --force-reinstall --no-deps"
PAIR = "pip install --upgrade --force-reinstall torch torchvision"


@pytest.mark.parametrize(
    ("name", "error", "fix"),
    [
        ("opencv-python", "libGL.so.1: cannot open", f"{AGAIN} opencv-python-headless"),
        ("torchvision", "operator torchvision::nms does not exist", PAIR),
        ("timm", "operator torchvision::nms does not exist", PAIR),
        (NEW, "No module named 'terminaltables'", "pip install terminaltables"),
        (NEW, "No module named 'pkg_resources'", 'pip install "setuptools<82"'),
        (NEW, "No module named 'mmdet.models'", f'{AGAIN} "onedl-mmdetection==1.2"'),
        ("pycocotools", "numpy.dtype size changed", f'{AGAIN} "pycocotools==1.2"'),
    ],
)
def test_failed_import_names_error_and_command(name, error, fix):
    row = explain_failure(Finding(name, "1.2"), error)
    assert row.problem == f"import fails: {error}"
    assert row.fix.endswith(fix)
    twin = Finding(NEW, "3.3.0", note="from mmdet")
    assert '"mmdet==3.3.0"' in explain_failure(twin, "AssertionError: old mmcv").fix


PYTHON, TORCH = Requirement("python>=3.10"), Requirement("torch==2.5.1")
LITE = OpsReport("absent", "mmcv-lite has no mmcv.ops")


@pytest.mark.parametrize(
    ("row", "problem", "fix"),
    [
        (check_python(PYTHON, "3.10.2"), "", ""),
        (check_python(PYTHON, "3.9.18"), "version does not fit", "python=3.11"),
        (check_torchvision(TORCH, "2.5.1+cu121"), "", ""),
        (check_torchvision(TORCH, "2.6.0"), "built for torch ==2.5.1", PAIR),
        (check_numpy(""), "", ""),
        (check_numpy("not available"), "numpy: not available", '"numpy<2"'),
        (check_ops(OpsReport("compiled")), "", ""),
        (check_ops(OpsReport("stub", "no ops")), "", ""),  # the stub will do
        (check_ops(LITE), "mmcv-lite has no mmcv.ops", "pip install onedl-mmcv"),
    ],
)
def test_checks_of_pairs(row, problem, fix):
    assert bool(row.problem) == bool(problem)
    assert problem in row.problem
    assert fix in row.fix


# ---- the table ----


def test_problems_and_commands_are_below_the_table(capsys):
    timm = Requirement("timm>=1.0")
    rows = [Finding("torch", "2.5", ">=2.4", note="CPU [build]")]
    rows.append(Finding("mmcv", "2.3", untried=True))
    show([*rows, check_versions(MMDET, {}), check_versions(timm, {})])
    table, fixing = capsys.readouterr().out.split("To fix, from the top:\n")
    assert status_of(table, "torch") == "torch 2.5 >=2.4 ok (CPU [build])"
    assert status_of(table, "mmcv") == "mmcv 2.3 not tried (see above)"
    assert status_of(table, "timm") == "timm - >=1.0 PROBLEM"
    assert fixing.splitlines() == [
        "  onedl-mmdetection: not installed",
        '      pip install --upgrade "onedl-mmdetection>=3.5"',
        "  timm: not installed",
        '      pip install --upgrade "timm>=1.0"',
        "All that is not installed at once:",
        '      pip install "onedl-mmdetection>=3.5" "timm>=1.0"',
    ]
    show([Finding("x", problem="p" * 300, fix=f"pip install {'m' * 300}")])
    assert f"      pip install {'m' * 300}\n" in capsys.readouterr().out  # unwrapped


@pytest.mark.parametrize(
    ("module", "missing", "fix"),
    [
        ("damex.doctor", "rich", "pip install packaging rich"),
        ("damex", "rich", "pip install rich"),
        ("damex", "cyclopts", "pip install cyclopts"),
    ],
)
def test_without_its_own_packages_a_program_says_how_to_get_them(module, missing, fix):
    result = run_doctor(missing, module=module, options=["doctor"])
    assert result.returncode == 1
    assert result.stderr.endswith(f"{fix}\n")
    assert len(result.stderr.splitlines()) == 1
