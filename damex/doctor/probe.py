"""Looks at this machine: versions, trial imports, devices. Torch is imported late."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path

from damex import __version__
from damex.compat import ensure_ops
from damex.doctor.checks import (
    TRIALS,
    TWINS,
    Finding,
    check_checkpoints,
    check_numpy,
    check_ops,
    check_python,
    check_torchvision,
    check_versions,
    explain_failure,
)
from damex.doctor.requirement import Requirement, declared, version_of

OPENCV = Requirement("opencv-python", "")
"""Not asked for by damex itself, but mmcv cannot be imported without it."""


def examine() -> list[Finding]:
    """Runs every check on this machine.

    Returns:
        The rows of the table; a check whose subject is broken is left out.
    """
    python, needs = declared()
    packages = list(_examine_packages([*needs, OPENCV]))
    return [
        check_python(python, platform.python_version()),
        Finding("damex", __version__, note=_origin()),
        *packages,
        *_examine_pairs({row.name: row for row in packages}),
    ]


def _examine_packages(needs: list[Requirement]) -> Iterator[Finding]:
    """Judges versions and, where they fit, tries the imports, in order of need."""
    order = {name: position for position, name in enumerate(TRIALS)}
    broken: set[str] = set()
    for need in sorted(needs, key=lambda need: order.get(need.name, len(order))):
        names = (need.name, *(twin.name for twin in TWINS.get(need.name, ())))
        found = {name: version_of(name) for name in names}
        row = check_versions(
            need, {name: version for name, version in found.items() if version}
        )
        trial = TRIALS.get(need.name)
        if trial and not row.problem:
            if broken.intersection(trial.needs):
                row = replace(row, untried=True)
                broken.add(need.name)
            elif error := _error_of_import(trial.module):
                row = explain_failure(row, error)
        if row.problem:
            broken.add(need.name)
        elif need.name == "torch":
            row = replace(row, note=_devices())
        yield row


def _examine_pairs(rows: dict[str, Finding]) -> Iterator[Finding]:
    """Judges what depends on two packages at once, where both are there."""
    torch, mmengine = rows["torch"], rows["onedl-mmengine"]
    built_for = _torch_of_torchvision()
    if built_for and version_of("torch"):
        yield check_torchvision(built_for, torch.found)
    if not torch.problem:
        yield check_numpy(_error_of_sharing())
    if not (torch.problem or mmengine.problem or mmengine.untried):
        yield check_checkpoints(
            torch.found, names_weights_only=_mmengine_names_weights_only()
        )
    mmcv = rows["onedl-mmcv"]
    if not (mmcv.problem or mmcv.untried):
        yield check_ops(ensure_ops())


def _error_of_import(module: str) -> str:
    """Imports a module and returns what it raised, empty if nothing."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import_module(module)
    except Exception as error:  # whatever an import raises is the finding
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return ""


def _error_of_sharing() -> str:
    """Hands memory from torch to numpy and returns what this raised."""
    import torch

    try:
        torch.zeros(1).numpy()
    except RuntimeError as error:
        return str(error)
    return ""


def _devices() -> str:
    """Names the CUDA build of torch and the GPUs that it sees."""
    import torch

    if torch.version.cuda is None:
        return "CPU build"
    build = f"CUDA {torch.version.cuda} build"
    if not torch.cuda.is_available():
        return f"{build}, no GPU seen"
    count = torch.cuda.device_count()
    names = {torch.cuda.get_device_name(index) for index in range(count)}
    return f"{build}, {count} x {' and '.join(sorted(names))}"


def _torch_of_torchvision() -> Requirement | None:
    """Reads which torch the installed torchvision was built for."""
    if version_of("torchvision") is None:
        return None
    lines = metadata.requires("torchvision") or []
    needs = [Requirement.parse(line) for line in lines if "extra ==" not in line]
    return next((need for need in needs if need.name == "torch"), None)


def _mmengine_names_weights_only() -> bool:
    """Tells whether mmengine passes ``weights_only`` when it loads a checkpoint.

    The source is read because forks with and without it share version numbers.
    """
    spec = find_spec("mmengine.runner.checkpoint")
    if spec is None or spec.origin is None:
        return False
    return "weights_only" in Path(spec.origin).read_text(encoding="utf-8")


def _origin() -> str:
    return "" if version_of("damex") else "runs from source, not installed"
