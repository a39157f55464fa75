"""``damex experts``: which experts serve which dataset, as a table and a picture.

Axes: V real tokens, E experts, G dataset groups, R rows of the tables.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

import torch
from mmengine.device import get_device
from numpy import ndenumerate
from rich import box
from rich.console import Console
from rich.table import Table

from damex.engine.console import filter_console
from damex.engine.hooks import LEAST_EVENNESS, routing_problems
from damex.engine.rows import has_groups
from damex.errors import ConfigError, DataError, printable
from damex.files import atomic_write
from damex.inference.media import Inputs, detect
from damex.inference.stored import DetectorCheckpoint
from damex.models.insertion import moe_blocks
from damex.moe import (
    LayerTally,
    RoutingRecord,
    add_tallies,
    entropy,
    mutual_information,
)
from damex.progress import Bar
from damex.workbench.cli.predict import check_outputs, find_images, names_of

COLUMNS = 4  # of panels in the picture
MOST_NUMBERS = 16  # experts of a layer whose shares are written into the picture


@dataclass(frozen=True)
class Row:
    """A row of the tables: images, their group if known, and side of windows."""

    name: str
    group: int | None
    paths: Sequence[Path]
    tile: int | None = None


@dataclass
class Routes:
    """Routes of all images, by layer, and a sentence about each unreadable image."""

    # The tokens of each row by the expert that took them.
    served: dict[str, LayerTally] = field(default_factory=dict)
    # The choices of single tokens if images keep to one group.
    chosen: dict[str, LayerTally] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def experts(
    checkpoint: str,
    *,
    images: Sequence[str],
    out: str | None,
    images_per_dataset: int,
    batch_size: int,
    device: str | None,
    trust: bool,
) -> int:
    """Print how layers use their experts; return 1 if an image could not be read."""
    filter_console()
    if out is not None and not out.endswith(".png"):
        raise ConfigError(f"--out must end in .png, got {out}.")
    rows, notes = rows_of_words(images), list[str]()
    stored = DetectorCheckpoint.read(checkpoint, trust=trust)
    detector: Any = stored.build(device or get_device())
    blocks = moe_blocks(detector)
    if all(getattr(block, "is_dense", False) for block in blocks):
        raise ConfigError(
            f"the detector in {checkpoint} has no mixture of experts that routes "
            "tokens; damex predict and damex test show what it detects."
        )
    if not images:
        rows, notes = rows_of_mixture(stored, per_dataset=images_per_dataset)
    if out is not None:
        inputs = [path for row in rows for path in row.paths]
        check_outputs([Path(out)], [*inputs, Path(checkpoint)])
    with Bar() as bar:
        bar.begin("images", sum(len(row.paths) for row in rows))
        routes = record_routes(
            detector, Inputs(stored.pipeline), rows, batch_size, bar.step
        )
    # Whose experts images should use is unknown if the user names them.
    unknown = {block.name for block in blocks if images and has_groups(block)}
    judged = {name: t for name, t in routes.served.items() if name not in unknown}
    alarms = routing_problems(judged, least_evenness=LEAST_EVENNESS)
    uses = [LayerUse(name, tally) for name, tally in routes.served.items()]
    alone = {name: LayerUse(name, tally) for name, tally in routes.chosen.items()}
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    console.print(_table(uses, alone))
    for line in (*(f"warning: {one}" for one in alarms), *notes, *routes.problems):
        console.print(printable(line))
    if out is not None:
        draw(Path(out), [row.name for row in rows], uses, alone)
        console.print(printable(f"written: {out}"))
    return 1 if routes.problems else 0


def rows_of_words(words: Sequence[str]) -> list[Row]:
    """Group the images of words (see `find_images`) into one row per folder."""
    folders: dict[Path, list[Path]] = {}
    for path in find_images(words):
        folders.setdefault(path.absolute().parent, []).append(path)
    rows = zip(names_of([*folders]), folders.values(), strict=True)
    return [Row(name, None, paths) for name, paths in rows]


def rows_of_mixture(
    stored: DetectorCheckpoint, *, per_dataset: int
) -> tuple[list[Row], list[str]]:
    """Sample validation images: rows, and a sentence about each dataset without any."""
    rows, notes = [], []
    for number, name in enumerate(stored.space.dataset_names):
        try:
            paths = stored.validation_images(name, count=per_dataset)
            group, tile = stored.space.group_id(number), stored.tile_of([name])
            rows.append(Row(name, group, paths, tile))
        except (ConfigError, DataError) as error:
            notes.append(f"No images of {name}: {error}")
    if not rows:
        raise DataError(f"{' '.join(notes)} Or name some with --images.")
    return rows, notes


def record_routes(
    detector: Any,
    inputs: Inputs,
    rows: Sequence[Row],
    batch_size: int,
    advance: Callable[[], Any],
) -> Routes:
    """Run a detector on images, and call ``advance`` after reading each.

    DataError if no image can be used.
    """
    routes, records = Routes(), dict[str, RoutingRecord]()

    def keep(*_: Any) -> None:  # a step forgets its records at its end
        records.update(detector.routing.records)

    loaded = _loaded(inputs, rows, routes.problems, advance)
    with detector.bbox_head.register_forward_hook(keep):
        # Images of one shape share a forward pass.
        for _, alike in groupby(loaded, lambda one: one[1]["inputs"].shape):
            while batch := list(islice(alike, batch_size)):
                try:
                    detect(detector, [packed for _, packed in batch])
                except DataError:  # one shape has too few cells for the queries
                    _note_problems(detector, batch, routes.problems)
                    continue
                for name, record in records.items():
                    _count(routes, name, record, [row for row, _ in batch], rows)
    if not routes.served:
        raise DataError(f"no image can be used: {'; '.join(routes.problems)}")
    return routes


def _note_problems(detector: Any, batch: Sequence[Any], problems: list[str]) -> None:
    """Add the errors of the images of a batch, or of their windows, each once."""
    for _, packed in batch:
        try:
            detect(detector, [packed])
        except DataError as error:
            if str(error) not in problems:
                problems.append(str(error))


def _loaded(
    inputs: Inputs, rows: Sequence[Row], problems: list[str], advance: Callable[[], Any]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Row index and detector input of each readable image, or of its windows."""
    for number, row in enumerate(rows):
        meta = {} if row.group is None else dict(group_id=row.group)  # for moe.oracle
        for path in row.paths:
            advance()
            try:
                whole = inputs(path)
            except DataError as error:
                problems.append(str(error))
                continue
            whole["data_samples"].set_metainfo(meta)
            parts = inputs.windows(whole, row.tile, meta) if row.tile else [whole]
            yield from ((number, part) for part in parts)


def _count(
    routes: Routes,
    name: str,
    record: RoutingRecord,
    numbers: Sequence[int],
    rows: Sequence[Row],
) -> None:
    """Add the routes of a batch in one layer to the rows of its images."""
    groups = [row.group for row in rows]
    allowed_GE = record.group_experts_GE
    if allowed_GE is not None:
        allowed_GE = None if None in groups else allowed_GE[groups]
    row_B = torch.tensor(numbers, device=record.logits_VE.device)
    by_row = replace(
        record, group_ids_V=record.packing.spread(row_B), group_experts_GE=allowed_GE
    )
    tallies = [(routes.served, False)]
    if record.votes_BG is not None or record.is_forced:
        # A vote or a given dataset restricts the choice of single tokens.
        tallies.append((routes.chosen, True))
    for found, forced in tallies:
        one = replace(by_row, is_forced=forced)
        add_tallies(found, {name: LayerTally.of(one, num_groups=len(rows))})


class LayerUse:
    """How the rows use the experts of one layer."""

    def __init__(self, name: str, tally: LayerTally) -> None:
        # Share of each row's tokens that an expert takes; of rows with tokens.
        share_RE = tally.counts_GE.double() / tally.tokens_G.clamp_min(1)[:, None]
        seen_RE = share_RE[tally.tokens_G > 0]
        self.name, self.unused = name, tally.unused
        self.share_RE, self.load_E = share_RE.numpy(), seen_RE.mean(0).numpy()
        self.entropy = max(0.0, float(entropy(seen_RE.mean(0))))
        self.most_entropy = math.log(seen_RE.shape[1])  # of a uniform load
        # Of row and expert, rows weighted equally; and the most that it can be.
        self.information = max(0.0, float(mutual_information(seen_RE)))
        self.most_information = math.log(min(seen_RE.shape))


def _table(uses: Sequence[LayerUse], alone: Mapping[str, LayerUse]) -> Table:
    """Summary of the layers."""
    table = Table(box=box.SIMPLE)
    table.add_column("layer", no_wrap=True)
    columns = ["entropy of use", "information", "busiest", "unused"]
    for column in [*columns, *(["alone"] if alone else ())]:
        table.add_column(column, justify="right", no_wrap=True)
    for use in uses:
        busiest = int(use.load_E.argmax())
        cells = [
            use.name,
            f"{use.entropy:.2f} of {use.most_entropy:.2f}",
            f"{use.information:.2f} of {use.most_information:.2f}",
            f"{busiest}: {use.load_E[busiest]:.1%}",
            ", ".join(map(str, use.unused)) or "-",
        ]
        if alone:
            one = alone.get(use.name)
            cells.append("-" if one is None else f"{one.information:.2f}")
        table.add_row(*cells)
    return table


def draw(
    path: Path,
    names: Sequence[str],
    uses: Sequence[LayerUse],
    alone: Mapping[str, LayerUse],
) -> None:
    """Draw the share of each row's tokens by expert, a panel per layer.

    A layer in ``alone`` has a second panel beside the first: the choices of its tokens
    without the vote.
    """
    from matplotlib.figure import Figure

    panels = []
    for use in uses:
        panels.append((use.name, use))
        if use.name in alone:
            panels.append((f"{use.name}, tokens alone", alone[use.name]))
    columns = min(COLUMNS, len(panels))
    lines = math.ceil(len(panels) / columns)
    most = max(len(use.load_E) for use in uses)
    wide, tall = max(2.6, 0.42 * min(most, MOST_NUMBERS)), 1.0 + 0.32 * len(names)
    longest = 0.08 * max(map(len, names))
    figure = Figure((columns * wide + longest + 0.6, lines * tall + 0.5), dpi=120)
    figure.set_layout_engine("constrained")
    figure.suptitle("tokens of each dataset by expert, in per cent", fontsize=10)
    grid = figure.subplots(lines, columns, squeeze=False, sharey=True)
    for panel in grid.flat[len(panels) :]:
        panel.set_axis_off()
    for (title, use), panel in zip(panels, grid.flat, strict=False):
        panel.imshow(use.share_RE, vmin=0, vmax=1, cmap="Blues", aspect="auto")
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("expert", fontsize=8)
        panel.tick_params(labelsize=8, length=0)
        panel.xaxis.get_major_locator().set_params(integer=True)
        # Names may have dollar signs, which would be formulas.
        panel.set_yticks(range(len(names)), names, parse_math=False)
        if len(use.load_E) <= MOST_NUMBERS:
            panel.set_xticks(range(len(use.load_E)))
            for (row, expert), share in ndenumerate(use.share_RE):
                color = "white" if share > 0.5 else "black"
                style = dict(ha="center", va="center", color=color, fontsize=7)
                panel.text(expert, row, f"{100 * share:.0f}", **style)
    with warnings.catch_warnings(), atomic_write(path) as part:
        warnings.simplefilter("ignore")  # a font may lack letters of a name
        figure.savefig(part)
