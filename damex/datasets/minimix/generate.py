"""Generate the mixture in one step: it is there as a whole or not at all."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from damex.datasets.minimix.mixture import DATASETS
from damex.datasets.minimix.report import DatasetReport, MinimixReport
from damex.datasets.minimix.spec import DatasetSpec
from damex.datasets.minimix.writer import VERSION, file_names, write_dataset

STAMP_NAME = "minimix.json"

_OWN_FILE = re.compile(r"[a-z]+/((train|val)\.json|images/(train|val)_\d{5}\.jpg)")


def generate_minimix(
    out: Path,
    *,
    seed: int = 0,
    force: bool = False,
    specs: Sequence[DatasetSpec] = DATASETS,
) -> MinimixReport:
    """Generate the bundled mixture of small detection datasets.

    The files are made in a temporary folder beside `out` and moved there when all
    are done; the stamp `minimix.json` tells that a folder is complete. Equal
    arguments give equal files (with the same Pillow, NumPy and scikit-learn).

    Args:
        out: Folder of the mixture; made if it is not there.
        seed: Seed, 0 or more.
        force: Make the mixture anew, in the place of an earlier one or in a folder
            with other content. Only files that an earlier generation made are ever
            deleted.
        specs: Datasets to make.

    Returns:
        The counts per dataset. Without `force` nothing is done if `out` already
        holds this mixture.

    Raises:
        ValueError: If the seed is negative, if `out` holds something else and
            `force` is not set, or if foreign files are in the way.
    """
    if seed < 0:
        raise ValueError(f"minimix: seed must be 0 or more, got {seed}")
    out = Path(out)
    key = _key(specs, seed)
    held = _read_stamp(out)
    if held is not None and held["key"] == key and not force:
        return _report(held, seconds=0.0, created=False)
    _check_free(out, specs, held, force=force)
    is_filled = out.is_dir() and any(out.iterdir())
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as name:
        made = Path(name) / "made"
        made.mkdir()
        entries = [asdict(write_dataset(made, spec, seed=seed)) for spec in specs]
        files = [file for spec in specs for file in file_names(spec)]
        stamp = {"key": key, "datasets": entries, "files": files}
        text = json.dumps(stamp, separators=(",", ":"))
        (made / STAMP_NAME).write_text(text + "\n", encoding="utf-8")
        if held is not None:
            _remove(out, held["files"])
        if is_filled:
            _merge(made, out, files)
        else:
            _rename(made, out, key)
    return _report(stamp, seconds=time.perf_counter() - start, created=True)


def _key(specs: Sequence[DatasetSpec], seed: int) -> dict[str, Any]:
    sizes = {spec.name: [spec.num_train, spec.num_val] for spec in specs}
    return {"version": VERSION, "seed": seed, "sizes": sizes}


def _read_stamp(out: Path) -> dict[str, Any] | None:
    path = out / STAMP_NAME
    if not path.is_file():
        return None
    try:
        stamp = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError:
        return None
    if not isinstance(stamp, dict) or not {"key", "datasets", "files"} <= stamp.keys():
        return None
    # The listed files may be deleted later, so no other path is ever accepted.
    return stamp if all(_OWN_FILE.fullmatch(file) for file in stamp["files"]) else None


def _check_free(
    out: Path, specs: Sequence[DatasetSpec], held: dict[str, Any] | None, *, force: bool
) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise ValueError(f"minimix: out={str(out)!r} is a file; name a folder")
    content = sorted(path.name for path in out.iterdir())
    if content and not force:
        what = "other content" if held is None else f"the mixture {held['key']}"
        raise ValueError(
            f"minimix: folder {str(out)!r} already holds {what} "
            f"({', '.join(content[:5])}); name another folder, or replace it with "
            "--force (force=True), which deletes only files of an earlier minimix"
        )
    own = set() if held is None else {STAMP_NAME, *held["files"]}
    wanted = [STAMP_NAME, *(file for spec in specs for file in file_names(spec))]
    foreign = [file for file in wanted if file not in own and (out / file).exists()]
    if foreign:
        raise ValueError(
            f"minimix: {len(foreign)} files in {str(out)!r} are in the way and were "
            f"not made by minimix, first {foreign[0]!r}; move them or name another "
            "folder"
        )


def _remove(out: Path, files: Sequence[str]) -> None:
    # The stamp goes first: a folder without it is never taken for complete.
    (out / STAMP_NAME).unlink()
    for file in files:
        (out / file).unlink(missing_ok=True)
    folders = {folder for file in files for folder in Path(file).parents}
    for folder in sorted(folders - {Path()}, key=lambda path: -len(path.parts)):
        path = out / folder
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def _rename(made: Path, out: Path, key: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):
        out.rmdir()  # it works on an empty folder only, which may be there
    try:
        made.rename(out)
    except OSError:
        # Another process may have made the same mixture in the meantime.
        held = _read_stamp(out)
        if held is None or held["key"] != key:
            raise


def _merge(made: Path, out: Path, files: Sequence[str]) -> None:
    for file in (*files, STAMP_NAME):
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        (made / file).rename(out / file)


def _report(stamp: dict[str, Any], *, seconds: float, created: bool) -> MinimixReport:
    datasets = tuple(
        DatasetReport(**{**entry, "classes": tuple(entry["classes"])})
        for entry in stamp["datasets"]
    )
    return MinimixReport(datasets, seconds, created)
