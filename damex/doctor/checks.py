"""The checks: from versions and error messages to findings. Nothing is imported."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from damex.compat import OpsReport
from damex.doctor.requirement import Requirement, release

NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class Trial:
    """The import that shows whether a distribution works.

    Attributes:
        module: What to import.
        needs: Distributions whose failure would only repeat itself here.
    """

    module: str
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One row of the table.

    Attributes:
        name: What was looked at.
        found: The version found, or ``-``.
        needed: The versions that will do, empty for any.
        note: Worth knowing, but no problem.
        untried: Whether the import was not tried because something before it failed.
        problem: What is wrong; empty if nothing is.
        mend: The command that mends the problem.
    """

    name: str
    found: str = "-"
    needed: str = ""
    note: str = ""
    untried: bool = False
    problem: str = ""
    mend: str = ""

    @property
    def missing(self) -> bool:
        """Tells whether the distribution is not installed."""
        return self.problem == NOT_INSTALLED


TRIALS: Mapping[str, Trial] = MappingProxyType(
    {
        "torch": Trial("torch"),
        "torchvision": Trial("torchvision", ("torch",)),
        "opencv-python": Trial("cv2"),
        "onedl-mmengine": Trial("mmengine", ("torch",)),
        "onedl-mmcv": Trial("mmcv", ("onedl-mmengine", "opencv-python")),
        "onedl-mmdetection": Trial("mmdet.models", ("onedl-mmcv", "torchvision")),
        "timm": Trial("timm", ("torchvision",)),
        "pycocotools": Trial("pycocotools.mask"),
        "faster-coco-eval": Trial("faster_coco_eval"),
    }
)
"""In this order; other requirements are judged by their version alone."""

TWINS: Mapping[str, tuple[Requirement, ...]] = MappingProxyType(
    {
        "onedl-mmdetection": (Requirement("mmdet", ">=3.3"),),
        "onedl-mmengine": (Requirement("mmengine", ">=0.10.5"),),
        "onedl-mmcv": (Requirement("mmcv", ">=2.0.1"), Requirement("mmcv-lite", "")),
        "opencv-python": (Requirement("opencv-python-headless", ""),),
    }
)
"""Other distributions of the same modules; pip lets several overwrite each other."""

MAY_COEXIST = frozenset({"opencv-python"})
TORCH_PAIR = "pip install --upgrade --force-reinstall torch torchvision"
HEADLESS = (
    "pip uninstall -y opencv-python && "
    "pip install --force-reinstall --no-deps opencv-python-headless"
)


def check_python(need: Requirement, version: str) -> Finding:
    """Judges the version of Python."""
    row = Finding("python", version, need.versions)
    if need.allows(version):
        return row
    return replace(
        row,
        problem="version does not fit",
        mend="uv venv --python 3.11  # or: conda create -n damex python=3.11",
    )


def check_versions(need: Requirement, installed: Mapping[str, str]) -> Finding:
    """Judges a distribution, or a twin in its place, by its version.

    Args:
        need: What damex asks for.
        installed: Version of every installed distribution of interest, by name.

    Returns:
        A finding named after ``need``.
    """
    choices = (need, *TWINS.get(need.name, ()))
    present = [choice for choice in choices if choice.name in installed]
    install = f'pip install --upgrade "{need.name}{need.versions}"'
    if not present:
        return Finding(
            need.name, "-", need.versions, problem=NOT_INSTALLED, mend=install
        )
    chosen = present[0]
    row = Finding(need.name, installed[chosen.name], chosen.versions)
    if chosen is not need:
        row = replace(row, note=f"from {chosen.name}")
    if len(present) > 1 and need.name not in MAY_COEXIST:
        names = [choice.name for choice in present]
        return replace(
            row,
            problem=f"{' and '.join(names)} overwrite each other",
            mend=f"pip uninstall -y {' '.join(names)} && {install}",
        )
    if not chosen.allows(row.found):
        old = "" if chosen is need else f"pip uninstall -y {chosen.name} && "
        return replace(row, problem="version does not fit", mend=old + install)
    return row


def explain_failure(row: Finding, error: str) -> Finding:
    """Turns the error of an import into a problem with its mending command.

    Args:
        row: The finding so far; its version fits.
        error: Type and message of the error.

    Returns:
        The finding with ``problem`` and ``mend``.
    """
    name = row.note.removeprefix("from ") or row.name
    mend = f'pip install --force-reinstall --no-deps "{name}=={row.found}"'
    if row.name == "torchvision" or "torchvision::" in error:
        mend = TORCH_PAIR
    elif row.name == "opencv-python" and re.search(r"lib\w+\.so", error):
        mend = HEADLESS
    elif (missing := re.search(r"No module named '([^'.]+)'", error)) and (
        missing[1] != TRIALS[row.name].module.partition(".")[0]
    ):
        mend = f"pip install {missing[1]}"
    return replace(row, problem=f"import fails: {error}", mend=mend)


def check_torchvision(need: Requirement, torch: str) -> Finding:
    """Compares the torch that torchvision was built for with the one installed.

    Args:
        need: The torch that torchvision's metadata asks for.
        torch: Version installed.
    """
    row = Finding("torchvision on torch", torch, need.versions)
    if need.allows(torch):
        return row
    return replace(
        row,
        problem=f"torchvision was built for torch {need.versions}",
        mend=TORCH_PAIR,
    )


def check_numpy(error: str) -> Finding:
    """Judges whether torch and numpy can share memory.

    Args:
        error: What ``torch.zeros(1).numpy()`` raised; empty if it worked.
    """
    row = Finding("numpy and torch", "ok" if not error else "-")
    if not error:
        return row
    return replace(
        row,
        problem=f"torch cannot use this numpy: {error}",
        mend='pip install "numpy<2"  # or a newer torch and torchvision',
    )


def check_checkpoints(torch: str, *, names_weights_only: bool) -> Finding:
    """Judges whether mmengine can load the checkpoints that it writes.

    From 2.6 on ``torch.load`` refuses mmengine's ``HistoryBuffer`` unless
    ``weights_only=False`` is passed (open-mmlab/mmengine issue 1655).

    Args:
        torch: Version installed.
        names_weights_only: Whether mmengine passes ``weights_only`` at all.
    """
    row = Finding("mmengine checkpoints", "ok")
    if names_weights_only or release(torch) < (2, 6):
        return row
    return replace(
        row,
        found="-",
        problem=f"torch {torch} refuses to load what this mmengine saves",
        mend="pip uninstall -y mmengine onedl-mmengine && pip install onedl-mmengine",
    )


def check_ops(report: OpsReport) -> Finding:
    """Judges which ops an installed mmcv has; torch versions of them will do."""
    row = Finding("mmcv ops", report.kind, note=report.reason)
    if report.kind != "absent":
        return row
    return replace(
        row,
        note="",
        problem=report.reason,
        mend="pip uninstall -y mmcv-lite && pip install onedl-mmcv",
    )
