"""``damex doctor``: check the installation and print a command to fix each problem.

Packages are imported one by one, so it also runs if torch or mmdet is missing or
broken. The exit status is 0 without problems, else 1.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module, metadata
from pathlib import Path
from typing import NamedTuple

from damex import __version__
from damex.compat import OpsReport, ensure_ops

try:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
    from rich import box
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as error:
    sys.exit(f"damex.doctor: {error}; fix it with: pip install packaging rich")


class Trial(NamedTuple):
    """The import that tests a distribution."""

    module: str
    needs: tuple[str, ...] = ()  # not tried if one of these fails
    twins: tuple[str, ...] = ()  # distributions that will do in its place


ENGINE, MMCV, MMDET = "onedl-mmengine", "onedl-mmcv", "onedl-mmdetection"
# In this order; for other requirements, only the version is checked.
TRIALS: Mapping[str, Trial] = {
    "torch": Trial("torch"),
    "torchvision": Trial("torchvision", ("torch",)),
    "opencv-python": Trial("cv2", twins=("opencv-python-headless",)),
    ENGINE: Trial("mmengine", ("torch",)),
    MMCV: Trial("mmcv", (ENGINE, "opencv-python")),
    MMDET: Trial("mmdet.models", (MMCV, "torchvision")),
    "timm": Trial("timm", ("torchvision",)),
    "pycocotools": Trial("pycocotools.mask"),
    "faster-coco-eval": Trial("faster_coco_eval"),
}
# Not required by damex itself, but mmcv cannot be imported without it.
OPENCV = Requirement("opencv-python")

NOT_INSTALLED, MISFIT = "not installed", "version does not fit"
TORCH_PAIR = "pip install --upgrade --force-reinstall torch torchvision"
NO_COMPILER = "  # a minute; with --no-build-isolation it compiles for up to an hour"
PKG_RESOURCES = 'pip install "setuptools<82"'


@dataclass(frozen=True)
class Finding:
    """One row of the table."""

    name: str
    found: str = "-"  # version
    needed: str = ""  # allowed versions, empty for any
    note: str = ""  # information, not a problem
    untried: bool = False  # import skipped after an earlier failure
    problem: str = ""  # empty if there is none
    fix: str = ""  # the command that fixes the problem


def judge(row: Finding, ok: bool, problem: str, fix: str) -> Finding:
    """Return the row, with the problem and its fix if it is not ok."""
    return row if ok else replace(row, problem=problem, fix=fix)


def doctor(*, quiet: bool = False) -> int:
    """Print the table and return the exit status."""
    findings = examine()
    problems = any(row.problem for row in findings)
    if problems or not quiet:
        show(findings)
    return int(problems)


def show(findings: Sequence[Finding]) -> None:
    """Print the table, followed by the problems and their fixes."""
    # Wrap cells on a screen only.
    width = None if sys.stdout.isatty() else 200
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    table = Table("component", "found", "needed", "status", box=box.SIMPLE_HEAD)
    for row in findings:
        status = f"ok ({row.note})" if row.note else "ok"
        if row.problem or row.untried:
            status = "PROBLEM" if row.problem else "not tried (see above)"
        style = "bold red" if row.problem else None
        table.add_row(row.name, row.found, row.needed, status, style=style)
    console.print(table)
    problems = [row for row in findings if row.problem]
    lines = ["To fix, from the top:" if problems else "All is well."]
    for row in problems:
        lines += [f"  {row.name}: {row.problem}", f"      {row.fix}"]
    missing = [row for row in problems if row.problem == NOT_INSTALLED]
    if len(missing) > 1:
        names = " ".join(f'"{row.name}{row.needed}"' for row in missing)
        lines += ["All that is not installed at once:", f"      pip install {names}"]
    console.print("\n".join(lines), soft_wrap=True)  # unwrapped, for copying


def examine() -> list[Finding]:
    """Run every check on this machine, except those of broken packages."""
    python, needs = declared()
    ops = ensure_ops()  # first, as mmdet's import needs it
    packages = list(_examine_packages([*needs, OPENCV]))
    origin = "" if version_of("damex") else "runs from source, not installed"
    return [
        check_python(python, ".".join(map(str, sys.version_info[:3]))),
        Finding("damex", __version__, note=origin),
        *packages,
        *_examine_pairs({row.name: row for row in packages}, ops),
    ]


def declared() -> tuple[Requirement, list[Requirement]]:
    """Return the requirements on Python and distributions, also if run from source."""
    try:
        about = metadata.metadata("damex")
    except metadata.PackageNotFoundError:
        root = Path(__file__).resolve().parents[1]
        project = (root / "pyproject.toml").read_text("utf-8")
        python = re.findall(r'^requires-python = "(.*)"$', project, re.MULTILINE)[0]
        text = (root / "requirements.txt").read_text("utf-8")
        lines = re.findall(r"^\w.*", text, re.MULTILINE)
    else:
        python = about["Requires-Python"]
        lines = about.get_all("Requires-Dist") or []
    return Requirement(f"python{python}"), _unconditional(lines)


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def fits(need: Requirement, version: str) -> bool:
    """Return whether a version is allowed, ignoring local parts such as +cpu."""
    return need.specifier.contains(version, prereleases=True)


def check_python(need: Requirement, version: str) -> Finding:
    """Check the version of Python."""
    row = Finding("python", version, str(need.specifier))
    fix = "uv venv --python 3.11  # or: conda create -n damex python=3.11"
    return judge(row, fits(need, version), MISFIT, fix)


def check_versions(need: Requirement, installed: Mapping[str, str]) -> Finding:
    """Check the version of a distribution, or of a twin in its place.

    `installed` has the version of each that provides the same module.
    """
    present = [choice for choice in _choices(need) if choice.name in installed]
    names = list(dict.fromkeys([*(choice.name for choice in present), *installed]))
    install = f'pip install --upgrade "{need.name}{need.specifier}"'
    if need.name == MMCV:
        isolate = "PIP_NO_BUILD_ISOLATION" in os.environ
        install = "env -u PIP_NO_BUILD_ISOLATION " * isolate + install + NO_COMPILER
    if names not in ([], [need.name]):
        install = f"pip uninstall -y {' '.join(names)} && {install}"
    if not present:
        problem = NOT_INSTALLED
        if names:
            problem = f"{' and '.join(names)} in its place is not supported"
        needed = str(need.specifier)
        return Finding(need.name, needed=needed, problem=problem, fix=install)
    chosen = present[0]
    note = "" if chosen.name == need.name else f"from {chosen.name}"
    found = installed[chosen.name]
    row = Finding(need.name, found, str(chosen.specifier), note)
    if len(names) > 1 and need.name != OPENCV.name:  # OpenCVs have the same files
        return judge(row, False, f"{' and '.join(names)} overwrite each other", install)
    return judge(row, fits(chosen, found), MISFIT, install)


def explain_failure(row: Finding, error: str) -> Finding:
    """Add an import error and its fix to a row whose version fits."""
    name = row.note.removeprefix("from ") or row.name
    again = "pip install --force-reinstall --no-deps"
    fix = f'{again} "{name}=={row.found}"'
    module = TRIALS[row.name].module.partition(".")[0]
    missing = re.search(r"No module named '([^'.]+)'", error)
    if row.name == "torchvision" or "torchvision::" in error:
        fix = TORCH_PAIR
    elif row.name == OPENCV.name and re.search(r"lib\w+\.so", error):
        fix = f"pip uninstall -y opencv-python && {again} opencv-python-headless"
    elif missing and missing[1] == "pkg_resources":
        fix = PKG_RESOURCES
    elif missing and missing[1] != module:
        fix = f"pip install {missing[1]}"
    return judge(row, False, f"import fails: {error}", fix)


def check_torchvision(need: Requirement, torch: str) -> Finding:
    """Check that torchvision was built for the installed torch."""
    row = Finding("torchvision on torch", torch, str(need.specifier))
    problem = f"torchvision was built for torch {need.specifier}"
    return judge(row, fits(need, torch), problem, TORCH_PAIR)


def check_numpy(error: str) -> Finding:
    """Check that torch and numpy share memory; `error` is what trying it raised."""
    row = Finding("numpy and torch", "-" if error else "ok")
    fix = 'pip install "numpy<2"  # or a newer torch and torchvision'
    return judge(row, not error, f"torch cannot use this numpy: {error}", fix)


def check_ops(report: OpsReport) -> Finding:
    """Check which ops an installed mmcv has; torch versions suffice."""
    row = Finding("mmcv ops", report.kind, note=report.reason)
    fix = "pip uninstall -y mmcv-lite && pip install onedl-mmcv"
    return judge(row, report.kind != "absent", report.reason, fix)


def check_attention(report: OpsReport) -> Finding:
    """Name what computes deformable attention on this machine."""
    import torch

    row = Finding("deformable attention", "torch", note="on the CPU")
    if not torch.cuda.is_available():
        return row
    if report.kind == "compiled":
        return replace(row, found="mmcv", note="compiled; not in bfloat16")
    from damex.compat.kernels import fused_fault

    # As float32 and in heads as wide as those of DINO.
    fault = fused_fault(torch.device("cuda"), torch.float32, 32)
    return replace(row, found="torch" if fault else "deformops", note=fault or "on GPU")


def _examine_packages(needs: Sequence[Requirement]) -> Iterator[Finding]:
    """Check versions and, if they fit, imports, in order of dependency."""
    order = [*TRIALS, *(need.name for need in needs)]
    broken: set[str] = set()
    providers = metadata.packages_distributions()
    for need in sorted(needs, key=lambda need: order.index(need.name)):
        trial, names = TRIALS.get(need.name), [one.name for one in _choices(need)]
        if trial is not None and need.name != OPENCV.name:
            others = providers.get(trial.module.partition(".")[0], ())
            names += [canonicalize_name(name) for name in others]
        found = {name: version_of(name) for name in names}
        row = check_versions(need, {k: v for k, v in found.items() if v})
        if trial is not None and not row.problem:
            if broken.intersection(trial.needs):
                row = replace(row, untried=True)
            elif error := _error_of(import_module, trial.module):
                row = explain_failure(row, error)
        if row.problem or row.untried:
            broken.add(need.name)
        elif need.name == "torch":
            row = replace(row, note=_devices())
        yield row


def _examine_pairs(rows: Mapping[str, Finding], ops: OpsReport) -> Iterator[Finding]:
    """Check pairs of installed packages."""
    torch, mmcv = rows["torch"], rows[MMCV]
    if version_of("torchvision") and version_of("torch"):
        for need in _unconditional(metadata.requires("torchvision") or []):
            if need.name == "torch":
                yield check_torchvision(need, torch.found)
    if not torch.problem:
        yield check_numpy(_error_of(lambda: import_module("torch").zeros(1).numpy()))
    if not (mmcv.problem or mmcv.untried):
        yield check_ops(ops)
        yield check_attention(ops)


def _choices(need: Requirement) -> list[Requirement]:
    trial = TRIALS.get(need.name)
    return [need, *map(Requirement, trial.twins if trial else ())]


def _unconditional(lines: Sequence[str]) -> list[Requirement]:
    """Parse requirements, without those of extras and other platforms."""
    needs = map(Requirement, lines)
    return [n for n in needs if n.marker is None or n.marker.evaluate({"extra": ""})]


def _error_of(attempt: Callable[..., object], *arguments: str) -> str:
    """Return the error that an attempt raises, else an empty string."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt(*arguments)
    except Exception as error:  # any error is the finding
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


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
