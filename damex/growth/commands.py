"""The commands ``damex grow``, ``damex prune`` and ``damex merge``."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmengine.device import get_device

from damex.config_files import config_of, mixture_datasets
from damex.engine.console import filter_console
from damex.engine.summary import markdown
from damex.errors import ConfigError, printable
from damex.growth.grow import Grown, add_datasets
from damex.growth.prune import Pruned, drop_datasets, merge_groups
from damex.inference.stored import (
    StoredDetector,
    check_target,
    millions,
    write_checkpoint,
)
from damex.options import option_of


def grow(
    checkpoint: str,
    config: str,
    *,
    cfg_options: Sequence[str],
    out: str,
    like: str,
    images: int,
    trust: bool,
) -> None:
    """Write a checkpoint from which to start a training with new datasets."""
    filter_console()
    check_target(Path(out), with_config=False)
    cfg = config_of(config, cfg_options)  # first: it registers classes of the user
    stored = StoredDetector.read(checkpoint, trust=trust)
    grown = add_datasets(stored, cfg, like=like, images=images)
    write_checkpoint(
        Path(out),
        grown.state,
        config=grown.config.pretty_text,
        with_config=False,
        dataset_meta=grown.space.to_metainfo(),
        moe=dict(grown.moe),
    )
    steps = _next_steps(grown, out, config, cfg_options)
    print(printable("\n".join([*_lines(grown, out), *steps])))


def _lines(grown: Grown, out: str) -> list[str]:
    """Report lines about the datasets, classes and experts of the new checkpoint."""
    found = [
        f"written: {out}",
        f"datasets: {', '.join(grown.old.dataset_names)} as they were; new: "
        f"{', '.join(grown.new_datasets)}",
        f"classes: {grown.old.num_classes} as they were; new: "
        f"{', '.join(grown.new_classes) or 'none'}",
    ]
    for group, source in grown.sources.items():
        row = grown.similarity.get(group, {})
        best = sorted(row.items(), key=lambda item: -item[1])[:3]
        words = ", ".join(f"{name} {share:.2f}" for name, share in best)
        seen = f" (its images look like {words})" if words else ""
        found.append(f"experts of {group}: start as those of {source}{seen}")
    return found + [f"note: {note}" for note in grown.notes]


def _next_steps(
    grown: Grown, out: str, config: str, options: Sequence[str]
) -> list[str]:
    """Training commands for the whole detector and for the new parts alone."""
    settings: dict[str, str | list[str]] = dict(load_from=out)
    found = ["to train all of it:", *_command(config, options, settings)]
    if grown.alone_fault:
        return [*found, f"the new parts cannot be trained alone: {grown.alone_fault}"]
    settings["train_only"] = [*grown.new_datasets]
    found.append("to train the new parts alone, without a change to other datasets:")
    return found + _command(config, options, settings)


def _command(
    config: str, given: Sequence[str], settings: Mapping[str, str | list[str]]
) -> list[str]:
    """A training command."""
    words = [*given, *(option_of(key, value) for key, value in settings.items())]
    return [f"  {shlex.join(['damex', 'train', config, '--cfg-options', *words])}"]


def prune(checkpoint: str, *, drop: Sequence[str], out: str, trust: bool) -> None:
    """Write a checkpoint and config without some datasets."""
    filter_console()
    check_target(Path(out))
    stored = StoredDetector.read(checkpoint, trust=trust)
    pruned = drop_datasets(stored, drop)
    gone = [name for name in stored.space.classes if name not in pruned.space.classes]
    _write(
        pruned,
        stored,
        Path(out),
        f"datasets: {', '.join(pruned.space.dataset_names)}; classes: "
        f"{pruned.space.num_classes}; gone: {', '.join(gone) or 'none'}",
    )


def merge(
    checkpoint: str, *, datasets: Sequence[str], out: str, no_test: bool, trust: bool
) -> None:
    """Write a checkpoint in which datasets share experts; print the change in AP."""
    filter_console()
    check_target(Path(out))
    stored = StoredDetector.read(checkpoint, trust=trust)
    merged = merge_groups(stored, datasets)
    groups = ", ".join(merged.space.group_names)
    _write(merged, stored, Path(out), f"groups of datasets with experts: {groups}")
    if not no_test:
        before = _scores(stored, "before")
        after = _scores(StoredDetector.read(out, trust=trust), "after")
        print(_cost(before, after))


def _write(pruned: Pruned, stored: StoredDetector, out: Path, about: str) -> None:
    """Write a checkpoint and its config, and print a summary."""
    write_checkpoint(
        out,
        pruned.state,
        config=pruned.config.pretty_text,
        dataset_meta=pruned.space.to_metainfo(),
        moe=dict(pruned.moe),
    )
    print(
        f"written: {out} and {out.with_suffix('.py')}\n{about}\n"
        f"{millions(pruned.state)} million parameters of {millions(stored.state)}"
        + "".join(f"\nnote: {note}" for note in pruned.notes),
        flush=True,
    )


def _scores(stored: StoredDetector, label: str) -> dict[str, float | None]:
    """Test AP per dataset, mean and pooled."""
    loader = stored.checked("test_dataloader")
    mixtures = mixture_datasets((loader or {}).get("dataset"))
    if not mixtures or not mixtures[0].get("datasets"):
        raise ConfigError(
            f"the config in {stored.path} has no test_dataloader with a mixture to "
            "evaluate on; use --no-test."
        )
    detector = stored.build(get_device())
    summary = stored.evaluate(detector, loader or {}, label=label)
    rows = {name: row["ap"] for name, row in summary["datasets"].items()}
    return rows | {"mean": summary["mean_ap"], "pooled": summary["pooled_ap"]}


def _cost(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Table of AP before and after."""
    rows = []
    for name, old in before.items():
        new = after[name]
        both = old is not None and new is not None
        rows.append(
            (
                name,
                *("-" if value is None else f"{value:.3f}" for value in (old, new)),
                f"{new - old:+.3f}" if both else "-",
            )
        )
    return markdown(("AP", "before", "after", "change"), rows)
