"""The command ``damex data browse``: an overview page of a mixture."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from damex.commandline.run import Bar
from damex.curation.page import render
from damex.curation.sheets import contact_sheet, draw_tile, palette
from damex.curation.sources import expectations, sources_of
from damex.curation.views import SplitView, view_of
from damex.datasets.findings import Finding
from damex.datasets.spec import SPLITS, parse_mixture
from damex.engine.config_files import mixture_config_of
from damex.files import atomic_write, make_folder, write_text


def browse(
    config: str,
    *,
    cfg_options: Sequence[str],
    out: str | None,
    samples: int,
    seed: int,
) -> None:
    """Write a page about the datasets of a config, and a contact sheet of each split.

    Raises:
        ConfigError: If the command line or the mixture is invalid.
    """
    cfg = mixture_config_of(config, cfg_options)
    folder = Path(out or Path("work_dirs") / Path(config).stem / "browse")
    make_folder(folder)
    with Bar() as progress:
        views, notes = _read(cfg, progress, num_samples=samples, seed=seed)
        classes = dict.fromkeys(name for view in views for name in view.counts)
        colors = palette(classes)
        tiles: dict[str, list[tuple[str, Image.Image]]] = {}
        for view in views:
            progress.begin(f"draw {view.title}", len(view.samples))
            tiles[view.title] = []
            for sample in view.samples:
                tiles[view.title].append((sample.name, draw_tile(sample, colors)))
                progress.advance()
    for view in views:
        name = re.sub(r"\W+", "_", f"{view.dataset}_{view.split}")
        with atomic_write(folder / f"{name}.png") as part:
            contact_sheet(view.title, tiles[view.title]).save(part)
    page = render(f"Data of {Path(config).stem}", views, tiles, colors, notes)
    write_text(folder / "index.html", page)
    print(f"{folder / 'index.html'}: {len(views)} splits; their sheets are beside it.")


def _read(
    cfg: Mapping[str, Any], progress: Bar, *, num_samples: int, seed: int
) -> tuple[list[SplitView], list[str]]:
    """Views of all splits, and sentences about those that cannot be read."""
    views: dict[str, SplitView] = {}
    notes: list[str] = []
    for spec in parse_mixture(cfg["mixture"]):
        for source in sources_of(spec, SPLITS):
            if isinstance(source, Finding):
                notes.append(source.message)
                continue
            progress.begin(f"read {source.place.file}", None)
            expected = expectations(cfg, spec, source.place.split)
            view = view_of(
                source, expected, spec.rename, num_samples=num_samples, seed=seed
            )
            if view is None:
                notes.append(f"{source.place.file} cannot be read; run check.")
            elif views.setdefault(view.title, view) is not view:
                notes.append(f"{source.place.file} is another file of this split.")
    return [*views.values()], notes
