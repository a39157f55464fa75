"""``python -m damex.toydata``: generate the toy mixture."""

from __future__ import annotations

import sys
from pathlib import Path

from damex.commandline.run import program, run_command
from damex.toydata import generate_toy_mixture, holds_toy_mixture
from damex.toydata.domains import DATASETS

app = program(
    "python -m damex.toydata",
    "Generate the toy mixture of five small detection datasets.",
    "python -m damex.toydata --out data/toy",
)


@app.default
def toydata(*, out: Path = Path("data/toy"), seed: int = 0) -> None:
    """Generate the mixture in a new folder, and print its sizes.

    Args:
        out: Output folder; nothing is done if it holds the mixture of this seed.
        seed: Another one gives other images.
    """
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


if __name__ == "__main__":
    sys.exit(run_command(app))
