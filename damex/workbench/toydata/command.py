"""The command ``damex toydata``: generate the toy mixture."""

from __future__ import annotations

from pathlib import Path

from damex.workbench.toydata import generate_toy_mixture, holds_toy_mixture
from damex.workbench.toydata.domains import DATASETS


def toydata(*, out: Path, seed: int) -> None:
    """Generate the mixture in a new folder, and print its sizes."""
    if holds_toy_mixture(out, seed=seed):
        print(f"{out} holds the toy mixture already; to make it again, delete {out}.")
        return
    boxes = generate_toy_mixture(out, seed=seed)
    print(f"{out}\n{'dataset':<10}{'images train/val':>18}{'boxes':>14}  classes")
    for spec in DATASETS:
        images, found = (
            f"{train}/{val}"
            for train, val in ((spec.num_train, spec.num_val), boxes[spec.name])
        )
        print(f"{spec.name:<10}{images:>18}{found:>14}  {', '.join(spec.classes)}")
