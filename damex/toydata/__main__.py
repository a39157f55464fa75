"""``python -m damex.toydata``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from damex.commandline.run import program, run_command
from damex.errors import ConfigError
from damex.toydata import DATASETS, contact_sheet, generate_toy_mixture
from damex.toydata.domains import Names, world_specs

app = program(
    "python -m damex.toydata",
    "Generate the toy mixture of five small detection datasets.",
    "python -m damex.toydata --out data/toy",
    "python -m damex.toydata --out data/worlds --worlds 4",
)


@app.default
def toydata(
    *,
    out: Path = Path("data/toy"),
    seed: int = 0,
    worlds: int | None = None,
    names: Names | None = None,
    train: int | None = None,
    val: int | None = None,
    force: bool = False,
    sheet: Annotated[Path | None, Parameter(metavar="PNG")] = None,
) -> None:
    """Generate the mixture and print its sizes.

    Args:
        out: Output folder.
        seed: Another one gives other images.
        worlds: Instead: so many worlds that share their objects (1 to 8).
        names: Whether the worlds agree in the names of objects.
        train: Training images of each world.
        val: Validation images of each world.
        force: Replace an earlier mixture; other files in the folder stay.
        sheet: Also write a picture of samples.
    """
    options: dict[str, Any] = dict(names=names, num_train=train, num_val=val)
    given = {key: value for key, value in options.items() if value is not None}
    if given and worlds is None:
        raise ConfigError("--names, --train and --val are for --worlds; set it, too.")
    specs = DATASETS if worlds is None else world_specs(worlds, **given)
    report = generate_toy_mixture(out, seed=seed, force=force, specs=specs)
    print(f"{out}\n{report.table()}")
    if sheet is not None:
        contact_sheet(out).save(sheet, optimize=True)


if __name__ == "__main__":
    sys.exit(run_command(app))
