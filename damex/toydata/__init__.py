"""The toy mixture: five small detection datasets, generated in seconds.

For trying and testing training on several datasets at once: no download, about 6 MB,
128 px, and a tiny DETR learns a part of it in minutes on a CPU.

    python -m damex.toydata --out data/toy

| dataset  | train/val | appearance                               | classes           |
|----------|-----------|------------------------------------------|-------------------|
| shapes   | 900/60    | flat shapes on noisy pastel fades        | star, square, ... |
| digits   | 500/60    | handwritten digits (real) on ruled paper | zero ... nine     |
| photos   | 250/60    | stickers on printed photographs (real)   | leaf, circle, ... |
| playroom | 120/60    | toys on a wooden floor                   | ball, crate, ...  |
| arcade   | 60/60     | a dark screen with a grid                | coin, chip, ...   |

Like real mixtures, datasets differ in looks and size, names overlap under different
ids, and `playroom` and `arcade` draw three objects alike and name them differently.
data/README.md explains the choices. Difficulty was set by short trainings of the quick
start; no choice compared methods.

The files are made in a temporary folder and moved when complete, as marked by the stamp
``toy.json``, which lists them.
"""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from damex.errors import ConfigError, DataError
from damex.toydata.domains import DATASETS, SPLITS, DatasetSpec, Renderer
from damex.toydata.drawing import Canvas

VERSION = "1.3"
STAMP = "toy.json"

_OWN_FILE = re.compile(r"[a-z]+/((train|val)\.json|images/(train|val)_\d{5}\.jpg)")
_LICENSE = "Apache-2.0; digits: CC BY 4.0; photographs: CC BY 2.0 (see data/README.md)"
# Mostly square; the others make batches need padding.
_SIZES_HW = ((128, 128), (128, 128), (128, 128), (96, 128), (128, 96))


@dataclass(frozen=True)
class ToyReport:
    """Report of a generation.

    `datasets` has for each dataset its ``name``, ``num_images`` and ``num_boxes`` by
    split, and ``classes`` in the order of their category ids.
    """

    datasets: list[dict[str, Any]]
    seconds: float
    created: bool

    def table(self) -> str:
        """Return the counts as text, one row per dataset and a closing line."""
        rows = [f"{'dataset':<10}{'images train/val':>18}{'boxes':>14}  classes"]
        for entry in self.datasets:
            images = "{train}/{val}".format(**entry["num_images"])
            boxes = "{train}/{val}".format(**entry["num_boxes"])
            classes = ", ".join(entry["classes"])
            rows.append(f"{entry['name']:<10}{images:>18}{boxes:>14}  {classes}")
        names = {name for entry in self.datasets for name in entry["classes"]}
        done = f"made in {self.seconds:.1f} s" if self.created else "already there"
        rows.append(f"{len(names)} distinct class names; {done}")
        return "\n".join(rows)


def generate_toy_mixture(
    out: Path,
    *,
    seed: int = 0,
    force: bool = False,
    specs: Sequence[DatasetSpec] = DATASETS,
) -> ToyReport:
    """Generate the toy mixture of small detection datasets.

    Equal arguments give equal files (with the same Pillow and NumPy). If `out` already
    holds this mixture, nothing is done. `force` replaces an earlier one, or writes into
    a folder with other content; only files of an earlier generation are ever deleted.

    Raises:
        ConfigError: If the seed is negative.
        DataError: If `out` holds something else and `force` is not set, or if foreign
            files are in the way.
    """
    if seed < 0:
        raise ConfigError(f"toy mixture: seed must be 0 or more, got {seed}")
    out = Path(out)
    sizes = {spec.name: [spec.num_train, spec.num_val] for spec in specs}
    key: dict[str, Any] = {"version": VERSION, "seed": seed, "sizes": sizes}
    if variants := {spec.name: spec.variant for spec in specs if spec.variant}:
        key["variants"] = variants
    held = _read_stamp(out)
    if held is not None and held["key"] == key and not force:
        return ToyReport(held["datasets"], seconds=0.0, created=False)
    files = [file for spec in specs for file in _file_names(spec)]
    _check_free(out, files, held, force=force)
    out.parent.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as name:
        made = Path(name) / "made"
        made.mkdir()
        entries = [write_dataset(made, spec, seed=seed) for spec in specs]
        _write_json(made / STAMP, {"key": key, "datasets": entries, "files": files})
        if held is not None:
            _remove(out, held["files"])
        if out.is_dir() and any(out.iterdir()):
            for file in (*files, STAMP):
                (out / file).parent.mkdir(parents=True, exist_ok=True)
                (made / file).rename(out / file)
        else:
            made.replace(out)
    return ToyReport(entries, seconds=time.perf_counter() - start, created=True)


def write_dataset(root: Path, spec: DatasetSpec, *, seed: int) -> dict[str, Any]:
    """Render a dataset into a new folder; return its entry of `ToyReport.datasets`."""
    (root / spec.name / "images").mkdir(parents=True)
    return {
        "name": spec.name,
        "num_images": {split: spec.num_images(split) for split in SPLITS},
        "num_boxes": {split: _write_split(root, spec, split, seed) for split in SPLITS},
        "classes": list(spec.classes),
    }


def render_image(
    spec: DatasetSpec, split: str, index: int, *, seed: int, renderer: Renderer
) -> Canvas:
    """Render an image with at least one object by a result of `spec.build_renderer`.

    The random generator depends on (seed, dataset, split, index) only, so an image does
    not change with the number or the order of the others.
    """
    key = [seed, zlib.crc32(spec.name.encode()), SPLITS.index(split), index]
    rng = np.random.default_rng(key)
    size_hw = _SIZES_HW[rng.integers(len(_SIZES_HW))]
    return renderer(size_hw, rng)


def _write_split(root: Path, spec: DatasetSpec, split: str, seed: int) -> int:
    """Write the images and the COCO json of a split; return the number of boxes."""
    folder = root / spec.name
    renderer = spec.build_renderer(split)
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for index in range(spec.num_images(split)):
        canvas = render_image(spec, split, index, seed=seed, renderer=renderer)
        picture, name = canvas.image(), f"{split}_{index:05d}.jpg"
        picture.save(folder / "images" / name, quality=60, optimize=True)
        size = {"width": picture.width, "height": picture.height}
        images.append({"id": index + 1, "file_name": name, **size})
        annotations += [
            {
                "id": number,
                "image_id": index + 1,
                "category_id": spec.classes.index(box.name) + 1,
                "bbox": box[1:],
                "area": box.width * box.height,
                "iscrowd": 0,
            }
            for number, box in enumerate(canvas.boxes(), len(annotations) + 1)
        ]
    info = {
        "description": f"damex toy mixture: {spec.name}, {split}",
        "version": VERSION,
        "seed": seed,
        "license": _LICENSE,
    }
    names = enumerate(spec.classes, start=1)
    content = {
        "info": info,
        "images": images,
        "annotations": annotations,
        "categories": [{"id": number, "name": name} for number, name in names],
    }
    _write_json(folder / f"{split}.json", content)
    return len(annotations)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, separators=(",", ":"))
    path.write_text(text + "\n", encoding="utf-8")


def _file_names(spec: DatasetSpec) -> list[str]:
    """List the files of a dataset, relative to the mixture's root."""
    return [f"{spec.name}/{split}.json" for split in SPLITS] + [
        f"{spec.name}/images/{split}_{index:05d}.jpg"
        for split in SPLITS
        for index in range(spec.num_images(split))
    ]


def _read_stamp(out: Path) -> dict[str, Any] | None:
    """The stamp of a folder; None without a valid one."""
    try:
        stamp = json.loads((out / STAMP).read_text(encoding="utf-8"))
        # The listed files may be deleted later, so accept no other paths.
        is_own = all(_OWN_FILE.fullmatch(file) for file in stamp["files"])
        return stamp if is_own and {"key", "datasets"} <= stamp.keys() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _check_free(
    out: Path, files: Sequence[str], held: dict[str, Any] | None, *, force: bool
) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"toy mixture: out={str(out)!r} is a file; name a folder")
    content = sorted(path.name for path in out.iterdir())
    if content and not force:
        what = "other content" if held is None else f"the mixture {held['key']}"
        raise DataError(
            f"toy mixture: folder {str(out)!r} already holds {what} "
            f"({', '.join(content[:5])}); name another folder, or replace it with "
            "--force (force=True), which deletes only files of an earlier mixture"
        )
    own = set() if held is None else {STAMP, *held["files"]}
    foreign = [f for f in (STAMP, *files) if f not in own and (out / f).exists()]
    if foreign:
        raise DataError(
            f"toy mixture: {len(foreign)} files in {str(out)!r} are in the way and "
            f"were not made here, first {foreign[0]!r}; move them or name another one"
        )


def _remove(out: Path, files: Sequence[str]) -> None:
    # Remove the stamp first: it marks a complete folder.
    for file in (STAMP, *files):
        (out / file).unlink(missing_ok=True)
    folders = {out / folder for file in files for folder in Path(file).parents}
    for folder in sorted(folders - {out}, key=lambda path: -len(path.parts)):
        with contextlib.suppress(OSError):  # not empty
            folder.rmdir()
