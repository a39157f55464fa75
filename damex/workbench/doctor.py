"""``damex doctor``: check the installation and print a command to fix each problem.

Packages are imported one by one, so it also runs if torch or mmdet is missing or
broken. The exit status is 0 without problems, else 1.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path

from damex import __version__
from damex.compat import OpsReport, ensure_ops

try:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as error:
    sys.exit(
        f"damex.workbench.doctor: {error}; fix it with: pip install packaging rich"
    )

MMCV = "onedl-mmcv"
OPENCV = Requirement("opencv-python")  # of mmcv; its variants have the same files
# The import that tests a distribution, in order of dependency: after a problem the
# rest is not imported. Of other requirements, only the version is checked.
MODULES = {
    "torch": "torch",
    "torchvision": "torchvision",
    OPENCV.name: "cv2",
    "onedl-mmengine": "mmengine",
    MMCV: "mmcv",
    "onedl-mmdetection": "mmdet.models",
    "timm": "timm",
    "pycocotools": "pycocotools.mask",
    "faster-coco-eval": "faster_coco_eval",
}
UNTRIED = "not tried (see above)"
AGAIN = "pip install --force-reinstall --no-deps"
NO_COMPILER = "  # a minute; with --no-build-isolation it compiles for up to an hour"


@dataclass(frozen=True)
class Row:
    """One row of the table; ``fix`` is the command that fixes its ``problem``."""

    name: str
    found: str = "-"
    needed: str = ""
    note: str = ""
    problem: str = ""
    fix: str = ""


def doctor(*, quiet: bool = False) -> int:
    """Print the table and return the exit status."""
    rows = examine()
    has_problems = any(row.problem for row in rows)
    if has_problems or not quiet:
        show(rows)
    return int(has_problems)


def show(rows: Sequence[Row]) -> None:
    """Print the table, followed by the problems and their fixes."""
    # Wrap cells on a screen only.
    width = None if sys.stdout.isatty() else 200
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    table = Table("component", "found", "needed", "status", box=box.SIMPLE_HEAD)
    for row in rows:
        status = f"ok ({row.note})" if row.note else "ok"
        if row.problem or row.note == UNTRIED:
            status = "PROBLEM" if row.problem else UNTRIED
        style = "bold red" if row.problem else None
        table.add_row(row.name, row.found, row.needed, status, style=style)
    console.print(table)
    problems = [row for row in rows if row.problem]
    lines = ["To fix, from the top:" if problems else "All is well."]
    for row in problems:
        lines += [f"  {row.name}: {row.problem}", f"      {row.fix}"]
    console.print("\n".join(lines), soft_wrap=True)  # unwrapped, for copying


def examine() -> list[Row]:
    """Check all versions, and imports until there is a problem."""
    (python, *needs), ops = declared(), ensure_ops()  # mmdet's import needs the ops
    row = Row("python", ".".join(map(str, sys.version_info[:3])))
    fix = "uv venv --python 3.11  # or: conda create -n damex python=3.11"
    note = "" if _version("damex") else "runs from source, not installed"
    rows = [check_fit(python, row, fix), Row("damex", __version__, note=note)]
    order = [*MODULES, *(need.name for need in needs)]
    providers = metadata.packages_distributions()
    for need in sorted([*needs, OPENCV], key=lambda need: order.index(need.name)):
        row = check_version(need, providers)
        if need.name in MODULES and not row.problem:
            is_broken = any(one.problem for one in rows)
            row = replace(row, note=UNTRIED) if is_broken else check_import(row)
        rows.append(row)
        if need.name == MMCV and not row.problem and row.note != UNTRIED:
            problem = ops.reason if ops.kind == "absent" else ""
            fix = f"pip uninstall -y mmcv-lite && pip install {MMCV}"
            rows += [Row("mmcv ops", ops.kind, "", ops.reason, problem, fix)]
            rows += [check_attention(ops)]
    return rows


def declared() -> list[Requirement]:
    """Return the requirements on Python and distributions, also if run from source."""
    try:
        about = metadata.metadata("damex")
    except metadata.PackageNotFoundError:
        root = Path(__file__).resolve().parents[2]
        project = (root / "pyproject.toml").read_text("utf-8")
        python = re.findall(r'^requires-python = "(.*)"$', project, re.MULTILINE)[0]
        text = (root / "requirements.txt").read_text("utf-8")
        lines = re.findall(r"^\w.*", text, re.MULTILINE)
    else:
        python, lines = about["Requires-Python"], about.get_all("Requires-Dist") or []
    needs = map(Requirement, [f"python{python}", *lines])
    return [n for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]


def check_version(need: Requirement, providers: Mapping[str, list[str]]) -> Row:
    """Check the version of a distribution, and which others provide its module."""
    module = MODULES.get(need.name, "").partition(".")[0]
    names = [need.name, *providers.get(module, ())]
    found = {key: _version(key) for key in map(canonicalize_name, names)}
    known = [key for key, version in found.items() if version]
    own = canonicalize_name(need.name)
    row = Row(need.name, found[own] or "-", str(need.specifier))
    fix = f'pip install --upgrade "{need.name}{need.specifier}"'
    if need.name == MMCV:
        isolate = "PIP_NO_BUILD_ISOLATION" in os.environ
        fix = "env -u PIP_NO_BUILD_ISOLATION " * isolate + fix + NO_COMPILER
    if need.name == OPENCV.name and known:
        note = "" if own in known else f"from {known[0]}"
        return replace(row, found=found[known[0]] or "-", note=note)
    if known == [own]:
        return check_fit(need, row, fix)
    if not known:
        return replace(row, problem="not installed", fix=fix)
    fault = "overwrite each other" if own in known else "in its place is not supported"
    fix = f"pip uninstall -y {' '.join(known)} && {fix}"
    return replace(row, problem=f"{' and '.join(known)} {fault}", fix=fix)


def check_fit(need: Requirement, row: Row, fix: str) -> Row:
    """Check a version, without local parts such as +cpu."""
    row = replace(row, needed=str(need.specifier))
    is_allowed = need.specifier.contains(row.found, prereleases=True)
    return row if is_allowed else replace(row, problem="version does not fit", fix=fix)


def check_import(row: Row) -> Row:
    """Import a distribution whose version fits; torch has to work with numpy, too."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = import_module(MODULES[row.name])
            if row.name == "torch":
                module.zeros(1).numpy()
                row = replace(row, note=_devices())
    except Exception as error:  # any error is the finding
        return explain_failure(row, f"{type(error).__name__}: {error}")
    return row


def explain_failure(row: Row, error: str) -> Row:
    """Add an import error and its fix to a row."""
    fix = f'{AGAIN} "{row.name}=={row.found}"'
    missing = re.search(r"No module named '([^'.]+)'", error)
    if row.name == "torchvision" or "torchvision::" in error:
        fix = "pip install --upgrade --force-reinstall torch torchvision"
    elif row.name == "torch" and "umpy is not available" in error:
        fix = 'pip install "numpy<2"  # or a newer torch and torchvision'
    elif row.name == OPENCV.name and re.search(r"lib\w+\.so", error):
        fix = f"pip uninstall -y opencv-python && {AGAIN} opencv-python-headless"
    elif missing and missing[1] == "pkg_resources":
        fix = 'pip install "setuptools<82"'
    elif missing and missing[1] != MODULES[row.name].partition(".")[0]:
        fix = f"pip install {missing[1]}"
    return replace(row, problem=f"import fails: {' '.join(error.split())}", fix=fix)


def check_attention(ops: OpsReport) -> Row:
    """Name what computes deformable attention on this machine."""
    import torch

    row = Row("deformable attention", "torch", note="on the CPU")
    if not torch.cuda.is_available():
        return row
    if ops.kind == "compiled":
        return replace(row, found="mmcv", note="compiled; not in bfloat16")
    from damex.compat.kernels import fused_problem

    # As float32 and in heads as wide as those of DINO.
    problem = fused_problem(torch.device("cuda"), torch.float32, 32)
    found = "torch" if problem else "deformops"
    return replace(row, found=found, note=problem or "on GPU")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> str:
    """The CUDA build of torch and its visible GPUs."""
    import torch

    if torch.version.cuda is None:
        return "CPU build"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    seen = f"{len(names)} x {' and '.join(sorted(set(names)))}"
    return f"CUDA {torch.version.cuda} build, {seen if names else 'no GPU seen'}"


if __name__ == "__main__":
    sys.exit(doctor(quiet="--quiet" in sys.argv))
