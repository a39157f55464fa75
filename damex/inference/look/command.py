"""The command ``damex experts``: expert usage from a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mmengine.device import get_device
from rich import box
from rich.console import Console
from rich.table import Table

from damex.commandline.run import Bar
from damex.engine.console import filter_console
from damex.engine.routing_alarm import LEAST_EVENNESS, routing_faults
from damex.files import make_folder, write_text
from damex.inference.look.history import read_history
from damex.inference.look.page import LayerUse, render
from damex.inference.look.samples import rows_of_mixture, rows_of_words
from damex.inference.look.watch import Watched, Watcher, kinds_of
from damex.inference.stored import StoredDetector, millions


def experts(
    checkpoint: str,
    *,
    images: Sequence[str],
    out: str | None,
    images_per_dataset: int,
    examples: int,
    batch_size: int,
    device: str | None,
) -> int:
    """Write a page about the experts of a checkpoint, and print a table.

    Returns:
        1 if an image could not be read, else 0.

    Raises:
        ConfigError: If an option is unusable, or the detector has no experts.
        DataError: If images are missing, or the checkpoint cannot be read.
    """
    filter_console()
    stored = StoredDetector.read(checkpoint)
    watcher = Watcher(stored, device=device or get_device())
    notes: list[str] = []
    if images:
        rows = rows_of_words(images)
    else:
        rows, notes = rows_of_mixture(stored, per_dataset=images_per_dataset)
    folder = Path(out or Path(checkpoint).with_suffix("").name + "_experts")
    make_folder(folder)
    with Bar() as bar:
        bar.begin("images", sum(len(row.paths) for row in rows))
        watched, faults = watcher.watch(
            rows,
            examples_per_row=examples,
            batch_size=batch_size,
            advance=bar.advance,
        )
    train_cfg = stored.config.get("train_cfg") or {}
    history = read_history(Path(checkpoint), stored.meta, train_cfg)
    notes += faults + [history.note] * bool(history.note)
    alarms = routing_faults(watched.served, least_evenness=LEAST_EVENNESS)
    epoch = stored.meta.get("epoch")
    page = render(
        title=f"Experts of {Path(checkpoint).name}",
        about=f"{checkpoint}: {stored.model.get('type')}, "
        f"{millions(stored.state)} million parameters"
        + (f", epoch {epoch}" if epoch is not None else ""),
        space=stored.space,
        rows=rows,
        watched=watched,
        kinds=kinds_of(watcher.detector),
        history=history,
        notes=notes,
        alarms=alarms,
    )
    write_text(folder / "index.html", page)
    _report(folder / "index.html", watched, notes, alarms)
    return 1 if faults else 0


def _report(
    page: Path, watched: Watched, notes: Sequence[str], alarms: Sequence[str]
) -> None:
    """Print the layer summary of the page."""
    console = Console(highlight=False, soft_wrap=True, markup=False, emoji=False)
    table = Table(box=box.SIMPLE)
    table.add_column("layer", no_wrap=True)
    columns = ["entropy of use", "information", "busiest", "unused"]
    for column in [*columns, *(["alone"] if watched.chosen else ())]:
        table.add_column(column, justify="right", no_wrap=True)
    for name, tally in watched.served.items():
        use = LayerUse.of(name, tally)
        busiest = int(use.load_E.argmax())
        table.add_row(
            name,
            f"{use.entropy:.2f} of {use.most_entropy:.2f}",
            f"{use.information:.2f} of {use.most_information:.2f}",
            f"{busiest}: {use.load_E[busiest]:.1%}",
            ", ".join(map(str, use.unused)) or "-",
            *([_information(name, watched)] if watched.chosen else ()),
        )
    console.print(table)
    for alarm in alarms:
        console.print(f"warning: {alarm}")
    for note in notes:
        console.print(note)
    console.print(f"written: {page}")


def _information(name: str, watched: Watched) -> str:
    """Mutual information of dataset and expert, unless experts were voted or given."""
    tally = watched.chosen.get(name)
    return "-" if tally is None else f"{LayerUse.of(name, tally).information:.2f}"
